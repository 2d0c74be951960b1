"""
Plans of steps in micro-batches: the plan of one, found by any strategy, becomes that of the batch (docs/search.md,
"Micro-batches").

What is left to choose is when gradients are summed over devices: once, in the last micro-batch, or in every one, which
takes longer and holds less, as shards are accumulated (ZeRO-2). All are summed alike, but for those of weights that the
plan gathers again for the backward (ZeRO-3), which are gathered and summed in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.micro_batches import in_micro_batches
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.plan import plan_graph
from unity_ir.search.memory.lagrangian import Refused, needed
from unity_ir.search.pipeline.staged import Stages, staged
from unity_ir.search.result import SearchResult
from unity_ir.simulate.report import emitted_step

Inside = Callable[[Node], bool]
"""Whether a weight is moved, and its gradient summed, in the loop."""

Recompute = Callable[[Graph, Callable[[Graph], Graph]], Graph]
"""Given the plan of a micro-batch, and a function that makes it that of a step, returns that plan with recompute."""

TRIES = 2
"""Further searches for a plan that fits, where that of the whole batch needs more than that of a micro-batch."""

TIGHTER = 1.5
"""Bytes by which the limit of the next search is lowered, for each byte that a plan needs too many."""


def in_time(
    search: Callable[[Machine], SearchResult],
    small: Graph,
    dims: Mapping[str, int],
    micro_batches: int,
    machine: Machine,
    optimizer: Optimizer,
    is_searched: bool,
    is_each: bool,
    rivals: Callable[[], Iterable[Graph]],
    recompute: Recompute,
    stages: Stages | None = None,
) -> SearchResult:
    """
    Find a plan of one micro-batch, and return the plan of the whole step, which runs it for each of `micro_batches` in
    turn.

    `search(machine)` returns the plan found for `small`, the serial graph of one micro-batch. `is_searched` says that
    it is a search, such as `joint`, rather than a plan by a rule, such as data parallelism. `dims` has, by the name of
    an input, the number of the dim along which its samples run. `rivals()` returns further plans of one micro-batch,
    the baselines. `recompute(plan, step)` returns `plan`, of one micro-batch, with recompute added; it may call
    `step(plan)`, which returns the plan of the whole step, to see whether that fits. With `stages`, `search` plans one
    of the equal parts of `machine`, and the operators of that plan are then divided into the stages of a pipeline.

    A plan by a rule sums its gradients over devices once per step or, with `is_each`, in every micro-batch. For a
    searched plan both ways are tried, and the one that fits and is faster as emitted is taken.

    A searched plan is made for a device with less memory, since sums of gradients are held from the first micro-batch
    on. If the plan of the step still does not fit, it is searched again for still less, at most `TRIES` times. The
    step's plan is then compared with those made of `rivals`: the search for one micro-batch counts moves of weights in
    full, although a step makes them only once.

    The result has no lower bound, as the search's is that of one micro-batch; the cost of the plan of one micro-batch
    is its `of_micro_batch`. The plan may not fit: callers check. Raises `UnityError` where `search` finds none.
    """
    part = machine if stages is None else _as_one(stages.part(machine), stages.pipeline.ranks)

    def ways(plan: Graph) -> list[Graph]:
        """Return the plans of the whole batch that sum gradients at other times."""
        again = _gathered_again(plan)
        inside: list[Inside] = [lambda weight: True] if is_each or is_searched else []
        inside += [again.__contains__] if is_searched or not is_each else []
        loops = [partial(_in_loop, dims=dims, count=micro_batches, inside=way) for way in inside]
        steps = loops if stages is None else [partial(staged_step, loop=loop) for loop in loops]
        return [step(recompute(plan, step)) for step in steps]

    def staged_step(plan: Graph, loop: Callable[[Graph], Graph]) -> Graph:
        assert stages is not None
        return loop(staged(plan, stages, micro_batches, machine, optimizer))

    def whole(found: SearchResult) -> tuple[SearchResult, int]:
        """Return the plan of the whole batch, and the bytes that a device must have for it."""
        plans = ways(found.graph)
        best = min(plans, key=rank) if len(plans) > 1 else plans[0]
        priced = cost(best, machine, optimizer)
        if not is_searched:
            plan_graph(best, machine, optimizer)  # it may turn out that it has no program
        of_step = replace(found, graph=best, cost=priced, bound=None, proved=None, of_micro_batch=found.cost)
        return of_step, needed(best, priced, optimizer)

    @cache
    def rank(plan: Graph) -> tuple[bool, float]:
        return _rank(plan, machine, optimizer)

    reserve = _gradients(small) // part.devices if is_searched else 0
    try:
        found = search(_with_less(part, reserve))
    except Refused as refused:
        # Kernels may add to the sums of gradients in place, so that a micro-batch needs none of its own.
        try:
            found = search(part)
        except UnityError:
            raise refused from None
    best, need = whole(found)
    for _ in range(TRIES):
        if need <= machine.device.usable or not is_searched:
            break
        reserve += int(TIGHTER * (need - machine.device.usable))
        with suppress(UnityError):
            found = whole(search(_with_less(part, reserve)))
            best, need = min((best, need), found, key=lambda each: each[1])
    if not is_searched:
        return best
    others = [plan for rival in rivals() for plan in ways(rival)]
    fastest = min((best.graph, *others), key=rank)
    if fastest == best.graph:
        return best
    return replace(best, graph=fastest, cost=cost(fastest, machine, optimizer), derivation=(), joint=None)


def _as_one(part: Machine, ranks: int) -> Machine:
    """Return a part of a machine with the memory of as many: a stage has that part of the model's weights."""
    device = part.device
    return replace(part, device=replace(device, memory=ranks * device.memory, reserve=ranks * device.reserve))


def _in_loop(plan: Graph, dims: Mapping[str, int], count: int, inside: Inside) -> Graph:
    return in_micro_batches(plan, dims, count, inside)


def _gradients(graph: Graph) -> int:
    """Return the bytes of the gradients of all trained weights, in the types in which they are summed."""
    trained = (n.types[0] for n in graph.weights() if n.is_trained)
    return sum(type.elements * ELEMENT_BYTES[type.grad_dtype] for type in trained)


def _with_less(machine: Machine, reserve: int) -> Machine:
    """Return the machine with `reserve` bytes more in reserve per device, so that a plan may take 1 byte at least."""
    if reserve == 0:
        return machine
    device = machine.device
    return replace(machine, device=replace(device, reserve=min(device.reserve + reserve, device.memory - 1)))


def _rank(plan: Graph, machine: Machine, optimizer: Optimizer) -> tuple[bool, float]:
    """Return a key by which plans that fit come first, the fastest of them first, and of others the smallest."""
    found = emitted_step(plan, machine, optimizer)
    seconds, peak = found.least, found.peak
    fits = max(peak, needed(plan, cost(plan, machine, optimizer), optimizer)) <= machine.device.usable
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
