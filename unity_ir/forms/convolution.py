"""
Recognise convolutions, poolings and their gradients by the form of a bound line (an operator's definition in the tensor
description language TDL at given shapes), not by its operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from unity_ir.forms.rewrite import canonical, fold, rename
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Composite,
    Const,
    Expr,
    Name,
    Reduce,
    Result,
    Segments,
    Var,
    Window,
    accesses,
    index_names,
)


@dataclass(frozen=True, slots=True)
class Sliding:
    """
    A window along one dim, at position `stride * outer + dilation * inner` plus its offset: the index variable `outer`
    counts windows, `inner` the taps (positions in the kernel).

    A window has no variables of extent 1, so `outer` or `inner` is "" where such a variable is not found elsewhere.
    """

    window: Window
    outer: str
    inner: str
    stride: int
    dilation: int


@dataclass(frozen=True, slots=True)
class Convolution:
    """
    A convolution, or its gradient by the image (data) or the weight: sums of products along windows.

    | form | `image` | `other` | result |
    |---|---|---|---|
    | forward | [batch, (groups shared), windows] | [(groups own), shared, inner] | [batch, (groups own), outer] |
    | data | [batch, (groups own), outer] | [(groups own), shared, inner] | [batch, (groups shared), windows] |
    | weight | [batch, (groups shared), windows] | [batch, (groups own), outer] | [(groups own), shared, inner] |

    Each name stands for any number of variables; `outer` and `inner` are those of the `slidings`, one per window.
    `groups` index all three tensors, every other variable two of them.
    """

    form: Literal["forward", "data", "weight"]
    image: Access
    other: Access
    batch: tuple[str, ...]
    groups: tuple[str, ...]
    shared: tuple[str, ...]
    own: tuple[str, ...]
    slidings: tuple[Sliding, ...]
    """The windows along one to three dims, in the order of the dims."""


def convolution(result: Sequence[object], expr: Expr, extents: Mapping[str, int]) -> Convolution | None:
    """
    Match a result of a bound TDL line as a convolution, or its gradient by the image or the weight; return its tensors,
    its windows and which index variables are batch, groups and channels, or None for anything else.

    `result` has the indices of the result's dims, `expr` is the expression of its elements. `extents` maps each index
    variable to its number of positions.
    """
    match expr:
        case Reduce("sum", _, Binary("*", Access() as left, Access() as right)):
            reduced = frozenset(expr.names)
        case _:
            return None
    written = any(isinstance(i, Window) for i in result)
    reads = [any(isinstance(i, Window) for i in a.indices) for a in (left, right)]
    if written and not any(reads):
        return _scattered(reduced, left, right, result, extents) or _scattered(reduced, right, left, result, extents)
    if written or all(reads) or not any(reads):
        return None
    return _gathered(reduced, *((left, right) if reads[0] else (right, left)), extents)


def _gathered(reduced: frozenset[str], image: Access, other: Access, extents: Mapping[str, int]) -> Convolution | None:
    """Match a convolution whose image is read through windows."""
    slidings = _slidings_of(image.indices, reduced)
    a, b = _plain_names(image), _plain_names(other)
    if slidings is None or a is None or b is None:
        return None
    slidings = _named(slidings, (), [n for n in b if n in reduced and n not in a], extents)
    inner, outer = ({s.inner for s in slidings} - {""}, {s.outer for s in slidings} - {""})
    both = {*a} & {*b}
    summed = both & reduced
    if not inner <= {*b} or outer & {*b} or (inner | outer) & {*a} or {*reduced} != inner | summed:
        return None
    batch, own = (tuple(n for n in names if n not in both | inner) for names in (a, b))
    groups, shared = (tuple(n for n in a if n in some) for some in (both - reduced, summed))
    if prod(extents[n] for n in inner) > prod(extents[n] for n in outer):
        # The reduced side of the windows is the longer one: this is a weight's gradient.
        turned = tuple(Sliding(s.window, s.inner, s.outer, s.dilation, s.stride) for s in slidings)
        return Convolution("weight", image, other, shared, groups, batch, own, turned)
    return Convolution("forward", image, other, batch, groups, shared, own, slidings)


def _scattered(
    reduced: frozenset[str], image: Access, other: Access, result: Sequence[object], extents: Mapping[str, int]
) -> Convolution | None:
    """Match a convolution whose result is written through windows; the shorter side of each window is the kernel's."""
    a, b = _plain_names(image), _plain_names(other)
    if a is None or b is None:
        return None
    slidings = _slidings_of(result, frozenset(b))
    if slidings is None:
        return None
    kept = {n for i in result if isinstance(i, Var | Composite) for n in index_names(i)}
    both = {*a} & {*b}
    may = kept | both
    slidings = _named(slidings, [n for n in a if n not in may], [n for n in b if n not in may], extents)
    inner, outer = ({s.inner for s in slidings} - {""}, {s.outer for s in slidings} - {""})
    if not (outer <= {*a} and reduced <= both) or outer & {*b} or inner & {*a}:
        return None
    if prod(extents[n] for n in inner) > prod(extents[n] for n in outer):
        return None
    batch, shared = (tuple(n for n in names if n not in both | inner | outer) for names in (a, b))
    groups, own = (tuple(n for n in a if n in some) for some in (both - reduced, reduced))
    if not {*batch, *groups, *shared} <= kept:
        return None
    return Convolution("data", image, other, batch, groups, shared, own, slidings)


