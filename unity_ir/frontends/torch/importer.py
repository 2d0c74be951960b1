"""
Import an exported graph operator by operator: those that depend on no input and no parameter are folded (computed at
import), the others mapped (translated to the compiler's operators).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from unity_ir.errors import UnityError
from unity_ir.frontends.report import Report, one_line, refuse
from unity_ir.frontends.torch import maps as _maps
from unity_ir.frontends.torch.aliases import Layout, Memories, layout, returns_written, written
from unity_ir.frontends.torch.complexes import Complex, complex_view, in_parts, is_complex, real_view
from unity_ir.frontends.torch.decompose import decompose
from unity_ir.frontends.torch.export import Exported, custom_data, source_line
from unity_ir.frontends.torch.memory import Memory
from unity_ir.frontends.torch.padded import Padded
from unity_ir.frontends.torch.site import COMPLEX, MAPPINGS, CallSite, Tables
from unity_ir.frontends.torch.values import element_type, like, op
from unity_ir.pcg.freeze import frozen
from unity_ir.pcg.node import Node, Value, leaf
from unity_ir.pcg.types import tensor_type

del _maps

UNFORESEEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that mappings raise for arguments that they were not written for, such as dims of a scalar."""
IGNORED = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}
"""Checks that torch.export has made already."""

BY_SHAPE = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("zero_", "fill_", "zero", "fill", "copy_", "copy"),
}
"""Operators that use only the shape and element type of their first operand."""


READ_PADDED = {
    *("view", "reshape", "_unsafe_view", "flatten", "contiguous", "clone", "alias", "to", "slice"),
    *("cross_entropy_loss", "nll_loss", "nll_loss_nd"),
}
"""Operators that accept `Padded` labels."""


class Missing:
    """
    Stands for the result of an operator that cannot be imported. The import goes on, so that one error lists all such
    operators: an operator that reads it is only checked to have a mapping.
    """


