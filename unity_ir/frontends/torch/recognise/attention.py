"""Recognise attention that is written out: a softmax of scaled scores, masked or not, times the values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch

from unity_ir.frontends.torch.masks import FARTHEST, is_causal_mask, ranges_of_mask, visible
from unity_ir.frontends.torch.recognise.match import factor_of, made_by, unwidened
from unity_ir.frontends.torch.site import Tables
from unity_ir.frontends.torch.values import expand, op, reshape
from unity_ir.pcg.node import Value


def undo_repeat_kv(x: Value) -> Value:
    """
    Undo grouped-query attention's repetition of heads (`repeat_kv`): given keys or values [b, heads, s, d], return [b,
    kv heads, s, d], from which they were made by repeating each head for a group of queries' heads, or one for all.
    Returns `x` itself if they were not made so.
    """
    for narrow in made_by(x, "expand"):
        if len(x.shape) == 4 and (x.node.attribute("dim"), len(x.node.attribute("sizes"))) == (1, 1):
            return reshape(narrow, (x.shape[0], 1, *x.shape[2:]))
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

    `weights` must be `softmax(scale * q k^T)`, or `softmax(cap * tanh(scale / cap * q k^T))`, without a mask, or with
    one that is added or selects far scores: a causal one, or one that lets every query see keys next to each other, the
    same in all heads. Scores and their softmax may be in a wider element type; without a cap, and with no mask but a
    causal one, weights may be dropped after it. All have four dims, or three where batch and heads are one, and may be
    reshaped from one to the other. `tables` has the elements of masks that are known at import.
    """
    dropped, drop = _undropped(weights)
    for scores in made_by(dropped, "softmax"):
        if len(scores.shape) not in (3, 4):
            return None
        masked, seen = scores, None
        while (found := _unmasked(unwidened(masked), tables)) is not None:
            masked, more = found
            seen = more if seen is None else seen & more
        inner, by = _scaled(masked)
        attributes = dict[str, float]({"causal": 0})
        for capped in made_by(inner, "tanh") if by > 0 else ():
            inner, within = _scaled(capped)
            attributes["cap"], by = by, within * by
        if inner.node.op != "batch_matmul_nt":
            return None
        dtype = weights.type.dtype
        q, k = (x if x.type.dtype == dtype else unwidened(x) for x in inner.node.operands)
        if not q.type.dtype == k.type.dtype == dtype:
            return None
        lead = scores.shape[:-2] if len(scores.shape) == 4 else _lead(q)
        q, k, v = (reshape(x, (*lead, *x.shape[-2:])) for x in (q, k, v))
        limited = (
            ("", 0, list[Value]()) if seen is None else _limits(_by_heads(seen, scores, lead), lead, scores, tables)
        )
        if limited is None:
            return None
        ranges, attributes["causal"], limits = limited
        if drop and (ranges or "cap" in attributes):
            return None
        narrow_k, narrow_v = undo_repeat_kv(k), undo_repeat_kv(v)
        if narrow_k.shape[1] == narrow_v.shape[1]:
            k, v = narrow_k, narrow_v
        name = f"attention{'_capped' * ('cap' in attributes)}{'_dropout' * bool(drop)}{ranges}"
        made = op(name, q, k, v, *limits, scale=by, **attributes, **drop)
        return reshape(made, (*weights.shape[:-1], v.shape[-1]))
    return None


def _undropped(weights: Value) -> tuple[Value, dict[str, float]]:
    """
    Return (what weights were before elements were dropped, cast, and leading dims reshaped; attributes of the dropout,
    none if there is none or more than one).
    """
    value, drop = weights, dict[str, float]()
    while value.node.op in ("cast", "dropout") or _reshapes_lead(value):
        if value.node.op == "dropout":
            if drop:
                break
            drop = {"drop": value.node.attribute("p"), "seed": value.node.attribute("seed")}
        (value,) = value.node.operands
    return value, drop


