"""Strategies by name."""

from __future__ import annotations

from time import perf_counter

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer, erase
from unity_ir.rules.algebraic import algebraic
from unity_ir.search.data_parallel import data_parallel, fsdp
from unity_ir.search.expert import expert
from unity_ir.search.joint import Progress, joint
from unity_ir.search.mcmc import Settings, mcmc
from unity_ir.search.portfolio import fastest_by_hand
from unity_ir.search.result import SearchResult
from unity_ir.search.sample import sample
from unity_ir.search.sequential import sequential
from unity_ir.search.tofu import VARIANTS, tofu
from unity_ir.search.unity import Options, unity

STRATEGIES = ("joint", "unity", "sequential", "data-parallel", "fsdp", "expert", "mcmc", *VARIANTS, "random")


def run(
    graph: Graph,
    machine: Machine,
    strategy: str = "joint",
    optimizer: Optimizer | None = None,
    progress: Progress | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    options: Options | None = None,
) -> SearchResult:
    """
    Search for a parallel graph that computes what `graph` does, for a machine.

    A graph that is already parallel is searched from its erasure; `seed` is for the random strategy, `settings` are for
    mcmc, `options` for Unity's. Raises `UnityError` for an unknown strategy, a graph that already has its backward, and
    plans that do not fit the machine's memory.
    """
    if strategy not in STRATEGIES:
        raise UnityError(f"search: unknown strategy {strategy!r}; known are {', '.join(STRATEGIES)}")
    if graph.updates:
        raise UnityError(f"func.func @{graph.name}: search before pcg-differentiate, not after it")
    optimizer = optimizer or Optimizer()
    start = perf_counter()
    serial = erase(graph)
    if strategy == "mcmc":
        best = mcmc(serial, machine, optimizer, settings or Settings(seed=seed), progress)
        explored = sum(chain.proposed for chain in best.chains)
        priced = cost(best.graph, machine, optimizer)
        result = SearchResult(strategy, best.graph, priced, explored=explored, seconds=perf_counter() - start)
    elif strategy == "unity":
        chosen = unity(serial, machine, algebraic(), optimizer, options, progress)
        result = SearchResult(
            strategy,
            chosen.graph,
            cost(chosen.graph, machine, optimizer),
            chosen.derivation,
            explored=chosen.explored,
            seconds=perf_counter() - start,
        )
    elif strategy not in ("joint", "sequential"):
        parallel = _plan(serial, machine, strategy, optimizer, seed)
        result = SearchResult(strategy, parallel, cost(parallel, machine, optimizer), seconds=perf_counter() - start)
    else:
        search = joint if strategy == "joint" else sequential
        found = search(serial, machine, algebraic(), optimizer, progress=progress)
        parallel, priced = found.graph, cost(found.graph, machine, optimizer)
        if found.bound is None:
            parallel, priced = fastest_by_hand(found.rewritten, machine, optimizer, priced) or (parallel, priced)
        result = SearchResult(
            strategy,
            parallel,
            priced,
            found.derivation,
            found.bound,
            found.explored,
            perf_counter() - start,
        )
    over = result.cost.memory_bytes - machine.device.memory
    if over > 0:
        raise UnityError(
            f"search: the plan found needs {result.cost.memory_bytes / 1e9:.2f} GB per device, "
            f"{over / 1e9:.2f} GB more than {machine.device.name} has; use more devices or a smaller batch"
        )
    return result


def _plan(serial: Graph, machine: Machine, strategy: str, optimizer: Optimizer, seed: int) -> Graph:
    """The plan of a strategy that makes one at once."""
    match strategy:
        case "random":
            return sample(serial, machine, seed)
        case "data-parallel":
            return data_parallel(serial, machine)
        case "fsdp":
            return fsdp(serial, machine)
        case "expert":
            return expert(serial, machine, optimizer)
        case _:
            return tofu(serial, machine, strategy)
