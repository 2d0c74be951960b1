"""Compare the bytes that ranks of a pipeline hold of micro-batches with those that are simulated."""

from __future__ import annotations

import pytest
from ranks import Ranks, held_of_micro_batches

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import PlanOptions, plan_graph
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.run import run
from unity_ir.simulate.stages import simulate_stages


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "pieces"), [("1f1b", "1"), ("gpipe", "1"), ("zb-h1", "1"), ("2bw", "1"), ("1f1b", "2"), ("zb-h1", "2")]
)
def test_ranks_keep_the_bytes_that_are_simulated(ranks: Ranks, order: str, pieces: str):
    graph = from_text("gpt2,layers=2,hidden=8,heads=2,vocabulary=16,sequence=4,batch=8")
    machine, optimizer = load("box:4"), Optimizer("adamw")
    given = {"micro_batches": 4, "loss_pieces": pieces, "stages": Stages(2, order)}
    placed = run(graph, machine, "data-parallel", optimizer, **given).graph
    # Saved softmaxes are as PyTorch's kernels have them.
    plan = plan_graph(placed, machine, optimizer, PlanOptions(kernels="torch"))
    expected = simulate_stages(plan, machine)
    assert plan.pipeline is not None
    for rank, found in enumerate(ranks.run(emit(plan, graph).text, 4, held_of_micro_batches)):
        most = found.pop("most")
        assert found == {word: expected.kept[word] for word in found}
        schedule = plan.pipeline.schedule
        actions = schedule.ranks[rank // 2]
        own = [expected.kept[f"{s}{kind}"] for s, kind, _ in actions if f"{s}{kind}" in found]
        # 2bw begins a step with what it has done of it in the one before.
        total = peak = sum(expected.kept[f"{a.stage}F"] for a in actions if a.kind == "F" and schedule.ahead(a))
        for change in own:
            total += change
            peak = max(peak, total)
        assert most == peak
