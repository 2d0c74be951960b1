"""The planner's moves do on simulated devices what they say, there are no others, and its plans are the cheapest."""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np
import pytest
from devices import layouts, legal, perform, scatter, stands_for
from extent import examples
from graphs import boxes
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.machine import Machine
from unity_ir.pcg.collectives import FROM_ONE, PLANNED
from unity_ir.pcg.reshard import Move, cheapest_moves, move_kind, moves_from
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, Layout, Mesh, dual, layout_type, pinned_at, pins_of
from unity_ir.pcg.types import tensor_type
from unity_ir.search.layouts.space import Spaces

MESHES = [(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 2, 3)]
EXACT = [((2, 2), (4, 8)), ((2, 3), (6, 12)), ((3, 2), (6,)), ((2, 2, 2), (8, 2)), ((2, 2, 3), (12,)), ((2, 2), ())]


def value(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(1, prod(shape) + 1).reshape(shape)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], Layout, Layout]:
    mesh = Mesh(draw(st.sampled_from(MESHES)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 12, 24]), max_size=3)))
    roles = (*range(len(shape)), COPY, SUM, REPEAT)
    layout = st.tuples(*(st.sampled_from((*roles, *map(pinned_at, range(size)))) for size in mesh.sizes))
    layout = layout.filter(lambda x: legal(x, shape, mesh))
    return mesh, shape, draw(layout), draw(layout)


def between(a: Layout, b: Layout, shape: tuple[int, ...], mesh: Mesh) -> Move | None:
    """The one move that could lead from a layout to another: axes of one role all get one other."""
    axes = tuple(i for i, (p, q) in enumerate(zip(a, b, strict=True)) if p != q)
    if len({a[i] for i in axes}) != 1 or len({b[i] for i in axes}) != 1:
        return None
    source, target = a[axes[0]], b[axes[0]]
    elements = prod(layout_type(tensor_type(shape, "f32"), a, mesh).piece_shape)
    return Move(move_kind(source, target), axes, source, target, prod(mesh.sizes[i] for i in axes), elements)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "shape"), EXACT)
def test_moves_are_just_those_that_work(sizes: tuple[int, ...], shape: tuple[int, ...]):
    mesh = Mesh(sizes)
    legal_ones = layouts(shape, mesh)
    kinds: set[str] = set()
    for a in legal_ones:
        held = scatter(value(shape), a, mesh)
        assert stands_for(held, value(shape), a, mesh)
        found = {after: move for move, after in moves_from(a, shape, mesh)}
        assert len(found) == sum(1 for _ in moves_from(a, shape, mesh))
        for b in legal_ones:
            move = between(a, b, shape, mesh) if a != b else None
            works = move is not None and stands_for(perform(move, held, mesh), value(shape), b, mesh)
            assert found.get(b) == (move if works else None)
        assert found.keys() <= set(legal_ones)
        kinds |= {m.kind for m in found.values()}
    assert kinds == set(PLANNED) - set(FROM_ONE) - ({"all_to_all"} if len(shape) < 2 else set()) - (
        {"slice", "all_gather", "reduce_scatter"} if not shape else set()
    )


@pytest.mark.slow
@given(problems(), st.sampled_from([0.0, 1e-6]))
@settings(max_examples=examples(200))
def test_plan_leads_to_the_target(problem: tuple[Mesh, tuple[int, ...], Layout, Layout], overhead: float):
    mesh, shape, source, target = problem
    machine = boxes(*mesh.sizes, overhead=overhead)
    for a, b in ((source, target), (dual(target), dual(source))):
        held = scatter(value(shape), a, mesh)
        for move in cheapest_moves(a, b, shape, mesh, lambda m: machine.move_time(m, "f32")):
            held = perform(move, held, mesh)
        assert stands_for(held, value(shape), b, mesh)


@cache
def working(sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int, Move]]:
    """Every move that works, from one layout to another, by their numbers."""
    mesh, found = Mesh(sizes), list[tuple[int, int, Move]]()
    nodes = layouts(shape, mesh)
    for i, a in enumerate(nodes):
        held = scatter(value(shape), a, mesh)
        for j, b in enumerate(nodes):
            move = between(a, b, shape, mesh) if a != b else None
            if move is not None and stands_for(perform(move, held, mesh), value(shape), b, mesh):
                found.append((i, j, move))
    return found


