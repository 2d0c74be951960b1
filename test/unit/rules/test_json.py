"""Substitutions as JSON and back."""

from __future__ import annotations

import json

import pytest

from unity_ir.errors import UnityError
from unity_ir.rules.json import from_json, to_json
from unity_ir.rules.pattern import Condition, Input, Operation, Pack, Parameter, Result, Substitution
from unity_ir.rules.poly import number, parse
from unity_ir.rules.proof.prove import prove


def merge() -> Substitution:
    x, v, w = (
        Input("x", (Pack("a"), parse("k"))),
        Input("v", (parse("k"), parse("d*n")), (number(1), parse("d"))),
        Input("w", (parse("k"), parse("d*m")), (number(1), parse("d"))),
    )
    act = ("act", Parameter("act"))
    single = [Result(Operation("matmul", (x, i), (act,))) for i in (v, w)]
    joined = Operation("concat", (v, w), (("dim", number(1)),))
    product = Operation("matmul", (x, Result(joined)), (act,))
    split = Operation("split", (Result(product),), (("dim", parse("#a")), ("sizes", (parse("d*n"), parse("d*m")))))
    target = (Result(split, 0), Result(split, 1))
    return Substitution("merge", (x, v, w), tuple(single), target, (Condition(parse("n - 1")),), exact=True)


def test_round_trip():
    rule = merge()
    data = to_json(rule)
    again = from_json(json.loads(json.dumps(data)))
    assert to_json(again) == data
    # What is shared stays so.
    assert len(again.operations(again.target)) == 3
    assert again.inputs[0] is again.source[0].operation.operands[0]  # pyright: ignore
    assert again.exact
    assert again.symbols == rule.symbols


def test_numbers_and_names_of_functions():
    x = Input("x", (Pack("a"),))
    rule = Substitution(
        "scale", (x,), (Result(Operation("scale", (x,), (("by", 1.0),))),), (Result(Operation("detach", (x,))),)
    )
    again = from_json(json.loads(json.dumps(to_json(rule))))
    assert prove(again).proved
    y, z = Input("x", (parse("n"), parse("k"))), Input("y", (parse("k"), parse("m")))
    relu = Result(Operation("relu", (Result(Operation("matmul", (y, z))),)))
    fused = Substitution("fuse", (y, z), (relu,), (Result(Operation("matmul", (y, z), (("act", "relu"),))),))
    assert prove(from_json(json.loads(json.dumps(to_json(fused))))).proved


@pytest.mark.parametrize("key", ["name", "inputs", "source"])
def test_refuses_what_is_no_rule(key: str):
    data = to_json(merge())
    del data[key]
    with pytest.raises(UnityError, match="not a rule as JSON"):
        from_json(data)
