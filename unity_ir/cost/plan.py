"""
Compute the cost of a placed graph: the seconds of every operator and every reshard in one iteration.

A graph without updates is a forward; its backward and update are counted as `pcg-differentiate` would build them. A
graph with updates is a whole step, in which everything is explicit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from math import prod

import numpy as np

from unity_ir.cost.halos import halo_moves
from unity_ir.cost.keeps import Keeps, keeps_of
from unity_ir.cost.memory import cast_bytes, held, is_master_at_host
from unity_ir.cost.routes import (
    EXPERTS,
    ExchangedSeconds,
    ProductRows,
    RowCounts,
    exchanged_seconds,
    product_rows,
    row_counts,
)
from unity_ir.cost.time import Kernel, is_measured, seconds
from unity_ir.cost.work import Work, work_of
from unity_ir.machine.device import COPIES, Device
from unity_ir.machine.model import Machine
from unity_ir.pcg.anchors import Anchors
from unity_ir.pcg.collectives import FREE, HALO_EXCHANGES
from unity_ir.pcg.differentiate import has_gradient, nodes_with_gradient
from unity_ir.pcg.graph import Graph, erase_with, optimizer_of_step
from unity_ir.pcg.loss_part import has_contraction, loss_part
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.pcg.reshard import Move, sum_over
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, Layout, Placement, dual, is_pinned, pins_of, place
from unity_ir.pcg.stages import stage_axes_of
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.host_values import without_values_at_host
from unity_ir.plan.instructions import HaloExchange, ReshardMove, communicates
from unity_ir.plan.lower import lower
from unity_ir.plan.moves import MachineKey, plan_moves
from unity_ir.plan.rings import BACKWARD_OF, MOST_PIECES, SEQUENCE, can_stay_divided
from unity_ir.plan.routes import OF_ROWS, is_elementwise, with_routes


@dataclass(frozen=True, slots=True)
class Reshard:
    """
    The moves that bring a value from the layout in which it is made (`source`) to one in which operators (`users`) read
    it (`target`). `forward` are the moves of the value, `backward` those of its gradient back. `again` repeats
    `forward` in the backward, if the resharded value is not kept until then. If the layouts agree, there are no moves
    but those of a halo exchange.
    """

    value: Value
    """The result of a leaf, of a compute operator, or of a parallel operator that is materialised (see `Anchors`)."""
    source: Layout
    target: Layout
    users: tuple[Node, ...]
    forward: tuple[Move, ...]
    backward: tuple[Move, ...]
    again: tuple[Move, ...] = ()
    is_kept: bool = False
    """Whether what every micro-batch reads alike is moved in the first alone, and kept."""
    stays_divided: bool = False
    """
    Whether no device holds what it gathers: it goes around a ring instead (`plan.rings`), or rows of experts are
    exchanged (`plan.routes`).
    """
    rows: int = 0
    """Elements of exchanged rows that it leaves on a device, in buffers or, of results, with their tokens."""

    @property
    def brought(self) -> int:
        """The elements of the piece that its forward moves leave on a device."""
        return self.rows or self.forward[-1].elements_after

    @property
    def forward_moves(self) -> tuple[tuple[Move, str], ...]:
        """
        The moves of the forward in a whole step, as (move, element type). They are repeated for each micro-batch,
        unless the first one's result is kept for all (`is_kept`).
        """
        type = self.value.type
        return tuple((m, type.dtype) for m in self.forward) * (1 if self.is_kept else type.micro_batches)

    @property
    def backward_moves(self) -> tuple[tuple[Move, str], ...]:
        """
        The moves of the backward in a whole step, as (move, element type), repeated for each micro-batch: first the
        moves of the value that are done again (`again`), then those of its gradient.
        """
        type = self.value.type
        again = ((m, type.dtype) for m in self.again)
        return (*again, *((m, type.grad_dtype) for m in self.backward)) * type.micro_batches

    @property
    def moves(self) -> tuple[tuple[Move, str], ...]:
        """Every move of the reshard, as (move, element type): `forward_moves`, then `backward_moves`."""
        return (*self.forward_moves, *self.backward_moves)


@dataclass(frozen=True)
class OperatorCost:
    """
    The kernels of a compute node, and the seconds of its forward and its backward on each device, in one micro-batch.
    """

    node: Node
    work: Work
    forward: float
    backward: float
    rows: float = 1.0
    """How many times the rows of their pieces devices hold of its results, in buffers of exchanged rows."""

    @property
    def made_bytes(self) -> int:
        """The bytes that a device holds of its results."""
        bytes = sum(prod(t.piece_shape) * ELEMENT_BYTES[t.dtype] for t in self.node.types)
        return bytes if self.rows == 1 else int(bytes * self.rows)


@dataclass(frozen=True)
class PlanCost:
    """
    The cost of one iteration (training step) of a placed graph on a machine: seconds of kernels and moves, bytes of
    memory.
    """

    machine: Machine
    placement: Placement
    operators: tuple[OperatorCost, ...]
    reshards: tuple[Reshard, ...]
    weight_reshards: tuple[Reshard, ...]
    """Reshards of weights' gradients to the weights' resting layouts."""
    update: float
    """Seconds of all updates."""
    additions: float = 0.0
    """Seconds in which gradients of the pieces of the loss are added up."""
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes on the device that holds most, by kind (see `cost.memory.HOLDS`)."""
    at_host: int = 0
    """Bytes of the host's memory that the device which holds most has there."""
    activations_at_host: int = 0
    """Those of them that are activations."""
    exchanging: Callable[[], tuple[tuple[Move, str], ...]] | None = field(default=None, compare=False, repr=False)
    """
    Returns every move of an iteration where a whole step, with its backward, exchanges rows of experts (`plan.routes`),
    of which `reshards` say nothing then; None for others. It lowers the step, which takes as long as all else here.
    """

    @cached_property
    def moves(self) -> tuple[tuple[Move, str], ...]:
        """
        Every move of an iteration, forward and backward, as (move, element type); the moves of weights' gradients come
        last.
        """
        if self.exchanging is not None:
            return self.exchanging()
        return tuple(move for r in (*self.reshards, *self.weight_reshards) for move in r.moves)

    @cached_property
    def compute_time(self) -> float:
        """
        Seconds of all kernels of an iteration, one after the other, the optimizer's update included. Operators on
        different parts of the machine are added up, too.
        """
        kernels = sum((o.forward + o.backward) * o.node.micro_batches for o in self.operators)
        return kernels + self.additions + self.update

    @cached_property
    def communication_time(self) -> float:
        """Seconds of all moves of an iteration, one after the other."""
        return self.machine.moves_time(self.moves)

    @property
    def time(self) -> float:
        """Seconds of an iteration if every move is waited for: compute time plus communication time."""
        return self.compute_time + self.communication_time

    @property
    def elements(self) -> int:
        """Elements that devices receive in the moves of an iteration, summed over all devices."""
        return sum_over(self.moves, lambda move, _: move.traffic(self.machine.mesh))

    @property
    def bytes(self) -> int:
        """Bytes that devices receive in the moves of an iteration, summed over all devices."""
        return sum_over(self.moves, lambda move, dtype: move.traffic(self.machine.mesh) * ELEMENT_BYTES[dtype])

    @property
    def memory_bytes(self) -> int:
        """
        Bytes held at the end of the forward on the device that holds most, with those at the host for which that has no
        room (`host_shortage`).
        """
        return sum(self.memory.values()) + self.host_shortage

    @property
    def host_shortage(self) -> int:
        """Bytes that the device which holds most has at the host beyond the memory of that."""
        link = self.machine.device.host
        return max(self.at_host - link.memory, 0) if link is not None and link.memory else 0


