"""
Divide a step's batch into micro-batches (docs/concepts.md, "Time"): the graph of one micro-batch, for which plans are
searched, and such a plan as that of the whole batch.

Which part of each value a micro-batch has follows from the dims of the inputs along which samples run, through the
operators' TDL lines, as a sharding over devices does: along an index variable, or as an addend where that variable is
summed. What depends on no sample is made once, before the loop; what needs a sum over all samples is made once, after
it. An operator of the loop cannot read the latter: that is how statistics of a whole batch are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.graph import Graph, erase_with, rewrite
from unity_ir.pcg.node import Node, Value, apply, leaf, parallel, rebuild
from unity_ir.pcg.types import InTime, TensorType, divided_type, tensor_type
from unity_ir.tdl.syntax import AttrValue

When = Literal["before", "in", "after"]
"""Whether a step makes a value before the loop over micro-batches, in it, or after it."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Role:
    """When a value is made and, in the loop, what a micro-batch has of it: a shard of a dim, an addend (`sum`), all."""

    when: When
    role: int | Literal["sum", "copy"] = "copy"


_BEFORE, _AFTER = _Role("before"), _Role("after")


@dataclass(frozen=True, slots=True)
class TimeDivision:
    """
    Says how the `count` micro-batches of a step divide each value of a serial graph.

    The graph is that of the whole batch if `micro_batch` made this, and that of one micro-batch if `in_micro_batches`
    did.
    """

    count: int
    roles: Mapping[Value, _Role]
    whole: Mapping[Value, Value]
    """
    For each value, its counterpart in the graph of the whole batch: an equal value or, where the graph is that of one
    micro-batch, one that is `count` times as large along the samples.
    """

    def of(self, value: Value) -> InTime | None:
        """
        Return how micro-batches divide a value of the loop over them: each has a shard of one dim, an addend, or the
        whole. None for a value that a step makes once, before or after the loop.
        """
        found = self.roles[value]
        return InTime(found.role, self.count) if found.when == "in" else None

    def micro_shape(self, value: Value) -> Shape:
        """
        Return the shape of what one micro-batch has of a value: its global shape in the whole batch, in which the dim
        that micro-batches divide, if any, is divided by `count`.
        """
        return _part(self.whole[value].shape, self.roles[value], self.count)

    def variable(self, node: Node) -> str | None:
        """Return the index variable of a compute node that micro-batches divide; None if they divide none."""
        whole = self.whole[node.results[0]].node
        analysis = whole.analysis
        dims = [analysis.operand_dims[p.name] for p in analysis.bound.operands]
        for value, of in zip((*node.operands, *node.results), (*dims, *analysis.result_dims), strict=True):
            role = self.roles[value]
            if role.when == "in" and isinstance(role.role, int):
                return of[role.role]
        return None

    def read(self, node: Node, operand: int, variable: str | None) -> InTime:
        """
        Return how micro-batches divide operand number `operand` of `node`, as this operator of the loop over them reads
        it. `variable` is the index variable of the operator that micro-batches divide (None: none).

        A value that the loop makes is divided as it is made. Of one made before the loop, each micro-batch reads a
        shard along `variable`, or, if the operand does not have that variable, the whole.
        """
        time = self.of(node.operands[operand])
        if time is not None:
            return time
        # Made before the loop: a micro-batch reads its part, or all.
        analysis = self.whole[node.results[0]].node.analysis
        dims = analysis.operand_dims[analysis.bound.operands[operand].name]
        divided = variable is not None and variable in dims
        return InTime(dims.index(variable) if divided else "copy", self.count)


