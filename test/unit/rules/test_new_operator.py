"""A new operator needs its line and nothing else: the worked example of docs/operators.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parallelization import configurations, parallelize

from unity_ir import ops
from unity_ir.ops import operator, operators
from unity_ir.ops.operator import Operator
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.rules.proof.obligations import obligations
from unity_ir.rules.research.generate.run import generate
from unity_ir.rules.research.generate.space import Space

DOCS = Path(__file__).parents[3] / "docs" / "operators.md"


@pytest.fixture
def swiglu(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """What the document shows, among the operators."""
    code = next(c for c in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "SWIGLU" in c)
    names: dict[str, Operator] = {}
    exec(code, {"Operator": Operator}, names)
    known = {**operators(), **{o.name: o for o in names.values()}}
    monkeypatch.setattr(ops, "operators", lambda: known)
    # Its gradient calls the other by name.
    names["SWIGLU"].gradient.__globals__.update(names)  # pyright: ignore
    return names["SWIGLU"]


def test_it_is_typed_divided_and_proved(swiglu: Operator):
    assert operator("swiglu") is swiglu
    x, y = (leaf("input", tensor_type((4, 6), "f64"), name=n).result for n in "xy")
    node = apply("swiglu", [x, y])
    found = list(configurations(node, 2))
    # Rows, columns, copies, and y in addends.
    assert len(found) == 4
    for configuration in found:
        assert [v.type for v in parallelize(node, configuration)] == list(node.types)
    proofs = {o.about: o.proof.verdict for o in obligations(swiglu)}
    assert proofs == {"reads of a0": "proved", "addends of y": "proved"}


@pytest.mark.slow
def test_rules_with_it_are_found(swiglu: Operator):
    report = generate(Space(("swiglu", "concat"), (), size=3, variables=3, seed=0), None, 1)
    used = [{o.op for o in rule.operations((*rule.source, *rule.target))} for rule in report.rules]
    assert {"swiglu", "concat"} in used
    assert all(rule.proof is not None and rule.proof.verdict == "proved" for rule in report.rules)
