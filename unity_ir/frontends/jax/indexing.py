# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""JAX's gathers and scatters, of which the usual ones are PyTorch's: those that pick or place whole slices of dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.values import Operand, to_torch

Tensor: TypeAlias = torch.Tensor

_WINDOWS = "it picks windows at places that depend on data; pick single positions"


Columns: TypeAlias = "Sequence[Operand]"
"""Indices: for each dim that they are of an array of positions, all of one shape."""


def gather(eqn: Any, x: Operand, columns: Columns) -> Tensor:
    """`lax.gather` that picks single positions along some dims, and all of the others; ids must be in range."""
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    source = to_torch(x)
    picked, batch = list(map(int, dims.start_index_map)), list(map(int, dims.operand_batching_dims))
    others = [d for d in range(source.dim()) if d not in (*picked, *batch)]
    if any(sizes[d] != source.shape[d] for d in others) or any(sizes[d] != 1 for d in (*picked, *batch)):
        return _window(eqn, source, columns)
    shape = tuple(eqn.outvars[0].aval.shape)
    of_batch = [_own_positions(columns[0], int(d)) for d in dims.start_indices_batching_dims]
    if "CLIP" in str(eqn.params.get("mode")).upper():
        columns = [to_torch(c).clamp(0, source.shape[d] - 1) for c, d in zip(columns, picked, strict=True)]
    at = dict(zip((*batch, *picked), (*of_batch, *columns), strict=True))
    if not others and (along := _along(source, [at[d] for d in range(source.dim())])) is not None:
        return along.reshape(shape)
    if picked == [0] and not batch and source.dim() == 2:
        found = torch.nn.functional.embedding(to_torch(columns[0]), source)
    else:
        found = source.permute(*at, *others)[tuple(to_torch(c).long() for c in at.values())]
    # [places.., others..]: single positions that are kept as dims of size 1 are reshaped in.
    offsets = [int(d) for d in dims.offset_dims]
    rest = [d for d in range(len(shape)) if d not in offsets]
    order = [0] * len(shape)
    for place, dim in enumerate((*rest, *offsets)):
        order[dim] = place
    wide = found.reshape(*(shape[d] for d in rest), *(shape[d] for d in offsets))
    return wide.permute(order)


def _along(source: Tensor, columns: Columns) -> Tensor | None:
    """
    Return the elements of a tensor at positions along all of its dims, of which one is picked by ids, and the others
    are each element's own (`x[arange(n), ids]`, `take_along_axis`), in the shape of the positions. Else None.
    """
    places = np.broadcast_shapes(*(tuple(c.shape) for c in columns))
    free = [d for d, c in enumerate(columns) if isinstance(c, Tensor) or not _is_own(c, places, source.shape[d])]
    if len(free) != 1 or not isinstance(columns[free[0]], Tensor):
        return None
    (dim,) = free
    axes = [_axis(c, places) for d, c in enumerate(columns) if d != dim]
    ids = to_torch(columns[dim]).long().expand(places)
    if axes == [*range(dim), *range(dim + 1, source.dim())] and len(places) == source.dim():
        return torch.gather(source, dim, ids)
    if axes == [*range(source.dim() - 1)] and len(places) == source.dim() - 1:
        return torch.gather(source, dim, ids.unsqueeze(dim)).squeeze(dim)
    return None


def _axis(column: Operand, places: Sequence[int]) -> int:
    """Return the one axis of the places along which known positions change; 0 for a single place."""
    wide = np.broadcast_to(np.asarray(column), places)
    return next((a for a in range(wide.ndim) if wide.strides[a] and wide.shape[a] > 1), 0)


def _is_own(column: Operand, places: tuple[int, ...], size: int) -> bool:
    """Return whether known positions count up along one axis of the places, to the size of a dim."""
    wide = np.broadcast_to(np.asarray(column), places)
    axis = _axis(column, places)
    counted = np.arange(size).reshape([-1 if a == axis else 1 for a in range(wide.ndim)])
    return wide.ndim > 0 and wide.shape[axis] == size and bool(np.array_equal(wide, np.broadcast_to(counted, places)))


def _own_positions(column: Operand, axis: int) -> np.ndarray[Any, Any]:
    """Return positions that count up along an axis of places, given other positions at these places."""
    shape = tuple(column.shape)
    return np.broadcast_to(np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))]), shape)