class Importer:
    """
    Builds the graph of one exported module: call `loss`, once. Then `inputs`, `weights` and `tables` (inputs whose
    values come with the module, such as buffers) hold what the graph reads, and `report` the operators that cannot be
    imported.
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
        self._keys = Memories()
        self._memories: dict[int, Memory] = {}
        self._seen: dict[fx.Node, int] = {}
        """The number of writes into its memory after which each node's value was taken."""
        self._parts: list[fx.GraphModule] = []
        """Graphs of decomposed operators; freed, their tensors' addresses could be those of other memories."""
        self._detached: set[fx.Node] = set()
        """Nodes that see a memory through `detach`."""
        self._no_grad = 0
        """How many `no_grad` regions are being imported, one within the other."""

    def loss(self) -> Value:
        """
        Import the exported module; return its loss as a value of the compiler's graph, from which the whole graph can
        be reached.

        Raises `UnityReport` with every operator that has no mapping, and `UnityError` if the loss depends on no trained
        weight.
        """
        graph = self.exported.module.graph
        self._keys.unite(graph)
        given = {n: self.placeholder(n) for n in graph.nodes if n.op == "placeholder" and n.users}
        (loss,) = self.run(self.exported.module, given, [self.exported.loss])
        self.report.check()
        if not isinstance(loss, Value) or not self.trained(loss):
            raise refuse(f"no trained parameter reaches the loss of {self.report.name}")
        return loss

    def placeholder(self, node: fx.Node) -> Any:
        """
        Return what a placeholder of the exported graph is imported as: a value of the compiler's graph, if it is a
        parameter or an input of the module; a tensor, if it is a buffer or a constant tensor; and a constant that is no
        tensor (such as a number), as it is.

        If the element type is one that the compiler does not have, adds that to `report` and returns a `Missing`, which
        stands for what cannot be imported.
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
        Add a PyTorch parameter to the graph, and return its value there. `name` is its full name in the module.

        It becomes a weight, in `weights`: a frozen one, if its `requires_grad` is False. Frozen integers become a
        table, an input whose values come with the module, in `tables`. Its data are not copied.
        """
        tensor = parameter.detach()
        if not tensor.is_floating_point():
            self.tables.names[id(tensor)] = name
            self._buffers.append(tensor)
            return self.tables.add(tensor)
        self.weights[name] = tensor
        made = leaf("weight", _type(tensor), name=name)
        return (made if parameter.requires_grad else frozen(made)).result

    def trained(self, value: Value) -> bool:
        """
        Return whether the value depends on some trained weight other than through `detach`, so that a gradient flows
        through it.
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
            self._trained[node] = node.is_trained or through
        return self._trained[value.node]

    def run(self, module: fx.GraphModule, given: Mapping[fx.Node, Any], wanted: Sequence[Any]) -> list[Any]:
        """
        Import the operators of `module`'s graph, the exported one or a subgraph, that are needed to compute the nodes
        `wanted`; return the result of each of these, in order.

        A result is a value of the compiler's graph, a tensor or number computed at import, or `Missing` if an operator
        could not be imported. `given` maps the graph's placeholders to such results. Entries of `wanted` that are no
        nodes are returned as they are.
        """
        env: dict[fx.Node, Any] = dict(given)
        for node, value in given.items():
            self.remember(node, value)
        is_whole = module is self.exported.module
        outer = set[int]() if is_whole else {key for n in given for key in self._keys.all_of(n)}
        kept = self._keys.needed(module.graph, [n for n in wanted if isinstance(n, fx.Node)], outer)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                env[node] = _attribute(module, str(node.target))
            elif node.op == "call_function" and node in kept:
                env[node] = self.call(node, env)
                self.remember(node, env[node])
        return [self.present(n, env) if isinstance(n, fx.Node) else n for n in wanted]

    def remember(self, node: fx.Node, value: Any) -> None:
        """
        Record that the imported result `value` of a node that was just run has all writes in place that were made so
        far: `present` reads it from its memory again only after a later write. If the node is the first whose tensor
        has this memory, `value` becomes the contents of the memory. Does nothing for nodes that do not compute exactly
        one tensor.
        """
        key, lies = self._keys.of(node), layout(node)
        if key is not None and lies is not None:
            memory = self._memories.setdefault(key, Memory(lies, value))
            self._seen[node] = memory.writes
            if self._is_detached(node, key):
                self._detached.add(node)

    def _is_detached(self, node: fx.Node, key: int) -> bool:
        """Return whether a node sees its memory, `key`, through `detach`: its own, or one before it."""
        return _operator_name(node) in ("detach", "detach_") or any(
            n in self._detached and key in self._keys.all_of(n) for n in node.all_input_nodes
        )

    def present(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """
        Return the imported result of a node as it is now. `env` maps nodes to their results as last read; if the node's
        memory has been written in place since, its result is read from the memory again, and its entry of `env`
        replaced.
        """
        key, lies = self._keys.of(node), layout(node)
        memory = None if key is None else self._memories.get(key)
        if memory is not None and lies is not None and prod(lies.size) and self._seen.get(node) != memory.writes:
            is_missing = isinstance(memory.contents, Missing)
            env[node] = memory.contents if is_missing else self._read(node, memory, lies)
            self._seen[node] = memory.writes
        return env.get(node)

    def _read(self, node: fx.Node, memory: Memory, lies: Layout) -> Any:
        """
        Return the elements of a memory that a node's tensor has, which has the layout `lies`. Raises `UnityError` for a
        conjugate, and what else PyTorch only notes: of what was written it would be another one.
        """
        value: Any = node.meta["val"]
        if value.is_conj() or value.is_neg():
            raise UnityError("it is read after a write in place into what it is a conjugate of; resolve_conj it before")
        site = self.site(node)
        memory.contents = real_view(site, memory.contents)
        found = memory.read(site, lies)
        found = complex_view(found) if is_complex(node) else found
        return self.detached(found) if node in self._detached else found

    def write(self, node: fx.Node, value: Any) -> None:
        """
        Write `value` into the memory of the tensor that a node computes, in place of that tensor's elements; `value`
        has the tensor's shape. If `value` or the memory's contents are `Missing` (the result of an operator that cannot
        be imported), the whole memory becomes `Missing`.

        Raises `UnityError` for a write under `no_grad`, or into a tensor made by `detach`, where the memory has a
        gradient: PyTorch changes the numbers then, but not the gradient.
        """
        key, lies = self._keys.of(node), layout(node)
        assert key is not None
        assert lies is not None
        if not prod(lies.size):
            return
        memory = self._memories[key]
        if isinstance(value, Missing) or isinstance(memory.contents, Missing):
            memory.contents = Missing()
            memory.writes += 1
            return
        site = self.site(node)
        memory.contents, value = (real_view(site, v) for v in (memory.contents, value))
        is_hidden = self._no_grad or node in self._detached
        if is_hidden and isinstance(memory.contents, Value) and self.trained(memory.contents):
            raise UnityError("it writes under no_grad or detach into a tensor that has a gradient; clone it before")
        if isinstance(memory.contents, Padded):
            memory.contents = memory.contents.filled()
        memory.write(site, lies, self.detached(value) if self._no_grad else value)

    def site(self, node: fx.Node) -> CallSite:
        """
        Return what the mapping of a node's operator gets as first argument: a `CallSite`, which has the shape and
        element type of the result that PyTorch recorded, and makes operands values of the compiler's graph.
        """
        return CallSite(node.meta.get("val"), self.tables, self.trained, self.seed, self.exported.inputs)

    def call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """
        Import one operator, and record what it writes in place; return its result or results. If it cannot be imported,
        add it to `report` and return `Missing`.

        An operator that depends on no input and no weight is computed now, others are mapped to the compiler's
        operators. `env` maps earlier nodes to their imported results.
        """
        try:
            out = self.result(node, env)
            if returns_written(node):
                self.write(written(node)[0], out)
            return out
        except UnityError as error:
            shown = "control flow " + _operator_name(node) if _is_control_flow(node) else _shown(node)
            self.report.add(shown, str(error), source_line(node))
        if returns_written(node):
            self.write(written(node)[0], Missing())
        return Missing()

    def result(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """
        Return the result or results of one operator, without recording what it writes in place. `env` maps earlier
        nodes to their imported results.

        If an operand is a value of the compiler's graph, or random numbers are drawn, the result is a value of the
        graph; else it is what PyTorch computes now. It is None for checks that torch.export has made already, and a
        `Missing` if an operand is one (the result of an operator that could not be imported). Raises `UnityError` if
        this operator cannot be imported.
        """
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.present(n, env))
        name = _operator_name(node)
        if name in IGNORED:
            return None
        is_missing = any(isinstance(v, Missing) for v in _flat((args, kwargs)))
        is_known = node.target is operator.getitem or _out_of_place(node) in {*MAPPINGS, *COMPLEX, *BY_SHAPE}
        if is_missing and (is_known or _dynamic(node)):
            return Missing()
        if node.target is operator.getitem:
            return self.item(args)
        if _is_control_flow(node):
            return self.inline(node, args)
        if (why := _dynamic(node)) is not None:
            raise UnityError(why)
        if name in BY_SHAPE and isinstance(args[0], Value | Complex):
            args = [_blank(args[0], node.args[0]), *args[1:]]
        if not is_missing and _is_empty(node):
            return torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        depends = any(isinstance(v, Value | Padded | Complex) for v in _flat((args, kwargs)))
        if is_missing or _is_random(node) or depends:
            return self.map(node, args, kwargs)
        return _fold(node, args, kwargs)

    def item(self, args: Sequence[Any]) -> Any:
        """
        Return one of several results of an operator, as Python's `getitem` selects it: `args` are (the operator's
        imported results, index).

        Raises `UnityError` if that result has no mapping.
        """
        whole, at = args
        if whole[at] is None:
            raise UnityError(f"result {at} has no mapping")
        return whole[at]

    def map(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """
        Call the mapping registered for the ATen operator of `node` with its imported arguments `args` and `kwargs`;
        return its result or results. If there is no mapping, or it refuses these arguments, the operator is taken apart
        by PyTorch's decompositions, and its parts are imported.

        Raises `UnityError` if that fails as well.
        """
        name = _out_of_place(node)
        args, kwargs = pytree.tree_map(in_parts, (args, kwargs))
        has_complex = any(isinstance(v, Complex) for v in _flat((args, kwargs)))
        if name in COMPLEX and (has_complex or is_complex(node)):
            return self.mapped_parts(node, name, args, kwargs)
        if name in MAPPINGS and has_complex:
            raise UnityError("no mapping of complex numbers; compute with their real view, torch.view_as_real")
        if name not in MAPPINGS and (view := self.view(node)) is not None:
            return view
        taken = decompose(node) if name not in MAPPINGS else None
        if taken is not None:
            is_missing = any(isinstance(v, Missing) for v in _flat((args, kwargs)))
            return Missing() if is_missing else self.decomposed(*taken, node, args, kwargs)
        if name not in MAPPINGS:
            random = "; draw its random numbers before, and give them as an input" if _is_random(node) else ""
            raise UnityError(f"no mapping{random}")
        try:
            return self.mapped(node, name, args, kwargs)
        except UnityError:
            if (taken := decompose(node)) is None:
                raise
            with suppress(UnityError):
                return self.decomposed(*taken, node, args, kwargs)
            raise

    def mapped(self, node: fx.Node, name: str, args: Any, kwargs: Any) -> Any:
        """
        Call the mapping registered under `name` for the ATen operator of `node`, with its imported arguments `args` and
        `kwargs`; return its result or results. Raises `UnityError` where the mapping does not take these arguments, or
        a result has an element type that the compiler does not have.
        """
        if name not in READ_PADDED:
            args, kwargs = pytree.tree_map(_filled, (args, kwargs))
        site = self.site(node)
        for tensor in _flat(node.meta.get("val")):
            if isinstance(tensor, torch.Tensor):
                element_type(tensor.dtype)
        try:
            try:
                out = MAPPINGS[name](site, *args, **kwargs)
            except UNFORESEEN:
                # Most mappings take values of the graph where a tensor that is known at import is rare.
                args, kwargs = pytree.tree_map_only(torch.Tensor, site.value, (args, kwargs))
                out = MAPPINGS[name](site, *args, **kwargs)
        except UNFORESEEN as error:
            raise UnityError("its mapping does not take these arguments") from error
        check(node, out)
        return out

    def mapped_parts(self, node: fx.Node, name: str, args: Any, kwargs: Any) -> Any:
        """
        Call the mapping registered in `COMPLEX` for the ATen operator of `node`, whose operands or result are complex
        numbers, with its imported arguments; return its result or results. Raises `UnityError` where the mapping does
        not take these arguments.
        """
        try:
            out = COMPLEX[name](self.site(node), *args, **kwargs)
        except UNFORESEEN as error:
            raise UnityError("its mapping of complex numbers does not take these arguments") from error
        check(node, out)
        return out

    def view(self, node: fx.Node) -> Value | Complex | None:
        """
        Import an operator without mapping that makes a view, such as `as_strided`: return the view's elements as a
        value of the compiler's graph, selected by the view's strides from the value that its memory holds. None for an
        operator that makes no view, or if the memory holds no value of the graph.
        """
        key, lies = self._keys.of(node), layout(node)
        memory = None if key is None or written(node) else self._memories.get(key)
        if key is None or memory is None or lies is None or not isinstance(memory.contents, Value | Complex):
            return None
        memory.contents = real_view(self.site(node), memory.contents)
        found = memory.read(self.site(node), lies)
        if not isinstance(found, Value):
            return None
        found = complex_view(found) if is_complex(node) else found
        return self.detached(found) if self._is_detached(node, key) else found

    def decomposed(
        self, module: fx.GraphModule, operands: Sequence[fx.Node], node: fx.Node, args: Any, kwargs: Any
    ) -> Any:
        """
        Import, in place of the operator of `node`, the operators that `decompose` took it apart into; return its result
        or results. `module` is their graph, and `operands` are the nodes of `node`'s arguments in the order of the
        graph's placeholders; `args` and `kwargs` are the imported arguments.

        Raises `UnityError` if some of these operators have no mapping, and names them.
        """
        self._parts.append(module)
        values = dict(zip(pytree.tree_leaves((node.args, node.kwargs)), _leaves((args, kwargs)), strict=True))
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        results, spec = pytree.tree_flatten(output.args[0])
        report, self.report = self.report, Report("")
        try:
            out = self.run(module, {p: values[n] for p, n in zip(places, operands, strict=True)}, results)
            missing = self.report.operators()
        finally:
            self.report = report
        if missing:
            raise UnityError(f"no mapping, as it is made of {', '.join(missing)}, without one")
        return pytree.tree_unflatten(out, spec)

    def seed(self) -> int:
        """Return a new seed for a random operator: 0, 1, 2, .., in the order of the calls."""
        self._seeds += 1
        return self._seeds - 1

    def inline(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """
        Import an operator that holds a subgraph (set_grad_enabled, disabled autocast, checkpointing) by importing the
        subgraph in its place; return its result or results. `args` are the operator's imported arguments.

        Raises `UnityError` for other operators with subgraphs, such as control flow.
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
        before = set(self._memories)
        self._keys.same(places, node.args[-len(places) :] if places else ())
        self._no_grad += not is_on
        out = self.run(module, dict(zip(places, operands, strict=True)), list(results) if many else [results])
        self._no_grad -= not is_on
        if not is_on:
            out = [self.detached(v) for v in out]
            for key in self._memories.keys() - before:
                self._memories[key].contents = self.detached(self._memories[key].contents)
        return out if many else out[0]

    def detached(self, value: Any) -> Any:
        """
        Return `value` behind the operator `detach`, which stops gradients; `value` itself if no gradient flows through
        it (`trained`). Of complex numbers it stops those of both parts.
        """
        if isinstance(value, Complex):
            return Complex(self.detached(value.real), self.detached(value.imag))
        return op("detach", value) if isinstance(value, Value) and self.trained(value) else value


