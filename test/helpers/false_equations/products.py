"""Products of factors: conditions that repeat or exclude each other, squares, inverses, what is 0."""

from __future__ import annotations

from fractions import Fraction

from false_equations.said import (
    BOX,
    CANCEL,
    OVER_TWICE,
    False_,
    V,
    X,
    Y,
    at_least,
    function,
    i,
    j,
    k,
    read,
    step,
    total,
    v,
    value,
    without,
    y,
)
from unity_ir.rules.certificate import laws, terms
from unity_ir.rules.certificate.terms import Mono, Number, of_factor

FALSE = {
    "guard": False_(
        laws,
        "_guard",
        "COMPARISONS[factor.function]",
        'COMPARISONS["ge"]',
        without(
            total("", (), function("gt", of_factor(Number(i)), of_factor(Number(j)))),
            total("", (at_least(i, j),)),
        ),
        [step("guard", factor=0), CANCEL],
    ),
    "repeat, no condition": False_(
        laws,
        "_repeat",
        "factor.function not in TRUTH",
        "False",
        without(
            total("", (), *[function("exp", total("", (), Y))] * 2), total("", (), function("exp", total("", (), Y)))
        ),
        [step("repeat", factor=0, other=1), CANCEL],
    ),
    "repeat, another": False_(
        laws,
        "_repeat",
        "or not alike",
        "",
        without(
            total("", (), function("gt", total("", (), Y), ()), function("gt", total("", (), read("v")), ())),
            total("", (), function("gt", total("", (), read("v")), ())),
        ),
        [step("repeat", factor=0, other=1), CANCEL],
    ),
    "repeat, itself": False_(
        laws,
        "_repeat",
        'said["factor"] == said["other"]',
        "False",
        without(total("", (), function("gt", total("", (), Y), ())), total("", ())),
        [step("repeat", factor=0, other=0), CANCEL],
    ),
    "exclude, another": False_(
        laws,
        "_exclude",
        "same_factors((Apply(function, (b, a)),), (equal,), facts | mono.domain)",
        "True",
        total("", (), function("gt", y, ()), function("eq", v, ())),
        [step("exclude", above=0, equal=1)],
    ),
    "square, itself": False_(
        laws,
        "_square",
        'said["factor"] == said["other"] or',
        "",
        without(total("", (), function("abs", y), V, V), total("", (), Y, Y, V)),
        [step("square", factor=0, other=0), CANCEL],
    ),
    "square, another": False_(
        laws,
        "_square",
        "or not alike",
        "",
        without(total("", (), function("abs", y), function("abs", v)), total("", (), V, V)),
        [step("square", factor=1, other=0), CANCEL],
    ),
    "inverse, of another": False_(
        laws,
        "_inverse",
        "inverse = same_factors(one[0][0].factors, one[1][0].factors, here)",
        "inverse = True",
        without(total("", (), function("exp", y), function("exp", v)), total("", ())),
        [step("inverse", factor=0, other=1), CANCEL],
    ),
    "value, captured": False_(
        laws,
        "put",
        "set(m.binders) & (mono.free | set(mono.binders))",
        "False",
        without(
            total("", (), read("v", k), function("if", total("k", BOX, X))),
            total("k", BOX, read("v", k), X),
        ),
        [step("scalar", factor=1, axiom="if"), CANCEL],
    ),
    "exclude, twice the same": False_(
        laws,
        "_exclude",
        "(b, a)),), (equal,)",
        "(a, b)),), (equal,)",
        total("", (), function("gt", y, v), function("gt", y, v)),
        [step("exclude", above=0, equal=1)],
    ),
    "vanish, at least 0": False_(
        laws,
        "_vanish",
        '"eq", (x, y)',
        '"ge", (x, y)',
        total("", (), function("ge", y, ()), Y),
        [step("vanish", factor=0)],
    ),
    "vanish, equal to another": False_(
        laws,
        "_vanish",
        "if not (x.body and y.body)",
        "",
        total("", (), function("eq", y, v), Y),
        [step("vanish", factor=0)],
    ),
    "vanish, another": False_(
        laws,
        "_vanish",
        "zero and not Counter(zero) - Counter(mono.factors)",
        "True",
        total("", (), function("eq", y, ()), V),
        [step("vanish", factor=0)],
    ),
    "vanish, of a sum": False_(
        terms,
        "one_product",
        "and not form[0].binders and not form[0].domain",
        "",
        total("", (), function("eq", total("k", BOX, V), ()), V),
        [step("vanish", factor=0)],
    ),
    "vanish, times 0": False_(
        terms,
        "one_product",
        "and form[0].coefficient != 0",
        "",
        total("", (), function("eq", (Mono(Fraction(0), (), frozenset(), (V,)),), ()), V),
        [step("vanish", factor=0)],
    ),
    "square, over a multiple": False_(
        laws,
        "_square",
        "one == 1 and not domain",
        "True",
        without(total("", (), OVER_TWICE, OVER_TWICE), value("recip", total("", (), Y, Y))),
        [step("square", factor=1, other=0), CANCEL],
    ),
    "square, of a root": False_(
        laws,
        "_squared",
        'if function == "abs"',
        "if function",
        without(total("", (), function("sqrt", y), function("sqrt", y)), total("", (), Y, Y)),
        [step("square", factor=1, other=0), CANCEL],
    ),
}
