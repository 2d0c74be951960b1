"""
Moves that several operators share.

Operators that read a value in one layout share the move there, in the emitted program and in its cost. The sum that the
exact search minimises has terms of at most two variables and charges each of them, so what is least by it may not be
the fastest plan, and it bounds nothing, where a value has three uses or more.

A bound is the sum in which an operator pays a part of the move only: one in as many as may share it. Where the choice
that is least by that pays too little, the layouts in question are told apart: a relay then may pay once for having
the value brought to one of them, and operators find it there. That goes on until the choice costs what the bound says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb

import numpy as np

from unity_ir.budget import OutOfBudget
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Node, Value
from unity_ir.search.exact.elimination import Axis, every
from unity_ir.search.exact.factor_graph import Between, Kind, Port, Way, between, port
from unity_ir.search.exact.solver import CLOSE, ExactPlan, Solver, Terms
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.objective import TIME
from unity_ir.search.layouts.space import FREE_MOVE

ROUNDS = 30
"""Times that layouts are told apart."""

ROWS = 30_000
"""Rows of a relay at most: layouts, and ways in which a value may have been brought to those that are told apart."""

SMALL = 100_000
"""Configurations and layouts of a graph up to which its least choice is looked for until it is found."""

ENTRIES = 10_000_000
"""Pairs of one of these rows and a layout."""

ROUNDED = 1e-9
"""What sums may be wrong by, as a part of them: a choice this near the bound is the least."""

Told = Mapping[Value, tuple[int, ...]]
"""The layouts of values that are told apart."""

AWAY, THERE, BOTH = 0, 1, 2
"""A value has not been brought to a layout; it has; its gradient, too, comes back from there."""


@dataclass(frozen=True, eq=False)
class Part:
    """A way of which only a part is paid."""

    whole: Way
    part: float

    @property
    def made(self) -> Port:
        return self.whole.made

    @property
    def needs(self) -> Port:
        return self.whole.needs

    def there(self, of_made: Floats) -> Floats:
        """The least of `of_made` and the way, for each layout needed."""
        return self.part * self.whole.there(of_made / self.part)

    def back(self, of_needs: Floats) -> Floats:
        """The least of `of_needs` and the way, for each layout made."""
        return self.part * self.whole.back(of_needs / self.part)

    def of(self, made: Port, needs: Port) -> Part:
        """The way between ports with some of the layouts."""
        return Part(self.whole.of(made, needs), self.part)


class SharedTerms(Terms):
    """A sum that is never more than what a choice costs; for values of which all layouts needed are told, just that."""

    def __init__(self, solver: Solver, graph: Graph, told: Told | None = None):
        self.told = told or {}
        super().__init__(solver, graph)

    def several(self, value: Value) -> bool:
        """Whether a part of a move of a value may be what an operator pays."""
        return several(self.uses.get(value, ()))

    def part(self, value: Value) -> float:
        """One in as many operators as may share a move. Where all do, they may as well find the value there."""
        uses = self.uses[value]
        users = len({user for user, _ in uses})
        return 1 / (users - (len(uses) == users))

    def shared(self) -> frozenset[Value]:
        return frozenset(self.told)

    def states(self, value: Value, told: tuple[int, ...]) -> Ints:
        """
        Whether a value has been brought to each of the layouts: [state, layout]; to so many as several may share each.
        """
        trained = {self.training(value, [user]) for user, _ in self.uses[value]}
        may = (*([THERE] if False in trained else []), *([BOTH] if True in trained else []))
        out: list[Ints] = []
        for count in range(len(self.uses[value]) // 2 + 1):
            for places in combinations(range(len(told)), count):
                for how in product(may, repeat=count):
                    state = np.full(len(told), AWAY)
                    state[list(places)] = how
                    out.append(state)
        return np.array(out, dtype=np.int64).reshape(-1, len(told))

    def ways_to_be_there(self, value: Value, told: int) -> int:
        """How many states there are when so many layouts are told."""
        kinds = len({self.training(value, [user]) for user, _ in self.uses[value]})
        return sum(comb(told, count) * kinds**count for count in range(len(self.uses[value]) // 2 + 1))

    def found(self, value: Value, row: int) -> int:
        return row // len(self.states(value, self.told[value])) if value in self.told else row

    def relay(self, value: Value) -> Kind:
        plain = super().relay(value)
        if value not in self.told:
            return plain
        told = self.told[value]
        states = self.states(value, told)
        key = ("told", id(plain), told, states.tobytes())
        kinds = self.solver.kinds
        if key not in kinds:
            space = self.solver.space(value)
            layouts, which = np.repeat(plain.rows, len(states)), np.tile(np.arange(len(states)), len(plain.rows))
            seconds = plain.seconds[layouts]
            for i, layout in enumerate(told):
                there, both = (space.reshard(plain.rows, np.array([layout]), back)[:, 0] for back in (False, True))
                paid = np.stack([np.zeros(len(there)), there, both], axis=1)
                seconds = seconds + paid[layouts, states[which, i]]
            rows = np.arange(len(layouts))
            needs = tuple(Port(p.layouts, Axis(p.at[layouts], p.axis.size)) for p in plain.needs)
            kinds[key] = Kind(len(rows), rows, seconds, every(len(rows)), (port(rows),), needs)
        return kinds[key]

    def way(self, value: Value, source: int, made: Port, needs: Port, training: bool, kept: bool) -> Way:
        if self.numbers.get(value) != source or not self.several(value):
            return super().way(value, source, made, needs, training, kept)
        part, told = self.part(value), self.told.get(value, ())
        key = ("part", value.type, value.node.op == "weight", training, kept, id(made), id(needs), part, told)
        ways = self.solver.ways
        if key not in ways:
            ways[key] = self._way(value, made, needs, training, kept, part, told)
        return ways[key]

    def _way(
        self, value: Value, made: Port, needs: Port, training: bool, kept: bool, part: float, told: tuple[int, ...]
    ) -> Way:
        if not told:
            whole = self.solver.between(value, made, needs, training, kept)
            return Between(made, needs, part * whole.seconds) if isinstance(whole, Between) else Part(whole, part)
        space, states = self.solver.space(value), self.states(value, told)
        plain = port(np.arange(len(space)))
        seconds = between(space, plain, needs, training, self.solver.price, kept).seconds
        layouts, which = made.layouts // len(states), made.layouts % len(states)
        parts = np.where(np.isin(needs.layouts, told), 1.0, part)
        seconds = (seconds * parts)[layouts]
        for i, layout in enumerate(told):
            brought = states[which, i] >= (BOTH if training else THERE)
            seconds[np.ix_(brought, needs.layouts == layout)] = 0.0
        return Between(made, needs, seconds)


def shares(graph: Graph) -> bool:
    """Whether operators may share moves of any value that not all of its users share."""
    return any(several(uses) for uses in graph.users().values())


def several(uses: Sequence[tuple[Node, int]]) -> bool:
    """Whether some of a value's users may share a move of it, but not all; of two uses, a relay does all of that."""
    return len(uses) > 2 and len({user for user, _ in uses}) > 1


