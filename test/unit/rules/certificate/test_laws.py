"""
Each law of the checker refuses what is false: for every side condition there is an equation that does not hold, and
that a checker without the condition accepts (`false_equations`).
"""

from __future__ import annotations

import inspect

import pytest
from false_equations import EVERY
from false_equations.said import BOX, False_, X, Y, at_least, function, i, j, k, maximum, n, read, total

from unity_ir.rules.certificate import comparisons, defined, laws, replay, scalars, terms
from unity_ir.rules.certificate.defined import EXTREMES, require_defined
from unity_ir.rules.certificate.replay import Given
from unity_ir.rules.certificate.terms import PARTIAL, Number, Refused, of_factor, scaled, substitute


def mutant(of: False_, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a condition out of the checker."""
    old = getattr(of.module, of.function)
    source = inspect.getsource(old)
    assert source.count(of.condition) == 1, source
    namespace = of.module.__dict__
    exec(compile(source.replace(of.condition, of.instead), "mutant", "exec"), namespace)
    new = namespace[of.function]
    setattr(of.module, of.function, old)
    for module in (comparisons, defined, laws, replay, scalars, terms):
        for name, value in list(vars(module).items()):
            if value is old:
                monkeypatch.setattr(module, name, new)
    for table in (laws.MONOMIALS, scalars.SCALARS):
        for name, value in list(table.items()):
            if value is old:
                monkeypatch.setitem(table, name, new)  # pyright: ignore


def accepted(of: False_) -> bool:
    try:
        facts = frozenset(of.facts)
        replay._check(of.form, facts, of.steps, Given(of.source, facts))
    except Refused:
        return False
    return True


@pytest.mark.parametrize("name", EVERY)
def test_a_false_equation_is_refused_for_its_condition_only(name: str, monkeypatch: pytest.MonkeyPatch):
    assert not accepted(EVERY[name])
    mutant(EVERY[name], monkeypatch)
    assert accepted(EVERY[name])


def test_every_law_is_among_them():
    names = {step["law"] for of in EVERY.values() for step in of.steps}
    axioms = {step["axiom"] for of in EVERY.values() for step in of.steps if step["law"] == "scalar"}
    assert names == {*laws.MONOMIALS, "quotient", "cancel", "cases", "digits"}
    # The others ask for nothing.
    free = {"sigmoid", "if", "if not", "rsqrt", "exponential of a sum", "reciprocal of a reciprocal"}
    free |= {"maximum of repeated values", "less", "at most", "at least", "unequal", "trichotomy", "and", "or"}
    free |= {"absolute value by sign"}
    assert axioms | free == scalars.SCALARS.keys()


def test_what_may_be_no_number_has_to_be_in_the_source():
    over = total("", (), function("recip", total("", (), Y)))
    with pytest.raises(Refused, match="no number"):
        require_defined((*over, *scaled(over, -1)), (), frozenset(), PARTIAL)
    require_defined(over, over, frozenset(), PARTIAL)
    guarded = total("", (at_least(n, 5),), function("recip", total("", (), Y)))
    with pytest.raises(Refused, match="no number"):
        require_defined(over, guarded, frozenset(), PARTIAL)
    require_defined(guarded, over, frozenset(), PARTIAL)
    require_defined(total("", (), function("recip", of_factor(Number(n)))), (), frozenset({at_least(n, 1)}), PARTIAL)
    nothing = total("", (), maximum("k", BOX, total("", (), X)))
    with pytest.raises(Refused, match="no number"):
        require_defined(nothing, (), frozenset(), EXTREMES)
    require_defined(nothing, (), frozenset({at_least(n, 1)}), EXTREMES)


def test_substitution_leaves_what_is_bound():
    form = total("k", BOX, X, read("v", j))
    assert substitute(form, {"k": i}) == form
    with pytest.raises(Refused, match="captured"):
        substitute(form, {"j": k})
