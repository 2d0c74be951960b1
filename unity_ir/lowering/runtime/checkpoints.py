# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Save and load checkpoints, which any plan and any number of ranks can load."""

from __future__ import annotations

import enum
import errno
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import socket
import sys
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.pieces import pins
from unity_ir.lowering.runtime.plan import (
    COUNTERS,
    INPUTS,
    MESH,
    NAME,
    OPTIMIZER,
    RUNNING,
    STATE,
    STATE_WINDOW,
    TABLES,
    WEIGHTS,
    WORLD,
)
from unity_ir.lowering.runtime.ranks import FOREVER, Context, everywhere, fail_alike, finish_files, from_all, from_first
from unity_ir.lowering.runtime.recipe import RECIPE

# --- copied into the program from here on ---


# --- checkpoints: distributed, by full name, so that any plan and any number of ranks can load them


def state_dict(ctx, weights, moments, record=None):
    """
    Return {key: DTensor} of this rank's pieces, in the same memory. Keys are `weights.NAME`, `moments.K.NAME` (K: index
    in STATE) and, if the pipeline never drains, `older.NAME`, the weights of one step ago. `record` is the
    `complete.json` of a checkpoint to load (None: to save); `older`, and averages of weights, are left out if that has
    none. All ranks call it.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # Every rank makes the mesh of every part of the machine to which weights are pinned, in one order.
    ranks = torch.arange(WORLD).reshape(MESH or (1,))
    meshes = {}
    for pinned in dict.fromkeys(pins(spec) for spec in WEIGHTS.values()):
        held = ranks
        for axis, coordinate in pinned:
            held = held.narrow(axis, coordinate, 1)
        names = tuple(f"axis{i}" for i in range(held.dim()))
        meshes[ctx.device.type, pinned] = DeviceMesh(ctx.device.type, held, mesh_dim_names=names)
        if STATE_WINDOW and ctx.device.type == "cuda":
            meshes["cpu", pinned] = DeviceMesh("cpu", held, mesh_dim_names=names)
            torch.cuda.synchronize(ctx.device)  # what goes to the host must be there

    def dtensor(local, spec):
        places = [Shard(r) if isinstance(r, int) else Replicate() for r in spec.roles] or [Replicate()]
        return DTensor.from_local(local, meshes[local.device.type, pins(spec)], places, run_check=False)

    state = {f"weights.{n}": dtensor(w, WEIGHTS[n]) for n, w in weights.items()}
    if ctx.flight and (record is None or record["hyperparameters"].get("gradient_delay")):  # those of one step ago
        state.update({f"older.{n}": dtensor(w, WEIGHTS[n]) for n, w in ctx.flight.older(weights).items()})
    there = [*range(len(STATE))]
    if "average" in STATE and not _has_average(record):
        there.remove(STATE.index("average"))
    for n, pair in moments.items():
        state.update({f"moments.{k}.{n}": dtensor(pair[k], WEIGHTS[n]) for k in there})
    return state


def _has_average(record):
    """Return whether a checkpoint to load, with this `complete.json` (None: one to save), has averages of weights."""
    return record is None or bool(record["hyperparameters"].get("ema"))


def save(ctx, weights, moments, t, folder, seed=0, keep=0, tables=(), skipped=0, beside=None):
    """
    Write a checkpoint, after `t` steps, to `folder`/step_N (N: `t` in 8 digits); it has another name until it is
    complete. `tables` ({name: tensor}) are in it. Its `complete.json` has the `seed`, the number of steps `skipped`,
    and checksums. Remove all but the newest `keep` (0: remove none). All ranks call it; the run ends if it fails. Given
    `beside` (a `BackgroundWriter`), wait for its last one, copy the state, and write in its thread.
    """
    import torch.distributed.checkpoint as dcp

    path = Path(folder) / f"step_{t:08d}"
    partial = path.with_name(f"partial_{path.name}")
    # One random state serves all ranks, as all make the same whole batches.
    state = {**state_dict(ctx, weights, moments), "step": torch.tensor(t), "random": torch.get_rng_state()}
    state.update({f"tables.{n}": tables[n] for n in tables})
    files = {}
    group = beside.group if beside else None

    def prepare():
        if ctx.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def sums():
        mine = [*partial.glob(f"__{ctx.rank}_*"), *(partial.glob(".metadata") if ctx.rank == 0 else ())]
        for part in from_all({file.name: _size_and_sum(file) for file in mine}, group):
            files.update(part)

    def finish():
        if ctx.rank == 0:
            with open(partial / "complete.json", "wb") as out:
                counts = {"step": t, "seed": seed, "skipped": skipped}
                out.write(_sealed({**_contents(), **counts, "tables": sorted(tables), "files": files}))
                out.flush()
                os.fsync(out.fileno())
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
            _remove(_complete(folder)[:-keep] if keep else ())

    def done(actions, group=None):
        """Do these on all ranks; return why one cannot be done, or None."""
        for action in actions:
            wrong = _wrong_anywhere(action, partial, group)
            if wrong:
                if ctx.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                return f"cannot write {path}: {wrong}"
        return None

    if beside is None:
        said = done((prepare, lambda: dcp.save(state, checkpoint_id=str(partial)), sums, finish))
    else:
        beside.wait()
        written = []

        def copy():
            written.append(dcp.async_save(state, checkpoint_id=str(partial), process_group=group))

        said = done((prepare, copy))
        if said is None:
            beside.start(lambda: done((written[0].result, sums, finish), group))
    if said:
        fail_alike(said)


def _remove(checkpoints):
    """Remove checkpoints; each is renamed first, so that it is never seen half removed."""
    for old in checkpoints:
        gone = old.with_name(f"partial_{old.name}")
        os.replace(old, gone)
        shutil.rmtree(gone, ignore_errors=True)


class BackgroundWriter:
    """
    Writes one checkpoint at a time in a thread, while training goes on, over a process group of its own. All ranks call
    each method.
    """

    def __init__(self, ctx):
        self.ctx, self.said = ctx, None
        self.group = dist.new_group(backend="gloo", timeout=FOREVER if ctx.watchdog else None)

    def start(self, write):
        """
        Call `write()` in the thread, on all ranks; it must return why the checkpoint cannot be written, as text, or
        None. Call `wait` before the next `start`.
        """

        def run():
            try:
                self.said = write()
            except Exception as e:  # the connection to a rank that has ended, as the main thread finds out, too
                self.said = _reason(e)

        Context.writing = threading.Thread(target=run)
        Context.writing.start()

    def poll(self):
        """End the run if the checkpoint under way has failed; if it is not done on all ranks, return at once."""
        if Context.writing is not None and everywhere(self.ctx, not Context.writing.is_alive()):
            self.wait()

    def wait(self):
        """Wait for the checkpoint under way, if there is one; end the run if it cannot be written."""
        finish_files()
        if self.said:
            fail_alike(self.said)


def _wrong_anywhere(action, folder=None, group=None):
    """Call `action` on every rank; return why it failed on the first rank where it did, or None."""
    import torch.distributed.checkpoint as dcp

    mine = None
    try:
        action()
    except (Exception, dcp.CheckpointException) as e:  # the latter is a BaseException that wraps those of all ranks
        mine = (folder and _why_no_space(folder)) or _reason(e)
    return next(filter(None, from_all(mine, group)), None)


def _why_no_space(folder):
    """Return the system's message if the disk or a quota is full; PyTorch's writer says only that a file is short."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        return e.strerror if e.errno in (errno.ENOSPC, errno.EDQUOT) else None


