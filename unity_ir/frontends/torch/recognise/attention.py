"""Recognise attention that is written out: a softmax of scaled scores, masked or not, times the values."""

from __future__ import annotations

from unity_ir.frontends.torch.masks import is_causal_mask, visible
from unity_ir.frontends.torch.recognise.match import made_by, number_of, uncast
from unity_ir.frontends.torch.site import Tables
from unity_ir.frontends.torch.values import op
from unity_ir.pcg.graph import Value

FARTHEST = -1e9
"""Scores of masked keys in models: from here down, a softmax gives them no weight, unless it gives none any."""


def undo_repeat_kv(x: Value) -> Value:
    """
    Undo grouped-query attention's repetition of heads (`repeat_kv`): given keys or values [b, heads, s, d], return [b,
    kv heads, s, d], from which they were made by repeating each head for a group of queries' heads. Returns `x` itself
    if they were not made so.
    """
    for wide in made_by(x, "reshape"):
        if wide.node.op == "expand" and wide.node.attribute("dim") == 2 and len(wide.node.attribute("sizes")) == 1:
            (narrow,) = wide.node.operands
            if len(narrow.shape) == 4 and x.shape == (narrow.shape[0], wide.shape[1] * wide.shape[2], *x.shape[2:]):
                return narrow
    return x


def attention(weights: Value, v: Value, tables: Tables) -> Value | None:
    """
    Return an attention operator that computes the matrix product of `weights` and `v`; None if `weights` is not a
    softmax of scaled scores.

    `weights` must be `softmax(scale * q k^T)`, of four dims, without a mask or with a causal one, which is added or
    selects far scores; the softmax may be in a wider element type. `tables` has the elements of masks that are known at
    import.
    """
    for scores in made_by(uncast(weights), "softmax"):
        scores = uncast(scores)
        if scores.type.dtype != weights.type.dtype:
            return None
        causal = 0
        if scores.node.op in ("add", "select"):
            found = _masked(scores, tables)
            if found is None:
                return None
            scores, causal = found, 1
        scores, by = number_of(scores, "scale", "by") or (scores, 1.0)
        if scores.node.op == "batch_matmul_nt" and len(scores.shape) == 4:
            q, k = scores.node.operands
            narrow_k, narrow_v = undo_repeat_kv(k), undo_repeat_kv(v)
            if narrow_k.shape[1] == narrow_v.shape[1]:
                k, v = narrow_k, narrow_v
            return op("attention", q, k, v, scale=by, causal=causal)
    return None


def _masked(scores: Value, tables: Tables) -> Value | None:
    """
    Return what a causal mask is laid over: the scores to which it adds numbers near minus infinity, or in place of
    which it selects one. None for another mask, or one that is not known at import.
    """
    if scores.node.op == "select":
        mask, inner, far = scores.node.operands
        if far.node.op != "constant" or far.node.attribute("value") > FARTHEST:
            return None
    else:
        inner, mask = scores.node.operands
    table = tables.values.get(mask.node.name) if mask.node.op == "input" else None
    seen = None if table is None else visible(table)
    return inner if seen is not None and is_causal_mask(seen, scores.shape[-2], scores.shape[-1]) else None
