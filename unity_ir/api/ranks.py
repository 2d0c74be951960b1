"""Join the ranks of a run, or start a run of one, and leave them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def backend_of(backend: str | None) -> str:
    """
    Return the backend of the ranks, `nccl` or `gloo`: that of the process group if there is one, else `backend`, by
    default by whether there are GPUs. Start the process group of a process that is alone.
    """
    if dist.is_initialized():
        return "nccl" if "nccl" in str(dist.get_backend()) else "gloo"
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "RANK" not in os.environ:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return backend


def leave(context: Any, owns_ranks: bool) -> None:
    """Destroy the process groups of a program's context, and that of all ranks if `owns_ranks`."""
    if not dist.is_initialized():
        return
    if owns_ranks:
        dist.destroy_process_group()
        return
    for group in () if context is None else (*context.groups.values(), *dict(context.ways or {}).values()):
        dist.destroy_process_group(group)
