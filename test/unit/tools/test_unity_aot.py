"""`unity-aot`: asks for every distinct kernel once, keeps what it knows, and says what does not suit a GPU."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from unity_ir.errors import UnityError
from unity_ir.kernels.triton.launch import Compiled
from unity_ir.lowering.measure import aot_check
from unity_ir.lowering.measure.aot import Job, Outcome, Resources
from unity_ir.lowering.measure.aot_check import CHECKS, key, merged, violations
from unity_ir.lowering.measure.sass import Loop
from unity_ir.tools import unity_aot

MODEL = "mlp,batch=8,hidden=16,layers=2,classes=4"
FITS = Resources("k", 64, 0, 0, 1024, 0.1, ("cp.async", "mma.sync"))
LAUNCH = Compiled("k", {"x_ptr": "*fp32", "x_k": "constexpr"}, {"x_k": 1}, 4, 3)
TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")


@pytest.mark.parametrize("target", TARGETS)
def test_what_suits_a_gpu(target: str) -> None:
    job = Job("def k(): ...", replace(LAUNCH, expects=("mma", "pipelined")))
    assert violations(job, FITS, target) == []
    # A table on the stack, which the sine of a large angle reads, is no spill.
    assert violations(Job("tl.sin(x)", LAUNCH), replace(FITS, frame_bytes=40), target) == []


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ("k: out of registers", "does not compile: k: out of registers"),
        (replace(FITS, spills=8, frame_bytes=8), "spills 8"),
        (replace(FITS, frame_bytes=40), "has a stack frame of 40 bytes"),
        (replace(FITS, shared_bytes=200 * 1024), "takes 204800 bytes of shared memory"),
        (replace(FITS, instructions=("cp.async",)), "has no matrix instruction"),
        (replace(FITS, instructions=("wgmma",)), "copies nothing asynchronously"),
    ],
)
def test_what_does_not(outcome: Outcome, message: str) -> None:
    job = Job("def k(): ...", replace(LAUNCH, expects=("mma", "pipelined")))
    (found,) = violations(job, outcome, "cuda:80")
    assert found.startswith(message)
    assert sum(found.startswith(check) for check in CHECKS) == 1


LARGE = {"X_COLUMNS": False, "BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
DEEP = {"X_COLUMNS": False, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 128}
POINTERS = {"FULL": True, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
STEP = Loop(115, "HGMMA", 3, 11)


@pytest.mark.parametrize(
    ("constants", "loop", "message"),
    [
        (LARGE, STEP, None),
        (LARGE, replace(STEP, instructions=116), "has a step of 116 instructions, of 115"),
        (LARGE, replace(STEP, selects=4), "selects 4 values"),
        # Twice as many elements of K.
        (DEEP, STEP, None),
        (DEEP, replace(STEP, instructions=116), "has a step of 116 instructions, of 115"),
        (POINTERS, replace(STEP, instructions=116), None),
        (POINTERS, replace(STEP, selects=17), "selects 17 values"),
        # Where masks are needed.
        ({**POINTERS, "FULL": False}, replace(STEP, selects=17), None),
        # An attention's.
        ({}, replace(STEP, selects=32), None),
    ],
)
def test_steps_of_a_product(constants: dict[str, int | bool], loop: Loop, message: str | None) -> None:
    job = Job("def k(): ...", replace(LAUNCH, constants={"x_k": 1, **constants}, expects=("mma",)))
    outcome = replace(FITS, instructions=("tma", "wgmma"), loop=loop)
    found = violations(job, outcome, "cuda:90")
    assert [one.startswith(message or "-") for one in found] == ([] if message is None else [True])
    assert all(sum(one.startswith(check) for check in CHECKS) == 1 for one in found)
    assert violations(job, outcome, "cuda:80") == []


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (replace(STEP, instructions=57), None),
        (replace(STEP, instructions=58), "has a step of 58 instructions, of 57"),
        (None, "has no wgmma in its loop"),
    ],
)
def test_steps_of_a_large_product_by_pointers(loop: Loop | None, message: str | None) -> None:
    job = Job("def k(): ...", replace(LAUNCH, constants={"x_k": 1, **POINTERS}, expects=("mma", "short")))
    outcome = replace(FITS, instructions=("cp.async", "wgmma" if loop else "mma.sync"), loop=loop)
    assert violations(job, outcome, "cuda:90") == ([] if message is None else [message])
    assert violations(job, outcome, "cuda:80") == []


def test_an_attention_without_wgmma() -> None:
    job = Job("def k(): ...", replace(LAUNCH, expects=("mma", "wgmma")))
    outcome = replace(FITS, instructions=("cp.async", "mma.sync"))
    assert violations(job, outcome, "cuda:90") == ["has no wgmma in its loop"]
    assert violations(job, outcome, "cuda:80") == violations(job, replace(outcome, loop=STEP), "cuda:90") == []


def test_matrix_instructions_of_warps_beside_those_of_groups() -> None:
    job, outcome = Job("def k(): ...", LAUNCH), replace(FITS, instructions=("mma.sync", "wgmma"))
    assert violations(job, outcome, "cuda:90") == ["multiplies by mma.sync beside wgmma"]
    assert violations(job, replace(outcome, instructions=("wgmma",)), "cuda:90") == []


def test_copies_of_amd_are_not_asynchronous() -> None:
    job = Job("def k(): ...", replace(LAUNCH, expects=("pipelined",)))
    assert violations(job, replace(FITS, instructions=()), "hip:gfx942") == []


def test_a_stride_of_one_has_to_be_a_constant() -> None:
    loose = replace(LAUNCH, signature={"x_ptr": "*fp32", "x_k": "i32"})
    assert violations(Job("def k(): ...", loose), FITS, "cuda:90") == ["does not specialise x_k, which is 1"]


def test_equal_launches_of_equal_texts_are_one() -> None:
    one = Job("def k(): ...", LAUNCH)
    expecting = replace(one, compiled=replace(LAUNCH, expects=("mma",)))
    assert key(one) == key(expecting)
    assert merged(one, expecting) == merged(expecting, one) == expecting
    # Only the whole name is one.
    named = Job("def other(k): ...", replace(LAUNCH, kernel="other"))
    assert key(Job("def k(k_ptr): ...", LAUNCH)) == key(Job("def other(k_ptr): ...", named.compiled))
    assert key(Job("def k(k_ptr): ...", LAUNCH)) != key(Job("def other(other_ptr): ...", named.compiled))
    others = [
        Job("def k(): pass", LAUNCH),
        *(Job(one.source, replace(LAUNCH, **change)) for change in ({"num_warps": 8}, {"constants": {"x_k": 2}})),
    ]
    assert len({key(one), *map(key, others)}) == 3 + 1


class Compiler:
    """Stands in for Triton's: every kernel takes what `answer` says."""

    answer: Outcome = FITS
    compiled: list[tuple[str, str]]

    def __init__(self) -> None:
        self.compiled = []

    def __call__(self, jobs: Sequence[Job], target: str) -> Iterator[Outcome]:
        for job in jobs:
            self.compiled.append((key(job), target))
            yield self.answer


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(aot_check, "compile_each", made)
    return made


