"""Perform the moves of a program on this rank's pieces by `DTensor.redistribute`, one collective each."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from unity_ir.interop.dtensor.pieces import placement
from unity_ir.interop.mesh import MeshDims
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.sharding import is_shard
from unity_ir.plan.instructions import ReshardMove

Local = Callable[[torch.Tensor], torch.Tensor]
"""A function of this rank's piece."""


class Groups:
    """
    Makes the one-dim meshes (process groups) along which the moves of a program communicate, each for a set of the
    program's mesh axes, and keeps them. One is a dim of the given `DeviceMesh`, or several axes taken as one dim.
    """

    def __init__(self, mesh: DeviceMesh, dims: MeshDims):
        self._mesh, self._dims = mesh, dims
        self._made: dict[tuple[int, ...], DeviceMesh] = {}

    def along(self, axes: tuple[int, ...]) -> DeviceMesh:
        """
        Return this rank's mesh of one dim along `axes`, numbers of the program's mesh axes. All ranks must ask for the
        same ones in the same order, since process groups may be made.
        """
        if axes not in self._made:
            self._made[axes] = self._new(axes)
        return self._made[axes]

    def _new(self, axes: tuple[int, ...]) -> DeviceMesh:
        if axes in self._dims.axes:
            name = self._dims.names[self._dims.axes.index(axes)]
            return self._mesh if self._mesh.ndim == 1 else self._mesh[name]
        sizes = self._dims.axis_sizes
        others = [axis for axis in range(len(sizes)) if axis not in axes]
        ranks = self._mesh.mesh.reshape(sizes).permute(*others, *axes)
        ranks = ranks.reshape(-1, prod(sizes[axis] for axis in axes)).contiguous()
        return DeviceMesh(self._mesh.device_type, ranks, mesh_dim_names=("others", "moved"))["moved"]

    def index(self, axes: tuple[int, ...]) -> int:
        """
        Return this rank's position along `axes`, numbers of the program's mesh axes, the first of which is outermost.
        As for `along`, all ranks must ask in the same order.
        """
        return self.along(axes).get_local_rank()


def move(step: ReshardMove, groups: Groups) -> Local | None:
    """
    Return a function that performs a move of a reshard: it takes this rank's piece, and returns the piece after the
    move. None if the move changes no bytes, so that the piece stays as it is. All ranks must ask for the same moves in
    the same order, since process groups may be made.

    The function redistributes the piece as a DTensor on a mesh of one dim, which is made of the move's axes alone: so
    DTensor runs just the collective that is planned. On a mesh of several dims it would communicate one dim after the
    other.
    """
    row = COLLECTIVES[step.kind]
    if row.is_free:
        return None
    if step.kind == "zero_pad":
        # DTensor would divide replicas into equal addends, and knows no way from shards to addends.
        return _zero_pad(groups.index(step.axes), groups.along(step.axes).size(), step.source)
    mesh = groups.along(step.axes)
    source, target = (placement(step.source),), (placement(step.target),)

    def redistribute(piece: torch.Tensor) -> torch.Tensor:
        found = DTensor.from_local(piece.contiguous(), mesh, source, run_check=False)
        return found.redistribute(mesh, target).to_local().contiguous()

    return redistribute


def _zero_pad(index: int, ways: int, source: int) -> Local:
    """Return the function that makes a piece an addend of the whole, with zeros where other ranks' pieces are."""

    def of_shard(piece: torch.Tensor) -> torch.Tensor:
        shape = list(piece.shape)
        shape[source] *= ways
        whole = piece.new_zeros(shape)
        whole.narrow(source, index * piece.shape[source], piece.shape[source]).copy_(piece)
        return whole

    def of_replica(piece: torch.Tensor) -> torch.Tensor:
        return piece if index == 0 else torch.zeros_like(piece)

    return of_shard if is_shard(source) else of_replica
