# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Ranks and their groups."""

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

from unity_ir.lowering.runtime.plan import GROUPS, MESH, NAME, WORLD
from unity_ir.lowering.runtime.watchdog import Watchdog

# --- copied into the program from here on ---


FOREVER = timedelta(days=7)
"""How long a group waits where the watchdog says how long."""


def fail(message):
    """End with one line, written at once so that those of ranks do not mix; of those that are watched one says why."""
    if Context.watchdog is None or Context.watchdog.first():
        sys.stderr.write(f"{NAME}: {' '.join(str(message).split())}\n")
    if dist.is_initialized():
        dist.destroy_process_group()  # or its threads may abort the process
    sys.exit(1)


def fail_alike(message):
    """End with what every rank finds. Rank 0 says it before the others end, upon which torchrun would end it, too."""
    joined = dist.is_initialized()
    rank = dist.get_rank() if joined else int(os.environ.get("RANK", 0))
    if rank == 0:
        sys.stderr.write(f"{NAME}: {' '.join(str(message).split())}\n")
    if joined:
        dist.barrier()
        dist.destroy_process_group()
    elif rank:
        time.sleep(5)
    sys.exit(1)


class Context:
    """This rank: its device, its place in the mesh, and the groups it is in."""

    watchdog = None  # of this process, if there are others and it has joined them itself

    def __init__(self, backend: str):
        self.rank = dist.get_rank()
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.place = self._place(self.rank)
        self.groups = {axes: self._group(axes) for axes in GROUPS}

    @staticmethod
    def _place(rank: int) -> tuple[int, ...]:
        """A rank's coordinates in the mesh."""
        strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
        return tuple(rank // stride % size for stride, size in zip(strides, MESH))

    def _group(self, axes: tuple[int, ...]):
        """The group of ranks that differ from this one along `axes` only; all ranks make all groups, in one order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(WORLD):
            found.setdefault(tuple(c for i, c in enumerate(self._place(rank)) if i not in axes), []).append(rank)
        mine = None
        for ranks in found.values():
            group = dist.new_group(ranks, timeout=FOREVER if self.watchdog else None)
            if self.rank in ranks:
                mine = group
        return mine

    def index(self, axes) -> int:
        """This rank's position along `axes`, the first outermost."""
        position = 0
        for axis in axes:
            position = position * MESH[axis] + self.place[axis]
        return position

    def moved(self):
        """This rank has come further, as far as the others can be waited for."""
        if self.watchdog:
            self.watchdog.moved()

    def unlimited(self):
        """Within this, files are read or written, for which there is no limit of time."""
        return self.watchdog.unlimited() if self.watchdog else nullcontext()

    def at(self, pins) -> bool:
        """Whether this rank is where pinned axes are: pairs of an axis and a coordinate."""
        return all(self.place[axis] == coordinate for axis, coordinate in pins)


def build(backend: str, seconds: float | None = None) -> Context:
    """Join the other ranks, as many as the plan has. If they join here, one that hangs for `seconds` ends the run."""
    if not dist.is_initialized():
        if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            fail("nccl needs GPUs, and PyTorch for them; --backend gloo runs on CPUs")
        if backend == "nccl" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            # Several ranks on one GPU, for tests: NCCL allows it if each believes to be on a host of its own.
            os.environ.update(
                NCCL_HOSTID=f"rank-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
                NCCL_NET="Socket", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_CUMEM_ENABLE="0",
                NCCL_NVLS_ENABLE="0", NCCL_ALGO="Ring", NCCL_PROTO="Simple", NCCL_MAX_NCHANNELS="1",
                TORCH_NCCL_BLOCKING_WAIT="1",
            )  # fmt: skip
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
        limit: dict[str, Any] = {} if seconds is None else {"timeout": timedelta(seconds=seconds)}
        try:
            store, rank, world = next(dist.rendezvous("env://", **limit))
        except (RuntimeError, ValueError) as e:
            fail(f"the ranks cannot meet: {(str(e).strip().splitlines() or ['no reason given'])[0]}")
        # After a restart torchrun's store may still hold where the ranks were that have gone.
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
    """What rank 0 has, on every rank."""
    found = [value]
    dist.broadcast_object_list(found, 0, device=ctx.device)
    return found[0]


def from_all(value):
    """What each rank has, on every rank."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def lost(error) -> bool:
    """Whether an error is that of a connection to another rank, which has ended."""
    return isinstance(error, getattr(dist, "DistError", ())) or "gloo/" in str(error)
