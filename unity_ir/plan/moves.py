"""
Plan the moves of a value between two layouts on a machine: the planner of `pcg.coarse`, memoised. A layout gives each
mesh axis a role: the dim that it shards, addends (SUM), replicas (COPY, REPEAT) or pinned (one coordinate only).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from unity_ir.machine.model import Machine
from unity_ir.pcg.coarse import RunMemo, plan_coarsely
from unity_ir.pcg.node import Value
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import COPY, REPEAT, Layout, Mesh, coordinate_of, is_pinned


def plan_moves(
    value: Value, source: Layout, target: Layout, machine: Machine, gradient: bool = False, stage_axes: int = 0
) -> tuple[Move, ...]:
    """
    Return the cheapest moves on a machine, in order, that bring a value from layout `source` to layout `target`; () if
    the layouts are equal. They are planned by `pcg.coarse`, and memoised.

    A mesh axis that is pinned at the same coordinate in both layouts takes no part: moves use no devices of other parts
    of the machine. With `gradient`, `source` and `target` are the layouts of the value's gradient, and moves are priced
    for its element type, `grad_dtype`. Raises `UnityError` if the mesh axes do not divide the shape.

    `stage_axes` is the number of leading mesh axes along which pipeline stages lie (0: no stages). It matters in two
    cases. If both layouts have the same roles on these axes, no move uses them. If `source` has the whole value on
    every stage (copies or repeats) and `target` is pinned to one stage, the first moves pin the stage, without changing
    other axes, and all others are within that stage.
    """
    if source == target:
        return ()
    type = value.type
    key = type.micro_shape, type.grad_dtype if gradient else type.dtype
    of_stages = source[:stage_axes], target[:stage_axes]
    if of_stages[0] == of_stages[1]:
        return _plan_cached(*key, source, target, MachineKey(machine), stage_axes)
    if set(of_stages[0]) <= {COPY, REPEAT} and all(map(is_pinned, of_stages[1])):
        # Each stage has it already: first its name changes, then the stage does the rest by itself.
        there = (*target[:stage_axes], *source[stage_axes:])
        named = _plan_cached(*key, source, there, MachineKey(machine), 0)
        return (*named, *plan_moves(value, there, target, machine, gradient, stage_axes))
    return _plan_cached(*key, source, target, MachineKey(machine), 0)


@lru_cache(maxsize=65536)
def _plan_cached(
    shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, machine: MachineKey, stage_axes: int
) -> tuple[Move, ...]:
    of = machine.machine
    fixed = tuple((i, coordinate_of(a)) for i, (a, b) in enumerate(zip(source, target, strict=True)) if _is_at(a, b))
    staying = {*range(stage_axes), *(axis for axis, _ in fixed)}
    if not staying:
        memo = _memo(machine, dtype, ())
        return plan_coarsely(source, target, shape, of.mesh, of.axis_levels, lambda m: of.move_time(m, dtype), memo)
    axes = tuple(axis for axis in range(len(source)) if axis not in staying)

    def on_part(layout: Layout) -> Layout:
        return tuple(layout[axis] for axis in axes)

    def on_machine(move: Move) -> Move:
        others = tuple((axes[axis], coordinate) for axis, coordinate in move.pins)
        return replace(move, axes=tuple(axes[axis] for axis in move.axes), pins=tuple(sorted((*others, *fixed))))

    part, levels = Mesh(on_part(of.mesh.sizes)), on_part(of.axis_levels)
    found = plan_coarsely(
        on_part(source),
        on_part(target),
        shape,
        part,
        levels,
        lambda m: of.move_time(on_machine(m), dtype),
        _memo(machine, dtype, axes),
    )
    return tuple(map(on_machine, found))


def _is_at(source: int, target: int) -> bool:
    """Return whether a mesh axis is pinned at the same coordinate in two layouts."""
    return source == target and is_pinned(source)


@lru_cache(maxsize=256)
def _memo(machine: MachineKey, dtype: str, axes: tuple[int, ...]) -> RunMemo:
    """
    Return the memo of plans for one machine and element type, over some of its axes (() for all), which lives as long
    as this cache keeps it.
    """
    del machine, dtype, axes
    return {}


@dataclass(frozen=True, eq=False)
class MachineKey:
    """
    A machine as a cache key. Machines hold mappings, which cannot be hashed, so this hashes the name and compares the
    whole machine.
    """

    machine: Machine

    def __hash__(self) -> int:
        return hash(self.machine.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MachineKey):
            return False
        return other.machine is self.machine or other.machine == self.machine