def run(tmp_path: Path, *options: str) -> int:
    return unity_aot.main([*options, "--cache", str(tmp_path / "c.sqlite"), "--machine", "2gpu", "--jobs", "1"])


@pytest.mark.slow
def test_each_kernel_is_compiled_once(tmp_path: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "aot.json"
    assert run(tmp_path, MODEL, "--json", str(report)) == 0
    assert len(compiler.compiled) == len(set(compiler.compiled)) > 20
    assert {target for _, target in compiler.compiled} == set(TARGETS)
    found = json.loads(report.read_text())
    assert len(found["programs"]) == 6
    assert [each["kernels"] for each in found["targets"]] == [found["distinct kernels"]] * 3
    assert found["violations"] == []
    before = len(compiler.compiled)
    assert run(tmp_path, MODEL) == 0
    assert len(compiler.compiled) == before
    assert "0 violations, 0 left out" in capsys.readouterr().out


def test_something_wrong_or_left_out_is_an_error(
    tmp_path: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, MODEL, "--plans", "data-parallel", "--types", "f32", "--seconds", "0") == 1
    assert not compiler.compiled
    assert " 0 compilations, 0 violations" in capsys.readouterr().out
    compiler.answer = replace(FITS, spills=4)
    assert run(tmp_path, MODEL, "--plans", "data-parallel", "--types", "f32", "--targets", "cuda:80") == 1
    assert "spills 4 bytes" in capsys.readouterr().out
    report = tmp_path / "aot.json"
    assert run(tmp_path, MODEL, "--plans", "data-parallel", "--targets", "cuda:80", "--json", str(report)) == 1
    (target,), (model,) = (json.loads(report.read_text())[name] for name in ("targets", "models"))
    assert model["spills"] == model["kernels"] == target["violations: spills"] > 0
    assert target["violations: does not compile"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "--model: no model 'nothing'"),
        (["mlp", "--targets", ","], "unity-aot: no target ','; known are cuda:80"),
        (["mlp", "--plans", "best"], "unity-aot: no plan 'best'; known are joint"),
        (["mlp", "--convolution", "zz"], "unity-aot: no implementation 'zz'; known are triton, torch"),
        (["mlp", "nosuch", "--jobs", "2"], "--model: no model 'nosuch'; known are alexnet"),
        (["mlp", "--seconds", "nan"], "unity-aot: --jobs is 1 or more, --seconds 0 or more"),
        (["mlp", "--json", "no/x.json"], "unity-aot: no/x.json: there is no folder no"),
        (["mlp", "--targets", "tpu"], "unity-aot: no target 'tpu'; known are cuda:80"),
        (["mlp", "--types", "f8"], "unity-aot: no element type 'f8'"),
        (["mlp", "--jobs", "0"], "unity-aot: --jobs is 1 or more"),
        (["--what"], "unity-aot: unrecognized arguments: --what"),
    ],
)
def test_refusals(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unity_aot.main([*options, "--cache", str(tmp_path / "c.sqlite")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_that_is_none_is_said(tmp_path: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    alone = "mlp,batch=1,hidden=16,layers=2,classes=4"
    assert run(tmp_path, alone, "--plans", "data-parallel") == 1
    error = capsys.readouterr().err
    assert f"not emitted: {alone}, data-parallel: " in error
    assert f"none of the programs of {alone} could be emitted" in error


def test_a_plan_that_fits_no_machine_is_of_the_next(
    tmp_path: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "aot.json"
    two = "mlp,batch=2,hidden=16,layers=2,classes=4"
    # Two samples cannot be divided among the eight GPUs of the first.
    options = ["--machine", "dgx-h100", "--plans", "data-parallel", "--types", "f32", "--json", str(report)]
    assert unity_aot.main([two, *options, "--machine", "2gpu", "--cache", str(tmp_path / "c.sqlite")]) == 0
    found = json.loads(report.read_text())
    assert (found["programs"], found["not emitted"]) == ([f"{two}, data-parallel, f32, 2 GPUs"], {})
    assert found["machines"] == ["dgx-h100", "2gpu"]


@pytest.mark.slow
def test_several_processes_ask_for_the_same() -> None:
    models = [MODEL, MODEL.replace("16", "32", 1)]
    one, two = (unity_aot.compile_requests(models, ["data-parallel"], ["f32"], ["2gpu"], "triton", n) for n in (1, 2))
    assert one == two
    assert any(len(of) == 2 for of in one.models.values())
    assert len(one.programs) == 2


@pytest.mark.parametrize("kept", ["no database", "no outcome"])
def test_a_damaged_cache_is_told(kept: str, tmp_path: Path) -> None:
    path = tmp_path / "aot.sqlite"
    if kept == "no database":
        path.write_text("x" * 2000)
    else:
        aot_check.Cache(path).put("k", "cuda:90", FITS)
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE outcomes SET outcome = '{'")
    with pytest.raises(UnityError, match=r"aot.sqlite: no cache of compiled kernels, or damaged .*; remove it"):
        aot_check.Cache(path).get("cuda:90")


def test_rings_are_of_models_with_attention() -> None:
    small = "gpt2,batch=8,sequence=16,hidden=32,heads=4,layers=1,vocabulary=16"
    asked = unity_aot.compile_requests([small], [unity_aot.RING], ["bf16"], ["dgx-h100"], "torch")
    assert asked.refused == {}
    assert any("attention_part_grad" in job.compiled.kernel for job in asked.jobs.values())
    asked = unity_aot.compile_requests([MODEL], ["data-parallel", unity_aot.RING], ["bf16"], ["dgx-h100"], "torch")
    assert [program.split(", ")[1] for program in asked.programs] == ["data-parallel"]
    assert asked.refused == {}
