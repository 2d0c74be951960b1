"""Unity's own pipelines: of all numbers of stages and micro-batches those with the least time from step to step."""

from __future__ import annotations

import pytest
from graphs import boxes

from unity_ir.errors import UnityError
from unity_ir.machine import load, part_counts
from unity_ir.models import from_text
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.result import SearchResult
from unity_ir.search.run import run
from unity_ir.search.throughput import most_throughput
from unity_ir.search.with_stages import run_with_stages
from unity_ir.simulate.report import as_emitted

MLP = from_text("mlp,batch=128,hidden=512,layers=8,classes=512")
MACHINE = boxes(2, 2, overhead=1e-6, bandwidth=1e10)
OPTIMIZER = Optimizer("adamw")


def seconds(found: SearchResult) -> float:
    return as_emitted(found.graph, MACHINE, OPTIMIZER)[0]


def pipeline(stages: int, micro_batches: int) -> SearchResult:
    asked = Stages(stages, "2bw")
    return run(MLP, MACHINE, "unity", OPTIMIZER, {"budget": 3}, micro_batches=micro_batches, stages=asked)


@pytest.mark.slow
def test_no_other_pair_takes_less_from_step_to_step():
    found = run_with_stages(MLP, MACHINE, "unity", OPTIMIZER, {"budget": 3}, stages="auto")
    every = [(p, m) for p in part_counts(MACHINE)[1:] for m in (2, 4, 8, 16) if m >= p]
    best = min(seconds(pipeline(*pair)) for pair in every)
    whole = seconds(run(MLP, MACHINE, "unity", OPTIMIZER, {"budget": 3}))
    assert best < whole
    assert seconds(found) == pytest.approx(best)
    assert found.graph.pipeline is not None
    assert found.graph.pipeline.order == "2bw"


def test_a_faster_plan_without_stages_is_kept():
    """On one device there are no parts; where weights are small, stages gain nothing."""
    found = run_with_stages(MLP, load("box:1"), "unity", OPTIMIZER, {"budget": 3}, stages="auto")
    assert found.graph.pipeline is None


def test_what_is_tried():
    """At least as many micro-batches as stages, each number about twice the one before, until more are slower."""
    tried: list[tuple[int, int]] = []

    def search(stages: Stages, micro_batches: int) -> SearchResult:
        tried.append((stages.count, micro_batches))
        if stages.count == 4 and micro_batches < 8:
            raise UnityError("does not fit")
        return pipeline(2, 2)

    def slower(found: SearchResult) -> float:
        return float(tried[-1][1])

    assert most_throughput(MLP, MACHINE, search, slower, None) is not None
    assert tried == [(2, 2), (2, 4), (4, 4), (4, 8), (4, 16)]
    tried.clear()
    assert most_throughput(MLP, MACHINE, search, slower, 2) is not None
    assert tried == [(2, 2)]
