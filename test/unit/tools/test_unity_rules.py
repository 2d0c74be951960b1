"""The command line of `unity-rules`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from unity_ir.rules.library import read_rules
from unity_ir.rules.text import rule_text
from unity_ir.tools.unity_rules import main

GENERATE = ["generate", "--operators", "relu,transpose", "--parallel", "", "--size", "2", "--jobs", "1"]


def test_generate_writes_rules_and_prints_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rules = tmp_path / "rules.pcg"
    assert main([*GENERATE, "-o", str(rules)]) == 0
    out = capsys.readouterr().out
    assert "28,744" in out
    assert "651" in out
    found = read_rules(str(rules))
    assert [r.name for r in found] == ["transpose-transpose", "transpose-relu"]


def test_counts_as_json(capsys: pytest.CaptureFixture[str]):
    assert main([*GENERATE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rules"] == found["counts"]["proved"] == 2
    assert found["counts"]["refuted"] == found["counts"]["undecided"] == 0
    assert found["space"]["operators"] == ["relu", "transpose"]


@pytest.mark.slow
def test_two_processes_find_what_one_does(tmp_path: Path):
    files = [tmp_path / f"{jobs}.pcg" for jobs in (1, 2)]
    for jobs, file in enumerate(files, 1):
        assert main([*GENERATE[:-1], str(jobs), "-o", str(file)]) == 0
    first, second = ([replace(r, proof=None) for r in read_rules(str(file))] for file in files)
    assert list(map(rule_text, first)) == list(map(rule_text, second))
    assert all(r.proof is not None and r.proof.verdict == "proved" for r in read_rules(str(files[0])))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "unity-rules: the following arguments are required: command; see unity-rules --help"),
        (["generate", "--size", "x"], "unity-rules generate: argument --size: invalid int value: 'x'"),
        (["generate", "--operators", "rellu"], "pcg.rellu: unknown operator; did you mean relu"),
        (["generate", "--operators", ""], "unity-rules: no operators are given; name one, such as relu"),
        (["generate", "--jobs", "0"], "unity-rules: --jobs is 1 or more"),
        ([*GENERATE, "-o", "/nowhere/rules.pcg"], "/nowhere/rules.pcg: No such file or directory"),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_the_library_is_listed_and_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["list", "--name", "merge-matmuls"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("2 rules\n")
    assert "sizes=[n, m]" in out.replace("\n", "")
    assert main(["show", "merge-matmuls"]) == 0
    out = capsys.readouterr().out
    assert 'subst.rule "merge-matmuls"' in out
    assert "// proved for all sizes" in out


def test_rules_of_a_file_are_proved_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = 'subst.rule "good" (%x: [a..]) { %y = relu %x %z = relu %y yield %z } to { %z = relu %x yield %z }'
    bad = 'subst.rule "bad" (%x: [a..]) { %y = relu %x yield %y } to { %y = exp %x yield %y }'
    both, proved = tmp_path / "both.pcg", tmp_path / "proved.pcg"
    both.write_text(f"{good}\n{bad}\n")
    assert main(["prove", str(both), "-o", str(proved)]) == 1
    out = capsys.readouterr().out
    assert "good: proved" in out
    assert "bad: refuted: at " in out
    assert main(["prove", str(proved)]) == 0
    assert 'verdict = "proved"' in proved.read_text()
    assert main(["list", "--file", str(proved)]) == 0
    assert "1 rules" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "merge-matmul"], "unknown rule merge-matmul; did you mean merge-matmuls"),
        (["list", "--operator", "matmull"], "unity-rules: no operator 'matmull'"),
        (["prove", "missing.pcg"], "missing.pcg: No such file or directory"),
    ],
)
def test_what_is_not_there_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith(message)


def test_certificates_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rules, found = tmp_path / "rules.pcg", tmp_path / "certificates.json"
    assert main([*GENERATE, "-o", str(rules)]) == 0
    assert main(["certify", "--file", str(rules), "-o", str(found)]) == 0
    assert capsys.readouterr().out.endswith("2 of 2 rules have certificates\n")
    assert main(["verify", str(found), "--file", str(rules)]) == 0
    assert capsys.readouterr().out == "2 values and gradients\n"
    certificates = json.loads(found.read_text())
    certificates["transpose-relu"] = certificates.pop("transpose-transpose")
    found.write_text(json.dumps(certificates))
    assert main(["verify", str(found), "--file", str(rules)]) == 1
    out = capsys.readouterr().out
    assert "transpose-transpose: it has none\n" in out
    assert out.endswith("2 refused\n")


def test_what_is_no_certificate_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = tmp_path / "certificates.json"
    for text, message in (("{", "no JSON"), ("[]", "not what unity-rules certify writes")):
        found.write_text(text)
        assert main(["verify", str(found)]) == 1
        assert message in capsys.readouterr().err
    found.write_text('{"merge-matmuls": 3}')
    assert main(["verify", str(found)]) == 1
    assert "merge-matmuls: incomplete" in capsys.readouterr().out
