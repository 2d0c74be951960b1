"""
Map operators that pick or place elements by indices from ATen to the compiler's. Each mapping gets the call's `site`
(what PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns the result as a value of
the compiler's graph, or several.

Where PyTorch leaves open which of several elements placed at one index stays, their mean does: of equal ones, each of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import scale, where
from unity_ir.frontends.torch.memory import placed
from unity_ir.frontends.torch.recognise.match import uncast
from unity_ir.frontends.torch.site import CallSite, cast, maps, require_value
from unity_ir.frontends.torch.values import (
    Operand,
    Shape,
    broadcast,
    constant,
    cut,
    expand,
    is_bool,
    op,
    permute,
    reshape,
    results,
    shape_of,
    swap,
)
from unity_ir.pcg.node import Value


@maps("index_select")
def index_select(site: CallSite, x: Operand, dim: int, index: Operand) -> Value:
    """
    Map PyTorch's index_select: the slices of `x` at the positions `index` [n] along dim `dim`, so that the result has
    size n there.
    """
    value = site.value(x)
    return op("index_select", value, site.value(index, "i64"), dim=dim % len(value.shape))


def _beside(x: Value, shape: Shape, dim: int) -> Value:
    """Return the first elements of `x` along all dims but `dim`, as many as an index of shape `shape` has there."""
    for d, size in enumerate(shape):
        x = cut(x, d, 0, size) if d != dim else x
    return x


@maps("gather")
def gather(site: CallSite, x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Value:
    """
    Map `torch.gather`: for `dim` 0, result[i, j, k] = x[index[i, j, k], j, k]; `index` gives the position along `dim`,
    the others stay. The result has the shape of `index`. `sparse_grad`, the form in which PyTorch stores the gradient,
    has no effect.
    """
    del sparse_grad
    value = site.value(x)
    dim %= len(value.shape)
    return op("gather", _beside(value, site.shape, dim), site.value(index, "i64"), dim=dim)


# Placing at an index of the shape of what is placed


@maps("scatter_add")
def scatter_add(site: CallSite, x: Operand, dim: int, index: Operand, source: Operand) -> Value:
    """
    Map PyTorch's scatter_add: for `dim` 0, x[index[i, j, k], j, k] += source[i, j, k]; `index` gives the position along
    `dim`, the others stay. Returns the changed `x`. `index` is as large as `source` or smaller; elements of `source`
    beyond it are not read.
    """
    return scatter_reduce(site, x, dim, index, source, "sum")


@maps("scatter")
def scatter(
    site: CallSite, x: Operand, dim: int, index: Operand, source: Operand, *, reduce: str | None = None
) -> Value:
    """
    Map PyTorch's scatter: for `dim` 0, x[index[i, j, k], j, k] = source[i, j, k]; `index` gives the position along
    `dim`, the others stay. Returns the changed `x`. `source` is a tensor or a number. With `reduce` "add", elements are
    added instead.

    Where several elements go to one position, it gets their mean (PyTorch takes any of them). Raises `UnityError` for
    `reduce` "multiply".
    """
    if reduce is not None:
        return scatter_reduce(site, x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])
    return scatter_reduce(site, x, dim, index, source, "mean", include_self=False)


@maps("scatter_reduce")
def scatter_reduce(
    site: CallSite, x: Operand, dim: int, index: Operand, source: Operand, reduce: str, *, include_self: bool = True
) -> Value:
    """
    Map PyTorch's scatter_reduce: send each element of `source` to the position of `x` that `scatter` would write, and
    reduce the elements sent to one position by `reduce`: "sum", "mean", "amax" or "amin". With `include_self`, the
    element of `x` at that position is one of them. Positions that get none keep the element of `x`. Raises `UnityError`
    for "prod".
    """
    if reduce == "prod":
        raise UnityError("reduce 'prod' has no operator; sum logarithms")
    whole, ids = site.value(x, site.dtype), site.value(index, "i64")
    if not whole.shape:
        whole, ids = reshape(whole, (1,)), reshape(ids, (1,))
    dim %= len(whole.shape)
    value = _beside(whole, ids.shape, dim)
    source = site.value(source, site.dtype)
    if source.shape and source.shape != ids.shape:
        source = cut(_beside(source, ids.shape, dim), dim, 0, ids.shape[dim])
    source = expand(source, ids.shape)
    if source.type.dtype == "bool":
        # Of truth values, those placed hold if one of them does.
        site, reduce = site.in_floats(), "amax"
        value, source = (cast(v, "f32") for v in (value, source))

    def add(y: Value, z: Value) -> Value:
        return op("scatter_add", y, ids, z, dim=dim)

    count = add(constant(float(include_self), value.shape, "f32"), constant(1.0, source.shape, "f32"))
    seen = _compared("gt", count, 0)
    if reduce in ("amax", "amin"):
        sign = 1.0 if reduce == "amax" else -1.0
        start = value if include_self else op("select", seen, _filled(value, -sign * FAR), value)
        out = scale(op("scatter_max", scale(start, sign), ids, scale(source, sign), dim=dim), sign)
    elif reduce == "mean" and not include_self and _are_distinct(ids, dim):
        out = op("select", seen, add(_filled(value, 0.0), source), value)
    else:
        start = value if include_self else op("select", seen, _filled(value, 0.0), value)
        out = add(start, source)
        if reduce == "mean":
            least = op("select", seen, count, _filled(count, 1.0))
            out = op("div", out, cast(least, out.type.dtype)) if out.type.is_floating else _floor_div(out, least)
    out = cast(out, whole.type.dtype)
    ranges = [range(size) for size in value.shape]
    return reshape(out if value.shape == whole.shape else placed(whole, out, ranges), site.shape)


def _are_distinct(ids: Value, dim: int) -> bool:
    """Return whether indices along a dim are known to differ: those of the largest elements do."""
    return ids.node.op == "topk" and ids == ids.node.results[1] and dim == len(ids.shape) - 1


FAR = 1e30
"""Beyond all that `amax` and `amin` are of; infinity is no number that graph text holds."""


def _filled(x: Value, number: float) -> Value:
    """Return a constant of the shape and element type of `x`."""
    return constant(number, x.shape, x.type.dtype)


def _compared(name: str, x: Value, by: float) -> Value:
    return op(name, x, constant(by, (), x.type.dtype))


def _floor_div(x: Value, y: Value) -> Value:
    return cast(op("floor", op("div", cast(x, "f32"), cast(y, "f32"))), x.type.dtype)


# Indexing by tensors, `x[:, i, j]`


def _from_start(ids: Value, size: int) -> Value:
    """Return indices into a dim of `size`, of which negative ones count from its end, counted from its start."""
    return op("select", _compared("lt", ids, 0), op("int_add", ids, _filled(ids, size)), ids)


class _Indexed:
    """
    What tensors index along dims of `x`: `x` with those dims merged into one, `dim`, and the flat index into it.

    rewrite: x[a, b, c, d] at (None, i, j, None) -> x'[a, (b c), d] at i * |c| + j along dim 1
    """

    def __init__(self, site: CallSite, x: Value, indices: Sequence[Operand | None]):
        found = {d: i for d, i in enumerate(indices) if i is not None}
        given: dict[int, Operand] = {}
        for d, i in found.items():
            if is_bool(i):
                if not isinstance(i, torch.Tensor):
                    raise UnityError("a mask as an index makes a shape that depends on data; use torch.where")
                given |= dict(enumerate(i.nonzero(as_tuple=True), d))
            else:
                given[d] = i
        dims = list(given)
        apart = dims != list(range(dims[0], dims[-1] + 1))
        self.dim = 0 if apart else dims[0]
        rest = [d for d in range(len(x.shape)) if d not in given]
        self.order = [*rest[: self.dim], *dims, *rest[self.dim :]]
        self.sizes = [x.shape[d] for d in dims]
        x = permute(x, self.order)
        self.permuted = x.shape
        self.lead, self.rest = x.shape[: self.dim], x.shape[self.dim + len(dims) :]
        self.value = reshape(x, (*self.lead, prod(self.sizes), *self.rest))
        self.shape = broadcast(*given.values())
        """The shape that indices broadcast to, which the result has in place of the dims they index."""
        known = [i for i in given.values() if isinstance(i, torch.Tensor)]
        self.known = flat_index(known, self.sizes) if len(known) == len(given) else None
        """The flat index [n] if it is known at import."""
        self.ids = site.value(self.known) if self.known is not None else self._flat(site, list(given.values()))

    def _flat(self, site: CallSite, given: Sequence[Operand]) -> Value:
        counted = [
            _from_start(i, size) if isinstance(i, Value) else i for i, size in zip(given, self.sizes, strict=True)
        ]
        first, *more = (reshape(expand(site.value(i, "i64"), self.shape), (prod(self.shape),)) for i in counted)
        for ids, size in zip(more, self.sizes[1:], strict=True):
            first = op("add", scale(first, size), ids)
        return first

    def restored(self, value: Value) -> Value:
        """Return a value like `self.value` in the shape of `x`, with its dims in their own order."""
        return permute(reshape(value, self.permuted), [self.order.index(d) for d in range(len(self.order))])


@maps("index")
def index(site: CallSite, x: Operand, indices: Sequence[Operand | None]) -> Value:
    """
    Map PyTorch's indexing by tensors, such as `x[:, i, j]`: `indices` has an index tensor for each leading dim of `x`,
    or None for a dim that is not indexed. Raises `UnityError` for boolean masks that depend on the model's inputs: the
    result's size would depend on them, too.
    """
    value = site.value(x)
    (first, *more) = [i for i in indices if i is not None]
    if not more and indices[0] is not None and isinstance(first, Value) and not is_bool(first):
        return _rows(site, value, first)
    return _indexed(site, value, indices)


def _rows(site: CallSite, x: Value, ids: Value) -> Value:
    """Return the rows of `x` at indices; those that put sorted rows back are not looked up (`recognise.sorted`)."""
    orders = site.tables.orders
    if ids in orders.inverses and (known := orders.restored(x, orders.inverses[ids])) is not None:
        return reshape(known, site.shape)
    if len(x.shape) == 2:
        out = op("embedding", _from_start(site.value(ids, "i64"), x.shape[0]), x)
    else:
        out = _indexed(site, x, [ids])
    if ids in orders.quotients or ids in orders.sorted.values():
        orders.gathered[out] = x, ids
    return out


def _indexed(site: CallSite, value: Value, indices: Sequence[Operand | None]) -> Value:
    """Return the elements of a value at index tensors, as one operator of a dim that merges those they index."""
    at = _Indexed(site, value, indices)
    if at.known is not None:
        start = int(at.known[0])
        if torch.equal(at.known, torch.arange(start, start + len(at.known))):
            return reshape(cut(at.value, at.dim, start, len(at.known)), site.shape)
    return reshape(op("index_select", at.value, at.ids, dim=at.dim), site.shape)


@maps("index_put", "_unsafe_index_put")
def index_put(
    site: CallSite, x: Operand, indices: Sequence[Operand | None], source: Operand, accumulate: bool = False
) -> Value:
    """
    Map PyTorch's `x[:, i, j] = source`, or `+=` with `accumulate`; return the changed `x`. `indices` has an index
    tensor for each leading dim of `x`, or None for a dim that is not indexed.

    Where several elements go to one position, it gets their mean (PyTorch takes any of them). A boolean mask that
    depends on the model's inputs selects between `source` and `x`. Raises `UnityError` if `source` then has an element
    for each True of the mask, since its size would depend on data.
    """
    value = site.value(x, site.dtype)
    (first, *more) = [i for i in indices if i is not None]
    if isinstance(first, Value) and is_bool(first) and not more and indices[0] is not None:
        rest = value.shape[len(first.shape) :]
        shape = shape_of(source)
        if len(shape) > len(rest) and shape[0] == 1:
            source, shape = site.value(source, site.dtype), shape[1:]
            source = reshape(source, shape)
        if len(shape) > len(rest):
            raise UnityError("what a mask names gets a tensor whose size depends on data; use torch.where")
        new = where(site, reshape(first, (*first.shape, *(1 for _ in rest))), source, value)
        return op("add", value, where(site, first, source, 0.0)) if accumulate else new
    at = _Indexed(site, value, indices)
    wide = expand(site.value(source, site.dtype), (*at.lead, *at.shape, *at.rest))
    flat = reshape(wide, (*at.lead, prod(at.shape), *at.rest))
    out = at.restored(_put(at.value, at.dim, at.ids, flat, accumulate))
    orders = site.tables.orders
    if isinstance(first, Value) and first in orders.sorted.values() and isinstance(source, torch.Tensor):
        if torch.equal(source, torch.arange(first.shape[0])) and out.shape == first.shape and not accumulate:
            orders.inverses[out] = first
    return out


def _put(x: Value, dim: int, ids: Value, source: Value, accumulate: bool) -> Value:
    """Return `x` with the slices of `source` at the positions `ids` [n] along a dim, or added to those of `x`."""
    size: dict[str, int | tuple[int, ...]] = {"size": x.shape[dim], "degrees": (1,)}
    if source.type.dtype == "bool":
        out = _put(cast(x, "f32"), dim, ids, cast(source, "f32"), accumulate)
        return _compared("gt", out, 0)
    total = op("index_select_grad", source, ids, dim=dim, **size)
    if accumulate:
        return op("add", x, total)
    count = op("index_select_grad", constant(1.0, ids.shape, "f32"), ids, dim=0, **size)
    count = reshape(count, [x.shape[dim] if d == dim else 1 for d in range(len(x.shape))])
    seen = _compared("gt", count, 0)
    least = op("select", seen, count, _filled(count, 1.0))
    each = op("div", total, cast(least, total.type.dtype)) if x.type.is_floating else _floor_div(total, least)
    return op("select", seen, each, x)


@maps("index_add")
def index_add(site: CallSite, x: Operand, dim: int, index: Operand, source: Operand, alpha: float = 1) -> Value:
    """
    Map PyTorch's index_add: return `x` with the slices of `alpha * source` along dim `dim` added to those of `x` at the
    positions `index` [n].
    """
    value = site.value(x, site.dtype)
    ids = reshape(site.value(index, "i64"), (prod(shape_of(index)),))
    return _put(value, dim % len(value.shape), ids, scale(site.value(source, site.dtype), alpha), accumulate=True)


@maps("index_copy")
def index_copy(site: CallSite, x: Operand, dim: int, index: Operand, source: Operand) -> Value:
    """
    Map PyTorch's index_copy: `x` with its slices at the positions `index` [n] along dim `dim` replaced by those of
    `source`; if several go to one position, by their mean.
    """
    value = site.value(x, site.dtype)
    return _put(value, dim % len(value.shape), site.value(index, "i64"), site.value(source, site.dtype), False)


@maps("index_fill")
def index_fill(site: CallSite, x: Operand, dim: int, index: Operand, number: Operand) -> Value:
    """
    Map PyTorch's index_fill: `x` with `number` (a number or scalar tensor) everywhere in its slices at the positions
    `index` [n] along dim `dim`.
    """
    value, ids = site.value(x, site.dtype), site.value(index, "i64")
    dim %= len(value.shape)
    shape = (*value.shape[:dim], *ids.shape, *value.shape[dim + 1 :])
    return _put(value, dim, ids, expand(site.value(number, site.dtype), shape), accumulate=False)


def flat_index(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """
    Return the index tensors `indices`, one for each of several neighbouring dims of the sizes `sizes`, as one index [n]
    into these dims merged into one. The tensors are broadcast and flattened; negative indices count from a dim's end.

    Given [[0], [1]] and [[0, 1, 2]] into sizes 2 and 3, returns 0 to 5.
    """
    flat = torch.zeros((), dtype=torch.int64)
    for at, size in zip(indices, sizes, strict=True):
        flat = flat * size + at % size
    return flat.reshape(-1)


@maps("one_hot")
def one_hot(site: CallSite, ids: Operand, classes: int = -1) -> Value:
    """
    Map PyTorch's one-hot encoding of class ids, along a new last dim whose size is that of the result that PyTorch
    recorded at `site`; `classes`, from which PyTorch took it, is not read. Raises `UnityError` for ids that are known
    at import.
    """
    del classes
    return op("one_hot", require_value(ids, "ids"), classes=site.shape[-1])


@maps("topk")
def topk(
    site: CallSite, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    """
    Map PyTorch's topk: return (the `k` largest elements along a dim, their indices), in descending order whatever
    `sorted` says. Raises `UnityError` if not `largest`.
    """
    del site, sorted
    if not largest:
        raise UnityError("largest=False has no operator; negate the operand")
    values, ids = results("topk", swap(x, dim, -1), k=k)
    return swap(values, dim, -1), swap(ids, dim, -1)


@maps("flip")
def flip(site: CallSite, x: Value, dims: Sequence[int]) -> Value:
    """Map PyTorch's reversal of the order of elements along each of the dims `dims`."""
    for dim in dims:
        backwards = torch.arange(x.shape[dim] - 1, -1, -1)
        x = op("index_select", x, site.value(backwards), dim=dim % len(x.shape))
    return x


