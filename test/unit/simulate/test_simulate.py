"""The execution simulator: the task graph, its timeline, and the memory over it."""

from __future__ import annotations

import json
from random import Random
from xml.etree import ElementTree

import numpy as np
import pytest
from extent import examples
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Mesh
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.data_parallel import data_parallel
from unity_ir.search.baselines.random_plan import sample
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.chains import chain
from unity_ir.simulate.full import Timeline, simulate
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.streams import TICKS, Streams, ticks
from unity_ir.simulate.tasks import KINDS, TaskGraph
from unity_ir.simulate.timeline import timeline_svg
from unity_ir.simulate.trace import trace

MACHINES = [boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6), boxes(2, 3, overhead=1e-6)]

seeds = given(st.integers(0, 10**6), st.sampled_from(MACHINES))


def random_plan(seed: int, machine: Machine, step: bool) -> Graph:
    graph = random_graph(Random(seed), Random(seed).randint(1, 7), dims=(2, 4, 6, 12))
    plan = sample(graph, machine, seed)
    return differentiate(plan, Optimizer(), machine.mesh) if step else plan


def tasks_of(plan: Graph, machine: Machine, **options: object) -> TaskGraph:
    return task_graph(plan, cost(plan, machine), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@seeds
@settings(max_examples=examples(40))
def test_without_overlap_the_time_is_the_sum(seed: int, machine: Machine):
    for step in (False, True):
        plan = random_plan(seed, machine, step)
        said = cost(plan, machine)
        tasks = task_graph(plan, said, overlap=False)
        timeline = simulate(tasks)
        assert timeline.makespan == tasks.ticks.sum()
        assert timeline.seconds == pytest.approx(said.time, abs=len(tasks) / TICKS)


@pytest.mark.slow
@seeds
@settings(max_examples=examples(40))
def test_overlap_lies_between_its_bounds(seed: int, machine: Machine):
    for step in (False, True):
        tasks = tasks_of(random_plan(seed, machine, step), machine)
        timeline = simulate(tasks)
        busy = [timeline.busy(s) for s in range(tasks.streams.count)]
        assert max(busy) <= timeline.makespan <= tasks.ticks.sum()
        path = timeline.critical_path()
        assert tasks.ticks[path].sum() == timeline.makespan
        # No stream does two things at once, and they are done in order.
        for stream in range(tasks.streams.count):
            held = tasks.held.owners[tasks.held.flat == stream]
            assert np.all(timeline.starts[held][1:] >= timeline.ends[held][:-1])


@pytest.mark.slow
@seeds
@settings(max_examples=examples(30))
def test_one_class_stands_for_every_device(seed: int, machine: Machine):
    plan = random_plan(seed, machine, False)
    for overlap in (True, False):
        one = simulate(tasks_of(plan, machine, overlap=overlap))
        every = simulate(tasks_of(plan, machine, overlap=overlap, axes=range(len(machine.mesh.sizes))))
        assert every.tasks.streams.classes == machine.devices
        assert every.makespan == one.makespan
        assert len(every.tasks) > len(one.tasks)
        curve = held_over_time(one)
        for of in range(machine.devices):
            other = held_over_time(every, of)
            assert np.array_equal(curve.ticks, other.ticks)
            assert np.array_equal(curve.bytes, other.bytes)


@seeds
@settings(max_examples=examples(30))
def test_a_longer_task_never_shortens_the_whole(seed: int, machine: Machine):
    tasks = tasks_of(random_plan(seed, machine, False), machine)
    before = simulate(tasks).ends
    task = Random(seed).randrange(len(tasks))
    tasks.ticks[task] += 10**6
    after = simulate(tasks).ends
    assert np.all(after >= before)
    assert after.max() <= before.max() + 10**6


@seeds
@settings(max_examples=examples(30))
def test_memory_is_that_of_the_cost_model_at_most(seed: int, machine: Machine):
    """Nothing is held twice: at once there is at most what there ever is, and what is always there is."""
    plan = random_plan(seed, machine, False)
    timeline = simulate(tasks_of(plan, machine))
    curve = held_over_time(timeline)
    assert np.all(curve.bytes >= timeline.tasks.always[0])
    assert curve.peak <= timeline.tasks.always[0] + timeline.tasks.bytes.sum()
    assert np.all(np.diff(curve.ticks) > 0)
    assert curve.bytes[-1] == timeline.tasks.always[0]


def two_layers() -> Graph:
    """x -> matmul a -> matmul b -> mean."""
    x = leaf("input", tensor_type((1024, 512), "f32"), name="x").result
    a, b = (leaf("weight", tensor_type((512, 512), "f32"), name=n).result for n in "ab")
    h = apply("matmul", [apply("matmul", [x, a]).result, b]).result
    mean = apply("reduce_mean", [apply("reduce_mean", [h], {"dim": 0}).result], {"dim": 0}).result
    return Graph("f", (x.node,), (mean,))


def timeline_of_two_layers() -> Timeline:
    machine = boxes(2, overhead=1e-6)
    plan = data_parallel(two_layers(), machine)
    return simulate(tasks_of(plan, machine))


def test_gradients_are_synchronised_beside_the_backward():
    """Data parallel: the second weight's gradient is sent while the first one's is computed, and updated after both."""
    timeline = timeline_of_two_layers()
    labels = timeline.tasks.labels
    syncs = [t for t, label in enumerate(labels) if KINDS[label.kind] == "gradient sync"]
    assert [labels[t].of for t in syncs if labels[t].of in ("a", "b")] == ["b", "a"]
    backward = [t for t, label in enumerate(labels) if label.what == "matmul backward"]
    first, second = syncs
    assert timeline.starts[first] == timeline.ends[backward[0]] == timeline.starts[backward[1]]
    assert timeline.starts[second] == max(timeline.ends[backward[1]], timeline.ends[first])
    updates = [t for t, label in enumerate(labels) if KINDS[label.kind] == "update"]
    assert timeline.starts[updates[0]] == timeline.ends[second]
    assert timeline.makespan == timeline.ends[updates[-1]]


def test_memory_of_two_layers():
    """Each activation until its backward; the peak is when the gradient of the second product's operand is there."""
    timeline = timeline_of_two_layers()
    curve = held_over_time(timeline)
    weights, piece = 2 * 512 * 512 * 4, 512 * 512 * 4
    assert timeline.tasks.always[0] == weights + piece
    # Both products' results, gradients of both, and that of the second weight.
    assert curve.peak == pytest.approx(weights + piece + 5 * piece, rel=0.01)
    assert held_over_time(timeline).bytes[-1] == weights + piece


def test_weights_that_rest_divided_are_gathered_one_operator_ahead():
    """The gather of b runs beside the product with a."""
    machine = boxes(2, overhead=1e-6)
    graph = two_layers()
    nodes = [n for n in graph.nodes() if n.is_compute]
    divided = {n: tuple(n.analysis.splittable)[:1] for n in nodes}
    rests = {v.result: ((0,) if v.op == "input" else (1,)) for v in graph.nodes() if v.is_leaf}
    plan = materialise(graph, divided, machine.mesh, rests)
    timeline = simulate(tasks_of(plan, machine))
    gathers = [t for t, label in enumerate(timeline.tasks.labels) if label.what == "all_gather" and label.kind == 1]
    products = [t for t, label in enumerate(timeline.tasks.labels) if label.what == "matmul"]
    assert len(gathers) == 2
    assert timeline.starts[gathers[0]] == 0
    assert timeline.starts[gathers[1]] == timeline.ends[gathers[0]]
    assert timeline.starts[products[0]] == timeline.ends[gathers[0]]
    assert timeline.starts[products[1]] == max(timeline.ends[products[0]], timeline.ends[gathers[1]])


def test_classes_of_pinned_axes():
    machine = boxes(2, 2)
    streams = Streams(machine, (0,))
    assert streams.classes == 2
    assert [streams.class_of(d) for d in range(4)] == [0, 0, 1, 1]
    assert streams.where(("m", "n")) == (0, 1)
    assert streams.where((-4, "n")) == (0,)
    assert streams.where((-5, "n")) == (1,)
    assert machine.mesh == Mesh((2, 2))


def test_moves_of_a_reshard_follow_each_other():
    """Also where they cross different levels, each told apart from what is there already."""
    streams = Streams(boxes(2, 2))
    steps = [("all_gather", 5, (0,), ((0,),)), ("all_gather", 7, (1,), ((0,),)), ("slice", 1, (), ((0,),))]
    (_, first), (_, second), (_, third) = chain(streams, steps, 3, (1,), overlap=True)
    assert first == (5, (0, 1), (1,), (1,), (3,))
    assert second == (7, (0, 2), (2,), (3,), (3,))
    # A local move after a collective is done where that one was.
    assert third == (1, (0, 2), (2,), (3,), (3,))
    (_, waiting), *_ = chain(streams, steps, 3, (1,), overlap=False)
    assert waiting[2] == (0, 1)


def test_trace_is_of_the_trace_event_format():
    timeline = timeline_of_two_layers()
    read = json.loads(trace(timeline, 'a "title" </x>'))
    events = read["traceEvents"]
    shown = [e for e in events if e["ph"] == "X"]
    per_device = sum(len(timeline.tasks.held[t]) for t in range(len(timeline.tasks)) if timeline.tasks.ticks[t])
    assert len(shown) == 2 * per_device
    assert {e["pid"] for e in shown} == {0, 1}
    assert max(e["ts"] + e["dur"] for e in shown) == pytest.approx(timeline.seconds * 1e6)
    assert all({"pid", "tid", "ts", "dur", "name", "cat", "cname"} <= set(e) for e in shown)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["device 0", "device 1"]
    held = [e for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(e["args"]["bytes"] for e in held) == held_over_time(timeline).peak
    assert "all_reduce of b" in {e["name"] for e in shown}


def test_large_machines_are_shown_by_class():
    machine = boxes(2, 2, 2, 3, 3)
    graph = two_layers()
    everywhere = {n: (-3,) * len(machine.mesh.sizes) for n in graph.nodes() if n.is_compute}
    timeline = simulate(tasks_of(materialise(graph, everywhere, machine.mesh), machine))
    read = json.loads(trace(timeline, "t"))
    names = [e["args"]["name"] for e in read["traceEvents"] if e["name"] == "process_name"]
    assert names == ["device 0 and 71 more like it"]


def test_timeline_is_well_formed():
    timeline = timeline_of_two_layers()
    root = ElementTree.fromstring(timeline_svg(timeline, "<f> & co"))
    texts = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("<f> & co" in text for text in texts)
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(text.startswith("gradient sync: all_reduce of b") for text in titles)


def test_lstm_fits_every_machine():
    """Several results per operator, constants, values with many users."""
    graph = build("rnnlm", batch=4, steps=2, hidden=8, vocabulary=16)
    for machine in MACHINES[:2]:
        for seed in range(3):
            plan = sample(graph, machine, seed)
            waiting = simulate(tasks_of(plan, machine, overlap=False))
            assert simulate(tasks_of(plan, machine)).makespan <= waiting.makespan


def test_times_beyond_ticks_are_refused():
    with pytest.raises(UnityError, match=r"^simulate: a task takes 1e\+07 s; check the machine's figures"):
        ticks(1e7)
    with pytest.raises(UnityError, match=r"^simulate: a task takes nan s"):
        ticks(float("nan"))
