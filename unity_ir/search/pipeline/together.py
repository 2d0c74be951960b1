"""
Choose the layouts of all stages of a pipeline together: what an operator takes counts at the price of its stage, and
what is sent on to the next stage is charged for by the layout in which it is made.

The sum that the exact solver minimises is not the makespan. But near given stages the makespan is linear in what each
of them takes, so its slopes are the prices: a stage that all others wait for counts in every micro-batch, another one
only where the pipeline fills and drains (`Slopes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from unity_ir.machine.model import Machine
from unity_ir.machine.parts import send_seconds
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.exact.factor_graph import FactorGraph
from unity_ir.search.exact.solver import ExactPlan, FactorGraphBuilder, Solver
from unity_ir.search.layouts.axes import Floats
from unity_ir.search.layouts.objective import Price
from unity_ir.search.pipeline.cuts import units
from unity_ir.simulate.pipeline import StageSeconds

LEAST = 0.02
"""Least price of a second of a stage in a micro-batch: one that nobody waits for is not to take any time."""

LEAST_ONCE = 0.0002
"""Least price of a second that a stage takes once per step: there are many micro-batches for one step."""

STEP = 1e-6
"""Part of a makespan by which slopes look ahead."""


@dataclass(frozen=True)
class Slopes:
    """
    By how much a step's makespan grows for each second that a stage takes longer (derivatives), divided by the number
    of micro-batches: 1 for a stage that all others wait for.
    """

    second: tuple[float, ...]
    """By seconds of a micro-batch, forward and backward in proportion: [stage]."""
    once: tuple[float, ...]
    """By seconds that are spent once per step: [stage]."""
    send: tuple[float, ...]
    """By seconds of a send between a stage and the next, there and back: [stage but the last]."""

    @staticmethod
    def of(
        seconds: StageSeconds, micro_batches: int, makespans: Callable[[Sequence[StageSeconds]], Sequence[float]]
    ) -> Slopes:
        """
        Return the slopes of a makespan at `seconds`, which has what each stage takes, backwards also in halves;
        computed by forward differences. `makespans` is called with a list of such seconds, and returns the makespan in
        seconds for each.
        """
        (now,) = makespans([seconds])
        step = STEP * now

        def at(of: Sequence[float], stage: int, by: float) -> tuple[float, ...]:
            return tuple(each + by * (s == stage) for s, each in enumerate(of))

        longer: list[StageSeconds] = []
        for stage, (forward, half, rest) in enumerate(
            zip(seconds.forward, seconds.input_gradient, seconds.weight_gradient, strict=True)
        ):
            by = step / (forward + half + rest) if forward + half + rest else 0.0
            longer.append(
                replace(
                    seconds,
                    forward=at(seconds.forward, stage, by * forward),
                    backward=at(seconds.backward, stage, by * (half + rest)),
                    input_gradient=at(seconds.input_gradient, stage, by * half),
                    weight_gradient=at(seconds.weight_gradient, stage, by * rest),
                )
            )
        stages = len(longer)
        longer += [replace(seconds, update=at(seconds.update, stage, step)) for stage in range(stages)]
        longer += [replace(seconds, send=at(seconds.send, stage, step)) for stage in range(stages - 1)]
        found = tuple((then - now) / step / micro_batches for then in makespans(longer))
        return Slopes(found[:stages], found[stages : 2 * stages], found[2 * stages :])

    def mixed(self, other: Slopes, share: float) -> Slopes:
        """
        Return the weighted mean of these slopes, with weight 1 - `share`, and of `other`, with weight `share`, so that
        slopes change slowly from one round of layouts to the next.
        """

        def between(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
            return tuple((1 - share) * x + share * y for x, y in zip(a, b, strict=True))

        return Slopes(*(between(a, b) for a, b in zip(self._all, other._all, strict=True)))

    @property
    def _all(self) -> tuple[tuple[float, ...], ...]:
        return self.second, self.once, self.send

    def price(self, stage: int, price: Price) -> Price:
        """
        Return the objective for choosing the layouts of stage number `stage`: `price` with its weight `second` replaced
        by the stage's slope, and its factor `once` by the stage's slope for seconds once per step divided by that of
        `second`. Slopes below `LEAST` or `LEAST_ONCE` are raised to these.
        """
        second = max(self.second[stage], LEAST)
        return replace(price, second=second, once=max(self.once[stage], LEAST_ONCE) / second)


class StagesFactorGraphBuilder(FactorGraphBuilder):
    """
    Builds the factor graph of a graph in stages, where each stage has an objective of its own. `solvers` has the solver
    of each stage, `stage_of` the stage of each node. `charges` has, for each value that is sent to another stage, the
    cost of the send by the layout that the value is made in, [layout]: the operator that makes it pays.
    """

    def __init__(
        self, solvers: Sequence[Solver], graph: Graph, stage_of: Mapping[Node, int], charges: Mapping[Value, Floats]
    ):
        self.solvers, self.stage_of, self.charges = solvers, stage_of, charges
        super().__init__(max(solvers, key=lambda solver: solver.price.byte), graph)

    def of_shorter(self, graph: Graph) -> None:
        """Return None: each stage has prices of its own."""
        return None

    def at(self, node: Node) -> Solver:
        """Return the solver of a node's stage, in whose objective the node is priced."""
        return self.solvers[self.stage_of[node]]

    def keeps_all_rows(self, node: Node) -> bool:
        """
        Return whether a result of the operator is sent to another stage. Then all of its configurations (rows) are
        kept, dominated or not: a row that dominates another may not do so once the charges of sending are added.
        """
        return any(value in self.charges for value in node.results)

    def problem(self) -> FactorGraph:
        """
        Return the graph's factor graph, in which the cost of an operator's row also has the charges (`charges`) of
        sending its results to another stage.
        """
        found = super().problem()
        alike: dict[tuple[int, bytes], Floats] = {}  # equal layers share one array, which memos know by its identity
        for value, charge in self.charges.items():
            number = self.numbers[value.node]
            made, seconds = self.variables[number].made[value.index], found.seconds[number]
            key = id(seconds), charge.tobytes()
            if key not in alike:
                alike[key] = seconds + charge[made.layouts][made.at]
            found.seconds[number] = alike[key]
        return found


