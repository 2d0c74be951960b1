# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""JAX's gathers and scatters, of which the usual ones are PyTorch's: those that pick or place whole slices of dims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.values import Operand, to_torch

Tensor: TypeAlias = torch.Tensor

_LIMITS = (np.iinfo(np.int32).min, np.iinfo(np.int64).min)
"""Values that JAX fills in for integers where no number is given."""

Columns: TypeAlias = "Sequence[Operand]"
"""Indices: for each dim that they are of an array of positions, all of one shape."""


def gather(eqn: Any, x: Operand, columns: Columns) -> Tensor:
    """
    `lax.gather`: picks positions, or windows, along some dims, and all of the others; ids must be in range, but for
    `mode="clip"`, and for `mode="fill"` with a number to fill in.
    """
    dims, sizes = eqn.params["dimension_numbers"], list(map(int, eqn.params["slice_sizes"]))
    source, shape = to_torch(x), tuple(eqn.outvars[0].aval.shape)
    if all(isinstance(c, np.ndarray) and c.ndim == 0 for c in columns) and not dims.operand_batching_dims:
        return _window(eqn, source, columns)
    batch = list(map(int, dims.operand_batching_dims))
    at = _in_range(eqn, dict(zip(map(int, dims.start_index_map), columns, strict=True)), source, sizes)
    if any(size != source.shape[d] for d, size in enumerate(sizes) if d not in (*at.starts, *batch)):
        raise UnityError("it cuts dims that it picks nothing along; cut them before")
    of_batch = [_own_positions(columns[0], int(d)) for d in dims.start_indices_batching_dims]
    kept = [d for d in range(source.dim()) if d not in (*dims.collapsed_slice_dims, *batch)]
    windows = [d for d in kept if d in at.starts and sizes[d] > 1]
    if at.inside is None and not windows:
        every = dict(zip(batch, of_batch, strict=True)) | at.starts
        whole = len(every) == source.dim()
        along = _along(source, [every[d] for d in range(source.dim())]) if whole else None
        if along is not None:
            return along.reshape(shape)
    others = [d for d in range(source.dim()) if d not in (*at.starts, *batch)]
    places = dict(zip(batch, (_before(c, len(windows)) for c in of_batch), strict=True))
    places |= {d: _spread(c, windows, d, sizes[d]) for d, c in at.starts.items()}
    if [*at.starts] == [0] and not batch and not windows and source.dim() == 2:
        found = torch.nn.functional.embedding(to_torch(at.starts[0]), source)
    else:
        found = source.permute(*places, *others)[_positions(places.values())]
    # [places.., windows.., others..]: the dims that are kept in their order; those of size 1 are reshaped in.
    lead = found.dim() - len(windows) - len(others)
    inner = [*windows, *others]
    found = found.permute(*range(lead), *(lead + inner.index(d) for d in sorted(inner)))
    offsets = [int(d) for d in dims.offset_dims]
    rest = [d for d in range(len(shape)) if d not in offsets]
    order = [0] * len(shape)
    for place, dim in enumerate((*rest, *offsets)):
        order[dim] = place
    wide = found.reshape(*(shape[d] for d in rest), *(shape[d] for d in offsets))
    if at.inside is not None:
        inside = at.inside.reshape(*at.inside.shape, *(1,) * len(offsets))
        wide = torch.where(inside, wide, torch.full((), at.fill).to(wide.dtype))
    return wide.permute(order)


def _positions(columns: Iterable[Operand]) -> tuple[Tensor, ...]:
    """Return positions as tensors of at least one dim: a lone number would be read by the export."""
    found = [to_torch(c).long() for c in columns]
    return tuple(c.unsqueeze(0) for c in found) if all(c.dim() == 0 for c in found) else tuple(found)


@dataclass(frozen=True)
class _SliceStarts:
    """Where slices of a tensor begin."""

    starts: dict[int, Operand]
    """By dim of the tensor, without those of which a slice has all."""
    inside: Tensor | None = None
    """Whether a slice is within the tensor, where `fill` takes its place if not; None if all are."""
    fill: float = 0.0


def _in_range(eqn: Any, starts: Mapping[int, Operand], source: Tensor, sizes: Sequence[int]) -> _SliceStarts:
    """
    Return where slices of `sizes` begin, kept within the tensor as the equation's mode has it. Those that depend on
    data are taken to be there. Raises `UnityError` for known ones that are not.
    """
    mode, fill = str(eqn.params.get("mode")).upper(), eqn.params.get("fill_value")
    lasts = {d: source.shape[d] - sizes[d] for d in starts}
    if "CLIP" in mode:
        return _SliceStarts({d: _clipped(c, lasts[d]) for d, c in starts.items() if lasts[d]})
    out = {d: c for d, c in starts.items() if isinstance(c, np.ndarray) and np.any((c < 0) | (c > lasts[d]))}
    fill = math.nan if fill is None or fill in _LIMITS else float(fill)
    if (
        "FILL" in mode
        and not math.isnan(fill)
        and (out or any(isinstance(c, Tensor) for d, c in starts.items() if lasts[d]))
    ):
        given = {d: to_torch(c) for d, c in starts.items()}
        inside = torch.stack([(c >= 0) & (c <= lasts[d]) for d, c in given.items()]).all(0)
        return _SliceStarts({d: _clipped(c, lasts[d]) for d, c in starts.items()}, inside, fill)
    for dim, column in out.items():
        wrong = column[(column < 0) | (column > lasts[dim])].reshape(-1)[0]
        raise UnityError(f"position {wrong} is out of range of dim {dim}, which has {source.shape[dim]}")
    return _SliceStarts({d: c for d, c in starts.items() if lasts[d] or sizes[d] == 1})


