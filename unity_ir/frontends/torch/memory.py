"""
Make writes in place functional: keep the contents of each memory as one value, write views into it, and read views from
it.

What `torch.func.functionalize` does, but over values of the graph, and by positions: a view is the elements of its
memory at the positions that its strides give, so views of every kind, and views of views, are one case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.aliases import Layout
from unity_ir.frontends.torch.site import CallSite, cast
from unity_ir.frontends.torch.values import Operand, constant, cut, expand, op, permute, reshape
from unity_ir.pcg.graph import Value


@dataclass
class Memory:
    """A memory: the tensor that it was made for, by its layout, its present contents, and the number of writes."""

    base: Layout
    contents: Operand
    writes: int = 0

    def read(self, site: CallSite, view: Layout) -> Operand:
        """Return the present elements of a view of this memory."""
        if view == self.base or isinstance(self.contents, int | float):
            return self.contents
        at = _Selection(self.base, view)
        if isinstance(self.contents, torch.Tensor):
            return self.contents.reshape(-1)[at.index].expand(view.size)
        if at.ranges is None:
            flat = reshape(self.contents, (prod(self.base.size),))
            inner = op("index_select", flat, site.value(at.index.permute(at.order).reshape(-1)), dim=0)
        else:
            inner = self.contents
            for dim, places in enumerate(at.ranges):
                inner = cut(inner, dim, places.start, len(places), places.step)
        inner = reshape(inner, [at.index.shape[d] for d in at.order])
        return expand(permute(inner, [at.order.index(d) for d in range(len(at.order))]), view.size)

    def write(self, site: CallSite, view: Layout, value: Operand) -> None:
        """Replace the elements of a view of this memory by those of `value`, of the view's shape."""
        self.writes += 1
        if view == self.base:
            self.contents = value
            return
        at = _Selection(self.base, view)
        if isinstance(self.contents, torch.Tensor) and isinstance(value, torch.Tensor):
            flat = self.contents.reshape(-1).clone()
            flat[at.index.reshape(-1)] = value.expand(view.size).to(flat.dtype).reshape(-1)
            self.contents = flat.reshape(self.base.size)
            return
        before, new = site.value(self.contents), site.value(value)
        new = cast(new, before.type.dtype)
        if at.index.shape != view.size:
            raise UnityError("it writes into an expanded tensor, of which several elements are one; clone it before")
        if at.ranges is None:
            self.contents = self._scattered(site, before, new, at)
        else:
            new = reshape(permute(new, at.order), [len(places) for places in at.ranges])
            self.contents = placed(before, new, at.ranges)

    def _scattered(self, site: CallSite, before: Value, new: Value, at: _Selection) -> Value:
        """Return `before` with the elements of `new` at positions that are no range along each dim."""
        index = at.index.reshape(-1)
        mask = torch.zeros(prod(self.base.size), dtype=torch.bool)
        mask[index] = True
        places = torch.zeros(len(mask), dtype=torch.int64)
        places[index] = torch.arange(len(index))
        wide = op("index_select", reshape(new, (len(index),)), site.value(places), dim=0)
        return op("select", site.value(mask.reshape(self.base.size)), reshape(wide, self.base.size), before)


class _Selection:
    """
    The elements of a tensor that a view of its memory has.

    `index` holds their flat positions in the tensor, in the view's shape (of size 1 where it is expanded); `order`, the
    view's dims by falling stride, is the order in which they count up; `ranges` has a range for each dim of the tensor,
    if the elements are their product, else it is None.
    """

    def __init__(self, base: Layout, view: Layout):
        own = base.places().expand(base.size).reshape(-1)
        inverse = torch.full((int(own.max()) + 1,), -1)
        inverse[own] = torch.arange(len(own))
        places = view.places()
        inside = places.numel() and int(places.max()) < len(inverse)
        self.index = inverse[places] if inside else places
        if not inside or bool((self.index < 0).any()):
            raise UnityError("it writes into memory that two tensors share in part; clone one")
        self.order = sorted(range(len(view.size)), key=lambda d: (-view.stride[d], d))
        self.ranges = _ranges(self.index.permute(self.order).reshape(-1), base.size)


def _ranges(flat: torch.Tensor, sizes: Sequence[int]) -> list[range] | None:
    """
    Return a range for each dim of a tensor of the sizes `sizes` such that the flat positions `flat` are their product
    in order; None if there is none.
    """
    found: list[range] = []
    rest = flat
    for size in reversed(sizes):
        values = torch.unique(rest % size).tolist()
        rest = rest // size
        step = values[1] - values[0] if len(values) > 1 else 1
        places = range(values[0], values[-1] + 1, step)
        if list(places) != values:
            return None
        found.insert(0, places)
    product = torch.zeros(1, dtype=torch.int64)
    for size, places in zip(sizes, found, strict=True):
        product = (product[:, None] * size + torch.tensor(places)).reshape(-1)
    return found if torch.equal(product, flat) else None


def placed(x: Value, part: Value, ranges: Sequence[range]) -> Value:
    """Return `x` with its elements at the product of ranges, one for each dim, replaced by `part`."""
    narrow = [dim for dim, places in enumerate(ranges) if len(places) != x.shape[dim]]
    if any(ranges[dim].step != 1 for dim in narrow):
        return _interleaved(x, part, ranges)
    # From the innermost dim out, each step restores one dim of what the ranges of those before it cut out of `x`.
    for dim in reversed(narrow):
        outer = x
        for other in narrow[: narrow.index(dim)]:
            outer = cut(outer, other, ranges[other].start, len(ranges[other]))
        start, stop, size = ranges[dim].start, ranges[dim].stop, x.shape[dim]
        pieces = [cut(outer, dim, 0, start)] if start else []
        pieces.append(part)
        pieces += [cut(outer, dim, stop, size - stop)] if stop < size else []
        part = op("concat", *pieces, dim=dim)
    return part


def _interleaved(x: Value, part: Value, ranges: Sequence[range]) -> Value:
    """Return the same where a range has a step: `part` spread by zeros, and `x` wherever it has no element."""
    mask = constant(1, part.shape, "bool")
    for dim, places in enumerate(ranges):
        after = x.shape[dim] - places[-1] - 1
        if len(places) != x.shape[dim]:
            pad = {"before": places.start, "after": after, "interior": places.step - 1 if len(places) > 1 else 0}
            part, mask = (op("pad", v, dim=dim, **pad) for v in (part, mask))
    return op("select", mask, part, x)
