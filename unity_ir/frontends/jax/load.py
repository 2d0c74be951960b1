"""Import the loss that `--from-jax=package.module:function` names."""

from __future__ import annotations

from typing import Any

from unity_ir.frontends.jax.imported import ImportedLoss, from_jax
from unity_ir.frontends.load import NamedFunction


def from_text(text: str) -> ImportedLoss:
    """
    Call the function that `text` names as `package.module:function`, and import the loss of JAX that it returns.

    The function is called without arguments, and must return `(loss, arguments)`: a function, and the tuple of what it
    is called with, its weights first. The graph gets the name of the function that is called. Raises `UnityError` if
    that does not exist, fails, or returns anything else, and as `from_jax` does.
    """
    function = NamedFunction("--from-jax", text)

    def convert(parts: tuple[Any, ...], name: str) -> ImportedLoss:
        wanted = "it must return (loss, (weights, batch, ..))"
        if len(parts) != 2 or not callable(parts[0]) or not isinstance(parts[1], tuple | list):
            shown = ", ".join(type(part).__name__ for part in parts)
            raise function.refuse(f"{text}() returned {shown}; {wanted}")
        loss, arguments = parts
        return from_jax(loss, arguments, name)

    return function.imported(convert)
