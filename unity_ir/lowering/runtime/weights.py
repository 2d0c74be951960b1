# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Read and write weights in safetensors files."""

from __future__ import annotations

import torch

from unity_ir.lowering.runtime.files import write_file
from unity_ir.lowering.runtime.pieces import piece, whole
from unity_ir.lowering.runtime.plan import COUNTERS, NAMES, RUNNING, TABLES, WEIGHTS
from unity_ir.lowering.runtime.ranks import fail, fail_alike

# --- copied into the program from here on ---


# --- weights by full name, whole, in safetensors files: of any plan, for any tool


def names_in(path):
    """Return the set of names of the tensors in a safetensors file; end the run if it cannot be read."""
    names = set()
    try:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            names.update(file.keys())
    except Exception as e:  # a missing library, file or right, or damage: each ends the run with one line
        fail(f"cannot read {path}: {e}")
    return names


def read_safetensors(path, names, what):
    """
    Return {name: tensor} of `names` from the safetensors file `path`, where each has its own name or one tied to it.
    End the run if one is missing; messages call a tensor `what`, such as "weight".
    """
    try:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            return by_names(path, file.keys(), file.get_tensor, names, what)
    except Exception as e:  # as in names_in
        fail(f"cannot read {path}: {e}")


def by_names(source, keys, get, names, what):
    """
    Return {name: tensor} of `names` from a file or dict: `keys` are the names in it, `get(key)` returns one's tensor.
    A tensor may be there under its name or one tied to it. End the run if one is missing, or tied ones differ; messages
    begin with `source`, such as the file's path, and call a tensor `what`, such as "weight".
    """
    there = set(keys)
    called = {name: [n for n in (name, *_other_names(name)) if n in there] for name in names}
    missing = [name for name in names if not called[name]]
    if missing:
        fail(f"{source}: it has no {what} {missing[0]!r}")
    found = {name: [get(n) for n in own] for name, own in called.items()}
    apart = [n for n, own in found.items() if any(not torch.equal(own[0], other) for other in own[1:])]
    if apart:
        fail(f"{source}: {' and '.join(called[apart[0]])} are one {what} here, but differ there")
    return {name: own[0] for name, own in found.items()}


def _other_names(name):
    return [other for other, of in NAMES.items() if of == name != other]


def read_tables(path):
    """
    Return {name: tensor} of the model's tables in the safetensors file `path`: inputs that are no part of a batch
    (TABLES), and counters of steps (COUNTERS).
    """
    return read_safetensors(path, tables_in(names_in(path)), "table")


def tables_in(keys):
    """Return the list of names in TABLES and COUNTERS that are in `keys`, or are tied to a name in `keys`."""
    return [n for n in (*TABLES, *COUNTERS) if not {n, *_other_names(n)}.isdisjoint(keys)]


def check_running(source, tables):
    """End the run unless `tables`, read from `source` (a text), have all running statistics. All ranks call it."""
    missing = [name for name in RUNNING if name not in tables]
    if missing:
        fail_alike(f"{source}: it has no running statistic {missing[0]!r}; a state dict of PyTorch has it")


def read_weights(ctx, weights, path):
    """
    Set this rank's pieces `weights` (Weights) of all weights in place from the safetensors file `path`; end the run if
    one is missing or does not fit.
    """
    set_weights(ctx, weights, read_safetensors(path, WEIGHTS, "weight"), path)


def set_weights(ctx, weights, found, source):
    """
    Set this rank's pieces `weights` (Weights) in place from `found`, {name: whole tensor}. First end the run if shapes
    differ, or one is floating point and the other not; the message begins with `source`.
    """
    for name, spec in WEIGHTS.items():
        value = found[name]
        if tuple(value.shape) != spec.shape or value.dtype.is_floating_point != spec.dtype.is_floating_point:
            there = f"{list(value.shape)}, {value.dtype}"
            fail(f"{source}: {name} is {there}; it must be {list(spec.shape)}, {spec.dtype}")
    for name in weights:
        weights[name].copy_(piece(ctx, found[name].to(WEIGHTS[name].dtype), WEIGHTS[name]))
    weights.renew_casts()


def whole_weights(ctx, weights, tables=(), everywhere=False):
    """
    Gather the weights; return {name: whole tensor on the host} of them, and of those `tables` ({name: tensor}) that
    PyTorch's state dict has, under all of their names there. With `everywhere` all ranks get this; else rank 0 does,
    and other ranks get the tables alone. All ranks call it.
    """
    own = [name for name in tables if name in RUNNING or NAMES.get(name) == name]
    found = {name: tables[name].cpu().contiguous().clone() for name in own}
    for name, spec in WEIGHTS.items():
        value, _ = whole(ctx, weights.get(name), spec)
        if everywhere or ctx.rank == 0:
            found[name] = value.cpu().contiguous().clone()
    found.update({name: found[of].clone() for name, of in NAMES.items() if of in found and name != of})
    return found


def write_weights(ctx, weights, path, tables=()):
    """
    Gather the weights, and on rank 0 write them, whole, to the safetensors file `path`, with `tables` ({name: tensor}),
    under all names of the state dict. All ranks call it.
    """
    found = whole_weights(ctx, weights, tables)
    if ctx.rank == 0:

        def save(partial):
            from safetensors.torch import save_file

            save_file(found, partial)

        write_file(path, save)