@maps("argmax")
def argmax(site: CallSite, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """
    Map PyTorch's argmax: the index of the largest element along a dim (None: in the flattened operand), the first of
    equal ones, in the shape of PyTorch's result.
    """
    del keepdim
    if dim is None:
        x, dim = reshape(x, (prod(x.shape),)), 0
    _, ids = results("topk", swap(x, dim, -1), k=1)
    return reshape(swap(ids, dim, -1), site.shape)


@maps("argmin")
def argmin(site: CallSite, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """
    Map PyTorch's argmin: the index of the smallest element along a dim (None: in the flattened operand), the first of
    equal ones, in the shape of PyTorch's result.
    """
    return argmax(site, op("neg", x), dim, keepdim)


@maps("sort")
def sort(site: CallSite, x: Value, *options: object, **named: object) -> tuple[Value, Value]:
    """
    Map PyTorch's `sort(x, dim, descending)` and `sort(x, stable, dim, descending)`: return (the elements in order along
    a dim, their indices); equal ones keep their order. By default `dim` is -1, and the order ascending.
    """
    orders = site.tables.orders
    options = tuple(v for v in options if v is not None)
    if len(options) == 3 or "stable" in named:
        options = options[len(options) == 3 :]
    dim = named.get("dim", options[0] if options else -1)
    descending = named.get("descending", options[1] if len(options) > 1 else False)
    assert isinstance(dim, int)
    if not x.shape:
        return x, constant(0, (), "i64")
    y = swap(x, dim, -1)
    values, ids = results("topk", y if descending else op("neg", y), k=y.shape[-1])
    values = values if descending else op("neg", values)
    if len(x.shape) == 1 and not descending:
        orders.sorted[values] = ids
        orders.gathered[values] = x, ids
    return swap(values, dim, -1), swap(ids, dim, -1)


@maps("argsort")
def argsort(site: CallSite, x: Value, *options: object, **named: object) -> Value:
    """Map PyTorch's argsort: the indices that `sort` returns for the same options."""
    return sort(site, x, *options, **named)[1]


@maps("bucketize")
def bucketize(site: CallSite, x: Value, boundaries: Operand, *, out_int32: bool = False, right: bool = False) -> Value:
    """
    Map PyTorch's bucketize: for each element of `x`, how many of the sorted `boundaries` [n] are below it or, with
    `right`, not above it. The result has the element type that PyTorch recorded at `site`, so `out_int32` is not read.
    """
    del out_int32
    edges = site.value(boundaries)
    wide = (*x.shape, edges.shape[0])
    below = op("le" if right else "lt", expand(edges, wide), reshape(x, (*x.shape, 1)))
    return op("reduce_sum", op("cast", below, to=site.dtype), dim=len(x.shape))


@maps("searchsorted")
def searchsorted(
    site: CallSite,
    sorted_sequence: Operand,
    x: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Operand | None = None,
) -> Value:
    """
    Map PyTorch's searchsorted: for each element of `x`, how many elements of `sorted_sequence` [n] are below it or,
    with `right` or `side="right"`, not above it. The result has the element type that PyTorch recorded at `site`.
    Raises `UnityError` for several sequences, and for a `sorter`.
    """
    if len(shape_of(sorted_sequence)) != 1:
        raise UnityError("several sorted sequences have no mapping; one has")
    if sorter is not None:
        raise UnityError("a sorter has no mapping; index the sequence with it first")
    return bucketize(site, x, sorted_sequence, out_int32=out_int32, right=right or side == "right")


@maps("histc")
def histc(site: CallSite, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Value:
    """
    Map PyTorch's histogram: divide [low, high] into `bins` equal parts, and return how many elements of `x` are in
    each, [bins]; elements outside do not count. Raises `UnityError` if `low` equals `high`, for which PyTorch takes the
    smallest and largest element as bounds.
    """
    if low == high:
        raise UnityError("bounds that are those of the data have no mapping; give min and max")
    y = reshape(x if x.type.is_floating else cast(x, "f32"), (prod(x.shape),))
    at = op("floor", scale(op("shift", y, by=-float(low)), bins / (high - low)))
    at = op("select", _compared("eq", y, float(high)), _filled(at, bins - 1), at)
    ones = constant(1.0, y.shape, x.type.dtype)
    out = op("index_select_grad", ones, cast(at, "i64"), dim=0, size=bins, degrees=(1,))
    if (low, high) == (0, bins - 1) and uncast(x) in site.tables.orders.sorted:
        site.tables.orders.counts[out] = uncast(x)
    return out
