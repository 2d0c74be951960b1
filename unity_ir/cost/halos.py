"""Find the halo exchanges of an operator: the border elements each task needs of its neighbours' shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from unity_ir.pcg.node import Node
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import Assignment, Mesh, pins_of
from unity_ir.pcg.types import divided_type
from unity_ir.tdl.parallel import Configuration, operand_degrees


@dataclass(frozen=True, slots=True)
class Exchange:
    """
    A halo exchange of one operand along one dim, sharded by the index variable `variable`.

    `elements` is the number of elements of a device's piece before the exchange, `border` the number it receives.
    """

    operand: int
    dim: int
    variable: str
    elements: int
    border: int


def exchanges(node: Node, degrees: Mapping[str, int]) -> Iterator[Exchange]:
    """
    Yield the halo exchanges that a serial compute node needs if its index variables are divided, one per operand and
    dim that reads beyond its shard.

    `degrees` maps the name of an index variable to its number of parts; variables left out are whole. An `Exchange`
    counts elements, of one device. The dims of an operand are exchanged one after the other, and later exchanges
    include the borders received before, so that corners arrive.
    """
    analysis = node.analysis
    if not analysis.operand_halos:
        return
    needed = operand_degrees(analysis, Configuration(degrees))
    for i, (value, parameter, need) in enumerate(zip(node.operands, analysis.bound.operands, needed, strict=True)):
        sizes = list(divided_type(value.type.shape, value.type.dtype, need).core_shape)
        for dim, (low, high) in enumerate(need.halo):
            variable = analysis.operand_dims[parameter.name][dim]
            if low + high == 0 or variable is None:
                continue
            elements = prod(sizes)
            yield Exchange(i, dim, variable, elements, elements // sizes[dim] * (low + high))
            sizes[dim] += low + high


def halo_moves(node: Node, assignment: Assignment, mesh: Mesh) -> dict[int, tuple[tuple[Move, Move], ...]]:
    """
    Return the halo exchanges that a serial compute node needs under `assignment`, the role of each axis of `mesh` in
    the operator, such as the index variable that the axis divides.

    Keys are the indices of the operands that need one; values are tuples of (forward's move, gradient's move) pairs,
    one per dim exchanged. The gradient's moves (`halo_reduce`) add the borders back to the neighbours' shards.
    """
    degrees: dict[str, int] = {}
    for what, size in zip(assignment, mesh.sizes, strict=True):
        if isinstance(what, str):
            degrees[what] = degrees.get(what, 1) * size
    found: dict[int, tuple[tuple[Move, Move], ...]] = {}
    for e in exchanges(node, degrees):
        axes = tuple(i for i, what in enumerate(assignment) if what == e.variable)
        group = degrees[e.variable]
        forward = Move("halo", axes, e.dim, e.dim, group, e.elements, e.border, pins_of(assignment))
        back = Move("halo_reduce", axes, e.dim, e.dim, group, e.elements + e.border, e.border, pins_of(assignment))
        found[e.operand] = (*found.get(e.operand, ()), (forward, back))
    return found
