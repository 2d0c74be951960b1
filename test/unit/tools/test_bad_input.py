"""Bad input ends every tool in one line and exit code 1, with nothing written; closed streams are told."""

from __future__ import annotations

import re
import sqlite3
import sys
from pathlib import Path

import pytest

from unity_ir.machine.profile import KernelRow, open_profile
from unity_ir.tools import unity_aot, unity_opt, unity_profile, unity_rules, unity_tune
from unity_ir.tools.command_line import TRACEBACK

MNIST = str(Path(__file__).parents[3] / "examples" / "mnist_mlp.pcg")


@pytest.fixture(autouse=True)
def _raise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TRACEBACK, "1")


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert unity_opt.main(argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model=lenet,batch=8,batch=9"], "--model: batch is given twice; leave one out"),
        (
            ["--search=joint,optimizer=adam,optimizer=sgd", "--machine=2gpu", MNIST],
            "--search: optimizer is given twice",
        ),
        (
            ["--search=joint,micro-batches=2,micro_batches=4", "--machine=2gpu", MNIST],
            "--search: micro_batches is given twice",
        ),
        (["--stats", "--machine=2gpu", "--machine=box:2", MNIST], "--machine is given twice; leave one out"),
        (["-p", "pcg-erase", "--passes", "pcg-erase", MNIST], "-p/--passes is given twice"),
        (["-p", "pcg-differentiate{lr=0.1 lr=0.2}", MNIST], "lr is given twice; leave one out"),
        (["-p", "pcg-search{seed=1 seed=2 machine=2gpu}", MNIST], "seed is given twice"),
        (["-t", "triton{matmul=torch matmul=triton}", MNIST], "matmul is given twice"),
        (["-p", 'apply-rule{rule=divide-matmul given="d=2,d=4"}', MNIST], "gives d twice; leave one out"),
        (["--stats", "--machine=cpu:2,profile=a.sqlite,profile=b.sqlite", MNIST], "has two profiles; leave one out"),
        (["--search=unity,cache=no", "--machine=2gpu", MNIST], "cache is 'no'; it must be true or false"),
    ],
)
def test_what_is_given_twice_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    refused(capsys, argv, message)


@pytest.mark.parametrize("main", [unity_aot.main, unity_profile.main, unity_tune.main])
def test_every_tool_refuses_options_given_twice(main, capsys: pytest.CaptureFixture[str]):  # pyright: ignore
    flag = "--out" if main is not unity_aot.main else "--json"
    assert main(["mlp", flag, "x", flag, "y"]) == 1
    assert f"{flag} is given twice; leave one out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "riscv-asm", "arm-asm", "x86-asm", "mps", "wgsl", "wat", "csl"])