def _named(
    slidings: Sequence[Sliding], outer: Sequence[str], inner: Sequence[str], extents: Mapping[str, int]
) -> tuple[Sliding, ...]:
    """Return the windows with empty names filled in, in order, by those of `outer` and `inner` that have extent 1."""
    used = {n for s in slidings for n in (s.outer, s.inner)}
    outers, inners = (iter([n for n in names if extents[n] == 1 and n not in used]) for names in (outer, inner))
    return tuple(replace(s, outer=s.outer or next(outers, ""), inner=s.inner or next(inners, "")) for s in slidings)


def pointwise_convolution(expr: Expr, extents: Mapping[str, int]) -> Convolution | None:
    """
    Match an expression as a 1 x 1 convolution or the gradient of its weight: without windows, a matrix product at every
    position of two or three trailing dims. Return its tensors and which index variables are batch and channels, or None
    for anything else.

    `extents` maps each index variable to its number of positions.
    """
    match expr:
        case Reduce("sum", _, Binary("*", Access() as left, Access() as right)):
            reduced = frozenset(n for n in expr.names if extents[n] > 1)
            return _pointwise(reduced, right, left, extents) or _pointwise(reduced, left, right, extents)
        case _:
            return None


def _pointwise(reduced: frozenset[str], image: Access, other: Access, extents: Mapping[str, int]) -> Convolution | None:
    a, b = _plain_names(image), _plain_names(other)
    if a is None or b is None or any(isinstance(i, Window) for i in (*image.indices, *other.indices)):
        return None
    both = {*a} & {*b}
    for form in ("forward", "weight"):
        last = _trailing(image, lambda n: n in reduced & both if form == "weight" else n not in reduced | {*b})
        taps = [n for n in b if extents[n] == 1 and n not in a]
        named = taps if form == "forward" and len(taps) == len(last) else [""] * len(last)
        summed = tuple(n for n in a if n in both & reduced and n not in last)
        groups = tuple(n for n in a if n in both - reduced)
        free = tuple(n for n in a if n not in both and n not in last)
        own = tuple(n for n in b if n not in both and n not in taps)
        if (
            len(last) not in (2, 3)
            or prod(extents[n] for n in last) == 1
            or not (summed and free and own)
            or not reduced <= both
        ):
            continue
        if form == "weight" and _trailing(other, lambda n: n in last) != last:
            continue
        windows = {n: Window(((1, n),), 0, extents[n], extents[n]) for n in last}
        indices = tuple(windows.get(i.name, i) if isinstance(i, Var) else i for i in image.indices)
        slidings = tuple(Sliding(w, n, inner, 1, 1) for (n, w), inner in zip(windows.items(), named, strict=True))
        first, second = (free, summed) if form == "forward" else (summed, free)
        return Convolution(form, Access(image.tensor, indices), other, first, groups, second, own, slidings)
    return None


