# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Join the ranks, give each its place in the mesh and its process groups, and end a run with one line."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.plan import GROUPS, MESH, NAME, WORLD, flight
from unity_ir.lowering.runtime.watchdog import LONGEST_START, Watchdog

# --- copied into the program from here on ---


FOREVER = timedelta(days=7)
"""Timeout of a process group whose ranks the watchdog watches."""


def fail(message):
    """Print `message` and end this rank with exit code 1; with a Watchdog, only the first rank to fail prints it."""
    if Context.watchdog is None or Context.watchdog.first():
        sys.stderr.write(f"{NAME}: {' '.join(str(message).split())}\n")
    finish_files()
    if dist.is_initialized():
        dist.destroy_process_group()  # else its threads may abort the process
    sys.exit(1)


def fail_alike(message):
    """End all ranks, which must all call this, with exit code 1; rank 0 prints `message` before any rank ends."""
    joined = dist.is_initialized()
    rank = dist.get_rank() if joined else int(os.environ.get("RANK", 0))
    if rank == 0:
        sys.stderr.write(f"{NAME}: {' '.join(str(message).split())}\n")
    finish_files()
    if joined:
        dist.barrier()
        dist.destroy_process_group()
    elif rank:
        time.sleep(5)
    sys.exit(1)


def finish_files():
    """Wait for the thread that writes a checkpoint while training goes on, if there is one."""
    thread, Context.writing = Context.writing, None
    if thread is not None:
        with Context.watchdog.unlimited() if Context.watchdog else nullcontext():
            thread.join()


class Context:
    """
    This rank's number `rank`, `device`, coordinates in the mesh (`place`), and process `groups` by mesh axes (GROUPS).
    """

    watchdog = None  # of this process, if it has joined other ranks itself
    writing = None  # the thread that writes files beside training, if there is one
    micro_batch = 0  # the number of the micro-batch that is run
    is_last = False  # whether no other follows it
    ways = ()  # the process groups of a pipeline's sends, by their direction
    piece = 0  # the number of the piece of which the loss is made

    def __init__(self, backend: str):
        self.rank = dist.get_rank()
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.place = self._place(self.rank)
        self.groups = {axes: self._group(axes) for axes in GROUPS}
        self.flight = flight and flight()

    @staticmethod
    def _place(rank: int) -> tuple[int, ...]:
        """Return a rank's coordinates in the mesh."""
        strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
        return tuple(rank // stride % size for stride, size in zip(strides, MESH))

    def _group(self, axes: tuple[int, ...]):
        """Return the group of ranks that differ from this one along `axes` only; every rank makes all such groups."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(WORLD):
            found.setdefault(tuple(c for i, c in enumerate(self._place(rank)) if i not in axes), []).append(rank)
        mine = None
        for ranks in found.values():
            group = dist.new_group(ranks, timeout=FOREVER if self.watchdog else None)
            if self.rank in ranks:
                mine = group
        return mine

    def index(self, axes, position=0) -> int:
        """
        Return this rank's number, from 0, among the n ranks along mesh axes `axes` (row-major, the first axis
        outermost), plus n * `position`, where `position` is a number along axes further out, such as a micro-batch's.
        """
        for axis in axes:
            position = position * MESH[axis] + self.place[axis]
        return position

    def note_progress(self):
        """Tell the watchdog, if there is one, that this rank makes progress."""
        if self.watchdog:
            self.watchdog.note_progress()

    def unlimited(self):
        """Return a context manager for reading and writing files, during which the watchdog sets no limit."""
        return self.watchdog.unlimited() if self.watchdog else nullcontext()

    def at(self, pins) -> bool:
        """Return whether this rank has all the given coordinates: `pins` are pairs of a mesh axis and a coordinate."""
        return all(self.place[axis] == coordinate for axis, coordinate in pins)


def build(backend: str, seconds: float | None = None) -> Context:
    """
    Join the ranks by `backend` (nccl or gloo), unless this process has done so; return this rank's Context. A Watchdog
    ends the run if a rank hangs for `seconds` (None: there is no Watchdog). Ends the run unless there are WORLD ranks.
    """
    if not dist.is_initialized():
        if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            fail("nccl needs GPUs, and PyTorch for them; --backend gloo runs on CPUs")
        if backend == "nccl" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            # Several ranks on one GPU, for tests: NCCL allows this if each reports a host of its own.
            os.environ.update(
                NCCL_HOSTID=f"rank-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
                NCCL_NET="Socket", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_CUMEM_ENABLE="0",
                NCCL_NVLS_ENABLE="0", NCCL_ALGO="Ring", NCCL_PROTO="Simple", NCCL_MAX_NCHANNELS="1",
                TORCH_NCCL_BLOCKING_WAIT="1",
            )  # fmt: skip
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
        # Ranks may take longer to start than a step may take.
        limit: dict[str, Any] = {} if seconds is None else {"timeout": timedelta(seconds=max(seconds, LONGEST_START))}
        try:
            store, rank, world = next(dist.rendezvous("env://", **limit))
        except (RuntimeError, ValueError) as e:
            fail(f"the ranks cannot meet: {(str(e).strip().splitlines() or ['no reason given'])[0]}")
        # After a restart torchrun's store may still hold the addresses of the ranks that have ended.
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        if seconds is not None and world == WORLD > 1:
            Context.watchdog = Watchdog(store, rank, seconds)
            limit = {"timeout": FOREVER}
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, **limit)
    if dist.get_world_size() != WORLD:
        found = dist.get_world_size()
        fail_alike(f"this plan is for {WORLD} ranks, not {found}; run torchrun --nproc-per-node {WORLD}")
    return Context(backend)


def from_first(ctx, value):
    """Return rank 0's `value`, any object that can be pickled, on every rank. All ranks call it."""
    found = [value]
    dist.broadcast_object_list(found, 0, device=ctx.device)
    return found[0]


def from_all(value, group=None):
    """
    Return, on every rank, the list of all ranks' values in order of rank; `value`, this rank's, can be any object that
    can be pickled. `group` is a process group of all ranks (None: the default one). All ranks call it.
    """
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value, group)
    return found


def everywhere(ctx, flag):
    """Return whether `flag` is true on every rank. All ranks call it."""
    number = torch.tensor(int(flag), device=ctx.device)
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return bool(number)


def is_connection_lost(error) -> bool:
    """Return whether an error means that the connection to another rank, which must have ended, is lost."""
    return isinstance(error, getattr(dist, "DistError", ())) or "gloo/" in str(error)
