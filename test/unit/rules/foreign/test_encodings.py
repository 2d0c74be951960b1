"""
Each encoding of FlexFlow's rules says what the rule means: verdicts are those that an evaluation of the rules as they
are, on random arrays, bears out.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from foreign_values import Array, evaluate
from taso_rules import (
    Op,
    collection,
    concat,
    convolution,
    json_rule,
    linear,
    matmul,
    parallel,
    pool,
    rule,
    split,
    transpose,
)

from unity_ir.rules.pattern import DimPack
from unity_ir.rules.research.foreign import PROVED, ImportedRule, import_rules
from unity_ir.rules.research.foreign.collection import ForeignRule, read_rules
from unity_ir.rules.research.foreign.terms import input_name
from unity_ir.rules.research.foreign.values import whole
from unity_ir.tools.unity_rules import main

RELU, ADD, MUL, SCALE = "RELU", "EW_ADD", "EW_MUL", "MUL"
ONE, ROWS = {"KERNEL_H": 1, "KERNEL_W": 1}, {"KERNEL_H": 3, "KERNEL_W": 3}
VALUES, AT_DEGREES = "values alone", "values alone, at its degrees"

RULES: dict[str, tuple[Any, str, str, str]] = {
    name: (json_rule(name, source, target), verdict, loses, detail)
    for name, source, target, verdict, loses, detail in (
        (
            *("tile-of-divided", [parallel("PARTITION", 1, -1), parallel("REPLICATE", 1, 0)]),
            *([parallel("REPLICATE", 1, -1), parallel("PARTITION", 1, 0)], "proved", VALUES, "pcg.reshape: "),
        ),
        (
            *("copies-summed", [parallel("REPLICATE", 0, -1), parallel("REDUCE", 0, 0)]),
            *([parallel("REPLICATE", 1, -1), parallel("REDUCE", 1, 0)], "proved", VALUES, "copy"),
        ),
        (
            *("copies-are-no-sum", [parallel("REPLICATE", 0, -1), parallel("REDUCE", 0, 0)]),
            *([parallel("PARTITION", 1, -1), parallel("COMBINE", 1, 0)], "refuted", AT_DEGREES, "result 0 at"),
        ),
        (
            *("twice", [parallel("REPLICATE", 0, -1), parallel("REDUCE", 0, 0), Op(ADD, (-2, 1))]),
            *([Op(ADD, (-1, -2)), Op(ADD, (-1, 0))], "proved", AT_DEGREES, "partial sums"),
        ),
        (
            *("thrice", [parallel("REPLICATE", 0, -1, 3), parallel("REDUCE", 0, 0, 3), Op(ADD, (-2, 1))]),
            *([Op(ADD, (-1, -2)), Op(ADD, (-1, 0))], "refuted", AT_DEGREES, "result 0 at"),
        ),
        (
            *("relu-of-each-addend", [Op(RELU, (-1,)), Op(RELU, (-2,)), Op(ADD, (0, 1))]),
            *([concat(0, 3, -1, -2), Op(RELU, (0,)), parallel("REDUCE", 0, 1)], "proved", AT_DEGREES, "not linear"),
        ),
        (
            *("relu-of-all-addends", [Op(ADD, (-1, -2)), Op(RELU, (0,))]),
            *([concat(0, 3, -1, -2), Op(RELU, (0,)), parallel("REDUCE", 0, 1)], "refuted", AT_DEGREES, "result 0 at"),
        ),
        (
            *("fold-of-stack", [parallel("REDUCE", 1, -1), parallel("REDUCE", 1, -2), concat(1, 3, 0, 1)]),
            *([concat(1, 3, -1, -2), parallel("REDUCE", 1, 0)], "refuted", AT_DEGREES, "result 0 at"),
        ),
        (
            *("copies-of-weights", [linear(-1, -4)]),
            *([concat(0, 3, -1, -1), linear(0, -4)], "ill-typed", "", "OP_LINEAR: sizes"),
        ),
        (
            *("one-of-copies", [parallel("REPLICATE", 0, -1), parallel("COMBINE", 0, 0), linear(1, -4)]),
            *([parallel("REPLICATE", 0, -4), parallel("COMBINE", 0, 0), linear(-1, 1)], "proved", "", ""),
        ),
        (
            *("stack-of-products", [Op(MUL, (-1, -2)), Op(MUL, (-2, -3)), concat(0, 3, 0, 1)]),
            *([concat(0, 3, -1, -2), concat(0, 3, -2, -3), Op(MUL, (0, 1))], "proved", VALUES, "copies"),
        ),
        (
            *("stacked-in-order", [concat(1, 3, -1, -4), concat(1, 3, -2, -5), concat(0, 3, 0, 1)]),
            *([concat(0, 3, -1, -2), concat(0, 3, -4, -5), concat(1, 3, 0, 1)], "proved", "", ""),
        ),
        (
            *("stacked-in-another-order", [concat(0, 3, -1, -2)]),
            *([concat(0, 3, -2, -1)], "refuted", AT_DEGREES, "result 0 at"),
        ),
        (
            *("crossed-products", [Op(MUL, (-1, -2)), Op(MUL, (-2, -3)), concat(0, 3, 0, 1)]),
            *([concat(0, 3, -1, -2), concat(0, 3, -3, -2), Op(MUL, (0, 1))], "refuted", VALUES, "result 0 at"),
        ),
    )
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ForeignRule, ImportedRule]]:
    path = tmp_path_factory.mktemp("rules") / "rules.json"
    path.write_text(json.dumps({"rule": [of for of, *_ in RULES.values()]}))
    return {f.name: (f, i) for f, i in zip(read_rules(path), import_rules(path).rules, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_its_verdict_by_the_encoding_that_says_most(
    name: str, imported: dict[str, tuple[ForeignRule, ImportedRule]]
):
    _, verdict, loses, detail = RULES[name]
    _, found = imported[name]
    assert (found.verdict, found.loses) == (verdict, loses)
    assert detail in found.detail
    assert found.detail.startswith(f"{loses}: " if loses and verdict == "proved" else "")


def drawn(foreign: ForeignRule, random: Random) -> dict[tuple[int, int], Array]:
    """Arrays for the inputs of a rule: sizes of 1 to 5 that fit, up to 4 dims where any number does."""
    sized = whole(foreign, fixed=True)
    while True:
        sizes = {s: random.randint(1, 5) for s in sized.symbols}
        if all(c.poly.at(sizes) >= 0 for c in sized.conditions):
            break
    packs = {s: [random.randint(1, 5) for _ in range(random.randint(0, 4))] for s in "abcd"}
    shapes = {
        i.name: [n for s in i.shape for n in (packs[s.name] if isinstance(s, DimPack) else [s.at(sizes)])]
        for i in sized.inputs
    }
    values = np.random.default_rng(random.randrange(2**32))
    read = {i for op in (*foreign.source, *foreign.target) for i in op.inputs if i[0] < 0}
    return {i: values.normal(size=shapes[input_name(i)]) for i in read}


def agree(foreign: ForeignRule, random: Random) -> bool:
    """Whether both sides of a rule are equal at some arrays. Some are no larger than the windows over them."""
    while True:
        try:
            return all(a.shape == b.shape and np.allclose(a, b) for a, b in evaluate(foreign, drawn(foreign, random)))
        except ValueError:
            continue


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"copies-of-weights", "one-of-copies"}))
def test_verdicts_are_true(name: str, imported: dict[str, tuple[ForeignRule, ImportedRule]]):
    foreign, found = imported[name]
    random = Random(0)
    assert all(agree(foreign, random) for _ in range(12)) == (found.verdict == "proved")


@pytest.mark.slow
def test_verdicts_on_tasos_rules_are_true(tmp_path: Path):
    rules = (
        rule([matmul(-1, -4), matmul(0, -5, 2)], [matmul(-4, -5), matmul(-1, 0, 2)]),
        rule([convolution(-7, -10), concat(1, 4, 0, -8), split(1, 1)], [convolution(-7, -10)], (2, 0, 0, 0)),
        rule(
            [convolution(-7, -10), convolution(-8, -11), Op(ADD, (0, 1))],
            [concat(1, 4, -7, -8), concat(1, 4, -10, -11), convolution(0, 1)],
        ),
        rule(
            [convolution(-7, -10), convolution(-8, -11), concat(1, 4, 0, 1)],
            [concat(1, 4, -7, -8), concat(0, 4, -10, -11), convolution(0, 1)],
        ),
        rule([Op(ADD, (-1, -2)), Op(MUL, (0, -3))], [Op(MUL, (-2, -3)), Op(MUL, (-1, -3)), Op(ADD, (0, 1))]),
        rule([Op(ADD, (-1, -2)), Op(MUL, (0, -3))], [Op(MUL, (-2, -3)), Op(ADD, (-1, 0))]),
        rule([matmul(-1, -4), transpose(0)], [transpose(-4), transpose(-1), matmul(0, 1)]),
        rule([Op(MUL, (-1, -4)), Op(ADD, (0, -1)), transpose(1)], [transpose(-1), Op(ADD, (0, 0))]),
        rule([concat(0, 2, -1, -2), transpose(0), split(1, 1)], [transpose(-1)], (2, 0, 0, 0)),
        rule([Op(SCALE, (-4, -20)), matmul(-1, 0)], [matmul(-1, -4), Op(SCALE, (0, -20))]),
        rule([Op(SCALE, (-4, -20)), Op(RELU, (0,))], [Op(RELU, (-4,)), Op(SCALE, (0, -20))]),
        rule([pool("AVG", -7), pool("AVG", -8), concat(1, 4, 0, 1)], [concat(1, 4, -7, -8), pool("AVG", 0)]),
        rule([pool("MAX", -7, PAD=1), Op(RELU, (0,))], [Op(RELU, (-7,)), pool("MAX", 0, PAD=1)]),
        rule([Op(ADD, (-7, -8)), pool("MAX", 0)], [pool("MAX", -7), pool("MAX", -8), Op(ADD, (0, 1))]),
        rule([convolution(-7, -10, **ONE)], [Op("ENLARGE", (-10,), ROWS), convolution(-7, 0)]),
    )
    path = tmp_path / "rules.pb"
    path.write_bytes(collection(*rules))
    random = Random(1)
    equal = [all([agree(f, random) for _ in range(12)]) for f in read_rules(path)]
    assert equal == [bool(int(d)) for d in "111010101101101"]
    found = import_rules(path).rules
    assert [r.verdict in PROVED for r in found] == equal
    assert {r.verdict for r, e in zip(found, equal, strict=True) if not e} == {"refuted"}


def test_sizes_that_never_fit_are_told(tmp_path: Path):
    """Only a kernel that keeps the size of an image may get zeros around it."""
    path = tmp_path / "rules.pb"
    enlarged = [Op("ENLARGE", (-10,), ROWS), convolution(-7, 0, PAD=1)]
    path.write_bytes(collection(rule([convolution(-7, -10, **ONE, PAD=1)], enlarged)))
    (found,) = import_rules(path).rules
    assert (found.verdict, found.detail) == ("ill-typed", "its outputs: sizes n3 and n3 - 2 differ")


@pytest.mark.slow
def test_only_rules_that_say_all_and_something_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out = tmp_path / "rules.json", tmp_path / "rules.pcg"
    relu = json_rule("relu", [Op(RELU, (-1,)), Op(RELU, (0,))], [Op(RELU, (-1,))])
    same = json_rule("same", [linear(-1, -4, acti=2)], [linear(-1, -4), Op(RELU, (0,))])
    path.write_text(json.dumps({"rule": [same, relu, *(of for of, *_ in RULES.values())]}))
    assert main(["import", str(path), "-o", str(out), "--all"]) == 0
    names = [line.split('"')[1] for line in out.read_text().splitlines() if line.startswith("subst.rule")]
    assert names == ["relu", "one-of-copies", "stacked-in-order"]
    assert "values alone" in capsys.readouterr().out