def solved_together(
    graph: Graph,
    solver: Solver,
    machine: Machine,
    cuts: Sequence[int],
    rank_of: Sequence[int],
    prices: Sequence[Price],
    slopes: Slopes,
) -> ExactPlan:
    """
    Return the plan of a serial graph of one micro-batch, on one part of `machine`, whose layouts cost least if each
    second of a stage and of a send counts as much as it adds to the makespan (`slopes`). Nothing is recomputed.

    `cuts` are the first units of the second and later stages. Stage s is on part number `rank_of[s]`; its bytes are
    priced as in `prices[s]`. `solver` solves for layouts on one part.
    """
    of = units(graph)
    at: dict[Price, Solver] = {}
    solvers: list[Solver] = []
    for stage, price in enumerate(prices):
        own = slopes.price(stage, price)
        solvers.append(at.setdefault(own, solver.with_price(own)))
    number = np.searchsorted(cuts, np.arange(len(of.parts)), side="right")
    stage_of = {node: int(number[unit]) for node, unit in of.unit_of.items()}
    charges: dict[Value, Floats] = {}
    for cut, (source, target), slope in zip(cuts, pairwise(rank_of), slopes.send, strict=True):
        for value in of.passing[cut - 1]:
            item = max(ELEMENT_BYTES[value.type.dtype], ELEMENT_BYTES[value.type.grad_dtype])
            sizes, places = np.unique(solver.space(value).elements, return_inverse=True)
            parts = max(rank_of) + 1
            sent = [0.0 if source == target else send_seconds(machine, parts, source, target, n, item) for n in sizes]
            charges[value] = charges.get(value, 0.0) + slope * np.array(sent)[places]
    found = StagesFactorGraphBuilder(solvers, graph, stage_of, charges).solve()
    return replace(found, again=frozenset())
