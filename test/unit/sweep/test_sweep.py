"""Sweeps: times are monotone, rerun points are not searched again, and processes change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.api.options import search_options
from unity_ir.cost.least import emitted_bound, work_bound
from unity_ir.machine import Machine, load
from unity_ir.machine.profile import Profile
from unity_ir.models import from_text
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search import run
from unity_ir.simulate.report import as_emitted
from unity_ir.sweep import run as run_module
from unity_ir.sweep.grid import Grid, Point, machine_tables
from unity_ir.sweep.knobs import Knob
from unity_ir.sweep.monotone import monotone
from unity_ir.sweep.point import Answer
from unity_ir.sweep.programs import Program, figures
from unity_ir.sweep.recipes import Recipe, read_recipe
from unity_ir.sweep.run import How, sweep
from unity_ir.sweep.search import Best
from unity_ir.sweep.store import Store

SMALL = "mlp,hidden=256,layers=2,classes=256"
NOTHING = Store(None, {})


def grid(batch: tuple[int, ...], **knobs: tuple[float, ...]) -> Grid:
    names = {"nvlink": "bandwidth.gpus", "network": "bandwidth.nodes"}
    made = [Knob(names.get(name, name), tuple(sorted(values))) for name, values in knobs.items()]
    return Grid((SMALL,), ("dgx-h100:2x2",), (Knob("batch", tuple(sorted(batch))), *made))


def harder(one: Answer, other: Answer) -> bool:
    """Physics: `one` is nowhere faster, has no more memory and no fewer samples; the batch is the first knob."""
    mine, others = (dict(a.point.settings) for a in (one, other))
    return mine["batch"] >= others["batch"] and all(mine[k] <= others[k] for k in mine if k != "batch")


rates = st.sampled_from([5e8, 2e9, 8e9, 64e9])


@pytest.mark.slow
@settings(max_examples=3)
@given(
    batch=st.sets(st.sampled_from([16, 32, 48, 64]), min_size=1, max_size=2),
    nvlink=st.sets(rates, min_size=1, max_size=2),
    network=st.sets(rates, min_size=1, max_size=2),
    hbm=st.sets(st.sampled_from([1e9, 1e11, 1e12]), min_size=1, max_size=2),
)
def test_time_is_monotone(batch: set[int], nvlink: set[float], network: set[float], hbm: set[float]):
    points = grid((*batch,), nvlink=(*nvlink,), network=(*network,), hbm=(*hbm,)).points()
    answers = sweep(points, How(), NOTHING)
    for one, other in product(answers, answers):
        assert one.seconds is not None
        assert other.seconds is not None
        if harder(one, other):
            assert other.seconds <= one.seconds
            assert other.bound <= one.bound * (1 + 1e-9)
    assert all(answer.gap is not None and answer.gap >= 0 for answer in answers)


@pytest.mark.slow
def test_more_memory_is_never_slower():
    """Some of these sizes fit nothing, some only plans that move more or recompute."""
    values = tuple(5.5e9 + extra for extra in (8e5, 1e6, 1.6e6))
    answers = sweep(grid((64,), memory=values).points(), How(optimizer="adamw"), NOTHING)
    seconds = [answer.seconds for answer in answers]
    known = [s for s in seconds if s is not None]
    assert seconds[0] is None
    assert known == sorted(known, reverse=True)
    assert known[0] > known[-1]
    assert seconds[-len(known) :] == known
    assert all(a.memory is None or a.memory <= a.usable for a in answers)


def test_the_plan_of_a_harder_point_is_taken():
    answers = sweep(grid((16, 32), network=(1e9, 2e9)).points(), How(), NOTHING)
    slow = answers[2]  # 32 samples, the slower network
    assert slow.seconds is not None
    worse = [a if a is slow else replace(a, seconds=2 * slow.seconds, recipe="other") for a in answers]
    found = monotone(worse)
    assert [a.seconds for a in found] == [slow.seconds] * 4
    assert {a.taken for a in found if a.point != slow.point} == {slow.point.title}
    assert monotone(answers) == [replace(a) for a in answers]


@pytest.mark.slow
def test_points_of_a_store_are_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    points = grid((16,), nvlink=(8e9, 64e9), network=(1e9, 2e9)).points()
    store = Store(tmp_path, {"search": "as it is"})
    store.prepare()
    some = sweep(points[:3], How(), store)
    searched: list[str] = []
    best = run_module.PointSearch.best

    def spied(self: run_module.PointSearch, machine: run_module.Machine):
        searched.append(machine.name)
        return best(self, machine)

    monkeypatch.setattr(run_module.PointSearch, "best", spied)
    again = sweep(points, How(), store)
    assert searched == [points[3].changed_machine().name]
    assert again[:3] == some
    assert [a.seconds for a in again] == [a.seconds for a in sweep(points, How(), NOTHING)]
    other = Store(tmp_path, {"search": "another"})
    assert other.read(points[0]) is None
    path = store.path(points[0])
    assert path is not None
    path.write_text("{}")
    assert store.read(points[0]) is None


def test_equal_machines_are_searched_once(monkeypatch: pytest.MonkeyPatch):
    """One node has no network."""
    points = Grid((f"{SMALL},batch=16",), ("dgx-h100",), (Knob("bandwidth.nodes", (1e9, 2e9)),)).points()
    count = 0
    best = run_module.PointSearch.best

    def spied(self: run_module.PointSearch, machine: run_module.Machine):
        nonlocal count
        count += 1
        return best(self, machine)

    monkeypatch.setattr(run_module.PointSearch, "best", spied)
    answers = sweep(points, How(), NOTHING)
    assert count == 1
    assert [a.point for a in answers] == [*points]
    assert answers[0].seconds == answers[1].seconds


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(16, 32), (16,)])
def test_processes_find_the_same(batch: tuple[int, ...]):
    points = grid(batch, network=(1e9, 2e9)).points()
    alone, shared = (sweep(points, How(), NOTHING, jobs) for jobs in (1, 2))
    assert [(a.point, a.seconds, a.recipe) for a in alone] == [(a.point, a.seconds, a.recipe) for a in shared]


@pytest.mark.slow
def test_stages_and_joint_searches_are_no_worse():
    points = grid((64,), network=(1e8,)).points()
    alone, *others = (
        sweep(points, how, NOTHING)[0] for how in (How(), How(has_stages=True), How(joint="corners"), How(joint="all"))
    )
    assert alone.seconds is not None
    for other in others:
        assert other.seconds is not None
        assert other.gap is not None
        assert other.seconds <= alone.seconds
        assert other.gap >= 0
    assert others[1].seconds < alone.seconds
    assert others[1].recipe == "joint"


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(8, 2, 4, 16, "attention"),
        Recipe(zero=1, recompute="auto"),
        Recipe(2, 1, None, 8, "auto", 16, 2),
    ],
)
def test_recipes_are_read_as_written(recipe: Recipe):
    for sp in (False, True):
        assert read_recipe(recipe.text(sp)) == recipe


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL, "gpt2,layers=1,batch=4,sequence=8,hidden=16,heads=4,vocabulary=16"])
def test_a_recipe_is_one_of_degrees(model: str, monkeypatch: pytest.MonkeyPatch):
    """Sequence parallelism is for models that have sequences."""
    best = run_module.PointSearch.best

    def of_tensor_parallelism(self: run_module.PointSearch, machine: Machine) -> Best | None:
        found = best(self, machine)
        return found and replace(found, recipe=Recipe(2))

    monkeypatch.setattr(run_module.PointSearch, "best", of_tensor_parallelism)
    (answer,) = sweep((Point(model, "box:2"),), How(), NOTHING)
    degrees = search_options(f"degrees,{answer.recipe}")
    assert degrees["tp"] == 2
    assert run(from_text(model), load("box:2"), str(degrees.pop("strategy")), Optimizer(), degrees).cost


def test_machines_with_other_profiles_are_others():
    machine = load("box:2")
    profiles = [Profile("v100", {"matmul": {(8, 8, 8): seconds}}) for seconds in (1e-5, 2e-5, 1e-5)]
    measured = [replace(machine, device=replace(machine.device, profile=profile)) for profile in profiles]
    first, second, same = map(machine_tables, measured)
    assert first == same
    assert first != second
    assert machine_tables(machine) not in (first, second)


@settings(max_examples=5)
@given(st.lists(st.sampled_from([1e9, 8e9, 64e9]), min_size=3, max_size=3), st.integers(0, 2))
def test_what_a_program_takes_elsewhere_bounds_it(rates: list[float], which: int):
    """From below as `least` says, and from above by machines that are nowhere faster; the step is that of --stats."""
    recipe = (Recipe(zero=2), Recipe(2, 2), Recipe(2, 1, None, 2))[which]
    text = f"{SMALL},batch=64"
    figures_there = tuple(zip(("hbm", "bandwidth.nodes", "bandwidth.gpus"), (30 * rates[0], *rates[1:]), strict=True))
    here, there = load("dgx-h100:2x2"), Point(text, "dgx-h100:2x2", figures_there).changed_machine()
    graph, optimizer = from_text(text), Optimizer()
    program = Program(recipe.plan(graph, here, optimizer), here, optimizer, recipe)
    assert program.play(here).seconds == as_emitted(program.graph, here, optimizer)[0]
    least = program.least(figures(there))
    seconds = program.play(there).seconds
    assert rates[2] > 50e9 or program.play(here).seconds <= seconds
    assert 0 < least <= seconds
    # A new program, played there first, is bounded here from that.
    other = Program(program.graph, here, optimizer, recipe)
    assert other.play(there).seconds == seconds
    assert 0 < other.least(figures(here)) <= program.play(here).seconds


def test_the_bound_of_work_is_no_more_than_that_of_placements():
    graph, on = from_text("mlp,layers=2"), load("box:4")
    assert 0.9 * emitted_bound(graph, on) < work_bound(graph, on) <= emitted_bound(graph, on)
