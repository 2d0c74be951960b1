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
from unity_ir.frontends.torch.padded import Padded
from unity_ir.frontends.torch.site import CallSite, cast, finite, maps, number
from unity_ir.frontends.torch.values import Operand, constant, cut, expand, op, parts, permute, reshape, swap
from unity_ir.pcg.node import Value


@maps(
    *("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as"),
    *("ravel", "_reshape_alias"),
)
def view(site: CallSite, x: Value | Padded, *to: object, **__: object) -> Value | Padded:
    """
    Map views and reshapes of all kinds, to the shape of the result that PyTorch recorded at `site`; the sizes in `to`,
    from which PyTorch computed it, are not read. `Padded` labels (a loss's labels that the model shifts and pads) stay
    `Padded`.

    Raises `UnityError` if `to` has an element type, in which the same bits would be read.
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
    Map copies and type conversions: return `x`, cast to the element type of the result that PyTorch recorded at `site`.
    An `x` that has that type already is returned as it is, even if it is `Padded` (a loss's labels that the model
    shifts and pads); a cast makes it a plain value of the graph. Further arguments have no effect.
    """
    if isinstance(x, Padded):
        return x if site.dtype == x.value.type.dtype else cast(x.filled(), site.dtype)
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
    Map PyTorch's movedim: move the dims `source` to the positions `destination`; the other dims fill the remaining
    positions in their old order.
    """
    del site
    rank = len(x.shape)
    old, new = ([d % rank for d in ([v] if isinstance(v, int) else v)] for v in (source, destination))
    rest = iter(d for d in range(rank) if d not in old)
    return permute(x, [old[new.index(d)] if d in new else next(rest) for d in range(rank)])


@maps("expand", "expand_as", "broadcast_to")
def expanded(site: CallSite, x: Value, *_: object, **__: object) -> Value:
    """
    Map PyTorch's broadcasts (expand, broadcast_to) of `x` to the shape of the result that PyTorch recorded at `site`;
    the other arguments are not read.
    """
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
    Map PyTorch's slice `start:end:step` along dim `dim`; None is the beginning or the end, negative numbers count from
    the end. Of `Padded` labels (a loss's labels that the model shifts and pads) the slice is `Padded` as well, if
    padding is left in it.
    """
    dim %= len(x.shape)
    first = range(x.shape[dim])[slice(start, end, step)]
    if isinstance(x, Padded) and step == 1 and x.shape == x.own:
        return x.cut(dim, first.start, len(first))
    return cut(x.filled() if isinstance(x, Padded) else x, dim, first.start, site.shape[dim], step)


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


def _empty(part: torch.Tensor) -> torch.Tensor:
    return torch.empty(part.shape, dtype=part.dtype)


@maps("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(site: CallSite, x: Value, _: object, dim: int = 0) -> tuple[Value | torch.Tensor, ...]:
    """
    Map splits of all kinds (split, chunk, ..) of `x` along dim `dim` into consecutive slices, of the sizes of the
    results that PyTorch recorded at `site`; the second argument (PyTorch's sizes or number) is not read. Slices of size
    0 are returned as empty tensors.
    """
    dim %= len(x.shape)
    found = iter(parts(x, dim, [m.shape[dim] for m in site.meta if m.shape[dim]]))
    return tuple(next(found) if m.shape[dim] else _empty(m) for m in site.meta)


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
    Map PyTorch's padding with the number `value`. `amounts` are (before, after) for each dim, in one flat sequence that
    begins with the last dim; negative amounts cut elements off.

    Integers padded along one dim with a number other than 0 are returned as `Padded`, since they may be a loss's
    labels.
    """
    padded_dims = sum(any(amounts[i : i + 2]) for i in range(0, len(amounts), 2))
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(x.shape) - 1 - i
        if before < 0 or after < 0:
            size = x.shape[dim] + min(before, 0) + min(after, 0)
            x = cut(x, dim, max(-before, 0), size)
        before, after = max(before, 0), max(after, 0)
        if not before and not after:
            continue
        if x.type.is_integer and value and padded_dims == 1:
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
    or `circular`. `amounts` are (before, after) for each dim, in one flat sequence that begins with the last dim.
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
    Map PyTorch's padding by reflection at the edges. `amounts` are (before, after) for each dim, in one flat sequence
    that begins with the last dim.
    """
    return _edge_pad(site, x, amounts, "reflect")


@maps("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(site: CallSite, x: Value, amounts: Sequence[int]) -> Value:
    """
    Map PyTorch's padding by repetition of the edges. `amounts` are (before, after) for each dim, in one flat sequence
    that begins with the last dim.
    """
    return _edge_pad(site, x, amounts, "replicate")


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
    Map PyTorch's select_scatter: `x` with its slice at position `index` of dim `dim` replaced by `source`, whose shape
    is that of `x` without that dim.
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
    Map PyTorch's tiling (`repeat`, `tile`): `x` as a whole is repeated along each dim, as often as its number in
    `counts` says. Counts are aligned with the last dims: if there are more than dims, `x` first gets leading dims of
    size 1; if fewer, the leading dims are not repeated.
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
    Map PyTorch's repeat_interleave: repeat each element along dim `dim` (None: of the flattened operand) `repeats`
    times, next to itself. `output_size` is not read.

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
