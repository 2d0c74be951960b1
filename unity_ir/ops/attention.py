"""Scaled-dot-product attention and rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Saving, Tensor

PRODUCT = "scale * sum[e](q[b, (h g), i, e] * k[b, h, j, e])"
_SCORES = f"let s[b, h, g, i, j] = where(gt(causal * (j - i), 0), -1e30, {PRODUCT});"
"""The scores; with `causal` 1 a position sees only itself and what is before it."""
SOFTMAX = (
    "  let u[b, h, g, i, j] = exp(s[b, h, g, i, j] - max[m](s[b, h, g, i, m]));"
    "  let p[b, h, g, i, j] = u[b, h, g, i, j] / sum[n](u[b, h, g, i, n]);"
)
OUT = "  out[b, (h g), i, d] = sum[t](p[b, h, g, i, t] * v[b, h, t, d])"
LOGSUM = (
    "  logsum: sums [b, (h g), i] = max[m](s[b, h, g, i, m])"
    " + log(sum[n](exp(s[b, h, g, i, n] - max[m](s[b, h, g, i, m]))))"
)
_GRADIENTS = (
    "  dq[b, (h g), i, c] = sum[t](ds[b, h, g, i, t] * k[b, h, t, c]);"
    "  dk[b, h, t, c] = sum[g, i](ds[b, h, g, i, t] * q[b, (h g), i, c]);"
    "  dv[b, h, t, d] = sum[g, i](p[b, h, g, i, t] * y[b, (h g), i, d])"
)
BACKWARD = (
    "  let dp[b, h, g, i, t] = sum[d](y[b, (h g), i, d] * v[b, h, t, d]);"
    "  let ds[b, h, g, i, t] = scale * p[b, h, g, i, t]"
    " * (dp[b, h, g, i, t] - sum[w](p[b, h, g, i, w] * dp[b, h, g, i, w]));"
    f"{_GRADIENTS}"
)
SAVED_BACKWARD = (
    "  let p[b, h, g, i, j] = exp(s[b, h, g, i, j] - logsum[b, (h g), i]);"
    "  let dp[b, h, g, i, t] = sum[d](y[b, (h g), i, d] * v[b, h, t, d]);"
    "  let ds[b, h, g, i, t] = scale * p[b, h, g, i, t]"
    " * (dp[b, h, g, i, t] - sum[x](y[b, (h g), i, x] * a[b, (h g), i, x]));"
    f"{_GRADIENTS}"
)
"""TDL text after the scores `s`: softmax, result, logarithms of its sums, and gradients (from these logarithms)."""
_PROBABILITIES = f"{_SCORES}{SOFTMAX}"


def _attention_gradient(of: Application) -> Sequence[Tensor | None]:
    return ATTENTION_GRAD(of.grad, *of.operands, **of.attributes)


ATTENTION = Operator(
    f"attention(q, k, v; scale: float, causal: int = 0)  {_PROBABILITIES}{OUT}", gradient=_attention_gradient
)
"""
Queries [b, heads, i, e], keys [b, kv heads, j, e], values [b, kv heads, j, d]; every kv head serves a group of
neighbouring heads (grouped-query attention), all of them their own one in the usual case.
"""

ATTENTION_GRAD = Operator(f"attention_grad(y, q, k, v; scale: float, causal: int = 0)  {_PROBABILITIES}{BACKWARD}")
"""The gradients of queries, keys and values from that of the result, `y`; the probabilities are computed again."""

ATTENTION_SAVING = Operator(
    f"attention_saving(q, k, v; scale: float, causal: int = 0, sums: dtype = f32)  {_PROBABILITIES}{OUT};{LOGSUM}"
)
"""`attention`, and the logarithm of what every row's exponentials sum to, which a backward can read."""

ATTENTION_SAVED_GRAD = Operator(
    f"attention_saved_grad(y, q, k, v, a, logsum; scale: float, causal: int = 0)  {_SCORES}{SAVED_BACKWARD}"
)
"""`attention_grad` from the result of the forward, `a`, and the logarithms it has saved."""