class Locked:
    """
    A folder, made if need be, that a file lock of rank 0 reserves for this run's checkpoints. Ends the run if another
    has the lock; removes incomplete checkpoints of runs that were killed. All ranks make one.
    """

    def __init__(self, ctx, folder):
        self.file: Any = None
        wrong = from_first(ctx, self._take(Path(folder) / "lock") if ctx.rank == 0 else None)
        if wrong:
            fail_alike(f"cannot save to {folder}: {wrong}")

    def _take(self, path):
        """Take the lock; return why it cannot be had, or None."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                self.path, self.file = path, open(path, "a+", errors="replace")
                # Not flock, whose lock forked processes would inherit.
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and os.path.samestat(os.fstat(self.file.fileno()), os.stat(path)):
                    break
                self.file.close()  # another run has just removed the file, and ended
            self.file.truncate(0)
            self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self.file.flush()
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN) and self.file:
                self.file.seek(0)
                whose = ascii(self.file.read(60).strip())[1:-1] or "unknown"
                return f"another run writes its checkpoints there ({whose}); wait for it, or save elsewhere"
            if self.file and e.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                said = f"{path.parent} cannot be locked ({e.strerror}); let no other run save there"
                sys.stderr.write(f"{NAME}: {said}\n")
                return None
            return e.strerror
        for left in path.parent.glob("partial_step_*"):  # left by a run that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        return None

    def release(self):
        """Release the lock, on the rank that holds it; remove the folder if it is empty."""
        if self.file:
            self.path.unlink(missing_ok=True)
            self.file.close()
            self.file = None
            if not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()


MOST_SEED = 2**40
"""Largest seed for which the seeds that are computed from it fit PyTorch's generators."""


