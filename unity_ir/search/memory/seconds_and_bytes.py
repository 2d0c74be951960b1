"""
Compute the seconds and the bytes of any choice for a graph, and improve choices by local search.

The exact search minimises a weighted sum of both. Under a limit of bytes it finds choices on either side of the limit.
This module searches between them: choices that take their first variables from one and the others from the other, then
changes of single rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity_ir.budget import spend
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.search.exact.factor_graph import NOWHERE
from unity_ir.search.exact.recompute import SavedForBackward
from unity_ir.search.exact.solver import ExactPlan, FactorGraphBuilder, Solver, layouts_needed
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits

Choice = tuple[int, ...]
"""The row of each variable of a `CostModel`."""


@dataclass(frozen=True, eq=False)
class _Edge:
    """An edge: per row of either variable the layout made or needed, and the cost [made, needed]."""

    source: int
    target: int
    made: Ints
    needs: Ints
    seconds: Floats
    bytes: Floats

    def at(self, source: int | slice, target: int | slice) -> tuple[Floats, Floats]:
        """Return seconds and bytes for a row of each end, or for one row of one end and all of the other."""
        made, needs = self.made[source], self.needs[target]
        there = needs != NOWHERE
        return self.seconds[made, needs] * there, self.bytes[made, needs] * there


@dataclass(frozen=True, slots=True)
class Rest:
    """Key of the variable of a leaf's resting layout, where the leaf has a relay, too."""

    leaf: Value


Key = Node | Value | Rest