def _reshapes_lead(value: Value) -> bool:
    """Return whether a value is a reshape of dims before the last two."""
    return value.node.op == "reshape" and value.node.operands[0].shape[-2:] == value.shape[-2:]


def _scaled(value: Value) -> tuple[Value, float]:
    """
    Return (x, factor) such that a value is `factor * x`, through reshapes of dims before the last two and casts to
    wider element types.
    """
    value, factor = factor_of(value)
    while (before := value.node.operands[0] if _reshapes_lead(value) else unwidened(value)) != value:
        value, by = factor_of(before)
        factor *= by
    return value, factor


def _lead(q: Value) -> tuple[int, int]:
    """Return (batch, heads) of queries [batch * heads, s, e]: as before a reshape merged them, else one head."""
    before = q.node.operands[0] if _reshapes_lead(q) else q
    return before.shape[:2] if len(before.shape) == 4 else (q.shape[0], 1)


def _unmasked(scores: Value, tables: Tables) -> tuple[Value, torch.Tensor] | None:
    """
    Return (scores, booleans that are True where a query may see a key) of scores to which a mask adds numbers near
    minus infinity, or in place of which it selects one. None for others, and where the mask is not known at import.
    """

    def known(mask: Value) -> torch.Tensor | None:
        return tables.values.get(mask.node.name) if mask.node.op == "input" else None

    node = scores.node
    if node.op == "select":
        mask, one, other = node.operands
        table = known(mask)
        for inner, far, is_kept in ((one, other, True), (other, one, False)):
            is_far = far.node.op == "constant" and far.node.attribute("value") <= FARTHEST
            if table is not None and is_far:
                return inner, table if is_kept else ~table
    if node.op in ("add", "sub"):
        one, other = node.operands
        for inner, mask in ((one, other), *([(other, one)] if node.op == "add" else [])):
            table = known(mask)
            seen = None if table is None else visible(table if node.op == "add" else -table)
            if seen is not None:
                return _unzeroed(inner, seen, known), seen
    return None


def _unzeroed(scores: Value, seen: torch.Tensor, known: Callable[[Value], torch.Tensor | None]) -> Value:
    """
    Return scores before those that no query sees were multiplied by 0, and others by 1, as the first GPT did; the given
    ones otherwise. `known` returns the elements of a table.
    """
    for one, other in combinations(made_by(scores, "mul"), 2):
        for inner, factors in ((one, other), (other, one)):
            table = known(factors)
            if table is not None and table.shape == seen.shape and bool((table == seen).all()):
                return inner
    return scores


def _by_heads(seen: torch.Tensor, scores: Value, lead: tuple[int, ...]) -> torch.Tensor:
    """Return a mask that broadcasts to [batch, heads, s, t], given one that broadcasts to scores of three or four."""
    if seen.dim() < 3 or len(scores.shape) == 4:
        return seen
    return seen[0] if seen.shape[0] == 1 else seen.reshape(*lead, *seen.shape[-2:])


def _limits(
    seen: torch.Tensor, lead: tuple[int, ...], scores: Value, tables: Tables
) -> tuple[str, int, list[Value]] | None:
    """
    Return (how the operator's name ends, whether it is causal, the limits of the keys that each query sees) of
    attention under a mask; None if there is no operator. A query that sees no key has none: it sees all of them alike.
    `lead` are the numbers of batches and heads.
    """
    queries, keys = scores.shape[-2:]
    if bool(seen.all()):
        return "", 0, []
    if is_causal_mask(seen, queries, keys):
        return "", 1, []
    ranges = ranges_of_mask(seen, lead[0], queries, keys) if bool(seen.any(-1).all()) else None
    if ranges is None:
        return None
    past = queries == keys and bool((ranges[1] <= torch.arange(queries) + 1).all())
    return "_ranges", int(past), [expand(tables.add(limit), (lead[0], queries)) for limit in ranges]
