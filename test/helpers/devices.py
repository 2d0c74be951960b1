"""A machine's devices, simulated: what each holds of a value, and what the planner's moves do to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, Layout, Mesh, coordinate_of, is_pinned, is_shard, pins_of
from unity_ir.tdl.functions import Array

Held = list[Array | None]
"""What every device holds; nothing where the value is not."""


def legal(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the sizes divide."""
    return all(s % prod(m for m, r in zip(mesh.sizes, layout, strict=True) if r == d) == 0 for d, s in enumerate(shape))


def layouts(shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """Every legal layout."""
    roles = (*range(len(shape)), COPY, SUM, REPEAT)
    return [x for x in product(roles, repeat=len(mesh.sizes)) if legal(x, shape, mesh)]


def there(device: int, pinned: Sequence[tuple[int, int]], mesh: Mesh) -> bool:
    """Whether a device is where the pinned axes say."""
    coordinates = mesh.coordinates(device)
    return all(coordinates[axis] == coordinate for axis, coordinate in pinned)


def number(coordinates: Sequence[int], sizes: Sequence[int], axes: Sequence[int]) -> int:
    """The position along some axes, the first outermost."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return index


def part(array: Array, dim: int, index: int, count: int) -> Array:
    size, rest = divmod(array.shape[dim], count)
    assert rest == 0
    return array[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)]


def scatter(value: Array, layout: Layout, mesh: Mesh, seed: int = 0) -> Held:
    """The value as its devices hold it in a layout; addends are random."""
    random = np.random.default_rng(seed)
    summed = [i for i, r in enumerate(layout) if r == SUM]
    count = prod(mesh.sizes[i] for i in summed)
    addends = [random.integers(-9, 9, value.shape) for _ in range(count - 1)]
    addends.append(value - sum(addends, np.zeros_like(value)))
    held: Held = []
    for device in range(mesh.devices):
        if not there(device, pins_of(layout), mesh):
            held.append(None)
            continue
        at = mesh.coordinates(device)
        array = addends[number(at, mesh.sizes, summed)]
        for dim in range(value.ndim):
            axes = [i for i, r in enumerate(layout) if r == dim]
            array = part(array, dim, number(at, mesh.sizes, axes), prod(mesh.sizes[i] for i in axes))
        held.append(array)
    return held


def stands_for(held: Held, value: Array, layout: Layout, mesh: Mesh) -> bool:
    """Whether the devices hold the value in this layout: copies equal, pieces in place, addends adding up."""
    shape = tuple(
        s // prod(m for m, r in zip(mesh.sizes, layout, strict=True) if r == d) for d, s in enumerate(value.shape)
    )
    if any(a.shape != shape for a in held if a is not None):
        return False
    same: dict[tuple[int, ...], Array] = {}
    whole = np.zeros_like(value)
    for device, array in enumerate(held):
        if not there(device, pins_of(layout), mesh):
            continue
        if array is None:
            return False
        at = mesh.coordinates(device)
        key = tuple(c for c, r in zip(at, layout, strict=True) if r not in (COPY, REPEAT))
        if key in same:
            if not np.array_equal(same[key], array):
                return False
            continue
        same[key] = array
        window: list[slice] = []
        for dim, size in enumerate(shape):
            i = number(at, mesh.sizes, [a for a, r in enumerate(layout) if r == dim])
            window.append(slice(i * size, (i + 1) * size))
        whole[(*window, ...)] += array
    return np.array_equal(whole, value)


def perform(move: Move, held: Held, mesh: Mesh) -> Held:
    """What the devices hold after a move."""
    out: Held = list(held)
    for group in mesh.groups(move.axes):
        if not there(group[0], move.pins, mesh):
            assert all(held[d] is None for d in group), "those aside hold nothing"
            continue
        arrays = [held[d] for d in group]
        order = [number(mesh.coordinates(d), mesh.sizes, move.axes) for d in group]
        assert order == list(range(move.group)), "a group is in the order of its axes"
        holders = [coordinate_of(move.source)] if is_pinned(move.source) else range(move.group)
        assert all(arrays[i] is not None and arrays[i].size == move.elements for i in holders)
        for i, device in enumerate(group):
            out[device] = _after(move, arrays, i)
            assert out[device] is None or out[device].size == move.elements_after
    return out


def _after(move: Move, arrays: list[Array | None], i: int) -> Array | None:
    n, own = move.group, arrays[i]
    if is_pinned(move.target) and i != coordinate_of(move.target):
        return None
    if is_pinned(move.source):
        root = arrays[coordinate_of(move.source)]
        match move.kind:
            case "broadcast" | "send":
                return root
            case "scatter":
                return part(root, move.target, i, n)
            case "zero_pad":
                return root if i == coordinate_of(move.source) else np.zeros_like(root)
            case kind:
                raise AssertionError(kind)
    match move.kind:
        case "gather":
            return np.concatenate(arrays, move.source)
        case "reduce":
            return np.sum(arrays, axis=0)
        case "retype":
            return own
        case "slice":
            return part(own, move.target, i, n)
        case "all_gather":
            return np.concatenate(arrays, move.source)
        case "all_reduce":
            return np.sum(arrays, axis=0)
        case "reduce_scatter":
            return part(np.sum(arrays, axis=0), move.target, i, n)
        case "all_to_all":
            return np.concatenate([part(a, move.target, i, n) for a in arrays], move.source)
        case "zero_pad" if is_shard(move.source):
            return np.concatenate([a if j == i else np.zeros_like(a) for j, a in enumerate(arrays)], move.source)
        case "zero_pad":
            return own if i == 0 else np.zeros_like(own)
        case kind:
            raise AssertionError(kind)
