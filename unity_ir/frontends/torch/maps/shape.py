"""
Map operators that only move elements from ATen to the compiler's. Each mapping gets the call's `site` (what PyTorch
recorded of its result: shape, element type) and the ATen arguments, and returns the result as a value of the compiler's
graph, or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.padded import PADDED, Padded
from unity_ir.frontends.torch.site import CallSite, cast, finite, maps, number, tensor
from unity_ir.frontends.torch.values import Operand, constant, cut, expand, is_bool, op, permute, reshape, swap
from unity_ir.pcg.graph import Value, apply


@maps(
    *("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as"),
    *("ravel", "_reshape_alias"),
)
def view(site: CallSite, x: Value | Padded, *to: object, **__: object) -> Value | Padded:
    """
    Map views and reshapes of all kinds, to the shape of PyTorch's result, which the arguments `to` gave.

    Raises `UnityError` for views as another element type.
    """
    if any(isinstance(v, torch.dtype) for v in to):
        raise UnityError("the bits of numbers as those of another element type have no operator")
    if isinstance(x, Padded):
        return replace(x, shape=site.shape)
    return reshape(x, site.shape)


@maps(
    *("contiguous", "clone", "alias", "lift_fresh", "lift_fresh_copy", "positive", "to", "_to_copy", "type_as"),
)
def same(site: CallSite, x: Value | Padded, *_: object, **__: object) -> Value | Padded:
    """
    Map copies and type conversions: a cast to the element type of PyTorch's result, if it differs from that of `x`;
    further arguments have no effect.
    """
    if isinstance(x, Padded):
        if site.dtype != x.value.type.dtype:
            raise UnityError(PADDED)
        return x
    return cast(x, site.dtype)


@maps("detach", "detach_copy")
def detach(site: CallSite, x: Value) -> Value:
    """Map PyTorch's detach, which stops gradients; a value that depends on no weight is returned as it is."""
    return op("detach", x) if site.trained(x) else x


@maps("transpose", "swapaxes", "swapdims")
def transpose(site: CallSite, x: Value, a: int, b: int) -> Value:
    """Map PyTorch's transpose: `x` with the dims `a` and `b` exchanged; negative numbers count from the last."""
    del site
    return swap(x, a, b)


@maps("numpy_T")
def reversed_dims(site: CallSite, x: Value) -> Value:
    """Map PyTorch's `x.T` of any rank: `x` with its dims in reverse order."""
    del site
    return permute(x, range(len(x.shape))[::-1])


@maps("t", "mT", "adjoint")
def t(site: CallSite, x: Value) -> Value:
    """Map PyTorch's `x.t()` and `x.mT`: `x` with its last two dims exchanged; `x` itself if it has fewer than two."""
    del site
    return x if len(x.shape) < 2 else swap(x, -1, -2)


@maps("permute")
def permuted(site: CallSite, x: Value, dims: Sequence[int]) -> Value:
    """Map PyTorch's permutation of dims: dim i of the result is dim `dims[i]` of `x`."""
    del site
    return permute(x, dims)


