"""Certificates of the library's rules: each is accepted, and refused as soon as it, or its rule, is another."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from extent import sample

import unity_ir.rules.certificate
from unity_ir.rules.certificate import elaborate
from unity_ir.rules.certificate.replay import check_certificate
from unity_ir.rules.certificate.terms import Refused
from unity_ir.rules.certificate.write import Unwritten, write_certificate
from unity_ir.rules.library import all_substitutions
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.trust import proof_of

RULES = {rule.name: rule for rule in all_substitutions()}

TRUSTED = ("terms", "elaborate", "gradients", "comparisons", "scalars", "laws", "ranks", "defined", "replay")
"""The checker's modules."""


def written(rule: Substitution) -> dict[str, Any]:
    """A certificate, read back from its text."""
    return json.loads(json.dumps(write_certificate(rule, proof_of(rule).verdict == "proved")))


@pytest.mark.parametrize("name", sample(list(RULES), 10, 3))
def test_a_rule_of_the_library_has_a_certificate(name: str):
    assert check_certificate(RULES[name], written(RULES[name])) == (proof_of(RULES[name]).verdict == "proved")


@pytest.mark.parametrize("module", TRUSTED)
def test_the_checker_reads_nothing_of_the_prover(module: str):
    file = Path(unity_ir.rules.certificate.__file__).with_name(f"{module}.py")
    found = {n.module or "" for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)}
    assert not {m for m in found if "proof" in m or m.endswith("write")}


# --- tampering -------------------------------------------------------------------------------------------------------


def steps_of(found: Any) -> Iterator[tuple[list[Any], int]]:
    """Every step of a certificate: the list it is in, and its number there."""
    if isinstance(found, dict):
        for value in found.values():
            yield from steps_of(value)
    elif isinstance(found, list):
        for number, value in enumerate(found):
            if isinstance(value, dict) and "law" in value:
                yield found, number
            yield from steps_of(value)


def shifted(poly: list[list[Any]]) -> list[list[Any]]:
    return [*poly, [1]]


def dropped(steps: list[Any], at: int) -> None:
    del steps[at]


def another_monomial(steps: list[Any], at: int) -> None:
    steps[at]["these"] = [steps[at]["these"][0]] * len(steps[at]["these"])


def without_one(steps: list[Any], at: int) -> None:
    steps[at]["these"] = steps[at]["these"][:-1]
    steps[at]["names"] = steps[at]["names"][:-1]


def another_value(steps: list[Any], at: int) -> None:
    steps[at]["value"] = shifted(steps[at]["value"])


def stricter(steps: list[Any], at: int) -> None:
    steps[at]["to"] = [*steps[at]["to"], ["==", [[1, "i#1"], [-1, "nowhere"]]]]


def another_shift(steps: list[Any], at: int) -> None:
    steps[at]["shift"] = shifted(steps[at]["shift"])


def another_base(steps: list[Any], at: int) -> None:
    steps[at]["m"] = shifted(steps[at]["m"])


def one_case(steps: list[Any], at: int) -> None:
    steps[at]["then"] = steps[at]["then"][:1]


def another_case(steps: list[Any], at: int) -> None:
    steps[at]["then"] = steps[at]["then"][::-1]


def unknown_law(steps: list[Any], at: int) -> None:
    steps[at]["law"] = "by inspection"


TAMPERED: dict[str, tuple[str, Callable[[list[Any], int], None]]] = {
    "a cancellation dropped": ("cancel", dropped),
    "a one-point sum dropped": ("pin", dropped),
    "a monomial for another": ("cancel", another_monomial),
    "a monomial left out": ("cancel", without_one),
    "a condition kept twice": ("repeat", dropped),
    "another value": ("pin", another_value),
    "a guard too many": ("domain", stricter),
    "another shift": ("rename", another_shift),
    "another base": ("radix", another_base),
    "another inner size": ("fuse", another_base),
    "a case left out": ("cases", one_case),
    "cases exchanged": ("cases", another_case),
    "another law": ("cancel", unknown_law),
}
"""The law whose steps are changed, and how."""

TAMPERED_RULES = (
    "merge-matmuls",
    "split-of-merge-heads",
    "merge-of-split-heads",
    "matmul-of-concat.rows",
    "relu-of-relu",
    "concat-of-adds",
)