_DROPPED = (
    "let z[b, h, g, i, j] = where(lt(philox(seed, position(b, h, g, i, j)), drop), 0, 1 / (1 - drop));"
    "  let w[b, h, g, i, j] = p[b, h, g, i, j] * z[b, h, g, i, j];"
)
"""Dropout of the probabilities: as `dropout` draws it, by the position among those of all batch elements and heads."""
_DROP = "scale: float, drop: float, seed: int, causal: int = 0"


def _attention_dropout_gradient(of: Application) -> Sequence[Tensor | None]:
    return ATTENTION_DROPOUT_GRAD(of.grad, *of.operands, **of.attributes)


ATTENTION_DROPOUT = Operator(
    f"attention_dropout(q, k, v; {_DROP})  {_PROBABILITIES}  {_DROPPED}"
    "  out[b, (h g), i, d] = sum[t](w[b, h, g, i, t] * v[b, h, t, d])",
    gradient=_attention_dropout_gradient,
)
"""`attention` whose probabilities are 0 with probability `drop`, and scaled so that their mean stays."""

_DROPPED_GRADIENTS = (
    "  dq[b, (h g), i, c] = sum[t](ds[b, h, g, i, t] * k[b, h, t, c]);"
    "  dk[b, h, t, c] = sum[g, i](ds[b, h, g, i, t] * q[b, (h g), i, c]);"
    "  dv[b, h, t, d] = sum[g, i](w[b, h, g, i, t] * y[b, (h g), i, d])"
)

ATTENTION_DROPOUT_GRAD = Operator(
    f"attention_dropout_grad(y, q, k, v; {_DROP})  {_PROBABILITIES}  {_DROPPED}"
    "  let dp[b, h, g, i, t] = z[b, h, g, i, t] * sum[d](y[b, (h g), i, d] * v[b, h, t, d]);"
    "  let ds[b, h, g, i, t] = scale * p[b, h, g, i, t]"
    " * (dp[b, h, g, i, t] - sum[x](p[b, h, g, i, x] * dp[b, h, g, i, x]));"
    f"{_DROPPED_GRADIENTS}"
)
"""The gradients of `attention_dropout`; what was dropped is drawn again."""

ATTENTION_DROPOUT_SAVING = Operator(
    f"attention_dropout_saving(q, k, v; {_DROP}, sums: dtype = f32)  {_PROBABILITIES}  {_DROPPED}"
    "  out[b, (h g), i, d] = sum[t](w[b, h, g, i, t] * v[b, h, t, d]);"
    "  logsum: sums [b, (h g), i] = max[m](s[b, h, g, i, m])"
    " + log(sum[n](exp(s[b, h, g, i, n] - max[m](s[b, h, g, i, m]))))"
)
"""`attention_dropout`, and the logarithm of what every row's exponentials sum to, which a backward can read."""

ATTENTION_DROPOUT_SAVED_GRAD = Operator(
    f"attention_dropout_saved_grad(y, q, k, v, a, logsum; {_DROP})  {_SCORES}"
    f"  let p[b, h, g, i, j] = exp(s[b, h, g, i, j] - logsum[b, (h g), i]);  {_DROPPED}"
    "  let dp[b, h, g, i, t] = z[b, h, g, i, t] * sum[d](y[b, (h g), i, d] * v[b, h, t, d]);"
    "  let ds[b, h, g, i, t] = scale * p[b, h, g, i, t]"
    " * (dp[b, h, g, i, t] - sum[x](y[b, (h g), i, x] * a[b, (h g), i, x]));"
    f"{_DROPPED_GRADIENTS}"
)
"""`attention_dropout_grad` from the result of the forward, `a`, and the logarithms it has saved."""

