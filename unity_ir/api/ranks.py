"""Join the ranks of a run, or start a run of one, and leave them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def ensure_process_group(backend: str | None) -> str:
    """
    Return the backend for the ranks' communication, `nccl` or `gloo`: that of the process group if there is one, else
    `backend`, or if that is None `nccl` where there are GPUs and `gloo` elsewhere.

    If there is neither a process group nor the environment variable `RANK`, which `torchrun` sets, a process group of
    this process alone is started.
    """
    if dist.is_initialized():
        return "nccl" if "nccl" in str(dist.get_backend()) else "gloo"
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "RANK" not in os.environ:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return backend


def leave(context: Any, owns_ranks: bool) -> None:
    """
    Destroy process groups at the end of a run. With `owns_ranks`, that of all ranks is destroyed, and with it every
    other; else only those that `context`, the emitted program's `Context` of this rank, has made (None: none). Does
    nothing without a process group.
    """
    if not dist.is_initialized():
        return
    if owns_ranks:
        dist.destroy_process_group()
        return
    for group in () if context is None else (*context.groups.values(), *dict(context.ways or {}).values()):
        dist.destroy_process_group(group)
