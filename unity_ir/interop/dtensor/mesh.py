"""Turn the mesh axes of a program into the dims of a `DeviceMesh`, and layouts into placements on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.sharding import REPEAT, SUM, Layout, copies_as_repeats, is_shard
from unity_ir.plan.program import Program, makes


@dataclass(frozen=True)
class TorchMesh:
    """
    The dims of a `DeviceMesh`, outermost first: their `names`, and the numbers of the consecutive mesh `axes` of the
    program that each is made of.
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
        Return the role along each dim in a layout, which has one per mesh axis: the number of the tensor's dim that it
        shards, SUM or REPEAT. Where several dims shard one dim of a tensor, the outer divides first, as DTensor has it
        left to right.
        """
        pieces = copies_as_repeats(layout)
        return tuple(pieces[axes[0]] if axes else REPEAT for axes in self.axes)

    def placements(self, layout: Layout) -> tuple[str, ...]:
        """Return the placement along each dim in a layout, as text: `Shard(0)`, `Replicate()`, `Partial(sum)`."""
        return tuple(placement_text(role) for role in self.roles(layout))

    def dims_of(self, axes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the dims that mesh axes are part of."""
        return tuple(name for name, own in zip(self.names, self.axes, strict=True) if not set(own).isdisjoint(axes))

    def like(self, sizes: Sequence[int], names: Sequence[str] | None) -> TorchMesh | None:
        """
        Return the mesh with other dims, of these `sizes` and `names` (None: `dim0`, `dim1`, ..), if this one's can be
        divided into them, so that every layout of the plan has placements on it; None where it cannot.

        Given dims of 4 and 2 devices, a mesh of 2 x 2 x 2 has other names for the same; one of 2 x 4 has not.
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
        return TorchMesh(tuple(names or (f"dim{i}" for i in range(len(groups)))), tuple(groups), self.axis_sizes)


def placement_text(role: int) -> str:
    """Return the placement of a role, a dim's number, SUM or REPEAT, as text: given 0, `Shard(0)`."""
    return f"Shard({role})" if is_shard(role) else "Partial(sum)" if role == SUM else "Replicate()"


def torch_mesh(program: Program, machine: Machine) -> TorchMesh:
    """
    Return the fewest dims of a `DeviceMesh` on which every layout of a program has placements. Neighbouring mesh axes
    that have the same role in all layouts are one dim; it is named after the levels of the machine. On one device there
    is one dim, `device`. Raises `UnityError` if the program is for another machine.

    Given 2 nodes of 4 devices with data parallelism over nodes and tensor parallelism inside, returns dims `node` of 2
    and `gpu` of 4; given data parallelism over all, one dim `node_gpu` of 8.
    """
    sizes = program.mesh.sizes
    layouts = {copies_as_repeats(program.tensors[r].layout) for instruction in program.body for r in makes(instruction)}
    groups: list[tuple[int, ...]] = []
    for axis in range(len(sizes)):
        if groups and all(layout[axis - 1] == layout[axis] for layout in layouts):
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
    if machine.mesh.sizes != sizes:
        raise UnityError(f"dtensor: {machine.name} has {machine.devices} devices, not {program.devices}; plan for it")
    wished = ["_".join(dict.fromkeys(machine.levels[machine.axis_levels[a]].name for a in group)) for group in groups]
    names = [f"{name}{wished[:i].count(name)}" if wished.count(name) > 1 else name for i, name in enumerate(wished)]
    if not groups:  # one device
        return TorchMesh(("device",), ((),), ())
    return TorchMesh(tuple(names), tuple(groups), sizes)
