"""
Prove the minimum of the simulated time (FlexFlow, section 8.3) by exhaustive search with pruning.

Operators are decided in program order. A prefix of them has a forward, which ends with some clock time for each stream
and arrival, and a backward, which comes last in program order. Tasks only wait for each other and add up, so the
iteration ends at the latest of (when a stream or gradient reaches the prefix's backward) + (how long it takes from
there). To the undecided rest, a prefix is thus two vectors: the times `f` at the end of its forward, and the times `m`
to go from the start of its backward. An iteration takes max over i, j of f[i] + w[i, j] + m[j], where w is the time in
between.

Hence a prefix (f', m') is dominated by a prefix (f, m) on which the rest depends alike if max(f - f') + max(m - m') <=
0. It is dropped, as is every prefix that cannot beat the best plan known: the rest takes at least its kernels and
updates in sequence, and what neighbours wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from time import perf_counter
from typing import Any

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import resting
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Assignment, GridRole, dual
from unity_ir.simulate.choices import fits, possible_roles
from unity_ir.simulate.costs import Choice
from unity_ir.simulate.delta import Block, Simulation, run_tasks
from unity_ir.simulate.streams import TICKS

NEVER = -(10**18)

Assignments = Mapping[Node, Assignment]

Space = Mapping[Node, Sequence[Assignment]]


@dataclass(frozen=True)
class Proved:
    """The minimum time of all plans of a space, and how it was found."""

    assignments: Assignments
    seconds: float
    """Simulated seconds of an iteration."""
    space: int
    """Number of plans."""
    prefixes: int
    """Prefixes of plans that were expanded."""
    took: float
    """Seconds of the search."""


def space_of(graph: Graph, machine: Machine, alike: bool = False) -> Space:
    """Return every operator's assignments that pin nothing; if `alike`, only those with one role for all axes."""
    axes = len(machine.mesh.sizes)
    out: dict[Node, list[Assignment]] = {}
    for node in graph.nodes():
        if node.is_compute:
            may = possible_roles(node)
            every = [(role,) * axes for role in may] if alike else product(may, repeat=axes)
            out[node] = [assignment for assignment in every if fits(node, assignment, machine.mesh)]
    return out