class CostModel:
    """
    Seconds and bytes of any choice for a graph, as a factor graph in which nothing is ruled out. A choice has a row for
    each variable: a way to shard an operator, the layout in which a leaf is stored, or that in which the users of a
    leaf or value with several users find it (its relay).

    Operators that may be recomputed have their rows twice: with saved results, then with recomputed ones.
    """

    def __init__(self, solver: Solver, graph: Graph):
        self.solver = solver
        self.keys: list[Key] = []
        self.seconds: list[Floats] = []
        self.bytes: list[Floats] = []
        self.edges: list[_Edge] = []
        self._numbers: dict[Key, int] = {}
        self._arriving: dict[int, Floats] = {}
        builder = FactorGraphBuilder(solver, graph)
        self._builder = builder
        keeps = SavedForBackward(graph)
        self._may_recompute = keeps.may_recompute
        for node in builder.nodes:
            if node.is_leaf:
                updated = node.op == "weight" and node in builder.with_gradient
                (value,) = node.results
                if not builder.relayed(value):
                    self._enter(value, *solver.resting(node, updated))
                    continue
                rest = self._enter(Rest(value), *solver.resting(node, updated))
                relay = self._relay(value)
                every = np.arange(len(solver.space(value)))
                self._add(value, rest, every, relay, every, node in builder.with_gradient, keeps.is_saved(value))
                continue
            table = solver.table(node, builder.with_gradient)
            seconds, bytes = table.seconds, table.halos + table.bytes(keeps.results(node))
            if node in self._may_recompute:
                seconds = np.concatenate([seconds, seconds + table.again])
                bytes = np.concatenate([bytes, table.halos])
            own = self._enter(node, seconds, bytes)
            for i, value in enumerate(node.operands):
                at = value if value in self._numbers else value.node
                self._add(
                    value,
                    self._numbers[at],
                    self._made(at, value),
                    own,
                    self._twice(node, layouts_needed(node, table, i)),
                    builder.training(value, [node]),
                    keeps.operands(node)[i],
                )
            for value in node.results:
                if builder.relayed(value):
                    every = np.arange(len(solver.space(value)))
                    relay = self._relay(value)
                    uses = builder.uses[value]
                    training, kept = builder.training(value, [user for user, _ in uses]), keeps.relayed(value, uses)
                    self._add(value, own, self._made(node, value), relay, every, training, kept)
        self._touching: list[list[_Edge]] = [[] for _ in self.keys]
        for edge in self.edges:
            self._touching[edge.source].append(edge)
            self._touching[edge.target].append(edge)
        relays = [n for key, n in self._numbers.items() if isinstance(key, Value) and builder.relayed(key)]
        self._shared = [[w for w in self._touching[n] if w.source == n] for n in relays]

    def _rows(self, node: Node) -> int:
        return len(self.solver.table(node, self._builder.with_gradient))

    def _twice(self, node: Node, of_rows: Ints) -> Ints:
        """Return `of_rows` for the saved rows and, where the operator may be recomputed, for the recomputed ones."""
        return np.concatenate([of_rows, of_rows]) if node in self._may_recompute else of_rows

    def _enter(self, key: Key, seconds: Floats, bytes: Floats) -> int:
        self._numbers[key] = len(self.keys)
        self.keys.append(key)
        self.seconds.append(seconds)
        self.bytes.append(bytes)
        return self._numbers[key]

    def _relay(self, value: Value) -> int:
        layouts = len(self.solver.space(value))
        return self._enter(value, np.zeros(layouts), np.zeros(layouts))

    def _made(self, key: Key, value: Value) -> Ints:
        if isinstance(key, Node):
            return self._twice(key, self.solver.table(key, self._builder.with_gradient).results[value.index])
        return np.arange(len(self.solver.space(value)))

    def _add(self, value: Value, source: int, made: Ints, target: int, needs: Ints, training: bool, kept: bool) -> None:
        space = self.solver.space(value)
        if id(space) not in self._arriving:
            every = np.arange(len(space))
            self._arriving[id(space)] = space.moved_bytes(every, every)
        seconds = space.training if training else space.forward
        bytes = self._arriving[id(space)] if kept else np.broadcast_to(0.0, self._arriving[id(space)].shape)
        self.edges.append(_Edge(source, target, made, needs, seconds, bytes))

    def choice(self, plan: ExactPlan) -> Choice:
        """Return an exact plan as a choice: for each variable of the model, the index of its row."""
        return tuple(self._row(key, plan) for key in self.keys)

    def _row(self, key: Key, plan: ExactPlan) -> int:
        match key:
            case Node():
                return plan.rows[key] + (self._rows(key) if key in plan.again else 0)
            case Rest(leaf):
                return plan.rests[leaf]
            case _:
                return plan.layouts[key]

    def plan(self, choice: Choice, bound: float) -> ExactPlan:
        """Return the exact plan of a choice; `bound` is a lower bound in seconds for it to record."""
        rows = {key: row % self._rows(key) for key, row in zip(self.keys, choice, strict=True) if isinstance(key, Node)}
        again = frozenset(
            key for key, row in zip(self.keys, choice, strict=True) if isinstance(key, Node) and row >= self._rows(key)
        )
        layouts = {key: row for key, row in zip(self.keys, choice, strict=True) if isinstance(key, Value)}
        rests = {key.leaf: row for key, row in zip(self.keys, choice, strict=True) if isinstance(key, Rest)}
        every = sum(map(len, self.seconds))
        return ExactPlan(self.costs(choice)[0], rows, layouts, rests, again, bound, every, every)

    def costs(self, choice: Choice) -> tuple[float, float]:
        """
        Return (seconds of an iteration, bytes held per device at the end of the forward) of a choice, as `cost.plan`
        counts them: a move that several operators share is charged once.
        """
        seconds, bytes = self.charged(choice)
        for edges in self._shared:
            alike: dict[int, list[tuple[float, float]]] = {}
            for edge in edges:
                need = int(edge.needs[choice[edge.target]])
                s, b = edge.at(choice[edge.source], choice[edge.target])
                alike.setdefault(need, []).append((float(s), float(b)))
            for each in alike.values():
                seconds -= sum(s for s, _ in each) - max(s for s, _ in each)
                bytes -= sum(b for _, b in each) - max(b for _, b in each)
        return seconds, bytes

    def charged(self, choice: Choice) -> tuple[float, float]:
        """
        Return (seconds of an iteration, bytes held per device) of a choice if every user pays for its own moves, shared
        or not: the sums that the exact search minimises, and that local search (`improved`) changes row by row.
        """
        seconds = sum(float(s[row]) for s, row in zip(self.seconds, choice, strict=True))
        bytes = sum(float(b[row]) for b, row in zip(self.bytes, choice, strict=True))
        for edge in self.edges:
            s, b = edge.at(choice[edge.source], choice[edge.target])
            seconds, bytes = seconds + float(s), bytes + float(b)
        return seconds, bytes

    def around(self, node: Node, choice: Choice) -> tuple[float, float]:
        """
        Return (seconds of an operator's kernels, seconds of the reshards of its operands and results) under a choice.
        """
        variable, row = self._numbers[node], choice[self._numbers[node]]
        own = float(self.seconds[variable][row])
        return own, float(self._around(variable, choice)[0][row]) - own

    def crossover(self, one: Choice, other: Choice, limit: float) -> Choice | None:
        """
        Return the fastest crossover of two choices that holds at most `limit` bytes per device; None if none does.

        A crossover has the first variables' rows of one choice and the other variables' rows of the other.
        """
        best: tuple[float, Choice] | None = None
        for first, last in ((one, other), (other, one)):
            seconds, bytes = self._mixed(first, last)
            fitting = np.flatnonzero(bytes <= limit)
            if len(fitting):
                at = int(fitting[seconds[fitting].argmin()])
                if best is None or seconds[at] < best[0]:
                    best = float(seconds[at]), (*first[:at], *last[at:])
        return best and best[1]

    def _mixed(self, first: Choice, last: Choice) -> tuple[Floats, Floats]:
        """Return seconds and bytes of the choices that take 0, 1, ... of their first rows from `first`."""
        steps = np.zeros((2, len(self.keys) + 2))
        for v in range(len(self.keys)):
            for i, column in enumerate((self.seconds[v], self.bytes[v])):
                steps[i, 0] += column[last[v]]
                steps[i, v + 1] += column[first[v]] - column[last[v]]
        for edge in self.edges:
            u, v = edge.source, edge.target
            none, half, both = edge.at(last[u], last[v]), edge.at(first[u], last[v]), edge.at(first[u], first[v])
            for i in range(2):
                steps[i, 0] += none[i]
                steps[i, u + 1] += half[i] - none[i]
                steps[i, v + 1] += both[i] - half[i]
        seconds, bytes = np.cumsum(steps, axis=1)[:, : len(self.keys) + 1]
        return seconds, bytes

    def improved(self, choice: Choice, limit: float, passes: int = 4) -> Choice:
        """
        Return a choice improved by local search: single rows are changed while that makes it faster and keeps it within
        `limit` bytes per device, where each operator counts its own copy of what it reshards.

        Ends at a local optimum, or after `passes` passes over all variables.
        """
        rows = list(choice)
        _, held = self.charged(choice)
        for _ in range(passes):
            changed = False
            spend(limits().work_change * len(rows))
            for v in range(len(rows)):
                seconds, bytes = self._around(v, rows)
                fits = held + bytes - bytes[rows[v]] <= limit
                better = np.where(fits, seconds, np.inf)
                row = int(better.argmin())
                if better[row] < seconds[rows[v]] * (1 - 1e-12):
                    held += float(bytes[row] - bytes[rows[v]])
                    rows[v] = row
                    changed = True
            if not changed:
                break
        return tuple(rows)

    def smallest_rows(self, variable: int, choice: Choice) -> list[int]:
        """
        Return the indices of the rows of a variable other than its row in `choice`, by the bytes that a device would
        hold with that row, fewest first; rows of infinite bytes are left out.

        `variable` is its number; all other variables keep their rows.
        """
        _, bytes = self._around(variable, choice)
        return [
            int(row) for row in np.argsort(bytes, kind="stable") if np.isfinite(bytes[row]) and row != choice[variable]
        ]

    def without_recompute(self, choice: Choice) -> Choice:
        """Return the choice with the same layouts and every result saved, none recomputed."""
        return tuple(
            row % self._rows(key) if isinstance(key, Node) else row for key, row in zip(self.keys, choice, strict=True)
        )

    def _around(self, variable: int, rows: Sequence[int]) -> tuple[Floats, Floats]:
        """Return, per row of a variable, seconds and bytes including the values to and from it."""
        seconds, bytes = self.seconds[variable], self.bytes[variable]
        for edge in self._touching[variable]:
            if edge.source == variable:
                s, b = edge.at(slice(None), rows[edge.target])
            else:
                s, b = edge.at(rows[edge.source], slice(None))
            seconds, bytes = seconds + s, bytes + b
        return seconds, bytes
