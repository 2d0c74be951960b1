"""
Recognise norms and softmaxes that are written out. Each function gets the operands of the operator about to be built,
the last of the pattern, and returns the one operator that computes it, or None.
"""

from __future__ import annotations

from unity_ir.frontends.torch.recognise.match import fits_rows, made_by, number_of, reduced_last, unbroadcast, unshaped
from unity_ir.frontends.torch.site import cast
from unity_ir.frontends.torch.values import op
from unity_ir.pcg.graph import Value


def rms_norm(normal: Value, weight: Value) -> Value | None:
    """
    Return an RMS norm operator that computes the product `normal * weight` in the element type of `normal`, which may
    be wider than that of `weight`. None unless `normal` is `x * rsqrt(mean(x * x) + eps)`, with the mean over the last
    dim, and `weight` is [size of that dim].
    """
    operands, weight = made_by(normal, "mul"), unbroadcast(weight)
    for x, root in (operands, operands[::-1]) if operands else ():
        for mean in made_by(root, "rsqrt"):
            mean, eps = number_of(mean, "shift", "by") or (mean, 0.0)
            square = reduced_last(mean, "reduce_mean")
            if square is None or made_by(square, "square") != (x,) or not fits_rows(root, x):
                continue
            if weight.shape == x.shape[-1:]:
                return op("rms_norm", x, cast(weight, x.type.dtype), eps=eps)
    return None


def layer_norm(scaled: Value, bias: Value) -> Value | None:
    """
    Return a layer norm operator that computes the sum `scaled + bias`. None unless `scaled` is `(x - mean(x)) /
    sqrt(variance + eps) * weight` in any order, with moments over the last dim, and `weight` and `bias` are [size of
    that dim]. The variance is the mean of squares of what is left of the mean, or what they are above its square.
    """
    bias = unbroadcast(bias)
    factors, divisors = _factors(scaled)
    weights = [f for f in factors if f.shape == bias.shape and f.node.op == "weight"]
    roots = [(f, found) for f in factors for found in _shifted(f, "rsqrt")]
    roots += [(f, found) for f in divisors for found in _shifted(f, "sqrt")]
    if len(factors) + len(divisors) != 3 or len(weights) != 1 or len(roots) != 1:
        return None
    (weight,), ((root, (moment, eps)),) = weights, roots
    (centred,) = (f for f in factors if f not in (weight, root))
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


def _factors(value: Value) -> tuple[list[Value], list[Value]]:
    """Return the factors of a product, and the roots `sqrt` that it, or a factor, is divided by."""
    for x, y in _pairs(value, "mul"):
        (factors, divisors), (more, others) = _factors(x), _factors(y)
        return [*factors, *more], [*divisors, *others]
    for x, y in _pairs(value, "div"):
        if y.node.op == "sqrt":
            factors, divisors = _factors(x)
            return factors, [*divisors, y]
    return [unbroadcast(value)], []


def _shifted(root: Value, name: str) -> list[tuple[Value, float]]:
    """Return (variance, eps) of a root of `variance + eps` by the graph operator called `name`, in a list; else []."""
    found = [number_of(inner, "shift", "by") for inner in made_by(root, name)]
    return [f for f in found if f is not None]


def _is_variance(moment: Value, x: Value, centred: Value) -> bool:
    square = reduced_last(moment, "reduce_mean")
    if square is not None:
        return made_by(square, "square") == (centred,) or made_by(square, "mul") == (centred, centred)
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
