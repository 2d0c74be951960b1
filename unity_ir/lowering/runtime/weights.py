# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Read and write weights in safetensors files, and in folders of them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path

import torch

from unity_ir.lowering.runtime.files import why_not_written, write_file
from unity_ir.lowering.runtime.pieces import piece, whole
from unity_ir.lowering.runtime.plan import COUNTERS, NAMES, RUNNING, TABLES, WEIGHTS
from unity_ir.lowering.runtime.ranks import fail, fail_alike

# --- copied into the program from here on ---


# --- weights by full name, whole, in safetensors files and folders: of any plan, for any tool


INDEX = "model.safetensors.index.json"
"""In a Hugging Face folder of several safetensors files: which of them has each tensor."""

SHARD_BYTES = 5 * 10**9
"""Bytes of a file in such a folder: a file is full with the tensor that reaches them."""


def files_by_name(path):
    """
    Return {tensor's name: file that has it} of a safetensors file, or of a Hugging Face folder: those of its index, or
    of its one file, model.safetensors.
    """
    from safetensors import safe_open

    if os.path.isfile(index := Path(path, INDEX)):
        return {name: Path(path, file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    file = Path(path, "model.safetensors") if os.path.isdir(path) else path
    with safe_open(file, "pt") as opened:
        return dict.fromkeys(opened.keys(), file)


def names_in(path):
    """Return the names of the tensors in a safetensors file or folder, in a set; end the run if it cannot be read."""
    names = set()
    try:
        names.update(files_by_name(path))
    except Exception as e:  # a missing library, file or right, or damage: each ends the run with one line
        fail(f"cannot read {path}: {e}")
    return names


def read_safetensors(path, names, what):
    """
    Return {name: tensor} of `names` from the safetensors file or folder `path`, where each has its own name or one tied
    to it. End the run if one is missing; messages call a tensor `what`, such as "weight".
    """
    try:
        from safetensors import safe_open

        files = files_by_name(path)
        with contextlib.ExitStack() as stack:
            opened = {file: stack.enter_context(safe_open(file, "pt")) for file in dict.fromkeys(files.values())}
            return by_names(path, files, lambda name: opened[files[name]].get_tensor(name), names, what)
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
    Set this rank's pieces `weights` (Weights) of all weights in place from the safetensors file or folder `path`; end
    the run if one is missing or does not fit.
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


def whole_weights(ctx, weights, tables=(), everywhere=False, names=WEIGHTS):
    """
    Gather the weights `names`; return {name: whole tensor on the host} of them, and of those `tables` ({name: tensor})
    that PyTorch's state dict has, under all of their names there. With `everywhere` all ranks get this; else rank 0
    does, and other ranks get the tables alone. All ranks call it.
    """
    own = [name for name in tables if name in RUNNING or NAMES.get(name) == name]
    found = {name: tables[name].cpu().contiguous().clone() for name in own}
    for name in names:
        value, _ = whole(ctx, weights.get(name), WEIGHTS[name])
        if everywhere or ctx.rank == 0:
            found[name] = value.cpu().contiguous().clone()
    found.update({name: found[of].clone() for name, of in NAMES.items() if of in found and name != of})
    return found


def is_folder(path):
    """Return whether weights are written to `path` as a folder: one that is there, or a path that ends in a slash."""
    return str(path).endswith("/") or os.path.isdir(path)


def why_no_weights(path):
    """Return, as text, why weights cannot be written to `path`; None if they can."""
    if not is_folder(path):
        return why_not_written(Path(path), False)
    if there := sorted(Path(path).glob("model*.safetensors*")):
        return f"cannot write {path}: it has weights already, {there[0].name}"
    return why_not_written(Path(path), True)


def write_weights(ctx, weights, path, tables=()):
    """
    Gather the weights, and on rank 0 write them, whole, with `tables` ({name: tensor}), under all names of the state
    dict: to the safetensors file `path`, or to a folder (`is_folder`) as Hugging Face has them, a file at a time, and
    last the index. All ranks call it.
    """
    shards, index = _shards() if is_folder(path) else [[*WEIGHTS]], {}
    for number, names in enumerate(shards, 1):
        many = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = Path(path, f"model{many}.safetensors") if is_folder(path) else path
        found = whole_weights(ctx, weights, tables if number == 1 else (), names=names)
        if ctx.rank == 0:
            write_file(file, lambda partial, found=found: _save(found, partial))
            index.update({name: (Path(file).name, tensor.nbytes) for name, tensor in found.items()})
    if ctx.rank == 0 and len(shards) > 1:
        total = {"total_size": sum(size for _, size in index.values())}
        text = json.dumps({"metadata": total, "weight_map": {n: file for n, (file, _) in index.items()}}, indent=2)
        write_file(Path(path, INDEX), lambda partial: Path(partial).write_text(text + "\n"))


def _save(found, path):
    from safetensors.torch import save_file  # a missing library ends the run with write_file's line

    save_file(found, path, {"format": "pt"})


def _shards():
    """Return the names of the weights of each file of a folder: those that begin in the same `SHARD_BYTES` bytes."""
    shards, begin = {}, 0
    for name, spec in WEIGHTS.items():
        shards.setdefault(begin // SHARD_BYTES, []).append(name)
        begin += math.prod(spec.shape) * spec.dtype.itemsize * (1 + len(_other_names(name)))
    return list(shards.values())
