"""Take this rank's piece of a tensor, and make DTensors of whole tensors and of pieces."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from unity_ir.errors import UnityError
from unity_ir.interop.dtensor.mesh import TorchMesh
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.pcg.sharding import SUM, Layout, is_shard


def torch_dtype(dtype: str) -> torch.dtype:
    """Return PyTorch's element type: given `f32`, `torch.float32`."""
    return getattr(torch, TORCH_DTYPES[dtype].removeprefix("torch."))


def placements(mesh: TorchMesh, layout: Layout) -> tuple[Placement, ...]:
    """Return the placement along each dim of a mesh in a layout."""
    return tuple(map(placement, mesh.roles(layout)))


def placement(role: int) -> Placement:
    """
    Return PyTorch's placement for the role of a mesh dim: `Shard` for the number of a tensor's dim, `Partial("sum")`
    for SUM, `Replicate` for any other.
    """
    return Shard(role) if is_shard(role) else Partial("sum") if role == SUM else Replicate()


def local(tensor: DTensor) -> torch.Tensor:
    """Return this rank's piece of a tensor, without a gradient; it shares the tensor's memory."""
    with torch.no_grad():
        return tensor.to_local()


def divided(whole: torch.Tensor, mesh: DeviceMesh, at: tuple[Placement, ...]) -> DTensor:
    """
    Return a tensor that every rank has whole as a DTensor in placements `at`; nothing is sent. Gradients do not flow
    through it.
    """
    # Each rank takes its own: what rank 0 has would be sent otherwise.
    return distribute_tensor(whole.detach(), mesh, at, src_data_rank=None)


def local_piece(name: str, given: torch.Tensor, mesh: DeviceMesh, at: tuple[Placement, ...]) -> torch.Tensor:
    """
    Return this rank's piece of an input called `name`: of a whole tensor, which every rank has, or of a DTensor, which
    must have the placements `at` already. Raises `UnityError` for a DTensor in others.
    """
    if isinstance(given, DTensor):
        if given.placements != at or not torch.equal(given.device_mesh.mesh, mesh.mesh):
            found, wanted = (", ".join(map(repr, places)) for places in (given.placements, at))
            raise UnityError(f"parallelize: input {name} is in {found}; the plan reads it in {wanted} on its mesh")
        return local(given)
    return local(divided(given, mesh, at))


def as_dtensor(piece: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh, at: tuple[Placement, ...]) -> DTensor:
    """
    Return the DTensor of global shape `shape`, contiguous, with placements `at` on `mesh`, of which this rank has
    `piece`; nothing is copied, sent or checked.
    """
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(piece, mesh, at, run_check=False, shape=whole.shape, stride=whole.stride())
