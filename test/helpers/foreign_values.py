"""
Foreign rules evaluated as they are, on arrays: TASO's over matrices and images, FlexFlow's over [replica, rows,
columns]. It knows nothing of how they are said here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unity_ir.rules.research.foreign.collection import ForeignOp, ForeignRule

Array = NDArray[np.float64]

ACTIVATIONS = {
    0: lambda x: x,
    1: lambda x: 1 / (1 + np.exp(-x)),
    2: lambda x: np.maximum(x, 0),
    3: np.tanh,
}
UNARY = {"OP_SIGMOID": 1, "OP_RELU": 2, "OP_TANH": 3}


@dataclass(frozen=True)
class Cut:
    """An array, and by axis where it was concatenated last: sizes, and the parts."""

    of: Array
    parts: Mapping[int, Sequence[Cut]] = field(default_factory=dict)


def evaluate(rule: ForeignRule, arrays: Mapping[tuple[int, int], Array]) -> list[tuple[Array, Array]]:
    """The results of both sides. Raises `ValueError` where shapes do not fit."""
    source, target = (_side(ops, arrays) for ops in (rule.source, rule.target))
    return [(source[a][i].of, target[b][j].of) for (a, i), (b, j) in rule.outputs]


def _side(ops: Sequence[ForeignOp], arrays: Mapping[tuple[int, int], Array]) -> list[list[Cut]]:
    made: list[list[Cut]] = []
    for op in ops:
        made.append(list(_apply(op, [Cut(arrays[i]) if i[0] < 0 else made[i[0]][i[1]] for i in op.inputs])))
    return made


def _apply(op: ForeignOp, x: Sequence[Cut]) -> Iterator[Cut]:
    given: dict[str, Any] = dict(op.parameters)
    first = x[0]
    match op.type:
        case "OP_RELU" | "OP_SIGMOID" | "OP_TANH":
            yield Cut(ACTIVATIONS[UNARY[op.type]](first.of), first.parts)
        case "OP_EW_ADD" | "OP_EW_MUL":
            if first.of.shape != x[1].of.shape:
                raise ValueError("shapes")
            sizes = [{a: [p.of.shape[a] for p in parts] for a, parts in t.parts.items()} for t in x]
            parts = {a: p for a, p in first.parts.items() if sizes[0][a] == sizes[1].get(a)}
            yield Cut(first.of + x[1].of if op.type == "OP_EW_ADD" else first.of * x[1].of, parts)
        case "OP_CONCAT":
            axis = given["PM_AXIS"]
            sizes = [{a: [p.of.shape[a] for p in parts] for a, parts in t.parts.items()} for t in x]
            kept = {a: p for a, p in first.parts.items() if all(s.get(a) == sizes[0][a] for s in sizes)}
            yield Cut(np.concatenate([t.of for t in x], axis), {**kept, axis: x})
        case "OP_SPLIT":
            yield from _split(first, given["PM_AXIS"], given["PM_NUM_OUTPUTS"])
        case "OP_MATMUL":
            yield _rows_and_columns(op, x, first.of @ x[1].of, (0, 0), (1, 1))
        case "OP_LINEAR":
            if first.of.shape[0] != x[1].of.shape[0]:
                raise ValueError("replicas")
            yield _rows_and_columns(op, x, np.einsum("rnk,rmk->rnm", first.of, x[1].of), (1, 1), (1, 2))
        case "OP_CONV2D":
            yield _rows_and_columns(op, x, convolution(first.of, x[1].of, given["PM_PAD"] == 0), (0, 0), (0, 1))
        case "OP_MUL":
            yield Cut(first.of * x[1].of, first.parts)
        case "OP_TRANSPOSE":
            assert (given["PM_NUMDIM"], given["PM_PERM"]) == (2, 2)
            yield Cut(first.of.T, {1 - a: [_of_size(p, a, 1 - a, 2) for p in of] for a, of in first.parts.items()})
        case "OP_POOL2D_MAX" | "OP_POOL2D_AVG":
            least = -np.inf if op.type == "OP_POOL2D_MAX" else 0.0
            windows = _windows(first.of, given["PM_KERNEL_H"], given["PM_KERNEL_W"], given["PM_PAD"] == 0, least)
            yield Cut(windows.max((4, 5)) if least else windows.mean((4, 5)))
        case "OP_ENLARGE":
            around = [(given[f"PM_KERNEL_{d}"] - n) // 2 for d, n in zip("HW", first.of.shape[2:])]
            yield Cut(np.pad(first.of, [(0, 0), (0, 0), *((n, n) for n in around)]))
        case "OP_REPLICATE":
            axis = given["PM_PARALLEL_DIM"]
            others = {a: p for a, p in first.parts.items() if a != axis}
            yield Cut(np.concatenate([first.of] * given["PM_PARALLEL_DEGREE"], axis), others)
        case "OP_REDUCE":
            axis = given["PM_PARALLEL_DIM"]
            others = {a: p for a, p in first.parts.items() if a != axis}
            yield Cut(np.sum(np.split(first.of, given["PM_PARALLEL_DEGREE"], axis), axis=0), others)
        case "OP_PARTITION" | "OP_COMBINE":
            yield first
        case _:
            raise NotImplementedError(op.type)


def _rows_and_columns(
    op: ForeignOp, x: Sequence[Cut], out: Array, rows: tuple[int, int], columns: tuple[int, int]
) -> Cut:
    """A product, with where its rows (of the first) and columns (of the second) were concatenated, by (theirs, its)."""
    parts: dict[int, Sequence[Cut]] = {}
    for of, (theirs, its) in zip(x, (rows, columns), strict=True):
        if theirs in of.parts:
            parts[its] = [_of_size(p, theirs, its, out.ndim) for p in of.parts[theirs]]
    return Cut(ACTIVATIONS[op.parameters.get("PM_ACTI", 0)](out), parts)


def _of_size(part: Cut, theirs: int, its: int, dims: int) -> Cut:
    shape = [1] * dims
    shape[its] = part.of.shape[theirs]
    inner = part.parts.get(theirs)
    return Cut(np.zeros(shape), {its: [_of_size(p, theirs, its, dims) for p in inner]} if inner else {})


def _split(x: Cut, axis: int, count: int) -> Iterator[Cut]:
    parts = x.parts.get(axis)
    if parts is None:
        yield from map(Cut, np.split(x.of, count, axis))
        return
    ends = np.cumsum([p.of.shape[axis] for p in parts])[:-1]
    for of, part in zip(np.split(x.of, ends, axis), parts, strict=True):
        yield Cut(of, {axis: part.parts[axis]} if axis in part.parts else {})


def convolution(x: Array, w: Array, same: bool) -> Array:
    """A convolution of stride 1, in as many groups as the image has times the kernel's channels."""
    groups, left = divmod(x.shape[1], w.shape[1])
    if left or not groups or w.shape[0] % groups:
        raise ValueError("groups")
    windows = _windows(x, *w.shape[2:], same)
    found = [
        np.einsum("nchwij,ocij->nohw", part, kernel)
        for part, kernel in zip(np.split(windows, groups, 1), np.split(w, groups, 0), strict=True)
    ]
    return np.concatenate(found, 1)


def _windows(x: Array, rows: int, columns: int, same: bool, least: float = 0.0) -> Array:
    if same:
        around = ((0, 0), (0, 0), (rows // 2, rows // 2), (columns // 2, columns // 2))
        x = np.pad(x, around, constant_values=least)
    return np.lib.stride_tricks.sliding_window_view(x, (rows, columns), axis=(2, 3))
