"""
Make writes in place functional: keep the contents of each memory as one value, write views into it, and read views from
it.

What `torch.func.functionalize` does, but over values of the graph, and by positions: a view is the elements of its
memory at the positions that its strides give, so views of every kind, and views of views, are one case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.aliases import Layout
from unity_ir.frontends.torch.site import CallSite, cast
from unity_ir.frontends.torch.values import Operand, constant, cut, expand, op, permute, reshape
from unity_ir.pcg.node import Value


@dataclass
class Memory:
    """
    The contents of one memory (PyTorch's storage) during an import, and how often it was written in place. `base` has
    the strides of the tensor that the memory was made for; that tensor covers all elements of the memory.
    """

    base: Layout
    contents: Any
    """A value of the graph, a tensor or number known at import, or what the importer has where there is none."""
    writes: int = 0

    def read(self, site: CallSite, view: Layout) -> Any:
        """
        Return the elements that a view of this memory selects, as they are after all writes so far, in the view's
        shape. `view` has its sizes, strides and offset, and `site` is the call that made the view.

        The result is a value of the graph or a tensor, as the contents are; if the contents are one number, that number
        is returned. Raises `UnityError` if the view selects elements that the memory does not have.
        """
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
        inner = reshape(inner, [at.shape[d] for d in at.order])
        return expand(permute(inner, [at.order.index(d) for d in range(len(at.order))]), view.size)

    def write(self, site: CallSite, view: Layout, value: Operand) -> None:
        """
        Replace the elements that a view of this memory selects by those of `value`, of the view's shape, and count the
        write. `view` has the view's sizes, strides and offset, and `site` is the call that made the view.

        Raises `UnityError` if the view is expanded (several of its elements are one of the memory), or selects elements
        that the memory does not have.
        """
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
        if at.shape != view.size:
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

    `shape` is the view's, of size 1 where it is expanded; `order`, its dims by falling stride, is the order in which
    elements count up; `ranges` has a range for each dim of the tensor, if the elements are their product, else it is
    None.
    """

    def __init__(self, base: Layout, view: Layout):
        self.base, self.view = base, view
        self.shape = tuple(size if stride else 1 for size, stride in zip(view.size, view.stride, strict=True))
        self.order = sorted(range(len(view.size)), key=lambda d: (-view.stride[d], d))
        # Of large tensors positions take more memory than a model's import should.
        self.ranges = ranges_by_strides(base, view)
        if self.ranges is None:
            self.ranges = ranges_of(self.index.permute(self.order).reshape(-1), base.size)

    @cached_property
    def index(self) -> torch.Tensor:
        """The flat positions in the tensor of the view's elements, in `shape`."""
        own = self.base.positions().expand(self.base.size).reshape(-1)
        inverse = torch.full((int(own.max()) + 1,), -1)
        inverse[own] = torch.arange(len(own))
        places = self.view.positions()
        if int(places.max()) >= len(inverse) or bool((inverse[places] < 0).any()):
            raise UnityError("it writes into memory that two tensors share in part; clone one")
        return inverse[places]


def ranges_by_strides(base: Layout, view: Layout) -> list[range] | None:
    """
    Return the elements that a view of a memory selects as ranges: for each dim of `base`, the tensor that covers the
    memory, a range of positions along it; the view has the product of these. Reads strides alone. None where `base` is
    not contiguous, or where the strides do not show such ranges: `ranges_of` then looks at every position.

    Given sizes 3 and 4 and the view `[:, 1:3]`, returns ranges 0 to 2 and 1 to 2. Each dim of the view is matched with
    the dim of `base` that has the largest stride not above its own. If it has more positions than that dim, as where
    the view merged dims, it must cover that dim whole; the rest is matched with the next outer dim.
    """
    strides = [prod(base.size[d + 1 :]) for d in range(len(base.size))]
    if any(size > 1 and a != b for size, a, b in zip(base.size, strides, base.stride, strict=True)):
        return None
    found: list[range] = []
    at = view.offset - base.offset
    for size, stride in zip(base.size, strides, strict=True):
        start, at = divmod(at, stride)
        if not 0 <= start < size:
            return None
        found.append(range(start, start + 1))
    wide = [d for d, size in enumerate(base.size) if size > 1]
    for size, stride in zip(view.size, view.stride, strict=True):
        if size == 1 or not stride:
            continue
        first = min((d for d in wide if strides[d] <= stride), default=-1)
        outward = [d for d in wide if d <= first]
        while size > 1:
            if not outward or len(found[outward[-1]]) > 1 or stride % strides[outward[-1]]:
                return None
            dim = outward.pop()
            start, step = found[dim].start, stride // strides[dim]
            count = min(size, len(range(start, base.size[dim], step)))
            if count < size and ((start, step, count) != (0, 1, base.size[dim]) or size % count):
                return None
            found[dim] = range(start, start + (count - 1) * step + 1, step)
            size, stride = size // count, strides[dim] * base.size[dim]
    return found


def ranges_of(flat: torch.Tensor, sizes: Sequence[int]) -> list[range] | None:
    """
    Return elements of a tensor of the sizes `sizes` as one range of positions for each dim, given their flat positions
    `flat` [n], n > 0: these must be all combinations of the ranges, in row-major order. None if they are not.

    Given positions 1, 2, 5, 6 in sizes 2 and 4, returns ranges 0 to 1 and 1 to 2.
    """
    found: list[range] = []
    rest = flat
    for size in reversed(sizes):
        places_in_dim: Any = rest % size
        values: list[int] = sorted({*places_in_dim.tolist()})
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
    """
    Return `x` with a block of its elements replaced by `part`. `ranges` has, for each dim, the range of the block's
    positions; `part` has their lengths as its sizes.
    """
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
