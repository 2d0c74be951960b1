"""
Charge once for moves that several operators share.

Operators that read a value in one layout share the move there, in the emitted program and in its cost. The exact search
minimises terms of at most two variables and charges every reader, so for a value with three uses or more its minimum
may miss the fastest plan, and is no bound. Nor is it at a price of bytes for an output with two uses: to bring the
output itself where both users need it may hold more bytes than a copy for them, which no backward reads.

A lower bound charges each reader 1 / (number of possible sharers) of the move. Where the bound's minimum then
undercharges, cutting planes follow: the layouts in question are tracked, which gives the relay a row for each subset of
them that the value was brought to. The relay pays for these moves once, and readers find the value there. This repeats
until the choice costs as much as the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb

import numpy as np

from unity_ir.budget import OutOfBudget
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.search.exact.elimination import Projection, every
from unity_ir.search.exact.factor_graph import DenseCost, PairwiseCost, Port, Variable, between, port
from unity_ir.search.exact.known_messages import PLAIN, Moved
from unity_ir.search.exact.solver import ExactPlan, FactorGraphBuilder, Solver
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import TIME
from unity_ir.search.layouts.space import FREE_MOVE

ROUNDED = 1e-9
"""Relative rounding error of a sum: a choice this near the bound is optimal."""

Tracked = Mapping[Value, tuple[int, ...]]
"""Per value, the layouts whose moves are tracked."""

AWAY, THERE, BOTH = 0, 1, 2
"""State of a tracked layout: not brought there; brought; brought, and its gradient comes back from there."""


@dataclass(frozen=True, eq=False)
class ScaledCost:
    """
    The cost [layout made, layout needed] of an edge times a factor `share` below 1: what one reader is charged of a
    reshard that several readers make together.
    """

    whole: PairwiseCost
    share: float

    @property
    def made(self) -> Port:
        """The layouts that the edge's source variable makes, and which of them each of its rows (choices) makes."""
        return self.whole.made

    @property
    def needs(self) -> Port:
        """The layouts that the edge's target variable needs, and which of them each of its rows (choices) needs."""
        return self.whole.needs

    def there(self, of_made: Floats) -> Floats:
        """
        Return the min-sum message to the edge's target, [layout needed]: min over layouts made of `of_made` + scaled
        cost.

        `of_made` [layout made] is the message that arrives at the source, in seconds.
        """
        return self.share * self.whole.there(of_made / self.share)

    def back(self, of_needs: Floats) -> Floats:
        """
        Return the min-sum message to the edge's source, [layout made]: min over layouts needed of scaled cost +
        `of_needs`.

        `of_needs` [layout needed] is the message that arrives at the target, in seconds.
        """
        return self.share * self.whole.back(of_needs / self.share)

    def of(self, made: Port, needs: Port) -> ScaledCost:
        """
        Return the cost, with the same factor, restricted to fewer layouts at either end of the edge: those of the ports
        `made` and `needs`, which must be among those of this cost's own ports.
        """
        return ScaledCost(self.whole.of(made, needs), self.share)