def sharpened(solver: Solver, graph: Graph, plan: ExactPlan) -> ExactPlan:
    """
    The least choice for a serial graph, as far as it can be found, and a bound on all; `plan` is the least where each
    operator pays. `seconds` are those of `cost.plan`, but for what free moves count. Only where nothing but time is
    minimised.
    """
    terms = SharedTerms(solver, graph)
    values = [v for v in terms.uses if terms.several(v)]
    if solver.price != TIME or not values or not solver.spaces.groups:
        return plan
    enough = ROUNDED if plan.rows_before <= SMALL else CLOSE
    best = _settled(terms, plan, values, None)
    told: dict[Value, tuple[int, ...]] = {}
    bound = 0.0
    for _ in range(ROUNDS if solver.spaces.axis_by_axis or solver.spaces.by_count else 1):
        try:
            found = terms.solve()
        except OutOfBudget:
            break
        bound = max(bound, found.bound)
        settled = _settled(terms, found, values, told)
        if settled.seconds < best.seconds:
            best = settled
        more = _more(terms, found, values)
        is_least = found.seconds <= found.bound * (1 + ROUNDED)
        if best.seconds <= bound * (1 + enough) or not is_least or not more:
            break
        told |= more
        terms = SharedTerms(solver, graph, told)
    return replace(best, bound=bound)


def certain(bound: float, graph: Graph, machine: Machine) -> float:
    """A bound less what sums are rounded by, and less what free moves count in the search and not in a plan."""
    ends = sum(len(n.operands) + len(n.results) for n in graph.nodes())
    return max(0.0, bound * (1 - ROUNDED) - FREE_MOVE * 4 * len(machine.mesh.sizes) * ends)


