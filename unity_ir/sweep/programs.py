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
    """Return a machine's figures: bytes/s of the device's memory, then of a link of each level, outermost first."""
    return (machine.device.memory_bandwidth, *(level.bandwidth for level in machine.levels))


def slowed(slow: Figures, fast: Figures) -> float:
    """
    Return a factor f of at most 1: what takes s seconds on a machine with figures `slow` takes at least f * s where
    they are `fast`. It is the least ratio of a figure of `slow` to that of `fast`; 1 if `fast` is nowhere faster.
    """
    return min(1.0, *(a / b if b else 1.0 for a, b in zip(slow, fast, strict=True)))


@dataclass(frozen=True, slots=True)
class Played:
    """A step on a machine: seconds, and the most bytes that a device holds."""

    seconds: float
    memory: int


@dataclass
class Program:
    """
    The program of a step: its placed graph, planned at most once, and what the step took on each machine where it was
    replayed. Methods take machines whose mesh (`grid.mesh_key`) is that of `machine`.
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
        Return a lower bound in seconds on the step on a machine with the figures `on`, from where it was replayed
        before; 0 if nowhere.
        """
        return max((each.seconds * slowed(at, on) for at, each in self.played.items()), default=0.0)

    def play(self, machine: Machine) -> Played:
        """
        Return what the step takes on a machine: planned and replayed on the first call, memoised in `played` by the
        machine's figures. Raises `UnityError` if no program can be made.
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
        Return whether the step fits the memory of a machine's devices; it is replayed (`play`) if what it holds at the
        end of the forward does.
        """
        return self.rests <= machine.device.usable and self.play(machine).memory <= machine.device.usable


def has_program(program: Program, machine: Machine) -> bool:
    """
    Return whether a program can be made of a step: whether `program.play(machine)`, which is memoised, raises no
    `UnityError`.
    """
    try:
        program.play(machine)
    except UnityError:
        return False
    return True