def _clipped(column: Operand, last: int) -> Operand:
    return np.clip(column, 0, last) if isinstance(column, np.ndarray) else column.clamp(0, last)


def _before(column: Operand, count: int) -> Operand:
    """Return positions with as many dims of size 1 after their own."""
    return column.reshape((*column.shape, *(1,) * count))


def _spread(column: Operand, windows: Sequence[int], dim: int, size: int) -> Operand:
    """Return the positions [places.., windows..] along a dim of slices that begin at positions [places..]."""
    wide = _before(column, len(windows))
    if dim not in windows:
        return wide
    within = np.arange(size).reshape([-1 if d == dim else 1 for d in windows])
    return wide + within if isinstance(wide, np.ndarray) else wide + to_torch(within)


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
    """Return the one slice that a gather picks at known places."""
    dims, sizes = eqn.params["dimension_numbers"], list(map(int, eqn.params["slice_sizes"]))
    at = _in_range(eqn, dict(zip(map(int, dims.start_index_map), columns, strict=True)), source, sizes)
    if at.inside is not None:
        raise UnityError("it picks one slice, which is out of range; leave it out")
    for dim, start in at.starts.items():
        source = source.narrow(dim, int(start), sizes[dim])
    for dim in range(source.dim()):
        source = source.narrow(dim, 0, sizes[dim])
    return source.reshape(tuple(eqn.outvars[0].aval.shape))


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
    return _put(eqn, x, columns, updates)


def scatter_add(eqn: Any, x: Operand, columns: Columns, updates: Operand) -> Tensor:
    """`x.at[indices].add(updates)`."""
    return _put(eqn, x, columns, updates, torch.add)


def scatter_sub(eqn: Any, x: Operand, columns: Columns, updates: Operand) -> Tensor:
    """`x.at[indices].subtract(updates)`."""
    return _put(eqn, x, columns, -to_torch(updates), torch.add)


def scatter_mul(eqn: Any, x: Operand, columns: Columns, updates: Operand) -> Tensor:
    """`x.at[indices].multiply(updates)`, at known places."""
    return _put(eqn, x, columns, updates, torch.mul)


def scatter_min(eqn: Any, x: Operand, columns: Columns, updates: Operand) -> Tensor:
    """`x.at[indices].min(updates)`, at known places."""
    return _put(eqn, x, columns, updates, torch.minimum)


def scatter_max(eqn: Any, x: Operand, columns: Columns, updates: Operand) -> Tensor:
    """`x.at[indices].max(updates)`, at known places."""
    return _put(eqn, x, columns, updates, torch.maximum)


def _put(eqn: Any, x: Operand, columns: Columns, updates: Operand, combine: Any = None) -> Tensor:
    """
    Put slices into a tensor: in place of what is there, or of `combine` (what is there, slice). Raises `UnityError`
    where others than sums are combined at places that depend on data, or are there twice.
    """
    dims = eqn.params["dimension_numbers"]
    source, new = to_torch(x), to_torch(updates)
    batch, inserted = list(map(int, dims.operand_batching_dims)), list(map(int, dims.inserted_window_dims))
    kept = [d for d in range(source.dim()) if d not in (*inserted, *batch)]
    of_kept = dict(zip(kept, map(int, dims.update_window_dims), strict=True))
    sizes = [new.shape[of_kept[d]] if d in of_kept else 1 for d in range(source.dim())]
    picked = list(map(int, dims.scatter_dims_to_operand_dims))
    if any(sizes[d] != source.shape[d] for d in kept if d not in picked):
        raise UnityError("it writes to a part of a dim that it has no position along; write to all of it")
    starts = _in_range(eqn, dict(zip(picked, columns, strict=True)), source, sizes).starts
    windows = [d for d in kept if d in starts and sizes[d] > 1]
    others = [d for d in range(source.dim()) if d not in (*starts, *batch)]
    of_batch = [_own_positions(columns[0], int(d)) for d in dims.scatter_indices_batching_dims]
    places = dict(zip(batch, (_before(c, len(windows)) for c in of_batch), strict=True))
    places |= {d: _spread(c, windows, d, sizes[d]) for d, c in starts.items()}
    single = [of_kept[d] for d in kept if d in starts and sizes[d] == 1]
    rest = [d for d in range(new.dim()) if d not in of_kept.values()]
    new = new.permute(*rest, *(of_kept[d] for d in (*windows, *others)), *single)
    new = new.reshape(new.shape[: new.dim() - len(single)])
    if not places:
        return new if combine is None else combine(source, new)
    order = [*places, *others]
    moved = source.permute(order)
    at = _positions(places.values())
    if all(c.ndim == 0 for c in places.values()):
        new = new.unsqueeze(0)
    if combine not in (None, torch.add):
        _check_once(list(places.values()))
        new = combine(moved[at], new)
    out = moved.index_put(at, new, accumulate=combine is torch.add)
    back = [0] * len(order)
    for place, dim in enumerate(order):
        back[dim] = place
    return out.permute(back)


def _check_once(places: Sequence[Operand]) -> None:
    """Raise `UnityError` unless positions are known and all different."""
    known = [c for c in places if isinstance(c, np.ndarray)]
    if len(known) != len(places):
        raise UnityError("it combines at places that depend on data; write the sum of one-hot products, or sort")
    rows = np.stack([c.reshape(-1) for c in np.broadcast_arrays(*known)], -1)
    if len(np.unique(rows, axis=0)) != len(rows):
        raise UnityError("it combines several updates at one place; reduce them before")
