"""Programs whose optimizer state rests in the memory of the host: the same steps, copies in the plan's order."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from at_host import order_of_update
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks, check, loaded, saved, trained

from unity_ir.lowering.emit.printer import emit
from unity_ir.lowering.runtime.host import windows as runtime_windows
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer, ParameterGroup
from unity_ir.plan.forward import forward_of
from unity_ir.plan.host_state import GRAIN, StateCopy, WindowUpdate, windows
from unity_ir.plan.instructions import reads
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.search import run
from unity_ir.simulate.full import Timeline, simulate
from unity_ir.simulate.replay import replay

GROUPS = (ParameterGroup("@vectors", (("weight_decay", 0.0), ("lr", 3e-3))),)
ADAMW = Optimizer("adamw", 1e-2, weight_decay=0.1, clip=0.05, ema=0.7, groups=GROUPS)
WINDOW = 6000
"""Bytes: weights of 1,024 elements are in two windows, vectors share one."""


def model() -> Graph:
    return build("gpt2", batch=8, sequence=4, layers=2, hidden=16, heads=2, vocabulary=24)


def planned(
    where: str, offload: str = "state", optimizer: Optimizer = ADAMW, graph: Graph | None = None, **options: Any
) -> tuple[Plan, Graph]:
    graph, on = graph or model(), load(where)
    micro = options.pop("micro_batches", 1)
    made = run(graph, on, "degrees", optimizer, {"zero": 3 if on.devices > 1 else 0}, micro_batches=micro).graph
    made = replace(made, offload=offload)
    step = fuse_collectives(differentiate(made, optimizer, on.mesh))
    given = {"kernels": "torch", "window": WINDOW} | options
    return plan_step(lower(step, on), PlanOptions(**given)), graph


def text(where: str, offload: str = "state", optimizer: Optimizer = ADAMW, **options: Any) -> str:
    plan, graph = planned(where, offload, optimizer, **options)
    return emit(plan, graph).text


def in_double(program: str) -> str:
    """A program in float64, as its `--check` runs it; it has as many elements in a window."""
    found = re.sub(r"\btorch\.float32\b", "torch.float64", program).replace(".float()", ".double()")
    return found.replace(f"STATE_WINDOW = {WINDOW} ", f"STATE_WINDOW = {2 * WINDOW} ")


def equal(a: Any, b: Any) -> bool:
    """Whether two runs hold the same numbers, all bits of them."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[n], b[n]) for n in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(np.array_equal(a, b))


