"""
`--check` with its default settings tells every wrong constant and term of an optimizer's arithmetic.

Every one of AdamW's in PyTorch at the smallest learning rate, where a wrong update is the hardest to tell; in Triton's
interpreter and at other settings a sample. All with ZOO=all, but of AdamW's with groups of weights in the interpreter
every third: its kernel is the one that is told at the smallest learning rate.
"""

from __future__ import annotations

import pytest
from extent import sample
from optimizer_mutants import mutants
from ranks import Ranks, checked_each

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.optimizer import Optimizer, ParameterGroup
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search import run

SETTINGS = [
    Optimizer("sgd", 0.1),
    Optimizer("momentum", 0.1, weight_decay=1e-4, clip=0.1),
    Optimizer("adam", 1e-3),
    Optimizer("adamw", 1e-3, clip=1.0, groups=(ParameterGroup("*bias*", (("weight_decay", 0.0),)),)),
    Optimizer("adamw", 1e-5),
    Optimizer("lion", 1e-4, weight_decay=0.1),
]


LEAST = {"sgd": 3, "momentum": 9, "adam": 40, "adamw": 40, "lion": 18}
"""Mutants there are at least, as many as there is arithmetic."""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("optimizer", SETTINGS, ids=lambda o: f"{o.name}-{o.lr}")
def test_every_mutant_is_told(ranks: Ranks, optimizer: Optimizer, kernels: str):
    graph, on = build("mlp", batch=2, hidden=4, classes=4, layers=1), load("box:1")
    step = differentiate(run(graph, on, "data-parallel").graph, optimizer, on.mesh)
    text = emit(plan_step(lower(step, on), PlanOptions("torch", kernels)), graph).text
    wrong = mutants(text)
    assert len(wrong) >= LEAST[optimizer.name]
    if kernels == "triton":
        wrong = sample(wrong[:: 3 if optimizer.groups else 1], 4 if optimizer.groups else 12)
    elif optimizer.lr > 1e-5:
        wrong = sample(wrong, 3)
    found = ranks.run(text, 1, checked_each, [mutant for _, mutant in wrong])[0]
    assert found[0] == []
    survivors = [what for (what, _), lines in zip(wrong, found[1:], strict=True) if not lines]
    assert not survivors