def _window(eqn: Any, source: Tensor, columns: Columns) -> Tensor:
    """Return the one window that a gather picks at known places."""
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if not all(isinstance(c, np.ndarray) and c.ndim == 0 for c in columns) or dims.operand_batching_dims:
        raise UnityError(_WINDOWS)
    for dim, start in zip(dims.start_index_map, columns, strict=True):
        size = int(sizes[dim])
        source = source.narrow(int(dim), int(np.clip(start, 0, source.shape[dim] - size)), size)
    for dim in range(source.dim()):
        source = source.narrow(dim, 0, int(sizes[dim]))
    return source.reshape(eqn.outvars[0].aval.shape)


def dynamic_slice(eqn: Any, x: Operand, *starts: Operand) -> Tensor:
    """`lax.dynamic_slice`: at a known place a slice, else positions picked along each dim."""
    source = to_torch(x)
    for dim, (start, size) in enumerate(zip(starts, eqn.params["slice_sizes"], strict=True)):
        last = source.shape[dim] - int(size)
        if isinstance(start, np.ndarray):
            if size != source.shape[dim]:
                source = source.narrow(dim, int(np.clip(start, 0, last)), int(size))
        elif last:
            source = torch.index_select(source, dim, start.long().clamp(0, last) + torch.arange(int(size)))
    return source


def dynamic_update_slice(eqn: Any, x: Operand, update: Operand, *starts: Operand) -> Tensor:
    """`lax.dynamic_update_slice` at a known place."""
    del eqn
    source, new = to_torch(x), to_torch(update)
    if not all(isinstance(start, np.ndarray) for start in starts):
        raise UnityError("the place that it writes to depends on data; choose by jnp.where")
    out = source.clone()
    places = [int(np.clip(s, 0, n - m)) for s, n, m in zip(starts, source.shape, new.shape, strict=True)]
    out[tuple(slice(p, p + m) for p, m in zip(places, new.shape, strict=True))] = new
    return out


def scatter(eqn: Any, x: Operand, columns: Columns, updates: Operand) -> Tensor:
    """`x.at[indices].set(updates)`."""
    return _put(eqn, x, columns, updates, False)


def scatter_add(eqn: Any, x: Operand, columns: Columns, updates: Operand) -> Tensor:
    """`x.at[indices].add(updates)`."""
    return _put(eqn, x, columns, updates, True)


def _put(eqn: Any, x: Operand, columns: Columns, updates: Operand, adds: bool) -> Tensor:
    dims = eqn.params["dimension_numbers"]
    source, new = to_torch(x), to_torch(updates)
    picked = list(map(int, dims.scatter_dims_to_operand_dims))
    batch = list(map(int, dims.operand_batching_dims))
    inserted = list(map(int, dims.inserted_window_dims))
    others = [d for d in range(source.dim()) if d not in (*picked, *batch)]
    windows = list(map(int, dims.update_window_dims))
    whole = [d for d in range(source.dim()) if d not in (*inserted, *batch)]
    if any(new.shape[w] != source.shape[d] for w, d in zip(windows, whole, strict=True) if d in others):
        raise UnityError("it places windows; place single positions, or use lax.dynamic_update_slice")
    single = [w for w, d in zip(windows, whole, strict=True) if d in picked]
    if any(new.shape[w] != 1 for w in single):
        if all(isinstance(c, np.ndarray) and c.ndim == 0 for c in columns) and not batch and not inserted:
            return _put_window(source, new, picked, columns, adds)
        raise UnityError("it places windows; place single positions, or use lax.dynamic_update_slice")
    rest = [d for d in range(new.dim()) if d not in windows]
    new = new.permute(*rest, *(w for w in windows if w not in single), *single)
    new = new.reshape(new.shape[: new.dim() - len(single)])
    of_batch = [_own_positions(columns[0], int(d)) for d in dims.scatter_indices_batching_dims]
    at = [to_torch(c).long() for c in (*of_batch, *columns)]
    order = [*batch, *picked, *others]
    moved = source.permute(order)
    out = moved.index_put(tuple(at), new, accumulate=adds)
    back = [0] * len(order)
    for place, dim in enumerate(order):
        back[dim] = place
    return out.permute(back)


def _put_window(source: Tensor, new: Tensor, picked: Sequence[int], starts: Any, adds: bool) -> Tensor:
    places = [slice(None)] * source.dim()
    for dim, start in zip(picked, starts, strict=True):
        first = int(np.clip(start, 0, source.shape[dim] - new.shape[dim]))
        places[dim] = slice(first, first + new.shape[dim])
    out = source.clone()
    out[tuple(places)] = out[tuple(places)] + new if adds else new
    return out
