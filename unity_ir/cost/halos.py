"""Find the halo exchanges of an operator: the border elements each task needs of its neighbours' shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from unity_ir.pcg.graph import Node
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import Assignment, Mesh, pins
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
    Yield the halo exchanges that an operator needs if its index variables are divided; `degrees` has the number of
    parts of each, by name.

    The dims of an operand are exchanged one after the other: later exchanges include the borders received before, so
    that corners arrive.
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
    Return the halo exchanges that an operator needs under an assignment (the role of each mesh axis), as (forward's
    move, gradient's move) pairs, keyed by the operand's index.
    """
    degrees: dict[str, int] = {}
    for what, size in zip(assignment, mesh.sizes, strict=True):
        if isinstance(what, str):
            degrees[what] = degrees.get(what, 1) * size
    found: dict[int, tuple[tuple[Move, Move], ...]] = {}
    for e in exchanges(node, degrees):
        axes = tuple(i for i, what in enumerate(assignment) if what == e.variable)
        group = degrees[e.variable]
        forward = Move("halo", axes, e.dim, e.dim, group, e.elements, e.border, pins(assignment))
        back = Move("halo_reduce", axes, e.dim, e.dim, group, e.elements + e.border, e.border, pins(assignment))
        found[e.operand] = (*found.get(e.operand, ()), (forward, back))
    return found