LION = Optimizer("lion", 1e-3, weight_decay=0.1)
CASES: dict[str, tuple[str, Optimizer, dict[str, Any]]] = {
    "one rank": ("dgx-a100:1x1", ADAMW, {}),
    "two ranks, micro-batches": ("dgx-a100:1x2", ADAMW, {"micro_batches": 2}),
    "four ranks, lion": ("dgx-a100:1x4", LION, {}),
    "two ranks, mixed": ("dgx-a100:1x2", ADAMW, {"mixed": True}),
    "two ranks, mixed, Triton": ("dgx-a100:1x2", replace(ADAMW, ema=0.0), {"mixed": True, "kernels": "triton"}),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch_and_of_state_on_the_device(ranks: Ranks, case: str):
    where, optimizer, given = CASES[case]
    given = dict(given)
    graph = mixed_precision(model(), "bf16") if given.pop("mixed", False) else model()
    world, made = load(where).devices, text(where, optimizer=optimizer, graph=graph, **given)
    assert ranks.run(made, world, check, 3) == [[]] * world
    if given.get("kernels") != "triton" and "bf16" not in made:
        other = text(where, "none", optimizer, graph=graph, **given)
        at_host, on_device = (ranks.run(in_double(each), world, trained, 3, True)[0] for each in (made, other))
        assert at_host["apart"] == []
        assert equal(at_host, on_device)


def test_copies_and_updates_are_in_the_order_of_the_plan(ranks: Ranks):
    plan, graph = planned("dgx-a100:1x2")
    states = ADAMW.states
    want: list[tuple[str, int]] = []
    for line in plan.updates:
        match line:
            case StateCopy(kind, _, parts):
                want.append((kind, states * sum(part.size for part in parts)))
            case WindowUpdate(_, parts):
                want += [("update", part.size) for part in parts]
            case _:
                raise AssertionError(line)
    assert len(want) > 40
    assert [kind for kind, _ in want[:2]] == ["from_host", "from_host"]
    for found, _ in ranks.run(emit(plan, graph).text, 2, order_of_update):
        assert found == want


def test_windows_take_what_is_said(ranks: Ranks):
    graph = build("gpt2", batch=8, sequence=4, layers=2, hidden=64, heads=2, vocabulary=256)
    plan, graph = planned("dgx-a100:1x2", graph=graph, window=60_000)
    held = held_in_update(simulate(replay(plan, load("dgx-a100:1x2"))))
    assert 170_000 < held <= 180_000
    for _, slots in ranks.run(emit(plan, graph).text, 2, order_of_update):
        assert slots == pytest.approx(held, rel=0.1)


def held_in_update(timeline: Timeline) -> int:
    """The most bytes that a device holds of state in windows, in a simulated step."""
    tasks = timeline.tasks
    labels = [{tasks.labels[t].what for t in tasks.uses[b]} for b in range(len(tasks.uses))]
    windows = [tasks.uses[b] for b, what in enumerate(labels) if what == {"from_host", "to_host"}]
    sizes = [int(tasks.bytes[b]) for b, what in enumerate(labels) if what == {"from_host", "to_host"}]
    spans = [(timeline.starts[min(uses)], timeline.ends[max(uses)]) for uses in windows]
    return max(sum(n for n, (b, e) in zip(sizes, spans, strict=True) if b <= at < e) for at, _ in spans)


@given(
    st.dictionaries(st.text("ab.", min_size=1), st.integers(1, 5000), max_size=6),
    st.integers(1, 40_000),
    st.sampled_from([4, 8, 12]),
)
def test_windows_divide_all_state(sizes: dict[str, int], most: int, each: int):
    registers = {name: number for number, name in enumerate(sizes)}
    order = [registers[name] for name in sorted(sizes)]
    by_register = {registers[name]: size for name, size in sizes.items()}
    found = windows(order, by_register, dict.fromkeys(order, each), most)
    names = {number: name for name, number in registers.items()}
    parts = [[(names[p.weight], p.begin, p.end) for p in window] for window in found]
    assert parts == runtime_windows(sizes, dict.fromkeys(sizes, each), most)
    ends = dict.fromkeys(sizes, 0)
    for window in parts:
        assert sum(end - begin for _, begin, end in window) * each <= max(most, GRAIN * each)
        for name, begin, end in window:
            assert begin == ends[name] < end
            assert begin % GRAIN == 0
            ends[name] = end
    assert ends == sizes


@pytest.mark.slow
def test_checkpoints_are_those_of_state_on_the_device(ranks: Ranks, tmp_path: Path):
    adam = replace(ADAMW, name="adam", weight_decay=0.0, ema=0.0, groups=())
    at_host, on_device = (text("dgx-a100:1x2", kind, adam) for kind in ("state", "none"))
    folders = {kind: str(tmp_path / kind) for kind in ("host", "device")}
    mine = ranks.run(at_host, 2, saved, 2, folders["host"])[0]
    theirs = ranks.run(on_device, 2, saved, 2, folders["device"])[0]
    assert equal(mine, theirs)
    # Either loads the other's, and goes on alike.
    for program, folder in ((at_host, folders["device"]), (on_device, folders["host"])):
        assert equal(ranks.run(program, 2, loaded, folder)[0], theirs)


MUTANTS = {
    "state does not go back": (
        "leaving[behind] = HostCopy(rests, here, to_host)",
        "leaving[behind] = HostCopy([], [])",
    ),
    "an update waits too late": (
        "            arriving.pop(behind).wait()\n            here, rests = there.pop(behind)\n",
        "            here, rests = there.pop(behind)\n            arriving[behind - 1].wait() if behind else None\n",
    ),
    "a slot is taken too early": ("leaving.pop(number - SLOTS).wait(from_host)", "pass"),
    "the last windows do not go back": ("for copy in leaving.values():", "for copy in [*leaving.values()][:-1]:"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_copies_are_told(ranks: Ranks, mutant: str):
    before, after = MUTANTS[mutant]
    right = text("dgx-a100:1x1", optimizer=replace(ADAMW, groups=()))
    assert right.count(before) == 1
    assert ranks.run(right.replace(before, after), 1, check, 2) != [[]]


def test_copies_are_under_way_beside_updates():
    """In the simulator and in the order of the lines; on one device, where nothing else is under way."""
    plan, _ = planned("dgx-a100:1x1")
    machine = load("dgx-a100:1x1")
    timeline = simulate(replay(plan, machine))
    tasks = timeline.tasks
    spans = {
        kind: [(timeline.starts[t], timeline.ends[t]) for t, label in enumerate(tasks.labels) if label.what == kind]
        for kind in ("from_host", "to_host", "adamw")
    }
    copies = spans["from_host"]
    beside = sum(any(b < ue and ub < e for ub, ue in spans["adamw"]) for b, e in copies)
    assert beside >= len(copies) // 2
    # Of each way one after the other, and both ways at once.
    for kind in ("from_host", "to_host"):
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans[kind]))
    assert any(b < te and tb < e for b, e in copies for tb, te in spans["to_host"])
    waiting = simulate(replay(plan, machine, overlap=False))
    assert waiting.makespan > timeline.makespan


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_a_forward_alone_reads_no_weight_at_the_host(kernels: str):
    """An embedding would read the rows of its table, and cast them, were that not at the host."""
    sizes = {"hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 16, "vocabulary": 32}
    graph = mixed_precision(build("llama3_8b", batch=4, sequence=4, layers=1, **sizes), "bf16")
    machine = load("dgx-a100:1x1")
    at_host, on_device = (planned(machine.name, kind, graph=graph, kernels=kernels)[0] for kind in ("state", "none"))
    moved = {leaf.name for leaf in at_host.program.leaves("weight") if leaf.result in at_host.program.at_host}
    assert len(moved) == len(graph.weights())
    found = [_read_alone(kind, graph, kernels) for kind in ("state", "none")]
    assert moved.isdisjoint(found[0])
    assert bool(found[1]) == (kernels == "triton")
    assert on_device.program.at_host == frozenset()


def _read_alone(offload: str, graph: Graph, kernels: str) -> set[str]:
    """The weights that the forward alone of a step on one device reads themselves, not as casts."""
    machine = load("dgx-a100:1x1")
    made = replace(run(graph, machine, "data-parallel", ADAMW).graph, offload=offload)
    program = lower(differentiate(made, ADAMW, machine.mesh), machine)
    plan = plan_step(forward_of(program, machine), PlanOptions(kernels=kernels))
    read = {r for i in plan.program.body for r in reads(i)}
    return {leaf.name for leaf in plan.program.leaves("weight") if leaf.result in read}


@pytest.mark.parametrize("mixed", [False, True])
def test_devices_hold_no_state(mixed: bool):
    """Nor weights of which they hold casts, in the simulator, the program's types and the cost alike."""
    graph = mixed_precision(model(), "bf16") if mixed else model()
    machine = load("dgx-a100:1x2")
    plans = [planned("dgx-a100:1x2", kind, graph=graph)[0] for kind in ("state", "none")]
    one, other = (replay(plan, machine).always[0] for plan in plans)
    program = plans[0].program
    weights = sum(program.bytes[leaf.result] for leaf in program.leaves("weight"))
    assert len(program.at_host) == (len(program.leaves("weight")) if mixed else 0)
    assert plans[1].program.at_host == plans[1].program.state_at_host == frozenset()
    # The table of an embedding has no kept cast where its rows can be cast as they are read.
    assert other - one == pytest.approx((ADAMW.states + mixed) * weights, rel=0.1 if mixed else 0)
    made = [run(graph, machine, "fsdp", ADAMW, offload=kind) for kind in ("state", "none")]
    held = [sum(each.cost.memory[k] for k in ("weights", "optimizer state")) for each in made]
    assert held[1] - held[0] == made[0].cost.at_host == (ADAMW.states + mixed) * weights
