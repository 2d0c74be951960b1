"""Programs that recompute, of each kind and with every baseline, on real ranks: equal to PyTorch."""

from __future__ import annotations

from itertools import product

import pytest
from extent import ALL
from models import machine
from ranks import Ranks, check
from zoo_plans import SIZES

from unity_ir.api.options import search_options
from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept, with_recompute
from unity_ir.plan.instructions import Compute
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.search import run


def model(name: str) -> Graph:
    layers = {} if name == "mlp" else {"layers": 3}
    return build(name, **SIZES[name] | layers)


def planned(graph: Graph, plan: str, kind: str, count: int = 1) -> tuple[Graph, Plan]:
    """The forward graph of a baseline on two devices, and the plan of its step."""
    on = machine("ideal:2")
    options = search_options(plan)
    strategy = str(options.pop("strategy"))
    placed = run(graph, on, strategy, Optimizer("sgd", 0.1), options, micro_batches=count, recompute=kind).graph
    step = fuse_collectives(differentiate(placed, Optimizer("sgd", 0.1), on.mesh))
    return placed, plan_step(lower(step, on), PlanOptions(kernels="torch"))


NAMES = ["gpt2", "llama3_8b", "bert_large"]
KINDS = ["attention", "block", "all"]
PLANS = ["data-parallel", "fsdp", "zero3", "degrees,tp=2", "degrees,tp=2,sp=true"]

CASES = [*product(NAMES, KINDS, PLANS)]
SAMPLE = [c for c in CASES if (NAMES.index(c[0]) + KINDS.index(c[1]) + PLANS.index(c[2])) % 3 == 0]
"""A third, with every pair of model, kind and plan."""

IN_MICRO_BATCHES = [*product(KINDS, (p for p in PLANS if p != "degrees,tp=2"))]
HALF = [c for c in IN_MICRO_BATCHES if (KINDS.index(c[0]) + PLANS.index(c[1])) % 2 == 0]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "plan"), CASES if ALL else SAMPLE)
def test_equals_pytorch(ranks: Ranks, name: str, kind: str, plan: str):
    graph = model(name)
    placed, made = planned(graph, plan, kind)
    assert not_kept(placed)
    assert ranks.run(emit(made, erase(placed)).text, 2, check, 2) == [[]] * 2


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plan"), IN_MICRO_BATCHES if ALL else HALF)
def test_equals_pytorch_in_micro_batches(ranks: Ranks, kind: str, plan: str):
    placed, made = planned(model("gpt2"), plan, kind, 2)
    assert not_kept(placed)
    assert made.program.micro_batches == 2
    assert ranks.run(emit(made, erase(placed)).text, 2, check, 2) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("again", [("split_heads", "rotary"), ("split_heads", "rotary", "attention", "merge_heads")])
def test_attention_reads_what_was_saved_if_its_operands_are_recomputed(ranks: Ranks, again: tuple[str, ...]):
    """Queries and keys are turned again for the backward; no softmax is summed again, unless all is recomputed."""
    sizes = {"hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 16, "vocabulary": 16}
    small, on = build("llama3_8b", batch=2, sequence=16, layers=2, **sizes), machine("ideal:2")
    placed = run(small, on, "data-parallel").graph
    marked = with_recompute(placed, {n for n in placed.nodes() if n.op in again})
    step = fuse_collectives(differentiate(marked, Optimizer("sgd", 0.1), on.mesh))
    made = plan_step(lower(step, on), PlanOptions(matmul="torch", fuse=False))
    found = [i for i in made.program.body if isinstance(i, Compute) and i.operator.startswith("attention")]
    is_kept = "attention" not in again
    backward = ["attention_saved_grad"] if is_kept else ["attention_saving", "attention_saved_grad"]
    assert [i.operator for i in found] == ["attention_saving" if is_kept else "attention"] * 2 + backward * 2
    queries = {i.operands[i.operator.endswith("grad")] for i in found}
    assert len(queries) == 4
    assert ranks.run(emit(made, small).text, 2, check, 1) == [[]] * 2