def reshards(graph: Graph, placement: Placement, machine: Machine) -> list[Reshard]:
    """
    Return every reshard of a placed graph: from the layout in which a value is made to each layout in which operators
    read it. `placement` has the layouts.

    Operators that read one value in one layout share the reshard. Halo exchanges are included.
    """
    nodes = graph.nodes()
    found = layouts_wanted(graph, placement)
    with_gradient = frozenset[Node]() if graph.updates else nodes_with_gradient(graph)
    is_marked = not graph.updates and any(n.op == "recompute" for n in nodes)
    again = keeps_of(graph).moved_again if is_marked else set[Node]()
    reused = Counter((_root(value), target) for value, target in found if value.node.op == "reuse")
    of_stages = stage_axes_of(graph, machine.mesh)
    out = _halos(nodes, placement, with_gradient, bool(graph.updates))
    for (value, target), at in found.items():
        source = placement.layouts[value]
        forward = plan_moves(value, source, target, machine, stage_axes=of_stages)
        backward = (
            plan_moves(value, dual(target), dual(source), machine, gradient=True, stage_axes=of_stages)
            if has_gradient(value, with_gradient, at)
            else ()
        )
        twice = () if again.isdisjoint(at) else forward
        is_kept = value.node.op == "reuse" and not twice and reused[_root(value), target] == 1
        out.append(Reshard(value, source, target, tuple(dict.fromkeys(at)), forward, backward, twice, is_kept))
    if graph.ring_attention:
        out = _around_rings(out, graph, placement)
    if graph.exchange_rows:
        out = [replace(r, stays_divided=True) if _can_be_exchanged(r, graph, placement) else r for r in out]
    return out


