"""Simulate the plan of a graph's training step: its seconds, and the bytes that a device holds at once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

from unity_ir.cost.kernels import step_bytes
from unity_ir.cost.least import emitted_bound
from unity_ir.cost.stats import Simulated
from unity_ir.cost.throughput import throughput_lines
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.moves import MachineKey
from unity_ir.plan.plan import Plan, plan_graph
from unity_ir.simulate.buckets import FASTER, sizes, with_bucket
from unity_ir.simulate.full import Timeline, simulate
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.replay import replay
from unity_ir.simulate.stages import StagedStep, simulate_stages

SecondsAndPeak = tuple[float, int]
"""Seconds of a simulated step as emitted, and the most bytes that a device holds at once."""

PLAYED = 3
"""
Micro-batches that are played one by one: the first with what runs once before, the last with what runs once after, and
one between, as which each further one is.
"""


def step_seconds(plan: Plan, machine: Machine, overlap: bool = True) -> tuple[float, Timeline]:
    """
    Return (seconds, timeline) of a simulated step that is not in stages. The timeline is that of the first `PLAYED`
    micro-batches, or of all if there are no more; the seconds are of the whole step, in which each further micro-batch
    takes as long as the last simulated one adds. Without `overlap`, every move is waited for at once.
    """
    count = plan.program.micro_batches
    timeline = simulate(replay(plan, machine, overlap, micro_batches=PLAYED))
    if count <= PLAYED:
        return timeline.seconds, timeline
    fewer = simulate(replay(plan, machine, overlap, micro_batches=PLAYED - 1))
    return timeline.seconds + (count - PLAYED) * (timeline.seconds - fewer.seconds), timeline


def shown_step(graph: Graph, machine: Machine) -> tuple[Plan, Timeline]:
    """
    Return (plan, timeline) of the training step of a placed graph (one with machine views) as it is emitted, for
    pictures. The timeline is that of the first `PLAYED` micro-batches; for a step in stages, it shows what each rank of
    the pipeline runs when.
    """
    if graph.pipeline is not None:
        plan, staged = _in_stages(graph, MachineKey(machine), graph.optimizer)
        return plan, staged.timeline()
    plan = plan_graph(graph, machine)
    return plan, step_seconds(plan, machine)[1]


def simulated(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> Simulated:
    """
    Plan and simulate one iteration of the training step of a placed graph (one with machine views) as it is emitted,
    and return what `--stats` prints of it: seconds with communication overlapped, and with every move waited for; the
    peak memory in bytes on a device; numbers of launches, collectives and their copies, and the bytes moved; and two
    lower bounds in seconds (0 for a step in stages, for which there are none). `optimizer` is used if the graph names
    none.
    """
    if graph.pipeline is not None:
        plan, staged = _in_stages(graph, MachineKey(machine), graph.optimizer or optimizer)
        counts = plan.launches, plan.collectives, plan.copy_kernels, step_bytes(plan)
        waiting = simulate_stages(plan, machine, overlap=False)
        peaks = max(staged.peaks)
        lines = throughput_lines(graph, machine, staged.seconds)
        return Simulated(
            staged.seconds, waiting.seconds, peaks, *counts, 0.0, 0.0, pipeline=staged.lines, throughput=lines
        )
    plan = plan_graph(graph, machine, optimizer)
    counts = plan.launches, plan.collectives, plan.copy_kernels, step_bytes(plan)
    seconds, timeline = step_seconds(plan, machine)
    waiting, _ = step_seconds(plan, machine, overlap=False)
    bounds = (emitted_bound(graph, machine, optimizer, everywhere) for everywhere in (False, True))
    lines = throughput_lines(graph, machine, seconds)
    copied = plan.bytes_of_copies("to_host"), plan.bytes_of_copies("from_host")
    return Simulated(seconds, waiting, peak(timeline), *counts, *bounds, copied=copied, throughput=lines)


def peak(timeline: Timeline) -> int:
    """Return the most bytes that any device holds at once in a simulated iteration."""
    return max(held_over_time(timeline, k).peak for k in range(timeline.tasks.streams.classes))


def as_emitted(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> SecondsAndPeak:
    """
    Return (seconds, peak bytes) of one simulated iteration of the training step of a placed graph (one with machine
    views), as it is emitted: with communication beside kernels. Peak bytes are the most that a device holds at once.
    Memoised.

    `optimizer` is used if the graph names none.
    """
    found = emitted_step(graph, machine, optimizer)
    return found.seconds, found.peak


@dataclass(frozen=True, slots=True)
class EmittedStep:
    """
    A simulated step as emitted: its `seconds`, and the most bytes that a device holds at once (`peak`); the size of
    buckets with which it is fastest, of those tried (`bucket`), and the seconds with it (`least`).
    """

    seconds: float
    peak: int
    bucket: int
    least: float


def emitted_step(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> EmittedStep:
    """Return what `as_emitted` does, and with which size of buckets (`simulate.buckets`) the step would be fastest."""
    return _emitted_step(graph, MachineKey(machine), optimizer)


def fastest_seconds(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> float:
    """Return the seconds of a step as emitted with the size of buckets with which it is fastest."""
    return emitted_step(graph, machine, optimizer).least


def with_best_bucket(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> Graph:
    """
    Return the graph with the size of buckets with which its step is fastest as emitted; as it is if it has one, is in
    stages, or is on a machine where no other size is tried. Raises `UnityError` where `as_emitted` does.
    """
    if graph.bucket or graph.pipeline is not None or not sizes(machine):
        return graph
    return replace(graph, bucket=emitted_step(graph, machine, optimizer).bucket)


@contextmanager
def simulated_beside(
    machine: Machine, optimizer: Optimizer | None
) -> Generator[Callable[[Graph, Callable[[], EmittedStep]], None]]:
    """
    Yield a function that takes a placed graph, and a function that waits for another process to simulate it: within the
    `with` statement, `emitted_step` returns what that does, for the same machine and optimizer.
    """
    expected: list[tuple[Graph, MachineKey, Optimizer | None]] = []

    def expect(graph: Graph, answer: Callable[[], EmittedStep]) -> None:
        expected.append((graph, MachineKey(machine), optimizer))
        _BESIDE.setdefault(expected[-1], answer)

    try:
        yield expect
    finally:
        for each in expected:
            _BESIDE.pop(each, None)


_BESIDE: dict[tuple[Graph, MachineKey, Optimizer | None], Callable[[], EmittedStep]] = {}
"""The functions that wait for graphs which another process simulates, by the arguments of `_emitted_step`."""


@lru_cache(maxsize=256)
def _emitted_step(graph: Graph, machine: MachineKey, optimizer: Optimizer | None) -> EmittedStep:
    answer = _BESIDE.pop((graph, machine, optimizer), None)
    if answer is not None:
        return answer()
    if graph.pipeline is not None:
        _, staged = _in_stages(graph, machine, graph.optimizer or optimizer)
        return EmittedStep(staged.seconds, max(staged.peaks), graph.bucket, staged.seconds)
    on = machine.machine
    plan = plan_graph(graph, on, optimizer)
    seconds, timeline = step_seconds(plan, on)
    most, bucket, least = peak(timeline), graph.bucket, seconds
    before = plan.schedule
    for size in [] if graph.bucket else sizes(on):
        other = with_bucket(plan, size)
        if other.schedule == before:
            # Each member fills it alone; a larger one may hold several.
            continue
        before = other.schedule
        found, timeline = step_seconds(other, on)
        if found >= least * FASTER or peak(timeline) > max(most, on.device.usable):
            break
        bucket, least = size, found
    return EmittedStep(seconds, most, bucket, least)


@lru_cache(maxsize=1)
def _in_stages(graph: Graph, machine: MachineKey, optimizer: Optimizer | None) -> tuple[Plan, StagedStep]:
    """Return the plan of a step in stages, simulated as emitted: what a search has found is what is reported next."""
    plan = plan_graph(graph, machine.machine, optimizer)
    return plan, simulate_stages(plan, machine.machine)
