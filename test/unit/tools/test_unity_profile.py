"""`unity-profile`: asks for what a search asks for, keeps what it has, and says in one line what is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Self

import pytest

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.lowering.measure import operators
from unity_ir.machine import load
from unity_ir.machine.profile import open_profile
from unity_ir.models import from_text
from unity_ir.pcg.collectives import PROFILED
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search import run
from unity_ir.tools import unity_opt, unity_profile

MODEL = "mlp,batch=8,hidden=16,layers=2,classes=4"


class Quick:
    """Stands in for the measuring processes."""

    jobs: list[Any]
    fails = ""
    stops_after = 10**9

    def __init__(self, count: int, device: str, seconds: float):
        Quick.jobs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, job: Any) -> operators.Measured:
        if len(Quick.jobs) >= Quick.stops_after:
            raise KeyboardInterrupt
        if Quick.fails and Quick.fails in getattr(job, "name", ""):
            raise UnityError("no memory")
        Quick.jobs.append(job)
        return operators.Measured(1e-3 * len(Quick.jobs), 0.1, 5)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> type[Quick]:
    monkeypatch.setattr(operators, "RankPool", Quick)
    monkeypatch.setattr(Quick, "fails", "")
    monkeypatch.setattr(Quick, "stops_after", 10**9)
    return Quick


def profile(out: Path, *more: str, machine: str = "box:2") -> int:
    return unity_profile.main([MODEL, f"--machine={machine}", "--out", str(out), *more])


@pytest.mark.slow
def test_every_kernel_of_a_plan_is_measured(tmp_path: Path, quick: type[Quick]):
    assert profile(tmp_path / "p.sqlite") == 0
    machine = load(f"box:2,profile={tmp_path / 'p.sqlite'}")
    assert machine.device.profile is not None
    known = machine.device.profile.kernels
    for strategy in ("joint", "data-parallel", "random"):
        plan = run(from_text(MODEL), load("box:2"), strategy).graph
        step = cost(differentiate(plan, Optimizer(), machine.mesh), machine)
        for kernel in (k for o in step.operators for k in o.work.forward):
            assert kernel.sizes in known[kernel.operator], kernel
        # Of a forward graph, the backward that the cost model thinks of.
        for kernel in (k for o in cost(plan, machine).operators for k in (*o.work.forward, *o.work.backward)):
            assert kernel.sizes in known[kernel.operator], kernel
    # A collective between the kernels of two ranks was measured.
    assert machine.device.profile.collective("all_reduce", 2, 4096) is not None


@pytest.mark.slow
def test_measured_is_not_measured_again_and_a_stop_loses_nothing(
    tmp_path: Path, quick: type[Quick], capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "p.sqlite"
    quick.stops_after = 50
    assert profile(out) == 130
    assert "the same command goes on" in capsys.readouterr().err
    quick.stops_after = 10**9
    assert profile(out) == 0
    first = len(quick.jobs)
    assert profile(out) == 0
    assert (quick.jobs, first > 0) == ([], True)
    with open_profile(out) as file:
        assert len(file.kernels()) + len(file.collectives()) == 50 + first


def test_limit_takes_the_plans_first(tmp_path: Path, quick: type[Quick]):
    assert profile(tmp_path / "p.sqlite", "--limit", "3") == 0
    with open_profile(tmp_path / "p.sqlite") as file:
        assert len(file.kernels()) == 3


def test_what_cannot_be_measured_is_named(tmp_path: Path, quick: type[Quick], capsys: pytest.CaptureFixture[str]):
    quick.fails = "relu"
    assert profile(tmp_path / "p.sqlite") == 0
    assert "not measured: relu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_model", "--machine=box:2"], "no_model"),
        (["no.pcg", "--machine=box:2"], "no.pcg: No such file or directory"),
        ([MODEL, "--machine=nowhere"], "machine: no machine 'nowhere'"),
        ([MODEL, "--machine=box:2", "--device=cuda"], "unity-profile: PyTorch sees no GPU here"),
        ([MODEL, "--machine=box:2", "--each=0"], "unity-profile: --limit is 0 or more"),
        ([MODEL, "--machine=cpu:2,profile=other.sqlite"], "leave ,profile=.. out of --machine"),
        ([MODEL], "unity-profile: the following arguments are required: --machine"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert unity_profile.main([*arguments, "--out", str(tmp_path / "p.sqlite")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "p.sqlite").exists()


def test_a_file_that_is_no_profile_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "thesis.txt"
    out.write_text("years of work\n" * 100)
    assert profile(out) == 1
    assert "is no profile, or damaged" in capsys.readouterr().err
    assert out.read_text() == "years of work\n" * 100


def test_unity_opt_refuses_profiles_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(b"SQLite format 3\0" + bytes(40))
    for machine in (["--machine=box:2"], []):
        assert unity_opt.main([f"--model={MODEL}", *machine, f"--profile={bad}", "--search=data-parallel"]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert ("damaged" if machine else "add --machine") in error


@pytest.mark.slow
def test_ranks_measure(tmp_path: Path):
    node = differentiate(run(from_text(MODEL), load("box:2"), "data-parallel").graph, Optimizer())
    calls = [operators.operator_job(n) for n in node.nodes() if n.is_compute]
    jobs = [*calls, operators.update_job(64, "f32", Optimizer("adam"))]
    jobs += [operators.CollectiveJob(kind, 2, 1024) for kind in PROFILED]
    with operators.RankPool(2, seconds=0.001) as ranks:
        for job in jobs:
            assert 0 < ranks.measure(job).seconds < 10
        with pytest.raises(UnityError, match="nothing"):
            ranks.measure(operators.OperatorJob("nothing", "", ()))
        # A job that failed does no harm to the next.
        assert ranks.measure(jobs[0]).repeats == operators.REPEATS


def test_what_goes_wrong_before_measuring_makes_no_file(
    tmp_path: Path, quick: type[Quick], capsys: pytest.CaptureFixture[str]
):
    """A plan for another machine."""
    plan = tmp_path / "plan.pcg"
    assert unity_opt.main([f"--model={MODEL}", "--search=data-parallel", "--machine=box:4", "-o", str(plan)]) == 0
    out = tmp_path / "p.sqlite"
    assert unity_profile.main([str(plan), "--machine=box:2", "--out", str(out)]) == 1
    assert "device 3" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("text", ["{a = " * 3000, '{"a" = ' + "9" * 5000 + "}", "{a = " + "9" * 400 + "}"])
def test_text_that_python_cannot_hold_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "x.pcg"
    path.write_text(f'machine.machine "m" {{ machine.device "d" {text} }}')
    assert unity_profile.main([str(path), "--machine=cpu:2", "--out", str(tmp_path / "p.sqlite")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--seconds=nan", "--each=nan", "--each=inf"])
def test_times_that_are_none_are_refused(tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]):
    assert profile(tmp_path / "p.sqlite", flag) == 1
    assert "are above 0" in capsys.readouterr().err


def test_what_a_profile_says_of_itself_may_have_quotes():
    about = {"host": 'a "b" \\c', "device": "d"}
    assert tomllib.loads(unity_profile.fit_text({}, {}, about, 2))["about"] == {**about, "ranks": 2}
