# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Weights in and out of safetensors files."""

from __future__ import annotations

from unity_ir.lowering.runtime.files import write_file
from unity_ir.lowering.runtime.pieces import piece, whole
from unity_ir.lowering.runtime.plan import WEIGHTS
from unity_ir.lowering.runtime.ranks import fail

# --- copied into the program from here on ---


# --- weights by full name, whole, in safetensors files: of any plan, for any tool


def read_safetensors(path, names, what):
    """The tensors of a safetensors file that have these names."""
    try:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            missing = [name for name in names if name not in file.keys()]
            if not missing:
                return {name: file.get_tensor(name) for name in names}
    except Exception as e:  # that of the library is no class of its own
        fail(f"cannot read {path}: {e}")
    fail(f"{path}: it has no {what} {missing[0]!r}")


def read_weights(ctx, weights, path):
    """Set this rank's pieces from a file."""
    for name, found in read_safetensors(path, WEIGHTS, "weight").items():
        spec = WEIGHTS[name]
        if tuple(found.shape) != spec.shape or found.dtype.is_floating_point != spec.dtype.is_floating_point:
            fail(f"{path}: {name} is {list(found.shape)}, {found.dtype}; it must be {list(spec.shape)}, {spec.dtype}")
        if name in weights:
            weights[name].copy_(piece(ctx, found.to(spec.dtype), spec))


def write_weights(ctx, weights, path):
    """Write all weights whole; the file is complete once it has its name."""
    found = {}
    for name, spec in WEIGHTS.items():
        value, _ = whole(ctx, weights.get(name), spec)
        if ctx.rank == 0:
            found[name] = value.cpu().contiguous().clone()
    if ctx.rank == 0:

        def save(partial):
            from safetensors.torch import save_file

            save_file(found, partial)

        write_file(path, save)
