"""With which size of buckets a plan is given: the fastest of those tried, where calls take long."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import plan_graph
from unity_ir.plan.schedule import BUCKET_BYTES
from unity_ir.search.run import run
from unity_ir.simulate.buckets import latency_bytes, sizes
from unity_ir.simulate.report import as_emitted, emitted_step, step_seconds, with_best_bucket

SIZES = {"batch": 32, "sequence": 32, "layers": 2, "hidden": 256, "heads": 4, "vocabulary": 512}


def plan(where: str, strategy: str) -> Graph:
    return run(build("bert_large", **SIZES), load(where), strategy, Optimizer("adam")).graph


@pytest.mark.parametrize("where", ["dgx-h100", "2gpu", "box:8"])
def test_within_a_node_there_is_one_size(where: str):
    assert sizes(load(where)) == []
    assert plan(where, "data-parallel").bucket == 0


def test_latency_grows_with_nodes():
    found = [latency_bytes(load(where)) for where in ("dgx-h100:1x1", "dgx-h100:2", "dgx-h100:8", "dgx-h100:64")]
    assert found[0] == 0
    assert found == sorted(found)
    assert sizes(load("dgx-h100:2")) == [BUCKET_BYTES * 4**i for i in range(1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "data-parallel"])
def test_a_plan_has_the_fastest_size_of_those_tried(strategy: str):
    on, adam = load("dgx-h100:4"), Optimizer("adam")
    found = plan("dgx-h100:4", strategy)
    assert found.bucket > 0
    seconds = {
        size: step_seconds(plan_graph(replace(found, bucket=size), on, adam), on)[0]
        for size in (BUCKET_BYTES, *sizes(on))
        if size <= found.bucket
    }
    assert seconds[found.bucket] == min(seconds.values()) < seconds[BUCKET_BYTES]
    assert as_emitted(found, on, adam)[0] == seconds[found.bucket]
    step = emitted_step(replace(found, bucket=0), on, adam)
    assert (step.bucket, step.seconds, step.least) == (found.bucket, seconds[BUCKET_BYTES], seconds[found.bucket])
    assert with_best_bucket(replace(found, bucket=0), on, adam) == found
    assert erase(found).bucket == 0


def test_sizes_that_each_gradient_fills_alone_do_not_end_the_search_for_one():
    """Gradients of 16 MiB have calls of their own below 64 MiB, which then holds four."""
    on = load("dgx-h100:4")
    found = run(build("mlp", batch=32, hidden=2048, classes=2048, layers=8), on, "data-parallel", Optimizer("sgd"))
    assert found.graph.bucket >= 2**26


def test_a_size_that_is_given_stays():
    on = load("dgx-h100:4")
    given = replace(plan("dgx-h100:4", "data-parallel"), bucket=2**21)
    assert with_best_bucket(given, on, Optimizer("adam")) == given


def test_no_size_takes_memory_that_is_not_there():
    """Sums that share a call wait for its last member."""
    on, adam = load("dgx-h100:4"), Optimizer("adam")
    found = plan("dgx-h100:4", "data-parallel")
    most = as_emitted(found, on, adam)[1]
    found = replace(found, bucket=0)
    free = emitted_step(found, on, adam)
    assert free.peak < most
    small = replace(on, device=replace(on.device, memory=free.peak, reserve=0))
    best = with_best_bucket(found, small, adam)
    assert as_emitted(best, small, adam)[1] <= free.peak


def test_a_plan_without_a_program_keeps_the_default(monkeypatch: pytest.MonkeyPatch):
    """As does one whose comparison Ctrl-C ends, which is marked as interrupted; within a node nothing is simulated."""
    thrown: list[BaseException] = [UnityError("no program"), KeyboardInterrupt()]

    def fails(*_: object) -> Graph:
        raise thrown.pop(0)

    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["unity_ir.search.run"], "with_best_bucket", fails)
    for is_interrupted in (False, True):
        found = run(build("bert_large", **SIZES), load("dgx-h100:4"), "fsdp", Optimizer("adam"))
        assert (found.graph.bucket, found.interrupted) == (0, is_interrupted)
    monkeypatch.undo()
    monkeypatch.setattr("unity_ir.simulate.report.emitted_step", fails)
    assert plan("dgx-h100", "fsdp").bucket == 0
