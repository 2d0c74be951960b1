"""
Map scaled-dot-product attention, embedding and dropout from ATen operators to the compiler's. Each mapping gets the
call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns the result
as a value of the compiler's graph, or several.
"""

from __future__ import annotations

from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import add, scale, where
from unity_ir.frontends.torch.masks import is_causal_mask, ranges_of_mask, visible
from unity_ir.frontends.torch.recognise.attention import undo_repeat_kv
from unity_ir.frontends.torch.site import CallSite, maps, number
from unity_ir.frontends.torch.values import Operand, constant, cut, expand, is_bool, op, reshape
from unity_ir.pcg.node import Value

FAR = -1e30
"""The score of masked positions, and the least addend of a mask; minus infinity would make 0 * inf."""


@maps("scaled_dot_product_attention")
def attention(
    site: CallSite,
    q: Value,
    k: Operand,
    v: Operand,
    mask: Operand | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """
    Map PyTorch's scaled-dot-product attention of queries [b.., h, i, e], keys [b.., h, j, e] and values [b.., h, j, d];
    return [b.., h, i, d].

    `mask` is boolean (True where a key may be seen) or added to the scores; `dropout_p` is the probability of dropping
    a weight, `scale` the factor of the scores (None: 1 / sqrt(e)); with `enable_gqa`, keys and values may have fewer
    heads. Builds one attention operator where there is no mask, or one that is all true or causal, or lets every query
    see keys next to each other, the same in all heads (a sliding window, documents); else products and a softmax.
    """
    k, v = site.value(k), site.value(v)
    by = q.shape[-1] ** -0.5 if scale is None else float(scale)
    causal = is_causal
    if isinstance(mask, torch.Tensor):
        seen = visible(mask)
        if seen is not None and bool(seen.all()):
            mask = None
        elif seen is not None and is_causal_mask(seen, q.shape[-2], k.shape[-2]):
            mask, causal = None, True
    ranges: tuple[torch.Tensor, torch.Tensor] | None = None
    if mask is not None or (causal and q.shape[-2] != k.shape[-2]):
        if causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        if isinstance(mask, torch.Tensor) and not dropout_p:
            ranges = _ranges(mask, q, k)
        if ranges is None:
            return _by_products(site, q, k, v, mask, dropout_p, by, enable_gqa)
    if not enable_gqa:
        lead = site.shape[:-2]
        q, k, v = (expand(x, (*lead, *x.shape[-2:])) for x in (q, k, v))
    q, k, v = (reshape(x, (prod(x.shape[:-3]), *_heads(x), *x.shape[-2:])) for x in (q, k, v))
    if undo_repeat_kv(k).shape[1] == undo_repeat_kv(v).shape[1]:
        k, v = undo_repeat_kv(k), undo_repeat_kv(v)
    if ranges is not None:
        first, end = (expand(site.value(limit), (q.shape[0], q.shape[2])) for limit in ranges)
        past = q.shape[2] == k.shape[2] and bool((ranges[1] <= torch.arange(q.shape[2]) + 1).all())
        return reshape(op("attention_ranges", q, k, v, first, end, scale=by, causal=int(past)), site.shape)
    if dropout_p:
        drop = {"drop": float(dropout_p), "seed": site.seeds()}
        return reshape(op("attention_dropout", q, k, v, scale=by, causal=int(causal), **drop), site.shape)
    return reshape(op("attention", q, k, v, scale=by, causal=int(causal)), site.shape)


def _ranges(mask: torch.Tensor, q: Value, k: Value) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the range of keys that each query sees by a mask (`ranges_of_mask`); None if it shows no ranges."""
    seen = visible(mask)
    # A query to all of whose scores a large number is added sees all keys alike.
    if seen is None or not (is_bool(mask) or bool(seen.any(-1).all())):
        return None
    return ranges_of_mask(seen, prod(q.shape[:-3]), q.shape[-2], k.shape[-2])


def _heads(x: Value) -> tuple[int, ...]:
    """Return (heads,) of a value [b.., h, s, e]; (1,) of [s, e]."""
    return x.shape[-3:-2] or (1,)


def _by_products(
    site: CallSite, q: Value, k: Value, v: Value, mask: Operand | None, dropout_p: float, by: float, enable_gqa: bool
) -> Value:
    if enable_gqa and (group := q.shape[-3] // k.shape[-3]) > 1:
        k, v = (_repeat_heads(x, group) for x in (k, v))
    lead = site.shape[:-2]
    q, k, v = (expand(x, (*lead, *x.shape[-2:])) for x in (q, k, v))
    scores = scale(op("batch_matmul_nt", q, k), by)
    inner = site.of(scores)
    seen: Operand | None = mask if mask is not None and is_bool(mask) else None
    if isinstance(mask, torch.Tensor) and bool((mask == -torch.inf).any()):
        seen, mask = mask != -torch.inf, mask.clamp(min=FAR)
    if mask is not None:
        scores = where(inner, mask, scores, FAR) if is_bool(mask) else add(inner, scores, mask)
    weights = op("softmax", scores)
    if seen is not None and not (isinstance(seen, torch.Tensor) and bool(seen.any(-1).all())):
        # A query that sees nothing gets zeros from PyTorch.
        weights = where(inner, seen, weights, 0.0)
    return op("batch_matmul", dropout(site, weights, dropout_p, True), v)


def _repeat_heads(x: Value, group: int) -> Value:
    *lead, heads, size, width = x.shape
    wide = expand(reshape(x, (*lead, heads, 1, size, width)), (*lead, heads, group, size, width))
    return reshape(wide, (*lead, heads * group, size, width))


@maps("embedding")
def embedding(
    site: CallSite,
    table: Operand,
    ids: Operand,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """
    Map PyTorch's embedding, the rows of `table` [rows, width] at `ids` [..]; return [.., width].

    Ids known at import that count up, as positions do, become a slice of the table. As in PyTorch, the row
    `padding_idx` gets no gradient (-1: every row gets one). `sparse`, the form in which PyTorch stores the gradient,
    has no effect. Raises `UnityError` for `scale_grad_by_freq`.
    """
    del sparse
    if scale_grad_by_freq:
        raise UnityError("scale_grad_by_freq has no operator")
    rows = site.value(table, site.dtype)
    if isinstance(ids, torch.Tensor):
        return _known_rows(site, rows, ids, padding_idx)
    base = site.value(ids)
    if base.node.op == "reshape":
        (base,) = base.node.operands
    out = op("embedding", base, rows)
    if padding_idx >= 0 and site.trained(rows):
        inner = site.of(out)
        padding = op("eq", base, site.value(torch.tensor(padding_idx, dtype=torch.int64)))
        padding = reshape(padding, (*base.shape, 1))
        out = where(inner, padding, op("detach", out), out)
    return reshape(out, site.shape)


def _known_rows(site: CallSite, rows: Value, ids: torch.Tensor, padding_idx: int) -> Value:
    if padding_idx >= 0 and bool((ids == padding_idx).any()) and site.trained(rows):
        row = torch.arange(rows.shape[0])[:, None] == padding_idx
        rows = where(site.of(rows), row, op("detach", rows), rows)
    flat = ids.reshape(-1)
    # Rows that repeat over the leading dims, as positions over a batch, are cut once.
    while ids.dim() > 1 and torch.equal(ids, ids[:1].expand_as(ids)):
        ids = ids[0]
    flat = ids.reshape(-1)
    first = int(flat[0])
    width = rows.shape[-1]
    if number(flat) is not None:
        return expand(reshape(cut(rows, 0, first, 1), (width,)), site.shape)
    if torch.equal(flat, torch.arange(first, first + len(flat))):
        return expand(reshape(cut(rows, 0, first, len(flat)), (*ids.shape, width)), site.shape)
    return expand(op("embedding", site.value(ids), rows), site.shape)


@maps("embedding_bag", "_embedding_bag")
def embedding_bag(
    site: CallSite,
    table: Operand,
    ids: Operand,
    offsets: Operand,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Operand | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> tuple[Value | None, ...]:
    """
    Map PyTorch's embedding_bag: for each bag, a run of `ids` [n], return the sum (`mode` 0) or mean (`mode` 1) of the
    rows of `table` [rows, width] at its ids.

    `offsets` are the positions in `ids` at which the bags begin; with `include_last_offset`, also that at which the
    last bag ends. Bags may be of different sizes; an empty one gives 0. `weights` [n] scale the rows before they are
    added up.

    Returns ([bags, width], None, None, None): PyTorch's other outputs have no mapping. Raises `UnityError` for a
    `padding_idx`, `scale_grad_by_freq` and the maximum (`mode` 2); `sparse` has no effect.
    """
    del sparse
    if scale_grad_by_freq or mode == 2 or (padding_idx is not None and padding_idx >= 0):
        raise UnityError("only sums and means have an operator, without padding_idx and scale_grad_by_freq")
    rows = site.value(table, site.dtype)
    flat = site.value(ids)
    bags, count = site.shape[0], flat.shape[0]
    size = count // bags
    starts = torch.arange(0, bags * size + (size if include_last_offset else 0), size or 1)
    if weights is None and size and isinstance(offsets, torch.Tensor) and torch.equal(offsets, starts):
        out = op("embedding_bag", reshape(flat, (bags, size)), rows)
        return (scale(out, 1 / size) if mode == 1 else out), None, None, None
    each = op("embedding", flat, rows)
    if weights is not None:
        each = op("mul", each, reshape(site.value(weights, site.dtype), (count, 1)))
    # A position is in the last bag that begins at it or before.
    starts = reshape(cut(site.value(offsets, "i64"), 0, 0, bags), (1, bags))
    begun = op("le", expand(starts, (count, bags)), site.value(torch.arange(count)[:, None]))
    bag = op("shift", op("reduce_sum", op("cast", begun, to="i64"), dim=1), by=-1.0)
    whole: dict[str, int | tuple[int, ...]] = {"dim": 0, "size": bags, "degrees": (1,)}
    out = op("index_select_grad", each, bag, **whole)
    if mode == 1:
        members = op("index_select_grad", constant(1.0, (count,), site.dtype), bag, **whole)
        out = op("div", out, reshape(op("maximum", members, constant(1.0, (), site.dtype)), (bags, 1)))
    return out, None, None, None


@maps("dropout")
def dropout(site: CallSite, x: Operand, p: float, train: bool) -> Operand:
    """
    Map PyTorch's dropout: zero elements with probability `p`, and divide the others by 1 - p; unless `train`, return
    `x` itself. Each call has a seed of its own; masks differ from PyTorch's.
    """
    return x if p == 0 or not train else op("dropout", site.value(x), p=float(p), seed=site.seeds())


@maps("native_dropout")
def native_dropout(site: CallSite, x: Value, p: float, train: bool | None) -> tuple[Value | None, ...]:
    """
    Map PyTorch's dropout with probability `p`, applied unless `train` is False; return (result, None): the mask,
    PyTorch's second result, has no mapping.
    """
    return dropout(site, x, p, train is not False), None