def _fold(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """
    Compute the operator of `node`, which depends on no input and no parameter, in PyTorch, at import; return its
    result. `args` and `kwargs` are its arguments, tensors and numbers, which are left as they are.

    Raises `UnityError` where PyTorch fails.
    """
    target: Any = node.target
    if written(node):
        args, kwargs = pytree.tree_map(_copied, (args, kwargs))
    try:
        with torch.no_grad():
            return target(*args, **kwargs)
    except Exception as error:
        raise UnityError(f"cannot be computed at import: {one_line(error)}") from error


def _blank(x: Value | Complex, node: Any) -> torch.Tensor:
    """Return a tensor with the shape and element type of an imported operand, that of `node`, and any elements."""
    return torch.empty(x.shape, dtype=node.meta["val"].dtype if isinstance(x, Complex) else like(x).dtype)


def _copied(x: Any) -> Any:
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x


def _filled(x: Any) -> Any:
    return x.filled() if isinstance(x, Padded) else x


def _is_random(node: fx.Node) -> bool:
    """Return whether an operator draws random numbers, which are not those of the import but new ones in each step."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_control_flow(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)  # pyright: ignore[reportPrivateUsage]


def _is_empty(node: fx.Node) -> bool:
    """Return whether the result of an operator is one tensor without elements, as of a slice of size 0."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 0


def _dynamic(node: fx.Node) -> str | None:
    """Return what about the result of an operator depends on data, its shape or a number; None if nothing does."""
    for tensor in _flat(node.meta.get("val")):
        if isinstance(tensor, torch.SymInt | torch.SymFloat | torch.SymBool):
            return "a number that depends on data leaves the tensors; keep it in one, of a fixed shape"
        if isinstance(tensor, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in tensor.shape):
            return "the shape of its result depends on data; keep all elements, and choose by a mask and torch.where"
    return None


def check(node: fx.Node, out: Any) -> None:
    """
    Raise `AssertionError` if a mapping's results `out` do not have the shapes and element types that PyTorch recorded
    for the node. Only results that are values of the compiler's graph are checked.

    A failure is a bug of the mapping, not an error in the input.
    """
    meta: Any = node.meta.get("val")
    many = not isinstance(meta, torch.Tensor)
    for value, tensor in zip(out if many else [out], meta if many else [meta], strict=True):
        wanted = tensor.real if isinstance(value, Complex) else tensor
        for part in (value.real, value.imag) if isinstance(value, Complex) else (value,):
            if isinstance(part, Value):
                assert part.type == _type(wanted), f"{node.target} became {part.type}, PyTorch has {_type(wanted)}"


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
    """Return an operator's name for messages: that of another frontend's operator that it is a part of, if any."""
    if said := custom_data(node).get("operator"):
        return str(said)
    return str(node.target) if hasattr(node.target, "overloadpacket") else _operator_name(node)


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _type(tensor: torch.Tensor) -> Any:
    return tensor_type(tuple(tensor.shape), element_type(tensor.dtype))


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree as `pytree.tree_leaves` orders them, values of the graph and `Missing` among them."""
    return pytree.tree_leaves(tree, is_leaf=lambda v: isinstance(v, Value | Padded | Missing))


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for v in tree.values() for leaf in _flat(v)]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, tuple | list):
        return [leaf for v in tree for leaf in _flat(v)]  # pyright: ignore[reportUnknownVariableType]
    return [tree]