def _part(shape: Shape, role: _Role, count: int) -> Shape:
    dim = role.role if role.when == "in" else None
    return tuple(size // count if i == dim else size for i, size in enumerate(shape))


class _Follower:
    """
    Follows the samples from the inputs through a serial graph: of the whole batch or, with `grows`, of a micro-batch,
    whose operators are followed at the sizes of the whole batch (a dim of one sample says nothing of what it becomes).
    """

    def __init__(self, graph: Graph, dims: Mapping[str, int], count: int, grows: bool):
        self.graph = graph
        self.dims = dims
        self.count = count
        self.grows = grows
        self.wanted: dict[Value, int] = {}
        """Dims that a reader in the loop divides, of values that depend on no sample."""

    def times(self) -> TimeDivision:
        """Return the roles of all values. Raises `UnityError` where an operator cannot be divided so."""
        while True:
            before = len(self.wanted)
            self.roles: dict[Value, _Role] = {}
            self.whole: dict[Value, Value] = {}
            for node in self.graph.nodes():
                if node.is_leaf:
                    self._leaf(node)
                elif not self._operator(node):
                    break  # what it reads is to be divided, too
            else:
                if len(self.wanted) == before:
                    return TimeDivision(self.count, self.roles, self.whole)

    def _leaf(self, node: Node) -> None:
        value = node.result
        dim = self.dims.get(node.name) if node.op == "input" else self.wanted.get(value)
        if dim is None and value in self.wanted:
            raise UnityError(f"{self._where(node)}: {node.name!a} has a dim of samples, but no samples")
        if dim is not None and node.op == "weight":
            raise UnityError(f"{self._where(node)}: weight {node.name!a} has one entry per sample; use 1 micro-batch")
        scale = self.count if self.grows else 1
        shape = tuple(size * scale if i == dim else size for i, size in enumerate(value.shape))
        self.roles[value] = _BEFORE if dim is None else _Role("in", dim)
        self.whole[value] = _leaf(node, _of_shape(node.types[0], shape)).result

    def _where(self, node: Node) -> str:
        return f"pcg.{node.op}: cannot be divided into {self.count} micro-batches"

    def _operator(self, node: Node) -> bool:
        """Follow an operator; return False if it asks for a dim of its operands that was not known to be divided."""
        own = [self.roles[v] for v in node.operands]
        given = [self.whole[v] for v in node.operands]
        failed: UnityError | None = None
        before = len(self.wanted)
        name, own_attributes = _in_batch(node)
        for attributes in _candidates(own_attributes, self.count) if self.grows else (own_attributes,):
            try:
                whole = apply(name, given, dict(attributes))
                found = self._roles(whole, own, node)
            except UnityError as error:
                failed = failed or error
                continue
            shapes = [_part(v.shape, role, self.count) for v, role in zip(whole.results, found, strict=True)]
            if self.grows and shapes != [v.shape for v in node.results]:
                continue
            self.roles.update(zip(node.results, found, strict=True))
            self.whole.update(zip(node.results, whole.results, strict=True))
            return True
        if self.grows:
            with suppress(UnityError):
                self._roles(node, own, node)
            if len(self.wanted) > before:
                return False
        raise failed or UnityError(f"{self._where(node)}: its attributes fit one micro-batch only; use 1 micro-batch")

    def _roles(self, whole: Node, roles: Sequence[_Role], node: Node) -> list[_Role]:
        """Return the roles of an operator's results, given those of its operands; `whole` is `node` on whole values."""
        analysis = whole.analysis
        names = [p.name for p in analysis.bound.operands]
        own = dict(zip(names, roles, strict=True))
        variable = self._variable(whole, own, node)
        addends = frozenset(n for n, role in own.items() if role == _Role("in", "sum"))
        # Addends stay addends where the operator is linear in them, and are added up after the loop where it is not.
        is_after = _AFTER in roles or bool(addends and (variable or addends not in analysis.carriers))
        if is_after and variable is None:
            return [_AFTER for _ in whole.results]
        if is_after:
            late = next(v for v, n in zip(whole.operands, names, strict=True) if own[n] == _AFTER or n in addends)
            raise UnityError(
                f"{self._where(whole)}: it reads samples, and {late.node.op} of all samples, which is known only after "
                "all micro-batches; use 1 micro-batch, or statistics in groups of samples (groups)"
            )
        if variable is None:
            if not addends and all(role == _BEFORE for role in roles):
                return [_BEFORE for _ in whole.results]
            carried = (bool(addends) and analysis.carried(i, addends) for i in range(len(whole.types)))
            return [_Role("in", "sum" if c else "copy") for c in carried]
        for name, value in zip(names, node.operands, strict=True):
            dims = analysis.operand_dims[name]
            if own[name] == _BEFORE and variable in dims:
                self.wanted.setdefault(value, dims.index(variable))
        return [_Role("in", d.index(variable) if variable in d else "sum") for d in analysis.result_dims]

    def _variable(self, whole: Node, own: Mapping[str, _Role], node: Node) -> str | None:
        """Return the index variable of an operator along which the samples run; None if it reads none."""
        analysis = whole.analysis
        found: dict[str | None, None] = {}
        for name, role in own.items():
            if role.when == "in" and isinstance(role.role, int):
                found.setdefault(analysis.operand_dims[name][role.role])
        for dims, value in zip(analysis.result_dims, node.results, strict=True):
            if value in self.wanted:
                found.setdefault(dims[self.wanted[value]])
        if not found:
            return None
        variable = next(iter(found))
        if len(found) > 1 or variable is None or variable not in analysis.splittable:
            raise UnityError(f"{self._where(whole)}: it does not keep samples apart; use 1 micro-batch")
        return variable


def micro_batch(graph: Graph, dims: Mapping[str, int], count: int) -> Graph:
    """
    Return the graph of one of `count` micro-batches of a serial forward graph: the same operators on 1 / `count` of the
    samples. Its results (a mean loss, say) are those of the micro-batch. Plans are searched and priced for it, and
    `in_micro_batches` then makes the plan of the whole step.

    `dims` has, for each input that has samples, by name, the dim along which they run. Raises `UnityError` if `count`
    does not divide the samples, or an operator needs several micro-batches at once.
    """
    if count < 1:
        raise UnityError(f"micro-batches: {count} is not a number of them; a step has 1 or more")
    for node in graph.inputs:
        dim = dims.get(node.name)
        if dim is not None and node.result.shape[dim] % count:
            raise UnityError(
                f"micro-batches: {count} do not divide the {node.result.shape[dim]} samples of input {node.name!a}; "
                "choose a divisor"
            )
    times = _Follower(graph, dims, count, grows=False).times()

    def smaller(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        shapes = [times.micro_shape(v) for v in node.results]
        if node.is_leaf:
            return _leaf(node, _of_shape(node.types[0], shapes[0])).results
        for value in node.results:
            _check_groups(value, times.roles[value], count)
        new = apply(node.op, operands, _divided(node, operands, shapes, count))
        return (_of_one_sample(new, node, times) if node.op == "reshape" else new).results

    return rewrite(graph, smaller)


def _check_groups(value: Value, role: _Role, count: int) -> None:
    """Raise `UnityError` where micro-batches, `count` in all, would have parts of a group of samples or of tokens."""
    if role.when == "in" and isinstance(role.role, int) and value.shape[role.role] % count:
        groups = value.shape[role.role]
        raise UnityError(
            f"pcg.{value.node.op}: {count} micro-batches do not divide the {groups} groups in its result "
            f"{list(value.shape)}; use a divisor of {groups} micro-batches, or smaller groups (a mixture's key group)"
        )


def _of_one_sample(small: Node, whole: Node, times: TimeDivision) -> Node:
    """
    Return a reshape of a micro-batch, given that of the whole batch: `reshape_sample` where it could be divided in ways
    in which the other cannot, since it has one sample.
    """
    roles = (times.roles[v].role for v in (*whole.operands, *whole.results))
    dims = tuple(role for role in roles if isinstance(role, int))
    if len(dims) < 2:
        return small
    divisible, allowed = (_divisible(node) for node in (small, whole))
    if all(a or not d for d, a in zip(divisible, allowed, strict=True)):
        return small
    return apply("reshape_sample", small.operands, {**dict(small.attributes), "dims": dims})


def _in_batch(node: Node) -> tuple[str, Attributes]:
    """Return the operator of a micro-batch, and its attributes, as they are in the batch: those of `reshape_sample`."""
    if node.op != "reshape_sample":
        return node.op, node.attributes
    return "reshape", tuple(pair for pair in node.attributes if pair[0] != "dims")


def _divisible(node: Node) -> list[bool]:
    """Return for each dim of the operand and then of the result of a reshape whether it can be divided."""
    analysis = node.analysis
    dims = *analysis.operand_dims["x"], *analysis.result_dims[0]
    return [variable in analysis.splittable for variable in dims]


def in_micro_batches(
    plan: Graph, dims: Mapping[str, int], count: int, inside: Callable[[Node], bool] = lambda weight: False
) -> Graph:
    """
    Return the plan of a whole batch, run in `count` micro-batches, given the plan of one of them: a forward graph with
    machine views. Its inputs are the whole batch, divided in time; operators of the loop are those of `plan`, on the
    same devices. For a `count` of 1, `plan` itself.

    A weight is moved to its readers once, before the loop, and its gradient summed over devices once, after the loop.
    If `inside(weight)` is true for a weight node of `plan`, both are done in every micro-batch. `dims` has, for each
    input that has samples, by name, the dim along which they run.

    Raises `UnityError` if an operator needs several micro-batches at once, and if the first output is not a scalar
    loss.
    """
    if count == 1:
        return plan
    serial, serials = erase_with(plan)
    times = _Follower(serial, dims, count, grows=True).times()

    def lifted(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.op == "send" and operands[0].node.op == "reuse":
            # A weight is sent to other stages before the loop, and enters it where it is read.
            sent = rebuild(node, operands[0].node.operands, node.view).result
            return (_entered(sent, InTime("copy", count)),)
        if node.is_parallel:
            return rebuild(node, operands, node.view).results
        of = serials[node]
        if node.is_leaf:
            old, time = node.types[0], times.of(of.result)
            type = divided_type(times.whole[of.result].shape, old.dtype, old.parts, old.grad)
            made = _leaf(node, type if time is None else type.in_time(time)).result
            return (_entered(made, InTime("copy", count)) if node.op == "weight" and inside(node) else made,)
        is_in = any(times.of(v) for v in of.results)
        variable = times.variable(of)
        given = [_at(v, times.read(of, i, variable) if is_in else None) for i, v in enumerate(operands)]
        whole = times.whole[of.results[0]].node
        degrees = dict(node.configuration.degrees)
        if variable is not None:
            degrees[variable] = degrees.get(variable, 1) * count
        shapes = tuple(v.shape for v in whole.operands)
        attributes = whole.operator.divided(shapes, whole.attributes, degrees)
        return apply(whole.op, given, dict(attributes), node.view, times.of(of.results[0])).results

    found = rewrite(plan, lifted)
    if not found.outputs or found.outputs[0].shape != ():
        raise UnityError(
            f"func.func @{plan.name}: is a part of a model, whose outputs are of all micro-batches; give it a loss as "
            "its first output, or use 1 micro-batch"
        )
    # The step returns the loss alone; what else the model puts out stays in time.
    return replace(found, outputs=(_at(found.outputs[0], None), *found.outputs[1:]))


def _at(value: Value, time: InTime | None) -> Value:
    """Return a value divided in time as `time` says (None: not at all), by an operator that leads there if need be."""
    if value.type.time == time:
        return value
    if value.type.time is None:
        assert time is not None
        return _entered(value, time)
    role = value.type.time.role
    count = value.type.micro_batches
    if role == "copy":
        return _reused(value)
    if role == "sum":
        return parallel("accumulate", value, by=count).result
    return parallel("batch", value, dim=role, by=count).result


def _reused(value: Value) -> Value:
    """
    Return a value that every micro-batch reads alike as it is outside of the loop: the same moves of what is reused.

    rewrite: combine(reuse(w)) -> combine(w)
    """
    node = value.node
    if node.op == "reuse":
        return node.operands[0]
    if not node.is_parallel:
        raise UnityError(f"pcg.{node.op}: every micro-batch makes all of it; it cannot be read outside of the loop")
    return rebuild(node, [_reused(node.operands[0])], node.view).result


def _entered(value: Value, time: InTime) -> Value:
    if isinstance(time.role, int):
        return parallel("pipeline", value, dim=time.role, by=time.pieces).result
    return parallel("reuse", value, by=time.pieces).result


def _leaf(node: Node, type: TensorType) -> Node:
    return leaf(node.op, type, node.view, **dict(node.attributes))


def _of_shape(type: TensorType, shape: Shape) -> TensorType:
    """Return the serial type of another shape, with the element types of `type`."""
    return tensor_type(shape, type.dtype, grad=type.grad)


def _divided(node: Node, operands: Iterable[Value], shapes: Sequence[Shape], count: int) -> Mapping[str, AttrValue]:
    """
    Return the attributes with which a node's operator makes results of these shapes of other operands: its own or,
    where an attribute gives a size that runs along the samples, with that one divided. Raises `UnityError` if none do.
    """
    of, dtypes = tuple(v.shape for v in operands), tuple(v.dtype for v in operands)
    for attributes in _candidates(node.attributes, 1 / count):
        with suppress(UnityError):
            if list(node.operator.bind(of, attributes, dtypes).bound.result_shapes) == list(shapes):
                return dict(attributes)
    shape = list(node.types[0].shape)
    raise UnityError(f"pcg.{node.op}: its result {shape} cannot be made in {count} micro-batches; use fewer")


def _candidates(attributes: Attributes, scale: float) -> Iterable[Attributes]:
    """Yield attributes: as they are, then with each integer in them that stays one scaled, one at a time."""
    yield attributes
    for at, (name, value) in enumerate(attributes):
        scaled: list[AttrValue] = []
        if isinstance(value, int) and not isinstance(value, bool):
            scaled = [int(value * scale)]
        elif isinstance(value, tuple):
            scaled = [(*value[:i], int(n * scale), *value[i + 1 :]) for i, n in enumerate(value)]
        for new in scaled:
            yield (*attributes[:at], (name, new), *attributes[at + 1 :])
