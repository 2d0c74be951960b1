# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Tell a kernel that updates many weights at once where they are, and what numbers it computes with."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import torch

from unity_ir.lowering.runtime.pieces import trained
from unity_ir.lowering.runtime.plan import OPTIMIZER, WEIGHTS
from unity_ir.lowering.runtime.recipe import hyperparameters

# --- copied into the program from here on ---


# --- the optimizer's step of many weights in one launch: where they are, and the numbers of each group of them


@dataclass(frozen=True)
class WeightTable:
    """
    Where weights of one element type are, for a kernel that updates them all. `rows`, int64 [weights, columns], has for
    each the addresses of the weight, its gradient, its state and, if casts are kept, its cast (0: none), then its
    number of elements and its group's number. `blocks`, int32 [blocks, 2], has each block of `block` elements: its row,
    and its number there. `is_aligned`: addresses and sizes are multiples of 16. `examples` are the tensors of one row.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    examples: tuple
    is_aligned: bool
    block: int


def weight_tables(weights, grads, moments, block, kept=16):
    """
    Return a list of WeightTables (where weights are in memory), with each of which one launch updates many weights: one
    for each combination of element types and alignment, in blocks of `block` elements. `weights`, `grads` and `moments`
    (the optimizer's state) are by name; frozen weights are left out. Tables are used again if no tensor has moved:
    those of the last `kept` times that one had. Where only gradients have, tables differ in one column.
    """
    own, casts = trained(weights), weights.casts if _has_casts() else {}
    given, states = [grads[name] for name in own], [x for name in own for x in moments.get(name, ())]
    others, addresses = [*own.values(), *states, *casts.values()], (*map(torch.Tensor.data_ptr, given),)
    # What is freed may be followed by another weight at the same address.
    said = [x.numel() for x in own.values()], [x.dtype for x in given], map(torch.Tensor.data_ptr, others)
    key = (block, *own, *casts, *(each for of in said for each in of))
    found = _known((key, addresses), lambda: _placed(key, own, grads, moments, casts, block, kept), kept)
    LAST[:] = [(rows, blocks) for _, _, rows, blocks in found]
    return [
        WeightTable(rows, blocks, _of_weight(name, own, grads, moments, casts), is_aligned, block)
        for name, is_aligned, rows, blocks in found
    ]


@functools.cache
def _has_casts():
    return any(spec.cast for spec in WEIGHTS.values())


def _of_weight(name, weights, grads, moments, casts):
    """Return the tensors of one weight: itself, its gradient, its state and, if casts are kept, its cast or another."""
    # A weight that has no cast shares a launch with those that have one.
    cast = (casts.get(name, next(iter(casts.values()))),) if casts else (weights[name],) if _has_casts() else ()
    return (weights[name], grads[name], *moments.get(name, ()), *cast)


def _placed(key, weights, grads, moments, casts, block, kept):
    """
    Return, for each table, the name of a weight in it, whether all in it are aligned, and its rows and blocks on the
    device. `key` says all but where gradients are.
    """
    # What a CUDA graph reads has memory of its own.
    of = key, (*[grads[name].data_ptr() % 16 for name in weights],), is_capturing()
    found = []
    for is_aligned, names, rows, blocks in _known(of, lambda: _layout(weights, grads, moments, casts, block), kept):
        rows = rows.clone()
        rows[:, 1] = torch.tensor([grads[name].data_ptr() for name in names], dtype=torch.int64)
        found.append((names[0], is_aligned, _to(blocks.device, rows), blocks))
    return found


def _layout(weights, grads, moments, casts, block):
    """Return, as `_placed`, whether all are aligned, their names, rows on the host, and blocks on the device."""
    group_of, found = _groups(tuple(OPTIMIZER[1].items()))[0], {}
    for name, weight in weights.items():
        tensors = _of_weight(name, weights, grads, moments, casts)
        addresses = [x.data_ptr() for x in tensors]
        if _has_casts() and name not in casts:
            addresses[-1] = 0
        row = (*addresses, weight.numel())
        # What a bucket's collective returns may be at any place of a larger tensor.
        alike = (*[x.dtype for x in tensors], functools.reduce(operator.or_, row) % 16 == 0)
        if row[-1]:
            found.setdefault(alike, {})[name] = (*row, group_of[name])
    tables = []
    for (*_, is_aligned), rows in found.items():
        on_host = torch.tensor([*rows.values()], dtype=torch.int64)
        counts = (on_host[:, -2] + block - 1) // block
        weight = torch.repeat_interleave(torch.arange(len(rows)), counts)
        within = torch.arange(len(weight)) - (counts.cumsum(0) - counts)[weight]
        blocks = _to(weights[next(iter(rows))].device, torch.stack([weight, within], 1).to(torch.int32))
        tables.append((is_aligned, (*rows,), on_host, blocks))
    return tables


def _known(key, made, kept):
    """Return what PLACED has at a key, else what `made()` returns; it keeps `kept` tables, and as many layouts."""
    PLACED[key] = PLACED.pop(key) if key in PLACED else made()
    while len(PLACED) > 2 * kept:
        del PLACED[next(iter(PLACED))]
    return PLACED[key]


LAST: list = []
"""Rows and blocks of the tables that were made last; not their examples, since gradients are large."""


PLACED: dict = {}
"""
What is in tables, by names, sizes and addresses, and of gradients at any address; what was used last is last: they are
mostly where they were a step ago.
"""

RESERVED: dict = {}
"""Memory, by its type, for the tables of a CUDA graph that is captured."""

UNFILLED: list = []
"""Pairs of a tensor on the device, and what is to be in it: a CUDA graph that is captured cannot copy it there."""


def reserve_tables():
    """
    Set memory apart for the WeightTables of a CUDA graph, as large as those made last; call it before the capture. The
    graph's own memory would not do: its replays may write other values there, and a table is filled only once.
    """
    for found in zip(*LAST):
        RESERVED[found[0].dtype] = found[0].new_empty(sum(x.numel() for x in found))


def _to(device, x):
    """Return `x` on the device, without waiting for it."""
    if is_capturing():
        left = RESERVED.get(x.dtype)
        if left is None or left.numel() < x.numel():
            raise RuntimeError("no memory was set apart for the tables of the optimizer")
        RESERVED[x.dtype] = left[x.numel() :]
        UNFILLED.append((left[: x.numel()].view(x.shape), x))
        return UNFILLED[-1][0]
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def is_capturing():
    """Return whether kernels that are launched now become part of a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def fill_tables():
    """
    Fill the WeightTables that were made while a CUDA graph was captured, which cannot; call it before the graph runs.
    Return a list of their tensors, pairs (`rows`, `blocks` of a WeightTable), to be kept as long as the graph.
    """
    for there, here in UNFILLED:
        there.copy_(here)
    UNFILLED.clear()
    RESERVED.clear()
    return list(LAST)


def drop_tables():
    """Forget all WeightTables and the memory set apart for them, after the capture of a CUDA graph has failed."""
    UNFILLED.clear()
    RESERVED.clear()
    PLACED.clear()


@functools.cache
def _groups(settings):
    """Return ({weight: number of its group}, the hyperparameters of each group), with `settings` those of OPTIMIZER."""
    found: dict = {}
    return {name: found.setdefault(tuple(hyperparameters(name).items()), len(found)) for name in WEIGHTS}, tuple(found)


@functools.cache
def _on_device(settings, device):
    groups = [dict(group) for group in _groups(settings)[1]]
    return {n: torch.tensor([g[n] for g in groups], dtype=torch.float64, device=device) for n in OPTIMIZER[1]}


def numbers_of(line, tensors, rate, live, **given):
    """
    Return numbers for a kernel that updates weights, f32 [parameter groups, columns], on the device of `tensors` (by
    name): what `line`, such as `adamw_numbers`, returns, given `given` and a group's hyperparameters, the learning rate
    times `rate`, and then `live`. These may be tensors [] on the device; of plain numbers the host makes all.
    """
    settings = tuple(OPTIMIZER[1].items())
    # A rank may have no weights.
    device = next((x.device for x in (rate, *tensors.values()) if isinstance(x, torch.Tensor)), torch.device("cpu"))
    if not any(isinstance(x, torch.Tensor) for x in (rate, live, *given.values())):
        groups = [dict(group) for group in _groups(settings)[1]]
        rows = [(*line(**given, **{**group, "lr": group["lr"] * rate}), live) for group in groups]
        return _to(device, torch.tensor(rows, dtype=torch.float32))
    found = _on_device(settings, device)
    columns = [
        x.to(torch.float64).expand_as(found["lr"]) if isinstance(x, torch.Tensor) else torch.full_like(found["lr"], x)
        for x in (*line(**given, **{**found, "lr": found["lr"] * rate}), live)
    ]
    return torch.stack(columns, 1).to(torch.float32)
