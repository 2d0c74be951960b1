"""
Import an exported graph operator by operator: those that depend on no input and no parameter are folded (computed at
import), the others mapped (translated to the compiler's operators).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from unity_ir.errors import UnityError
from unity_ir.frontends.torch import maps as _maps
from unity_ir.frontends.torch.aliases import needed, stale, written
from unity_ir.frontends.torch.export import Exported, place
from unity_ir.frontends.torch.padded import PADDED, Padded
from unity_ir.frontends.torch.report import Report, one_line, refuse
from unity_ir.frontends.torch.site import MAPPINGS, CallSite, Tables
from unity_ir.frontends.torch.values import element_type, like, op
from unity_ir.pcg.graph import Node, Value, leaf
from unity_ir.pcg.types import tensor_type

del _maps

IGNORED = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}
"""Checks that torch.export has made already."""

BY_SHAPE = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("zero_", "fill_", "zero", "fill"),
}
"""Operators that use only the shape and element type of their first operand, and so are always folded."""


READ_PADDED = {
    *("view", "reshape", "_unsafe_view", "flatten", "contiguous", "clone", "alias", "to", "slice"),
    *("cross_entropy_loss", "nll_loss", "nll_loss_nd"),
}
"""Operators that accept `Padded` labels."""


class Missing:
    """
    Placeholder for the result of an operator that cannot be imported; for operators that read it, only that they have a
    mapping is checked.
    """


class Importer:
    """
    Builds the graph of one exported module; collects its inputs, weights and tables (inputs whose values come with the
    module), and reports the operators that cannot be imported.
    """

    def __init__(self, exported: Exported, name: str):
        self.exported = exported
        self.report = Report(name)
        self.tables = Tables()
        self.inputs: dict[str, Node] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self._seeds = 0
        self._buffers: list[torch.Tensor] = []
        """Named tensors, kept alive since `tables` identifies them by `id`."""
        self._trained: dict[Node, bool] = {}

    def loss(self) -> Value:
        """
        Import the exported module, and return its loss, from which the whole graph is reached, as a value of the graph.

        Raises `UnityReport` with every operator that has no mapping, and `UnityError` if the loss depends on no weight.
        """
        graph = self.exported.module.graph
        given = {n: self.placeholder(n) for n in graph.nodes if n.op == "placeholder" and n.users}
        (loss,) = self.run(self.exported.module, given, [self.exported.loss])
        self.report.check()
        if not isinstance(loss, Value) or not self.trained(loss):
            raise refuse(f"no trained parameter reaches the loss of {self.report.name}")
        return loss

    def placeholder(self, node: fx.Node) -> Any:
        """
        Return what a placeholder node of the exported graph stands for: a value of the graph (of a parameter or an
        input), or, for buffers and constants, a tensor or other object, with which operators are computed at import.

        An element type that the compiler does not have is reported, and `Missing` returned.
        """
        name = str(node.target)
        try:
            if name in self.exported.parameters:
                return self.parameter(*self.exported.parameters[name])
            if name in self.exported.buffers:
                full, tensor = self.exported.buffers[name]
                # A copy, for what the model does to it in place must not reach the module.
                tensor = tensor.detach().clone()
                if full:
                    self.tables.names[id(tensor)] = full
                    self._buffers.append(tensor)
                return tensor
            if name in self.exported.inputs:
                tensor = self.exported.inputs[name]
                self.inputs[name] = leaf("input", _type(tensor), name=name)
                return self.inputs[name].result
        except UnityError as error:
            self.report.add(f"input {name}", one_line(error), "an argument of the module")
            return Missing()
        return self.exported.constants[name]

    def parameter(self, name: str, parameter: torch.nn.Parameter) -> Value:
        """
        Return the graph's value for a PyTorch parameter, whose full name in the module is `name`: a weight, or, for a
        frozen parameter (`requires_grad` False), an input whose values come with the module (a table).
        """
        tensor = parameter.detach()
        if not parameter.requires_grad:
            self.tables.names[id(tensor)] = name
            self._buffers.append(tensor)
            return self.tables.add(tensor)
        self.weights[name] = tensor
        return leaf("weight", _type(tensor), name=name).result

    def trained(self, value: Value) -> bool:
        """
        Return whether a gradient flows through a value to some weight: whether it depends on one other than through
        `detach`.
        """
        stack = [value.node]
        while stack:
            node = stack[-1]
            if node in self._trained:
                stack.pop()
                continue
            before = [v.node for v in node.operands if v.node not in self._trained]
            if before:
                stack += before
                continue
            through = node.op != "detach" and any(self._trained[v.node] for v in node.operands)
            self._trained[node] = node.op == "weight" or through
        return self._trained[value.node]

    def run(self, module: fx.GraphModule, given: Mapping[fx.Node, Any], wanted: Sequence[Any]) -> list[Any]:
        """
        Import the operators of a module's graph, or of a subgraph, that the nodes `wanted` need; return what these
        nodes stand for, in order: values of the compiler's graph, tensors and numbers computed at import, or `Missing`
        (an operator could not be imported).

        `given` maps the graph's placeholders to what they stand for. Entries of `wanted` that are no nodes are returned
        as they are.
        """
        env: dict[fx.Node, Any] = dict(given)
        kept = needed(module.graph, [n for n in wanted if isinstance(n, fx.Node)])
        torn = stale(module.graph, kept)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                env[node] = _attribute(module, str(node.target))
            elif node.op == "call_function" and node in kept:
                env[node] = self.call(node, env, torn)
        return [env[n] if isinstance(n, fx.Node) else n for n in wanted]

    def call(self, node: fx.Node, env: Mapping[fx.Node, Any], torn: Mapping[fx.Node, fx.Node]) -> Any:
        """
        Import one operator: compute it now if it depends on no input and no weight, else map it; return its value or
        values. If it cannot be imported, report it and return `Missing`.

        `env` maps earlier nodes to what they stand for. `torn` maps in-place operators that must be refused to a later
        node that reads what they write by another name (see `stale`).
        """
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.get)
        name = _operator_name(node)
        values = [v for v in _flat((args, kwargs)) if isinstance(v, Value | Padded)]
        is_missing = any(isinstance(v, Missing) for v in _flat((args, kwargs)))
        try:
            if name in IGNORED:
                return None
            if is_missing and (node.target is operator.getitem or _out_of_place(node) in MAPPINGS):
                return Missing()
            if node.target is operator.getitem:
                return self.item(args)
            if isinstance(node.target, torch._ops.HigherOrderOperator):  # pyright: ignore[reportPrivateUsage]
                return self.inline(node, args)
            _check_static(node)
            if values and node in torn:
                raise UnityError(f"it writes in place into memory that {place(torn[node])} reads by another name")
            if values and name in BY_SHAPE and isinstance(args[0], Value):
                args = [torch.empty_like(like(args[0]), device="cpu"), *args[1:]]
                values = [v for v in _flat((args, kwargs)) if isinstance(v, Value | Padded)]
            if not values and not is_missing:
                for target in map(env.get, written(node)):
                    if isinstance(target, torch.Tensor):
                        self.tables.keep(target)
                return _fold(node, args, kwargs)
            return self.map(node, args, kwargs)
        except UnityError as error:
            shown = "control flow " + name if isinstance(node.target, torch._ops.HigherOrderOperator) else _shown(node)  # pyright: ignore[reportPrivateUsage]
            self.report.add(shown, str(error), place(node))
            return Missing()

    def item(self, args: Sequence[Any]) -> Any:
        """
        Return one result of an operator with several, as `getitem` selects it; `args` are (the operator's imported
        results, index).

        Raises `UnityError` if that result has no mapping.
        """
        whole, at = args
        if whole[at] is None:
            raise UnityError(f"result {at} has no mapping")
        return whole[at]

    def map(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """
        Call the mapping registered for the ATen operator of `node` with the arguments `args` and `kwargs`, which are
        imported already; return its value or values.

        Raises `UnityError` if the operator has no mapping, or the mapping refuses it.
        """
        name = _out_of_place(node)
        if name not in MAPPINGS:
            raise UnityError("no mapping")
        if name not in READ_PADDED and any(isinstance(v, Padded) for v in _flat((args, kwargs))):
            raise UnityError(PADDED)
        site = CallSite(node.meta.get("val"), self.tables, self.trained, self.seed, self.exported.inputs)
        for tensor in _flat(node.meta.get("val")):
            if isinstance(tensor, torch.Tensor):
                element_type(tensor.dtype)
        try:
            out = MAPPINGS[name](site, *args, **kwargs)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Arguments that no mapping was written for, such as dims of a scalar.
            raise UnityError("its mapping does not take these arguments") from error
        check(node, out)
        return out

    def seed(self) -> int:
        """Return a new seed for a random operator: 0, 1, 2, ..."""
        self._seeds += 1
        return self._seeds - 1

    def inline(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """
        Import an operator that holds a subgraph (set_grad_enabled, disabled autocast, checkpointing) by importing the
        subgraph in its place; `args` are the node's arguments, imported already.

        Returns its value or values. Raises `UnityError` for other operators with subgraphs, such as control flow.
        """
        name = _operator_name(node)
        if name == "wrap_with_set_grad_enabled":
            is_on, module, *operands = args
        elif name == "wrap_with_autocast" and not args[2]:
            is_on, module, *operands = (True, *args[4:])
        elif name == "tag_activation_checkpoint":
            is_on, module, *operands = (True, *args)
        else:
            raise UnityError("has no mapping; torch.export must see one way only")
        graph = module.graph
        places = [n for n in graph.nodes if n.op == "placeholder"]
        (output,) = (n for n in graph.nodes if n.op == "output")
        results: Any = output.args[0]
        many = not isinstance(results, fx.Node)
        out = self.run(module, dict(zip(places, operands, strict=True)), list(results) if many else [results])
        if not is_on:
            out = [op("detach", v) if isinstance(v, Value) and self.trained(v) else v for v in out]
        return out if many else out[0]


def _fold(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """
    Compute the operator of `node`, which depends on no input and no parameter, in PyTorch, at import; return its
    result. `args` and `kwargs` are its arguments, tensors and numbers.

    Raises `UnityError` for random operators, and where PyTorch fails.
    """
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        raise UnityError("draws random numbers; give them as an input")
    try:
        with torch.no_grad():
            return target(*args, **kwargs)
    except Exception as error:
        raise UnityError(f"cannot be computed at import: {one_line(error)}") from error


def _check_static(node: fx.Node) -> None:
    """
    Raise `UnityError` for an operator whose result is of a dynamic shape, or a number known only at run time (dependent
    on data).
    """
    for tensor in _flat(node.meta.get("val")):
        if isinstance(tensor, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnityError("its result is a number that depends on data; only fixed shapes can be imported")
        if isinstance(tensor, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in tensor.shape):
            raise UnityError("the shape of its result is dynamic; only fixed shapes can be imported")


def check(node: fx.Node, out: Any) -> None:
    """
    Assert that the results of a mapping, `out`, have the shapes and element types that PyTorch recorded for the node.

    A failure is a bug of the mapping, not an error in the input.
    """
    meta: Any = node.meta.get("val")
    many = not isinstance(meta, torch.Tensor)
    for value, tensor in zip(out if many else [out], meta if many else [meta], strict=True):
        if isinstance(value, Value):
            assert value.type == _type(tensor), f"{node.target} became {value.type}, PyTorch has {_type(tensor)}"


def _operator_name(node: fx.Node) -> str:
    """Return an operator's name without namespace and overload: given `aten.linear.default`, `linear`."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def _out_of_place(node: fx.Node) -> str:
    """Return an operator's name, without the `_` of in-place operators: given `aten.add_.Tensor`, `add`."""
    name = _operator_name(node)
    return name.rstrip("_") if written(node) else name


def _shown(node: fx.Node) -> str:
    return str(node.target) if hasattr(node.target, "overloadpacket") else _operator_name(node)


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _type(tensor: torch.Tensor) -> Any:
    return tensor_type(tuple(tensor.shape), element_type(tensor.dtype))


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for v in tree.values() for leaf in _flat(v)]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, tuple | list):
        return [leaf for v in tree for leaf in _flat(v)]  # pyright: ignore[reportUnknownVariableType]
    return [tree]
