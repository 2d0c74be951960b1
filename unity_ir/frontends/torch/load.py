"""Import the model that `--from-torch=package.module:function` names."""

from __future__ import annotations

from typing import Any

from torch import nn

from unity_ir.frontends.load import NamedFunction
from unity_ir.frontends.torch.imported import Imported, from_torch


def from_text(text: str) -> Imported:
    """
    Call the function that `text` names as `package.module:function`, and import the PyTorch model that it returns.

    The function is called without arguments, and must return `(module, example inputs)` or `(module, example inputs,
    loss)`. The graph gets the function's name. Raises `UnityError` if the function does not exist, fails, or returns
    anything else, and as `from_torch` does.
    """
    function = NamedFunction("--from-torch", text)

    def convert(parts: tuple[Any, ...], name: str) -> Imported:
        wanted = "it must return (module, example inputs) or (module, example inputs, loss)"
        if len(parts) not in (2, 3):
            what = type(parts[0] if len(parts) == 1 else parts).__name__
            raise function.refuse(f"{text}() returned {what}; {wanted}")
        module, example_inputs, *loss = parts
        if not isinstance(module, nn.Module):
            what = type(module).__name__
            raise function.refuse(f"{text}() returned {what} first, which is no torch.nn.Module; {wanted}")
        return from_torch(module, example_inputs, *loss, name=name)

    return function.imported(convert)
