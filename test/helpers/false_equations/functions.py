"""Axioms of other scalar functions: of relu, roots, powers, exponentials, logarithms and absolute values."""

from __future__ import annotations

from fractions import Fraction

from false_equations.said import BOX, CANCEL, False_, V, X, Y, function, of, step, total, v, value, without, y
from unity_ir.rules.certificate import scalars
from unity_ir.rules.certificate.terms import call, scaled

FALSE = {
    "relu of relu": False_(
        scalars,
        "_relu_relu",
        "if mono.coefficient == 1",
        "",
        without(
            total("", (), function("relu", scaled(call("relu", total("", (), Y)), -1))),
            scaled(call("relu", total("", (), Y)), -1),
        ),
        [step("scalar", factor=0, axiom="relu of relu"), CANCEL],
    ),
    "zero": False_(
        scalars,
        "_zero",
        "of.function not in ZERO_AT_ZERO or",
        "",
        total("", (), function("exp", ())),
        [step("scalar", factor=0, axiom="zero")],
    ),
    "zero, of something": False_(
        scalars,
        "_zero",
        "or of.arguments[0].body",
        "",
        total("", (), function("tanh", total("", (), Y))),
        [step("scalar", factor=0, axiom="zero")],
    ),
    "reciprocal of a sum": False_(
        scalars,
        "_one",
        "or form[0].binders or form[0].domain",
        "",
        without(
            total("", (), function("recip", scaled(total("k", BOX, X), 2))),
            scaled(total("", (), function("recip", total("", (), X))), Fraction(1, 2)),
        ),
        [step("scalar", factor=0, axiom="reciprocal of a product"), CANCEL],
    ),
    "sign of relu": False_(
        scalars,
        "_relu_sign",
        "or of.arguments[1].body",
        "",
        without(
            total("", (), function("gt", call("relu", total("", (), Y)), scaled(total("", ()), -1))),
            total("", (), function("gt", total("", (), Y), ())),
        ),
        [step("scalar", factor=0, axiom="sign of relu"), CANCEL],
    ),
    "absolute value of a number": of(
        "absolute value", scalars, "_abs", "not_below_zero(x, holds)", "True", value("abs", y), y
    ),
    "absolute value of a negative": of(
        "absolute value",
        scalars,
        "_abs",
        "abs(mono.coefficient)",
        "mono.coefficient",
        value("abs", scaled(y, -2)),
        scaled(value("abs", y), -2),
    ),
    "logarithm of a multiple of a root": of(
        "logarithm of a root",
        scalars,
        "_log",
        "if mono.coefficient == 1",
        "",
        value("log", scaled(value("sqrt", y), 2)),
        scaled(value("log", y), Fraction(1, 2)),
    ),
    "reciprocal of a negated exponential": of(
        "reciprocal of an exponential",
        scalars,
        "_inside",
        "and mono.coefficient == 1",
        "",
        value("recip", scaled(value("exp", y), 2)),
        value("exp", scaled(y, -1)),
    ),
    "logarithm of a multiple": of(
        "logarithm of exponentials",
        scalars,
        "_log_exp",
        "mono.coefficient != 1 or",
        "",
        value("log", scaled(value("exp", y), 2)),
        y,
    ),
    "logarithm of a product": of(
        "logarithm of exponentials",
        scalars,
        "_log_exp",
        "or len(exponents) != len(mono.factors)",
        "",
        value("log", total("", (), function("exp", y), V)),
        y,
    ),
    "power of a multiple": of(
        "power",
        scalars,
        "_power",
        "if mono.coefficient == 1",
        "",
        value("pow", scaled(value("exp", y), 2), v),
        value("exp", total("", (), Y, V)),
    ),
    "power of a fraction": of(
        "power",
        scalars,
        "_power",
        "value.denominator == 1 and",
        "",
        value("pow", y, scaled(total("", ()), Fraction(3, 4))),
        total("", (), Y, Y, Y),
    ),
    "root of no square": of(
        "of a square",
        scalars,
        "_of_square",
        "or any(mono.factors.count(f) % 2 for f in once)",
        "",
        value("sqrt", total("", (), Y, Y, Y)),
        value("abs", y),
    ),
    "root of a multiple": of(
        "of a square",
        scalars,
        "_of_square",
        "mono.coefficient != 1 or",
        "",
        value("sqrt", scaled(total("", (), Y, Y), 2)),
        value("abs", y),
    ),
}
