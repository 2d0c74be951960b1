# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Arrays whose dims are index variables of a TDL line, and reading an operand as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from math import prod

import jax.numpy as jnp
from jax import Array, lax

from unity_ir.tdl.syntax import Composite, Segments, Slice, Var, Window, WrittenIndex, index_names


@dataclass(frozen=True)
class Named:
    """An array, or a Python number, and the index variable of each of its dims; no variable occurs twice."""

    array: Array | float
    dims: tuple[str, ...] = ()

    def ordered(self, names: Sequence[str]) -> Array | float:
        """
        Return the array with its dims in the order of `names`, and a dim of size 1 for each name that it lacks; its
        dims that are not in `names` must have size 1, and are dropped.
        """
        if not isinstance(self.array, Array):
            return self.array
        gone = tuple(d for d, n in enumerate(self.dims) if n not in names)
        array = lax.squeeze(self.array, gone) if gone else self.array
        dims = [n for n in self.dims if n in names]
        array = jnp.transpose(array, [dims.index(n) for n in names if n in dims])
        return lax.expand_dims(array, [d for d, n in enumerate(names) if n not in dims])

    def expanded(self, names: Sequence[str], extents: Mapping[str, int]) -> Array:
        """Return the array with exactly the dims `names`, each of its variable's extent."""
        return jnp.broadcast_to(jnp.asarray(self.ordered(names)), [extents[n] for n in names])


def union(values: Iterable[Named]) -> tuple[str, ...]:
    """Return the index variables of several arrays: those of the first, then what each further one has besides."""
    return tuple(dict.fromkeys(n for value in values for n in value.dims))


def read(
    array: Array,
    indices: Sequence[WrittenIndex],
    extents: Mapping[str, int],
    whole: Callable[[int], str] | None = None,
) -> Named:
    """
    Read an operand at bound indices, one for each of its dims: return the array of what is read, whose dims are the
    indices' variables. Elements that windows read outside of the operand are 0.

    `extents` has the number of positions of each index variable. With `whole`, a dim that the i-th window (from 0)
    indexes stays as it is, with the name `whole(i)`.
    """
    dims: list[str] = []
    numbers = count()
    for index in indices:
        if isinstance(index, Window) and whole is not None:
            names: tuple[str, ...] = (whole(next(numbers)),)
        else:
            array, names = _read_dim(array, len(dims), index, extents)
        dims += names
    for name in [n for n in dict.fromkeys(dims) if dims.count(n) > 1]:
        while dims.count(name) > 1:
            first = dims.index(name)
            second = dims.index(name, first + 1)
            array = jnp.diagonal(array, 0, first, second)
            dims = [*(n for d, n in enumerate(dims) if d not in (first, second)), name]
    return Named(array, tuple(dims))


def _read_dim(array: Array, dim: int, index: WrittenIndex, extents: Mapping[str, int]) -> tuple[Array, tuple[str, ...]]:
    """Read one dim at an index, in whose place there is then one dim for each of these variables."""
    match index:
        case Var(name):
            return array, (name,)
        case Composite(names):
            return _split(array, dim, [extents[n] for n in names]), names
        case Segments(names, int(active)):
            start = sum(extents[n] for n in names[:active])
            return lax.slice_in_dim(array, start, start + extents[names[active]], axis=dim), (names[active],)
        case Slice(within, start):
            names = index_names(within)
            sizes = [extents[n] for n in names]
            return _split(lax.slice_in_dim(array, start, start + prod(sizes), axis=dim), dim, sizes), names
        case Window():
            return _read_window(array, dim, index, extents)
        case _:
            raise TypeError(f"{index} is not bound")


def _split(array: Array, dim: int, sizes: Sequence[int]) -> Array:
    return array.reshape((*array.shape[:dim], *sizes, *array.shape[dim + 1 :]))


def _read_window(array: Array, dim: int, index: Window, extents: Mapping[str, int]) -> tuple[Array, tuple[str, ...]]:
    """Read one dim at an affine index: a slice with a stride for each tap of the kernel, padded with zeros before."""
    start, size = index.offset + index.low, array.shape[dim]
    pads = max(0, -start), max(0, start + index.span(extents) - size + 1)
    if any(pads):
        array = jnp.pad(array, [pads if d == dim else (0, 0) for d in range(array.ndim)])
    main, taps = _main_and_taps(index, extents)
    (factor, name), lead = main, _split(array, dim, (1, size + sum(pads)))
    pieces: list[Array] = []
    for at in product(*(range(extents[v]) for _, v in taps)):
        first = start + pads[0] + sum(c * i for (c, _), i in zip(taps, at, strict=True))
        end = first + factor * (extents.get(name, 1) - 1) + 1
        pieces.append(lax.slice_in_dim(lead, first, end, factor, axis=dim + 1))
    found = jnp.concatenate(pieces, axis=dim)
    names = (*(v for _, v in taps), *((name,) if name else ()))
    shape = (*found.shape[:dim], *(extents[n] for n in names), *found.shape[dim + 2 :])
    return found.reshape(shape), names


def _main_and_taps(index: Window, extents: Mapping[str, int]) -> tuple[tuple[int, str], Sequence[tuple[int, str]]]:
    """Return a window's term with the most positions, which is done at once, and the others, done one by one."""
    if not index.terms:
        return (1, ""), ()
    main = max(index.terms, key=lambda term: extents[term[1]])
    return main, [term for term in index.terms if term != main]


def written(array: Array, indices: Sequence[WrittenIndex], extents: Mapping[str, int]) -> Array:
    """
    Write an array, with a dim for each variable of the indices, in their order, as a result with one dim for each
    index. What windows write to one position is added up, what they write outside is dropped.

    `extents` has the number of positions of each index variable.
    """
    for dim, index in enumerate(indices):
        if isinstance(index, Window):
            array = _written_window(array, dim, index, extents)
        elif len(names := index_names(index)) > 1:
            array = array.reshape((*array.shape[:dim], -1, *array.shape[dim + len(names) :]))
    return array


def _written_window(array: Array, dim: int, index: Window, extents: Mapping[str, int]) -> Array:
    (factor, name), taps = _main_and_taps(index, extents)
    names = [v for _, v in index.terms]
    array = jnp.moveaxis(array, [dim + names.index(v) for _, v in taps], range(len(taps))) if taps else array
    if not name:
        array = jnp.expand_dims(array, dim)
    rank, positions = array.ndim - len(taps), extents.get(name, 1)
    out: Array | None = None
    for at in product(*(range(extents[v]) for _, v in taps)):
        first = index.offset + index.low + sum(c * i for (c, _), i in zip(taps, at, strict=True))
        after = index.size - first - factor * (positions - 1) - 1
        pads = [(first, after, factor - 1) if d == dim else (0, 0, 0) for d in range(rank)]
        part = lax.pad(array[at], jnp.zeros((), array.dtype), pads)
        out = part if out is None else out + part
    assert out is not None, "every variable has a position"
    return out
