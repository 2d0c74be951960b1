"""Define `mcmc`: FlexFlow's search (section 6), on the delta simulator."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.search.flexflow.mcmc import Settings, mcmc
from unity_ir.search.result import SearchResult
from unity_ir.search.strategy import SearchContext


@dataclass(frozen=True)
class McmcOptions:
    """Options of `mcmc` that users may set: a subset of `flexflow.mcmc.Settings`."""

    beta: float = Settings.beta
    """Weight of a slowdown relative to an operator's mean time in the best plan: higher accepts fewer."""
    budget: int = Settings.budget
    """Proposals over all chains."""
    seed: int = 0


@dataclass(frozen=True)
class Mcmc:
    """
    Strategy `mcmc` (FlexFlow, section 6): Metropolis-Hastings over the sharding and placement of single operators.
    """

    name = "mcmc"
    options = McmcOptions

    def search(self, graph: Graph, machine: Machine, options: McmcOptions, context: SearchContext) -> SearchResult:
        """
        Return the plan with the least simulated time of all chains, which may not fit the memory; `options` are those
        of `--search=mcmc`, `context` has the optimizer and the progress callback.
        """
        settings = Settings(beta=options.beta, budget=options.budget, seed=options.seed)
        best = mcmc(graph, machine, context.optimizer, settings, context.progress)
        return SearchResult(
            self.name,
            best.graph,
            cost(best.graph, machine, context.optimizer),
            explored=sum(chain.proposed for chain in best.chains),
            interrupted=any(chain.interrupted for chain in best.chains),
        )


STRATEGIES = (Mcmc(),)