def exhaustive(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    space: Space,
    known: Assignments,
    seconds: float | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Proved:
    """
    Return the fastest plan of a space of assignments that pin nothing.

    `known` is a good plan to prune by; it is the result if none is faster. `progress` is called with the operators
    decided, their total, and the prefixes kept. Raises `UnityError` after `seconds`.
    """
    begin = perf_counter()
    search = _Search(Simulation(graph, machine, known, optimizer), space)
    found = search.run(begin + seconds if seconds else None, progress)
    best = {**known, **found}
    least = Simulation(graph, machine, best, optimizer).makespan
    assert not found or least == search.limit
    plans = 1
    for choices in space.values():
        plans *= len(choices)
    return Proved(best, least / TICKS, plans, search.looked, perf_counter() - begin)


@dataclass(slots=True)
class _Kept:
    """Pareto front of the prefixes on which the rest depends alike: time vectors, with back-pointers."""

    forward: np.ndarray
    """[prefix, stream or arrival]: ticks at the end of the forward."""
    backward: np.ndarray
    origin: list[tuple[Any, ...]]
    """Per prefix, the last choices, and the origin of the prefix before."""


class _Search:
    def __init__(self, simulation: Simulation, space: Space):
        self.simulation = simulation
        self.limit = simulation.makespan
        self.looked = 0
        self.count = len(simulation.nodes)
        self.choices = [
            [simulation.choice(p, assignment) for assignment in space[node]] for p, node in enumerate(simulation.nodes)
        ]
        self.involved = [self._involved(p) for p in range(self.count)]
        self.decided_at: dict[int, int] = {}
        for p, operators in enumerate(self.involved):
            for q in operators:
                self.decided_at.setdefault(q, p)
        self.last = {q: max(p for p in range(self.count) if q in self.involved[p]) for q in range(self.count)}
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        self._segments: dict[tuple[int, int], list[list[int]]] = {}
        self._ends: dict[int, list[int]] = {}

    def _own(self, p: int, c: Choice) -> int:
        """Return the ticks of an operator's kernels, and of the updates of weights that it reads first."""
        return c.forward + c.backward + self._updates(p, c)

    def _updates(self, p: int, c: Choice) -> int:
        s = self.simulation
        first = {v: i for i, v in reversed(list(enumerate(s.operands[p]))) if s.updated[v] and s.uses[v][0] == (p, i)}
        return sum(s.costs.update(s.values[v], resting(c.needs[i])) for v, i in first.items())

    def _between_choices(self, p: int) -> np.ndarray:
        """
        Return [choice of p, choice of the next]: ticks from p's forward to the next operator's and back, with the
        latter's own.
        """
        memo: dict[Any, tuple[int, int]] = {}
        one, other = self.choices[p], self.choices[p + 1]
        waits = [[self._between(p, a, b, memo) for b in range(len(other))] for a in range(len(one))]
        return np.array(waits, np.int64) + np.array([self._own(p + 1, c) for c in other], np.int64)

    def _least(self, p: int, q: int) -> list[list[int]]:
        """
        Return [choice of p, choice of q]: a lower bound on the ticks from p's forward to q's and back, with q's own.

        It sums kernels and updates, and what neighbours wait for each other.
        """
        found = self._segments.get((p, q))
        if found is None:
            table = self._tables.get((p, q))
            if table is None:
                table = self._between_choices(p)
                for i in range(p + 1, q):
                    step = self._tables.get((i, i + 1))
                    if step is None:
                        step = self._tables[i, i + 1] = self._between_choices(i)
                    table = (table[:, :, None] + step[None]).min(axis=1)
                self._tables[p, q] = table
            found = self._segments[p, q] = table.tolist()
        return found

    def _rest(self, decided: Sequence[tuple[int, int]]) -> int:
        """Return a lower bound on the ticks of everything after the first of some decided operators."""
        total = 0
        for (p, a), (q, b) in pairwise(decided):
            total += self._least(p, q)[a][b]
        p, a = decided[-1]
        if p not in self._ends:
            self._ends[p] = [min(row) for row in self._least(p, self.count - 1)] if p + 1 < self.count else []
        return total + (self._ends[p][a] if p + 1 < self.count else 0)

    def _between(self, p: int, a: int, b: int, memo: dict[Any, tuple[int, int]]) -> int:
        """Return the ticks between two neighbours: from one's forward to the next's, and back."""
        s, one, other = self.simulation, self.choices[p][a], self.choices[p + 1][b]
        there = back = 0
        for v, need in zip(s.operands[p + 1], other.needs, strict=True):
            made = one.makes[s.values[v].index] if s.producer[v] == p else need
            if made == need:
                continue
            key = (v, made, need)
            if key not in memo:
                gradient = s.has_gradient[v] and s.backward[p + 1] and s.backward[p]
                memo[key] = (
                    sum(step[1] for step in s.costs.steps(s.types[v], made, need)),
                    sum(step[1] for step in s.costs.steps(s.types[v], dual(need), dual(made))) if gradient else 0,
                )
            there, back = max(there, memo[key][0]), max(back, memo[key][1])
        return there + back

    def _involved(self, p: int) -> list[int]:
        """Return the operators whose assignments step p depends on (see `_blocks`)."""
        s = self.simulation
        found = {p}
        for v in s.results[p]:
            found.update(q for q, _ in s.uses[v])
        for q in (p + 1, *((0,) if p == 0 else ())):
            if q < self.count:
                found.add(q)
                for v in s.operands[q]:
                    found.update(user for user, _ in s.uses[v] if user <= q)
                    if s.producer[v] >= 0:
                        found.add(s.producer[v])
        return sorted(found)

    def _blocks(self, p: int) -> tuple[Block, Block, list[int], int]:
        """
        Return what step p adds: its forward with the reshards issued around it; the backward reshards of the operator
        after it, then its own backward; the gradients that are sent now; and ticks of updates.
        """
        s = self.simulation
        first = (p + 1, *((0,) if p == 0 else ()))
        values = {*s.results[p], *(v for q in first if q < self.count for v in s.operands[q])}
        for v in values:
            s.groups[v] = s.groups_of(v)
        ahead = [q for q in first if q < self.count]
        tail = [*(s.backward_reshards(p + 1) if p + 1 < self.count else ()), *s.backward_kernel(p)]
        if p == 0:
            tail += s.backward_reshards(0)
        updates = {v for q in ahead for v in s.leaves[q] if s.uses[v][0][0] == q}
        sent = [
            s.reshard_number(v, need) + 1
            for v in values
            for _, need, _, last in s.groups[v]
            if last and last[0] == p + 1
        ]
        return s.forward_tasks(p), tail, sent, sum(s.update_of(v)[0] for v in updates)

    def _awaited(self, p: int, operators: Iterable[int]) -> list[int]:
        """Return the arrivals, of decided operators, that operators after p wait for."""
        s = self.simulation
        found: dict[int, None] = {}
        for q in operators:
            if q > p:
                for v, need in zip(s.operands[q], s.choices[q].needs, strict=True):
                    found[s.reshard_number(v, need)] = None
        return sorted(found)

    def _seen(self, q: int, choice: int, p: int) -> Any:
        """Return a key of what steps after p depend on, of operator q's choice."""
        if q > p:
            return choice
        s, picked = self.simulation, self.choices[q][choice]
        needs = tuple(
            need for v, need in zip(s.operands[q], picked.needs, strict=True) if any(u > p + 1 for u, _ in s.uses[v])
        )
        makes = tuple(
            made for v, made in zip(s.results[q], picked.makes, strict=True) if any(u > p + 1 for u, _ in s.uses[v])
        )
        return needs, makes

    def run(self, deadline: float | None, progress: Callable[[int, int, int], None] | None) -> dict[Node, Assignment]:
        """Return the best plan below `limit`, which becomes its time; {} if there is none."""
        streams = self.simulation.streams.count
        now: dict[Any, tuple[dict[int, int], _Kept]] = {
            (): ({}, _Kept(np.zeros((1, streams), np.int64), np.zeros((1, streams), np.int64), [()]))
        }
        self._keys: dict[Any, tuple[list[int], list[int]]] = {(): ([], [])}
        for p in range(self.count):
            new = [q for q in self.involved[p] if self.decided_at[q] == p]
            undone = [q for q in range(self.count) if self.decided_at[q] <= p < self.last[q]]
            memo: dict[Any, Any] = {}
            later: dict[Any, tuple[dict[int, int], list[Any]]] = {}
            keys: dict[Any, tuple[list[int], list[int]]] = {}
            for at, (decided, kept) in now.items():
                for both, picks in self._expand(p, decided, kept, new):
                    if deadline is not None and perf_counter() > deadline:
                        raise UnityError(f"exhaustive: {p} of {self.count} operators are done when time is up")
                    if p == 0 and self._mirrored(both):
                        continue
                    self._step(p, at, both, kept, picks, undone, memo, later, keys)
            now = {key: (both, _undominated(parts)) for key, (both, parts) in later.items()}
            self._keys = keys
            if progress is not None:
                progress(p + 1, self.count, sum(len(kept.origin) for _, kept in now.values()))
        return self._best(now)

    def _expand(
        self, p: int, decided: Mapping[int, int], kept: _Kept, new: Sequence[int]
    ) -> Iterator[tuple[dict[int, int], tuple[int, ...]]]:
        """Yield the choices of a step's operators with which the best prefix may still beat `limit`."""
        now = int((kept.forward[:, 0] + kept.backward[:, 0]).min())

        def decide(both: dict[int, int], i: int) -> Iterator[dict[int, int]]:
            if i == len(new):
                yield both
                return
            for choice in range(len(self.choices[new[i]])):
                more = {**both, new[i]: choice}
                if p not in more or now + self._total(p, more) < self.limit:
                    yield from decide(more, i + 1)

        for both in decide(dict(decided), 0):
            yield both, tuple(both[q] for q in new)

    def _total(self, p: int, both: Mapping[int, int]) -> int:
        """Return a lower bound on the ticks of operator p's kernels and everything after."""
        order = sorted(item for item in both.items() if item[0] >= p)
        own = self.choices[p][both[p]]
        return (self._own(p, own) if p == 0 else own.forward + own.backward) + self._rest(order)

    def _mirrored(self, decided: Mapping[int, int]) -> bool:
        """Return whether this plan is redundant: the same with equal axes exchanged is searched."""
        machine = self.simulation.streams.machine
        sizes, levels = machine.mesh.sizes, machine.axis_levels
        if len(sizes) != 2 or sizes[0] != sizes[1] or levels[0] != levels[1] or machine.links:
            return False
        a = self.choices[0][decided[0]].assignment
        return _order(a[0]) > _order(a[1])

    def _step(
        self,
        p: int,
        at: Any,
        both: dict[int, int],
        kept: _Kept,
        picks: tuple[int, ...],
        undone: Sequence[int],
        memo: dict[Any, Any],
        later: dict[Any, tuple[dict[int, int], list[Any]]],
        keys: dict[Any, tuple[list[int], list[int]]],
    ) -> None:
        s = self.simulation
        hopeful = np.flatnonzero(kept.forward[:, 0] + kept.backward[:, 0] + self._total(p, both) < self.limit)
        if not len(hopeful):
            return
        used = tuple(both[q] for q in self.involved[p] if q in both)
        found = memo.get(used)
        for q, choice in both.items():
            s.choices[q] = self.choices[q][choice]
        if found is None:
            found = memo[used] = self._blocks(p)
        forward, tail, sent, updates = found
        arriving, leaving = self._keys[at]
        key = tuple(self._seen(q, both[q], p) for q in undone)
        awaited = self._awaited(p, undone)
        bound, next_waits = 0, list[int]()
        if p + 1 < self.count:
            after = self.choices[p + 1][both[p + 1]]
            bound = after.forward + after.backward + self._rest(sorted(i for i in both.items() if i[0] > p))
            next_waits = self._awaited(p, (p + 1,))
        rows: list[tuple[list[int], list[int], Any]] = []
        width = s.streams.count
        for i in hopeful.tolist():
            clocks = kept.forward[i].tolist()
            pending = dict(zip(arriving, clocks[width:], strict=True))
            clocks = clocks[:width]
            run_tasks(forward, clocks, pending)
            to_go = kept.backward[i].tolist()
            left = dict(zip(leaving, to_go[width:], strict=True))
            to_go = to_go[:width]
            _undo(tail, to_go, left)
            for k in sent:
                left.pop(k, None)
            self.looked += 1
            start, most = clocks[0], max(to_go)
            # Nothing starts before the compute stream's clock.
            to_go[0] = most
            ready = max([start, *(pending.get(k, 0) for k in next_waits)])
            if ready + bound + most + updates >= self.limit:
                continue
            if any(max(c, start) + g + updates >= self.limit for c, g in zip(clocks, to_go, strict=True)):
                continue
            row = [max(c, start) for c in clocks] + [max(pending.get(k, start), start) for k in awaited]
            names = sorted(left)
            back = [g + updates for g in to_go] + [left[k] + updates for k in names]
            if key in keys:
                assert keys[key] == (awaited, names)
            else:
                keys[key] = (awaited, names)
            rows.append((row, back, (picks, kept.origin[i])))
        if rows:
            later.setdefault(key, ({q: both[q] for q in undone}, []))[1].extend(rows)

    def _best(self, now: Mapping[Any, tuple[dict[int, int], _Kept]]) -> dict[Node, Assignment]:
        best: Any = None
        for _, kept in now.values():
            for f, m, origin in zip(kept.forward, kept.backward, kept.origin, strict=True):
                ends = int((f + m).max())
                if ends < self.limit:
                    self.limit, best = ends, origin
        found: dict[Node, Assignment] = {}
        for p in reversed(range(self.count)):
            if best is None:
                return {}
            new = [q for q in self.involved[p] if self.decided_at[q] == p]
            picks, best = best
            choice: int
            for q, choice in zip(new, picks, strict=True):
                found[self.simulation.nodes[q]] = self.choices[q][choice].assignment
        return found


def _order(what: GridRole) -> str:
    return repr(sorted(what)) if isinstance(what, frozenset) else repr(what)


def _undo(block: Block, to_go: list[int], left: dict[int, int]) -> None:
    """Turn the times to go after a block into those before it, in place: on streams, and from arrivals it waits for."""
    for ticks, after, held, waits, sets in reversed(block):
        most = NEVER
        for stream in held:
            most = max(most, to_go[stream])
            to_go[stream] = NEVER
        for key in sets:
            most = max(most, left.pop(key, NEVER))
        most += ticks
        for stream in after:
            to_go[stream] = max(to_go[stream], most)
        for key in waits:
            left[key] = max(left.get(key, NEVER), most)


def _undominated(rows: list[Any]) -> _Kept:
    """Return the Pareto front of pairs of vectors f and m, sorted best first."""
    rows.sort(key=lambda row: row[0][0] + row[1][0])
    forward = np.array([row[0] for row in rows], np.int64)
    backward = np.array([row[1] for row in rows], np.int64)
    kept: list[int] = []
    for i in range(len(rows)):
        if kept:
            worse = (forward[kept] - forward[i]).max(axis=1) + (backward[kept] - backward[i]).max(axis=1)
            if (worse <= 0).any():
                continue
        kept.append(i)
    return _Kept(forward[kept], backward[kept], [rows[i][2] for i in kept])