def _trailing(access: Access, are: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the variables of the longest sequence of last dims that are one variable each, for which `are` holds."""
    found: list[str] = []
    for index in reversed(access.indices):
        if not isinstance(index, Var) or not are(index.name):
            break
        found.append(index.name)
    return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Pooling:
    """A maximum or a sum over windows of one tensor."""

    kind: str
    """`max` or `sum`."""
    image: Access
    slidings: tuple[Sliding, ...]
    """The windows along one to three dims, in the order of the dims."""


def pooling(expr: Expr, extents: Mapping[str, int]) -> Pooling | None:
    """
    Match an expression as a pooling, the maximum or sum of each window of one tensor: `max[i](x[.., 2*y + i])`; return
    its kind, tensor and windows, or None for anything else.

    `extents` maps each index variable to its number of positions.
    """
    match expr:
        case Reduce("max" | "sum" as kind, _, Access() as image):
            slidings = _slidings_of(image.indices, frozenset(expr.names))
            plain = _plain_names(image)
            names = {n for n in expr.names if extents[n] > 1}
            if slidings is None or plain is None or {s.inner for s in slidings} - {""} != names:
                return None
            if not {n for s in slidings for n in (s.inner, s.outer)}.isdisjoint(plain):
                return None
            return Pooling(kind, image, slidings)
        case _:
            return None


def pooled_sum(result: Sequence[object], expr: Expr) -> tuple[Sliding, ...] | None:
    """
    Match a result as the gradient of a sum pooling: one value is added to every position of a window, as in `out[..,
    2*y + i] = g[.., y]`. Return its windows, one to three, in the order of the dims.

    `result` has the indices of the result's dims, `expr` is the expression of its elements. In each window one variable
    at most (y) occurs in `expr`, and one at most (i) does not; returns None for any other result, and if there are no
    windows.
    """
    free = free_variables(expr)
    inner = frozenset(n for i in result if isinstance(i, Window) for n in index_names(i) if n not in free)
    return _slidings_of(result, inner)


@dataclass(frozen=True, slots=True)
class MaxPoolingGradient:
    """The gradient of a max pooling: `value` is added to the first maximum of each of the pooling's windows."""

    value: Expr
    """The gradient that each window adds to its maximum."""
    pooling: Pooling
    written: tuple[Window, ...]
    """The windows of the result."""


def max_pooling_gradient(bound: Bound, result: Result, starts: Mapping[str, str]) -> MaxPoolingGradient | None:
    """
    Match a result of a bound TDL line as the gradient of a max pooling, which is added to the first maximum (in
    row-major order) of each window; return the pooling, the value added and the windows of the result, or None for
    anything else.

    `starts` maps each index variable of which a task computes only a part to the name of the kernel argument with the
    global index at which the part begins; the others begin at 0.
    """
    match result.expr:
        case Call("where", (Call("eq", (_, Reduce("min") as first)), value, Const(0))):
            pass
        case _:
            return None
    image = next((a for a in accesses(first) if any(isinstance(i, Window) for i in a.indices)), None)
    written = [n for i in result.indices if isinstance(i, Window) for n in index_names(i)]
    outer = free_variables(first)
    own = _slidings_of(result.indices, frozenset(written) - outer)
    slidings = None if image is None else _slidings_of(image.indices, free_variables(image) - outer)
    if own is None or slidings is None or image is None or len(own) != len(slidings):
        return None
    if not all(s.inner for s in (*own, *slidings)):
        return None
    names = {s.inner: o.inner for s, o in zip(slidings, own, strict=True)}
    image = rename(image, names)
    assert isinstance(image, Access)
    indices = tuple(Var(s.inner) for s in own)
    place: Expr = Const(0.0)
    for s in own:
        place = Binary("+", Binary("*", place, Const(float(bound.extents[s.inner]))), Name(s.inner))
    count = prod(bound.extents[s.inner] for s in own)
    top = Reduce("max", indices, image)
    place_of_first = Reduce("min", indices, Call("where", (Call("eq", (image, top)), place, Const(float(count)))))
    expected = fold(Call("where", (Call("eq", (place, place_of_first)), value, Const(0.0))), bound, starts)
    found = pooling(top, bound.extents)
    if found is None or canonical(expected, bound.extents, starts) != canonical(result.expr, bound.extents, starts):
        return None
    same = all(
        (s.outer, s.inner, s.stride, s.dilation) == (o.outer, o.inner, o.stride, o.dilation)
        for s, o in zip(found.slidings, own, strict=True)
    )
    return MaxPoolingGradient(value, found, tuple(o.window for o in own)) if same else None


def _slidings_of(indices: Sequence[object], inner: Collection[str]) -> tuple[Sliding, ...] | None:
    """
    Return the windows among the indices of a tensor's dims, in order, each taken apart into stride, dilation, the
    variable that counts windows and the variable that counts positions in the kernel; other indices are left out.

    Variables of `inner` count positions in the kernel. None if a window has more than one variable of either kind, two
    windows share one, or there are none or more than three.
    """
    found: list[Sliding] = []
    for index in indices:
        if not isinstance(index, Window):
            continue
        ends = [t for t in index.terms if t[1] in inner] or [(1, "")]
        others = [t for t in index.terms if t[1] not in inner] or [(1, "")]
        if len(ends) != 1 or len(others) != 1:
            return None
        found.append(Sliding(index, others[0][1], ends[0][1], others[0][0], ends[0][0]))
    names = [n for s in found for n in (s.outer, s.inner) if n]
    return tuple(found) if 0 < len(found) <= 3 and len({*names}) == len(names) else None


def _plain_names(access: Access) -> tuple[str, ...] | None:
    """
    Return the index variables of the dims of a read that are not indexed by windows, in order.

    None if a variable occurs twice, or a dim is indexed by a concatenation (`Segments`).
    """
    names: list[str] = []
    for index in access.indices:
        if isinstance(index, Segments):
            return None
        if not isinstance(index, Window):
            names += index_names(index)
    return tuple(names) if len({*names}) == len(names) else None