class SharedFactorGraphBuilder(FactorGraphBuilder):
    """
    Builds a factor graph whose sum is a lower bound on the cost of every choice (one row per variable), even where
    readers share moves. A value with several readers has a variable of its own, its relay: the layout to which it is
    brought for all of them. Readers that need another layout move it there from the relay's, and are charged a share of
    that move each; of tracked layouts, named to the constructor, the relay itself may pay for the move, once.

    The sum is the cost itself for a value all of whose needed layouts are tracked.
    """

    def __init__(self, solver: Solver, graph: Graph, tracked: Tracked | None = None):
        self.tracked = tracked or {}
        super().__init__(solver, graph)

    def of_shorter(self, graph: Graph) -> FactorGraphBuilder:
        """Return a builder with the same costs for a graph with fewer equal layers, with no layout tracked."""
        return SharedFactorGraphBuilder(self.solver, graph)

    def may_share(self, value: Value) -> bool:
        """
        Return whether several readers of a value may reshard it together, so that each is charged only a share of that
        move (`reader_share`).
        """
        return _may_share(self.uses.get(value, ()), self._output_alone(value))

    def _output_alone(self, value: Value) -> bool:
        """
        Return whether bringing a value itself to a layout may cost more than bringing it there for all its readers, as
        bytes are priced and only the value, an output of the graph, is kept.
        """
        return self.keeps.relayed_as_output(value, self.uses.get(value, ()))

    def reader_share(self, value: Value) -> float:
        """
        Return the fraction of a move's cost that each reader of a value is charged, if the move is to a layout that is
        not tracked: 1 / n, where n is how many readers may share the move, so that together they pay for one move at
        most. Call it only for a value that `may_share`.

        n is usually one less than the number of readers: a move that all of them need costs no more if it is made for
        all at once, to the layout of the relay. It is the number of readers if one of them reads the value twice, or if
        the value is an output of the graph and its bytes are priced.
        """
        uses = self.uses[value]
        users = len({user for user, _ in uses})
        return 1 / (users - (len(uses) == users and not self._output_alone(value)))

    def shared(self) -> frozenset[Value]:
        """
        Return the values with tracked layouts: those that a reader may find in the layout it needs without paying,
        since the value's relay has paid for the move there.
        """
        return frozenset(self.tracked)

    def states(self, value: Value, tracked: tuple[int, ...]) -> Ints:
        """
        Return all ways for a value's relay to have moved it to some of the layouts `tracked` (layout numbers), [state,
        tracked layout]: entries are AWAY (the value is not moved there), THERE (it is) or BOTH (it is, and its gradient
        is moved back from there).

        At most floor(uses / 2) entries of a state are not AWAY, since a move is shared by at least two readers.
        """
        trained = {self.training(value, [user]) for user, _ in self.uses[value]}
        may = (*([THERE] if False in trained else []), *([BOTH] if True in trained else []))
        out: list[Ints] = []
        for count in range(len(self.uses[value]) // 2 + 1):
            for places in combinations(range(len(tracked)), count):
                for how in product(may, repeat=count):
                    state = np.full(len(tracked), AWAY)
                    state[list(places)] = how
                    out.append(state)
        return np.array(out, dtype=np.int64).reshape(-1, len(tracked))

    def count_states(self, value: Value, tracked: int) -> int:
        """
        Return how many ways there are for a value's relay to have moved it to some of `tracked` layouts (a count), at
        most half as many as the value has uses: the length of `states`, without listing them.
        """
        trainings = len({self.training(value, [user]) for user, _ in self.uses[value]})
        return sum(comb(tracked, count) * trainings**count for count in range(len(self.uses[value]) // 2 + 1))

    def layout_of_row(self, value: Value, row: int) -> int:
        """
        Return the number of the layout in which readers find a value, given the index of the row chosen for its relay.

        That is `row` itself, but for values in `shared`: the rows of their relays are pairs of a layout and one of
        `states`, flattened.
        """
        return row // len(self.states(value, self.tracked[value])) if value in self.tracked else row

    def moved(self, value: Value) -> Moved:
        """Return what the rows of a value's relay are: with tracked layouts, also to which of these it is brought."""
        tracked = self.tracked.get(value, ())
        return Moved(tracked, self.states(value, tracked)) if tracked else PLAIN

    def relay(self, value: Value) -> Variable:
        """
        Return the variable of a value with several readers, its relay: a row per layout in which they find it or, for
        values in `shared`, per pair of such a layout and one of `states`, whose cost includes the moves of that state.
        """
        plain = super().relay(value)
        if value not in self.tracked:
            return plain
        tracked = self.tracked[value]
        states = self.states(value, tracked)
        key = ("tracked", id(plain), tracked, states.tobytes())
        variables = self.solver.variables
        if key not in variables:
            space = self.solver.space(value)
            layouts, which = np.repeat(plain.rows, len(states)), np.tile(np.arange(len(states)), len(plain.rows))
            seconds = plain.seconds[layouts]
            for i, layout in enumerate(tracked):
                there, both = (space.reshard(plain.rows, np.array([layout]), back)[:, 0] for back in (False, True))
                paid = np.stack([np.zeros(len(there)), there, both], axis=1)
                seconds = seconds + paid[layouts, states[which, i]]
            rows = np.arange(len(layouts))
            needs = tuple(Port(p.layouts, Projection(p.at[layouts], p.axis.size)) for p in plain.needs)
            variables[key] = Variable(len(rows), rows, seconds, every(len(rows)), (port(rows),), needs)
        return variables[key]

    def pairwise(
        self, solver: Solver, value: Value, source: int, made: Port, needs: Port, training: bool, kept: bool
    ) -> PairwiseCost:
        """
        Return the cost [layout made, layout needed], in the objective of `solver`, that one reader is charged for the
        reshard of a value.

        `source` is the number of the variable that provides the value, its producer's or its relay, which makes the
        layouts `made`. The reader needs the layouts `needs`. `training` says whether the reader returns a gradient,
        which is resharded back; `kept` whether the backward reads the resharded value, so that its bytes count.

        From the relay of a value with readers that may share moves, a reader is charged its share (`reader_share`) of a
        move to most layouts; to tracked ones nothing where the relay's row has moved the value there, and the whole
        move where it has not. Any other edge costs what it costs in `FactorGraphBuilder`.
        """
        if self.numbers.get(value) != source or not self.may_share(value):
            return super().pairwise(solver, value, source, made, needs, training, kept)
        part, tracked = self.reader_share(value), self.tracked.get(value, ())
        key = ("part", value.type, value.node.op == "weight", training, kept, id(made), id(needs), part, tracked)
        known = solver.pairwise
        if key not in known:
            known[key] = self._shared_cost(solver, value, made, needs, training, kept, part, tracked)
        return known[key]

    def _shared_cost(
        self,
        solver: Solver,
        value: Value,
        made: Port,
        needs: Port,
        training: bool,
        kept: bool,
        part: float,
        tracked: tuple[int, ...],
    ) -> PairwiseCost:
        if not tracked:
            whole = solver.between(value, made, needs, training, kept)
            return (
                DenseCost(made, needs, part * whole.seconds)
                if isinstance(whole, DenseCost)
                else ScaledCost(whole, part)
            )
        space, states = solver.space(value), self.states(value, tracked)
        plain = port(np.arange(len(space)))
        seconds = between(space, plain, needs, training, solver.price, kept).seconds
        layouts, which = made.layouts // len(states), made.layouts % len(states)
        parts = np.where(np.isin(needs.layouts, tracked), 1.0, part)
        seconds = (seconds * parts)[layouts]
        for i, layout in enumerate(tracked):
            brought = states[which, i] >= (BOTH if training else THERE)
            seconds[np.ix_(brought, needs.layouts == layout)] = 0.0
        return DenseCost(made, needs, seconds)


def has_shared_moves(graph: Graph) -> bool:
    """
    Return whether any value of a graph has several readers that may share a move, at some prices of seconds and bytes.
    If so, the minimum in which each reader pays for itself may be above the cost of a plan, and is no lower bound.
    """
    return any(_may_share(uses, value in graph.outputs) for value, uses in graph.users().items())


def _may_share(uses: Sequence[tuple[Node, int]], output_alone: bool) -> bool:
    """
    Return whether a value has more than two uses, by at least two operators, so that some readers may share a move.

    `uses` are (user, operand index) pairs. Two readers share a move only where both do, which a relay already
    expresses, unless bringing the value itself there may cost more (`output_alone`).
    """
    return len(uses) > (1 if output_alone else 2) and len({user for user, _ in uses}) > 1


def with_shared_moves(solver: Solver, graph: Graph, plan: ExactPlan, is_bounded: bool = True) -> ExactPlan:
    """
    Return the best plan found in which a move that several readers share is charged once, with a lower bound in seconds
    on all plans of the serial graph. Unless it `is_bounded`, only relays are chosen anew, and the bound is 0.

    `plan` is the plan to improve: that of `solver`, in which each reader pays for itself. `seconds` of the result are
    those of `cost.plan`, up to the seconds charged for free moves (see `without_free_moves`). Returns `plan` itself if
    no moves can be shared, if the solver's objective is not seconds alone (those once per step may count less), or on a
    machine of one device.
    """
    builder = SharedFactorGraphBuilder(solver, graph)
    values = [v for v in builder.uses if builder.may_share(v)]
    if (
        replace(solver.price, once=TIME.once, add=TIME.add, adding=TIME.adding) != TIME
        or not values
        or not solver.spaces.groups
    ):
        return plan
    enough = ROUNDED if plan.rows_before <= limits().shared_exact_rows else limits().close
    best = _best_relays(builder, plan, values, None)
    tracked: dict[Value, tuple[int, ...]] = {}
    bound = 0.0
    rounds = limits().shared_rounds if solver.spaces.axis_by_axis or solver.spaces.by_count else 1
    for _ in range(rounds if is_bounded else 0):
        try:
            found = builder.solve()
        except OutOfBudget:
            break
        bound = max(bound, found.bound)
        settled = _best_relays(builder, found, values, tracked)
        if settled.seconds < best.seconds:
            best = settled
        more = _more(builder, found, values)
        is_least = found.seconds <= found.bound * (1 + ROUNDED)
        if best.seconds <= bound * (1 + enough) or not is_least or not more:
            break
        tracked |= more
        builder = SharedFactorGraphBuilder(solver, graph, tracked)
    return replace(best, bound=bound)


def without_free_moves(bound: float, graph: Graph, machine: Machine) -> float:
    """
    Return `bound` in seconds, lowered so that no plan of the serial graph counts fewer seconds in `cost.plan`.

    Subtracts the rounding error of sums, and an upper bound on the `FREE_MOVE` seconds that only the search charges for
    moves that change a role but neither copy nor send anything: four per mesh axis, operand and result. At least 0.
    """
    ends = sum(len(n.operands) + len(n.results) for n in graph.nodes())
    return max(0.0, bound * (1 - ROUNDED) - FREE_MOVE * 4 * len(machine.mesh.sizes) * ends)


def least_cost_bound(solver: Solver, graph: Graph) -> float:
    """
    Return a lower bound on the cost of every choice for a serial graph, in the solver's objective (`Solver.price`),
    even where readers share moves. Raises `OutOfBudget` if the budget ends before it is found.
    """
    return SharedFactorGraphBuilder(solver, graph).solve().bound


def _best_relays(
    builder: SharedFactorGraphBuilder, plan: ExactPlan, several: Iterable[Value], tracked: Tracked | None
) -> ExactPlan:
    """
    Return the plan with the best relay layouts for its configurations, and their cost.

    `tracked` says by which sum the plan's `seconds` were computed: with these layouts tracked, or, if None, with each
    operator paying in full.
    """
    seconds, layouts, rests = plan.seconds, dict(plan.layouts), dict(plan.rests)
    for value in several:
        readers = _Readers(builder, value, plan)
        over_relays = readers.seconds()
        best = int(over_relays.argmin())
        seconds += float(over_relays[best]) - readers.charged(None if tracked is None else tracked.get(value, ()))
        layouts[value] = best
        if value.node.is_leaf:
            rests[value] = int(builder.solver.leaf(value, builder.with_gradient, True, True)[1][best])
    return replace(plan, seconds=seconds, layouts=layouts, rests=rests)


def _more(builder: SharedFactorGraphBuilder, plan: ExactPlan, several: Iterable[Value]) -> dict[Value, tuple[int, ...]]:
    """Return the values with more layouts tracked: those undercharged in `plan`, as far as the limits allow."""
    out: dict[Value, tuple[int, ...]] = {}
    for value in several:
        tracked = builder.tracked.get(value, ())
        new = [n for n in _Readers(builder, value, plan).underpaid() if n not in tracked]
        layouts = len(builder.solver.space(value))
        while new:
            rows = layouts * builder.count_states(value, len(tracked) + len(new))
            if rows <= limits().shared_rows and rows * layouts <= limits().shared_entries:
                break
            new.pop()
        if new:
            out[value] = (*tracked, *new)
    return out


class _Readers:
    """The readers of a value under a choice, by the layout they need."""

    def __init__(self, builder: SharedFactorGraphBuilder, value: Value, plan: ExactPlan):
        self.builder, self.value, self.at = builder, value, plan.layouts[value]
        self.space = builder.solver.space(value)
        self.needs: dict[int, list[bool]] = {}
        """For each layout needed, whether a gradient comes back, per reader."""
        for user, slots in _slots(builder.uses[value]).items():
            table = builder.solver.table(user, builder.with_gradient)
            for need in dict.fromkeys(int(table.operands[i][plan.rows[user]]) for i in slots):
                self.needs.setdefault(need, []).append(builder.training(value, [user]))
        self.arriving = self._arriving(plan)

    def _arriving(self, plan: ExactPlan) -> Floats:
        """Return seconds [layout] from where the value is made, or rests best, to each relay layout."""
        builder, node = self.builder, self.value.node
        if node.is_leaf:
            return builder.solver.leaf(self.value, builder.with_gradient, True, True)[0]
        made = builder.solver.table(node, builder.with_gradient).results[self.value.index][plan.rows[node]]
        training = any(t for each in self.needs.values() for t in each)
        return self.space.reshard(np.array([made]), np.arange(len(self.space)), training)[0]

    def _from(self, relay: Ints | int, need: int, training: bool) -> Floats:
        return self.space.reshard(np.atleast_1d(relay), np.array([need]), training)[:, 0]

    def seconds(self) -> Floats:
        """Return seconds [relay layout] of all moves of the value."""
        relays = np.arange(len(self.space))
        return self.arriving + sum(self._from(relays, need, any(each)) for need, each in self.needs.items())

    def charged(self, tracked: tuple[int, ...] | None) -> float:
        """
        Return the seconds that the factor graph charges for the value with the chosen relay; None: each reader pays in
        full.
        """
        total = float(self.arriving[self.at])
        for need, each in self.needs.items():
            if tracked is not None and need in tracked:
                total += self._once(need, each)
            else:
                total += self._paid(need, each, 1.0 if tracked is None else self.builder.reader_share(self.value))
        return total

    def underpaid(self) -> list[int]:
        """Return the layouts whose readers together are charged less than the move costs."""
        part = self.builder.reader_share(self.value)
        of = self.needs.items()
        return [need for need, each in of if self._paid(need, each, part) < self._once(need, each) * (1 - ROUNDED)]

    def _once(self, need: int, each: list[bool]) -> float:
        """Return the seconds of one move from the chosen relay, which all readers of a layout share."""
        return float(self._from(self.at, need, any(each))[0])

    def _paid(self, need: int, each: list[bool], part: float) -> float:
        """Return the seconds of a part of the move for every reader of a layout."""
        return part * sum(float(self._from(self.at, need, training)[0]) for training in each)


def _slots(uses: Iterable[tuple[Node, int]]) -> dict[Node, list[int]]:
    out: dict[Node, list[int]] = {}
    for user, i in uses:
        out.setdefault(user, []).append(i)
    return out
