"""
Turn the mesh axes of a program into the dims of a mesh as other systems have it, with names (a `DeviceMesh` of PyTorch,
a `Mesh` of JAX), and layouts into roles on those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.sharding import REPEAT, SUM, Layout, copies_as_repeats, is_shard
from unity_ir.plan.instructions import makes
from unity_ir.plan.program import Program


@dataclass(frozen=True)
class MeshDims:
    """
    The dims of a mesh with names, outermost first, and how they are made of a program's mesh axes: dim i is called
    `names[i]`, and joins the neighbouring mesh axes with the numbers `axes[i]`.
    """

    names: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    axis_sizes: tuple[int, ...]
    """The sizes of the mesh axes, which are prime."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of devices along each dim."""
        return tuple(prod(self.axis_sizes[a] for a in axes) for axes in self.axes)

    def roles(self, layout: Layout) -> Layout:
        """
        Return the role that each dim of this mesh has in a layout, which has a role for each mesh axis of the program.
        A role is the number of the tensor's dim that is sharded, SUM or REPEAT (which also stands for COPY).

        If several dims of the mesh shard one dim of the tensor, the outer one divides first, as in DTensor.
        """
        pieces = copies_as_repeats(layout)
        return tuple(pieces[axes[0]] if axes else REPEAT for axes in self.axes)

    def placements(self, layout: Layout) -> tuple[str, ...]:
        """
        Return the placement along each dim of this mesh in a layout, as text: `Shard(0)`, `Replicate()` or
        `Partial(sum)`.
        """
        return tuple(placement_text(role) for role in self.roles(layout))

    def dims_of(self, axes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the dims of this mesh that contain any of the program's mesh axes with these numbers."""
        return tuple(name for name, own in zip(self.names, self.axes, strict=True) if not set(own).isdisjoint(axes))

    def like(self, sizes: Sequence[int], names: Sequence[str] | None) -> MeshDims | None:
        """
        Return this mesh with its dims divided further, into dims of the sizes `sizes`, called `names` (None: `dim0`,
        `dim1`, ..); every layout of the plan still has placements on it. None if that is impossible: if the program's
        mesh axes, in order, do not multiply to these sizes, or a new dim would be in two dims of this mesh.

        Given a mesh with dims of 4 and 2 devices: for the sizes 2, 2 and 2 its first dim is divided; for 2 and 4 it
        returns None.
        """
        groups: list[tuple[int, ...]] = []
        axis = 0
        for size in sizes:
            first, left = axis, size
            while left > 1 and axis < len(self.axis_sizes) and left % self.axis_sizes[axis] == 0:
                left //= self.axis_sizes[axis]
                axis += 1
            if left > 1:
                return None
            groups.append(tuple(range(first, axis)))
        together = all(any(set(group) <= set(own) for own in self.axes) for group in groups if group)
        if axis != len(self.axis_sizes) or not together:
            return None
        return MeshDims(tuple(names or (f"dim{i}" for i in range(len(groups)))), tuple(groups), self.axis_sizes)


def placement_text(role: int) -> str:
    """
    Return a role, the number of a tensor's dim, SUM or REPEAT, as the text of a DTensor placement: given 0, `Shard(0)`.
    """
    return f"Shard({role})" if is_shard(role) else "Partial(sum)" if role == SUM else "Replicate()"


def mesh_dims(program: Program, machine: Machine) -> MeshDims:
    """
    Return the dims of a mesh for a program: as few as possible, with a role for every layout of the program.
    Neighbouring mesh axes that have the same role in all layouts are joined into one dim, which is named after the
    machine's levels. On one device there is one dim, `device`. Raises `UnityError` if the program is for another
    machine.

    Given 2 nodes of 4 devices with data parallelism over nodes and tensor parallelism inside, returns dims `node` of 2
    and `gpu` of 4; given data parallelism over all, one dim `node_gpu` of 8.
    """
    sizes = program.mesh.sizes[: program.axes]
    made = {r for instruction in program.body for r in makes(instruction)}
    layouts = {copies_as_repeats(program.tensors[r].layout) for r in made}
    groups: list[tuple[int, ...]] = []
    for axis in range(len(sizes)):
        if groups and all(layout[axis - 1] == layout[axis] for layout in layouts):
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
    if machine.mesh.sizes != sizes:
        raise UnityError(f"mesh: {machine.name} has {machine.devices} devices, not {program.devices}; plan for it")
    wished = ["_".join(dict.fromkeys(machine.levels[machine.axis_levels[a]].name for a in group)) for group in groups]
    names = [f"{name}{wished[:i].count(name)}" if wished.count(name) > 1 else name for i, name in enumerate(wished)]
    if not groups:  # one device
        return MeshDims(("device",), ((),), ())
    return MeshDims(tuple(names), tuple(groups), sizes)
