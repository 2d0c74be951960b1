"""
Tofu's search (section 5) and the heuristics it is compared with (section 7.3).

The coarsened graph is partitioned for one mesh axis after the other, outermost first, each time with the fewest bytes
moved; every tensor rests in as many pieces as there are devices. Tofu's dynamic program over a linear graph is variable
elimination here (`search/exact/elimination.py`), which is exact on any graph.

    tofu                 as in the paper
    tofu-all-row         tensors by their first dim, each operator by what is best given that
    tofu-spartan         the largest tensor first, then the operators around it, and so on
    tofu-equal-chop      each tensor along one dim only, for all axes at once
    tofu-no-reduction    without sharding an operator along what it sums over (ICML18)
"""

from __future__ import annotations

from math import prod

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.search.exact.elimination import minimise, plain
from unity_ir.search.tofu.coarsen import coarsen, without_groups
from unity_ir.search.tofu.step import StepBuilder, StepProblem, group_sizes

VARIANTS = ("tofu", "tofu-all-row", "tofu-spartan", "tofu-equal-chop", "tofu-no-reduction")

Choices = tuple[list[int], list[int]]
"""A choice for every group of operators, and of values."""


def tofu(graph: Graph, machine: Machine, variant: str = "tofu", coarse: bool = True) -> Graph:
    """
    Return the parallel graph that Tofu's search makes of a serial one: everything is partitioned along one mesh axis
    after the other, each time with the fewest bytes moved. Memory limits are not looked at.

    `variant` is one of `VARIANTS` (Tofu, section 7.3): `tofu` or one of the heuristics it is compared with, such as
    `tofu-all-row` or `tofu-no-reduction`. With `coarse`, equal operators on shared weights are grouped first (section
    5.1, `coarsen`). Raises `UnityError` for an unknown variant.
    """
    if variant not in VARIANTS:
        raise UnityError(f"tofu: unknown variant {variant!r}; known are {', '.join(VARIANTS)}")
    axes = StepBuilder(
        graph, coarsen(graph) if coarse else without_groups(graph), reduction=variant != "tofu-no-reduction"
    )
    mesh = machine.mesh
    sizes = (prod(mesh.sizes),) if variant == "tofu-equal-chop" and mesh.sizes else mesh.sizes
    solve = {"tofu-all-row": _all_row, "tofu-spartan": _spartan}.get(variant, fewest_bytes)
    for size in sizes:
        step = axes.step(size)
        axes.choose(step, size, *solve(step))
    repeated = len(mesh.sizes) // max(1, len(sizes))
    assignments = {n: roles * repeated for n, roles in axes.assignments().items()}
    layouts = {v: roles * repeated for v, roles in axes.layouts().items()}
    return materialise(graph, assignments, mesh, layouts)


def fewest_bytes(step: StepProblem) -> Choices:
    """
    Return the choices of a step of Tofu's recursion with the fewest bytes moved in all, by variable elimination: (the
    index of the choice of each operator group, and of each value group).
    """
    count = len(step.operators)
    factors = [plain((i,), own) for i, own in enumerate(step.own)]
    factors += [plain((i, count + j), table) for (i, j), table in step.edges.items()]
    _, found = minimise(group_sizes(step), factors)
    return [found[i] for i in range(count)], [found[count + j] for j in range(len(step.values))]


def _all_row(step: StepProblem) -> Choices:
    values = [0] * len(step.values)
    return [_best_operator(step, i, dict(enumerate(values))) for i in range(len(step.operators))], values


def _spartan(step: StepProblem) -> Choices:
    operators: dict[int, int] = {}
    values: dict[int, int] = {}
    around: dict[int, list[int]] = {}
    for i, j in step.edges:
        around.setdefault(j, []).append(i)
    for j in sorted(range(len(step.values)), key=lambda j: (-step.sizes[j], j)):

        def bytes(choice: int, j: int = j) -> float:
            """Return the bytes of the operators around a tensor, each at its best choice given the tensor's."""
            trial = {**values, j: choice}
            decided = sum(float(step.edges[i, j][operators[i], choice]) for i in around.get(j, ()) if i in operators)
            free = (i for i in around.get(j, ()) if i not in operators)
            return decided + sum(float(_operator_bytes(step, i, trial).min()) for i in free)

        values[j] = min(range(len(step.values[j])), key=bytes)
        for i in around.get(j, ()):
            if i not in operators:
                operators[i] = _best_operator(step, i, values)
    for i in range(len(step.operators)):
        operators.setdefault(i, 0)
    return [operators[i] for i in range(len(operators))], [values[j] for j in range(len(values))]


def _operator_bytes(
    step: StepProblem, operator: int, values: dict[int, int]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the bytes [choice] of an operator, given the values decided so far."""
    total = step.own[operator].copy()
    for (i, j), table in step.edges.items():
        if i == operator and j in values:
            total += table[:, values[j]]
    return total


def _best_operator(step: StepProblem, operator: int, values: dict[int, int]) -> int:
    return int(_operator_bytes(step, operator, values).argmin())