def test_targets_that_cannot_write_a_module_say_so(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    refused(capsys, [MNIST, "-t", target, "-o", str(out)], f"-t {target}")
    assert not out.exists()


TORCH = """
import sys
import torch
def exits0(): sys.exit(0)
def exits3(): sys.exit(3)
def base(): raise BaseException("x")
class Exits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
    def forward(self, x):
        sys.exit(5)
def forward_exits(): return Exits(), (torch.zeros(2),)
def generator_exit(): raise GeneratorExit
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exits0", "called sys.exit(0); it must return the model"),
        ("exits3", "called sys.exit(3)"),
        ("forward_exits", "called sys.exit(5)"),
        ("base", "raised BaseException: x"),
        ("generator_exit", "raised GeneratorExit"),
    ],
)
def test_a_function_that_exits_is_refused(
    function: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "module_that_exits.py").write_text(TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "never.pcg"
    refused(capsys, [f"--from-torch=module_that_exits:{function}", "-o", str(out)], message)
    assert not out.exists()


def test_a_module_that_exits_when_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    refused(capsys, ["--from-torch=exits_at_import:f"], "called sys.exit(None)")


# --- closed streams


def test_closed_stdout_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.setattr(sys, "stdout", None)
    assert unity_opt.main([MNIST]) == 1
    assert unity_opt.main([MNIST, "-o", str(tmp_path / "out.pcg")]) == 0
    assert unity_rules.main(["list", "--name", "relu"]) == 1
    said = "{}: stdout is closed; give it a file\n"
    assert capsys.readouterr().err == said.format("unity-opt") + said.format("unity-rules")


def test_closed_stdin_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "stdin", None)
    refused(capsys, [], "unity-opt: stdin is closed; give it a file")


def test_closed_stderr_sends_nothing_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "stderr", None)
    assert unity_opt.main(["nothing.pcg"]) == 1
    assert capsys.readouterr().out == ""


# --- files


def test_a_name_with_a_newline_makes_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "a\nb\u202e.pcg"
    path.write_text("func.func @f() { pcg.relu }")
    refused(capsys, [str(path)], "a\\nb\\u202e.pcg:1:")


def test_a_token_of_a_megabyte_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "m.pcg"
    path.write_text(f"func.func @f() {{ pcg.{'x' * 10**6} }}")
    assert unity_opt.main([str(path)]) == 1
    assert len(capsys.readouterr().err) <= 301


def test_a_rule_named_with_unseen_characters_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.pcg"
    path.write_text('subst.rule "a\u202e\x00" (%x: [a..]) { yield %x } to { yield %x }\n')
    assert unity_rules.main(["list", "--file", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "r.pcg:1:12: the text has the character U+202E, which cannot be seen; remove it" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{factor = 1" + "0" * 5000 + "}", "a number of 5001 digits; it must have at most 18"),
        ("{factor = 1.0e999}", "1.0e999 is beyond all numbers; make it smaller"),
        ('{act = "\x1b"}', "the character U+001B"),
    ],
)
def test_values_of_rules_that_are_none(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.pcg"
    path.write_text(f'subst.rule "r" (%x: [a..]) {{ %y = scale %x {text} yield %y }} to {{ yield %x }}\n')
    for argv in (["list", "--file", str(path)], ["prove", str(path)]):
        assert unity_rules.main(argv) == 1
        assert message in capsys.readouterr().err
    refused(capsys, [str(path)], message)


def test_deep_toml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 2000 + "]" * 2000)
    refused(capsys, [MNIST, "--stats", f"--machine={path}"], "is nested too deeply")


def profile(path: Path) -> None:
    with open_profile(path, create={"device": "CPU", "host": "here"}) as file:
        file.add_kernel(KernelRow("relu", (4, 4), 1, "pointwise", "f32", 16, 128, 1e-6, 0.1, 3, "2026"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("update about set value = cast(x'fffe' as text) where key = 'host'", "has text that is not UTF-8"),
        ("update kernels set operator = cast(x'ff41' as text)", "has text that is not UTF-8"),
        ("update kernels set sizes = '1' || replace(hex(zeroblob(4000)), '0', '9')", "is damaged"),
        ("update kernels set flops = 'many'", "is damaged"),
        ("update about set value = x'00' where key = 'host'", "is damaged"),
    ],
)
def test_a_profile_with_other_values_is_refused(
    change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "p.sqlite"
    profile(path)
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(change)
    connection.close()
    refused(capsys, [MNIST, "--stats", "--machine=cpu:2", f"--profile={path}"], message)


def test_a_locked_profile_says_that_it_is_locked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "p.sqlite"
    profile(path)
    connection, connect = sqlite3.connect(path), sqlite3.connect
    connection.execute("begin exclusive")
    # Not to wait for the other for as long as sqlite does.
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, timeout=0.0))
    refused(capsys, [MNIST, "--stats", "--machine=cpu:2", f"--profile={path}"], "is locked by another process")
    connection.close()


def test_an_internal_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken(*_: object) -> None:
        raise KeyError("x\ny")

    monkeypatch.setattr("unity_ir.tools.unity_opt.expanded", broken)
    with pytest.raises(KeyError):
        unity_opt.main([MNIST])
    monkeypatch.delenv(TRACEBACK)
    assert unity_opt.main([MNIST]) == 1
    err = capsys.readouterr().err
    assert err.startswith("unity-opt: internal error: KeyError: 'x\\ny' at ")
    assert err.count("\n") == 1


PERM = """subst.rule "r" (%x: [b, h, m, k], %y: [b, h, n, k]) {
  %t = transpose %y {perm = [0, 1, other, 2]}
  %z = batch_matmul %x, %t
  yield %z
} to {
  %z = batch_matmul_nt %x, %y
  yield %z
}
"""
"""A number without a value: for most it is no permutation."""


def test_a_gradient_at_attributes_that_do_not_fit_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.pcg"
    path.write_text(PERM)
    assert unity_rules.main(["prove", str(path)]) == 0
    assert "not shown at ties: transpose has no gradient at these attributes" in " ".join(
        capsys.readouterr().out.split()
    )


SPMD = """spmd.program @f mesh [2] {{
  %x = spmd.input "x" : !spmd.piece<[4] of [4], f32, [sum]>
  {line}
}}
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "%y = spmd.all_reduce %x along [0, 1] : !spmd.piece<[4] of [4], f32, [sum]>"
            " -> !spmd.piece<[4] of [4], f32, []>",
            "its axes [0, 1] do not all go from one role to one other",
        ),
        ("%y = spmd.constant 1.0e999 : !spmd.piece<[] of [], f32, [copy]>", "inf is not a finite number"),
    ],
)
def test_programs_that_make_no_sense_are_refused(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "p.pcg"
    path.write_text(SPMD.format(line=line))
    refused(capsys, [str(path)], message)


def test_an_update_without_an_optimizer_has_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "p.pcg"
    assert unity_opt.main([MNIST, "-p", "pcg-differentiate", "-o", str(path)]) == 0
    step = path.read_text()
    found = re.search(r"\{optimizer = [^}]*\}", step)
    assert found is not None
    path.write_text(step.replace(found[0], ""))
    refused(capsys, [str(path), "-t", "triton"], 'pcg.update leaves the optimizer open; name it: {optimizer = "sgd"}')


GENERIC = """"builtin.module"() ({{
  %c = "pcg.constant"() <{{value = 1.0 : f64}}> : () -> !pcg.tensor<[6:2], f32>
  "func.func"() <{{sym_name = "f", function_type = (!pcg.tensor<[6:2], f32>) -> !pcg.tensor<[6], f32>{more}}}> ({{
  ^bb0(%x: !pcg.tensor<[6:2], f32>):
    %y = "pcg.combine"({operand}) <{{{degrees}}}> : (!pcg.tensor<[6:2], f32>) -> !pcg.tensor<[6], f32>
    "func.return"(%y) : (!pcg.tensor<[6], f32>) -> ()
  }}) : () -> ()
}}) : () -> ()
"""


@pytest.mark.parametrize(
    ("operand", "degrees", "more", "message"),
    [
        ("%x", "by = 2, dim = 0", ", arg_attrs = []", "func.func: arg_attrs has 0 dictionaries"),
        ("%x", "by = 2, dim = 0", ", res_attrs = [{}, {}]", "func.func: res_attrs has 2 dictionaries"),
        # xDSL's message prints the operation, of which the degree is missing.
        ("%c", "dim = 0", "", "Operation using value defined out of its IsolatedFromAbove parent"),
    ],
)
def test_generic_text_that_does_not_hold_together(
    operand: str, degrees: str, more: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "g.pcg"
    path.write_text(GENERIC.format(operand=operand, degrees=degrees, more=more))
    refused(capsys, [str(path)], message)


MILLION = """
!halves = !pcg.tensor<[4:2], f32>
!whole = !pcg.tensor<[4], f32>
func.func @f(%x: !halves {pcg.view = #machine.view<0, [2 @ 1]>},
             %y: !whole {pcg.view = #machine.view<0, repeat [1048576 @ 1]>}) -> !pcg.tensor<[], f32> {
  %w = pcg.weight "w" on #machine.view<0, [2 @ 1]> : !halves
  %h = pcg.mul %x, %w on #machine.view<0, [2 @ 1]> : !halves, !halves
  %i = pcg.combine %h, dim 0 by 2 on #machine.view<0, repeat [1048576 @ 1]> : !halves
  %l = pcg.mse %i, %y on #machine.view<0, repeat [1048576 @ 1]> : !whole, !whole
  func.return %l : !pcg.tensor<[], f32>
}
"""


def test_places_without_number_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A value on one of a million devices: each of the others might make other calls."""
    path = tmp_path / "p.pcg"
    path.write_text(MILLION)
    refused(capsys, ["-t", "triton", str(path)], "use fewer devices")
