"""A statement with one thing changed on one side is never proved where samples say that it is false."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, permutations

import pytest
from compiler_rules import COLLECTIONS, VERDICTS, rules
from taso_axioms.parallel import statements
from taso_axioms.taso import axioms

from unity_ir.rules.pattern import AttrExpr, Operation, ResultOf, Substitution, Term
from unity_ir.rules.poly import Poly
from unity_ir.rules.proof import prove as module
from unity_ir.rules.proof.prove import prove

RULES = [a.rule for a in (*axioms(), *statements()) if a.verdict == "proved"]
RULES += [r for c in COLLECTIONS for r in rules(c) if r.name not in VERDICTS]
SYMMETRIC = ("add", "mul", "maximum", "minimum")
CUT_OFF = ("pad_mm.mn",)
"""Rules whose target cuts off all that it pads: with more padding they are as true."""


def _changed(operation: Operation) -> Iterator[Operation]:
    """The operation with two operands swapped, with an attribute changed, or left out."""
    operands = operation.operands
    for order in permutations(operands):
        if order != operands and operation.op not in SYMMETRIC:
            yield replace(operation, operands=order)
    for i, (name, value) in enumerate(operation.attributes):
        for other in (o for o in _others(name, value) if o != value):
            attributes = (*operation.attributes[:i], (name, other), *operation.attributes[i + 1 :])
            yield replace(operation, attributes=attributes)


def _others(name: str, value: AttrExpr) -> Iterator[AttrExpr]:
    match value:
        case Poly():
            yield value + 1
            if name != "by":
                yield value - 1
        case tuple() if len(value) > 1:
            yield value[::-1]
        case tuple():
            yield tuple(v + 1 for v in value)
        case _:
            pass


def _replaced(term: Term, old: Operation, new: Operation) -> Term:
    if not isinstance(term, ResultOf):
        return term
    if term.operation is old:
        return ResultOf(new, term.index)
    operands = tuple(_replaced(t, old, new) for t in term.operation.operands)
    return ResultOf(replace(term.operation, operands=operands), term.index)


def mutants(rule: Substitution) -> Iterator[Substitution]:
    """The rule with one operation of its target changed or left out, or with another result."""
    for operation in rule.operations(rule.target):
        for new in _changed(operation):
            yield replace(rule, target=tuple(_replaced(t, operation, new) for t in rule.target))
        for t in rule.target:
            if isinstance(t, ResultOf) and t.operation is operation and len(rule.target) == 1:
                yield replace(rule, target=(operation.operands[0],))
    if len(rule.target) > 1:
        yield replace(rule, target=rule.target[::-1])


def _nothing(rule: Substitution, seed: int) -> None:
    del rule, seed


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_mutants_are_not_proved(rule: Substitution, monkeypatch: pytest.MonkeyPatch):
    # One in eight of each rule's, which of them depends on the rule.
    for mutant in islice(mutants(rule), len(rule.name) % 8, None, 8):
        proof = prove(mutant)
        assert not proof.proved or rule.name in CUT_OFF
        if proof.verdict == "refuted" and not proof.detail.startswith("ill-typed"):
            with monkeypatch.context() as blind:
                # Without samples to show it that there is nothing to prove.
                blind.setattr(module, "refute", _nothing)
                assert not prove(mutant).proved


@pytest.mark.slow
def test_there_are_mutants_of_all_kinds():
    verdicts = Counter(prove(m).verdict for r in RULES[:12] for m in mutants(r))
    assert verdicts["refuted"] > 10