@cache
def text_of(name: str) -> str:
    """The certificate of a rule, as text."""
    return json.dumps(written(RULES[name]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", TAMPERED)
def test_a_certificate_tampered_with_is_refused(how: str):
    law, change = TAMPERED[how]
    changed = 0
    for name in TAMPERED_RULES:
        whole = text_of(name)
        # Inside of functions, monomials that are left may cancel with others that are.
        inner = 3 if law == "cancel" else 99
        found = enumerate(steps_of(json.loads(whole)))
        places = [n for n, (steps, at) in found if steps[at]["law"] == law and len(steps[at].get("at", ())) < inner]
        for place in places[:: max(1, len(places) // 4)]:
            certificate = json.loads(whole)
            steps, at = list(steps_of(certificate))[place]
            change(steps, at)
            with pytest.raises(Refused):
                check_certificate(RULES[name], certificate)
            changed += 1
    assert changed


def test_a_certificate_that_is_incomplete_is_refused():
    rule = RULES["fuse-activation.relu"]
    whole = json.dumps(written(rule))
    for change in (
        lambda c: c["cases"].pop(),
        lambda c: c["cases"][0]["pairs"].pop(),
        lambda c: c["cases"][0]["pairs"].reverse(),
        lambda c: c["cases"][0]["sample"].update({s: 1 for s in c["cases"][0]["sample"]}),
        lambda c: c["cases"][0]["sample"].pop("n"),
        lambda c: c.pop("gradients"),
        lambda c: c["cases"][0]["pairs"][0].pop("steps"),
    ):
        certificate = json.loads(whole)
        change(certificate)
        with pytest.raises(Refused):
            check_certificate(rule, certificate)


def test_a_certificate_of_another_rule_is_refused():
    with pytest.raises(Refused, match="of other elements"):
        check_certificate(RULES["fuse-activation.gelu"], written(RULES["fuse-activation.relu"]))


FALSE = """
subst.rule "swapped" (%x: [n, k], %y: [m, k]) {
  %z = concat %x, %y {dim = 0}
  %a, %b = split %z {dim = 0, sizes = [n, m]}
  yield %a
} to {
  %c = scale %x {by = 2.0}
  yield %c
}

subst.rule "detached" (%x: [n]) {
  %d = detach %x
  %y = relu %d
  yield %y
} to {
  %y = relu %x
  yield %y
}

subst.rule "divided" (%x: [n], %y: [n]) {
  %z = sub %x, %x
  yield %z
} to {
  %q = div %y, %y
  %z = sub %q, %q
  %s = sub %x, %x
  %t = add %z, %s
  yield %t
}

subst.rule "divided by itself" (%x: [n], %y: [n]) {
  %q = reciprocal %y
  %z = scale %x {by = 1.0}
  %s = scale %q {by = 0.0}
  %p = add %z, %s
  yield %p
} to {
  %q = div %x, %x
  %z = mul %q, %x
  yield %z
}

subst.rule "rounded" (%x: [n]) {
  %y = cast %x {to = "f16"}
  %z = cast %y {to = "f32"}
  yield %z
} to {
  %y = cast %x {to = "bf16"}
  %z = cast %y {to = "f32"}
  yield %z
}

subst.rule "rounded sums" (%x: [n], %y: [n]) {
  %z = add %x, %y
  %w = cast %z {to = "f64"}
  yield %w
} to {
  %a = cast %x {to = "f64"}
  %b = cast %y {to = "f64"}
  %w = add %a, %b
  yield %w
}

subst.rule "ids beyond what bf16 holds" (%ids: int [b], %t: [v, e]) {
  %f = cast %ids {to = "bf16"}
  %i = cast %f {to = "i64"}
  %y = embedding %i, %t
  yield %y
} to {
  %i = cast %ids {to = "i64"}
  %y = embedding %i, %t
  yield %y
}

subst.rule "wrapped around" (%a: int [n], %b: int [n]) {
  %f = ne %a, %a
  %z = cast %f {to = "i64"}
  %x = int_mul %a, %b
  %y = eq %x, %z
  yield %y
} to {
  %f = ne %a, %a
  %z = cast %f {to = "i64"}
  %u = eq %a, %z
  %v = eq %b, %z
  %y = logical_or %u, %v
  yield %y
}

subst.rule "divided times 0" (%x: [n], %y: [n]) {
  %z = scale %y {by = 0.0}
  yield %z
} to {
  %r = reciprocal %x
  %z = scale %r {by = 0.0}
  yield %z
}

subst.rule "divided in both branches" (%c: bool [n], %x: [n], %y: [n]) {
  %q = div %y, %x
  %z = scale %x {by = 0.0}
  %s = select %c, %q, %z
  yield %s
} to {
  %z = scale %x {by = 0.0}
  %s = select %c, %y, %z
  %q = div %s, %x
  yield %q
}

subst.rule "another dim at 3 dims" (%x: [a.., n, m, k, k], %y: [k]) {
  %p = mul %x, %y
  %q = reduce_sum %p {dim = 2*#a}
  yield %q
} to {
  %p = reduce_sum %x {dim = 2*#a}
  %q = mul %p, %y
  yield %q
}

subst.rule "rounded otherwise" (%x: [a..], %y: [a..], %z: [a..]) attributes {exact} {
  %p = add %x, %y
  %q = add %p, %z
  yield %q
} to {
  %p = add %y, %z
  %q = add %x, %p
  yield %q
}

subst.rule "summed in another order" (%x: [n, m]) attributes {exact} {
  %t = transpose %x {perm = [1, 0]}
  %s = reduce_sum %t {dim = 0, count = 2}
  yield %s
} to {
  %s = reduce_sum %x {dim = 0, count = 2}
  yield %s
}
"""


@pytest.mark.parametrize("rule", parse_rules(FALSE), ids=lambda r: r.name)
def test_a_false_rule_has_no_certificate(rule: Substitution):
    try:
        certificate = write_certificate(rule)
    except Unwritten:
        return
    with pytest.raises(Refused):
        check_certificate(rule, certificate)


def test_two_inputs_of_one_name_are_refused():
    (rule,) = (r for r in parse_rules(FALSE) if r.name == "divided")
    same = replace(rule, inputs=tuple(replace(i, name="x") for i in rule.inputs))
    with pytest.raises(Refused, match="one name"):
        check_certificate(same, {"gradients": False, "cases": []})


def test_values_alone_have_a_certificate_that_says_so():
    (rule,) = (r for r in parse_rules(FALSE) if r.name == "detached")
    assert not check_certificate(rule, write_certificate(rule, differentiable=False))


UNROUNDED: dict[str, tuple[str, Callable[..., object]]] = {
    "rounded": ("holds_all", lambda source, target: True),
    "ids beyond what bf16 holds": ("holds_all", lambda source, target: True),
    "rounded sums": ("_cast", lambda of, dtype: replace(of, dtype=dtype)),
    "wrapped around": ("_unwrapped", lambda of: False),
}
"""Rules that are false only since numbers round or wrap around, and a checker's function without that."""


@pytest.mark.parametrize("name", UNROUNDED)
def test_a_checker_that_does_not_round_accepts_what_is_false(name: str, monkeypatch: pytest.MonkeyPatch):
    (rule,) = (r for r in parse_rules(FALSE) if r.name == name)
    with pytest.raises(Unwritten, match="left over"):
        write_certificate(rule, differentiable=False)
    monkeypatch.setattr(elaborate, *UNROUNDED[name])
    assert not check_certificate(rule, write_certificate(rule, differentiable=False))


def test_a_rule_that_casts_is_checked_for_every_type_that_fits():
    (rule,) = parse_rules("""
subst.rule "narrowed" (%x: [n]) {
  %y = cast %x {to = "f32"}
  %z = cast %y {to = "bf16"}
  yield %z
} to {
  %z = cast %x {to = "bf16"}
  yield %z
}
""")
    # Of f64 it rounds twice.
    with pytest.raises(Unwritten, match="left over"):
        write_certificate(rule, differentiable=False)
    false = {"rule": rule.name, "gradients": False, "cases": [{"sample": {"n": 2}, "pairs": []}] * 4}
    with pytest.raises(Refused, match="incomplete"):
        check_certificate(rule, false)
    with pytest.raises(Refused, match="no case"):
        check_certificate(rule, {**false, "cases": [{"sample": {}, "pairs": []}] * 4})
