"""
Plans of steps in micro-batches: the plan of one, found by any strategy, becomes that of the batch (docs/search.md,
"Micro-batches").

What is left to choose is where weights are moved: once, before the loop, or in every micro-batch, which takes longer
and holds less; their gradients are summed over devices likewise. All weights are moved alike, but for those that the
plan gathers again for the backward (ZeRO-3), which are gathered in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Node, Optimizer
from unity_ir.pcg.micro_batches import in_micro_batches
from unity_ir.search.baselines.batch_dims import batch_dims
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.result import SearchResult
from unity_ir.simulate.report import as_emitted

Inside = Callable[[Node], bool]
"""Whether a weight is moved in every micro-batch."""


def sample_dims(graph: Graph) -> Mapping[str, int]:
    """Return, for each input that has samples, by name, the dim along which they run."""
    return {value.node.name: dim for value, dim in batch_dims(graph).items()}


def of_whole_batch(
    found: SearchResult,
    dims: Mapping[str, int],
    micro_batches: int,
    machine: Machine,
    optimizer: Optimizer,
    is_searched: bool,
) -> SearchResult:
    """
    Return the plan of a whole batch that runs the plan `found`, of one of its `micro_batches`, for each in turn.

    Weights are moved once per step; a plan that `is_searched`, and not one made by a rule, moves them in every
    micro-batch where that is faster as emitted, or where only that fits. Bounds of `found` are of one micro-batch and
    are dropped. Raises `UnityError` where an operator needs several micro-batches at once.
    """
    again = _gathered_again(found.graph)
    ways: list[Inside] = [again.__contains__]
    if is_searched:
        ways.append(lambda weight: True)
    plans = [in_micro_batches(found.graph, dims, micro_batches, way) for way in ways]
    best = min(plans, key=lambda plan: _rank(plan, machine, optimizer)) if len(plans) > 1 else plans[0]
    return replace(found, graph=best, cost=cost(best, machine, optimizer), bound=None, proved=None)


def _rank(plan: Graph, machine: Machine, optimizer: Optimizer) -> tuple[bool, float]:
    """Return a key by which plans that fit come first, the fastest of them first, and of others the smallest."""
    seconds, peak = as_emitted(plan, machine, optimizer)
    fits = max(peak, needed(plan, cost(plan, machine, optimizer), optimizer)) <= machine.device.memory
    return not fits, seconds if fits else float(peak)


def _gathered_again(plan: Graph) -> set[Node]:
    """Return the weights of which what is moved is not kept for the backward."""
    found: set[Node] = set()
    for node in plan.nodes():
        if node.op == "recompute":
            value = node.operands[0]
            while value.node.is_parallel:
                value = value.node.operands[0]
            if value.node.op == "weight":
                found.add(value.node)
    return found
