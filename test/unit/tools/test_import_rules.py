"""`unity-rules import`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unity_ir.rules.library import read_rules
from unity_ir.rules.proof.prove import prove
from unity_ir.tools.unity_rules import main

COLLECTION = Path(__file__).parents[1] / "rules" / "foreign" / "collection.json"


@pytest.mark.slow
def test_proved_rules_are_written_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rules = tmp_path / "rules.pcg"
    assert main(["import", str(COLLECTION), "-o", str(rules)]) == 0
    out = capsys.readouterr().out
    assert "12 proved" in out
    assert "relu-before-sum" in out
    assert "weights-summed" not in out
    found = read_rules(str(rules))
    assert len(found) == 12
    assert all(prove(r).proved and r.proof is not None and r.proof.verdict == "proved" for r in found)


def test_every_rule_is_listed_if_asked_for(capsys: pytest.CaptureFixture[str]):
    assert main(["import", str(COLLECTION), "--all"]) == 0
    assert "weights-summed" in capsys.readouterr().out


def test_verdicts_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["import", str(COLLECTION), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["proved"] == 12
    assert {r["name"]: r["verdict"] for r in found["rules"]}["two-patterns"] == "proved"


def test_what_is_no_collection_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rules.json"
    path.write_text("{}")
    assert main(["import", str(path)]) == 1
    error = capsys.readouterr().err
    assert error == f"rules {path}: has no 'rule'\n"


def test_a_rule_whose_target_is_ill_typed_at_some_sizes_is_not_written(tmp_path: Path):
    """The target divides a dim that the source leaves whole, as three of FlexFlow's do; no file can have it."""
    collection = json.loads(COLLECTION.read_text())
    (rule,) = [r for r in collection["rule"] if r["name"] == "partitions-commute"]
    (output,) = rule["mappedOutput"]
    output = output | {"srcOpId": output["dstOpId"], "dstOpId": output["srcOpId"]}
    backwards = rule | {"srcOp": rule["dstOp"], "dstOp": rule["srcOp"], "mappedOutput": [output], "name": "backwards"}
    path, rules = tmp_path / "rules.json", tmp_path / "rules.pcg"
    path.write_text(json.dumps({"_t": "RuleCollection", "rule": [rule, backwards]}))
    assert main(["import", str(path), "-o", str(rules)]) == 0
    assert [r.name for r in read_rules(str(rules))] == ["partitions-commute"]
