"""Axioms of comparisons and conditions, of what is never below 0, and of casts that change nothing."""

from __future__ import annotations

from false_equations.said import (
    BOX,
    CANCEL,
    ZERO_Y,
    False_,
    N,
    X,
    Y,
    at_least,
    cancel,
    function,
    maximum,
    n,
    of,
    over,
    step,
    total,
    v,
    value,
    without,
    y,
)
from unity_ir.rules.certificate import comparisons, terms
from unity_ir.rules.certificate.terms import Apply, Number, Scope, of_factor, scaled, times

FALSE = {
    "product equals 1": of(
        "product equals 0",
        comparisons,
        "_no_product",
        "b or",
        "",
        value("eq", total("", (), Y, Y), total("", ())),
        without(scaled(ZERO_Y, 2), times(ZERO_Y, ZERO_Y)),
        (CANCEL, cancel(0, 1, 3), CANCEL),
    ),
    "relu equals 0": of(
        "product equals 0",
        comparisons,
        "_no_product",
        '== "exp"',
        '== "relu"',
        value("eq", value("relu", y), ()),
        (),
        (),
    ),
    "product of no number equals 0": of(
        "product equals 0",
        comparisons,
        "_no_product",
        "_numbers(a)",
        "pass",
        value("eq", total("", (), function("exp", y), function("recip", v)), ()),
        value("eq", value("recip", v), ()),
        (cancel(0, 1), cancel(0, 1)),
    ),
    "below 1": of(
        "below 0", comparisons, "_never_below", "a or", "", value("gt", total("", ()), value("abs", y)), (), ()
    ),
    "below 0, negated": of(
        "below 0",
        terms,
        "not_below_zero",
        "m.coefficient >= 0 and",
        "",
        value("gt", (), scaled(value("abs", y), -1)),
        (),
        (),
    ),
    "below 0, odd": of(
        "below 0", terms, "not_below_zero", "% 2 == 0", "% 2 == 1", value("gt", (), total("", (), Y, Y, Y)), (), ()
    ),
    "below 0, of tanh": of(
        "below 0",
        terms,
        "_never_below_zero",
        "function in NEVER_BELOW_ZERO",
        "True",
        value("gt", (), value("tanh", y)),
        (),
        (),
    ),
    "below 0, of an index": of(
        "below 0", terms, "_never_below_zero", "holds(Constraint(poly))", "True", value("gt", (), N), (), ()
    ),
    "cast, narrower": of(
        "cast of a small number", comparisons, "_small", "of.function not in WIDE or", "", value("as f16", N), N
    ),
    "cast, of a product": of(
        "cast of a small number",
        comparisons,
        "_small",
        "or any(len(m) > 1 or abs(c) > 1 for m, c in size.terms)",
        "",
        value("as f64", of_factor(Number(n * n))),
        of_factor(Number(n * n)),
    ),
    "cast, of a number": of(
        "cast of a small number", comparisons, "_small", "_conditions(x)", "pass", value("as f64", y), y
    ),
    "cast, of a guarded number": of(
        "cast of a small number",
        comparisons,
        "_small",
        "x[0] == Mono(Fraction(1), (), x[0].domain)",
        "x[0].domain",
        value("as f64", total("", (at_least(n, 1),), Y)),
        total("", (at_least(n, 1),), Y),
    ),
    "no cast": of(
        "cast of a small number",
        comparisons,
        "_small",
        'not of.function.startswith(("as ", "wrapped "))',
        "False",
        value("tanh", total("", ())),
        total("", ()),
    ),
    "no condition": of(
        "not",
        comparisons,
        "_conditions",
        "total not in (0, 1)",
        "False",
        value("not", scaled(value("gt", y, ()), 2)),
        without(total("", ()), scaled(value("gt", y, ()), 2)),
        (cancel(0, 2), cancel(0, 1)),
    ),
    "no truth": of(
        "not",
        comparisons,
        "_conditions",
        "or not all(isinstance(f, Apply) and f.function in TRUTH for f in known)",
        "",
        value("not", y),
        without(total("", ()), y),
        (cancel(0, 2), cancel(0, 1)),
    ),
    "no number": of(
        "equals itself",
        comparisons,
        "_numbers",
        'raise Refused(f"{factor} may be no number")',
        "pass",
        value("eq", over, over),
        total("", ()),
    ),
    "another is itself": of(
        "equals itself", comparisons, "_itself", "a != b", "False", value("eq", y, v), total("", ())
    ),
    "another is not above": False_(
        comparisons,
        "_above_itself",
        "a != b",
        "False",
        value("gt", y, v),
        [step("scalar", factor=0, axiom="above itself")],
    ),
    "no truth value": of(
        "equals a truth value",
        comparisons,
        "_of_truth",
        "b not in (constant(1), ())",
        "False",
        value("eq", value("gt", y, ()), v),
        value("gt", y, ()),
    ),
    "multiples below 0": of(
        "compared multiples",
        comparisons,
        "_multiples",
        "abs(m.coefficient)",
        "m.coefficient",
        value("gt", scaled(y, -2), scaled(v, -2)),
        value("gt", y, v),
    ),
    "above a minimum over indices": of(
        "above a maximum",
        comparisons,
        "_above_extreme",
        "any(p.binders or p.domain for p in factor.arguments)",
        "False",
        value(
            "gt",
            total("", (), Apply("min", (Scope((), frozenset(), y), Scope(("k",), frozenset(BOX), total("", (), X))))),
            v,
        ),
        total("", (), function("gt", y, v), function("gt", total("", (), X), v)),
    ),
    "above a negated maximum": of(
        "above a maximum",
        comparisons,
        "_above_extreme",
        "mono.coefficient == 1 and",
        "",
        value("gt", scaled(total("", (), maximum("", (), y)), -1), v),
        value("gt", y, v),
        (cancel(0, 1), cancel(0, 1)),
    ),
}
