"""`unity-tune`: measures each operator once, keeps what it has; emission takes what was the faster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from unity_ir.cost.time import seconds
from unity_ir.cost.work import kernel_of
from unity_ir.errors import UnityError
from unity_ir.lowering.emit.printer import emit
from unity_ir.lowering.measure.implementations import TuningTask, tuning_tasks
from unity_ir.machine import load
from unity_ir.machine.tuned import TuningTable, read_table
from unity_ir.models import build, from_text
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search.run import run
from unity_ir.tools import unity_opt, unity_tune

MODEL = "mlp,batch=8,hidden=16,layers=2,classes=4"


class Timer:
    """Stands in for the GPU: what every implementation takes is said, not measured."""

    def __init__(self, **seconds: float | str):
        self.seconds = seconds
        self.asked: list[TuningTask] = []

    def __call__(self, task: TuningTask, implementations: Sequence[str]) -> Mapping[str, float | str]:
        self.asked.append(task)
        return {name: self.seconds[name] for name in implementations}


def tuned(path: Path, timer: Timer, *options: str) -> TuningTable:
    assert unity_tune.main([MODEL, "--out", str(path), *options], timer) == 0
    return read_table(path)


def test_each_operator_is_measured_once(tmp_path: Path) -> None:
    path, timer = tmp_path / "t.json", Timer(triton=2e-6, torch=1e-6)
    table = tuned(path, timer)
    keys = [c.key for c in timer.asked]
    assert len(keys) == len(set(keys)) == len(table.seconds) > 5
    assert table.about["device"] == "none"
    again = Timer(triton=1.0, torch=1.0)
    assert tuned(path, again).seconds == table.seconds
    assert not again.asked
    # In another element type the same shapes are other operators.
    other = Timer(triton=1.0, torch=1.0)
    assert len(tuned(path, other, "--types", "bf16").seconds) == 2 * len(table.seconds)
    assert all("bf16" in c.key for c in other.asked)


def test_a_file_s_plan_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, table, timer = tmp_path / "plan.pcg", tmp_path / "t.json", Timer(triton=1.0, torch=1.0)
    assert unity_opt.main([f"--model={MODEL}", "--search=expert", "--machine=box:2", "-o", str(plan)]) == 0
    assert unity_tune.main([str(plan), "--machine=box:2", "--out", str(table)], timer) == 0
    (program,) = unity_tune.programs([MODEL], [], "expert", "box:2")
    assert [c.key for c in timer.asked] == [c.key for c in tuning_tasks([program])]
    capsys.readouterr()
    assert unity_tune.main([str(plan), "--machine=box:1", "--out", str(table)], timer) == 1
    assert "its view names device 1, but the machine has 1 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("builtin.module {}", "it has no function of pcg operations"),
        (
            '"func.func"() <{sym_name = "f"}> ({ "func.return"() : () -> () }) : () -> ()',
            "func.func: property function_type is missing; add it",
        ),
        ("func.func @f() { pcg.matmull }", "pcg.matmull: unknown operation; did you mean pcg.matmul"),
    ],
)
def test_files_without_a_model_are_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pcg"
    path.write_text(text)
    assert unity_tune.main([str(path), "--out", str(tmp_path / "t.json")], Timer(triton=1.0, torch=1.0)) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "t.json").exists()


def test_what_cannot_be_written_is_told_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer, path = Timer(triton=1.0, torch=1.0), tmp_path / "no" / "t.json"
    assert unity_tune.main([MODEL, "--out", str(path)], timer) == 1
    assert capsys.readouterr().err == f"unity-tune: {path}: there is no folder {path.parent}\n"
    assert not timer.asked


def test_a_plan_has_its_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, timer = tmp_path / "plan.pcg", Timer(triton=1.0, torch=1.0)
    assert unity_opt.main([f"--model={MODEL}", "--search=expert", "--machine=dgx-h100:1", "-o", str(plan)]) == 0
    options = [str(plan), "--machine=dgx-h100:1", "--mixed-precision=bf16", "--out", str(tmp_path / "t.json")]
    assert unity_tune.main(options, timer) == 1
    assert "is a plan already; search with --mixed-precision" in capsys.readouterr().err


@pytest.mark.slow
def test_mixed_precision_has_casts_and_products_of_its_own(tmp_path: Path) -> None:
    timer = Timer(triton=1.0, torch=1.0)
    tuned(tmp_path / "t.json", timer, "--mixed-precision=bf16", "--machine=dgx-h100:1", "--plan=joint")
    keys = [c.key for c in timer.asked]
    for types in ("f32", "bf16"):
        assert any(k.startswith("matmul") and set(k.split()[1:]) == {types} for k in keys), keys
    assert any(k.startswith("cast") for k in keys)


def test_operands_are_those_of_the_operator(tmp_path: Path) -> None:
    timer = Timer(triton=1.0, torch=1.0)
    tuned(tmp_path / "t.json", timer)
    (loss,) = (c for c in timer.asked if c.key.startswith("cross_entropy_saving_8x4_8"))
    assert [(o.shape, o.dtype) for o in loss.operands] == [((8, 4), "f32"), ((8,), "i64")]
    assert loss.operands[1].below == 4


@pytest.mark.slow
@pytest.mark.parametrize("faster", ["triton", "torch"])
def test_emission_takes_the_faster(faster: str, tmp_path: Path) -> None:
    slower = {"triton": "torch", "torch": "triton"}[faster]
    table = tuned(tmp_path / "t.json", Timer(**{faster: 1e-6, slower: 2e-6}))
    graph = build("mlp", batch=8, hidden=16, layers=2, classes=4)
    (program,) = unity_tune.programs([MODEL], ["f32"], "data-parallel", "box:1")
    for matmul in ("triton", "torch"):
        made = emit(plan_step(program, PlanOptions(matmul, tuned=table)), graph)
        # What updates weights is not chosen.
        kernels = set(made.kernels) - {"sgd_kernel"}
        assert bool(kernels) == (faster == "triton")
    with pytest.raises(UnityError, match="nothing to choose"):
        PlanOptions(kernels="torch", tuned=table)


def test_what_was_not_measured_is_as_it_is_told(tmp_path: Path) -> None:
    table = tuned(tmp_path / "t.json", Timer(triton=2e-6, torch=1e-6))
    graph = build("mlp", batch=8, hidden=16, layers=2, classes=4)
    (program,) = unity_tune.programs([MODEL], ["f32"], "data-parallel", "box:1")
    products = {key: row for key, row in table.seconds.items() if "matmul" in key}
    made = emit(plan_step(program, PlanOptions(tuned=TuningTable(seconds=products))), graph)
    assert "matmul_kernel" not in made.kernels
    assert len(made.kernels) > 1


SMALL_GPT = "gpt2,batch=4,sequence=8,layers=1,hidden=16,heads=2,vocabulary=32"


@pytest.mark.parametrize("model", [MODEL, SMALL_GPT, "lenet,batch=4"])
def test_the_cost_model_reads_what_emission_freezes(model: str, tmp_path: Path) -> None:
    """Every kernel of a plan, forward and backward, is priced as its faster implementation was measured."""
    path = tmp_path / "t.json"
    options = ["--machine", "box:2", "--out", str(path)]
    assert unity_tune.main([model, *options], Timer(triton=0.25, torch=0.125)) == 0
    table = read_table(path)
    # Each its own time, so that none is taken for another; once of one implementation, once of the other.
    for number, row in enumerate(table.seconds.values()):
        row |= {"triton": 3.0 + number, "torch": 2.0 + number} if number % 2 else {"triton": 1.0 + number}
    table.write(path)
    on = load(f"box:2,profile={path}")
    placed = run(from_text(model), on, "data-parallel").graph
    step = differentiate(placed, Optimizer(), on.mesh)
    kernels = [kernel_of(n) for n in fuse_collectives(step).nodes() if n.is_compute]
    priced = {k: seconds(k, on.device) for k in kernels}
    known = {sized: min(table.seconds[key].values()) for key, sized in table.kernels.items()}
    assert len(known) == len(table.seconds) > 5
    measured = [k for k in priced if (k.operator, k.sizes) in known]
    assert {(k.operator, k.sizes) for k in measured} == set(known)
    assert all(priced[k] == known[k.operator, k.sizes] for k in measured)
    assert seconds(measured[0], load("box:2").device) != priced[measured[0]]


def test_a_table_of_another_device_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned(path, Timer(triton=2e-6, torch=1e-6))
    with pytest.raises(UnityError, match="is of V100-SXM2-16GB, but the machine has H100-SXM5-80GB; measure with"):
        load(f"dgx-h100,profile={path}")
    rows: dict[str, Any] = json.loads(path.read_text())
    key = next(iter(rows["kernels"]))
    for wrong in ({}, {"operator": "x", "sizes": ["1"]}, {"operator": 1, "sizes": []}, {"operator": "x", "sizes": 1}):
        rows["kernels"][key] = wrong
        path.write_text(json.dumps(rows))
        with pytest.raises(UnityError, match="measure again with unity-tune"):
            load(f"box:1,profile={path}")


def test_what_fails_is_said_and_not_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tuned(tmp_path / "a.json", Timer(triton="out of resource: shared memory", torch=1e-6))
    assert all(row == {"torch": 1e-6} for row in table.seconds.values())
    assert ", triton: out of resource: shared memory" in capsys.readouterr().err
    assert tuned(tmp_path / "b.json", Timer(triton=1e-6, torch="out of memory")).seconds == {}


def test_time_runs_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = Timer(triton=1.0, torch=1.0)
    assert tuned(tmp_path / "t.json", timer, "--seconds", "1e-9").seconds == {}
    assert not timer.asked
    assert "no time was left" in capsys.readouterr().err


def test_interruption_keeps_what_there_is(tmp_path: Path) -> None:
    class Interrupted(Timer):
        def __call__(self, task: TuningTask, implementations: Sequence[str]) -> Mapping[str, float | str]:
            if len(self.asked) == 3:
                raise KeyboardInterrupt
            return super().__call__(task, implementations)

    path = tmp_path / "t.json"
    assert unity_tune.main([MODEL, "--out", str(path)], Interrupted(triton=1.0, torch=1.0)) == 130
    assert len(read_table(path).seconds) == 3


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    # Without a GPU and a stand-in.
    assert unity_tune.main([MODEL, "--out", str(path)]) == 1
    assert "PyTorch sees no GPU here" in capsys.readouterr().err
    tuned(path, Timer(triton=1.0, torch=1.0))
    read: dict[str, Any] = json.loads(path.read_text())
    read["about"]["torch"] = "1.0"
    path.write_text(json.dumps(read))
    capsys.readouterr()
    assert unity_tune.main([MODEL, "--out", str(path)], Timer(triton=1.0, torch=1.0)) == 1
    assert "was measured with another torch; name a new file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no table"),
        ('{"about": {}}', "is no table"),
        ('{"about": {}, "seconds": {"x": {"cuda": 1}}}', "'x' has no seconds of triton or torch"),
        ('{"about": {}, "seconds": {"x": {"torch": -1}}}', "'x' has no seconds of triton or torch"),
        ('{"about": {}, "seconds": {"x": {}}}', "'x' has no seconds of triton or torch"),
    ],
)
def test_what_is_no_table(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(UnityError, match=message):
        read_table(path)


def test_the_target_reads_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    tuned(path, Timer(triton=2e-6, torch=1e-6))
    command = ["--model", MODEL, "--search=data-parallel", "--machine=box:1", "-t", f'triton{{tune="{path}"}}']
    capsys.readouterr()
    unity_opt.main(command)
    assert "matmul_kernel" not in capsys.readouterr().out
    missing = tmp_path / "none.json"
    unity_opt.main([*command[:-1], f'triton{{tune="{missing}"}}'])
    assert "No such file or directory; make it with unity-tune" in capsys.readouterr().err
