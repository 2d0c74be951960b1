"""
Recognise norms and softmaxes that are written out. Each function gets the operands of the operator about to be built,
the last of the pattern, and returns the one operator that computes it, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.frontends.torch.recognise.match import (
    fits_rows,
    made_by,
    number_of,
    reduced_last,
    unbroadcast,
    unshaped,
    unwidened,
)
from unity_ir.frontends.torch.site import cast
from unity_ir.frontends.torch.values import op
from unity_ir.pcg.node import Value

PARTS = 3
"""Factors of a norm: what is normalised, the weight, and the root."""


def rms_norm(product: tuple[Value, ...], divisor: Value | None = None) -> Value | None:
    """
    Return an RMS norm operator that computes the product of some values, over `divisor` if that is not None, in the
    element type of x, which may be wider than that of `weight`. None unless it is `x * weight / sqrt(mean(x * x) +
    eps)` in any order, with the mean over the last dim, and `weight` [size of that dim].

    Of models in 16 bits, which compute `x / sqrt(..)` in float32 and round it before they multiply it by `weight`, it
    is an operator in 16 bits, which rounds once.
    """
    if (found := _rms_norm_of(product, divisor)) is not None:
        x, weight, eps = found
        return op("rms_norm", x, cast(weight, x.type.dtype), eps=eps)
    for rounded, weight in (product, product[::-1]) if len(product) == 2 and divisor is None else ():
        for wide in made_by(rounded, "cast"):
            if (found := _rms_norm_of((wide, weight))) is not None:
                x, weight, eps = unwidened(found[0]), *found[1:]
                if {x.type.dtype, weight.type.dtype} == {rounded.type.dtype}:
                    return op("rms_norm", x, weight, eps=eps)
    return None


def _rms_norm_of(product: tuple[Value, ...], divisor: Value | None = None) -> tuple[Value, Value, float] | None:
    """Return (x, weight, eps) of an RMS norm that is the product of some values, over `divisor` if that is not None."""
    for root, moment, eps in _roots_of(product, divisor):
        square = reduced_last(moment, "reduce_mean")
        for x in () if square is None else _squared(square):
            factors = [f for f in _factors(product, x) if f != root]
            if x not in factors or len(factors) != 2 or not fits_rows(root, x):
                continue
            weight = unbroadcast(factors[1 - factors.index(x)])
            if weight.shape == x.shape[-1:]:
                return x, weight, eps
    return None


def layer_norm(scaled: Value, bias: Value) -> Value | None:
    """
    Return a layer norm operator that computes the sum `scaled + bias`. None unless `scaled` is `(x - mean(x)) /
    sqrt(variance + eps) * weight` in any order, with moments over the last dim, and `weight` and `bias` are [size of
    that dim]. The variance is the mean of squares of what is left of the mean, or what they are above its square.
    """
    bias = unbroadcast(bias)
    for centred, weight in _pairs(scaled, "rms_norm"):
        # What is left of the mean was taken for the whole.
        for x, mean in _pairs(centred, "sub"):
            fits = fits_rows(mean, x) and reduced_last(mean, "reduce_mean") == x and weight.shape == bias.shape
            if fits and bias.type.dtype == x.type.dtype:
                return op("layer_norm", x, weight, bias, eps=scaled.node.attribute("eps"))
        return None
    factors, roots = _factors([scaled]), _roots_of([scaled])
    weights = [f for f in map(unbroadcast, factors) if f.shape == bias.shape and f.node.op == "weight"]
    if len(factors) != PARTS or len(weights) != 1 or len(roots) != 1:
        return None
    (weight,), ((root, moment, eps),) = weights, roots
    (centred,) = (f for f in factors if unbroadcast(f) != weight and f != root)
    for x, mean in _pairs(centred, "sub"):
        if not fits_rows(mean, x) or not fits_rows(root, x):
            continue
        if reduced_last(mean, "reduce_mean") == x and _is_variance(moment, x, centred):
            fits = bias.shape == x.shape[-1:] and bias.type.dtype == x.type.dtype
            return op("layer_norm", x, weight, bias, eps=eps) if fits else None
    return None


def _pairs(value: Value, name: str) -> list[tuple[Value, Value]]:
    """Return the two operands of the graph operator called `name` whose result a value is, in a list; [] for others."""
    operands = made_by(value, name)
    return [(operands[0], operands[1])] if len(operands) == 2 else []


def _factors(product: Sequence[Value], whole: Value | None = None) -> list[Value]:
    """
    Return the factors of a product of some values, of which `whole` is one; a divisor `sqrt`, too. Returns nothing if
    they are more than `PARTS`.
    """
    left, found = [*product], list[Value]()
    while left and len(left) + len(found) <= PARTS:
        value = left.pop()
        if value != whole and value.node.op == "mul":
            left += value.node.operands
        elif value.node.op == "div" and value.node.operands[1].node.op == "sqrt":
            left.append(value.node.operands[0])
            found.append(value.node.operands[1])
        else:
            found.append(value)
    return [] if left else found


def _roots_of(product: Sequence[Value], divisor: Value | None = None) -> list[tuple[Value, Value, float]]:
    """
    Return (root, variance, eps) for each `1 / sqrt(variance + eps)` that is a factor of a product of some values over
    `divisor`: among the first few factors, as those after are what is normalised.
    """
    left, found = [*product], list[tuple[Value, Value, float]]()
    if divisor is not None:
        found += [(divisor, *inner) for inner in _shifted(divisor, "sqrt")]
    for value in left:
        found += [(value, *inner) for inner in _shifted(value, "rsqrt")]
        for _, below in _pairs(value, "div"):
            found += [(below, *inner) for inner in _shifted(below, "sqrt")]
        if len(left) < 4 * PARTS:
            left += made_by(value, "mul") or made_by(value, "div")[:1]
    return found


def _squared(square: Value) -> tuple[Value, ...]:
    """Return (x,) of a value `x * x`, () of another."""
    for x, other in _pairs(square, "mul"):
        return (x,) if x == other else ()
    return made_by(square, "square")


def _shifted(root: Value, name: str) -> list[tuple[Value, float]]:
    """Return (variance, eps) of a root of `variance + eps` by the graph operator called `name`, in a list; else []."""
    return [number_of(inner, "shift", "by") or (inner, 0.0) for inner in made_by(root, name)]


def _is_variance(moment: Value, x: Value, centred: Value) -> bool:
    square = reduced_last(moment, "reduce_mean")
    if square is not None:
        return centred in _squared(square)
    for squares, of_mean in _pairs(_above_zero(unshaped(moment)), "sub"):
        inner = reduced_last(squares, "reduce_mean")
        is_second = inner is not None and made_by(inner, "square") == (x,) and squares.shape == of_mean.shape
        return is_second and any(reduced_last(m, "reduce_mean") == x for m in made_by(of_mean, "square"))
    return False


def _above_zero(value: Value) -> Value:
    """Return what a value is the maximum of with 0, as a variance is that rounding may leave below it."""
    for x, bound in _pairs(value, "maximum"):
        if bound.node.op == "constant" and bound.node.attribute("value") == 0:
            return x
    return value


def softmax(numerator: Value, denominator: Value) -> Value | None:
    """
    Return a softmax over the last dim that computes the quotient of `exp(x - m)` and its sum, where `m` is the maximum
    of x over that dim, or 0; None for another quotient.
    """
    if reduced_last(denominator, "reduce_sum") != numerator or not fits_rows(denominator, numerator):
        return None
    for inner in made_by(numerator, "exp"):
        return op("softmax", _unshifted(inner))
    return None


def log_softmax(shifted: Value, subtrahend: Value) -> Value | None:
    """
    Return a log-softmax over the last dim that computes `(x - m) - log(sum(exp(x - m)))`, where `m` is the maximum of x
    over that dim, or 0; None for another difference.
    """
    logs = unshaped(subtrahend)
    for total in made_by(logs, "log"):
        inner = reduced_last(total, "reduce_sum")
        is_last = subtrahend.shape == (*shifted.shape[:-1], 1)
        if is_last and inner is not None and made_by(inner, "exp") == (shifted,):
            return op("log_softmax", _unshifted(shifted))
    return None


def _unshifted(shifted: Value) -> Value:
    """Return the x of a difference `x - max(x)`, with the maximum over the last dim; the value itself for others."""
    for x, most in _pairs(shifted, "sub"):
        if reduced_last(most, "reduce_max", detached=True) == x and most.shape == (*x.shape[:-1], 1):
            return x
    return shifted
