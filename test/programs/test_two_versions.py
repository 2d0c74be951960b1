"""
Programs that never drain (2BW): over steps that overlap, losses, gradients by name, the optimizer's state and weights
equal those of a loop written by hand in PyTorch, whose gradients are of the weights before the last update.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from by_hand import differences
from models import machine, mlp
from ranks import Ranks, bytes_of_versions, check, error_in_double, order_of_second_step, refused, run_main, trained
from zoo import by_hand as zoo_by_hand
from zoo_plans import MACHINES, planned, program, sized

from unity_ir.errors import UnityError
from unity_ir.lowering import runtime
from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.pipeline.csv_text import from_csv
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.simulate.stages import simulate_stages

MOMENTUM = Optimizer("momentum", 0.05, momentum=0.9, weight_decay=0.1)
ADAMW = Optimizer("adamw", 1e-2, weight_decay=0.1)
CASES = [
    ("mlp", "2bw,2:data-parallel/4", 2, MOMENTUM),
    ("mlp", "2bw,4:data-parallel/8", 4, ADAMW),
    ("gpt2", "2bw,2:data-parallel/4*2", 2, ADAMW),
    ("gpt2", "2bw,4:data-parallel/4", 4, MOMENTUM),
    ("gpt2", "2bw,2:fsdp/4i", 4, ADAMW),
    ("gpt2", "2bw,2:degrees,tp=2/4", 4, MOMENTUM),
    ("gpt2", "2bw,2:recompute-2/4", 4, ADAMW),
]


def text_of(model: str, plan: str, world: int, optimizer: Optimizer, double: bool = True) -> str:
    name, keys = sized(model)
    return program(build(name, **keys), plan, world, optimizer, double=double)


def wrong_of(run: dict[str, Any], model: str, optimizer: Optimizer, delay: int = 1) -> list[str]:
    name, keys = sized(model)
    return differences(run, lambda w, inputs: zoo_by_hand(name, keys, w, inputs), optimizer, "f64", delay)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "world", "optimizer"), CASES)
def test_equals_a_loop_with_delayed_gradients(ranks: Ranks, model: str, plan: str, world: int, optimizer: Optimizer):
    found = ranks.run(text_of(model, plan, world, optimizer), world, trained, 4, False)[0]
    assert wrong_of(found, model, optimizer) == []
    assert wrong_of(found, model, optimizer, delay=0) != []


@pytest.mark.slow
def test_a_rank_begins_the_next_batch_before_it_ends_this_one(ranks: Ranks):
    """Of 4 micro-batches the first rank of 4 has done 3 forwards of the next batch before its last backward."""
    text = text_of("gpt2", "2bw,4:data-parallel/4", 4, ADAMW)
    text += "\nDONE = []\nrun_part = UnderWay.run\n"
    text += "def noted(self, ctx, weights, stage, kind, k):\n"
    text += "    DONE.append(f'{kind}{k}' + ' of the next' * (self is ctx.flight._ahead))\n"
    text += "    run_part(self, ctx, weights, stage, kind, k)\n"
    text += "UnderWay.run = noted\n"
    orders = ranks.run(text, 4, order_of_second_step)
    assert orders[0] == "F3 B0 F0' B1 F1' B2 F2' B3"
    assert orders[3] == "F0 B0 F1 B1 F2 B2 F3 B3"


MUTANTS = {
    "the batch is computed with the new weights": (
        "self._run(ctx, older, now, before, stage, kind, k, False)",
        "self._run(ctx, weights, now, before, stage, kind, k, False)",
    ),
    "the next batch is begun with the older weights": (
        "self._run(ctx, weights, self._ahead,",
        "self._run(ctx, older, self._ahead,",
    ),
    "there is one version": ("before[name], after[name] = after[name], spare", "before[name] = after[name]"),
    "what is sent once is of the step before": (
        "without_waiting(ctx, before, weights, under_way.batch)",
        "without_waiting(ctx, before, self.older(weights), under_way.batch)",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_version_of_the_weights_is_told(ranks: Ranks, mutant: str):
    text, (right, wrong) = text_of("gpt2", "2bw,2:data-parallel/4", 2, ADAMW), MUTANTS[mutant]
    assert text.count(right) == 1
    assert any(ranks.run(text.replace(right, wrong), 2, check, 3))


@pytest.mark.slow
def test_gradients_in_float64_are_those_of_a_batch_alone(ranks: Ranks):
    """A check makes them beside a step in float32, of which a batch is under way."""
    text = text_of("gpt2", "2bw,2:data-parallel/4", 2, ADAMW, double=False)
    assert max(ranks.run(text, 2, error_in_double)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["2bw,2:data-parallel/4", "2bw,2:fsdp/4"])
def test_ranks_hold_the_versions_that_are_simulated(ranks: Ranks, plan: str):
    name, keys = sized("gpt2")
    graph = build(name, **keys)
    step = plan_step(planned(graph, plan, 4, ADAMW), PlanOptions(kernels="torch"))
    found = ranks.run(emit(step, graph).text, 4, bytes_of_versions)
    expected = simulate_stages(step, machine(MACHINES[4])).always
    assert found == [expected[0], expected[0], expected[1], expected[1]]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_exactly(ranks: Ranks, tmp_path: Path):
    """Both versions are restored, into other stages too; saving, which lets the pipeline drain, changes no digit."""
    text, folder = text_of("gpt2", "2bw,4:data-parallel/4", 4, ADAMW), str(tmp_path)
    whole = ranks.run(text, 4, run_main, ["--steps", "6", "--weights-out", "whole.safetensors"], {}, folder)[0]
    first = ranks.run(text, 4, run_main, ["--steps", "3", "--save", "c"], {}, folder)[0]
    go_on = ["--steps", "6", "--load", "c", "--weights-out"]
    then = ranks.run(text, 4, run_main, [*go_on, "then.safetensors"], {}, folder)[0]
    assert first + then == whole
    assert (tmp_path / "then.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    other = text_of("gpt2", "2bw,2:data-parallel/4", 2, ADAMW)
    assert ranks.run(other, 2, run_main, [*go_on, "other.safetensors"], {}, folder)[0] == then

    synchronous = text_of("gpt2", "1f1b,2:data-parallel/4", 2, ADAMW)
    code, line = ranks.run(synchronous, 2, refused, ["--steps", "6", "--load", f"{folder}/c"], {})[0]
    assert code == 1
    assert "was trained with gradient_delay=1, and this program has gradient_delay=0; --changed" in line
    assert line.count("\n") == 1


@pytest.mark.slow
def test_a_synchronous_checkpoint_goes_on_only_where_that_is_said(ranks: Ranks, tmp_path: Path):
    synchronous = text_of("mlp", "1f1b,2:data-parallel/4", 2, ADAMW)
    text, folder = text_of("mlp", "2bw,2:data-parallel/4", 2, ADAMW), str(tmp_path)
    ranks.run(synchronous, 2, run_main, ["--steps", "2", "--save", "c"], {}, folder)
    options = ["--steps", "4", "--load", f"{folder}/c"]
    code, line = ranks.run(text, 2, refused, options, {})[0]
    assert (code, "gradient_delay=0, and this program has gradient_delay=1" in line) == (1, True)
    changed = ranks.run(text, 2, run_main, [*options, "--changed", "gradient_delay"], {}, folder)[0]
    assert [line.split(" loss")[0] for line in changed] == ["step 3", "step 4"]
    # A checkpoint of a program that knew no delays.
    (path,) = (tmp_path / "c").glob("step_*/complete.json")
    record = json.loads(path.read_text())
    del record["sha256"]
    assert record["hyperparameters"].pop("gradient_delay") == 0
    path.write_bytes(runtime.load(("checkpoints",))._sealed(record))
    assert ranks.run(synchronous, 2, run_main, options, {}, folder)[0][0].startswith("step 3")


@pytest.mark.slow
def test_what_it_cannot_do_is_said_in_one_line(ranks: Ranks):
    text = text_of("mlp", "2bw,2:data-parallel/4", 2, ADAMW, double=False)
    for code, line in ranks.run(text, 2, refused, ["--steps", "1", "--check-nan"], {}):
        assert code == 1
        assert line == "" or re.fullmatch(r"mlp: --check-nan does a step again, which 2bw cannot; .*\n", line)
    right = "mine += loss"
    assert text.count(right) == 1
    for code, line in ranks.run(text.replace(right, "mine += float('nan')"), 2, refused, ["--steps", "3"], {}):
        assert code == 1
        assert line == "" or re.fullmatch(r"mlp: step 1: loss nan; 2bw cannot do a step again, .*\n", line)


def test_steps_that_would_drain_are_refused():
    clipped = Optimizer("adamw", 0.01, clip=1.0)
    with pytest.raises(
        UnityError, match="norm of all stages' gradients, for which 2bw would have to drain; use clip=0"
    ):
        plan_step(planned(mlp(), "2bw,2:data-parallel/4", 2, clipped), PlanOptions(kernels="torch"))
    own = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "own.csv")
    with pytest.raises(UnityError, match="the plan's, 2bw, goes on from step to step, which no file says"):
        plan_step(planned(mlp(), "2bw,2:data-parallel/2", 2, ADAMW), PlanOptions(kernels="torch", order=own))
