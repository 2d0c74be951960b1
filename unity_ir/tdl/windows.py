"""
Numpy semantics of windows (affine indices, as of convolutions): reading dims at `stride*y + i - pad`, and adding up
what is written at such positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from unity_ir.tdl.functions import Array
from unity_ir.tdl.syntax import Composite, Index, Var, Window


def read(array: Array, indices: Sequence[Index], extents: Mapping[str, int], order: Sequence[str]) -> Array:
    """
    Read an array as a function of index variables: return a read-only numpy view with one axis for each variable of
    `order`. The axis is as long as the variable's extent, or of size 1 if the variable is in none of `indices`, the
    indices of the array's dims.

    `extents` maps each index variable to its number of positions. Elements that windows read outside of the array are
    0.
    """
    starts: list[int] = []
    pads: list[tuple[int, int]] = []
    for index, size in zip(indices, array.shape, strict=True):
        start, reach = _local(index, extents)
        before = max(0, -start)
        pads.append((before, max(0, start + reach - size + 1)))
        starts.append(start + before)
    padded = np.pad(array, pads) if any(map(any, pads)) else array
    padded = padded[tuple(slice(s, None) for s in starts)]
    strides: dict[str, int] = {}
    for index, stride in zip(indices, padded.strides, strict=True):
        for factor, variable in _terms(index, extents):
            strides[variable] = strides.get(variable, 0) + factor * stride
    shape = [extents[v] if v in strides else 1 for v in order]
    return as_strided(padded, shape, [strides.get(v, 0) for v in order], writeable=False)


def inside(index: Window, extents: Mapping[str, int], offsets: Mapping[str, int], order: Sequence[str]) -> Array:
    """
    Return a boolean array that is True where a window's position lies inside of the whole tensor, with an axis per
    variable of `order`, of size 1 for variables that the window does not have.

    `extents` maps variables to their numbers of positions in this task, `offsets` to the global index at which they
    begin (0 if left out).
    """
    position = np.full((1,) * len(order), index.offset)
    for factor, variable in index.terms:
        shape = [extents[v] if v == variable else 1 for v in order]
        position = position + factor * (np.arange(extents[variable]) + offsets.get(variable, 0)).reshape(shape)
    return (position >= 0) & (position < index.whole)


def write(value: Array, indices: Sequence[Index], extents: Mapping[str, int]) -> Array:
    """
    Write `value` through windows (as in a convolution's gradient): return an array of the shape that `indices`, the
    indices of its dims, describe, in which elements written to one position are added up, and others are 0.

    `value` has an axis for each variable of the indices, in their order. Elements written outside are dropped.
    `extents` maps each index variable to its number of positions.
    """
    # A dim by several variables in the usual way, outermost first, is one axis.
    terms = [
        [(1, i)] if isinstance(index, Composite) else list(_terms(index, extents)) for i, index in enumerate(indices)
    ]
    sizes: dict[object, int] = {**extents, **{i: _size(index, extents) for i, index in enumerate(indices)}}
    axes = [v for own in terms for _, v in own]
    value = value.reshape([sizes[v] for v in axes])
    out = np.zeros([_size(i, extents) for i in indices], dtype=value.dtype)
    # The longest variable of each dim is done at once, the others (the taps of a kernel) one by one.
    long = [max(own, key=lambda t: sizes[t[1]], default=None) for own in terms]
    taps = [t for own, main in zip(terms, long, strict=True) for t in own if t != main]
    for at in product(*(range(sizes[v]) for _, v in taps)):
        where = {v: i for (_, v), i in zip(taps, at, strict=True)}
        target: list[slice] = []
        source: dict[object, slice | int] = {**where}
        for index, own, main, size in zip(indices, terms, long, out.shape, strict=True):
            start = _local(index, extents)[0] + sum(c * where[v] for c, v in own if v in where)
            factor, count = (1, 1) if main is None else (main[0], sizes[main[1]])
            first = max(0, -(start // factor))
            last = min(count, (size - 1 - start) // factor + 1)
            if last <= first:
                break
            target.append(slice(start + factor * first, start + factor * (last - 1) + 1, factor))
            if main is not None:
                source[main[1]] = slice(first, last)
        else:
            into = out[tuple(target)]
            into += value[tuple(source[v] for v in axes)].reshape(into.shape)
    return out


def _size(index: Index, extents: Mapping[str, int]) -> int:
    return index.size if isinstance(index, Window) else prod(extents[v] for _, v in _terms(index, extents))


def _terms(index: Index, extents: Mapping[str, int]) -> Sequence[tuple[int, str]]:
    """Return the position an index stands for, as coefficients of its variables."""
    match index:
        case Var(name):
            return ((1, name),)
        case Composite(names):
            return tuple((prod(extents[v] for v in names[i + 1 :]), v) for i, v in enumerate(names))
        case Window(terms):
            return terms
        case _:
            raise TypeError(f"{index} stands beside a window")


def _local(index: Index, extents: Mapping[str, int]) -> tuple[int, int]:
    """Return the first position in the array, and how far positions reach beyond it."""
    reach = sum(c * (extents[v] - 1) for c, v in _terms(index, extents))
    return (index.offset + index.low if isinstance(index, Window) else 0), reach
