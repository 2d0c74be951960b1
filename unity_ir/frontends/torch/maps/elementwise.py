"""
Map arithmetic with broadcasting, activations, comparisons and selection from ATen operators to the compiler's. Each
mapping gets the call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen arguments, and
returns the result as a value of the compiler's graph, or several.
"""

from __future__ import annotations

import math

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.recognise import activations, norms
from unity_ir.frontends.torch.site import CallSite, cast, finite, maps, number, shrink
from unity_ir.frontends.torch.values import Operand, Shape, constant, element_type, expand, like, op, reshape
from unity_ir.pcg.node import Value

COMMUTATIVE = {"add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or"}


def binary(site: CallSite, name: str, x: Operand, y: Operand, dtype: str | None = None) -> Value:
    """
    Return the graph operator called `name` applied to two operands, broadcast to the shape and cast to the element type
    of PyTorch's result at `site`.

    The operands are first cast to the element type `dtype`, such as `f32`; None casts them to the result's.
    """
    dtype = dtype or site.dtype
    a, b = (site.value(shrink(v) if isinstance(v, torch.Tensor) else v, dtype) for v in (x, y))
    if len(a.shape) < len(b.shape) and name in COMMUTATIVE:
        a, b = b, a
    if len(b.shape) <= len(a.shape):
        b = _without_leading(b, a.shape)
    return site.fit(op(name, a, b)) if _is_ready(a, b) else site.fit(op(name, expand(a, site.shape), b))


def _without_leading(x: Value, beside: Shape) -> Value:
    """
    Return `x` reshaped to drop its leading dims of size 1 where the shape `beside`, with which it is broadcast, has a
    larger size. A dim that both have of size 1, such as a batch of one sample, stays.
    """
    shape = x.shape
    while shape and shape[0] == 1 and beside[len(beside) - len(shape)] != 1:
        shape = shape[1:]
    return reshape(x, shape)


def _is_ready(a: Value, b: Value) -> bool:
    """Return whether the first operand has as many dims as the second."""
    return len(a.shape) >= len(b.shape)


def _unary(name: str, *aten: str) -> None:
    """
    Register a mapping to the graph operator `name`, which takes one operand, for the ATen operators named in `aten`; by
    default for the one also called `name`. It casts the operand to the element type of PyTorch's result first.
    """

    @maps(*(aten or (name,)))
    def one(site: CallSite, x: Value) -> Value:
        return op(name, cast(x, site.dtype))

    del one


for _name in ("relu", "tanh", "sigmoid", "silu", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "sin", "cos"):
    _unary(_name)
for _name in ("relu6", "hardswish", "hardsigmoid", "square", "reciprocal", "erf", "floor", "sign"):
    _unary(_name)
_unary("logical_not", "logical_not", "bitwise_not")


def shift(x: Value, by: float) -> Value:
    """Return `x + by` as a value of the graph, in the element type of `x`; `x` itself if `by` is 0."""
    return op("shift", x, by=float(by)) if by else x


def scale(x: Value, by: float) -> Value:
    """Return `by * x` as a value of the graph, in the element type of `x`; `x` itself if `by` is 1."""
    return x if by == 1 else op("neg", x) if by == -1 else op("scale", x, by=float(by))


@maps("add")
def add(site: CallSite, x: Operand, y: Operand, alpha: float = 1) -> Value:
    """
    Map PyTorch's `x + alpha * y`, with broadcasting, in the element type of its result. A sum that is the last step of
    a written-out layer norm becomes that operator instead.
    """
    if isinstance(x, Value) and (by := number(y)) is not None:
        return site.fit(shift(cast(x, site.dtype), by * alpha))
    if isinstance(y, Value) and (by := number(x)) is not None:
        return site.fit(shift(scale(cast(y, site.dtype), alpha), by))
    if alpha != 1:
        y = scale(site.value(y, site.dtype), alpha)
    for a, b in ((x, y), (y, x)):
        if isinstance(a, Value) and isinstance(b, Value) and (known := norms.layer_norm(a, b)) is not None:
            return site.fit(known)
    return binary(site, "add", x, y)


@maps("sub", "subtract")
def sub(site: CallSite, x: Operand, y: Operand, alpha: float = 1) -> Value:
    """
    Map PyTorch's `x - alpha * y`, with broadcasting, in the element type of its result. A difference that is the last
    step of a written-out log-softmax becomes that operator instead.
    """
    if (by := number(y)) is not None or number(x) is not None:
        return add(site, x, y if by is None else by, alpha=-alpha)
    if alpha != 1:
        y = scale(site.value(y, site.dtype), alpha)
    if isinstance(x, Value) and isinstance(y, Value) and (known := norms.log_softmax(x, y)) is not None:
        return site.fit(known)
    return binary(site, "sub", x, y)


