"""State at the host where memory is short: what the search chooses, by what recompute and copies cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.machine.device import HostLink
from unity_ir.machine.model import Machine
from unity_ir.models import build
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.plan import host_values, plan
from unity_ir.plan.plan import PlanOptions
from unity_ir.search import run
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.result import SearchResult
from unity_ir.simulate.report import as_emitted

ADAMW = Optimizer("adamw")
FAST = HostLink(1e15, 1e15)
SLOW = HostLink(1e7, 1e7)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch):
    """All state of models as small as these would be in one window, and all values stay on the device."""
    monkeypatch.setattr(plan, "DEFAULT", PlanOptions(window=2**16))
    monkeypatch.setattr(host_values, "VALUE_BYTES", 2**12)
    monkeypatch.setattr(host_values, "VALUE_WINDOW", 2**16)


@cache
def model() -> Graph:
    return build("gpt2", batch=8, sequence=16, layers=2, hidden=256, heads=2, vocabulary=256)


def machine(usable: int, host: HostLink | None = FAST) -> Machine:
    found = load("dgx-a100:1x2")
    return replace(found, device=replace(found.device, memory=usable, reserve=0, host=host))


def planned(usable: int, host: HostLink | None = FAST, strategy: str = "fsdp", offload: str = "auto") -> SearchResult:
    return run(model(), machine(usable, host), strategy, ADAMW, recompute="auto", offload=offload)


@cache
def need(offload: str, strategy: str = "fsdp") -> int:
    found = run(model(), machine(10**12), strategy, ADAMW, offload=offload)
    return max(as_emitted(found.graph, machine(10**12), ADAMW)[1], found.cost.memory_bytes)


@pytest.mark.parametrize("strategy", ["fsdp", "joint"])
def test_a_plan_that_fits_stays_as_it_is(strategy: str):
    least = need("none", strategy)
    assert planned(least, strategy=strategy).graph == planned(least, offload="none", strategy=strategy).graph
    assert planned(least, strategy=strategy).graph.offload == "none"


def test_the_cheaper_of_copies_and_recompute_is_chosen():
    short = need("none") - 100_000
    fast, slow, alone = (planned(short, host) for host in (FAST, SLOW, None))
    assert fast.graph.offload == "state"
    assert not not_kept(fast.graph)
    assert slow.graph.offload == alone.graph.offload == "none"
    assert not_kept(slow.graph)
    assert slow.graph == alone.graph
    seconds = [as_emitted(r.graph, machine(short, h), ADAMW)[0] for r, h in ((fast, FAST), (slow, SLOW))]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(("strategy", "times"), [("zero3", 4.5), ("joint", 3.8)])
def test_state_goes_to_the_host_where_nothing_else_fits(strategy: str, times: float):
    """Weights, gradients and state of all alone are more than the devices have; without offload it is refused."""
    found = planned(10**12, offload="none")
    little = int(times * found.cost.memory["weights"])
    with pytest.raises(UnityError, match="use more"):
        planned(little, offload="none", strategy=strategy)
    with pytest.raises(UnityError, match="use more"):
        planned(little, None, strategy)
    made = planned(little, SLOW, strategy)
    assert made.graph.offload == "state"
    assert needed(made.graph, made.cost, ADAMW) <= little


def test_a_host_with_less_memory_than_that_takes_is_no_place():
    short = need("none") - 100_000
    small = replace(FAST, memory=1000)
    assert planned(short, small).graph.offload == "none"
    with pytest.raises(
        UnityError, match=r"^offload: the state takes .* of the host for each device, and .* has 1.00 kB"
    ):
        planned(short, small, offload="state")


def test_micro_batches_keep_state_at_the_host():
    graph, on = mixed_precision(model(), "bf16"), machine(10**9)
    for strategy in ("fsdp", "joint"):
        found = run(graph, on, strategy, ADAMW, micro_batches=2, offload="state")
        assert found.graph.offload == "state"
        assert found.cost.memory["optimizer state"] == 0
        assert found.cost.at_host == 3 * found.cost.memory["gradients"]


SGD = Optimizer()


@cache
def longer() -> tuple[Graph, int]:
    """A model whose activations take most of the memory, and what it needs without state."""
    graph = build("gpt2", batch=8, sequence=128, layers=4, hidden=64, heads=2, vocabulary=64)
    found = run(graph, machine(10**12), "fsdp", SGD)
    return graph, needed(found.graph, replace(found.cost, machine=machine(1)), SGD)


def test_values_go_if_that_is_faster_than_recompute():
    """As many as the device has no room for; where there is no state, nothing else could go."""
    graph, whole = longer()
    limit = whole * 2 // 3

    def planned(host: HostLink, kind: str) -> SearchResult:
        return run(graph, machine(limit, host), "fsdp", SGD, recompute="auto", offload=kind)

    def bytes_needed(found: SearchResult) -> int:
        return needed(found.graph, replace(found.cost, machine=machine(1)), SGD)

    fast, slow, alone = planned(FAST, "auto"), planned(SLOW, "auto"), planned(FAST, "none")
    assert fast.graph.offload == "activations"
    assert fast.graph.staying > 0
    assert slow.graph == alone.graph
    assert not_kept(slow.graph)
    assert as_emitted(fast.graph, machine(limit), SGD)[0] < as_emitted(alone.graph, machine(limit), SGD)[0]
    every = planned(FAST, "activations")
    assert every.graph.staying == 0
    assert 0 < fast.cost.activations_at_host < every.cost.activations_at_host
    assert bytes_needed(every) < 0.8 * limit < bytes_needed(fast) <= limit


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("joint", marks=pytest.mark.zoo)])
def test_values_do_not_go_to_a_host_without_room_for_them(strategy: str):
    """Copies over this link would be faster than recompute, but the host has no memory for the values."""
    graph, whole = longer()
    small = machine(whole * 2 // 3, replace(FAST, memory=1000))
    found = run(graph, small, strategy, ADAMW, recompute="auto")
    assert found.graph.offload == "none"
    assert found.graph == run(graph, small, strategy, ADAMW, recompute="auto", offload="none").graph


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("joint", marks=pytest.mark.zoo)])
def test_auto_is_as_fast_as_each_kind(strategy: str):
    graph, whole = longer()
    link = replace(FAST, from_host=25e9, to_host=25e9)
    on = machine(whole * 2 // 3, link)
    found: dict[str, float] = {}
    for kind in ("auto", "none", "state", "activations", "all"):
        made = run(graph, on, strategy, ADAMW, recompute="auto", offload=kind)
        found[kind] = as_emitted(made.graph, on, ADAMW)[0]
    assert found["auto"] == min(found.values())
    assert found["auto"] < found["none"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_joint_puts_values_at_the_host_as_asked_for(micro_batches: int):
    limit = need("none") - 100_000
    found = run(model(), machine(limit), "joint", ADAMW, offload="all", micro_batches=micro_batches)
    assert found.graph.offload == "all"
    assert found.cost.memory["optimizer state"] == 0
    assert found.cost.activations_at_host > 0
    if micro_batches == 1:
        # It is of all plans, whatever memory they take, so also of those of a device with all memory.
        free = run(model(), machine(10**12), "joint", ADAMW, offload="none")
        assert found.bound is not None
        assert 0 < found.bound <= free.cost.time * (1 + 1e-9)
    else:
        assert found.bound is None


def test_a_host_without_room_for_values_is_refused():
    small = replace(FAST, memory=1000)
    with pytest.raises(UnityError, match=r"^offload: activations take .* of the host for each device, and .* 1.00 kB"):
        planned(10**12, small, offload="activations")
