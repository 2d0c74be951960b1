"""Take this rank's piece of a tensor, and make DTensors of whole tensors and of pieces."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from unity_ir.errors import UnityError
from unity_ir.interop.mesh import MeshDims
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.pcg.sharding import SUM, Layout, is_shard


def torch_dtype(dtype: str) -> torch.dtype:
    """Return PyTorch's element type for one of the compiler's: given `f32`, returns `torch.float32`."""
    return getattr(torch, TORCH_DTYPES[dtype].removeprefix("torch."))


def placements(mesh: MeshDims, layout: Layout) -> tuple[Placement, ...]:
    """
    Return the DTensor placements of a layout, one for each dim of `mesh`; the layout has a role for each mesh axis of
    the program.
    """
    return tuple(map(placement, mesh.roles(layout)))


def placement(role: int) -> Placement:
    """
    Return the DTensor placement for the role of one mesh dim: `Shard` for the number of a tensor's dim,
    `Partial("sum")` for SUM, and `Replicate` for any other role.
    """
    return Shard(role) if is_shard(role) else Partial("sum") if role == SUM else Replicate()


def local(tensor: DTensor) -> torch.Tensor:
    """Return this rank's piece of a DTensor, detached from autograd; it shares the DTensor's memory."""
    with torch.no_grad():
        return tensor.to_local()


def divided(whole: torch.Tensor, mesh: DeviceMesh, at: tuple[Placement, ...]) -> DTensor:
    """
    Return a DTensor on `mesh` with the placements `at`, given the whole tensor on every rank: each rank takes its own
    piece, and nothing is sent. Gradients do not flow back to `whole`.
    """
    # Each rank takes its own: what rank 0 has would be sent otherwise.
    return distribute_tensor(whole.detach(), mesh, at, src_data_rank=None)


def local_piece(name: str, given: torch.Tensor, mesh: DeviceMesh, at: tuple[Placement, ...]) -> torch.Tensor:
    """
    Return this rank's piece, in the placements `at` on `mesh`, of the input called `name`. `given` is the whole tensor,
    on every rank, or a DTensor that has these placements already. Raises `UnityError` for a DTensor with others.
    """
    if isinstance(given, DTensor):
        if given.placements != at or not torch.equal(given.device_mesh.mesh, mesh.mesh):
            found, wanted = (", ".join(map(repr, places)) for places in (given.placements, at))
            raise UnityError(f"parallelize: input {name} is in {found}; the plan reads it in {wanted} on its mesh")
        return local(given)
    return local(divided(given, mesh, at))


def as_dtensor(piece: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh, at: tuple[Placement, ...]) -> DTensor:
    """
    Return the DTensor of global shape `shape` (contiguous), with placements `at` on `mesh`, whose piece on this rank is
    `piece`. Nothing is copied, sent or checked.
    """
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(piece, mesh, at, run_check=False, shape=whole.shape, stride=whole.stride())
