"""Collections of others' rules are read, typed, and proved or refuted; what is no collection has a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unity_ir.errors import UnityError
from unity_ir.rules.research.foreign import import_rules
from unity_ir.rules.research.foreign.collection import read_rules
from unity_ir.rules.research.foreign.layouts import divided

COLLECTION = Path(__file__).with_name("collection.json")

VERDICTS = {
    "partitions-commute": ("proved", ""),
    "samples-apart": ("proved", ""),
    "outputs-apart": ("proved", ""),
    "products-apart": ("proved", ""),
    "sum-of-stack": ("proved", ""),
    "weights-summed": ("proved", ""),
    "tile-and-fold": ("proved", ""),
    "relu-of-parts": ("proved", ""),
    "parts-of-product": ("proved", ""),
    "product-of-parts": ("proved", ""),
    "relu-before-sum": ("refuted", "result 0 at"),
    "relu-before-product": ("refuted", "result 0 at"),
    "added-weight": ("unbound", "has no input -5"),
    "two-patterns": ("proved", ""),
    "copies-in-one-place": ("proved", ""),
}


def test_every_rule_has_its_verdict():
    report = import_rules(COLLECTION)
    assert {r.name: r.verdict for r in report.rules} == {n: v for n, (v, _) in VERDICTS.items()}
    assert all(VERDICTS[r.name][1] in r.detail for r in report.rules)
    assert report.counts == {
        **{"proved": 12, "refuted": 2, "unbound": 1},
    }


def _rule(name: str) -> Any:
    return divided(next(r for r in read_rules(COLLECTION) if r.name == name))


def test_sizes_are_equated_and_inputs_divided_where_they_have_to_be():
    first, second = _rule("parts-of-product").inputs[:2]
    assert first.shape[1] == second.shape[1]
    (addends,) = _rule("relu-before-sum").inputs
    assert str(addends.sum) == "d2", "as the source needs it, though the target has no types then"
    x, w = _rule("products-apart").inputs
    assert x.shape[1] == w.shape[1]


def test_an_input_that_is_reduced_has_addends(tmp_path: Path):
    rules = json.loads(COLLECTION.read_text())
    (rule,) = (r for r in rules["rule"] if r["name"] == "relu-before-sum")
    for side in (rule["srcOp"], rule["dstOp"]):
        for op in side:
            op["type"] = op["type"].replace("OP_RELU", "OP_EW_ADD")
            op["input"] *= 2 if op["type"] == "OP_EW_ADD" else 1
    (tmp_path / "rules.json").write_text(json.dumps({"rule": [rule]}))
    (imported,) = import_rules(tmp_path / "rules.json").rules
    assert imported.verdict == "proved"
    assert imported.rule is not None
    assert [str(i.sum) for i in imported.rule.inputs] == ["d2"]


def _broken(change: str) -> str:
    rule = json.loads(COLLECTION.read_text())["rule"][0]
    match change:
        case "no name":
            del rule["name"]
        case "name":
            rule["name"] = 3
        case "operations":
            rule["srcOp"] = {}
        case "operation":
            rule["srcOp"][0] = 7
        case "later":
            rule["srcOp"][0]["input"][0]["opId"] = 2
        case "value":
            rule["srcOp"][0]["para"][0]["value"] = "two"
        case "outputs":
            rule["mappedOutput"] = []
        case "output":
            rule["mappedOutput"][0]["srcOpId"] = 9
        case _:
            return change
    return json.dumps({"rule": [rule]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ("[]", "expected an object with 'rule', got []"),
        ("{}", "has no 'rule'"),
        ('{"rule": 3}', "'rule' is no list"),
        ('{"rule": [null]}', "rule 0: expected an object with 'name', got null"),
        ("no name", "rule 0: has no 'name'"),
        ("name", "rule 0: 'name' is no text"),
        ("operations", "rule 0: 'srcOp' is no list"),
        ("operation", "rule 0: srcOp 0: expected an object with 'input', got 7"),
        ("later", "rule 0: srcOp 0: reads operation 2, which does not come before it"),
        ("value", "rule 0: srcOp 0: 'value' is no integer"),
        ("outputs", "rule 0: maps no output"),
        ("output", "rule 0: 'srcOpId' is 9, but the side has operations 0..2"),
    ],
)
def test_what_is_no_collection_has_an_error_of_one_line(text: str, message: str, tmp_path: Path):
    path = tmp_path / "rules.json"
    path.write_text(_broken(text))
    with pytest.raises(UnityError) as error:
        import_rules(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"rules {path}: ")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UnityError, match="cannot be read"):
        import_rules(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("key", "value", "detail"),
    [
        ("PM_PARALLEL_DEGREE", 1, "OP_PARTITION by 1"),
        ("PM_PARALLEL_DIM", 3, "OP_PARTITION along dim 3"),
    ],
)
def test_parameters_that_mean_nothing_here(key: str, value: int, detail: str, tmp_path: Path):
    rule = json.loads(COLLECTION.read_text())["rule"][0]
    for parameter in rule["srcOp"][0]["para"]:
        if parameter["key"] == key:
            parameter["value"] = value
    (tmp_path / "rules.json").write_text(json.dumps({"rule": [rule]}))
    (imported,) = import_rules(tmp_path / "rules.json").rules
    assert (imported.verdict, detail in imported.detail) == ("unsupported", True)


def test_an_operator_nobody_knows_and_a_result_there_is_not(tmp_path: Path):
    rules = json.loads(COLLECTION.read_text())["rule"][:2]
    rules[0]["srcOp"][0]["type"] = "OP_FFT"
    rules[1]["mappedOutput"][0]["srcTsId"] = 4
    (tmp_path / "rules.json").write_text(json.dumps({"rule": rules}))
    found = import_rules(tmp_path / "rules.json").rules
    assert [(r.verdict, r.detail) for r in found] == [
        ("unsupported", "operator OP_FFT"),
        ("ill-typed", "operation 2 has no result 4"),
    ]
