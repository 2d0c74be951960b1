"""Run `torch.export` on a module together with its loss, in training mode and before operators are decomposed."""

from __future__ import annotations

import inspect
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from io import StringIO
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils._pytree import tree_leaves

from unity_ir.errors import UnityError
from unity_ir.frontends.report import one_line, refuse
from unity_ir.frontends.torch import functions


@dataclass(frozen=True)
class Exported:
    """
    A module and its loss, exported as a graph of ATen operators, with the tensor or constant of each placeholder.

    The graph's only result is the loss.
    """

    module: fx.GraphModule
    loss: fx.Node
    inputs: Mapping[str, torch.Tensor]
    """Example inputs by placeholder, in order."""
    parameters: Mapping[str, tuple[str, nn.Parameter]]
    """Full name and parameter by placeholder. Tied parameters have one name, the first of `named_parameters`."""
    buffers: Mapping[str, tuple[str, torch.Tensor]]
    """Full name and tensor of buffers, and of lifted constants (whose name is empty), by placeholder."""
    constants: Mapping[str, Any]
    """Inputs that are no tensors, by placeholder."""
    state: Mapping[str, str]
    """Keys of the module's state dict that are no weight's name, each with the name of its tensor."""


class ModuleWithLoss(nn.Module):
    """
    A module and its loss, combined into one module that returns a scalar tensor.

    `loss` is called as `loss(output, *targets)`, where `targets` are the keyword arguments of these names. If it is
    None, the loss is in the module's output (`loss_in`). `forward` raises `UnityError` if the result is no scalar.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any] | None, targets: Sequence[str]):
        super().__init__()
        self.module = module
        self.loss = loss
        self.targets = targets

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        Call the module with `args` and `kwargs`, without the loss's targets, which are keyword arguments; return the
        loss of its output and the targets, a scalar tensor. Raises `UnityError` if the loss is no scalar tensor.
        """
        targets = [kwargs.pop(name) for name in self.targets]
        output = self.module(*args, **kwargs)
        loss = loss_in(output) if self.loss is None else self.loss(output, *targets)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = f"a tensor of {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            of = "the module's output" if self.loss is None else "the loss"
            raise refuse(f"{of} is {what}; it must be a scalar" + ("" if self.loss else ", or give a loss"))
        return loss


def loss_in(output: Any) -> Any:
    """
    Return the loss that a module's output contains: of a mapping or dataclass, the tensor called `loss`. Without one,
    it is the first tensor of the output; but if that is no scalar, and exactly one tensor of the output is a floating
    point scalar, as in `(logits, loss)`, it is that scalar.

    If the output has no tensor (an empty tuple, None), returns the output.
    """
    parts = _parts(output)
    if isinstance(named := dict(parts).get("loss"), torch.Tensor):
        return named
    tensors = list(_tensors(output))
    scalars = [t for t in tensors if not t.dim() and t.is_floating_point()]
    if tensors and tensors[0].dim() and len(scalars) == 1:
        return scalars[0]
    return tensors[0] if tensors else output


