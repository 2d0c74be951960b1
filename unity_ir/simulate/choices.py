"""Which assignments an operator may have, one at random."""

from __future__ import annotations

from random import Random

from unity_ir.pcg.graph import Node
from unity_ir.pcg.layout import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    GridRole,
    Mesh,
    operand_layout,
    result_layout,
)
from unity_ir.pcg.materialise import degrees
from unity_ir.pcg.types import TensorType


def roles(node: Node) -> tuple[GridRole, ...]:
    """What a mesh axis may do in a serial compute node."""
    analysis = node.analysis
    variables = tuple(v for v in analysis.splittable if analysis.bound.extents[v] > 1)
    return (*variables, COPY, REPEAT, *analysis.carriers)


def fits(node: Node, assignment: Assignment, mesh: Mesh) -> bool:
    """Whether a serial compute node can have an assignment: degrees divide sizes, and integers are not in addends."""
    analysis = node.analysis
    if any(analysis.bound.extents[v] % degree for v, degree in degrees(assignment, mesh.sizes).items()):
        return False
    placed = [
        *((v.type, operand_layout(analysis, i, assignment)) for i, v in enumerate(node.operands)),
        *((t, result_layout(analysis, i, assignment)) for i, t in enumerate(node.types)),
    ]
    return all(_holds(type, layout, mesh) for type, layout in placed)


def _holds(type: TensorType, layout: tuple[int, ...], mesh: Mesh) -> bool:
    left = list(type.shape)
    for role, size in zip(layout, mesh.sizes, strict=True):
        if role >= 0:
            if left[role] % size:
                return False
            left[role] //= size
    return type.is_floating or SUM not in layout


def random_assignment(node: Node, mesh: Mesh, random: Random) -> Assignment:
    """An assignment of a serial compute node, each axis's role drawn evenly; all of one kind every other time."""
    may = roles(node)
    while True:
        if random.random() < 0.5:
            found: Assignment = (random.choice(may),) * len(mesh.sizes)
        else:
            found = tuple(random.choice(may) for _ in mesh.sizes)
        if fits(node, found, mesh):
            return found
