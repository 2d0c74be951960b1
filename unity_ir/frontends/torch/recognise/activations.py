"""
Recognise activations that are written out. Each function gets the operands of the product about to be built, the last
of the pattern, and returns the one operator that computes it, or None.
"""

from __future__ import annotations

from math import isclose, pi, sqrt

from unity_ir.frontends.torch.recognise.match import factor_of, made_by, number_of
from unity_ir.frontends.torch.values import op
from unity_ir.pcg.node import Value

CLOSE = 1e-6
"""Relative difference of constants that are the same: some are rounded to float32."""


def gelu(left: Value, right: Value) -> Value | None:
    """
    Return a gelu operator, exact or approximated by tanh, that computes the product `left * right`; None if the factors
    do not form one: `x / 2` and `1 + erf(x / sqrt(2))`, or `1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))`.
    """
    for a, b in ((left, right), (right, left)):
        x, half = factor_of(a)
        inner, other = factor_of(b)
        one = number_of(inner, "shift", "by")
        if one is None or not isclose(half * other * one[1], 0.5, rel_tol=CLOSE):
            continue
        curve, by = factor_of(one[0])
        by /= one[1]
        for argument in made_by(curve, "erf"):
            of, factor = factor_of(argument)
            if of == x and isclose(by * factor, sqrt(0.5), rel_tol=CLOSE) and isclose(abs(by), 1):
                return op("gelu", x)
        for argument in made_by(curve, "tanh"):
            of, factor = factor_of(argument)
            if isclose(by, 1) and isclose(factor, sqrt(2 / pi), rel_tol=CLOSE) and _is_cubic(of, x):
                return op("gelu_tanh", x)
    return None


def _is_cubic(value: Value, x: Value) -> bool:
    """Return whether a value is `x + 0.044715 x^3`."""
    for terms in [made_by(value, "add")] if made_by(value, "add") else []:
        if x not in terms:
            return False
        rest, by = factor_of(terms[1] if terms[0] == x else terms[0])
        is_cube = rest.node.op == "pow_scalar" and rest.node.attribute("exponent") == 3
        return is_cube and rest.node.operands == (x,) and isclose(by, 0.044715, rel_tol=CLOSE)
    return False


def silu(left: Value, right: Value) -> Value | None:
    """Return a silu operator that computes the product `left * right`; None unless one is the other's sigmoid."""
    for x, gate in ((left, right), (right, left)):
        if made_by(gate, "sigmoid") == (x,):
            return op("silu", x)
    return None
