"""
Make the module to plan of what a caller names: a PyTorch module, a loss of JAX, a model of the zoo, a file, or text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from xdsl.dialects.builtin import ModuleOp

from unity_ir.api.graphs import SUFFIXES
from unity_ir.api.modules import parsed, read_file
from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph

if TYPE_CHECKING:
    from torch import nn

    from unity_ir.frontends.torch import Imported


@dataclass(frozen=True)
class Source:
    """
    The MLIR module (`ModuleOp`) of a model to plan, before any pass: its name in messages, and its import if it is a
    PyTorch module or a loss of JAX.
    """

    name: str
    """How messages call it: a file's name, a model's, a PyTorch module's class, or a function's name."""
    module: ModuleOp
    imported: Imported | None = None
    """The import of a PyTorch module or a loss of JAX: its graph, weights and names; None for other models."""


def module_of_graph(graph: Graph) -> ModuleOp:
    """
    Return an MLIR module whose one function is `graph`. Raises `UnityError` for empty names and names with invisible
    characters, which text cannot hold.
    """
    from unity_ir.dialects.convert import from_graph

    return ModuleOp([from_graph(graph)])


def module_of_imported(imported: Imported) -> ModuleOp:
    """
    Return an MLIR module whose one function is the graph of an imported model. The function's attribute
    `pcg.imported` has the names of its tables (inputs whose values come with the model) and of tied weights.
    """
    from unity_ir.dialects.convert import from_graph
    from unity_ir.dialects.imported import IMPORTED, origin_attribute

    function = from_graph(imported.graph)
    function.attributes[IMPORTED] = origin_attribute(imported.origin)
    return ModuleOp([function])


def source_of(
    model: nn.Module | Callable[..., Any] | str | Path,
    inputs: object = None,
    loss: Callable[..., Any] | None = None,
    name: str | None = None,
    sizes: Mapping[str, int | str] | None = None,
) -> Source:
    """
    Return the MLIR module of `model`, with its name in messages (`Source`). `model` is a PyTorch module, with example
    `inputs` and a `loss` as `frontends.torch.from_torch` takes them and the `name` of its graph; or a model of the zoo,
    as `--model` names it, with `sizes` that replace its own; or the path of a file that ends in `.pcg` or `.mlir`; or
    the text of such a file (several lines). Another function is a loss of JAX, with the arguments that it is called
    with as `inputs`, as `frontends.jax.from_jax` takes them.

    Raises `UnityError` where it is none of these, cannot be read or imported, and for arguments that belong to another
    kind of model.
    """
    sizes = dict(sizes or {})
    if not isinstance(model, str | Path):
        if sizes:
            raise UnityError(f"plan: {next(iter(sizes))} is no argument of plan for a PyTorch module; leave it out")
        if _is_function(model):
            return _jax_source(model, inputs, loss, name)
        return _torch_source(model, inputs, loss, name)
    for argument, value in (("inputs", inputs), ("loss", loss), ("name", name)):
        if value is not None:
            shown = ascii(str(model)[:60])
            raise UnityError(f"plan: {argument} is of a module or a function, which {shown} is not; leave it out")
    text = str(model)
    is_text = isinstance(model, str) and "\n" in model
    if is_text or isinstance(model, Path) or text.endswith(SUFFIXES):
        if sizes:
            raise UnityError(f"plan: {next(iter(sizes))} is a size of a model of the zoo; leave it out")
        return Source("<text>", parsed(text.encode(), "<text>")) if is_text else file_source(model)
    from unity_ir.models import from_text

    said = ",".join([text, *(f"{key}={value}" for key, value in sizes.items())])
    return Source(said, module_of_graph(from_text(said)))


def file_source(path: str | Path) -> Source:
    """
    Return the MLIR module in a file, with the file's name (`Source`). Raises `UnityError` for wrong text, and if the
    file cannot be read.
    """
    try:
        return Source(str(path), read_file(path))
    except OSError as error:
        raise UnityError(f"{path}: {error.strerror or error}") from error


def _is_function(model: object) -> bool:
    """Return whether a model is called, and is no PyTorch module (looking which does not import PyTorch)."""
    torch = sys.modules.get("torch")
    return callable(model) and not isinstance(model, type) and not (torch and isinstance(model, torch.nn.Module))


def _jax_source(function: Callable[..., Any], inputs: object, loss: object, name: str | None) -> Source:
    from unity_ir.frontends.jax import from_jax

    if loss is not None:
        raise UnityError("plan: loss is of a PyTorch module; a function of JAX returns its loss")
    if not isinstance(inputs, tuple | list):
        raise UnityError("plan: inputs of a function of JAX are what it is called with: (weights, batch, ..)")
    imported = from_jax(function, cast("tuple[Any, ...] | list[Any]", inputs), name)
    return Source(imported.graph.name, module_of_imported(imported), imported)


def _torch_source(module: object, inputs: object, loss: Callable[..., Any] | None, name: str | None) -> Source:
    from torch import nn

    from unity_ir.frontends.torch import from_torch

    if not isinstance(module, nn.Module):
        kinds = "a torch.nn.Module, a loss function of JAX, the name of a model, a file or its text"
        raise UnityError(f"plan: the model is {type(module).__name__}; it must be {kinds}")
    if inputs is None:
        raise UnityError("plan: inputs are missing; give an example of what the module is called with: a whole batch")
    # The import puts the module into training mode.
    modes = {child: child.training for child in module.modules()}
    try:
        imported = from_torch(module, inputs, loss, name)
    finally:
        for child, mode in modes.items():
            child.training = mode
    return Source(type(module).__name__, module_of_imported(imported), imported)
