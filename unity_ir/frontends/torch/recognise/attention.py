"""Recognise attention that is written out: a softmax of scaled scores, masked or not, times the values."""

from __future__ import annotations

import torch

from unity_ir.frontends.torch.masks import is_causal_mask, ranges_of_mask, visible
from unity_ir.frontends.torch.recognise.match import factor_of, made_by, uncast
from unity_ir.frontends.torch.site import Tables
from unity_ir.frontends.torch.values import expand, op
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

    `weights` must be `softmax(scale * q k^T)`, of four dims, or `softmax(cap * tanh(scale / cap * q k^T))`, without a
    mask, or with one that is added or selects far scores: a causal one, or one that lets every query see keys next to
    each other, the same in all heads. The softmax may be in a wider element type. `tables` has the elements of masks
    that are known at import.
    """
    for scores in made_by(uncast(weights), "softmax"):
        scores = uncast(scores)
        if scores.type.dtype != weights.type.dtype or len(scores.shape) != 4:
            return None
        name, attributes, limits = "attention", dict[str, float]({"causal": 0}), list[Value]()
        if scores.node.op in ("add", "select"):
            found = _masked(scores, tables)
            if found is None:
                return None
            scores, seen = found
            name, attributes["causal"], limits = _limits(seen, scores, tables)
            if not name:
                return None
        scores, by = factor_of(scores)
        for capped in made_by(scores, "tanh") if by > 0 else ():
            scores, inner = factor_of(capped)
            name, attributes["cap"], by = name.replace("attention", "attention_capped", 1), by, inner * by
        if scores.node.op == "batch_matmul_nt":
            q, k = scores.node.operands
            narrow_k, narrow_v = undo_repeat_kv(k), undo_repeat_kv(v)
            if narrow_k.shape[1] == narrow_v.shape[1]:
                k, v = narrow_k, narrow_v
            return op(name, q, k, v, *limits, scale=by, **attributes)
    return None


def _masked(scores: Value, tables: Tables) -> tuple[Value, torch.Tensor] | None:
    """
    Return (scores, booleans that are True where a query may see a key) of scores to which a mask adds numbers near
    minus infinity, or in place of which it selects one. None for another mask, or one that is not known at import.
    """
    if scores.node.op == "select":
        mask, inner, far = scores.node.operands
        if far.node.op != "constant" or far.node.attribute("value") > FARTHEST:
            return None
    else:
        inner, mask = scores.node.operands
    table = tables.values.get(mask.node.name) if mask.node.op == "input" else None
    seen = None if table is None else visible(table)
    return None if seen is None else (inner, seen)


def _limits(seen: torch.Tensor, scores: Value, tables: Tables) -> tuple[str, int, list[Value]]:
    """
    Return (name of the operator, whether it is causal, the limits of the keys that each query sees) of attention under
    a mask; the name is empty if there is no operator. A query that sees no key has none: it sees all of them alike.
    """
    batch, _, queries, keys = scores.shape
    if is_causal_mask(seen, queries, keys):
        return "attention", 1, []
    ranges = ranges_of_mask(seen, batch, queries, keys) if bool(seen.any(-1).all()) else None
    if ranges is None:
        return "", 0, []
    past = queries == keys and bool((ranges[1] <= torch.arange(queries) + 1).all())
    return "attention_ranges", int(past), [expand(tables.add(limit), (batch, queries)) for limit in ranges]
