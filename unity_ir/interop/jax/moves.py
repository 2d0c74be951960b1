# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
"""Perform the moves of a program on a device's piece, inside of `jax.shard_map`, by a collective of `jax.lax` each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.sharding import is_shard
from unity_ir.plan.instructions import HaloExchange, ReshardMove

Axes = tuple[str, ...]
"""Names of dims of the mesh, the outermost first."""


def move(step: ReshardMove, axes: Axes, ways: int) -> Callable[[Array], Array] | None:
    """
    Return a function that performs a move of a reshard along mesh dims `axes`, which have `ways` devices: it takes a
    device's piece, and returns the piece after the move. None if the move changes no bytes.
    """
    source, target = step.source, step.target
    if COLLECTIVES[step.kind].is_free:
        return None
    match step.kind:
        case "all_reduce":
            return lambda piece: lax.psum(piece, axes)
        case "all_gather":
            return lambda piece: lax.all_gather(piece, axes, axis=source, tiled=True)
        case "reduce_scatter":
            return lambda piece: lax.psum_scatter(piece, axes, scatter_dimension=target, tiled=True)
        case "all_to_all":
            return lambda piece: lax.all_to_all(piece, axes, target, source, tiled=True)
        case "slice":
            return lambda piece: _part(piece, axes, ways, target)
        case "zero_pad" if is_shard(source):
            return lambda piece: _among_zeros(piece, axes, ways, source)
        case "zero_pad":
            return lambda piece: jnp.where(lax.axis_index(axes) == 0, piece, jnp.zeros_like(piece))
        case _:
            raise TypeError(f"{step.kind} is of one device with others, which is refused before")


def _part(piece: Array, axes: Axes, ways: int, dim: int) -> Array:
    """Return this device's shard of a replica."""
    size = piece.shape[dim] // ways
    return lax.dynamic_slice_in_dim(piece, lax.axis_index(axes) * size, size, dim)


def _among_zeros(piece: Array, axes: Axes, ways: int, dim: int) -> Array:
    """Return a shard as an addend of the whole, with zeros where other devices' shards are."""
    size = piece.shape[dim]
    whole = jnp.zeros((*piece.shape[:dim], ways * size, *piece.shape[dim + 1 :]), piece.dtype)
    return lax.dynamic_update_slice_in_dim(whole, piece, lax.axis_index(axes) * size, dim)


def exchange(step: HaloExchange, axes: Axes, ways: int) -> Callable[[Array], Array]:
    """
    Return a function that performs a halo exchange along mesh dims `axes`, which have `ways` devices: it takes a
    device's piece, and returns it with the borders that neighbours hold (`halo`, zeros beyond the tensor's ends), or
    without its own borders, which are added to the neighbours' pieces (`halo_reduce`).
    """
    by = _halo if step.kind == "halo" else _halo_reduce
    return lambda piece: by(piece, step.dim, step.low, step.high, axes, ways)


def _overlaps(size: int, low: int, high: int, ways: int) -> list[tuple[int, int, int]]:
    """
    Return (shift, first, end) for each distance of two pieces such that one has elements of the other in its halo: the
    elements first to end of the piece `shift` places further.
    """
    found: list[tuple[int, int, int]] = []
    for shift in range(1 - ways, ways):
        first, end = max(0, -shift * size - low), min(size, -shift * size + size + high)
        if shift and first < end:
            found.append((shift, first, end))
    return found


def _pairs(shift: int, ways: int) -> Sequence[tuple[int, int]]:
    """Return (sender, receiver) of a message from each device to the one `shift` places further."""
    return [(i, i + shift) for i in range(ways) if 0 <= i + shift < ways]


def _halo(piece: Array, dim: int, low: int, high: int, axes: Axes, ways: int) -> Array:
    size = piece.shape[dim]
    pads = [(low, high) if d == dim else (0, 0) for d in range(piece.ndim)]
    out = jnp.pad(piece, pads)
    for shift, first, end in _overlaps(size, low, high, ways):
        sent = lax.slice_in_dim(piece, first, end, axis=dim)
        got = lax.ppermute(sent, axes, _pairs(-shift, ways))
        out = lax.dynamic_update_slice_in_dim(out, got, shift * size + low + first, dim)
    return out


def _halo_reduce(piece: Array, dim: int, low: int, high: int, axes: Axes, ways: int) -> Array:
    size = piece.shape[dim] - low - high
    out = lax.slice_in_dim(piece, low, low + size, axis=dim)
    for shift, first, end in _overlaps(size, low, high, ways):
        at = shift * size + low + first
        got = lax.ppermute(lax.slice_in_dim(piece, at, at + end - first, axis=dim), axes, _pairs(shift, ways))
        out = out + jnp.pad(got, [(first, size - end) if d == dim else (0, 0) for d in range(out.ndim)])
    return out
