"""
Replay a planned step on machines that differ in figures alone: bandwidths of links and of memory, and its size.

The plan of a step is one order of tasks on streams that are first in, first out, so the time of its replay is the
longest path of a graph that no figure changes. A task takes at most as long where nothing is slower, and at least 1/r
of what it took where nothing is faster by more than r. So what a program took on one machine bounds what it takes on
others, from both sides, and most replays need not be made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import Plan, plan_graph
from unity_ir.simulate.report import peak, step_seconds
from unity_ir.simulate.stages import simulate_stages

Figures = tuple[float, ...]
"""Of which more is never slower: bytes/s of the device's memory, and of the links of each level, outermost first."""


def figures(machine: Machine) -> Figures:
    """
    Return the bandwidths by which machines of a sweep differ, in bytes/s: that of a device's memory, then that of a
    link of each level, outermost first.
    """
    return (machine.device.memory_bandwidth, *(level.bandwidth for level in machine.levels))


def slowed(slow: Figures, fast: Figures) -> float:
    """
    Return a factor f of at most 1: what takes s seconds on a machine with the bandwidths `slow` (see `figures`) takes
    at least f * s on one with `fast`. f is the least ratio of a bandwidth of `slow` to that of `fast`, or 1 if none is
    higher in `fast`. `Program.least` bounds a step by it on machines where it was not simulated.
    """
    return min(1.0, *(a / b if b else 1.0 for a, b in zip(slow, fast, strict=True)))


@dataclass(frozen=True, slots=True)
class Played:
    """The result of simulating a step on one machine: its seconds, and the peak bytes of the fullest device."""

    seconds: float
    memory: int


@dataclass
class Program:
    """
    A training step, with what it took on each machine where it was simulated: its placed graph, and the plan that is
    made of it once, at the first simulation. Methods take machines that differ from `machine` only in bandwidths and
    size of memory (with the same `grid.mesh_key`).
    """

    graph: Graph
    machine: Machine
    optimizer: Optimizer
    recipe: object
    """What it was made by."""
    rests: int = 0
    """Bytes on a device at the end of the forward, whatever the machine's figures."""
    played: dict[Figures, Played] = field(default_factory=dict[Figures, Played])
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self.rests = cost(self.graph, self.machine, self.optimizer).memory_bytes

    def least(self, on: Figures) -> float:
        """
        Return a lower bound, in seconds, of the step on a machine with the bandwidths `on` (see `figures`), from what
        it took where it was simulated before; 0 if it was not.
        """
        return max((each.seconds * slowed(at, on) for at, each in self.played.items()), default=0.0)

    def play(self, machine: Machine) -> Played:
        """
        Simulate the step on a machine; return its seconds and bytes, memoised in `played` by the machine's bandwidths.
        The first call also plans the kernels and collectives. Raises `UnityError` if no program can be made of the
        step.
        """
        at = figures(machine)
        if at not in self.played:
            if self.plan is None:
                self.plan = plan_graph(self.graph, self.machine, self.optimizer)
            if self.plan.pipeline is not None:
                staged = simulate_stages(self.plan, machine)
                seconds, most = staged.seconds, max(staged.peaks)
            else:
                seconds, timeline = step_seconds(self.plan, machine)
                most = peak(timeline)
            self.played[at] = Played(seconds, max(self.rests, most))
        return self.played[at]

    def fits(self, machine: Machine) -> bool:
        """
        Return whether the step fits the memory of a machine's devices. It is simulated (`play`), unless what a device
        holds at the end of the forward is already too much.
        """
        return self.rests <= machine.device.usable and self.play(machine).memory <= machine.device.usable


def has_program(program: Program, machine: Machine) -> bool:
    """
    Return whether a program can be made of a step for a machine, that is, whether `program.play(machine)` raises no
    `UnityError`.
    """
    try:
        program.play(machine)
    except UnityError:
        return False
    return True