def _parts(output: Any) -> list[tuple[str, Any]]:
    """Return the members of a mapping, dataclass, tuple or list, with their names (positions)."""
    if isinstance(output, Mapping):
        return [(str(k), v) for k, v in output.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if is_dataclass(output):
        return [(f.name, getattr(output, f.name)) for f in fields(output)]
    if isinstance(output, tuple | list):
        return [(str(i), v) for i, v in enumerate(output)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return []


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    for _, part in _parts(output):
        yield from _tensors(part)


def export(module: nn.Module, example_inputs: Any, loss: Callable[..., Any] | None) -> Exported:
    """
    Export the forward of `module` and its loss by `torch.export`, on inputs like the example ones, as ATen operators.

    The module is put into training mode. `example_inputs` are a tensor, a tuple of positional arguments, or a dict of
    arguments by name; `loss` is called as `loss(output, *targets)`, and None takes the loss that is in the module's
    output (`loss_in`).

    Raises `UnityError` where the inputs do not fit the module, the result is no scalar, torch.export fails, a tensor of
    the module has a gradient hook, or an `autograd.Function` has a gradient that `functions.exported` cannot write in
    operators.
    """
    if not module.training:
        module.train()
    args, kwargs, targets = bind(module, example_inputs, loss)
    whole = ModuleWithLoss(module, loss, targets)
    _check_hooks(whole)
    try:
        with _quiet(), _seen_gradients(), _masks_as_given():
            program = torch.export.export(whole, args, kwargs, strict=False)
    except UnityError:
        raise
    except Exception as error:
        if "data-dependent" in str(error):
            why = "a branch or a shape depends on data; choose by torch.where, and give a mask in place of a selection"
            raise refuse(f"torch.export failed: {why}{_where(error)}") from error
        raise refuse(f"torch.export failed: {one_line(error)}{_where(error)}") from error
    return _read(program, whole, [*args, *kwargs.values()])


def _check_hooks(module: Any) -> None:
    """Raise `UnityError` for hooks on gradients, which torch.export does not see."""
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise refuse(f"module {name.removeprefix('module.')} has a backward hook, which cannot be imported")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            raise refuse(f"parameter {name.removeprefix('module.')} has a hook, which cannot be imported")


@contextmanager
def _seen_gradients() -> Generator[None]:
    """
    Refuse, in the `with` statement, custom gradients that an export would lose: of hooks, and of functions
    (`torch.autograd.Function`) that `functions.exported` cannot write in operators.
    """
    function: Any = torch.autograd.Function
    tensor: Any = torch.Tensor
    apply, register_hook = function.__dict__["apply"], tensor.register_hook

    def checked(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            return functions.exported(cls, args)
        return apply.__get__(None, cls)(*args, **kwargs)

    def refused(self: Any, hook: Any) -> Any:
        del self, hook
        raise refuse("a hook on the gradient of a tensor cannot be imported")

    function.apply, tensor.register_hook = classmethod(checked), refused
    try:
        yield
    finally:
        function.apply, tensor.register_hook = apply, register_hook


@contextmanager
def _masks_as_given() -> Generator[None]:
    """Keep `nn.Transformer`, in the `with` statement, from looking whether its masks are causal, a branch on data."""
    transformer: Any = torch.nn.modules.transformer
    detect = transformer._detect_is_causal_mask

    def as_told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        del mask, size
        return is_causal is True

    transformer._detect_is_causal_mask = as_told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress, in the `with` statement, what torch logs and prints about a failure before it raises the exception."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def bind(
    module: nn.Module, example_inputs: Any, loss: Callable[..., Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """
    Split `example_inputs` into (positional arguments, keyword arguments, names of the loss's targets) with which to
    call the module and its loss together (`ModuleWithLoss`).

    The loss's targets are its parameters without default, except the first, which takes the module's output; a `loss`
    of None has none. Their values are the last of a tuple of example inputs, or those with the same names in a dict,
    and are returned among the keyword arguments. A single tensor is a tuple of one. The module's own arguments are
    passed by keyword where its signature allows.

    Raises `UnityError` where the inputs do not fit the module's `forward`, or lack what the loss needs.
    """
    wanted = _targets(loss)
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    signature = inspect.signature(module.forward)
    if isinstance(example_inputs, Mapping):
        kwargs: dict[str, Any] = {str(k): v for k, v in example_inputs.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        missing = [name for name in wanted if name not in kwargs]
        if missing:
            raise refuse(f"the loss needs {', '.join(missing)}, which the example inputs do not have")
        given, named = (), {k: v for k, v in kwargs.items() if k not in wanted}
        targets = {name: kwargs[name] for name in wanted}
    elif isinstance(example_inputs, tuple | list):
        values: list[Any] = list(example_inputs)  # pyright: ignore[reportUnknownArgumentType]
        if len(values) < len(wanted):
            raise refuse(f"{len(values)} example inputs, but the loss alone needs {', '.join(wanted)}")
        count = len(values) - len(wanted)
        given, named, targets = tuple(values[:count]), {}, dict(zip(wanted, values[count:], strict=True))
    else:
        raise refuse(f"the example inputs are {type(example_inputs).__name__}; they must be a tensor, tuple or dict")
    try:
        bound = signature.bind(*given, **named)
    except TypeError as error:
        raise refuse(f"the example inputs do not fit {type(module).__name__}.forward: {error}") from error
    args, kwargs = _by_name(signature, bound)
    if taken := set(targets) & set(kwargs):
        raise refuse(f"module and loss both have an input {min(taken)!a}; rename one")
    seen: set[int] = set()
    kwargs = {k: _own(v, seen) for k, v in (kwargs | targets).items()}
    return tuple(_own(v, seen) for v in args), kwargs, list(targets)


def _own(value: Any, seen: set[int]) -> Any:
    """Return a tensor, cloned if it is among `seen` (ids) already: torch.export would make both one input."""
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) in seen:
        return value.clone()
    seen.add(id(value))
    return value


def _by_name(signature: inspect.Signature, bound: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments, all by keyword if possible, as placeholders are named after keywords."""
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    if any(kinds[n] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for n in bound.arguments):
        return bound.args, dict(bound.kwargs)
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        out.update(value if kinds[name] == inspect.Parameter.VAR_KEYWORD else {name: value})
    return (), out


def _targets(loss: Callable[..., Any] | None) -> list[str]:
    """Return the names of a loss's parameters without default, except the first, which is the module's output."""
    if loss is None:
        return []
    if not callable(loss):
        raise refuse(f"the loss is {type(loss).__name__}; it must be a function of outputs and targets")
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise refuse(f"Python does not know the parameters of {loss}; give a function that calls it") from error
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return needed[1:]


def _read(program: torch.export.ExportedProgram, whole: ModuleWithLoss, values: Sequence[Any]) -> Exported:
    names = {id(p): name for name, p in whole.module.named_parameters()}
    parameters: dict[str, tuple[str, nn.Parameter]] = {}
    buffers: dict[str, tuple[str, torch.Tensor]] = {}
    inputs: dict[str, torch.Tensor] = {}
    constants: dict[str, Any] = {}
    examples: Iterator[Any] = iter(tree_leaves(list(values)))
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, spec.target or ""
        match spec.kind:
            case InputKind.PARAMETER:
                parameter = whole.get_parameter(target)
                full = names.get(id(parameter), target)
                parameters[name] = full, parameter
            case InputKind.BUFFER:
                buffers[name] = target.removeprefix("module."), whole.get_buffer(target)
            case InputKind.CONSTANT_TENSOR:
                buffers[name] = "", program.constants[target]  # pyright: ignore[reportArgumentType]
            case InputKind.USER_INPUT if isinstance(spec.arg, ConstantArgument):
                constants[name] = spec.arg.value
                next(examples)
            case InputKind.USER_INPUT:
                inputs[name] = next(examples)
            case _:
                raise refuse(f"{name} is a {spec.kind.name.lower()}, which cannot be imported")
    (output,) = (n for n in program.graph.nodes if n.op == "output")
    (loss,) = output.args[0]
    if not isinstance(loss, fx.Node):
        raise refuse("the loss is a number that depends on nothing")
    return Exported(program.graph_module, loss, inputs, parameters, buffers, constants, _state(whole.module, names))


def _state(module: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    """Return the keys that are no weight's name, with their tensors: `{"head.weight": "table.weight"}`."""
    try:
        found: Mapping[str, Any] = module.state_dict(keep_vars=True)
    except Exception:  # a module's own hook; then it is no dict that could be loaded
        return {}
    state: dict[str, str] = {}
    for key, value in found.items():
        name = names.get(id(value), key)
        if not isinstance(value, torch.Tensor):
            continue
        is_weight = value.requires_grad or (isinstance(value, nn.Parameter) and value.is_floating_point())
        if name != key or not is_weight:
            state[key] = name
    return state


NOT_THE_MODEL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<")
"""Prefixes of files that are no part of a model: torch's, this package's, and generated code's."""

PYTHON = (os.path.dirname(os.__file__) + os.sep, os.path.join(os.path.dirname(os.__file__), "site-packages") + os.sep)
"""Folders of Python's library, and of installed packages in it, where models may be."""


def source_line(node: fx.Node) -> str:
    """
    Return the line of the model's source from which an exported operator came, as the text `file:line`: the innermost
    frame outside of torch and this package; `outside of the module` if there is none. Operators of another frontend
    carry it as `line` among their custom data.
    """
    if said := custom_data(node).get("line"):
        return str(said)
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [f for f in frames if not f[0].startswith(NOT_THE_MODEL)]
    return short_path(*outside[-1]) if outside else "outside of the module"


def custom_data(node: fx.Node) -> Mapping[str, Any]:
    """Return what `torch.fx.traceback.annotate` left with a node; {} if nothing."""
    return node.meta.get("custom") or {}


def _where(error: BaseException) -> str:
    library, installed = PYTHON
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THE_MODEL)]
    frames = [f for f in frames if not f.filename.startswith(library) or f.filename.startswith(installed)]
    return f" ({short_path(frames[-1].filename, str(frames[-1].lineno))})" if frames else ""


def short_path(file: str, line: str) -> str:
    """Return a line of a file as `file:line`, relative to the current directory if it is in it."""
    near = os.path.relpath(file)
    return f"{file if near.startswith('..') else near}:{line}"