def layouts_wanted(graph: Graph, placement: Placement) -> dict[tuple[Value, Layout], list[Node]]:
    """Return the operators that read a value in a layout, by these two, of a placed graph."""
    anchors = Anchors(graph)
    found: dict[tuple[Value, Layout], list[Node]] = {}
    for node in graph.nodes():
        if node.is_compute:
            for i, operand in enumerate(node.operands):
                found.setdefault((anchors.of(operand), placement.needs(node, i)), []).append(node)
        elif anchors.materialised(node.result) and node.is_parallel:
            found.setdefault((anchors.of(node.operands[0]), placement.layouts[node.result]), []).append(node)
    return found


def _halos(
    nodes: Iterable[Node], placement: Placement, with_gradient: frozenset[Node], explicit: bool
) -> list[Reshard]:
    """
    Return the halo exchanges as reshards.

    In a forward graph there is one per operator that needs it, with the gradient's exchange. In a graph with its
    backward (`explicit`) there is one per value with a halo, shared by the operator and its gradients.
    """
    out: dict[object, Reshard] = {}
    for node in nodes:
        if node.op == "halo_reduce":
            (value,) = node.operands
            layout = placement.layouts[value]
            move = _halo_reduce_move(node, placement)
            out[value] = Reshard(value, layout, layout, (node,), (move,), ())
        if not node.is_compute:
            continue
        for i, moves in halo_moves(node, placement.assignments[node], placement.mesh).items():
            value, layout = node.operands[i], placement.needs(node, i)
            is_sent_back = has_gradient(value, with_gradient, (node,))
            backward = tuple(back for _, back in reversed(moves)) if is_sent_back else ()
            found = Reshard(value, layout, layout, (node,), tuple(m for m, _ in moves), backward)
            out.setdefault(value if explicit else (node, i), found)
    return list(out.values())


def _halo_reduce_move(node: Node, placement: Placement) -> Move:
    dim, border = int(node.attribute("dim")), int(node.attribute("low")) + int(node.attribute("high"))
    (value,) = node.operands
    shape = value.type.piece_shape
    layout = placement.layouts[value]
    axes = tuple(i for i, role in enumerate(layout) if role == dim)
    elements = prod(shape)
    border = elements // shape[dim] * border
    return Move("halo_reduce", axes, dim, dim, value.type.degrees[dim], elements, border, pins_of(layout))