@maps("movedim", "moveaxis")
def movedim(site: CallSite, x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    """
    Map PyTorch's movedim: the dims `source` moved to the positions `destination`; the others keep their order in what
    is left.
    """
    del site
    rank = len(x.shape)
    old, new = ([d % rank for d in ([v] if isinstance(v, int) else v)] for v in (source, destination))
    rest = iter(d for d in range(rank) if d not in old)
    return permute(x, [old[new.index(d)] if d in new else next(rest) for d in range(rank)])


@maps("expand", "expand_as", "broadcast_to")
def expanded(site: CallSite, x: Value, *_: object, **__: object) -> Value:
    """Map broadcasts (expand), to the shape of PyTorch's result, which the other arguments gave."""
    return expand(x, site.shape)


@maps("broadcast_tensors")
def broadcast_tensors(site: CallSite, xs: Sequence[Operand]) -> list[Value]:
    """Map PyTorch's broadcast of the operands `xs` to one shape; return them in order."""
    return [expand(site.value(x), site.shape) for x in xs]


@maps("slice")
def sliced(
    site: CallSite, x: Value | Padded, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value | Padded:
    """
    Map PyTorch's slice `start:end:step` along a dim; None is the beginning or the end, negative numbers count from the
    end. Raises `UnityError` for padded labels (`Padded`) that were reshaped, or with a step other than 1.
    """
    dim %= len(x.shape)
    first = range(x.shape[dim])[slice(start, end, step)]
    if isinstance(x, Padded):
        if step != 1 or x.shape != x.own:
            raise UnityError(PADDED)
        return x.cut(dim, first.start, len(first))
    return cut(x, dim, first.start, site.shape[dim], step)


@maps("narrow")
def narrow(site: CallSite, x: Value, dim: int, start: int, length: int) -> Value:
    """Map PyTorch's narrow: the slice of `length` positions from `start` on along a dim."""
    del site
    dim %= len(x.shape)
    return cut(x, dim, start % x.shape[dim], length)


@maps("select")
def select(site: CallSite, x: Value, dim: int, index: int) -> Value:
    """
    Map PyTorch's select: the slice of `x` at one index of a dim, without that dim; negative indices count from the end.
    """
    dim %= len(x.shape)
    return reshape(cut(x, dim, index % x.shape[dim], 1), site.shape)


def parts(x: Value, dim: int, sizes: Sequence[int]) -> tuple[Value, ...]:
    """
    Return consecutive slices of `x` along dim number `dim`, which have the sizes `sizes`; these must sum to the size of
    the dim.
    """
    return (x,) if len(sizes) == 1 else apply("split", (x,), {"dim": dim, "sizes": tuple(sizes)}).results


@maps("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(site: CallSite, x: Value, _: object, dim: int = 0) -> tuple[Value, ...]:
    """
    Map splits of all kinds (split, chunk) along a dim, into slices of the sizes of PyTorch's results; the argument `_`,
    from which PyTorch took them, is not read.
    """
    dim %= len(x.shape)
    return parts(x, dim, [m.shape[dim] for m in site.meta])


@maps("unbind")
def unbind(site: CallSite, x: Value, dim: int = 0) -> list[Value]:
    """Map PyTorch's unbind: the slices at every index of a dim, each without that dim."""
    dim %= len(x.shape)
    return [reshape(v, site.shape) for v in parts(x, dim, (1,) * x.shape[dim])]


@maps("cat", "concat", "concatenate")
def cat(site: CallSite, xs: Sequence[Operand], dim: int = 0) -> Value:
    """Map PyTorch's concatenation of `xs` along a dim; empty tensors that are known at import are left out."""
    # PyTorch lets empty tensors of one dim pass.
    values = [site.value(_whole(x), site.dtype) for x in xs if not (isinstance(x, torch.Tensor) and x.numel() == 0)]
    return values[0] if len(values) == 1 else op("concat", *values, dim=dim % len(site.shape))


@maps("stack")
def stack(site: CallSite, xs: Sequence[Operand], dim: int = 0) -> Value:
    """Map PyTorch's stacking of the operands `xs` along a new dim, which becomes dim `dim`."""
    dim %= len(site.shape)
    shape = (*site.shape[:dim], 1, *site.shape[dim + 1 :])
    values = [reshape(site.value(_whole(x), site.dtype), shape) for x in xs]
    return values[0] if len(values) == 1 else op("concat", *values, dim=dim)


def _whole(x: Operand) -> Operand:
    return x.contiguous() if isinstance(x, torch.Tensor) else x


@maps("constant_pad_nd")
def constant_pad(site: CallSite, x: Value, amounts: Sequence[int], value: float = 0) -> Value | Padded:
    """
    Map PyTorch's padding with the number `value`; `amounts` are (before, after) per dim, flat, from the last dim on;
    negative ones cut.

    Integers padded with a number other than 0 become `Padded` (labels), which only a loss may read; along several dims,
    they raise `UnityError`.
    """
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(x.shape) - 1 - i
        if before < 0 or after < 0:
            size = x.shape[dim] + min(before, 0) + min(after, 0)
            x = cut(x, dim, max(-before, 0), size)
        before, after = max(before, 0), max(after, 0)
        if not before and not after:
            continue
        if x.type.is_integer and value:
            if any(amounts[2 * i + 2 :]):
                raise UnityError("integers padded in several dims have no operator")
            padded = Padded(x, dim, before, after, int(value), ())
            return replace(padded, shape=padded.own)
        x = (
            op("pad", x, dim=dim, before=before, after=after)
            if value == 0
            else _filled(x, dim, before, after, finite(value, site.result.dtype))
        )
    return x


def _filled(x: Value, dim: int, before: int, after: int, value: float) -> Value:
    """Return `x` padded along a dim with `before` and `after` elements that hold `value`."""

    def places(count: int) -> list[Value]:
        shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
        return [constant(value, shape, x.type.dtype)] if count else []

    return op("concat", *places(before), x, *places(after), dim=dim)


@maps("pad")
def pad(
    site: CallSite, x: Value, amounts: Sequence[int], mode: str = "constant", value: float | None = None
) -> Value | Padded:
    """
    Map PyTorch's padding in a mode: `constant` (with `value`, None for 0; see `constant_pad`), `reflect`, `replicate`
    or `circular`. `amounts` are (before, after) per dim, flat, from the last dim on.
    """
    if mode == "constant":
        return constant_pad(site, x, amounts, value or 0)
    return _edge_pad(site, x, amounts, mode)


def _edge_pad(site: CallSite, x: Value, amounts: Sequence[int], mode: str) -> Value:
    """
    Return `x` padded with its own elements, as PyTorch's `mode` picks them: `reflect`, `replicate` or `circular`.
    `amounts` are (before, after) per dim, flat, from the last dim on.
    """
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(x.shape) - 1 - i
        if before or after:
            places = torch.arange(x.shape[dim], dtype=torch.float64)[None]
            index = torch.nn.functional.pad(places, (before, after), mode)[0].long()
            x = op("index_select", x, site.value(index), dim=dim)
    return x


@maps("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(site: CallSite, x: Value, amounts: Sequence[int]) -> Value:
    """
    Map PyTorch's padding by reflection at the edges; `amounts` are (before, after) per dim, flat, from the last dim on.
    """
    return _edge_pad(site, x, amounts, "reflect")


@maps("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(site: CallSite, x: Value, amounts: Sequence[int]) -> Value:
    """
    Map PyTorch's padding by repetition of the edges; `amounts` are (before, after) per dim, flat, from the last dim on.
    """
    return _edge_pad(site, x, amounts, "replicate")


@maps("upsample_nearest2d", "upsample_nearest1d")
def upsample_nearest(site: CallSite, x: Value, *_: object) -> Value:
    """
    Map PyTorch's nearest-neighbour upsampling of [batch, channels, ..] over all dims after the second, to the shape of
    PyTorch's result, which the other arguments gave. Raises `UnityError` unless sizes grow by whole factors.
    """
    old, new = x.shape[2:], site.shape[2:]
    if any(b % a for a, b in zip(old, new, strict=True)):
        raise UnityError(f"{list(old)} to {list(new)} is not by whole factors, which alone have a mapping")
    x = reshape(x, [*x.shape[:2], *(n for a in old for n in (a, 1))])
    wide = [n for a, b in zip(old, new, strict=True) for n in (a, b // a)]
    return reshape(expand(x, [*x.shape[:2], *wide]), site.shape)


@maps("slice_scatter")
def slice_scatter(
    site: CallSite,
    x: Operand,
    source: Operand,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    """
    Map PyTorch's slice_scatter: `x` with the positions `start:end` (None: the beginning, the end) along a dim replaced
    by `source`. Raises `UnityError` for steps other than 1.
    """
    value, part = site.value(x, site.dtype), site.value(source, site.dtype)
    dim %= len(value.shape)
    size = value.shape[dim]
    places = range(size)[slice(start, end, step)]
    if step != 1:
        raise UnityError(f"step {step} has no mapping; 1 has")
    pieces = [cut(value, dim, 0, places.start)] if places.start else []
    pieces.append(part)
    if places.stop < size:
        pieces.append(cut(value, dim, places.stop, size - places.stop))
    return pieces[0] if len(pieces) == 1 else op("concat", *pieces, dim=dim)


@maps("select_scatter")
def select_scatter(site: CallSite, x: Operand, source: Operand, dim: int, index: int) -> Value:
    """
    Map PyTorch's select_scatter: `x` with the slice at one index of a dim replaced by `source`, which does not have
    that dim.
    """
    part = site.value(source, site.dtype)
    dim %= len(site.shape)
    index %= site.shape[dim]
    part = reshape(part, (*site.shape[:dim], 1, *site.shape[dim + 1 :]))
    return slice_scatter(site, x, part, dim, index, index + 1)


@maps("fill")
def fill(site: CallSite, x: Operand, value: Value) -> Value:
    """
    Map PyTorch's fill of a tensor shaped like `x` with `value`, a scalar of the graph. (Filling with a number is done
    at import.)
    """
    del x
    return site.fit(value)


@maps("copy")
def copy(site: CallSite, x: Operand, source: Operand, non_blocking: bool = False) -> Value:
    """Map PyTorch's copy of `source` into `x`: `source`, broadcast to the shape and cast to the element type of `x`."""
    del x, non_blocking
    return site.fit(site.value(source, site.dtype))


@maps("repeat", "tile")
def repeat(site: CallSite, x: Value, counts: Sequence[int]) -> Value:
    """
    Map PyTorch's tiling (`repeat`): each dim repeated as a whole, as often as its number in `counts` says; more counts
    than dims add leading dims.
    """
    counts = [1] * (len(site.shape) - len(counts)) + list(counts)
    old = (1,) * (len(counts) - len(x.shape)) + x.shape
    x = reshape(x, [n for s in old for n in (1, s)])
    return reshape(expand(x, [n for c, s in zip(counts, old, strict=True) for n in (c, s)]), site.shape)


@maps("repeat_interleave")
def repeat_interleave(
    site: CallSite, x: Value, repeats: Operand, dim: int | None = None, *, output_size: int | None = None
) -> Value:
    """
    Map PyTorch's repetition of each element along a dim (by default of the flattened operand), `repeats` times;
    `output_size`, which follows, is not read.

    Raises `UnityError` for counts that differ between elements.
    """
    del output_size
    count = number(repeats)
    if not isinstance(count, int):
        raise UnityError("repeats that differ have no mapping; give one number")
    if dim is None:
        x, dim = reshape(x, (prod(x.shape),)), 0
    dim %= len(x.shape)
    lead, rest = x.shape[: dim + 1], x.shape[dim + 1 :]
    return reshape(expand(reshape(x, (*lead, 1, *rest)), (*lead, count, *rest)), site.shape)


@maps("roll")
def roll(site: CallSite, x: Value, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Value:
    """
    Map PyTorch's cyclic shift by `shifts` positions along `dims`, one shift for each; for `dims` of (), shift the
    flattened operand, in the shape of `x`.
    """
    del site
    shape, dims = x.shape, [dims] if isinstance(dims, int) else dims
    if not dims:
        x, dims = reshape(x, (prod(shape),)), [0]
    for by, dim in zip([shifts] if isinstance(shifts, int) else shifts, dims, strict=True):
        dim %= len(x.shape)
        size = x.shape[dim]
        if at := -by % size:
            head, tail = parts(x, dim, (at, size - at))
            x = op("concat", tail, head, dim=dim)
    return reshape(x, shape)


@maps("pixel_shuffle")
def pixel_shuffle(site: CallSite, x: Value, factor: int) -> Value:
    """Map PyTorch's pixel_shuffle: [.., c * factor^2, h, w] to [.., c, h * factor, w * factor]."""
    *lead, channels, height, width = x.shape
    x = reshape(x, (*lead, channels // factor**2, factor, factor, height, width))
    n = len(lead)
    return reshape(permute(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2]), site.shape)


# Picking by indices


@maps("index_select")
def index_select(site: CallSite, x: Operand, dim: int, index: Operand) -> Value:
    """Map PyTorch's slices of `x` along a dim at `index`, the indices [n]: the result has size n there."""
    value = site.value(x)
    return op("index_select", value, site.value(index, "i64"), dim=dim % len(value.shape))


@maps("gather")
def gather(site: CallSite, x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Value:
    """
    Map `torch.gather`: the elements of `x` at the positions that `index`, of the result's shape, gives along a dim, and
    at their own place along all others. `sparse_grad`, about the gradient's storage, has no effect.
    """
    del sparse_grad
    value = site.value(x)
    return op("gather", value, site.value(index, "i64"), dim=dim % len(value.shape))


@maps("scatter_add")
def scatter_add(site: CallSite, x: Operand, dim: int, index: Operand, source: Operand) -> Value:
    """
    Map PyTorch's scatter_add: `x` with each element of `source` added at the position that `index`, of the same shape,
    gives along a dim, and at its own place along all others.
    """
    value = site.value(x, site.dtype)
    index = site.value(index, "i64")
    return op("scatter_add", value, index, site.value(source, site.dtype), dim=dim % len(value.shape))


@maps("index")
def index(site: CallSite, x: Operand, indices: Sequence[Operand | None]) -> Value:
    """
    Map PyTorch's indexing by tensors, `x[:, i, j]`: `indices` has one per leading dim of `x`, and None for a dim that
    is not indexed. Indices that are known at import may be several, for neighbouring dims; else there may be only one.

    Raises `UnityError` for other combinations, and for boolean masks.
    """
    given = {d: i for d, i in enumerate(indices) if i is not None}
    first, count = min(given), len(given)
    value = site.value(x)
    known = [i for i in given.values() if isinstance(i, torch.Tensor)]
    if any(map(is_bool, given.values())):
        raise UnityError("a mask as an index makes a shape that depends on data; use torch.where")
    if list(given) != list(range(first, first + count)) or (count > 1 and len(known) < count):
        raise UnityError("several indices have a mapping only for neighbouring dims, and known at import")
    sizes = value.shape[first : first + count]
    lead, rest = value.shape[:first], value.shape[first + count :]
    if not known:
        ids = site.value(given[first], "i64")
        if first == 0 and len(value.shape) == 2:
            return op("embedding", ids, value)
        flat = op("index_select", value, reshape(ids, (prod(ids.shape),)), dim=first)
        return reshape(flat, site.shape)
    places = flat_index(known, sizes)
    value = reshape(value, (*lead, prod(sizes), *rest))
    start = int(places[0])
    if torch.equal(places, torch.arange(start, start + len(places))):
        return reshape(cut(value, first, start, len(places)), site.shape)
    return reshape(op("index_select", value, site.value(places), dim=first), site.shape)


def flat_index(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """
    Return the index tensors `indices`, into neighbouring dims of the sizes `sizes`, broadcast and flattened, as one
    index into these dims merged into one.

    Given [[0], [1]] and [[0, 1, 2]] into sizes 2 and 3, returns 0 to 5.
    """
    flat = torch.zeros((), dtype=torch.int64)
    for at, size in zip(indices, sizes, strict=True):
        flat = flat * size + at % size
    return flat.reshape(-1)


@maps("one_hot")
def one_hot(site: CallSite, ids: Operand, classes: int = -1) -> Value:
    """
    Map PyTorch's one-hot encoding of class ids along a new last dim, of as many positions as PyTorch's result has
    (which `classes` gave). Raises `UnityError` for ids that are known at import.
    """
    del classes
    return op("one_hot", tensor(ids, "ids"), classes=site.shape[-1])


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
    values, ids = apply("topk", (swap(x, dim, -1),), {"k": k}).results
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
    _, ids = apply("topk", (swap(x, dim, -1),), {"k": 1}).results
    return reshape(swap(ids, dim, -1), site.shape)


@maps("argmin")
def argmin(site: CallSite, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """
    Map PyTorch's argmin: the index of the smallest element along a dim (None: in the flattened operand), the first of
    equal ones, in the shape of PyTorch's result.
    """
    return argmax(site, op("neg", x), dim, keepdim)
