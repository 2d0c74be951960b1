"""
Unity's search as its paper has it (section 5).

Substitutions are selected in each part of a graph (this file, 5.1), each candidate costed by its fastest machine
mapping (`search.unity.machine_mapping`, 5.2), and parts are joined by the best partitioning of the tensors between them
(`search.unity.split`, 5.3).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import prod

import numpy as np

from unity_ir.budget import OutOfBudget, spend, within
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT
from unity_ir.rules.derivation import RuleApplication
from unity_ir.rules.rule import Rule
from unity_ir.search.layouts.limits import limits
from unity_ir.search.unity.device_shares import divisors
from unity_ir.search.unity.machine_mapping import Floats, Mapper, Subgraph
from unity_ir.search.unity.split import Chosen, Selection, carried_over, compose, derivation, structure, subgraphs
from unity_ir.search.unity.substitutions import CandidatePCG, Substitutions
from unity_ir.search.unity.view_costs import ViewCosts

Progress = Callable[[int, float], None]


FEWEST, MOST = 10, 300
"""Minimum and maximum default budget: candidates priced per operator of a part."""


@dataclass(frozen=True, slots=True)
class Options:
    """
    The options of Unity's search. Raises `UnityError` for an `alpha` or a `budget` below 1.

    A candidate is rewritten further if it costs at most `alpha` times the best. `budget` is the number of candidates
    priced per operator of a part, by default `limits().unity_candidates` over the graph's operators, from 10 to 300.
    Without `split` graphs are not cut into parts, and without `cache` no costs are kept between candidates (Table 2 of
    the paper).
    """

    alpha: float = 1.05
    budget: int | None = None
    split: bool = True
    cache: bool = True
    least: int = 10
    """Minimum number of operators of a part (k in the paper)."""

    def __post_init__(self) -> None:
        if not self.alpha >= 1:
            raise UnityError(f"search: alpha is {self.alpha}; it is at least 1")
        if self.budget is not None and self.budget < 1:
            raise UnityError(f"search: budget is {self.budget}; it is at least 1")


@dataclass(frozen=True)
class UnityPlan:
    """
    The result of Unity's search.

    `seconds` is the search's own estimate, in which parallel branches on disjoint devices cost their maximum.
    """

    graph: Graph
    seconds: float
    derivation: tuple[RuleApplication, ...]
    explored: int
    """Number of candidates priced, of all parts."""
    rewritten: Graph
    """The serial graph after `derivation`, of which `graph` is the parallelization."""


def unity(
    graph: Graph,
    machine: Machine,
    rules: Sequence[Rule],
    optimizer: Optimizer,
    options: Options | None = None,
    progress: Progress | None = None,
    once: float = 1.0,
) -> UnityPlan:
    """
    Return the parallel graph that Unity's search finds for a serial one; where the work budget ends, the best so far.
    Memory limits are not looked at.

    `rules` are the algebraic substitutions; parallelization rules follow from the operators. `options` None is the
    defaults. `progress` is called with the number of candidates priced and the best seconds so far. `once` is the
    weight of seconds that a step spends once (moves of weights, sums of their gradients, updates): 1 / m if the graph
    is that of one of m micro-batches.
    """
    costs = ViewCosts(machine, optimizer, once)
    search = _UnitySearch(machine, rules, costs, options or Options(), progress)
    candidate, seconds = search.run(graph)
    with within(None):
        views = search.mapper.views(candidate.piece, candidate.degrees)
    plan = materialise(candidate.piece.graph, views, machine.mesh)
    return UnityPlan(plan, seconds, candidate.steps, search.explored, candidate.piece.graph)


class _UnitySearch:
    def __init__(
        self,
        machine: Machine,
        rules: Sequence[Rule],
        costs: ViewCosts,
        options: Options,
        progress: Progress | None,
    ):
        self.machine = machine
        self.options = options
        self.mapper = Mapper(costs, options.cache)
        self.rules = rules
        self.progress = progress
        self.explored = 0
        self.budget = FEWEST
        self._found: dict[object, Selection] = {}

    def run(self, graph: Graph) -> tuple[CandidatePCG, float]:
        """Return the best candidate of a whole graph and its seconds."""
        operators = sum(n.is_compute for n in graph.nodes())
        self.budget = self.options.budget or min(MOST, max(FEWEST, limits().unity_candidates // max(1, operators)))
        pieces = (
            subgraphs(graph, self.machine, self.rules, self.options.least) if self.options.split else [Subgraph(graph)]
        )
        if len(pieces) == 1:
            best = self.select(Subgraph(graph), self.rules)
            return best.candidates[0][0], float(best.seconds[0, 0])
        for rules in (self.rules, ()):
            chosen = self._combine(pieces, rules)
            whole, degrees = compose(graph, chosen)
            steps = derivation(graph, chosen, self.rules)
            if steps is not None:
                piece = Subgraph(whole)
                with within(None):
                    return CandidatePCG(piece, degrees, steps), float(self.mapper.costs(piece, degrees)[0, 0])
        raise AssertionError("what is not rewritten is derived by no step")

    def _combine(self, pieces: Sequence[Subgraph], rules: Sequence[Rule]) -> list[Chosen]:
        """
        Choose a candidate for every part by dynamic programming over the partitionings of the tensors between them.
        """
        found = [self.select(p, rules) for p in pieces]
        best = np.zeros(len(found[0].seconds))
        via: list[tuple[int, ...]] = []
        for selection in found:
            through = best[:, None] + selection.seconds
            via.append(tuple(int(i) for i in np.argmin(through, axis=0)))
            best = np.min(through, axis=0)
        at = int(np.argmin(best))
        out: list[Chosen] = []
        for piece, selection, back in zip(reversed(pieces), reversed(found), reversed(via), strict=True):
            candidate = selection.candidates[back[at]][at]
            out.append(Chosen(piece, candidate))
            at = back[at]
        return out[::-1]

    def select(self, piece: Subgraph, rules: Sequence[Rule]) -> Selection:
        """
        Return the substitutions selected in one part, for all its entries and exits; equal parts are searched once.
        """
        key = (structure(piece), len(rules))
        known = self._found.get(key) if self.options.cache else None
        found = carried_over(known, piece, rules) if known is not None else self._select(piece, rules)
        self._found.setdefault(key, found)
        return found

    def _select(self, piece: Subgraph, rules: Sequence[Rule]) -> Selection:
        """
        Run the queue of section 5.1 for all pairs of partitionings at once.

        A candidate's priority is its ratio to the best of the pair it suits best, then its least cost over the pairs.
        Where the budget ends, the incumbents stand.
        """
        alpha, budget = self.options.alpha, self.budget * max(1, len(piece.flow.nodes))
        substitutions = Substitutions(rules, self.machine.devices)
        best = np.full((max(1, len(piece.entries)), max(1, len(piece.exits))), np.inf)
        queue: list[tuple[float, float, int, CandidatePCG, Floats]] = []
        tie, seen = count(), set[object]()
        start = CandidatePCG(piece, {})
        of = [[start] * best.shape[1] for _ in range(best.shape[0])]

        def enter(candidate: CandidatePCG) -> None:
            if candidate.key in seen:
                return
            seen.add(candidate.key)
            spend(limits().work_mapping * len(piece.flow.nodes))
            seconds = self.mapper.costs(candidate.piece, candidate.degrees)
            better = seconds < best * (1 - 1e-9)
            best[better] = seconds[better]
            for i, j in np.argwhere(better).tolist():
                of[i][j] = candidate
            push(candidate, seconds)
            self.explored += 1
            if self.progress is not None:
                self.progress(self.explored, float(best.min()))

        def push(candidate: CandidatePCG, seconds: Floats) -> None:
            # A piece without operators takes no time.
            near = np.divide(seconds, best, out=np.ones_like(seconds), where=best > 0)
            if (least := float(near.min())) <= alpha:
                heapq.heappush(queue, (round(least, 9), float(seconds.min()), next(tie), candidate, seconds))

        enter(start)
        with suppress(OutOfBudget):
            for candidate in self._runs(piece, substitutions):
                enter(candidate)
            while queue and len(seen) < budget:
                priority, least, _, candidate, seconds = heapq.heappop(queue)
                # A piece without operators takes no time.
                near = np.divide(seconds, best, out=np.ones_like(seconds), where=best > 0)
                now = (round(float(near.min()), 9), float(seconds.min()))
                if now > (priority, least):
                    push(candidate, seconds)
                    continue
                for after in substitutions.of(candidate):
                    enter(after)
                    if len(seen) >= budget:
                        break
        return Selection(best, of)

    def _runs(self, piece: Subgraph, substitutions: Substitutions) -> Iterator[CandidatePCG]:
        """Yield candidates in which the part's input is partitioned in every way, and the operators after it follow."""
        sizes = self.machine.mesh.sizes
        inputs = [n.result for n in piece.graph.nodes() if n.op == "input" and n is not piece.entry]
        for degree in divisors(self.machine.devices)[1:] if piece.entry is None else ():
            dims = {v: (degree, *(1,) * (len(v.shape) - 1)) for v in inputs if v.shape and v.shape[0] % degree == 0}
            yield substitutions.alike(piece, dims)
        for layout in piece.entries:
            if piece.entry is None or all(r == REPEAT for r in layout):
                continue
            value = piece.entry.result
            dims = [prod(s for s, r in zip(sizes, layout, strict=True) if r == d) for d in range(len(value.shape))]
            yield substitutions.alike(piece, {value: dims})