def cost(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> PlanCost:
    """
    Return the cost of one iteration (training step) of a parallel graph on a machine. Memoised.

    `optimizer` is used if the graph names none (None: SGD). Raises `UnityError` where the graph's degrees or views do
    not fit the machine.
    """
    return _cost(graph, MachineKey(machine), optimizer)


@lru_cache(maxsize=16)
def _cost(graph: Graph, on: MachineKey, optimizer: Optimizer | None) -> PlanCost:
    machine = on.machine
    placement = place(graph, machine.mesh)
    nodes = graph.nodes()
    explicit = bool(graph.updates)
    optimizer = optimizer_of_step(graph, optimizer)
    with_gradient = nodes_with_gradient(graph)
    again = frozenset[Node]() if explicit else not_kept(graph)
    read = keeps_of(graph).values if again else set[Value]()
    operators: list[OperatorCost] = []
    times: dict[int, tuple[float, float]] = {}
    """The seconds of work, forward and backward, by the object that says what it is: nodes that are alike share it."""
    part = loss_part(graph)
    for node in nodes:
        if node.is_compute:
            needs = tuple(node in with_gradient and v.node in with_gradient for v in node.operands)
            pieces = (part[node], graph.loss_pieces) if node in part else None
            done = work_of(node, needs, not explicit, pieces)
            if node in again and not read.isdisjoint(node.results):
                done = Work(done.forward, (*done.forward, *done.backward))
            if id(done) not in times:
                times[id(done)] = done.forward_time(machine.device), done.backward_time(machine.device)
            operators.append(OperatorCost(node, done, *times[id(done)]))
    weights = [u.weight.node for u in graph.updates] or [n for n in nodes if n.op == "weight" and n in with_gradient]
    between = reshards(graph, placement, machine)
    update = sum(update_time(n, optimizer, machine) for n in weights) + norm_seconds(optimizer, machine)
    # Of what the pieces of the loss make, nothing is left when their loop has ended.
    left = [r for r in between if _root(r.value).node not in part]
    memory = held_with = _held(graph, placement, again | part.keys(), weights, left, optimizer)
    if graph.offloads_activations:
        memory = _held(graph, placement, again | part.keys(), weights, left, optimizer, _may_go(graph))
    if graph.exchange_rows and not explicit:
        operators, between = _with_rows(operators, between, graph, placement, machine)
    activations_at_host = held_with["activations"] - memory["activations"]
    at_host = activations_at_host + (optimizer.states * memory["gradients"] if optimizer.at_host else 0)
    if any(is_master_at_host(node, optimizer) for node in weights):
        at_host += memory["gradients"]
    return PlanCost(
        machine,
        placement,
        tuple(operators),
        tuple(between),
        tuple(_weight_gradients(graph, weights, placement, machine)),
        update,
        memory=memory,
        at_host=at_host,
        activations_at_host=activations_at_host,
        additions=_additions(graph, part, with_gradient, machine),
        exchanging=partial(_exchanging, graph, machine) if graph.exchange_rows and explicit else None,
    )


def _exchanging(step: Graph, machine: Machine) -> tuple[tuple[Move, str], ...]:
    """Return every move between devices of a step, as often as it is done, with rows of experts exchanged."""
    program = with_routes(without_values_at_host(lower(step, machine))[0])
    return tuple(
        (move_of(program, i), program.tensors[i.operand].dtype)
        for i in program.body
        if isinstance(i, ReshardMove | HaloExchange) and communicates(i)
        for _ in range(program.times(i))
    )


def _around_rings(found: Sequence[Reshard], graph: Graph, placement: Placement) -> list[Reshard]:
    """
    Return reshards, of which those are marked that gather keys or values for attention alone that can go around a ring
    (`plan.rings`): keys and values, or neither.
    """
    may = {id(r): r for r in found if _can_go_around(r, graph, placement)}
    roots = {_root(r.value) for r in may.values()}
    return [
        replace(r, stays_divided=True)
        if id(r) in may and all(_root(v) in roots for user in _readers(r, graph) for v in user.operands[1:3])
        else r
        for r in found
    ]


def _can_go_around(reshard: Reshard, graph: Graph, placement: Placement) -> bool:
    """Return whether a reshard gathers what only attention reads, over the devices that divide the sequence there."""
    moves = [move for move in reshard.forward if move.kind not in FREE]
    first = next((i for i, move in enumerate(moves) if move.kind == "all_gather"), len(moves))
    axes = {axis for move in moves[first:] for axis in move.axes}
    pieces = prod(placement.mesh.sizes[axis] for axis in axes)
    return (
        2 <= pieces <= MOST_PIECES
        and all(move.kind == "all_to_all" for move in moves[:first])
        and can_stay_divided(moves[first:])
        and all(
            user.op in BACKWARD_OF
            and axes == {axis for axis, what in enumerate(placement.assignments[user]) if what == "i"}
            and user.operands[0].shape[SEQUENCE] == user.operands[1].shape[SEQUENCE]
            and dict(user.attributes).get("stripes", pieces) == pieces
            for user in _readers(reshard, graph)
        )
    )


def _can_be_exchanged(reshard: Reshard, graph: Graph, placement: Placement) -> bool:
    """Return whether a reshard gathers rows, or their experts, for products whose experts the same axes divide."""
    axes = {axis for move in reshard.forward for axis in move.axes}
    users = _readers(reshard, graph)
    return (
        all(move.kind == "all_gather" and move.source == 0 for move in reshard.forward)
        and bool(axes)
        and all(
            user.op in OF_ROWS
            and axes == {axis for axis, what in enumerate(placement.assignments[user]) if what == "v"}
            and _root(user.operands[1]) != _root(reshard.value)
            for user in users
        )
    )


def _with_rows(
    operators: Sequence[OperatorCost],
    between: Sequence[Reshard],
    graph: Graph,
    placement: Placement,
    machine: Machine,
) -> tuple[list[OperatorCost], list[Reshard]]:
    """
    Return the costs of a forward graph's operators and reshards as they are with rows of experts exchanged: products
    have the seconds of received rows, and the reshards around them the moves of rows.
    """
    serial, serials = erase_with(graph)
    with_gradient = nodes_with_gradient(serial)
    known = product_rows(with_gradient)
    into: dict[tuple[Node, Value], int] = {}
    out: dict[Value, list[int]] = {}
    for i, reshard in enumerate(between):
        out.setdefault(_root(reshard.value), []).append(i)
        for user in _readers(reshard, graph) if reshard.stays_divided else ():
            into[user, _root(reshard.value)] = i
    changed, costs = [*between], {each.node: each for each in operators}
    buffers: dict[Value, float] = {}
    known_rows: dict[object, tuple[ExchangedSeconds, RowCounts] | None] = {}
    """The results of `rows_of`, which products of equal layers share."""

    def rows_of(
        of: Node, needs: tuple[bool, ...], rows: ProductRows, variables: tuple[str, ...], parts: tuple[int, ...]
    ) -> tuple[ExchangedSeconds, RowCounts] | None:
        # How many rows there are depends on what has chosen them.
        key = of.form, needs, rows, parts, _root(of.operands[2]).node.op
        if key not in known_rows:
            degrees = np.array([parts], dtype=np.int64)
            found = exchanged_seconds(of, needs, rows, variables, degrees, graph.exchange_rows, machine)
            counts = None if found is None else row_counts(of, variables, degrees, graph.exchange_rows)
            known_rows[key] = None if found is None or counts is None else (found, counts)
        return known_rows[key]

    for node in [each.node for each in operators if serials[each.node] in known]:
        axes = tuple(a for a, what in enumerate(placement.assignments[node]) if what == EXPERTS)
        x, e = (into.get((node, _root(v))) for v in node.operands[::2])
        results = [i for i in out.get(node.result, []) if any(m.kind not in FREE for m in between[i].forward)]
        reduced = [_reduced_rows(between[i], axes) for i in results]
        if x is None or e is None or not all(reduced) or not _divides_rows_alone(node, placement):
            continue
        of, rows = serials[node], known[serials[node]]
        needs = tuple(of in with_gradient and v.node in with_gradient for v in of.operands)
        variables = tuple(of.analysis.splittable)
        degrees = tuple(node.configuration.degrees.get(v, 1) for v in variables)
        priced = rows_of(of, needs, rows, variables, degrees)
        if priced is None:
            continue
        found, counts = priced
        ways = prod(placement.mesh.sizes[axis] for axis in axes)
        own, live, buffer = (int(each[0]) for each in (counts.own, counts.live, counts.held))
        buffers[of.result] = buffer / own
        costs[node] = replace(
            costs[node],
            forward=float(found.forward[0]),
            backward=float(found.backward[0]),
            rows=buffer / (own * ways),
        )

        def move(kind: str, elements: int, of: Node = node, axes: tuple[int, ...] = axes, ways: int = ways) -> Move:
            roles = (REPEAT, 0) if kind == "return_rows" else (0, REPEAT)
            return Move(kind, axes, *roles, ways, elements, 0, pins_of(placement.layouts[of.result]))

        width, made = of.operands[0].shape[-1], node.result.shape[-1]
        changed[e] = replace(between[e], forward=(move("count_rows", ways), move("send_rows", live)), rows=live)
        if rows.sharers:
            back = (move("return_rows", live * width),) if between[x].backward else ()
            changed[x] = replace(
                between[x], forward=(move("send_rows", live * width),), backward=back, rows=buffer * width
            )
        else:
            changed[x] = replace(between[x], forward=(), backward=())
        for i in results:
            there, back = (), ()
            if rows.is_returned:
                there = (move("return_rows", live * made),)
                back = (move("send_rows", live * made),) if between[i].backward else ()
            changed[i] = replace(between[i], forward=there, backward=back, rows=own * made if there else 0)
    return _in_buffers(costs.values(), serials, buffers), changed


def _reduced_rows(reshard: Reshard, axes: tuple[int, ...]) -> bool:
    """Return whether a reshard reduces addends along these mesh axes alone to shards of dim 0, and does no more."""
    moves = [move for move in reshard.forward if move.kind not in FREE]
    is_reduced = all(move.kind == "reduce_scatter" and move.target == 0 for move in moves)
    return is_reduced and {*axes} == {axis for move in moves for axis in move.axes}


def _divides_rows_alone(product: Node, placement: Placement) -> bool:
    """Return whether axes that do not divide a product's experts divide nothing but its rows, along dim 0."""
    first = product.analysis.result_dims[0][0]
    return all(what in (EXPERTS, first, COPY, REPEAT) or is_pinned(what) for what in placement.assignments[product])


def _in_buffers(
    operators: Iterable[OperatorCost], serials: Mapping[Node, Node], buffers: Mapping[Value, float]
) -> list[OperatorCost]:
    """
    Return operators' costs, of which those that make elements of exchanged rows alone make them in buffers of these.
    `buffers` has, for the results of products, how many times the rows of a device's own tokens these have.
    """
    found, times = list[OperatorCost](), dict(buffers)
    for each in operators:
        of = serials[each.node]
        if len(of.results) == 1 and of.result not in times:
            routes = {times.get(value) for value in of.operands}
            (rows,) = routes if len(routes) == 1 else (None,)
            if rows is not None and is_elementwise(of.analysis.bound):
                times[of.result], each = rows, replace(each, rows=rows)
        found.append(each)
    return found


def _readers(reshard: Reshard, graph: Graph) -> list[Node]:
    """Return the operators that read the result of a reshard, through parallel operators, too."""
    users = [*reshard.users]
    for user in users:
        if user.is_parallel:
            users += [each for each, _ in graph.users().get(user.result, ())]
    return [user for user in users if user.is_compute]


def _additions(graph: Graph, part: Mapping[Node, str], with_gradient: Collection[Node], machine: Machine) -> float:
    """Return the seconds in which gradients of what all pieces of the loss read alike are added up."""
    again, seconds = graph.loss_pieces - 1, 0.0
    for node, variable in part.items():
        dims = node.analysis.operand_dims
        for parameter, value in zip(node.analysis.bound.operands, node.operands, strict=True):
            is_alike = variable not in dims.get(parameter.name, ())
            if is_alike and {node, value.node}.issubset(with_gradient):
                size = prod(value.type.piece_shape) * ELEMENT_BYTES[value.type.grad_dtype]
                seconds += node.micro_batches * machine.memory_seconds(again, 3 * again * size)
    return seconds


def _held(
    graph: Graph,
    placement: Placement,
    again: AbstractSet[Node],
    weights: Iterable[Node],
    between: Iterable[Reshard],
    optimizer: Optimizer,
    may_go: Callable[[Value], bool] | None = None,
) -> Mapping[str, int]:
    """
    Return the bytes held at the end of the forward; for a graph with its backward, of all its values. Large activations
    that `may_go` are in the memory of the host.
    """
    made = [v for n in graph.nodes() if not n.is_parallel and n not in again for v in n.results]
    if graph.exchange_rows:
        # Devices have their own rows of what is reduced, not addends of all.
        made = [v for v in made if v.node.op not in OF_ROWS or SUM not in placement.layouts[v]]
    if graph.updates:
        brought = [(r.value, r.target, r.forward) for r in between]
    else:
        keeps = keeps_of(graph)
        made = [v for v in made if v.node.is_leaf or v in keeps.values]
        brought = [(r.value, r.target, r.forward) for r in between if _read_there(r, keeps)]
    values = [(v, placement.layouts[v]) for v in made]
    return held(values, weights, brought, placement.mesh, optimizer, may_go, graph.staying)


def _may_go(graph: Graph) -> Callable[[Value], bool]:
    """
    Return a function that tells whether a value may be in the memory of the host until the backward: no leaf, nor what
    is made on the way from the last contraction to the loss, as the backward reads that at once.
    """
    late: set[Node] = set()
    pending = [v.node for v in graph.outputs[:1] if v.shape == ()]
    while pending:
        node = pending.pop()
        if node not in late:
            late.add(node)
            is_head = node.is_compute and has_contraction(node.analysis)
            pending += [] if is_head else [v.node for v in node.operands]
    return lambda value: not _root(value).node.is_leaf and _root(value).node not in late


def _read_there(reshard: Reshard, keeps: Keeps) -> bool:
    """Return whether the backward reads the result of a reshard. A value with a halo always is a tensor of its own."""
    if any(m.kind in HALO_EXCHANGES for m in reshard.forward):
        return True
    if reshard.again or reshard.stays_divided:
        return False
    return any(
        keeps.operands(user)[i]
        for user in reshard.users
        if user.is_compute
        for i, v in enumerate(user.operands)
        if _root(v) == _root(reshard.value)
    ) or any(user.is_parallel and user.result in keeps.values for user in reshard.users)


def _root(value: Value) -> Value:
    while value.node.is_parallel:
        value = value.node.operands[0]
    return value


def _weight_gradients(graph: Graph, weights: Iterable[Node], placement: Placement, machine: Machine) -> list[Reshard]:
    """Return the reshards of weights' gradients, from the dual of the weight's layout to the weight's own."""
    out: list[Reshard] = []
    if graph.updates:
        for u in graph.updates:
            value, target = u.grad, placement.layouts[u.weight]
            moves = plan_moves(
                value, placement.layouts[value], target, machine, stage_axes=stage_axes_of(graph, machine.mesh)
            )
            out.append(Reshard(value, placement.layouts[value], target, (), moves, ()))
        return out
    for node in weights:
        layout = placement.layouts[node.result]
        moves = plan_moves(node.result, dual(layout), layout, machine, gradient=True)
        out.append(Reshard(node.result, dual(layout), layout, (), (), moves))
    return out


def update_bytes(piece_bytes: int, optimizer: Optimizer, cast_bytes: int = 0, grad_bytes: int | None = None) -> int:
    """
    Return the bytes that the optimizer reads and writes on a device to update a weight's piece of `piece_bytes` bytes:
    weight, gradient, and optimizer state; the gradient twice if its norm is limited (`optimizer.clip`).

    `cast_bytes` are those of the piece's kept cast, which is written, too; `grad_bytes` those of the gradient, None for
    as many as the weight.
    """
    gradient = piece_bytes if grad_bytes is None else grad_bytes
    return piece_bytes * (2 + 2 * optimizer.states) + gradient * (1 + (optimizer.clip > 0)) + cast_bytes


def norm_seconds(optimizer: Optimizer, machine: Machine) -> float:
    """
    Return the seconds of the all-reduce of one number over all devices that the norm of the whole gradient takes, if
    the optimizer limits it (`clip`); 0 without a limit, and on one device.
    """
    if not optimizer.clip or machine.devices == 1:
        return 0.0
    axes = range(len(machine.mesh.sizes))
    return machine.collective_time("all_reduce", machine.sizes_of(axes), NORM_BYTES)


NORM_BYTES = 8
"""Bytes of the sum of the squares of the gradient."""


def update_time(weight: Node, optimizer: Optimizer, machine: Machine) -> float:
    """
    Return the seconds that the optimizer's update of one weight takes on each device. If the weight is stored in
    another type than it is computed with, that includes writing its cast. With state at the host they are those of its
    copies, both ways at once, if these take longer; raises `UnityError` if the machine has no link to the host then.
    """
    elements = prod(weight.types[0].piece_shape)
    size = elements * ELEMENT_BYTES[weight.master]
    moved = update_bytes(size, optimizer, elements * cast_bytes(weight))
    found = update_seconds(elements, moved, weight.master, optimizer, machine.device)
    if not optimizer.at_host:
        return found
    tensors = optimizer.states + is_master_at_host(weight, optimizer)
    copied = (tensors * size / machine.host_link.bandwidth(kind, both=True) for kind in COPIES)
    return max(found, *copied)


def update_seconds(elements: int, moved: int, dtype: str, optimizer: Optimizer, device: Device) -> float:
    """
    Return the seconds in which a device updates a piece of a weight, of `elements` elements of element type `dtype`,
    and reads and writes `moved` bytes for it (`update_bytes`).

    Profiles have measured updates of weights without a cast. An update with a cast takes those seconds, and the time of
    its further bytes.
    """
    plain = update_kernel(elements, update_bytes(elements * ELEMENT_BYTES[dtype], optimizer), dtype, optimizer)
    if is_measured(plain, device):
        more = max(moved - plain.bytes, 0)
        return seconds(plain, device) + more / (device.memory_bandwidth * device.efficiency)
    return seconds(update_kernel(elements, moved, dtype, optimizer), device)


def update_kernel(elements: int, moved: int, dtype: str, optimizer: Optimizer) -> Kernel:
    """
    Return the optimizer's kernel that updates one device's piece of a weight, of `elements` elements.

    `moved` is the bytes it reads and writes (`update_bytes`), and `dtype` the element type in which the weight is
    stored.
    """
    name = f"{optimizer.name} with average" if optimizer.ema else optimizer.name
    return Kernel(f"update {name}({dtype})", (elements,), "elementwise", 4 * elements, moved, dtype)
