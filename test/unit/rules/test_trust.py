"""What may be applied: a proof is of a text, and nothing that a text says of itself is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Operator
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.rules import trust
from unity_ir.rules.algebraic import selected
from unity_ir.rules.library import all_substitutions, group_cases, read_rules
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import ProofRecord, Substitution
from unity_ir.rules.rule import Rule
from unity_ir.rules.text import rule_text
from unity_ir.rules.trust import check_trusted, digest, proof_of, unproved

DETACH = "(%x: [a..]) { %d = detach %x %q = relu %d yield %q } to { %q = relu %x yield %q }"
FALSE = "(%x: [a..]) { %q = relu %x yield %q } to { %q = tanh %x yield %q }"
TRUE = "(%x: [a..]) { %y = relu %x %q = relu %y yield %q } to { %q = relu %x yield %q }"


def rule(text: str, name: str = "mine") -> Substitution:
    (found,) = parse_rules(f'subst.rule "{name}" {text}', "here")
    return found


def test_digest_is_of_what_a_rule_says():
    one = rule(TRUE)
    assert digest(one) == digest(rule(TRUE.replace(" ", "  "), "other"))
    assert digest(one) == digest(replace(one, proof=ProofRecord("proved", 1.0)))
    assert digest(one) != digest(replace(one, exact=True))
    assert digest(one) != digest(rule(TRUE.replace("a..", "a.., n")))


def test_digest_is_of_the_prover_and_the_operators_lines(monkeypatch: pytest.MonkeyPatch):
    before = digest(rule(TRUE))
    with monkeypatch.context() as later:
        later.setattr(trust, "PROVER", trust.PROVER + 1)
        assert digest(rule(TRUE)) != before
    monkeypatch.setattr(trust, "find_operator", lambda op: Operator(f"{op}(x)  out[a..] = 2 * x[a..]"))
    assert digest(rule(TRUE)) != before


def test_the_library_needs_no_prover(monkeypatch: pytest.MonkeyPatch):
    def prove(rule: Substitution) -> None:
        raise AssertionError(f"{rule.name} is proved again; run unity-rules check --write")

    monkeypatch.setattr(trust, "_proofs", {})
    monkeypatch.setattr("unity_ir.rules.proof.prove.prove", prove)
    assert all(proof_of(r).trainable for r in all_substitutions())


def test_a_proof_in_the_text_counts_for_nothing(tmp_path: Path):
    record = ProofRecord("proved", 0.1, (), digest(rule(FALSE)))
    file = tmp_path / "rules.pcg"
    file.write_text(rule_text(replace(rule(FALSE), proof=record)))
    (mine,) = group_cases(read_rules(str(file))).values()
    with pytest.raises(UnityError, match=r"mine: is not proved \(refuted: .*\); mend it, or apply it with unproved"):
        check_trusted(mine)
    check_trusted(mine, allow_unproved=True)
    assert unproved(mine) == ("mine",)
    assert unproved(Rule("mine", (rule(TRUE),))) == ()


def test_a_rule_that_keeps_values_only_waits_for_the_backward():
    w = leaf("weight", tensor_type((4,), "f32"), name="w").result
    total = apply("reduce_sum", [apply("relu", [w]).result], {"dim": 0}).result
    graph = Graph("f", (), (total,))
    mine = Rule("mine", (rule(DETACH),))
    for where in (None, graph):
        with pytest.raises(UnityError, match=r"mine: keeps values but not gradients .*; apply it after"):
            check_trusted(mine, allow_unproved=True, graph=where)
    check_trusted(mine, graph=differentiate(graph, Optimizer()))
    x = leaf("input", tensor_type((4,), "f32"), name="x")
    check_trusted(mine, graph=Graph("f", (x,), (apply("relu", [x.result]).result,)))


def test_searches_take_only_what_is_proved(monkeypatch: pytest.MonkeyPatch):
    mine = Rule("mine", (rule(FALSE),))
    monkeypatch.setattr("unity_ir.rules.algebraic.find", lambda name: mine)
    with pytest.raises(UnityError, match="mine: is not proved"):
        selected("mine")
    assert selected("unproved+mine") == (mine,)
