"""Programs whose saved values are in the memory of the host: the same steps, and what they hold is what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, check, error_in_double, held_in_step, loaded, saved
from test_offload import equal

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan import host_values
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.search import run
from unity_ir.simulate.full import simulate
from unity_ir.simulate.replay import replay

ADAMW = Optimizer("adamw", 1e-2, weight_decay=0.1)
LLAMA = {"kv_heads": 2, "intermediate": 48}
MOE = {**LLAMA, "dispatch": "sparse", "capacity": 100}


@pytest.fixture(autouse=True)
def _small_values(monkeypatch: pytest.MonkeyPatch):
    """All that models as small as these save would stay on the device."""
    monkeypatch.setattr(host_values, "VALUE_BYTES", 512)
    monkeypatch.setattr(host_values, "VALUE_WINDOW", 2048)


def model(name: str = "gpt2", layers: int = 2) -> Graph:
    more = {"gpt2": {}, "llama3_8b": LLAMA, "moe": MOE, "moe without capacity": MOE | {"capacity": 0}}[name]
    return build(name.split()[0], batch=8, sequence=8, layers=layers, hidden=32, heads=4, vocabulary=48, **more)


def planned(where: str, offload: str = "activations", name: str = "gpt2", **options: Any) -> tuple[Plan, Graph]:
    graph, on = model(name, options.pop("layers", 2)), load(where)
    given = {key: options.pop(key) for key in ("micro_batches", "recompute", "loss_pieces") if key in options}
    degrees = options.pop("degrees", {"zero": 3 if on.devices > 1 else 0})
    made = run(graph, on, "degrees", ADAMW, degrees, offload=offload, **given).graph
    made = replace(made, staying=options.pop("staying", 0))
    step = fuse_collectives(differentiate(made, ADAMW, on.mesh))
    return plan_step(lower(step, on), PlanOptions(**{"kernels": "torch", "window": 6000} | options)), graph


def text(where: str, offload: str = "activations", name: str = "gpt2", **options: Any) -> str:
    plan, graph = planned(where, offload, name, **options)
    return emit(plan, graph).text


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "one rank": ("dgx-a100:1x1", "activations", "gpt2", {}),
    "micro-batches, recompute": (
        "dgx-a100:1x1",
        "activations",
        "llama3_8b",
        {"micro_batches": 2, "recompute": "attention"},
    ),
    "two ranks, all": ("dgx-a100:1x2", "all", "llama3_8b", {"micro_batches": 2}),
    "two ranks, some stay": ("dgx-a100:1x2", "all", "gpt2", {"layers": 4, "staying": 40_000, "micro_batches": 2}),
    "two ranks, loss in pieces": ("dgx-a100:1x2", "activations", "gpt2", {"loss_pieces": "2"}),
    "four ranks, tensor parallel": ("dgx-a100:1x4", "activations", "llama3_8b", {"degrees": {"tp": 2, "sp": True}}),
    "four ranks, experts": ("dgx-a100:1x4", "all", "moe", {"degrees": {"ep": 2}, "micro_batches": 2}),
    "four ranks, rows of experts exchanged": (
        "dgx-a100:1x4",
        "activations",
        "moe without capacity",
        {"degrees": {"ep": 4, "exchange": True}, "micro_batches": 2},
    ),
    "four ranks, blocks": ("dgx-a100:1x4", "all", "gpt2", {"recompute": "block", "layers": 4}),
    "two ranks, Triton": ("dgx-a100:1x2", "activations", "gpt2", {"kernels": "triton"}),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch(ranks: Ranks, case: str):
    where, offload, name, options = CASES[case]
    made, world = text(where, offload, name, **options), load(where).devices
    assert made.count("to_host(ctx, ") > 2
    assert ranks.run(made, world, check, 2) == [[]] * world
    if options.get("kernels") != "triton":
        assert max(ranks.run(made, world, error_in_double)) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "options"),
    [
        ("dgx-a100:1x1", "gpt2", {"layers": 6}),
        ("dgx-a100:1x1", "llama3_8b", {"layers": 6, "micro_batches": 2}),
        ("dgx-a100:1x2", "llama3_8b", {"layers": 6, "recompute": "attention", "degrees": {"zero": 2}}),
        ("dgx-a100:1x2", "gpt2", {"layers": 6, "loss_pieces": "2", "kernels": "triton", "degrees": {"zero": 2}}),
        ("dgx-a100:1x4", "moe", {"layers": 4, "degrees": {"ep": 2}}),
    ],
)
def test_ranks_hold_what_is_said(ranks: Ranks, where: str, name: str, options: dict[str, Any]):
    plan, graph = planned(where, "activations", name, **options)
    said = simulate(replay(plan, load(where))).held_between_tasks()
    found = ranks.run(emit(plan, graph).text, load(where).devices, held_in_step)
    assert said == pytest.approx(max(found), rel=0.1)
    assert plan.bytes_of_copies("to_host") > 0.1 * said


MUTANTS = {
    "a copy back is not waited for": (
        "ValueCopy(HostCopy([out], [value.x], stream), lambda: out, out)",
        "ValueCopy(HostCopy([], []), lambda: out, out)",
    ),
    "a value is freed before its copy is out": (
        "ValueCopy(HostCopy([value.x], [x], stream), lambda: value, x)",
        "ValueCopy(HostCopy([], []), lambda: value)",
    ),
    "what the micro-batch before has saved": (
        "    x = x.contiguous()\n",
        "    if ctx.micro_batch:\n        return ValueCopy(HostCopy([], []), lambda: value)\n    x = x.contiguous()\n",
    ),
    "values of one shape share memory": ("    key = name, x.dtype\n", "    key = x.shape, x.dtype\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_copies_are_told(ranks: Ranks, mutant: str):
    before, after = MUTANTS[mutant]
    right = text("dgx-a100:1x1", micro_batches=2)
    assert right.count(before) == 1
    assert ranks.run(right.replace(before, after), 1, check, 1) != [[]]


@pytest.mark.slow
def test_a_run_goes_on_as_with_values_on_the_device(ranks: Ranks, tmp_path: Path):
    """Checkpoints are the same, bit for bit, and either kind of program loads those of the other."""
    at_host, on_device = (text("dgx-a100:1x2", kind, micro_batches=2) for kind in ("activations", "none"))
    mine = ranks.run(at_host, 2, saved, 2, str(tmp_path / "host"))[0]
    theirs = ranks.run(on_device, 2, saved, 2, str(tmp_path / "device"))[0]
    assert equal(mine, theirs)
    for program, folder in ((at_host, "device"), (on_device, "host")):
        assert equal(ranks.run(program, 2, loaded, str(tmp_path / folder))[0], theirs)
