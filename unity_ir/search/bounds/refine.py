"""
Carry pruning and messages from a coarse problem, with dims merged, to a finer one.

Merging the dims of what a fine row makes and needs gives what some coarse row makes and needs, at no more cost; edges
cost no more there either. So a coarse row that is in no good choice rules out its fine rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unity_ir.cost.table import distinct
from unity_ir.pcg.node import Node, Value
from unity_ir.search.exact.factor_graph import NOWHERE, Edge, FactorGraph, Port
from unity_ir.search.exact.shared_moves import ScaledCost
from unity_ir.search.exact.solver import FactorGraphBuilder
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.exact.two_way import TwoWayCost
from unity_ir.search.layouts.axes import Ints
from unity_ir.search.layouts.space import LayoutSpace


def refine_rows(coarse: FactorGraphBuilder, rows: Sequence[Ints], builder: FactorGraphBuilder) -> list[Ints]:
    """
    Return, per variable of a finer factor graph, the indices of the rows that are still worth looking at. A variable's
    rows are its choices: ways to shard an operator, or layouts of a value. A coarse graph merges some dims, so that
    each finer row becomes one of its rows; a finer row is left out if that coarse row has been ruled out.

    `coarse` built the coarse graph, and `rows` has, per variable of it, the indices of the rows left; `builder` builds
    the finer graph.
    """
    above: dict[tuple[int, int], Ints] = {}
    seen: dict[tuple[int, int, bytes], Ints] = {}
    out: list[Ints] = []
    for key, number in builder.numbers.items():
        at = coarse.numbers[key]
        of = id(builder.variables[number]), id(coarse.variables[at])
        if of not in above:
            above[of] = _layouts(key, coarse, builder) if isinstance(key, Value) else _rows(key, coarse, builder)
        left = *of, rows[at].tobytes()
        if left not in seen:
            alive: npt.NDArray[np.bool_] = np.zeros(coarse.variables[at].among, dtype=bool)
            alive[rows[at]] = True
            seen[left] = np.flatnonzero(alive[above[of]])
        out.append(seen[left])
    return out


def refine_messages(coarse: Messages, problem: FactorGraph) -> Messages:
    """
    Return TRW-S messages for the finer factor graph `problem` that start from those of a coarse one, in whose layouts
    some dims are merged. Each layout gets the message of the coarse layout that it becomes when these dims are merged.

    Those of a coarse graph are valid in the finer one, so its lower bound starts at the coarse one's value.
    """
    messages = Messages(problem)
    messages.last = messages.bound = coarse.last
    into: dict[tuple[int, int], Ints] = {}
    seen: dict[tuple[int, int], Ints] = {}

    def places(port: Port, above: Port, merged: Ints) -> Ints:
        """Return the index in the coarse port of each layout of a port."""
        key = id(port), id(above)
        if key not in seen:
            somewhere = np.where(port.layouts == NOWHERE, NOWHERE, merged[port.layouts])
            seen[key] = np.searchsorted(above.layouts, somewhere)
        return seen[key]

    for number, (edge, above) in enumerate(zip(problem.edges, coarse.problem.edges, strict=True)):
        space, coarser = two_way_cost(edge).space, two_way_cost(above).space
        of = id(space), id(coarser)
        if of not in into:
            into[of] = _merged(space, coarser)
        messages.there[number] = coarse.there[number][places(edge.needs, above.needs, into[of])]
        messages.back[number] = coarse.back[number][places(edge.made, above.made, into[of])]
    return messages


def two_way_cost(edge: Edge) -> TwoWayCost:
    """
    Return the cost of an edge (of resharding a value and its gradient) as a `TwoWayCost`, without the factor that
    `ScaledCost` may put before it. Raises `TypeError` where it is a dense table.
    """
    way = edge.between.whole if isinstance(edge.between, ScaledCost) else edge.between
    if not isinstance(way, TwoWayCost):
        raise TypeError("search: only messages are passed finer")
    return way


def _layouts(value: Value, coarse: FactorGraphBuilder, builder: FactorGraphBuilder) -> Ints:
    """Return the merged layout of each layout of a value."""
    return _merged(builder.solver.space(value), coarse.solver.space(value))


def _merged(space: LayoutSpace, into: LayoutSpace) -> Ints:
    """Return the layout in `into`, which merges more dims, of each layout of a space."""
    counts = np.zeros((len(space), len(space.groups), into.roles), dtype=np.int8)
    dims = dict(zip(space.merged, into.merged, strict=True))
    for role in range(space.roles):
        to = dims[role] if role < space.rank else role - space.rank + into.rank
        counts[:, :, to] += space.counts[:, :, role]
    return into.find(counts)


def _rows(node: Node, coarse: FactorGraphBuilder, builder: FactorGraphBuilder) -> Ints:
    """Return the coarse row of each row of an operator."""
    fine = builder.solver.table(node, builder.with_gradient)
    table = coarse.solver.table(node, coarse.with_gradient)
    layouts: list[Ints] = []
    for value, of in [*zip(node.operands, fine.operands, strict=True), *zip(node.results, fine.results, strict=True)]:
        layouts.append(_layouts(value, coarse, builder)[of])
    mine, theirs = np.stack(layouts, axis=1), np.stack([*table.operands, *table.results], axis=1)
    first, which = distinct(np.concatenate([theirs, mine]))
    return first[which[len(theirs) :]]
