"""Plans on a coarser mesh: they lead where they shall, and are the cheapest there are with axes that go together."""

from __future__ import annotations

from itertools import pairwise
from math import gcd, inf, prod

import pytest
from devices import legal
from extent import examples
from graphs import boxes
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.machine import Machine
from unity_ir.pcg.coarse import RunMemo, plan_coarsely
from unity_ir.pcg.reshard import Move, cheapest_moves, group_role
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, Layout, Mesh, is_shard, pinned_at, role_class, shard_count

MACHINES = {sizes: boxes(*sizes, overhead=1e-6) for sizes in [(2, 2), (3, 2), (2, 4), (4, 4), (2, 2, 4), (8,), (16,)]}
SHAPES = [(16,), (8, 16), (4, 6, 16), (64, 3), (2, 2, 2, 16)]
MEMOS: dict[object, RunMemo] = {}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Machine, tuple[int, ...], Layout, Layout]:
    machine = MACHINES[draw(st.sampled_from(list(MACHINES)))]
    shape = draw(st.sampled_from(SHAPES))
    mesh = machine.mesh
    roles = (*range(len(shape)), COPY, SUM, REPEAT)
    layout = st.tuples(*(st.sampled_from((*roles, *map(pinned_at, range(size)))) for size in mesh.sizes))
    layout = layout.filter(lambda x: legal(x, shape, mesh))
    return machine, shape, draw(layout), draw(layout)


def spent(machine: Machine, moves: tuple[Move, ...]) -> float:
    return sum(machine.move_time(m, "f32") for m in moves)


def coarsened(machine: Machine, shape: tuple[int, ...], source: Layout, target: Layout) -> float:
    """The cost by `plan`, on a mesh whose axes are those that go together; through the dims `plan_coarsely` says."""
    mesh = machine.mesh
    ways = [(role_class(a), role_class(b), v) for a, b, v in zip(source, target, machine.axis_levels, strict=True)]
    cuts = [i for i in range(len(ways)) if i == 0 or ways[i] != ways[i - 1] or len(ways) <= 3]
    runs = [tuple(range(a, b)) for a, b in pairwise([*cuts, len(ways)])]
    coarse = Mesh(tuple(prod(mesh.sizes[axis] for axis in run) for run in runs))
    used = {role for role in (*source, *target) if is_shard(role)}
    free = [d for d in range(len(shape)) if d not in used and gcd(shape[d], mesh.devices) > 1]
    useful = used.union(free if len(ways) <= 3 else sorted(free, key=lambda d: -shape[d])[:1])

    def price(move: Move) -> float:
        if is_shard(move.target) and move.target not in useful:
            return inf
        sizes = machine.sizes_of([axis for run in move.axes for axis in runs[run]])
        return machine.move_seconds(move.kind, sizes, move.elements, move.elements_after, 4)

    begin, end = (tuple(group_role(layout, run, mesh) for run in runs) for layout in (source, target))
    return sum(map(price, cheapest_moves(begin, end, shape, coarse, price)))


@pytest.mark.slow
@given(problems())
@settings(max_examples=examples(80))
def test_the_cheapest_with_axes_that_go_together(problem: tuple[Machine, tuple[int, ...], Layout, Layout]):
    machine, shape, source, target = problem
    memo = MEMOS.setdefault((machine.mesh.sizes, machine.axis_levels), {})
    moves = plan_coarsely(
        source, target, shape, machine.mesh, machine.axis_levels, lambda m: machine.move_time(m, "f32"), memo
    )
    now = source
    for move in moves:
        pieces = shard_count(now, machine.mesh.sizes)
        assert move.elements * pieces == prod(shape)
        assert move.source == group_role(now, move.axes, machine.mesh)
        assert len({role_class(now[axis]) for axis in move.axes}) == 1
        now = move.after(now, machine.mesh)
        assert legal(now, shape, machine.mesh)
    assert now == target
    assert spent(machine, moves) == pytest.approx(coarsened(machine, shape, source, target), abs=1e-10)


@given(problems())
@settings(max_examples=examples(20))
def test_no_cheaper_than_axis_by_axis(problem: tuple[Machine, tuple[int, ...], Layout, Layout]):
    machine, shape, source, target = problem
    if len(machine.mesh.sizes) > 3 and len(shape) > 2:
        return

    def price(move: Move) -> float:
        return machine.move_time(move, "f32")

    moves = plan_coarsely(source, target, shape, machine.mesh, machine.axis_levels, price)
    exact = spent(machine, cheapest_moves(source, target, shape, machine.mesh, price))
    assert spent(machine, moves) >= exact - 1e-10
    if len(machine.mesh.sizes) <= 3:
        assert spent(machine, moves) == pytest.approx(exact, abs=1e-10)
