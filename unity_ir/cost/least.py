"""
Bound the emitted time of all placements of a graph from below.

The kernels of a step are tasks on `D` devices, each on some number `S` of them, with a least time `t(S)`
(`cost.floors`):

- All devices have to do all work, `sum of min over S of S t(S)`, so the step takes at least `1 / D` of that.
- Operators on a path, where each reads the one before, follow each other: `sum of min over S of t(S)`, or more.

Both are about the same choice of `S`: on few devices an operator takes less of all devices' time, but longer. So for
every weight `a` between 0 and 1 the step takes at least `a` times its work and `1 - a` times its path:

    sum over the path of  min over S of  (1 - a) t(S) + a S t(S) / D
    + sum over all others of  a min over S of  S t(S) / D

The bound is the most of these over some weights and, for each, over paths (Lagrange multipliers of the two limits; the
bounds of work and of the critical path alone are those of `a` = 1 and 0). Where every operator is on all devices, `S`
is `D`, and the step takes at least the sum of all.

Reductions and gathers may be joined to one kernel unless a contraction is between them: those between two contractions
of the path count as one kernel, as long as the longest of them; and of each part of the graph that contractions cut off
and the path does not meet, one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf, prod

import numpy as np
import numpy.typing as npt

from unity_ir.cost.floors import Floor, Floors, Operand, Term
from unity_ir.cost.memory import cast_bytes
from unity_ir.cost.plan import update_bytes
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph, Update, erase
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES

Floats = npt.NDArray[np.float64]

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.997, 1.0)
"""
Weights of the work, of which the best counts. Near 1, all of the work off the path counts, and the launches of large
operators on it, too, as long as these lose more by taking fewer devices.
"""


def emitted_bound(
    graph: Graph, machine: Machine, optimizer: Optimizer | None = None, everywhere: bool = False
) -> float:
    """
    Return a lower bound in seconds on one emitted training step of `graph`, for any plan of it on all or part of
    `machine`: any placement, fused groups, order, and saved values. With `everywhere`, the bound is for plans that have
    every operator and weight on all devices.

    `optimizer` is used if the graph names none (None: SGD). The bound counts the FLOPs of all operators, the updates,
    what contractions, reductions and gathers have to read and write, and their launches. An operator takes no more
    devices than its sizes can be divided among. Communication counts nothing. For a device with measured kernels (a
    profile) the bound uses only its peak FLOP/s and memory bandwidth.
    """
    serial = erase(graph)
    optimizer = graph.optimizer or optimizer or Optimizer()
    step = serial if serial.updates else training_step(serial, optimizer)
    return _Tasks(step, machine, optimizer, everywhere).bound()


def work_bound(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> float:
    """
    Return a lower bound in seconds on one synchronous training step of `graph`, for any plan of it on `machine`, also
    in stages and in micro-batches: the work of all kernels that `emitted_bound` counts, spread evenly over all devices.
    `optimizer` is used if the graph names none (None: SGD).

    Micro-batches of different stages are computed at the same time, so no path of operators bounds them. But together
    they have no less work: as many FLOPs and results of each operator, and every micro-batch reads its weights.
    """
    serial = erase(graph)
    optimizer = graph.optimizer or optimizer or Optimizer()
    step = serial if serial.updates else training_step(serial, optimizer)
    return _Tasks(step, machine, optimizer, everywhere=False).work()


@dataclass(frozen=True, slots=True)
class _Reached:
    """The longest path to a value."""

    before: float = 0.0
    """Seconds up to its last contraction."""
    since: float = 0.0
    """Seconds of the kernel of reductions and gathers since."""
    parts: int = 0
    """A bit for every part between contractions that has a reduction or gather on the path."""

    @property
    def seconds(self) -> float:
        return self.before + self.since


class _Tasks:
    """The kernels of a serial step, and their least seconds on each number of devices."""

    def __init__(self, step: Graph, machine: Machine, optimizer: Optimizer, everywhere: bool):
        self.machine = machine
        among = ([size] if everywhere else [1, size] for size in machine.mesh.sizes)
        self.sizes = sorted({prod(of) for of in product(*among)})
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
        self.updates = [(u, self._seconds(self._update(u, optimizer))) for u in step.updates]

    def bound(self) -> float:
        """Return the bound in seconds."""
        return max(self._arithmetic(), *map(self._weighted, WEIGHTS if len(self.sizes) > 1 else (1.0,)))

    def work(self) -> float:
        """Return the bound in seconds of the work alone."""
        return max(self._arithmetic(), self._weighted(1.0))

    def _seconds(self, floor: Floor) -> Floats:
        if floor not in self.known:
            self.known[floor] = np.array([floor.seconds(size, self.machine.device) for size in self.sizes])
        return self.known[floor]

    def _update(self, update: Update, optimizer: Optimizer) -> Floor:
        """
        Return the floor of the optimizer's update of a weight, which writes the cast that contractions read, and may
        read the gradient in the type that is computed with.
        """
        node = update.weight.node
        elements = update.weight.type.elements
        users = self.floors.users.get(update.weight, ())
        cast = elements * cast_bytes(node) if any(map(self._is_contraction, users)) else 0
        grad = elements * min(ELEMENT_BYTES[node.master], ELEMENT_BYTES[update.weight.dtype])
        moved = update_bytes(elements * ELEMENT_BYTES[node.master], optimizer, cast, grad)
        return _pointwise(4.0 * elements, moved, self.machine.device.peak(node.master), update.weight.shape)

    def _is_contraction(self, user: tuple[Node, int]) -> bool:
        return user[0].is_compute and self.floors.is_contraction(user[0])

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
        reached: dict[Value, _Reached] = {}
        rest = [0.0] * len(self.floors.components)
        ends: list[_Reached] = []
        for node in self.nodes:
            at = _latest(reached[v] for v in node.operands if v in reached)
            if node in self.kernels:
                on, off = costs[id(self.kernels[node])]
                if self.floors.is_contraction(node):
                    total += off
                    at = _Reached(at.seconds + on - off, 0.0, at.parts)
                else:
                    part = self.floors.component(node)
                    rest[part] = max(rest[part], off)
                    at = _Reached(at.before, max(at.since, on), at.parts | 1 << part)
            reached.update(dict.fromkeys(node.results, at))
            ends.append(at)
        for update, seconds in self.updates:
            on, off = costs[id(seconds)]
            total += off
            at = reached.get(update.grad, _Reached())
            ends.append(_Reached(at.seconds + on - off, 0.0, at.parts))
        last = _latest(ends)
        return total + last.seconds + sum(off for part, off in enumerate(rest) if not last.parts >> part & 1)


def _latest(paths: Iterable[_Reached]) -> _Reached:
    """Return the longest of some paths; an empty one if there is none."""
    return max(paths, key=lambda path: path.seconds, default=_Reached())


def _pointwise(flops: float, moved: float, peak: float, shape: tuple[int, ...]) -> Floor:
    """Return the floor of a kernel on a tensor of this shape that is fused with nothing."""
    return Floor(flops, peak, shape, (Operand(Term(moved, shape), inf),), (), ("elementwise", "copy"))
