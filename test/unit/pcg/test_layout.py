"""Views say which axes of the machine do what, and nothing is lost between the two."""

from itertools import product
from random import Random

import numpy as np
import pytest
from devices import layouts, scatter, there
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.errors import UnityError
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, grid, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Mesh,
    axes_of,
    dual,
    layout_type,
    layout_view,
    mesh_of,
    piece_index,
    pinned_at,
    pins_of,
    place,
    prime_factors,
    view_of,
    with_views,
)
from unity_ir.pcg.types import tensor_type
from unity_ir.pcg.view import View
from unity_ir.search.baselines.random_plan import sample

MESHES = [(), (2,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 2, 2, 2)]


@pytest.mark.slow
@given(st.sampled_from(MESHES), st.data())
@settings(max_examples=300)
def test_view_says_what_every_axis_does(sizes: tuple[int, ...], data: st.DataObject):
    mesh, order = Mesh(sizes), ("m", "n", COPY, frozenset({"x"}))
    assignment = tuple(data.draw(st.sampled_from([*order, REPEAT, *map(pinned_at, range(size))])) for size in sizes)
    view = view_of(assignment, order, mesh)
    used = [what for what in order if what in assignment]
    assert sorted(view.devices()) == [d for d in range(mesh.devices) if there(d, pins_of(assignment), mesh)]
    assert axes_of(view, used, mesh, "f") == assignment


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(), (12,), (4, 6)])
def test_view_of_a_layout_puts_pieces_where_devices_hold_them(sizes: tuple[int, ...], shape: tuple[int, ...]):
    mesh = Mesh(sizes)
    positions = np.arange(int(np.prod(shape))).reshape(shape)
    for layout in layouts(shape, mesh):
        type = layout_type(tensor_type(shape, "f32"), layout, mesh)
        node = leaf("weight", type, layout_view(layout, len(shape), mesh), name="w")
        assert place(Graph("f", (), (node.result,)), mesh).layouts[node.result] == layout
        assert layout_type(tensor_type(shape, "f32"), dual(layout), mesh) is type.dual
        held = scatter(positions, layout, mesh) if SUM not in layout else []
        for device, array in enumerate(held):
            for dim, size in enumerate(array.shape):
                index, count = piece_index(layout, mesh, device, dim)
                assert (count, size) == (type.degrees[dim], type.piece_shape[dim])
                assert set((np.array(np.unravel_index(array, shape))[dim] // size).flat) == {index}


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from([(2, 2), (2, 3), (2, 2, 2)]))
@settings(max_examples=40)
def test_writing_views_down_changes_no_place(seed: int, sizes: tuple[int, ...]):
    machine = boxes(*sizes)
    plan = differentiate(sample(random_graph(Random(seed), 5), machine, seed), Optimizer(), machine.mesh)
    before = place(plan, machine.mesh)
    written = with_views(plan, before)
    after = place(written, machine.mesh)
    assert all(n.view is not None and n.view.degrees == grid(n) for n in written.nodes() if not n.is_parallel)
    assert [before.layouts[v] for v in plan.roots] == [after.layouts[v] for v in written.roots]
    assert [before.assignments[n] for n in plan.nodes() if n.is_compute] == [
        after.assignments[n] for n in written.nodes() if n.is_compute
    ]


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View(0, (((2, 4),),), ((2, 1),)), "names device 5, but the machine has 4 devices"),
        (View(1, (((2, 1),),)), r"leads around the machine's axes; start it at a device whose coordinates there are 0"),
        (View(0, (((2, 1),),), ((2, 1),)), r"use no axis twice"),
        (View(0, (((4, 1),),)), None),
        (View(0, (((2, 2), (2, 1)),)), None),
        (View(0, (((2, 1), (2, 2)),)), r"does not follow the machine's axes, outermost first: 2 @ 2, 2 @ 1"),
    ],
)
def test_view_that_does_not_fit_the_machine_is_refused(view: View, message: str | None):
    degree = view.degrees[0]
    x = leaf("input", tensor_type((8,), "f32", (degree,)), view, name="x").result
    if message is None:
        assert place(Graph("f", (), (x,)), Mesh((2, 2))).layouts[x] == (0, 0)
        return
    with pytest.raises(UnityError, match=rf"^pcg\.input: .*{message}"):
        place(Graph("f", (), (x,)), Mesh((2, 2)))


def test_axes_a_view_leaves_out_are_pinned():
    mesh = Mesh((2, 3, 2))
    x = leaf("input", tensor_type((8,), "f32", (2,)), View(8, (((2, 1),),)), name="x").result
    assert place(Graph("f", (), (x,)), mesh).layouts[x] == (pinned_at(1), pinned_at(1), 0)
    y = apply("relu", [x]).result
    assert place(Graph("f", (), (y,)), mesh).layouts[y] == (pinned_at(1), pinned_at(1), 0)


def test_view_that_does_not_fit_the_node_is_refused():
    x = leaf("input", tensor_type((8,), "f32", (2,)), name="x").result
    with pytest.raises(UnityError, match=r"^pcg\.relu: its view has degrees \[4\], but its task grid is \[2\]"):
        apply("relu", [x], view=View(0, (((4, 1),),)))
    with pytest.raises(UnityError, match=r"^pcg\.relu: its view gives one device two tasks"):
        apply("relu", [x], view=View(0, (((2, 0),),)))
    with pytest.raises(UnityError, match=r"^pcg\.relu: its view gives one device two tasks"):
        apply("relu", [x], view=View(-1, (((2, 1),),)))


def test_views_are_judged_as_their_devices_would_be():
    """By their factors where these tell: a million devices are not listed for every node."""
    factors = [(f, s) for f in (1, 2, 3) for s in range(8)]
    for axes in product(factors, repeat=3):
        view = View(1, ((axes[0],), (axes[1],)), (axes[2],))
        devices = view.devices()
        assert view.last == max(devices), view
        assert view.is_injective == (len(set(devices)) == len(devices)), view
    huge = View(0, (((10**6, 10**6),), ((10**6, 1),)))
    assert huge.last == 10**12 - 1
    assert huge.is_injective
    assert not View(0, (((10**6, 1),), ((10**6, 1),))).is_injective


def test_degree_that_the_machine_does_not_have_is_refused():
    x = leaf("input", tensor_type((9,), "f32", (3,)), name="x").result
    with pytest.raises(UnityError, match=r"^pcg\.input: a degree of 3 is left over on a machine of 4 devices"):
        place(Graph("f", (), (x,)), Mesh((2, 2)))


@given(st.integers(1, 10**4))
def test_prime_factors(number: int):
    factors = prime_factors(number)
    assert int(np.prod(factors)) == number
    assert all(prime_factors(f) == (f,) for f in factors)
    assert mesh_of(number).devices == number
