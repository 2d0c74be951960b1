"""
Recognise operators that models write out in several of PyTorch's: attention, RMS norm, tanh-approximated gelu.

`attention`, `rms_norm` and `gelu_tanh` get the operands of a product about to be built, and return the one operator
that computes it, or None.
"""

from __future__ import annotations

from math import isclose, pi, sqrt

from unity_ir.frontends.torch.masks import is_causal_mask, visible
from unity_ir.frontends.torch.site import Tables
from unity_ir.frontends.torch.values import op
from unity_ir.pcg.graph import Value


def _made_by(value: Value, name: str) -> tuple[Value, ...]:
    """Return the operands of the operator whose result a value is, if that graph operator is called `name`; else ()."""
    return value.node.operands if value.node.op == name else ()


def _number_of(value: Value, name: str, attribute: str) -> tuple[Value, float] | None:
    """
    Return (first operand, value of the numeric attribute `attribute`) of the operator whose result a value is, if that
    graph operator is called `name`; else None.

    Given `scale(x, by = 2)`, "scale" and "by", returns x and 2.
    """
    return (value.node.operands[0], value.node.attribute(attribute)) if value.node.op == name else None


def undo_repeat_kv(x: Value) -> Value:
    """
    Undo grouped-query attention's repetition of heads (`repeat_kv`): given keys or values [b, heads, s, d], return [b,
    kv heads, s, d], from which they were made by repeating each head for a group of queries' heads. Returns `x` itself
    if they were not made so.
    """
    for wide in _made_by(x, "reshape"):
        if wide.node.op == "expand" and wide.node.attribute("dim") == 2 and len(wide.node.attribute("sizes")) == 1:
            (narrow,) = wide.node.operands
            if len(narrow.shape) == 4 and x.shape == (narrow.shape[0], wide.shape[1] * wide.shape[2], *x.shape[2:]):
                return narrow
    return x


def attention(weights: Value, v: Value, tables: Tables) -> Value | None:
    """
    Return an attention operator that computes the matrix product of `weights` and `v`; None if `weights` is not a
    softmax of scaled scores.

    `weights` must be `softmax(scale * q k^T + mask)`, of four dims, without a mask or with a causal one. `tables` has
    the elements of masks that are known at import.
    """
    for scores in _made_by(weights, "softmax"):
        causal = 0
        if scores.node.op == "add":
            scores, mask = scores.node.operands
            table = tables.values.get(mask.node.name) if mask.node.op == "input" else None
            seen = None if table is None else visible(table)
            if seen is None or not is_causal_mask(seen, scores.shape[-2], scores.shape[-1]):
                return None
            causal = 1
        scores, by = _number_of(scores, "scale", "by") or (scores, 1.0)
        if scores.node.op == "batch_matmul_nt" and len(scores.shape) == 4:
            q, k = scores.node.operands
            narrow_k, narrow_v = undo_repeat_kv(k), undo_repeat_kv(v)
            if narrow_k.shape[1] == narrow_v.shape[1]:
                k, v = narrow_k, narrow_v
            return op("attention", q, k, v, scale=by, causal=causal)
    return None


def rms_norm(normal: Value, weight: Value) -> Value | None:
    """
    Return an RMS norm operator that computes the product `normal * weight`. None unless `normal` is `x * rsqrt(mean(x *
    x) + eps)`, with the mean over the last dim, and `weight` is [size of that dim].
    """
    operands = _made_by(normal, "mul")
    for x, root in (operands, operands[::-1]) if operands else ():
        for mean in _made_by(root, "rsqrt"):
            mean, eps = _number_of(mean, "shift", "by") or (mean, 0.0)
            for inner in _made_by(mean, "reshape"):
                for square in _made_by(inner, "reduce_mean"):
                    is_last = inner.node.attribute("dim") == len(x.shape) - 1 and inner.shape == x.shape[:-1]
                    if _made_by(square, "square") == (x,) and is_last and weight.shape == x.shape[-1:]:
                        return op("rms_norm", x, weight, eps=eps)
    return None


def gelu_tanh(left: Value, right: Value) -> Value | None:
    """
    Return a gelu operator (tanh approximation) that computes the product `left * right`; None if the factors do not
    form one.

    They must be `0.5 x` and `1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))`, in this order.
    """
    half, one = _number_of(left, "scale", "by"), _number_of(right, "shift", "by")
    if half is None or one is None or (half[1], one[1]) != (0.5, 1.0):
        return None
    x = half[0]
    for argument in _made_by(one[0], "tanh"):
        inner = _number_of(argument, "scale", "by")
        if inner is None or not isclose(inner[1], sqrt(2 / pi), rel_tol=1e-6) or inner[0].node.op != "add":
            continue
        first, rest = inner[0].node.operands
        cube = _number_of(rest, "scale", "by")
        if first == x and cube is not None and isclose(cube[1], 0.044715) and cube[0].node.op == "pow_scalar":
            if cube[0].node.operands == (x,) and cube[0].node.attribute("exponent") == 3:
                return op("gelu_tanh", x)
    return None