def _complete(folder):
    """Return the paths of the complete checkpoints in a folder, oldest first."""
    found = (p.parent for p in Path(folder).glob("step_*/complete.json"))
    return sorted((p for p in found if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:]))


def _sealed(record):
    """Return the bytes of `complete.json` for a record, with a checksum over the record."""
    text = json.dumps(record, indent=1)
    return json.dumps({**record, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=1).encode()


def newest(ctx, folder):
    """
    Return (path, content of `complete.json`) of the newest complete checkpoint in `folder`, None if there is none; end
    the run if that content is corrupt. All ranks call it.
    """
    paths = _complete(folder) if ctx.rank == 0 else []
    found, wrong = from_first(ctx, _opened(paths[-1]) if paths else (None, None))
    if wrong:
        fail_alike(f"cannot load {found}: its complete.json {wrong}")
    return found


def _opened(path):
    """Return a checkpoint's path and record, and None; or the path, and what is wrong with its `complete.json`."""
    wrong = "is not one of a checkpoint"
    try:
        content = (path / "complete.json").read_bytes()
        record = json.loads(content)
        if not isinstance(record.pop("sha256"), str):
            return path, wrong
        # Compared byte for byte, so that changed white space is seen, too.
        if _sealed(record) != content:
            return path, "is corrupt"
        known = all(type(record[key]) is int for key in ("step", "seed")) and isinstance(record["files"], dict)
        if known and abs(record["seed"]) <= MOST_SEED and record["step"] == int(path.name[5:]):
            return (path, record), None
    except OSError as e:
        wrong = f"cannot be read: {e.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return path, wrong


def load(ctx, weights, moments, folder, changed=(), tables=None):
    """
    Load the newest complete checkpoint in `folder` into weights, moments (in place) and the random state; return its
    number of steps. Averages of weights that it has not begin as the weights. Its running statistics and counters
    replace those in the dict `tables` (None: they are dropped); of its other tables those go there that the dict lacks.
    Ends the run if there is none, if it is damaged or of another model, or if hyperparameters not named in `changed`
    differ. All ranks call it.
    """
    import torch.distributed.checkpoint as dcp

    found = newest(ctx, folder)
    if found is None:
        fail_alike(f"no complete checkpoint in {folder}")
    path, record = found
    wrong = next(filter(None, from_all(_wrong(path, record, ctx.rank, changed))), None)
    if wrong:
        fail_alike(f"cannot load {path}: {wrong}")
    state = {**state_dict(ctx, weights, moments, record), "step": torch.tensor(0), "random": torch.get_rng_state()}
    there = record.get("tables", ())
    kept = {n: torch.empty(INPUTS[n].shape, dtype=INPUTS[n].dtype) for n in TABLES if n in there}
    kept.update({n: torch.zeros((), dtype=torch.int64) for n in COUNTERS if n in there})
    state.update({f"tables.{n}": table for n, table in kept.items()})
    wrong = _wrong_anywhere(lambda: dcp.load(state, checkpoint_id=str(path)))
    if wrong or int(state["step"]) != record["step"]:
        fail_alike(f"cannot load {path}: {wrong or 'its step is not that of its complete.json'}")
    if "average" in STATE and not _has_average(record):
        for name, pair in moments.items():
            pair[STATE.index("average")].copy_(weights[name])
    weights.renew_casts()
    if ctx.flight:
        ctx.flight.older(weights).renew_casts()
    torch.set_rng_state(state["random"])
    for name, table in kept.items() if tables is not None else ():
        if name in RUNNING or name in COUNTERS:
            tables[name] = table
        tables.setdefault(name, table)
    return int(state["step"])


def _contents():
    """Return the part of the record that must equal the program's that loads it; the plan may be another."""
    weights = {n: [list(s.shape), str(s.dtype), *["frozen"] * s.frozen] for n, s in WEIGHTS.items()}
    settings = {**OPTIMIZER[1], **RECIPE}
    return {"name": NAME, "optimizer": OPTIMIZER[0], "hyperparameters": settings, "weights": weights}


def _size_and_sum(file):
    """Return the bytes of a file and their checksum."""
    size = total = 0
    with open(file, "rb") as content:
        while chunk := content.read(2**22):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
    return [size, total]


def _wrong(path, record, rank, changed):
    """Return why a checkpoint cannot be loaded, or None; each rank checks a share of the files."""
    ours, theirs = _contents(), record.get("weights")
    if not isinstance(theirs, dict) or not isinstance(record.get("hyperparameters"), dict):
        return "its complete.json is not one of a checkpoint"
    for name in dict.fromkeys([*ours["weights"], *theirs]):
        here, there = (one.get(name, "missing") for one in (ours["weights"], theirs))
        if here != there:
            return f"it is of another model: weight {name!r} is {there} there and {here} here"
    if record.get("optimizer") != ours["optimizer"]:
        return f"it was trained with {record.get('optimizer')}, and this program has {ours['optimizer']}"
    for name, here in ours["hyperparameters"].items():
        there = {"gradient_delay": 0, **record["hyperparameters"]}.get(name)  # which older checkpoints do not say
        here = json.loads(json.dumps(here))
        if there != here and name not in changed:
            said = f"it was trained with {name}={there}, and this program has {name}={here}"
            return f"{said}; --changed {name} goes on so"
    for name, expected in sorted(record["files"].items())[rank::WORLD]:
        file = path / Path(name).name
        if not file.is_file() or _size_and_sum(file) != expected:
            return f"{name} is {'corrupt' if file.is_file() else 'missing'}"
    if rank == 0:
        try:
            with open(path / ".metadata", "rb") as file:
                _PlainMetadata(file).load()
        except Exception as e:  # damaged pickles raise almost any class; the checkpoint is refused for each
            return f"its metadata cannot be read: {e}"
    return None


class _PlainMetadata(pickle.Unpickler):
    """Reader of DCP's metadata, a pickle, that refuses all names but those that describe tensors, so runs no code."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _PLAIN.get(module, "").split():
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        # Nothing is imported: all of these modules are by now.
        return getattr(sys.modules[module], name)


_PLAIN = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata "
        "_MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size bool uint8 int32 int64 float16 bfloat16 float32 float64",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
}
"""Names that metadata may contain, by module."""


def _member(kind, name):
    """Return a member of an enum, which Python before 3.11.4 pickles as an attribute; refuse other attributes."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr, which describes no tensor")
    return kind[name]


def _reason(error):
    """Return the last line of an error's message or, for one that wraps errors of ranks, of the first of these."""
    failures = getattr(error, "failures", None) or {}
    first = next(iter(failures.values()), (error,))[0]
    lines = str(first).strip().splitlines()
    return lines[-1] if lines else type(first).__name__
