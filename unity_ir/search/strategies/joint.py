"""Define `joint` and `sequential`: rewrites and exact parallelization, together or one after the other."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.striped import KERNEL_TILE, block_of, causal_degree, pieces_of_queries, striped
from unity_ir.plan.rings import BACKWARD_OF
from unity_ir.rules.algebraic import COMMON, selected
from unity_ir.rules.derivation import stripe_step
from unity_ir.rules.rule import Rule
from unity_ir.search.choose.candidates import SimulatedPlans
from unity_ir.search.choose.winner import Unbounded, choosing
from unity_ir.search.exchange import check_imbalance, exchanging_rows, faster_gathering, most_rows
from unity_ir.search.joint.best_first import JointPlan, RewriteCache, joint
from unity_ir.search.joint.sequential import rewritten_alone, sequential
from unity_ir.search.layouts.exchanged import exchanging
from unity_ir.search.layouts.limits import limits
from unity_ir.search.memory.lagrangian import Refused, joint_within
from unity_ir.search.result import SearchResult
from unity_ir.search.strategy import SearchContext


@dataclass(frozen=True)
class RewriteOptions:
    """
    Options of `joint` and `sequential`: which algebraic rules may rewrite the graph, as `rules.algebraic` reads them.
    """

    rules: str = COMMON
    """`common`, `library`, `common+~merge-matmuls`, `common+my_rules.pcg`, ..: see `rules.algebraic`."""


@dataclass(frozen=True)
class JointOptions(RewriteOptions):
    """
    Options of `joint`: those of `RewriteOptions`; whether plans whose tokens are in striped order are searched, where
    causal attention is divided along the sequence (`pcg.striped`); whether keys and values may go around a ring there,
    if that is faster than gathering them (`plan.rings`); and whether rows of experts may be exchanged (`plan.routes`),
    at most `imbalance` times an even share to a device.
    """

    stripes: bool = True
    ring: bool = True
    exchange: bool = True
    imbalance: float | None = None


@dataclass(frozen=True)
class Joint:
    """
    Strategy `joint`: best-first search over algebraic rewrites; each candidate graph costs its optimal parallelization.
    """

    name = "joint"
    options = JointOptions

    def search(self, graph: Graph, machine: Machine, options: JointOptions, context: SearchContext) -> SearchResult:
        """
        Return the plan found that is the fastest as emitted among those that fit a device, with a lower bound on all
        placements of its graph; `options` say which rules may rewrite it, `context` has the optimizer and the progress
        callback. Where it divides causal attention along the sequence, plans of the graph in striped order, in which
        all pieces have about as many scores, are searched, too, unless `options.stripes` is false; and in the plan
        found, keys and values go around a ring if that is faster, unless `options.ring` is false. Where experts have no
        capacity, plans may exchange their rows (`search.exchange`), unless `options.exchange` is false.

        Raises `Refused`, a `UnityError`, where neither a plan found nor a baseline fits, and `KeyboardInterrupt` where
        it is ended before it has a plan that fits; `UnityError` for an imbalance below 1.
        """
        check_imbalance(options.imbalance)
        rows = most_rows(graph, machine, options.exchange, options.imbalance)
        is_small = sum(node.is_compute for node in graph.nodes()) <= limits().rival_operators
        with exchanging(rows):
            result = self._balanced(graph, machine, options, context)
        try:
            if rows and is_small and not result.interrupted:
                # Sums do not tell which of the two is overlapped more.
                with suppress(Refused):
                    gathering = self._balanced(graph, machine, options, context)
                    result = faster_gathering(result, gathering, machine, context.optimizer)
            if options.ring and not result.interrupted:
                result = _around_rings(result, machine, context.optimizer)
            if options.exchange and not result.interrupted:
                result = exchanging_rows(result, machine, context.optimizer, options.imbalance)
        except KeyboardInterrupt:
            return replace(result, interrupted=True)
        return result

    def _balanced(self, graph: Graph, machine: Machine, options: JointOptions, context: SearchContext) -> SearchResult:
        """Return the faster of the plans found for natural and for striped order."""
        rules = selected(options.rules)
        result = self._search(graph, machine, rules, options, context)
        pieces, length = causal_degree(result.graph)
        if pieces == 1 or result.interrupted or not options.stripes:
            return result
        # An unbalanced division takes less than none, so the plan of natural order has it wherever it pays.
        try:
            block = block_of(length, pieces)
            if block < KERNEL_TILE:
                return result
            order = striped(graph, pieces, block)
            # What has paid for the one order pays for the other.
            names = {step.rule for step in result.derivation}
            alike = tuple(rule for rule in rules if rule.name in names)
            found = self._search(order, machine, alike, RewriteOptions("none"), context)
            found = replace(found, derivation=(stripe_step(pieces, block), *found.derivation))
            emitted = SimulatedPlans(machine, context.optimizer)
            best = emitted.fastest([(result.graph, result.cost), (found.graph, found.cost)])
        except UnityError:
            # An operator depends on the order of tokens, or no plan fits.
            return result
        except KeyboardInterrupt:
            return replace(result, interrupted=True)
        explored = result.explored + found.explored
        return replace(result if best[0] is result.graph else found, explored=explored, interrupted=found.interrupted)

    def _search(
        self, graph: Graph, machine: Machine, rules: tuple[Rule, ...], options: RewriteOptions, context: SearchContext
    ) -> SearchResult:
        """Return what `search` does for one order of tokens, with these rules; `options` are for `sequential`."""
        optimizer = context.optimizer
        with choosing(self.name, graph, machine, optimizer, context.known) as chooser:
            search = partial(
                joint, graph, machine, rules, optimizer, progress=context.progress, explored=RewriteCache()
            )
            fastest = search(expecting=chooser.expect, least=chooser.least)
            chooser.begin(fastest)
            try:
                found = joint_within(fastest, graph, lambda solver: search(solver=solver))
            except Refused as refused:
                return chooser.best_baseline(refused, fastest)
            except KeyboardInterrupt:
                if (at_hand := chooser.at_hand(fastest)) is None:
                    raise
                return at_hand
            if found.price == 0:
                return chooser.or_exchanging(Unbounded.as_is(chooser.result(found))).or_interrupted()
            chosen = chooser.unbounded(found)
            if not chosen.result.interrupted:
                chosen = chooser.with_recompute(chosen, fastest)
            if not chosen.result.interrupted:
                # Rewrites were searched at one price of bytes only: the graph that is fastest on one device may win.
                try:
                    alone = _alone(graph, machine, options, context)
                    if alone.rewritten not in (graph, fastest.rewritten, found.rewritten):
                        plan = _sequential(graph, machine, alone, context)
                        chosen = chooser.faster(chosen, chooser.unbounded(plan))
                except Refused:
                    pass
                except KeyboardInterrupt:
                    return replace(chosen.result, interrupted=True)
            return chooser.with_bound(chooser.or_exchanging(chosen))


def _around_rings(result: SearchResult, machine: Machine, optimizer: Optimizer) -> SearchResult:
    """Return the result with attention around rings, where its plan divides sequences and is faster with them."""
    attention = (node for node in result.graph.nodes() if node.op in BACKWARD_OF)
    if not any(pieces_of_queries(node) > 1 for node in attention):
        return result
    plan = replace(result.graph, ring_attention=True)
    priced = plan, cost(plan, machine, optimizer)
    best = SimulatedPlans(machine, optimizer).fastest([(result.graph, result.cost), priced])
    return replace(result, graph=best[0], cost=best[1])


@dataclass(frozen=True)
class Sequential:
    """Strategy `sequential`: rewrite for one device first, then parallelize the result (Unity, section 6.4)."""

    name = "sequential"
    options = RewriteOptions

    def search(self, graph: Graph, machine: Machine, options: RewriteOptions, context: SearchContext) -> SearchResult:
        """
        Rewrite the graph so that it is fastest on one device; return the plan of that graph that is the fastest of
        those that fit a device's memory. `options` say which rules may rewrite it, `context` has the optimizer and the
        progress callback. Raises `Refused`, a `UnityError`, where the search finds none that fits.
        """
        with choosing(self.name, graph, machine, context.optimizer) as chooser:
            alone = _alone(graph, machine, options, context)
            return chooser.result(_sequential(graph, machine, alone, context))


def _alone(graph: Graph, machine: Machine, options: RewriteOptions, context: SearchContext) -> JointPlan:
    return rewritten_alone(graph, machine, selected(options.rules), context.optimizer, context.progress)


def _sequential(graph: Graph, machine: Machine, alone: JointPlan, context: SearchContext) -> JointPlan:
    found = sequential(graph, machine, alone, context.optimizer, context.progress)
    again = partial(joint, found.rewritten, machine, (), context.optimizer)
    return joint_within(found, found.rewritten, lambda solver: again(solver=solver))


STRATEGIES = (Joint(), Sequential())
