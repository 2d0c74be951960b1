"""
Enumerate the roles of mesh axes that an operator allows, check assignments, and draw assignments at random. An
assignment gives each mesh axis its role in the operator's work: an index variable that it divides, a set of operands in
partial sums, or replicas whose gradients are addends (COPY) or equal (REPEAT).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from unity_ir.machine.model import Machine
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.coarse import FINE_AXES
from unity_ir.pcg.materialise import variable_degrees
from unity_ir.pcg.node import Node
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    GridRole,
    Mesh,
    is_pinned,
    is_shard,
    operand_layout,
    pinned_at,
    result_layout,
)
from unity_ir.pcg.types import TensorType
from unity_ir.tdl.divisibility import Analysis


def possible_roles(node: Node) -> tuple[GridRole, ...]:
    """
    Return the roles that one mesh axis may have in a compute node of a serial graph: each index variable that can be
    divided, COPY, REPEAT, and each set of operands that may be in partial sums together. Pinning (to the devices at one
    coordinate) is not among them.
    """
    return _roles(node.analysis)


def _roles(analysis: Analysis) -> tuple[GridRole, ...]:
    variables = tuple(v for v in analysis.splittable if analysis.bound.extents[v] > 1)
    return (*variables, COPY, REPEAT, *analysis.carriers)


def fits(node: Node, assignment: Assignment, mesh: Mesh) -> bool:
    """
    Return whether a compute node of a serial graph can have an assignment (the role of each axis of `mesh`): each role
    is one of the node's (`possible_roles`) or pins the axis, sizes are divisible, and no integers or booleans are in
    partial sums.
    """
    return _fits(node.op, tuple(v.type for v in node.operands), node.attributes, node.types, assignment, mesh)


@lru_cache(maxsize=65536)
def _fits(
    operator: str,
    operands: tuple[TensorType, ...],
    attributes: Attributes,
    results: tuple[TensorType, ...],
    assignment: Assignment,
    mesh: Mesh,
) -> bool:
    analysis = find_operator(operator).bind(
        tuple(t.shape for t in operands), attributes, tuple(t.dtype for t in operands)
    )
    may = _roles(analysis)
    if len(assignment) != len(mesh.sizes) or not all(what in may or is_pinned(what) for what in assignment):
        return False
    if any(analysis.bound.extents[v] % degree for v, degree in variable_degrees(assignment, mesh.sizes).items()):
        return False
    placed = [
        *((t, operand_layout(analysis, i, assignment)) for i, t in enumerate(operands)),
        *((t, result_layout(analysis, i, assignment)) for i, t in enumerate(results)),
    ]
    return all(_holds(type, layout, mesh) for type, layout in placed)


def _holds(type: TensorType, layout: tuple[int, ...], mesh: Mesh) -> bool:
    left = list(type.shape)
    for role, size in zip(layout, mesh.sizes, strict=True):
        if is_shard(role):
            if left[role] % size:
                return False
            left[role] //= size
    return type.is_floating or SUM not in layout


SPLIT = 1 / 8
"""Probability that a level's first axis has another role than its other axes."""


def random_assignment(
    node: Node, machine: Machine, random: Random, pinned: float = 0.0, axes: Sequence[int] | None = None
) -> Assignment:
    """
    Return a random assignment (the role of each mesh axis) that fits a compute node of a serial graph, drawn from
    `random`. On a mesh of at most `FINE_AXES` axes, each axis draws a role of its own. On others, all axes of one
    machine level share a role, except that with probability `SPLIT` the first of them draws its own.

    `pinned` is the probability that an axis is then pinned at a random coordinate instead, and `axes` are the numbers
    of the axes that this may happen to (None: all).
    """
    may = possible_roles(node)
    mesh = machine.mesh
    few = len(mesh.sizes) <= FINE_AXES
    while True:
        found: list[GridRole] = []
        for axis, level in enumerate(machine.axis_levels):
            before = [i for i in range(axis) if machine.axis_levels[i] == level]
            alike = len(before) > 1 or (len(before) == 1 and random.random() >= SPLIT)
            found.append(found[-1] if alike and not few else random.choice(may))
        if pinned:
            for axis in range(len(mesh.sizes)) if axes is None else axes:
                if random.random() < pinned:
                    found[axis] = pinned_at(random.randrange(mesh.sizes[axis]))
        if fits(node, tuple(found), mesh):
            return tuple(found)
