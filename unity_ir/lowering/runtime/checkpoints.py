# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Checkpoints that any plan and any number of ranks can load."""

from __future__ import annotations

import enum
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.pieces import pins
from unity_ir.lowering.runtime.plan import MESH, NAME, OPTIMIZER, WEIGHTS, WORLD
from unity_ir.lowering.runtime.ranks import fail

# --- copied into the program from here on ---


# --- checkpoints: distributed, by full name, so that any plan and any number of ranks can load them


def state_dict(ctx, weights, moments):
    """The weights and moments this rank has a piece of, as DTensors by full name."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # Every rank makes the mesh of every part of the machine on which something rests, in one order.
    ranks = torch.arange(WORLD).reshape(MESH or (1,))
    meshes = {}
    for pinned in dict.fromkeys(pins(spec) for spec in WEIGHTS.values()):
        held = ranks
        for axis, coordinate in pinned:
            held = held.narrow(axis, coordinate, 1)
        names = tuple(f"axis{i}" for i in range(held.dim()))
        meshes[pinned] = DeviceMesh(ctx.device.type, held, mesh_dim_names=names)

    def dtensor(local, spec):
        places = [Shard(r) if isinstance(r, int) else Replicate() for r in spec.roles] or [Replicate()]
        return DTensor.from_local(local, meshes[pins(spec)], places, run_check=False)

    state = {f"weights.{n}": dtensor(w, WEIGHTS[n]) for n, w in weights.items()}
    for n, pair in moments.items():
        state.update({f"moments.{k}.{n}": dtensor(m, WEIGHTS[n]) for k, m in enumerate(pair)})
    return state


def save(ctx, weights, moments, t, folder, seed=0):
    """
    Write a checkpoint after `t` steps. It is written beside its place and goes there whole, so one that was cut short
    is never seen; `complete.json` says what is in it.
    """
    import torch.distributed.checkpoint as dcp

    path = Path(folder) / f"step_{t:08d}"
    partial = path.with_name(f"partial_{path.name}")
    # Every rank draws the same random numbers, as it makes whole batches.
    state = {**state_dict(ctx, weights, moments), "step": torch.tensor(t), "random": torch.get_rng_state()}
    try:
        if ctx.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        dcp.save(state, checkpoint_id=str(partial))
        mine = [*partial.glob(f"__{ctx.rank}_*"), *(partial.glob(".metadata") if ctx.rank == 0 else ())]
        parts = [None] * WORLD
        dist.all_gather_object(parts, {file.name: _size_and_sum(file) for file in mine})
        if ctx.rank == 0:
            files = {name: found for part in parts for name, found in part.items()}
            record = {**_contents(), "step": t, "seed": seed, "files": files}
            with open(partial / "complete.json", "w") as out:
                json.dump(record, out, indent=1)
                out.flush()
                os.fsync(out.fileno())
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
        dist.barrier()
    except (Exception, dcp.CheckpointException) as e:  # which is no Exception, and wraps that of any rank
        fail(f"cannot write {path}: {_reason(e)}")


MOST_SEED = 2**40
"""What is made of a seed fits the generators'."""


def newest(folder):
    """The newest complete checkpoint in `folder` and what is in it, or None."""
    found = sorted(p.parent for p in Path(folder).glob("step_*/complete.json"))
    if not found:
        return None
    try:
        record = json.loads((found[-1] / "complete.json").read_text())
        known = all(isinstance(record[key], int) for key in ("step", "seed")) and isinstance(record["files"], dict)
        known = known and abs(record["seed"]) <= MOST_SEED
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        fail(f"cannot load {found[-1]}: its complete.json is not one of a checkpoint")
    return found[-1], record


def load(ctx, weights, moments, folder):
    """Load the newest complete checkpoint in place; returns how many steps had been done."""
    import torch.distributed.checkpoint as dcp

    found = newest(folder)
    if found is None:
        fail(f"no complete checkpoint in {folder}")
    path, record = found
    answers = [None] * WORLD
    dist.all_gather_object(answers, _wrong(path, record, ctx.rank))
    wrong = next((answer for answer in answers if answer), None)
    if wrong:
        fail(f"cannot load {path}: {wrong}")
    state = {**state_dict(ctx, weights, moments), "step": torch.tensor(0), "random": torch.get_rng_state()}
    try:
        dcp.load(state, checkpoint_id=str(path))
    except (Exception, dcp.CheckpointException) as e:
        fail(f"cannot load {path}: {_reason(e)}")
    torch.set_rng_state(state["random"])
    return int(state["step"])


def _contents():
    """What has to be the same in a program that loads a checkpoint; its plan need not be."""
    weights = {name: [list(spec.shape), str(spec.dtype)] for name, spec in WEIGHTS.items()}
    return {"name": NAME, "optimizer": OPTIMIZER[0], "weights": weights}


def _size_and_sum(file):
    """Bytes of a file, and their checksum."""
    size = total = 0
    with open(file, "rb") as content:
        while chunk := content.read(2**22):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
    return [size, total]


def _wrong(path, record, rank):
    """What is wrong with a checkpoint, or None. Every rank reads a part of the files."""
    ours, theirs = _contents(), record.get("weights")
    if not isinstance(theirs, dict):
        return "its complete.json is not one of a checkpoint"
    for name in dict.fromkeys([*ours["weights"], *theirs]):
        here, there = (one.get(name, "missing") for one in (ours["weights"], theirs))
        if here != there:
            return f"it is of another model: weight {name!r} is {there} there and {here} here"
    if record.get("optimizer") != ours["optimizer"]:
        return f"it was trained with {record.get('optimizer')}, and this program has {ours['optimizer']}"
    for name, expected in sorted(record["files"].items())[rank::WORLD]:
        file = path / Path(name).name
        if not file.is_file() or _size_and_sum(file) != expected:
            return f"{name} is {'corrupt' if file.is_file() else 'missing'}"
    if rank == 0:
        try:
            with open(path / ".metadata", "rb") as file:
                _PlainMetadata(file).load()
        except Exception as e:  # unpickling has many ways to fail
            return f"its metadata cannot be read: {e}"
    return None


class _PlainMetadata(pickle.Unpickler):
    """Reads DCP's metadata, a pickle, which may name nothing but what describes tensors: no code is in it."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return _member
        plain = {
            "torch.distributed.checkpoint.metadata": (
                "ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata "
                "_MEM_FORMAT_ENCODING"
            ),
            "torch.distributed.checkpoint.filesystem": "_StorageInfo",
            "torch.serialization": "_get_layout",
            "torch": "Size " + " ".join(str(spec.dtype).removeprefix("torch.") for spec in WEIGHTS.values()),
            "pathlib": "PosixPath WindowsPath",
        }
        if name not in f"{plain.get(module, '')} int64 uint8".split() or not module.startswith(("torch", "pathlib")):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


def _member(kind, name):
    """A member of an enum, which Python before 3.11.4 pickles as an attribute; of nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr, which describes no tensor")
    return kind[name]


def _reason(error):
    """The last line of what went wrong first, on any rank."""
    failures = getattr(error, "failures", None) or {}
    first = next(iter(failures.values()), (error,))[0]
    lines = str(first).strip().splitlines()
    return lines[-1] if lines else type(first).__name__
