"""The table of an operator: every configuration, the layouts it needs and makes, and its seconds forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity_ir.cost.work import work
from unity_ir.pcg.graph import Node
from unity_ir.pcg.layout import COPY, REPEAT, SUM
from unity_ir.search.space import Floats, Ints, LayoutSpace, Spaces, degrees_of, role_counts
from unity_ir.tdl.analysis import Analysis

GridRole = str | int
"""What an axis does in a task grid: an index variable, COPY, SUM or REPEAT."""


@dataclass(frozen=True)
class OperatorTable:
    """Configurations of one operator; rows of all arrays correspond."""

    roles: tuple[tuple[GridRole, ...], ...]
    """The role names the columns of a row's counts stand for, one tuple per choice of carriers."""
    choice: Ints
    """Which tuple of `roles` (and which carriers) a row uses."""
    carriers: tuple[frozenset[str], ...]
    counts: Ints
    """[row, class, role], padded to the most roles."""
    operands: tuple[Ints, ...]
    """Per operand, the layout number each row needs."""
    results: tuple[Ints, ...]
    """Per result, the layout number each row makes."""
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)


def operator_table(node: Node, needs: tuple[bool, ...], spaces: Spaces) -> OperatorTable:
    """
    Every configuration of a serial compute node on the machine, dominated ones left out.

    `needs` says which operands' gradients the backward computes.
    """
    analysis = node.analysis
    operand_spaces = [spaces.of(v.type.shape, v.type.dtype) for v in node.operands]
    result_spaces = [spaces.of(t.shape, t.dtype) for t in node.types]
    variables = tuple(v for v in analysis.splittable if analysis.bound.extents[v] > 1)
    choices: list[tuple[frozenset[str], tuple[GridRole, ...]]] = [(frozenset(), (*variables, COPY, REPEAT))]
    choices += [(carriers, (*variables, COPY, REPEAT, SUM)) for carriers in analysis.carriers]
    width = len(variables) + 3
    parts: list[tuple[Ints, Ints, list[Ints], list[Ints], Floats]] = []
    for number, (carriers, roles) in enumerate(choices):
        counts = role_counts(spaces.classes, len(roles))
        if carriers:
            counts = counts[counts[:, :, -1].sum(axis=1) > 0]
        degrees = degrees_of(counts, spaces.classes)
        extents = np.array([analysis.bound.extents[v] for v in variables], dtype=np.int64)
        fits = np.all(extents % degrees[:, : len(variables)] == 0, axis=1)
        counts, degrees = counts[fits], degrees[fits]
        needed = [
            space.find(_project(counts, roles, space, _operand_role(analysis, i, carriers)))
            for i, space in enumerate(operand_spaces)
        ]
        made = [
            space.find(_project(counts, roles, space, _result_role(analysis, i)))
            for i, space in enumerate(result_spaces)
        ]
        ok = np.all([ids >= 0 for ids in (*needed, *made)], axis=0)
        seconds = _seconds(node, needs, variables, degrees[ok, : len(variables)], spaces)
        padded = np.zeros((int(ok.sum()), counts.shape[1], width), dtype=np.int64)
        padded[:, :, : len(roles)] = counts[ok]
        chosen = np.full(len(seconds), number, dtype=np.int64)
        parts.append((chosen, padded, [n[ok] for n in needed], [m[ok] for m in made], seconds))
    return _undominated(
        OperatorTable(
            roles=tuple(r for _, r in choices),
            choice=np.concatenate([p[0] for p in parts]),
            carriers=tuple(c for c, _ in choices),
            counts=np.concatenate([p[1] for p in parts]),
            operands=tuple(np.concatenate([p[2][i] for p in parts]) for i in range(len(node.operands))),
            results=tuple(np.concatenate([p[3][i] for p in parts]) for i in range(len(node.types))),
            seconds=np.concatenate([p[4] for p in parts]),
        )
    )


def _operand_role(analysis: Analysis, operand: int, carriers: frozenset[str]):
    name = analysis.bound.operands[operand].name
    dims = analysis.operand_dims[name]

    def role(what: GridRole) -> int:
        if isinstance(what, str):
            return dims.index(what) if what in dims else COPY
        return COPY if what == SUM and name not in carriers else what

    return role


def _result_role(analysis: Analysis, result: int):
    dims = analysis.result_dims[result]

    def role(what: GridRole) -> int:
        if isinstance(what, str):
            return dims.index(what) if what in dims else SUM
        return what

    return role


def _project(counts: Ints, roles: Sequence[GridRole], space: LayoutSpace, role) -> Ints:
    """Counts of grid roles as counts of a tensor's roles."""
    out = np.zeros((len(counts), counts.shape[1], space.roles), dtype=np.int64)
    for column, what in enumerate(roles):
        out[:, :, space.role(role(what))] += counts[:, :, column]
    return out


def _seconds(
    node: Node, needs: tuple[bool, ...], variables: tuple[str, ...], degrees: Ints, spaces: Spaces
) -> Floats:
    operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
    device = spaces.machine.device
    rows, inverse = np.unique(degrees, axis=0, return_inverse=True)
    each: list[float] = []
    for row in rows.tolist():
        named = tuple((v, int(d)) for v, d in zip(variables, row, strict=True) if d > 1)
        done = work(node.op, operands, node.attributes, named, needs)
        each.append(done.forward_time(device) + done.backward_time(device))
    return np.array(each)[inverse.reshape(-1)]


def _undominated(table: OperatorTable) -> OperatorTable:
    """Of the rows that need and make the same layouts, the fastest."""
    keys = np.stack([*table.operands, *table.results], axis=1)
    order = np.lexsort((table.seconds, *keys.T))
    ordered = keys[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    keep = np.sort(order[first])
    return OperatorTable(
        table.roles,
        table.choice[keep],
        table.carriers,
        table.counts[keep],
        tuple(o[keep] for o in table.operands),
        tuple(r[keep] for r in table.results),
        table.seconds[keep],
    )