_HIDDEN = "or(lt(j, first[b, i]), ge(j, end[b, i]))"
_RANGE_SCORES = f"let s[b, h, g, i, j] = where({_HIDDEN}, -1e30, scale * sum[e](q[b, (h g), i, e] * k[b, h, j, e]));"
_RANGE_PROBABILITIES = (
    f"{_RANGE_SCORES}  let u[b, h, g, i, j] = exp(s[b, h, g, i, j] - max[m](s[b, h, g, i, m]));"
    f"  let p[b, h, g, i, j] = where({_HIDDEN}, 0, u[b, h, g, i, j] / sum[n](u[b, h, g, i, n]));"
)
"""The softmax of the scores of the keys that a query sees."""
_RANGE_OPERANDS = "first: int, end: int; scale: float, causal: int = 0"


def _attention_ranges_gradient(of: Application) -> Sequence[Tensor | None]:
    return *ATTENTION_RANGES_GRAD(of.grad, *of.operands, **of.attributes), None, None


ATTENTION_RANGES = Operator(
    f"attention_ranges(q, k, v, {_RANGE_OPERANDS})  {_RANGE_PROBABILITIES}"
    "  out[b, (h g), i, d] = sum[t](p[b, h, g, i, t] * v[b, h, t, d])",
    gradient=_attention_ranges_gradient,
)
"""
`attention` in which query i of sample b sees the keys at positions `first[b, i]` to `end[b, i] - 1`: the document it is
part of, where samples are packed of several; a sliding window; what is before it. A query that sees none gets zeros.
With `causal` 1 no query sees a key after itself: the result does not depend on it, but prices do (`cost.masks`).
"""

ATTENTION_RANGES_GRAD = Operator(
    f"attention_ranges_grad(y, q, k, v, {_RANGE_OPERANDS})  {_RANGE_PROBABILITIES}"
    "  let dp[b, h, g, i, t] = sum[d](y[b, (h g), i, d] * v[b, h, t, d]);"
    "  let ds[b, h, g, i, t] = scale * p[b, h, g, i, t]"
    " * (dp[b, h, g, i, t] - sum[w](p[b, h, g, i, w] * dp[b, h, g, i, w]));"
    f"{_GRADIENTS}"
)
"""The gradients of queries, keys and values of `attention_ranges`; the probabilities are computed again."""

RANGE_SAVING = (
    f"{_RANGE_PROBABILITIES}{OUT};"
    "  logsum: sums [b, (h g), i] = maximum(max[m](s[b, h, g, i, m])"
    " + log(sum[n](exp(s[b, h, g, i, n] - max[m](s[b, h, g, i, m])))), -1e20)"
)
ATTENTION_RANGES_SAVING = Operator(
    f"attention_ranges_saving(q, k, v, {_RANGE_OPERANDS}, sums: dtype = f32)  {RANGE_SAVING}"
)
"""
`attention_ranges`, and the logarithm of what every row's exponentials sum to, which a backward can read; -1e20 where a
query sees nothing.
"""

RANGE_SAVED_GRADIENTS = (
    f"{_RANGE_SCORES}"
    f"  let p[b, h, g, i, j] = where({_HIDDEN}, 0, exp(s[b, h, g, i, j] - logsum[b, (h g), i]));"
    "  let dp[b, h, g, i, t] = sum[d](y[b, (h g), i, d] * v[b, h, t, d]);"
    "  let ds[b, h, g, i, t] = scale * p[b, h, g, i, t]"
    " * (dp[b, h, g, i, t] - sum[x](y[b, (h g), i, x] * a[b, (h g), i, x]));"
    f"{_GRADIENTS}"
)
ATTENTION_RANGES_SAVED_GRAD = Operator(
    f"attention_ranges_saved_grad(y, q, k, v, first: int, end: int, a, logsum; scale: float, causal: int = 0)"
    f"  {RANGE_SAVED_GRADIENTS}"
)
"""`attention_ranges_grad` from the result of the forward, `a`, and the logarithms it has saved."""

_CAPPED = f"let z[b, h, g, i, j] = tanh({PRODUCT} / cap);"
_CAPPED_SCORES = f"{_CAPPED}  let s[b, h, g, i, j] = where(gt(causal * (j - i), 0), -1e30, cap * z[b, h, g, i, j]);"
"""The scores, kept between -cap and cap (Gemma 2: Gemma Team, 2024, section 2)."""
_CAPPED_RANGES = f"{_CAPPED}  let s[b, h, g, i, j] = where({_HIDDEN}, -1e30, cap * z[b, h, g, i, j]);"
_CAP = "scale: float, cap: float, causal: int = 0"
_CAP_OPERANDS = f"first: int, end: int; {_CAP}"


