"""
Which rows of a problem are left when a coarser one, in which fewer dims are told apart, has dropped some.

What a row of the finer problem makes and needs is, with dims merged, what one of the coarser makes and needs; that
costs no more, and what links cost there is no more either. So a choice with the finer row is no better than one with
the coarser, and where no good choice has the coarser row, none has the finer. Nor need messages begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unity_ir.cost.table import distinct
from unity_ir.pcg.graph import Node, Value
from unity_ir.search.exact.factor_graph import NOWHERE, Edge, FactorGraph, Port
from unity_ir.search.exact.shared_moves import ScaledCost
from unity_ir.search.exact.solver import FactorGraphBuilder
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.exact.two_way import TwoWayCost
from unity_ir.search.layouts.axes import Ints
from unity_ir.search.layouts.space import LayoutSpace


def refine_rows(coarse: FactorGraphBuilder, rows: Sequence[Ints], terms: FactorGraphBuilder) -> list[Ints]:
    """Per variable of the finer terms, its rows whose coarser ones are among `rows`, by variable of the coarser."""
    above: dict[tuple[int, int], Ints] = {}
    seen: dict[tuple[int, int, bytes], Ints] = {}
    out: list[Ints] = []
    for key, number in terms.numbers.items():
        at = coarse.numbers[key]
        of = id(terms.kinds[number]), id(coarse.kinds[at])
        if of not in above:
            above[of] = _layouts(key, coarse, terms) if isinstance(key, Value) else _rows(key, coarse, terms)
        left = *of, rows[at].tobytes()
        if left not in seen:
            alive: npt.NDArray[np.bool_] = np.zeros(coarse.kinds[at].among, dtype=bool)
            alive[rows[at]] = True
            seen[left] = np.flatnonzero(alive[above[of]])
        out.append(seen[left])
    return out


def refine_messages(coarse: Messages, problem: FactorGraph) -> Messages:
    """
    Messages of a finer problem, begun as those of a coarser one ended: whatever that took from one side of a link and
    gave to the other leaves no part of the finer sum below what it left of the coarser.
    """
    messages = Messages(problem)
    messages.last = messages.bound = coarse.last
    into: dict[tuple[int, int], Ints] = {}
    seen: dict[tuple[int, int], Ints] = {}

    def places(port: Port, above: Port, merged: Ints) -> Ints:
        """Where the layouts of a port are among those of the coarser one."""
        key = id(port), id(above)
        if key not in seen:
            somewhere = np.where(port.layouts == NOWHERE, NOWHERE, merged[port.layouts])
            seen[key] = np.searchsorted(above.layouts, somewhere)
        return seen[key]

    for number, (link, above) in enumerate(zip(problem.links, coarse.problem.links, strict=True)):
        space, coarser = two_way_cost(link).space, two_way_cost(above).space
        of = id(space), id(coarser)
        if of not in into:
            into[of] = _merged(space, coarser)
        messages.there[number] = coarse.there[number][places(link.needs, above.needs, into[of])]
        messages.back[number] = coarse.back[number][places(link.made, above.made, into[of])]
    return messages


def two_way_cost(link: Edge) -> TwoWayCost:
    """What stands between two ports, all of it. Raises `TypeError` where that is a table."""
    way = link.between.whole if isinstance(link.between, ScaledCost) else link.between
    if not isinstance(way, TwoWayCost):
        raise TypeError("search: only messages are passed finer")
    return way


def _layouts(value: Value, coarse: FactorGraphBuilder, terms: FactorGraphBuilder) -> Ints:
    """The number of each layout of a value with dims merged."""
    return _merged(terms.solver.space(value), coarse.solver.space(value))


def _merged(space: LayoutSpace, into: LayoutSpace) -> Ints:
    """The layouts of a space, with more dims merged."""
    counts = np.zeros((len(space), len(space.groups), into.roles), dtype=np.int8)
    dims = dict(zip(space.merged, into.merged, strict=True))
    for role in range(space.roles):
        to = dims[role] if role < space.rank else role - space.rank + into.rank
        counts[:, :, to] += space.counts[:, :, role]
    return into.find(counts)


def _rows(node: Node, coarse: FactorGraphBuilder, terms: FactorGraphBuilder) -> Ints:
    """The coarser row of each row of an operator."""
    fine = terms.solver.table(node, terms.with_gradient)
    table = coarse.solver.table(node, coarse.with_gradient)
    layouts: list[Ints] = []
    for value, of in [*zip(node.operands, fine.operands, strict=True), *zip(node.results, fine.results, strict=True)]:
        layouts.append(_layouts(value, coarse, terms)[of])
    mine, theirs = np.stack(layouts, axis=1), np.stack([*table.operands, *table.results], axis=1)
    first, which = distinct(np.concatenate([theirs, mine]))
    return first[which[len(theirs) :]]
