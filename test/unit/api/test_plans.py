"""The API plans as the command line does, and says what is wrong in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn

import unity_ir as ui
from unity_ir import models
from unity_ir.tools.unity_opt import main

MLP = {"batch": 8, "hidden": 16, "layers": 2, "classes": 4}
NAMED = "mlp,batch=8,hidden=16,layers=2,classes=4"

UnityOpt = Callable[..., tuple[str, str]]


@pytest.fixture
def unity_opt(capsys: pytest.CaptureFixture[str]) -> UnityOpt:
    """Run `unity-opt` with these arguments; return its stdout and stderr."""

    def printed(*arguments: str) -> tuple[str, str]:
        code = main([*arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err

    return printed


@pytest.fixture(scope="module")
def joint() -> ui.Plan:
    return ui.plan("mlp", machine="2gpu", optimizer="adam", **MLP)


def test_a_plan_its_stats_and_its_program_are_those_of_the_command_line(
    unity_opt: UnityOpt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = {"search": "fsdp", "precision": "bf16", "micro_batches": 2, "optimizer": "adamw"}
    plan = ui.plan("mlp", machine="dgx-h100:1x2", **options, **MLP)
    arguments = (f"--model={NAMED}", "--search=fsdp,optimizer=adamw", "--machine=dgx-h100:1x2")
    arguments = (*arguments, "--mixed-precision=bf16", "--micro-batches=2")
    text, table = unity_opt(*arguments, "--stats")
    assert str(plan) == plan.text == text
    print(plan.stats)
    assert capsys.readouterr().out == table
    program, _ = unity_opt(*arguments, "-t", "triton{lr=0.5 clip=1 evaluate}")
    plan.emit(tmp_path / "train.py", lr=0.5, clip=1, evaluate=True)
    assert (tmp_path / "train.py").read_text() == program
    assert plan.text == text, "emitting must not lower the plan itself"


def test_state_at_the_host_takes_no_memory_of_devices():
    sizes = {"batch": 8, "hidden": 16, "layers": 2, "classes": 4}
    made = [
        ui.plan("mlp", machine="dgx-a100:1x2", search="fsdp", optimizer="adamw", offload=kind, **sizes)
        for kind in ("state", "none")
    ]
    memory = [plan.stats.memory for plan in made]
    assert memory[0] | {"optimizer state": 2 * memory[0]["weights"]} == memory[1]
    assert memory[0]["optimizer state"] == 0
    assert ['pcg.offload = "state"' in plan.text for plan in made] == [True, False]


def test_an_average_of_the_weights_takes_memory(unity_opt: UnityOpt):
    sizes = {"batch": 8, "hidden": 16, "layers": 2, "classes": 4}
    plain, kept = (
        ui.plan("mlp", machine="2gpu", search=f"fsdp{ema}", optimizer="adamw", **sizes) for ema in ("", ",ema=0.9")
    )
    assert plain.stats.memory["optimizer state"] == 2 * plain.stats.memory["weights"]
    assert kept.stats.memory["optimizer state"] == 3 * plain.stats.memory["weights"]
    assert kept.stats.seconds > plain.stats.seconds
    # It is the plan's, and its program's.
    assert "ema = 9.000000e-01" in kept.text
    asked = ("--model=mlp,batch=8,hidden=16,layers=2,classes=4", "--machine=2gpu", "--search=fsdp")
    text, _ = unity_opt(*asked, "-t", "triton{optimizer=adamw ema=0.9 kernels=torch}")
    assert "STATE = ('m', 'v', 'average')" in text
    # Without an optimizer it is of sgd's, or of the one that the text names.
    text, _ = unity_opt(*asked, "-t", "triton{ema=0.9}")
    assert "OPTIMIZER = ('sgd', {'lr': 0.001, 'ema': 0.9})" in text
    _, said = unity_opt(*asked[:2], "--stats", "-t", "triton{ema=0.9}")
    assert re.search(r"weights (.*?), .*, optimizer state \1,", said)
    again = ui.plan(plain.text, machine="2gpu", search="fsdp,ema=0.9")
    assert again.stats.memory == kept.stats.memory


def test_a_recipe_is_planned_as_by_degrees(unity_opt: UnityOpt):
    plan = ui.plan("mlp", machine="2gpu", degrees="tp=2", **MLP)
    assert plan.text == unity_opt(f"--model={NAMED}", "--degrees=tp=2", "--machine=2gpu")[0]


def test_a_saved_plan_is_loaded_and_planned_text_is_planned(joint: ui.Plan, tmp_path: Path):
    joint.save(tmp_path / "plan.pcg")
    again = ui.load(tmp_path / "plan.pcg")
    assert (again.text, again.stats, again.machine) == (joint.text, joint.stats, joint.machine)
    assert ui.plan(tmp_path / "plan.pcg", search=None).text == joint.text
    assert ui.plan(joint.text, search=None).text == joint.text
    # What is in a text is planned anew, for the machine that it has.
    assert ui.plan(joint.text, search="data-parallel").stats.devices == 2


@pytest.mark.slow
def test_stats_are_numbers(joint: ui.Plan):
    stats = joint.stats
    assert stats.time == pytest.approx(stats.compute + stats.communication)
    assert stats.bound is not None
    assert stats.gap == pytest.approx(stats.time / stats.bound - 1)
    assert 0 < stats.seconds <= stats.waiting
    assert stats.samples_per_second == pytest.approx(8 / stats.seconds)
    assert stats.tokens_per_second is None
    assert stats.fits
    assert not replace(stats, usable=stats.peak - 1).fits
    assert set(stats.memory) == {"weights", "gradients", "optimizer state", "activations"}
    tokens = ui.plan("gpt2", machine="2gpu", search="data-parallel", batch=2, layers=1, hidden=24, sequence=8)
    assert tokens.stats.tokens_per_second == pytest.approx(16 / tokens.stats.seconds)


def test_the_gap_of_a_plan_is_that_which_is_printed(joint: ui.Plan):
    assert f"of this graph: gap {joint.stats.gap:.2%}" in str(joint.stats)


def test_a_choice_is_explained_as_on_the_command_line(joint: ui.Plan, unity_opt: UnityOpt):
    arguments = (f"--model={NAMED}", "--search=joint,optimizer=adam", "--machine=2gpu", "--explain=matmul0")
    assert joint.explain("matmul0") + "\n" == unity_opt(*arguments)[1]


def test_a_difference_has_what_changes_and_how_often(joint: ui.Plan):
    other = ui.plan("mlp", machine="2gpu", search="data-parallel", optimizer="adam", **MLP)
    same = joint.diff(joint)
    assert same.endswith("all operators and weights are divided alike\n")
    assert "%" not in same
    divided = ui.plan("mlp", machine="2gpu", search="fsdp", optimizer="adam", **MLP)
    lines = other.diff(divided).splitlines()
    weights = next(line.split() for line in lines if line.startswith("weights"))
    assert weights[-1] == "-50.0%"
    assert lines[-1].split() == ["weight", "dense*.weight", *"repeat by 2 dim 0 by 2".split(), "2"]
    assert lines[-2].startswith("divided by"), "FSDP divides operators as data parallelism does"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


def test_a_module_is_planned_and_left_as_it_was(tmp_path: Path):
    module = Twice().eval()
    module.linear.train()
    before, state = torch.get_rng_state(), {n: x.clone() for n, x in module.state_dict().items()}
    plan = ui.plan(module, (torch.ones(4, 4), torch.ones(4, 4)), nn.functional.mse_loss, machine="2gpu", name="twice")
    assert [m.training for m in module.modules()] == [False, True, False]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, state[n]) for n, x in module.state_dict().items())
    assert (plan.name, plan.graph.name) == ("twice", "twice")
    plan.save_weights(tmp_path / "w.safetensors")
    from safetensors.torch import load_file

    assert load_file(tmp_path / "w.safetensors").keys() == module.state_dict().keys()


def test_a_budget_that_ends_a_search_is_noted(joint: ui.Plan):
    assert joint.note is None
    note = ui.plan("mlp", machine="2gpu", search="joint,work=0.0001", **MLP).note
    assert note is not None
    assert note.startswith("pcg-search: the budget of work ended the search of @mlp")


def test_progress_is_told():
    said: list[tuple[int, float]] = []
    ui.plan("mlp", machine="2gpu", progress=lambda explored, best: said.append((explored, best)), **MLP)
    assert said
    assert all(explored > 0 and best > 0 for explored, best in said)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: ui.plan("mlp"), "plan: the machine is missing; give machine, such as dgx-h100:1"),
    (lambda: ui.plan("mlp", machine="3cpu"), "mlp: machine: no machine '3cpu'; presets are "),
    (lambda: ui.plan("mlq", machine="2gpu"), "--model: no model 'mlq'; known are "),
    (lambda: ui.plan("mlp", machine="2gpu", width=3), "--model: mlp has no key 'width'; it has "),
    (lambda: ui.plan("mlp", machine="2gpu", search="best"), "mlp: search: unknown strategy 'best'; known are "),
    (lambda: ui.plan("mlp", machine="2gpu", search="mcmc,x=1"), "plan: search: 'x=1' is no option of mcmc; it has "),
    (lambda: ui.plan("mlp", machine="2gpu", optimizer="x"), "mlp: pcg-search: unknown optimizer 'x'; known are "),
    (
        lambda: ui.plan("mlp", machine="2gpu", search="joint,micro_batches=2", micro_batches=2),
        "plan: search and micro_batches both say how many; leave one out",
    ),
    (
        lambda: ui.plan("mlp", machine="2gpu", search="fsdp", degrees="tp=2"),
        "plan: degrees and search each make the plan; leave one out",
    ),
    (lambda: ui.plan("mlp", machine="2gpu", precision="bf16,x=1"), "plan: precision: 'x=1' is no option of it"),
    (lambda: ui.plan("mlp", machine="2gpu", budget=0), "plan: budget is '0'; it must be a number of seconds above 0"),
    (lambda: ui.plan("mlp", profile="x.json"), "plan: profile is of a machine's devices; give machine"),
    (lambda: ui.plan("mlp", search=None, stages=2), "plan: stages is of a search; give search, or leave it out"),
    (lambda: ui.plan("mlp", (1,), machine="2gpu"), "plan: inputs is of a module or a function, which 'mlp' is not"),
    (lambda: ui.plan("x.pcg", machine="2gpu", batch=3), "plan: batch is a size of a model of the zoo; leave it out"),
    (lambda: ui.plan("x.pcg", machine="2gpu"), "x.pcg: No such file or directory"),
    (lambda: ui.plan("func\n", machine="2gpu"), "<text>:2:1: func: unknown operation"),
    (lambda: ui.plan("builtin.module {\n}", machine="2gpu"), "<text>: a plan is one function of pcg operations, not 0"),
    (lambda: ui.plan(nn.ReLU(), machine="2gpu"), "plan: inputs are missing; give an example"),
    (lambda: ui.plan(nn.ReLU(), 1, machine="2gpu", batch=8), "plan: batch is no argument of plan for a PyTorch module"),
    (lambda: ui.plan(3, machine="2gpu"), "plan: the model is int; it must be "),  # pyright: ignore[reportArgumentType]
    (lambda: ui.load("/no/plan.pcg"), "/no/plan.pcg: No such file or directory"),
]


@pytest.mark.parametrize(("call", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_errors_are_one_line(call: Callable[[], object], said: str):
    with pytest.raises(ui.UnityError) as error:
        call()
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_what_a_plan_cannot_do_is_an_error(joint: ui.Plan, tmp_path: Path):
    joint.save(tmp_path / "plan.pcg")
    loaded = ui.load(tmp_path / "plan.pcg")
    for call, said in (
        (lambda: loaded.explain("matmul0"), "explain: this plan was read"),
        (lambda: joint.explain("pool"), "--explain: @mlp has no operator 'pool'"),
        (lambda: joint.save(tmp_path / "no" / "plan.pcg"), f"{tmp_path}/no/plan.pcg: No such file or directory"),
        (lambda: joint.save_weights(tmp_path / "w"), "save_weights: this plan was not made of a module or a loss"),
        (lambda: joint.emit(tmp_path / "t.py", rate=1), "emit: triton has no argument rate; it has optimizer, lr, "),
        (lambda: joint.emit(tmp_path / "t.py", lr="x"), "emit: lr is x; it must be a number"),
        (lambda: joint.emit(tmp_path / "t.py", lr=-1.0), "mlp,batch=8"),
    ):
        with pytest.raises(ui.UnityError) as error:
            call()
        assert str(error.value).startswith(said)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.pcg"]


def test_no_size_of_a_model_has_the_name_of_an_argument():
    from unity_ir.api import plans

    arguments = signature(plans.plan).parameters
    for name in models.names():
        module = __import__(f"unity_ir.models.{name}", fromlist=["build"])
        assert not signature(module.build).parameters.keys() & arguments.keys(), name


WITHOUT = """
import sys
import unity_ir as ui
assert "xdsl" not in sys.modules, "importing the package must stay fast"
sys.modules["torch"] = sys.modules["triton"] = None
plan = ui.plan("mlp", machine="2gpu", search="fsdp", batch=8, hidden=16, layers=2, classes=4)
assert plan.stats.fits
assert plan.program_text()
try:
    plan.program()
except ui.UnityError as error:
    print(error, file=sys.stderr)
try:
    ui.plan(lambda weights, batch: 0.0, ((), ()), machine="2gpu")
except ui.UnityError as error:
    print(error, file=sys.stderr)
from unity_ir.tools.unity_opt import main
sys.exit(main(["--from-torch=a:b"]))
"""


@pytest.mark.slow
def test_a_zoo_model_is_planned_and_emitted_without_torch_and_triton():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    said = "torch is not installed, which this needs; pip install 'unity-ir[torch]'"
    assert (done.returncode, done.stderr.splitlines()) == (1, [said, said, f"unity-opt: {said}"])