@maps("rsub")
def rsub(site: CallSite, x: Operand, y: Operand, alpha: float = 1) -> Value:
    """Map PyTorch's `y - alpha * x`, with broadcasting, in the element type of its result."""
    return sub(site, y, x, alpha)


@maps("mul", "multiply")
def mul(site: CallSite, x: Operand, y: Operand) -> Value:
    """
    Map PyTorch's `x * y`, with broadcasting. A product that is the last step of a written-out gelu, silu or RMS norm
    becomes that operator instead.
    """
    for a, b in ((x, y), (y, x)):
        if isinstance(a, Value) and (by := number(b)) is not None:
            return site.fit(scale(cast(a, site.dtype), by))
    if isinstance(x, Value) and isinstance(y, Value):
        known = activations.gelu(x, y) or activations.silu(x, y) or norms.rms_norm((x, y))
        if known is not None and known.type.dtype == site.dtype:
            return known
    return binary(site, "mul", x, y)


@maps("div", "divide", "true_divide")
def div(site: CallSite, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    """
    Map PyTorch's `x / y`, rounded down if `rounding_mode` is "floor", and towards 0 if it is "trunc". A quotient that
    is the last step of a written-out softmax or RMS norm becomes that operator instead.
    """
    if rounding_mode == "trunc":
        return cast(truncated(site, binary(site.in_floats(), "div", x, y)), site.dtype)
    # What is rounded must be the quotient itself: 49 * (1 / 49) is below 1.
    if isinstance(x, Value) and rounding_mode is None and (by := number(y)):
        out = site.fit(scale(cast(x, site.dtype), 1 / by))
    elif isinstance(y, Value) and rounding_mode is None and (by := number(x)) is not None:
        out = site.fit(scale(op("reciprocal", cast(y, site.dtype)), by))
    elif site.dtype in ("i64", "i32"):
        return cast(op("floor", binary(site.in_floats(), "div", x, y)), site.dtype)
    else:
        known = None
        if isinstance(x, Value) and isinstance(y, Value) and not rounding_mode:
            known = norms.softmax(x, y) or norms.rms_norm((x,), y)
        out = binary(site, "div", x, y) if known is None else site.fit(known)
    return op("floor", out) if rounding_mode else out


@maps("floor_divide")
def floor_divide(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's `floor(x / y)`, rounded down also where the quotient is negative."""
    out = div(site, x, y, "floor")
    orders = site.tables.orders
    if isinstance(x, Value) and x in orders.sorted.values() and isinstance(y, int):
        orders.quotients[out] = x, y
    return out


@maps("pow")
def power(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's elementwise `x ** y`, with broadcasting, in the element type of its result."""
    exponent = number(y)
    if exponent is None or not isinstance(x, Value):
        return binary(site, "pow", x, y)
    x = cast(x, site.dtype)
    match exponent:
        case 1:
            return x
        case 2:
            return op("square", x)
        case 0.5:
            return op("sqrt", x)
        case -0.5:
            return op("rsqrt", x)
        case -1:
            return op("reciprocal", x)
        case _:
            return op("pow_scalar", x, exponent=float(exponent))


@maps("maximum")
def maximum(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's elementwise maximum of two operands, with broadcasting."""
    return binary(site, "maximum", x, y)


@maps("minimum")
def minimum(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's elementwise minimum of two operands, with broadcasting."""
    return binary(site, "minimum", x, y)


@maps("addcmul")
def addcmul(site: CallSite, x: Operand, a: Operand, b: Operand, value: float = 1) -> Value:
    """Map PyTorch's elementwise `x + value * a * b`, with broadcasting."""
    return add(site, x, mul(site, a, b), alpha=value)


@maps("addcdiv")
def addcdiv(site: CallSite, x: Operand, a: Operand, b: Operand, value: float = 1) -> Value:
    """Map PyTorch's elementwise `x + value * a / b`, with broadcasting."""
    return add(site, x, div(site, a, b), alpha=value)


# Activations


@maps("gelu")
def gelu(site: CallSite, x: Value, approximate: str = "none") -> Value:
    """Map PyTorch's gelu: exact, or approximated by tanh if `approximate` is "tanh"."""
    del site
    return op("gelu_tanh" if approximate == "tanh" else "gelu", x)


@maps("leaky_relu")
def leaky_relu(site: CallSite, x: Value, slope: float = 0.01) -> Value:
    """Map PyTorch's leaky relu: `x` where it is above 0, else `slope * x`."""
    del site
    return op("leaky_relu", x, slope=float(slope))


@maps("elu")
def elu(site: CallSite, x: Value, alpha: float = 1, scaled: float = 1, input_scale: float = 1) -> Value:
    """
    Map PyTorch's `scaled * elu(x)`, where elu is `x` above 0, else `alpha * (exp(x) - 1)`. Raises `UnityError` if
    `input_scale` is not 1.
    """
    del site
    if input_scale != 1:
        raise UnityError(f"input_scale is {input_scale}; only 1 is supported")
    return scale(op("elu", x, alpha=float(alpha)), scaled)


@maps("selu")
def selu(site: CallSite, x: Value) -> Value:
    """Map PyTorch's selu, an elu with fixed `alpha` and scale (Klambauer et al., 2017)."""
    return elu(site, x, 1.6732632423543772, 1.0507009873554805)


@maps("softplus")
def softplus(site: CallSite, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    """Map PyTorch's softplus, `log(1 + exp(beta x)) / beta`, and `x` itself where `beta x` is above the threshold."""
    del site
    scaled = scale(x, beta)
    out = scale(op("softplus", scaled), 1 / beta)
    return out if threshold == 20 else op("select", compared("gt", scaled, threshold), x, out)


@maps("log_sigmoid")
def log_sigmoid(site: CallSite, x: Value) -> Value:
    """Map PyTorch's `log(sigmoid(x))`."""
    del site
    return op("neg", op("softplus", op("neg", x)))


@maps("mish")
def mish(site: CallSite, x: Value) -> Value:
    """Map PyTorch's `x * tanh(softplus(x))`."""
    del site
    return op("mul", x, op("tanh", op("softplus", x)))


@maps("log1p")
def log1p(site: CallSite, x: Value) -> Value:
    """Map PyTorch's `log(1 + x)`, computed in these two steps, so without PyTorch's precision at small `x`."""
    del site
    return op("log", shift(x, 1))


@maps("log2")
def log2(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise logarithm to base 2, as `log(x) / log(2)`."""
    del site
    return scale(op("log", x), 1 / math.log(2))


@maps("expm1")
def expm1(site: CallSite, x: Value) -> Value:
    """Map PyTorch's `exp(x) - 1`, computed in these two steps, so without PyTorch's precision at small `x`."""
    del site
    return shift(op("exp", x), -1)


@maps("hardtanh")
def hardtanh(site: CallSite, x: Value, low: float = -1, high: float = 1) -> Value:
    """
    Map PyTorch's hardtanh: `x` clamped to [low, high]. Its gradient is zero where `x` equals a bound (in PyTorch's
    clamp it is one there).
    """
    match low, high:
        case -1, 1:
            return op("hardtanh", x)
        case 0, 6:
            return op("relu6", x)
        case _:
            inside = op("logical_and", *(compared(name, x, by) for name, by in (("gt", low), ("lt", high))))
            return op("select", inside, x, op("detach", clamp(site, x, low, high)))


def compared(name: str, x: Value, by: float) -> Value:
    """
    Return the graph's comparison operator called `name` (such as `lt`) of each element of `x` with the number `by`, as
    a boolean value; `by` is first rounded to the element type of `x`.
    """
    return op(name, x, constant(by, (), x.type.dtype))


@maps("clamp", "clip")
def clamp(site: CallSite, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    """
    Map PyTorch's clamp: `x` limited to [low, high], numbers or tensors; a bound that is None is infinite.
    """
    if not isinstance(low, int | float | None) or not isinstance(high, int | float | None):
        for name, bound in (("ge", low), ("le", high)):
            if bound is not None:
                inside = binary(site.of_bools(), name, x, bound, site.dtype)
                x = where(site, inside, x, bound)
        return x
    low, high = (
        finite(float(v), site.result.dtype)
        for v in (-math.inf if low is None else low, math.inf if high is None else high)
    )
    return op("clamp", x, low=low, high=high)


@maps("exp2")
def exp2(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise power of 2, as `exp(log(2) * x)`."""
    return op("exp", scale(cast(x, site.dtype), math.log(2)))


@maps("log10")
def log10(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise logarithm to base 10, as `log(x) / log(10)`."""
    del site
    return scale(op("log", x), 1 / math.log(10))


@maps("tan")
def tan(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise tangent, as `sin(x) / cos(x)`."""
    del site
    return op("div", op("sin", x), op("cos", x))


@maps("sinh")
def sinh(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise hyperbolic sine, as `(exp(x) - exp(-x)) / 2`."""
    del site
    return scale(op("sub", op("exp", x), op("exp", op("neg", x))), 0.5)


@maps("cosh")
def cosh(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise hyperbolic cosine, as `(exp(x) + exp(-x)) / 2`."""
    del site
    return scale(op("add", op("exp", x), op("exp", op("neg", x))), 0.5)


@maps("atanh")
def atanh(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise inverse hyperbolic tangent, as `log((1 + x) / (1 - x)) / 2`."""
    del site
    return scale(op("log", op("div", shift(x, 1), shift(op("neg", x), 1))), 0.5)


@maps("asinh")
def asinh(site: CallSite, x: Value) -> Value:
    """
    Map PyTorch's asinh, computed from the absolute value: for large negative `x`, the terms of the plain formula would
    cancel.
    """
    del site
    one, minus = (constant(v, (), x.type.dtype) for v in (1, -1))
    sign = op("select", compared("ge", x, 0), one, minus)
    y = op("mul", x, sign)
    return op("mul", op("log", op("add", y, op("sqrt", shift(op("square", y), 1)))), sign)


@maps("acosh")
def acosh(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise inverse hyperbolic cosine, as `log(x + sqrt(x^2 - 1))`."""
    del site
    return op("log", op("add", x, op("sqrt", shift(op("square", x), -1))))


@maps("ceil")
def ceil(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise rounding up to the next integer; the element type stays."""
    del site
    return op("neg", op("floor", op("neg", x)))


@maps("round")
def rounded(site: CallSite, x: Value, *, decimals: int = 0) -> Value:
    """Map PyTorch's round: to the nearest number of `decimals` digits after the point, ties to the even one."""
    del site
    x = scale(x, 10.0**decimals)
    low = op("floor", x)
    is_between = compared("eq", op("sub", x, low), 0.5)
    even = scale(op("floor", shift(scale(x, 0.5), 0.25)), 2)
    return scale(op("select", is_between, even, op("floor", shift(x, 0.5))), 10.0**-decimals)


@maps("trunc", "fix")
def truncated(site: CallSite, x: Value) -> Value:
    """Map PyTorch's rounding towards 0."""
    del site
    return op("mul", op("sign", x), op("floor", op("abs", x)))


@maps("fmod")
def fmod(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's `x - y * trunc(x / y)`, which has the sign of the dividend."""
    quotient = binary(site.in_floats(), "div", x, y)
    return sub(site, x, mul(site, cast(truncated(site, quotient), site.dtype), y))


@maps("isinf")
def isinf(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise test for infinity, as `abs(x)` beyond the largest finite number."""
    del site
    return compared("gt", op("abs", x), torch.finfo(like(x).dtype).max)


@maps("isfinite")
def isfinite(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise test for numbers other than infinity and nan."""
    del site
    return compared("le", op("abs", x), torch.finfo(like(x).dtype).max)


@maps("nan_to_num")
def nan_to_num(
    site: CallSite, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    """
    Map PyTorch's replacement of nan (by default by 0) and of infinity (by the largest finite number), which have no
    gradient. Raises `UnityError` for that of a softmax: rows that are masked whole are nan in PyTorch alone.
    """
    del site
    made = x.node.operands[0].node if x.node.op == "cast" else x.node
    if made.op in ("softmax", "log_softmax"):
        raise UnityError(
            "rows of a softmax that are masked whole are uniform, not nan; choose 0 for them by torch.where of the mask"
        )
    most = torch.finfo(like(x).dtype).max
    found = op("select", op("ne", x, x), constant(0.0 if nan is None else nan, x.shape, x.type.dtype), x)
    above, below = (
        constant(limit if given is None else given, x.shape, x.type.dtype)
        for limit, given in ((most, posinf), (-most, neginf))
    )
    return op("select", compared("lt", x, -most), below, op("select", compared("gt", x, most), above, found))


@maps("remainder")
def remainder(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's `x - y * floor(x / y)`, which has the sign of the divisor."""
    return sub(site, x, mul(site, div(site, x, y, "floor"), y))


@maps("isnan")
def isnan(site: CallSite, x: Value) -> Value:
    """Map PyTorch's elementwise test for nan, as `x != x`; the result is boolean."""
    del site
    return op("ne", x, x)


@maps("clamp_min")
def clamp_min(site: CallSite, x: Value, low: Operand) -> Value:
    """Map PyTorch's clamp from below: the elementwise maximum of `x` and `low`."""
    return clamp(site, x, low, None)


@maps("clamp_max")
def clamp_max(site: CallSite, x: Value, high: Operand) -> Value:
    """Map PyTorch's clamp from above: the elementwise minimum of `x` and `high`."""
    return clamp(site, x, None, high)


# Comparisons and choice


def compare(name: str, *aten: str) -> None:
    """
    Register the graph's comparison operator called `name`, such as `lt`, as the mapping of the ATen operators named in
    `aten` (by default the one with the same name). The mapping casts both operands to the element type that PyTorch
    promotes them to, and broadcasts them.
    """

    @maps(*(aten or (name,)))
    def both(site: CallSite, x: Operand, y: Operand) -> Value:
        return binary(site, name, x, y, common(x, y))

    del both


def common(x: Operand, y: Operand) -> str:
    """
    Return the element type, such as `f32`, in which PyTorch compares two operands (type promotion). Raises `UnityError`
    for a type that the compiler does not have.
    """
    a, b = (like(v) if isinstance(v, Value) else v for v in (x, y))
    return element_type(torch.result_type(a, b))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    compare(_name)


@maps("logical_and", "bitwise_and", "__and__")
def logical_and(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's logical and, and its bitwise and of booleans. Raises `UnityError` for a bitwise and of integers."""
    return _of_bools(site, "logical_and", x, y, neutral=True)


@maps("logical_or", "bitwise_or", "__or__")
def logical_or(site: CallSite, x: Operand, y: Operand) -> Value:
    """Map PyTorch's logical or, and its bitwise or of booleans. Raises `UnityError` for a bitwise or of integers."""
    return _of_bools(site, "logical_or", x, y, neutral=False)


@maps("logical_xor", "bitwise_xor", "__xor__")
def logical_xor(site: CallSite, x: Operand, y: Operand) -> Value:
    """
    Map PyTorch's exclusive or, logical or bitwise, of booleans. Raises `UnityError` for a bitwise one of integers.
    """
    _check_bool(site)
    return binary(site, "ne", x, y, "bool")


def _check_bool(site: CallSite) -> None:
    """Raise `UnityError` for bitwise operators of integers; those of booleans are the logical ones."""
    if site.dtype != "bool":
        raise UnityError("of the bits of integers it has no operator; of truth values it has")


def _of_bools(site: CallSite, name: str, x: Operand, y: Operand, neutral: bool) -> Value:
    """
    Map `logical_and` or `logical_or`; an operand that is `neutral` everywhere is left out, one that
    decides the result folds.
    """
    _check_bool(site)
    for a, b in ((x, y), (y, x)):
        if isinstance(a, Value) and (known := number(b)) is not None:
            return site.fit(a if bool(known) == neutral else constant(int(known), (), "bool"))
    return binary(site, name, x, y, "bool")


@maps("where")
def where(site: CallSite, condition: Operand, x: Operand, y: Operand) -> Value:
    """Map PyTorch's where: `x` where the condition holds, `y` elsewhere, all broadcast to one shape."""
    known = number(condition)
    if known is not None:
        return site.fit(site.value(x if known else y, site.dtype))
    if isinstance(condition, torch.Tensor):
        condition = shrink(condition)
    a, b = (site.value(shrink(v) if isinstance(v, torch.Tensor) else v, site.dtype) for v in (x, y))
    return site.fit(op("select", site.value(condition, "bool"), a, b))


@maps("masked_fill")
def masked_fill(site: CallSite, x: Operand, mask: Operand, value: Operand) -> Value:
    """Map PyTorch's masked_fill: `value`, a number or scalar, where the mask is true, `x` elsewhere."""
    return where(site, mask, value, x)


@maps("tril")
def tril(site: CallSite, x: Value, diagonal: int = 0) -> Value:
    """
    Map PyTorch's tril: the lower triangles of the last two dims, zero above diagonal number `diagonal` (0 the main one,
    positive above it).
    """
    return where(site, torch.ones(x.shape[-2:], dtype=torch.bool).tril(diagonal), x, 0.0)


@maps("triu")
def triu(site: CallSite, x: Value, diagonal: int = 0) -> Value:
    """
    Map PyTorch's triu: the upper triangles of the last two dims, zero below diagonal number `diagonal` (0 the main one,
    positive above it).
    """
    return where(site, torch.ones(x.shape[-2:], dtype=torch.bool).triu(diagonal), x, 0.0)
