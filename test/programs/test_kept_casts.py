"""The casts of weights that a step reads in mixed precision are those of the weights, bit for bit, at any time."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import machine
from ranks import Ranks, check, wrong_casts
from zoo_plans import MACHINES, SIZES, of_type, planned

from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.forward import forward_of
from unity_ir.plan.plan import PlanOptions, plan_step

ADAMW = Optimizer("adamw", 1e-2, clip=1.0)
UPDATED = "weights.casts[name].copy_(weight)"
"""The line by which an update in PyTorch writes a cast."""


def text_of(plan: str, world: int, kernels: str, optimizer: Optimizer = ADAMW, model: str = "mlp") -> str:
    graph, options = of_type(build(model, **SIZES[model]), "mixed"), PlanOptions(kernels=kernels)
    step = planned(graph, plan, world, optimizer)
    forward = plan_step(forward_of(step, machine(MACHINES[world])), options)
    return emit(plan_step(step, options), graph, forward=forward).text


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "kernels"), [("fsdp", "triton"), ("data-parallel/4", "torch")])
def test_kept_casts_are_those_of_the_weights(ranks: Ranks, plan: str, kernels: str, tmp_path: Path):
    text = text_of(plan, 2, kernels)
    for found in ranks.run(text, 2, wrong_casts, str(tmp_path)):
        assert found.pop("kept")
        assert not any(found.values()), found
    # No file has them.
    (record,) = tmp_path.glob("step_*/complete.json")
    assert "bfloat16" not in record.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "right", "wrong", "when"),
    [
        ("torch", UPDATED, "pass", "after 3 steps"),
        ("triton", "rounded(p, cast_ptr)", "p", "after 3 steps"),
        ("torch", "    weights.renew_casts()\n    torch.set_rng", "    torch.set_rng", "loaded"),
    ],
)
def test_a_wrong_cast_is_told(ranks: Ranks, kernels: str, right: str, wrong: str, when: str, tmp_path: Path):
    text = text_of("data-parallel", 1, kernels)
    assert text.count(right) == 1
    found = ranks.run(text.replace(right, wrong), 1, wrong_casts, str(tmp_path))[0]
    assert found[when]


@pytest.mark.slow
def test_a_check_tells_a_wrong_cast(ranks: Ranks):
    text = text_of("data-parallel", 1, "torch")
    assert ranks.run(text, 1, check, 1) == [[]]
    found = ranks.run(text.replace(UPDATED, "pass"), 1, check, 1)[0]
    assert any("its kept cast is not that of it" in line for line in found)


@pytest.mark.slow
def test_two_versions_have_casts_of_their_own(ranks: Ranks):
    text = text_of("2bw,2:data-parallel/2", 2, "torch", Optimizer("adamw", 1e-2), "gpt2")
    assert ranks.run(text, 2, check, 3) == [[]] * 2
    right = "((older, weights), (older.casts, weights.casts))"
    assert text.count(right) == 1
    wrong = ranks.run(text.replace(right, "((older, weights),)"), 2, check, 3)[0]
    assert any("the kept cast of" in line for line in wrong)