def _capped(text: str, scores: str, of: str) -> str:
    """
    Return the text of lines of attention whose scores are capped, given those with the scores `of`: the gradient of a
    score is times the derivative of the cap.
    """
    own = "ds[b, h, g, i, t] = scale * p[b, h, g, i, t]"
    return text.replace(of, scores).replace(own, f"{own} * (1 - z[b, h, g, i, t] * z[b, h, g, i, t])")


def _attention_capped_gradient(of: Application) -> Sequence[Tensor | None]:
    return ATTENTION_CAPPED_GRAD(of.grad, *of.operands, **of.attributes)


ATTENTION_CAPPED = Operator(
    f"attention_capped(q, k, v; {_CAP})  {_capped(_PROBABILITIES, _CAPPED_SCORES, _SCORES)}{OUT}",
    gradient=_attention_capped_gradient,
)
"""`attention` with scores kept between -cap and cap by a tanh, before the mask."""

ATTENTION_CAPPED_GRAD = Operator(
    f"attention_capped_grad(y, q, k, v; {_CAP})  {_capped(f'{_PROBABILITIES}{BACKWARD}', _CAPPED_SCORES, _SCORES)}"
)
"""The gradients of queries, keys and values of `attention_capped`; the probabilities are computed again."""

ATTENTION_CAPPED_SAVING = Operator(
    f"attention_capped_saving(q, k, v; {_CAP}, sums: dtype = f32)"
    f"  {_capped(_PROBABILITIES, _CAPPED_SCORES, _SCORES)}{OUT};{LOGSUM}"
)
"""`attention_capped`, and the logarithm of what every row's exponentials sum to, which a backward can read."""

ATTENTION_CAPPED_SAVED_GRAD = Operator(
    f"attention_capped_saved_grad(y, q, k, v, a, logsum; {_CAP})"
    f"  {_capped(f'{_SCORES}{SAVED_BACKWARD}', _CAPPED_SCORES, _SCORES)}"
)
"""`attention_capped_grad` from the result of the forward, `a`, and the logarithms it has saved."""


def _capped_ranges_gradient(of: Application) -> Sequence[Tensor | None]:
    return *ATTENTION_CAPPED_RANGES_GRAD(of.grad, *of.operands, **of.attributes), None, None


ATTENTION_CAPPED_RANGES = Operator(
    f"attention_capped_ranges(q, k, v, {_CAP_OPERANDS})"
    f"  {_capped(_RANGE_PROBABILITIES, _CAPPED_RANGES, _RANGE_SCORES)}{OUT}",
    gradient=_capped_ranges_gradient,
)
"""`attention_ranges` with capped scores, as of Gemma 2's sliding windows."""

ATTENTION_CAPPED_RANGES_GRAD = Operator(
    f"attention_capped_ranges_grad(y, q, k, v, {_CAP_OPERANDS})"
    f"  {_capped(f'{_RANGE_PROBABILITIES}{BACKWARD}', _CAPPED_RANGES, _RANGE_SCORES)}"
)
"""The gradients of queries, keys and values of `attention_capped_ranges`."""

ATTENTION_CAPPED_RANGES_SAVING = Operator(
    f"attention_capped_ranges_saving(q, k, v, {_CAP_OPERANDS}, sums: dtype = f32)"
    f"  {_capped(RANGE_SAVING, _CAPPED_RANGES, _RANGE_SCORES)}"
)
"""`attention_capped_ranges`, and the logarithm of what every row's exponentials sum to."""

ATTENTION_CAPPED_RANGES_SAVED_GRAD = Operator(
    f"attention_capped_ranges_saved_grad(y, q, k, v, first: int, end: int, a, logsum; {_CAP})"
    f"  {_capped(RANGE_SAVED_GRADIENTS, _CAPPED_RANGES, _RANGE_SCORES)}"
)
"""`attention_capped_ranges_grad` from the result of the forward, `a`, and the logarithms it has saved."""

