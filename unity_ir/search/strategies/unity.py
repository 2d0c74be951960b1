"""Define `unity`: Unity's three-level search as in its paper (section 5)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.rules.algebraic import COMMON, selected
from unity_ir.search.result import SearchResult
from unity_ir.search.strategy import SearchContext
from unity_ir.search.unity.search import Options, unity


@dataclass(frozen=True)
class UnityOptions(Options):
    """Options of `unity`: those of `search.unity.search.Options`, and which algebraic rules may rewrite the graph."""

    rules: str = COMMON
    """`common`, `library`, `common+my_rules.pcg`, ..: see `rules.algebraic`."""


@dataclass(frozen=True)
class Unity:
    """
    Strategy `unity`: best-first search over substitutions, machine mapping by dynamic programming, graph splitting.
    """

    name = "unity"
    options = UnityOptions

    def search(self, graph: Graph, machine: Machine, options: UnityOptions, context: SearchContext) -> SearchResult:
        """
        Return the plan that Unity's search finds, which may not fit the memory; `options` are those of
        `--search=unity`, `context` has the optimizer and the progress callback.
        """
        own = Options(**{f.name: getattr(options, f.name) for f in fields(Options)})
        once = 1 / context.micro_batches
        found = unity(graph, machine, selected(options.rules), context.optimizer, own, context.progress, once)
        priced = cost(found.graph, machine, context.optimizer)
        return SearchResult(self.name, found.graph, priced, found.derivation, explored=found.explored)


STRATEGIES = (Unity(),)
