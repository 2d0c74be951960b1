"""Price and simulate a plan: what `--stats` prints, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from unity_ir import machine as machines
from unity_ir.cost import stats
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.cost.stats import Simulated
from unity_ir.cost.throughput import throughput
from unity_ir.dialects.certificate import Certificate, certificate_of
from unity_ir.dialects.convert import to_graph
from unity_ir.dialects.machine import module_machine
from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import devices_of
from unity_ir.simulate.report import simulated


@dataclass(frozen=True, slots=True)
class Stats:
    """
    What one iteration of a plan's training step costs on its machine. Printed, it is the table of `unity-opt --stats`.
    """

    seconds: float
    """Simulated seconds of an iteration as emitted: communication runs beside kernels."""
    waiting: float
    """Simulated seconds if every move is waited for at once."""
    time: float
    """Seconds of all kernels and moves one after the other (`compute` + `communication`), which searches minimise."""
    compute: float
    """Seconds of all kernels on a device, the optimizer's update included."""
    communication: float
    """Seconds of all moves between devices."""
    moved: int
    """Bytes received in moves in an iteration, over all devices."""
    memory: Mapping[str, int]
    """Bytes on a device at the end of the forward, by kind: weights, gradients, optimizer state, activations."""
    peak: int
    """Most bytes that a device holds at once."""
    usable: int
    """Bytes of a device that a plan may use; a plan whose `peak` is above does not fit."""
    devices: int
    """How many devices the machine has."""
    tokens_per_second: float | None
    """Tokens of all devices per second; None of a model without an input of ids, and of a graph with its backward."""
    samples_per_second: float | None
    """Samples of all devices per second; None of models that count tokens, and of a graph with its backward."""
    mfu: float | None
    """
    Model FLOPs utilization: the part, from 0 to 1, of the devices' dense peak that the model's FLOPs take
    (`cost.throughput`); None of a graph with its backward, and where the peak is not known.
    """
    bound: float | None
    """Lower bound in seconds that the search has proved of `time`, for any placement of the graph; None without one."""
    gap: float | None
    """How far the plan's `time` is above the bound, as a fraction; None where the bound is not of plans like this."""
    launches: int
    """Kernels launched on a device in its forward and backward."""
    collectives: int
    """Collective calls of a device in an iteration."""
    head: str = field(repr=False)
    """The lines of `unity-opt --stats` above its table."""
    text: str = field(repr=False)
    """The table of `unity-opt --stats`."""

    def __str__(self) -> str:
        return self.text

    @property
    def fits(self) -> bool:
        """
        Whether a device has the memory that the plan needs: the simulated `peak`, or the bytes at the end of the
        forward (the sum of `memory`), whichever is more.
        """
        return max(self.peak, sum(self.memory.values())) <= self.usable


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan to compare or report: its placed graph, its machine, and what an iteration takes."""

    graph: Graph
    machine: Machine
    stats: Stats


def machine_of(module: ModuleOp, graph: Graph, name: str | None = None) -> Machine:
    """
    Return the machine on which to price `graph`, a function of `module`: the machine called `name`, or, if that is
    None, the one that the module names. If the module names none, it is a machine of one level (`box`) with as many
    devices as the graph uses.

    Raises `UnityError` for an unknown machine.
    """
    said = machines.load(name) if name else module_machine(module)
    return said or machines.load(f"box:{devices_of(graph)}")


def stats_of(module: ModuleOp, func: FuncOp, machine: str | None = None, optimizer: Optimizer | None = None) -> Stats:
    """
    Price and simulate a plan, a function of `module`, on the machine called `machine` (None: as `machine_of` chooses).
    `optimizer` is the one to train with, used if the function has no updates. Raises `UnityError` where the graph does
    not fit the machine.
    """
    return compared(module, func, machine, optimizer).stats


def compared(
    module: ModuleOp, func: FuncOp, machine: str | None = None, optimizer: Optimizer | None = None
) -> Compared:
    """
    Price and simulate a plan, a function of `module`, with the arguments of `stats_of`; return its graph, machine and
    stats, from which plans are compared and reports written.
    """
    graph = to_graph(func)
    if not graph.updates and optimizer is not None:
        graph = replace(graph, optimizer=optimizer)
    found = machine_of(module, graph, machine)
    return Compared(graph, found, priced(graph, cost(graph, found), certificate_of(func)))


def priced(graph: Graph, plan: PlanCost, certificate: Certificate | None = None) -> Stats:
    """
    Simulate a placed graph whose cost is `plan`, on the machine of `plan`; return the costs and the simulation as
    stats. `certificate` has the derivation and the lower bound that its search recorded, None if there are none.
    """
    said = certificate or Certificate()
    run = simulated(graph, plan.machine)
    derivation = None if said.derivation is None else list(said.derivation)
    head = stats.head(graph.name, plan, derivation, said.bound, run, said.pipelines, said.unproved, said.ties)
    return _numbers(graph, plan, run, said, head)


def _numbers(graph: Graph, plan: PlanCost, run: Simulated, said: Certificate, head: str) -> Stats:
    machine = plan.machine
    speed = throughput(graph, machine, run.overlapped)
    rate = 0.0 if speed is None else speed.rate * machine.devices
    return Stats(
        seconds=run.overlapped,
        waiting=run.waiting,
        time=plan.time,
        compute=plan.compute_time,
        communication=plan.communication_time,
        moved=plan.bytes,
        memory=dict(plan.memory),
        peak=run.peak,
        usable=machine.device.usable,
        devices=machine.devices,
        tokens_per_second=rate if speed is not None and speed.unit == "tokens" else None,
        samples_per_second=rate if speed is not None and speed.unit == "samples" else None,
        mfu=None if speed is None else speed.mfu,
        bound=said.bound or None,
        gap=stats.gap(plan, said.bound, said.pipelines),
        launches=run.launches,
        collectives=run.collectives,
        head=head,
        text=head + stats.table(plan),
    )
