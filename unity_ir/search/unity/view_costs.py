"""Price operators under views, and moves between views: kernels, moves and updates, as `cost.plan` counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from unity_ir.cost.halos import halo_moves
from unity_ir.cost.plan import update_time
from unity_ir.cost.work import repeats, work
from unity_ir.machine.model import Machine
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.materialise import piece_as_weight, resting, variable_degrees
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.reshard import Move, cheapest_moves, move_kind
from unity_ir.pcg.sharding import (
    REPEAT,
    Assignment,
    Layout,
    Mesh,
    dual,
    is_pinned,
    is_shard,
    operand_layout,
    shard_count,
)
from unity_ir.pcg.types import ELEMENT_BYTES, TensorType, tensor_type
from unity_ir.search.layouts.limits import limits

FREE = 1e-12
"""Seconds charged for a free move, so that of equal mappings the one with fewer moves wins."""


@dataclass
class ViewCosts:
    """Prices operators under machine views, and moves between layouts, on one machine; memoised."""

    machine: Machine
    optimizer: Optimizer
    once: float = 1.0
    """
    What a second counts that a step spends once (moves of weights, sums of their gradients, updates): 1 / m where the
    graph is one of m micro-batches.
    """
    _moves: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])

    @cached_property
    def most_planned_axes(self) -> int:
        """
        The most mesh axes (after merging equal ones) over which a reshard is planned exactly on this machine, from
        `limits().planned_axes`. A reshard over more axes is priced as one collective per pair of roles, which may cost
        more.
        """
        return next(n for most, n in limits().planned_axes if len(self.machine.mesh.sizes) <= most)

    def move(self, type: TensorType, source: Layout, target: Layout, gradient: bool) -> float:
        """
        Return the seconds of moving a value of this type's shape from layout `source` to `target` (a role per mesh axis
        each).

        `gradient` adds the seconds of moving its gradient back.
        """
        if source == target:
            return 0.0
        key = (type.shape, type.dtype, type.grad_dtype, source, target, gradient)
        if key not in self._moves:
            seconds = self._one_way(type.shape, type.dtype, source, target)
            if gradient:
                seconds += self._one_way(type.shape, type.grad_dtype, dual(target), dual(source))
            self._moves[key] = seconds
        return self._moves[key]

    def _one_way(self, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout) -> float:
        """
        Return the planner's seconds on a reduced mesh.

        Neighbouring axes of one level with the same roles are merged, and idle axes are dropped; on few axes, repeating
        ones stay, since they may help.
        """
        touched = {r for a, b in zip(source, target, strict=True) if a != b for r in (a, b) if is_shard(r)}
        axes = list(
            zip(self.machine.mesh.sizes, self.machine.axis_levels, zip(source, target, strict=True), strict=True)
        )
        left = list(shape)
        for size, _, (a, b) in axes:
            if a == b and is_shard(a) and a not in touched:
                left[a] //= size
        moving = _merged([a for a in axes if a[2][0] != a[2][1] or a[2][0] in touched])
        helped = _merged([a for a in axes if a[2][0] != a[2][1] or a[2][0] in {*touched, REPEAT}])
        sizes, levels, pairs = zip(*(helped if len(helped) <= self.most_planned_axes else moving), strict=True)
        key = (tuple(left), ELEMENT_BYTES[dtype], sizes, levels, pairs)
        if key not in self._moves:
            item = ELEMENT_BYTES[dtype]

            def price(move: Move) -> float:
                along: dict[int, int] = {}
                for axis in move.axes:
                    along[levels[axis]] = along.get(levels[axis], 1) * sizes[axis]
                return self.machine.move_seconds(
                    move.kind, along, move.border or move.elements, move.elements_after, item
                )

            found = cheapest_moves if len(sizes) <= self.most_planned_axes else _one_by_one
            ends = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
            moves = found(*ends, tuple(left), Mesh(sizes), price)
            self._moves[key] = sum(price(m) + FREE for m in moves)
        return self._moves[key]

    def operator(
        self, node: Node, view: Assignment, trained: bool, gradients: tuple[bool, ...], uses: Mapping[Value, int]
    ) -> float:
        """
        Return the seconds of an operator, forward and backward, under a view (the role of each mesh axis): its kernels
        and halo exchanges, the reshards of the leaves it reads, and the optimizer's updates of its weights.

        `trained` says whether the operator has a backward, `gradients` for each operand whether it gets a gradient.
        `uses` has the number of operators that read each leaf. A leaf is taken to be stored where this operator wants
        it, and its seconds are divided by its number of readers: exact if all of them want the same.
        """
        machine = self.machine
        needs = tuple(trained and g for g in gradients)
        divided = variable_degrees(view, machine.mesh.sizes)
        operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
        ordered = tuple((v, divided[v]) for v in node.analysis.bound.extents if v in divided)
        done = work(node.op, operands, node.attributes, ordered, needs, repeats(node))
        seconds = done.forward_time(machine.device) + done.backward_time(machine.device)
        for i, moves in halo_moves(node, view, machine.mesh).items():
            dtype = node.operands[i].type.dtype
            seconds += sum(machine.move_time(m, dtype) for there, back in moves for m in (there, back)[: 1 + needs[i]])
        for i, value in enumerate(node.operands):
            if value.node.is_leaf and value not in node.operands[:i] and value in uses:
                seconds += self._leaf(value, operand_layout(node.analysis, i, view), needs[i]) / uses[value]
        return seconds

    def _leaf(self, value: Value, need: Layout, gradient: bool) -> float:
        rest = resting(need)
        seconds = self.move(value.type, rest, need, gradient)
        if gradient and value.node.op == "weight":
            sizes = self.machine.mesh.sizes
            pieces = tuple(
                prod(s for s, r in zip(sizes, rest, strict=True) if r == dim) for dim in range(len(value.shape))
            )
            piece = piece_as_weight(value.node, tensor_type(value.shape, value.dtype, pieces))
            seconds += update_time(piece, self.optimizer, self.machine)
        return seconds * (self.once if value.node.op == "weight" else 1.0)


def _one_by_one(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, price: Callable[[Move], float]
) -> list[Move]:
    """
    Return moves between two layouts: one per pair of roles, first those that shrink the pieces.

    For meshes too large for the planner; the order in which axes shard a dim is ignored.
    """
    del price
    pairs = dict.fromkeys((a, b) for a, b in zip(source, target, strict=True) if a != b)
    kinds = {pair: move_kind(*pair) for pair in pairs}
    elements = prod(shape) // shard_count(source, mesh.sizes)
    out: list[Move] = []
    for pair in sorted(pairs, key=lambda p: COLLECTIVES[kinds[p]].order):
        axes = tuple(i for i, (a, b) in enumerate(zip(source, target, strict=True)) if (a, b) == pair)
        move = Move(kinds[pair], axes, *pair, prod(mesh.sizes[i] for i in axes), elements)
        out.append(move)
        elements = move.elements_after
    return out


_Axis = tuple[int, int, tuple[int, int]]
"""Size, level, and the roles before and after."""


def _merged(axes: list[_Axis]) -> list[_Axis]:
    out: list[_Axis] = []
    for size, level, pair in axes:
        if out and out[-1][1:] == (level, pair) and not any(map(is_pinned, pair)):
            out[-1] = (out[-1][0] * size, level, pair)
        else:
            out.append((size, level, pair))
    return out