@cache
def cheapest(sizes: tuple[int, ...], shape: tuple[int, ...], overhead: float) -> np.ndarray:
    """Bellman-Ford between all pairs, over every move that works."""
    machine, size = boxes(*sizes, overhead=overhead), len(layouts(shape, Mesh(sizes)))
    edges = np.full((size, size), np.inf)
    np.fill_diagonal(edges, 0.0)
    for i, j, move in working(sizes, shape):
        edges[i, j] = machine.move_time(move, "f32")
    table = edges
    while True:
        better = np.min(table[:, :, None] + edges[None], axis=1)
        if np.allclose(better, table, rtol=0, atol=1e-15):
            return table
        table = np.minimum(better, table)


@pytest.mark.slow
@pytest.mark.parametrize("overhead", [0.0, 1e-6])
@pytest.mark.parametrize(("sizes", "shape"), [((2, 2), (4, 8)), ((2, 3), (6, 6)), ((2, 2, 2), (8,)), ((3,), (6, 3))])
def test_plan_and_search_agree_with_bellman_ford(sizes: tuple[int, ...], shape: tuple[int, ...], overhead: float):
    mesh, machine = Mesh(sizes), boxes(*sizes, overhead=overhead)
    nodes, expected = layouts(shape, mesh), cheapest(sizes, shape, overhead)
    space = Spaces(machine).of(shape, "f32")
    roles = [[space.role(r) for r in layout] for layout in nodes]
    counts = np.array([[[int(c == r) for c in range(space.roles)] for r in layout] for layout in roles])
    at = space.find(counts)
    assert len(space) == len(nodes)
    np.testing.assert_allclose(space.forward[np.ix_(at, at)], expected, rtol=0, atol=1e-10)
    duals = [nodes.index(dual(x)) for x in nodes]
    np.testing.assert_allclose(
        space.training[np.ix_(at, at)], expected + expected[np.ix_(duals, duals)].T, rtol=0, atol=1e-10
    )
    for i in range(0, len(nodes), 3):
        for j in range(0, len(nodes), 2):
            steps = cheapest_moves(nodes[i], nodes[j], shape, mesh, lambda m: machine.move_time(m, "f32"))
            assert sum(machine.move_time(m, "f32") for m in steps) == pytest.approx(expected[i, j], abs=1e-10)


def entering(machine: Machine, shape: tuple[int, ...], source: Layout, target: Layout) -> float:
    """
    Seconds it takes at least for what a part of the machine does not have to enter it, whatever the collectives.

    Parts are what the inner levels make up; into each leads one link per device, of one of the levels outside it.
    """
    mesh, positions = machine.mesh, np.arange(prod(shape)).reshape(shape)
    have, need = scatter(positions, source, mesh), scatter(positions, target, mesh)
    bound, size = 0.0, 1
    for i in reversed(range(len(machine.levels))):
        fastest = max(level.bandwidth for level in machine.levels[: i + 1])
        for start in range(0, mesh.devices, size):
            part = range(start, start + size)
            missing = set[int]().union(*(need[d].flat for d in part)) - set[int]().union(*(have[d].flat for d in part))
            bound = max(bound, len(missing) * 4 / size / fastest)
        size *= machine.levels[i].size
    return bound


@pytest.mark.slow
@given(problems())
@settings(max_examples=examples(200))
def test_no_plan_beats_the_cut(problem: tuple[Mesh, tuple[int, ...], Layout, Layout]):
    mesh, shape, source, target = problem
    if pins_of(source) or pins_of(target):
        return
    if SUM in source or SUM in target:
        source, target = (tuple(REPEAT if r == SUM else r for r in x) for x in (source, target))
    machine = boxes(*mesh.sizes)
    steps = cheapest_moves(source, target, shape, mesh, lambda m: machine.move_time(m, "f32"))
    assert sum(machine.move_time(m, "f32") for m in steps) >= entering(machine, shape, source, target) * (1 - 1e-9)


def test_moves_within_one_level_are_one_collective():
    machine = boxes(8)
    mesh = machine.mesh
    (gather,) = cheapest_moves((0, 0, 0), (REPEAT,) * 3, (64,), machine.mesh, lambda m: machine.move_time(m, "f32"))
    assert (gather.kind, gather.group, gather.elements, gather.traffic(mesh)) == ("all_gather", 8, 8, 8 * 7 * 8)
