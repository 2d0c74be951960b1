"""
Define the strategies that make one plan without a search over graphs: baselines, Tofu with its variants, and a random
plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.baselines.data_parallel import data_parallel, fsdp
from unity_ir.search.baselines.expert import expert
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.result import SearchResult
from unity_ir.search.strategy import NoOptions, SearchContext
from unity_ir.search.tofu.search import VARIANTS, tofu


@dataclass(frozen=True)
class RandomOptions:
    """Options of `random`: the seed from which the plan is drawn."""

    seed: int = 0


@dataclass(frozen=True)
class ExpertOptions:
    """
    Options of `expert`: whether plans may be of a rewritten graph, in which the heads of fused query-key-value products
    and the classes of the loss can be sharded.
    """

    rewrite: bool = True


@dataclass(frozen=True)
class HybridOptions:
    """
    Options of `hsdp`: among how many neighbouring devices weights are sharded, by default those of a node (the
    innermost level of the machine).
    """

    shards: int | None = None


@dataclass(frozen=True)
class MegatronOptions:
    """
    Options of `megatron`: the degree of tensor parallelism, by default the devices of a node; whether activations
    between tensor-parallel regions are sharded along the sequence.
    """

    tp: int | None = None
    sp: bool = False


@dataclass(frozen=True)
class OnePlan:
    """A strategy that returns the one plan that its function `make` makes, such as a baseline, without a search."""

    name: str
    make: Callable[[Graph, Machine, Optimizer, Any], Graph]
    """Given a serial graph, a machine, an optimizer and the options, returns the plan."""
    options: type[Any] = NoOptions
    sums_each: Callable[[Any], bool] = lambda options: False
    """Given the options, returns whether gradients are summed over devices in every micro-batch, not once per step."""

    def search(self, graph: Graph, machine: Machine, options: Any, context: SearchContext) -> SearchResult:
        """
        Return the plan that `make` makes of a serial graph, with its cost; nothing is searched. `options` is an object
        of this strategy's class `options`; `context` has the optimizer the plan is for. Raises `UnityError` where it
        has no plan for this graph and machine.
        """
        plan = self.make(graph, machine, context.optimizer, options)
        return SearchResult(self.name, plan, cost(plan, machine, context.optimizer))


def _always(options: object) -> bool:
    del options
    return True


def _tofu(variant: str) -> OnePlan:
    return OnePlan(variant, lambda graph, machine, _optimizer, _options: tofu(graph, machine, variant))


def _hsdp(graph: Graph, machine: Machine, _: Optimizer, options: HybridOptions) -> Graph:
    degrees = Degrees(zero=2, shards=options.shards or _of_a_node(machine))
    return recipe(graph, machine, degrees, "hsdp")


def _megatron(graph: Graph, machine: Machine, _: Optimizer, options: MegatronOptions) -> Graph:
    degrees = Degrees(tp=options.tp or _of_a_node(machine), sp=options.sp)
    return recipe(graph, machine, degrees, "megatron")


def _of_a_node(machine: Machine) -> int:
    """Return the number of devices of the innermost level."""
    levels = machine.axis_levels
    return prod(size for size, level in zip(machine.mesh.sizes, levels, strict=True) if level == levels[-1])


STRATEGIES = (
    OnePlan("data-parallel", lambda graph, machine, _optimizer, _options: data_parallel(graph, machine)),
    OnePlan("fsdp", lambda graph, machine, _optimizer, _options: fsdp(graph, machine), sums_each=_always),
    OnePlan(
        "expert",
        lambda graph, machine, optimizer, options: expert(graph, machine, optimizer, rewrite=options.rewrite),
        ExpertOptions,
    ),
    OnePlan(
        "degrees",
        lambda graph, machine, _optimizer, degrees: recipe(graph, machine, degrees),
        Degrees,
        lambda degrees: degrees.zero >= 2,
    ),
    OnePlan("zero1", lambda graph, machine, _optimizer, _options: recipe(graph, machine, Degrees(zero=1), "zero1")),
    OnePlan(
        "zero2",
        lambda graph, machine, _optimizer, _options: recipe(graph, machine, Degrees(zero=2), "zero2"),
        sums_each=_always,
    ),
    OnePlan(
        "zero3",
        lambda graph, machine, _optimizer, _options: recipe(graph, machine, Degrees(zero=3), "zero3"),
        sums_each=_always,
    ),
    OnePlan("hsdp", _hsdp, HybridOptions, _always),
    OnePlan("megatron", _megatron, MegatronOptions),
    *map(_tofu, VARIANTS),
    OnePlan("random", lambda graph, machine, _, options: sample(graph, machine, options.seed), RandomOptions),
)