def bounded(solver: Solver, graph: Graph) -> float:
    """What no choice for a serial graph is below, by the solver's price."""
    return SharedTerms(solver, graph).solve().bound


def _settled(terms: SharedTerms, plan: ExactPlan, several: Iterable[Value], told: Told | None) -> ExactPlan:
    """
    The same configurations with the best relays, and what that costs; the plan's `seconds` are of the sum in which
    these layouts are told, or, if None, each operator pays.
    """
    seconds, layouts, rests = plan.seconds, dict(plan.layouts), dict(plan.rests)
    for value in several:
        readers = _Readers(terms, value, plan)
        over_relays = readers.seconds()
        best = int(over_relays.argmin())
        seconds += float(over_relays[best]) - readers.charged(None if told is None else told.get(value, ()))
        layouts[value] = best
        if value.node.is_leaf:
            rests[value] = int(terms.solver.leaf(value, terms.with_gradient, True, True)[1][best])
    return replace(plan, seconds=seconds, layouts=layouts, rests=rests)


def _more(terms: SharedTerms, plan: ExactPlan, several: Iterable[Value]) -> dict[Value, tuple[int, ...]]:
    """The values with more layouts told: those of the choice whose users pay too little, as far as there is room."""
    out: dict[Value, tuple[int, ...]] = {}
    for value in several:
        told = terms.told.get(value, ())
        new = [n for n in _Readers(terms, value, plan).underpaid() if n not in told]
        layouts = len(terms.solver.space(value))
        while new:
            rows = layouts * terms.ways_to_be_there(value, len(told) + len(new))
            if rows <= ROWS and rows * layouts <= ENTRIES:
                break
            new.pop()
        if new:
            out[value] = (*told, *new)
    return out


class _Readers:
    """The operators that read a value, under a choice: which layouts they need."""

    def __init__(self, terms: SharedTerms, value: Value, plan: ExactPlan):
        self.terms, self.value, self.at = terms, value, plan.layouts[value]
        self.space = terms.solver.space(value)
        self.needs: dict[int, list[bool]] = {}
        """For each layout, of every operator whether a gradient comes back from it."""
        for user, slots in _slots(terms.uses[value]).items():
            table = terms.solver.table(user, terms.with_gradient)
            for need in dict.fromkeys(int(table.operands[i][plan.rows[user]]) for i in slots):
                self.needs.setdefault(need, []).append(terms.training(value, [user]))
        self.arriving = self._arriving(plan)

    def _arriving(self, plan: ExactPlan) -> Floats:
        """Seconds to each relay from where the value is made, or best rests."""
        terms, node = self.terms, self.value.node
        if node.is_leaf:
            return terms.solver.leaf(self.value, terms.with_gradient, True, True)[0]
        made = terms.solver.table(node, terms.with_gradient).results[self.value.index][plan.rows[node]]
        training = any(t for each in self.needs.values() for t in each)
        return self.space.reshard(np.array([made]), np.arange(len(self.space)), training)[0]

    def _from(self, relay: Ints | int, need: int, training: bool) -> Floats:
        return self.space.reshard(np.atleast_1d(relay), np.array([need]), training)[:, 0]

    def seconds(self) -> Floats:
        """What the value takes on its way, through each relay."""
        relays = np.arange(len(self.space))
        return self.arriving + sum(self._from(relays, need, any(each)) for need, each in self.needs.items())

    def charged(self, told: tuple[int, ...] | None) -> float:
        """What is charged for it with the relay of the choice."""
        total = float(self.arriving[self.at])
        for need, each in self.needs.items():
            if told is not None and need in told:
                total += float(self._from(self.at, need, any(each))[0])
            else:
                part = 1.0 if told is None else self.terms.part(self.value)
                total += part * sum(float(self._from(self.at, need, training)[0]) for training in each)
        return total

    def underpaid(self) -> list[int]:
        """The layouts whose operators together pay less than the move takes."""
        part = self.terms.part(self.value)
        found: list[int] = []
        for need, each in self.needs.items():
            paid = part * sum(float(self._from(self.at, need, training)[0]) for training in each)
            if paid < float(self._from(self.at, need, any(each))[0]) * (1 - ROUNDED):
                found.append(need)
        return found


def _slots(uses: Iterable[tuple[Node, int]]) -> dict[Node, list[int]]:
    out: dict[Node, list[int]] = {}
    for user, i in uses:
        out.setdefault(user, []).append(i)
    return out
