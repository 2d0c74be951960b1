# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Tell a kernel that updates many weights at once where they are, and what numbers it computes with."""

from __future__ import annotations

import functools
import itertools
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
    those of the last `kept` times that one had.
    """
    own, casts = trained(weights), weights.casts if _has_casts() else {}
    states = [x for name in own for x in moments.get(name, ())]
    tensors = [*own.values(), *[grads[name] for name in own], *states, *casts.values()]
    # What is freed may be followed by another weight at the same address.
    said = (map(of, tensors) for of in (torch.Tensor.data_ptr, torch.Tensor.numel, operator.attrgetter("dtype")))
    key = (block, *own, *casts, *itertools.chain(*said))
    if key not in PLACED:
        while len(PLACED) >= kept:
            del PLACED[next(iter(PLACED))]
        PLACED[key] = _placed(own, grads, moments, casts, block)
    found = PLACED[key]
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


def _placed(weights, grads, moments, casts, block):
    """
    Return, for each table, the name of a weight in it, whether all in it are aligned, and its rows and blocks on the
    device.
    """
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
            found.setdefault(alike, (name, []))[1].append((*row, group_of[name]))
    return [
        (name, is_aligned, *_tensors(rows, block, weights[name].device))
        for (*_, is_aligned), (name, rows) in found.items()
    ]


LAST: list = []
"""Rows and blocks of the tables that were made last; not their examples, since gradients are large."""


PLACED: dict = {}
"""
What is in tables, by names, addresses, sizes and element types, the latest last: gradients are mostly where they were a
step ago.
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


def _tensors(rows, block, device):
    """Return `rows`, whose last but one column has the numbers of elements, and `blocks` on the device."""
    on_host = torch.tensor(rows, dtype=torch.int64)
    counts = (on_host[:, -2] + block - 1) // block
    weight = torch.repeat_interleave(torch.arange(len(rows)), counts)
    within = torch.arange(len(weight)) - (counts.cumsum(0) - counts)[weight]
    return tuple(_to(device, x) for x in (on_host, torch.stack([weight, within], 1).to(torch.int32)))


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


def settings_of(weights, rate):
    """
    Return {hyperparameter: its values in all parameter groups, f64 [groups]}. The learning rate is multiplied by
    `rate`, a number or a tensor, on whose device (else on that of the weights) the values are.
    """
    # A rank may have no weights.
    given = (x for x in (rate, *weights.values()) if isinstance(x, torch.Tensor))
    device = next((x.device for x in given), torch.device("cpu"))
    found = _on_device(tuple(OPTIMIZER[1].items()), device)
    return {**found, "lr": found["lr"] * rate}


def packed(numbers, live, of_groups):
    """
    Return numbers for a kernel that updates weights, f32 [parameter groups, len(numbers) + 1]: columns are `numbers`,
    then `live`, each a number or a tensor [] or [groups]. `of_groups`, any tensor [groups], gives the size and device.
    """
    columns = [
        x.to(of_groups.dtype).expand_as(of_groups) if isinstance(x, torch.Tensor) else torch.full_like(of_groups, x)
        for x in (*numbers, live)
    ]
    return torch.stack(columns, 1).to(torch.float32)
