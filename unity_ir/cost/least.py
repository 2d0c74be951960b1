"""
Bound the emitted time of all placements of a graph from below.

The kernels of a step are tasks on `D` devices, each on any number `S` of them, with a least time `t(S)` (`cost.floors`):

- All devices have to do all work, `W = sum of min over S of S t(S)`, so the step takes at least `W / D`.
- Operators on a path, where each reads the one before, follow each other: it takes at least `sum of min over S of t(S)`.

Both have a part on the same devices: a task of a path that takes little of the device's time takes long. For every
weight `a` between 0 and 1, the step takes at least `a` times its work and `1 - a` times its path, so

    sum over the path of  min over S of  (1 - a) t(S) + a S t(S) / D
    + sum over all others of  a min over S of  S t(S) / D

The bound is the most of these over some weights, and for each over all paths (Lagrange multipliers of the two limits;
Brent's bounds of work and of the critical path are those of `a` = 1 and 0). On a path, reductions and gathers between
two contractions are one kernel, which is as long as the longest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from unity_ir.cost.floors import Floor, Floors, Operand, Term
from unity_ir.cost.plan import update_bytes
from unity_ir.machine.device import Device
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph, Node, Optimizer, Update, Value, erase
from unity_ir.pcg.types import ELEMENT_BYTES

Floats = npt.NDArray[np.float64]

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.997, 1.0)
"""
Weights of the work, of which the best counts. Near 1, all of the work off the path counts, and the launches of large
operators on it, too, as long as these lose more by taking fewer devices.
"""


def emitted_bound(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> float:
    """
    Return a lower bound in seconds on one emitted training step of `graph` (with `optimizer`, or else SGD, if the graph
    names none), for any plan of it on all or part of `machine`: any placement, groups, order, and saved values.

    It counts the FLOPs of all operators, what contractions, reductions and gathers on the critical path have to read
    and write, their launches, and the optimizer's updates; an operator takes no more devices than its sizes can be
    divided among. Communication counts nothing. Of a device with measured kernels only the peaks are taken to hold.
    """
    serial = erase(graph)
    optimizer = graph.optimizer or optimizer or Optimizer()
    step = serial if serial.updates else training_step(serial, optimizer)
    return _Tasks(step, machine, optimizer).bound()


class _Tasks:
    """The kernels of a serial step, and their least seconds on each number of devices."""

    def __init__(self, step: Graph, machine: Machine, optimizer: Optimizer):
        self.machine = machine
        self.sizes = sorted({prod(of) for of in product(*((1, size) for size in machine.mesh.sizes))})
        """The numbers of devices that an operator may be on."""
        self.floors = Floors(step, machine.device, machine.devices)
        self.known: dict[Floor, Floats] = {}
        self.nodes = self.floors.nodes
        self.kernels: Mapping[Node, Floats] = {
            n: self._seconds(self.floors.floor(n))
            for n in self.nodes
            if self.floors.is_contraction(n) or self.floors.is_rows(n)
        }
        """Least seconds [number of devices] of contractions, reductions and gathers."""
        self.updates = [(u, self._seconds(_update(u, optimizer, machine.device))) for u in step.updates]

    def bound(self) -> float:
        """Return the bound in seconds."""
        return max(self._arithmetic(), *(self._weighted(weight) for weight in WEIGHTS))

    def _seconds(self, floor: Floor) -> Floats:
        if floor not in self.known:
            self.known[floor] = np.array([floor.seconds(size, self.machine.device) for size in self.sizes])
        return self.known[floor]

    def _work(self, seconds: Floats) -> float:
        """Return the least seconds of a kernel if its work is spread evenly over all devices."""
        return float((seconds * self.sizes).min()) / self.machine.devices

    def _arithmetic(self) -> float:
        """Return the seconds of all FLOPs, those of pointwise operators included, and of the updates."""
        device = self.machine.device
        if device.curves and device.profile is None:
            return 0.0
        reached = 1.0 if device.profile is not None else device.efficiency
        seconds = sum(flops / peak for flops, peak in map(self.floors.arithmetic, self.nodes) if flops)
        return seconds / reached / self.machine.devices + sum(self._work(seconds) for _, seconds in self.updates)

    def _weighted(self, weight: float) -> float:
        """Return the bound for one weight of the work."""
        shares = (1 - weight) + weight * np.array(self.sizes) / self.machine.devices
        costs = {id(s): (float((s * shares).min()), weight * self._work(s)) for s in self.known.values()}
        total = 0.0
        reached: dict[Value, tuple[float, float]] = {}
        """For each value, the seconds of the longest path to the last contraction on it, and of the kernel since."""
        longest = 0.0
        for node in self.nodes:
            at = max((reached[v] for v in node.operands if v in reached), key=sum, default=(0.0, 0.0))
            if node in self.kernels:
                on, off = costs[id(self.kernels[node])]
                if self.floors.is_contraction(node):
                    total += off
                    at = (sum(at) + on - off, 0.0)
                else:
                    at = (at[0], max(at[1], on))
            reached.update(dict.fromkeys(node.results, at))
            longest = max(longest, sum(at))
        for update, seconds in self.updates:
            on, off = costs[id(seconds)]
            total += off
            longest = max(longest, sum(reached.get(update.grad, (0.0, 0.0))) + on - off)
        return total + longest


def _update(update: Update, optimizer: Optimizer, device: Device) -> Floor:
    """Return the floor of the optimizer's update of a weight."""
    node = update.weight.node
    elements = update.weight.type.elements
    moved = update_bytes(elements * ELEMENT_BYTES[node.master], optimizer)
    term = Term(moved, update.weight.shape)
    peak = device.peak(node.master)
    return Floor(4.0 * elements, peak, update.weight.shape, (Operand(term, float("inf")),), (), ("elementwise",))