SAVINGS = (
    Saving(
        ATTENTION_CAPPED.name,
        ATTENTION_CAPPED_GRAD.name,
        ATTENTION_CAPPED_SAVING.name,
        ATTENTION_CAPPED_SAVED_GRAD.name,
    ),
    Saving(
        ATTENTION_CAPPED_RANGES.name,
        ATTENTION_CAPPED_RANGES_GRAD.name,
        ATTENTION_CAPPED_RANGES_SAVING.name,
        ATTENTION_CAPPED_RANGES_SAVED_GRAD.name,
    ),
    Saving(ATTENTION.name, ATTENTION_GRAD.name, ATTENTION_SAVING.name, ATTENTION_SAVED_GRAD.name),
    Saving(
        ATTENTION_RANGES.name,
        ATTENTION_RANGES_GRAD.name,
        ATTENTION_RANGES_SAVING.name,
        ATTENTION_RANGES_SAVED_GRAD.name,
    ),
    Saving(
        ATTENTION_DROPOUT.name,
        ATTENTION_DROPOUT_GRAD.name,
        ATTENTION_DROPOUT_SAVING.name,
        ATTENTION_DROPOUT_SAVED_GRAD.name,
    ),
)

ROTARY = Operator(
    "rotary(x; base: float = 10000.0, direction: float = 1.0)"
    "  let angle[s, i] = s * exp(-i * log(base) / size(i));"
    "  out[b.., s, (p i)] = x[b.., s, (p i)] * cos(angle[s, i])"
    " + direction * sin(angle[s, i]) * sum[q](where(eq(p + q, 1), (2 * p - 1) * x[b.., s, (q i)], 0))"
    "  where size(p) = 2, size(q) = 2",
    gradient=lambda of: (
        ROTARY.one(of.grad, base=of.attributes["base"], direction=-float(str(of.attributes["direction"]))),
    ),
)
"""Rotary position embedding: the two halves of the last dim turned by an angle that grows with the position."""

ROTARY_AT = Operator(
    "rotary_at(x, at: int; base: float = 10000.0, direction: float = 1.0)"
    "  let angle[b, s, i] = at[b, s] * exp(-i * log(base) / size(i));"
    "  out[b, h.., s, (p i)] = x[b, h.., s, (p i)] * cos(angle[b, s, i])"
    " + direction * sin(angle[b, s, i]) * sum[q](where(eq(p + q, 1), (2 * p - 1) * x[b, h.., s, (q i)], 0))"
    "  where size(p) = 2, size(q) = 2",
    gradient=lambda of: (
        ROTARY_AT.one(
            of.grad, of.operands[1], base=of.attributes["base"], direction=-float(str(of.attributes["direction"]))
        ),
        None,
    ),
)
"""`rotary` of x [b, h.., s, 2 i] by given positions [b, s], such as those within documents."""

OPERATORS = (
    *(ATTENTION, ATTENTION_GRAD, ATTENTION_SAVING, ATTENTION_SAVED_GRAD, ROTARY, ROTARY_AT),
    *(ATTENTION_CAPPED, ATTENTION_CAPPED_GRAD, ATTENTION_CAPPED_SAVING, ATTENTION_CAPPED_SAVED_GRAD),
    *(ATTENTION_CAPPED_RANGES, ATTENTION_CAPPED_RANGES_GRAD),
    *(ATTENTION_CAPPED_RANGES_SAVING, ATTENTION_CAPPED_RANGES_SAVED_GRAD),
    *(ATTENTION_RANGES, ATTENTION_RANGES_GRAD, ATTENTION_RANGES_SAVING, ATTENTION_RANGES_SAVED_GRAD),
    *(ATTENTION_DROPOUT, ATTENTION_DROPOUT_GRAD, ATTENTION_DROPOUT_SAVING, ATTENTION_DROPOUT_SAVED_GRAD),
)
