# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Read and write weights in safetensors files."""

from __future__ import annotations

import torch

from unity_ir.lowering.runtime.files import write_file
from unity_ir.lowering.runtime.pieces import piece, whole
from unity_ir.lowering.runtime.plan import COUNTERS, NAMES, RUNNING, TABLES, WEIGHTS
from unity_ir.lowering.runtime.ranks import fail

# --- copied into the program from here on ---


# --- weights by full name, whole, in safetensors files: of any plan, for any tool


def names_in(path):
    """Return the names of the tensors of a safetensors file; end the run if it cannot be read."""
    names = set()
    try:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            names.update(file.keys())
    except Exception as e:  # a missing library, file or right, or damage: each ends the run with one line
        fail(f"cannot read {path}: {e}")
    return names


def read_safetensors(path, names, what):
    """Return {name: tensor} of `names` from a file, by it or a tied name; errors end the run and call them `what`."""
    try:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            there = set(file.keys())
            called = {name: [n for n in (name, *_other_names(name)) if n in there] for name in names}
            missing = [name for name in names if not called[name]]
            if not missing:
                found = {name: [file.get_tensor(n) for n in own] for name, own in called.items()}
                apart = [n for n, own in found.items() if any(not torch.equal(own[0], other) for other in own[1:])]
                if not apart:
                    return {name: own[0] for name, own in found.items()}
                fail(f"{path}: {' and '.join(called[apart[0]])} are one {what} here, but differ there")
    except Exception as e:  # as in names_in
        fail(f"cannot read {path}: {e}")
    fail(f"{path}: it has no {what} {missing[0]!r}")


def _other_names(name):
    return [other for other, of in NAMES.items() if of == name != other]


def read_tables(path):
    """Return the model's tables (inputs that no batch has, and counters) that a safetensors file has, by name."""
    there = names_in(path)
    return read_safetensors(path, [n for n in (*TABLES, *COUNTERS) if {n, *_other_names(n)} & there], "table")


def read_weights(ctx, weights, path):
    """Set this rank's pieces of all weights in place from a file; end the run if shapes or kinds of number differ."""
    for name, found in read_safetensors(path, WEIGHTS, "weight").items():
        spec = WEIGHTS[name]
        if tuple(found.shape) != spec.shape or found.dtype.is_floating_point != spec.dtype.is_floating_point:
            fail(f"{path}: {name} is {list(found.shape)}, {found.dtype}; it must be {list(spec.shape)}, {spec.dtype}")
        if name in weights:
            weights[name].copy_(piece(ctx, found.to(spec.dtype), spec))
    weights.renew_casts()


def write_weights(ctx, weights, path, tables=()):
    """Gather the weights; on rank 0, write them whole, with `tables`, to `path`, by all names of the state dict."""
    own = [name for name in tables if name in RUNNING or NAMES.get(name) == name]
    found = {name: tables[name].cpu().contiguous().clone() for name in own}
    for name, spec in WEIGHTS.items():
        value, _ = whole(ctx, weights.get(name), spec)
        if ctx.rank == 0:
            found[name] = value.cpu().contiguous().clone()
    found.update({name: found[of].clone() for name, of in NAMES.items() if of in found and name != of})
    if ctx.rank == 0:

        def save(partial):
            from safetensors.torch import save_file

            save_file(found, partial)

        write_file(path, save)
