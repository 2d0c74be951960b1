"""Price operators and reshards of a serial graph under any assignment, in ticks, each only once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unity_ir.cost.halos import halo_moves
from unity_ir.cost.plan import update_time
from unity_ir.cost.work import work
from unity_ir.pcg.materialise import piece_as_weight, variable_degrees
from unity_ir.pcg.node import Node, Value, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Assignment, Layout, dual, layout_type, operand_layout, result_layout
from unity_ir.pcg.types import TensorType
from unity_ir.plan.moves import plan_moves
from unity_ir.simulate.chains import Task, chain, stall
from unity_ir.simulate.streams import Classes, Step, Streams, ticks


@dataclass(frozen=True, slots=True)
class Choice:
    """
    An operator under one assignment: the layouts of its operands and results, the picoseconds (ticks) of its kernels,
    its halo exchanges, and the device classes that run it.
    """

    assignment: Assignment
    needs: tuple[Layout, ...]
    """The layout in which each operand is read."""
    makes: tuple[Layout, ...]
    """The layout in which each result is made."""
    forward: int
    """Ticks of the forward kernels."""
    backward: int
    """Ticks of the backward kernels."""
    halos: tuple[tuple[str, Task], ...]
    halos_back: tuple[tuple[str, Task], ...]
    """Halo exchanges before the forward, and of gradients after the backward: kinds of moves, and tasks."""
    classes: Classes
    """Device classes that run it."""


@dataclass(frozen=True)
class Costs:
    """
    A memo of the costs, in ticks (picoseconds), of operators, reshards and updates of serial graphs on one machine, for
    one optimizer and one set of device classes (`streams`).
    """

    streams: Streams
    optimizer: Optimizer
    _choices: dict[Any, Choice] = field(default_factory=dict[Any, Choice])
    _steps: dict[Any, tuple[Step, ...]] = field(default_factory=dict[Any, tuple[Step, ...]])
    _updates: dict[Any, int] = field(default_factory=dict[Any, int])

    def choice(self, node: Node, needs: tuple[bool, ...], assignment: Assignment) -> Choice:
        """
        Return how a compute node of a serial graph runs under an assignment (the role of each mesh axis): the layouts
        of its operands and results, the ticks (picoseconds) of its kernels, its halo exchanges, and the device classes
        that run it. Memoised.

        `needs` says, per operand, whether its gradient is wanted.
        """
        same = tuple(node.operands.index(v) for v in node.operands)
        key = (node.op, node.attributes, tuple(v.type for v in node.operands), same, needs, assignment)
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = self._choose(node, needs, assignment)
        return found

    def _choose(self, node: Node, needs: tuple[bool, ...], assignment: Assignment) -> Choice:
        machine = self.streams.machine
        reads = tuple(operand_layout(node.analysis, i, assignment) for i in range(len(node.operands)))
        # An operand read twice in one layout is read from memory once.
        places = list(zip(node.operands, reads, strict=True))
        done = work(
            node.op,
            tuple((v.type.shape, v.type.dtype) for v in node.operands),
            node.attributes,
            tuple(variable_degrees(assignment, machine.mesh.sizes).items()),
            needs,
            tuple(places.index(place) for place in places),
        )
        halos: list[tuple[str, Task]] = []
        halos_back: list[tuple[str, Task]] = []
        for i, moves in halo_moves(node, assignment, machine.mesh).items():
            dtype = node.operands[i].type.dtype
            there = self.streams.steps((m for m, _ in moves), reads[i], dtype)
            back = self.streams.steps((m for _, m in reversed(moves)), dual(reads[i]), dtype)
            halos += stall(self.streams, there, ())
            halos_back += stall(self.streams, back, ()) if needs[i] else ()
        return Choice(
            assignment,
            reads,
            tuple(result_layout(node.analysis, i, assignment) for i in range(len(node.types))),
            ticks(done.forward_time(machine.device)),
            ticks(done.backward_time(machine.device)),
            tuple(halos),
            tuple(halos_back),
            self.streams.where(assignment),
        )

    def steps(self, type: TensorType, source: Layout, target: Layout, gradient: bool = False) -> tuple[Step, ...]:
        """
        Return the moves that bring a value from layout `source` to layout `target`, in order, each as a tuple `Step`:
        its collective's name, ticks, numbers of the machine levels crossed, and device classes of each group. `type` is
        the value's type in the serial graph. Moves that only rename roles (COPY to REPEAT, say), and so do nothing, are
        left out.

        With `gradient`, the value's gradient is moved, of element type `grad_dtype`; `source` and `target` are then
        layouts of the gradient.
        """
        dtype = type.grad_dtype if gradient else type.dtype
        key = (type.shape, dtype, source, target)
        found = self._steps.get(key)
        if found is None:
            value = leaf("input", type, name="x").result
            moves = plan_moves(value, source, target, self.streams.machine, gradient)
            found = self._steps[key] = self.streams.steps(moves, source, dtype)
        return found

    def reshard_tasks(
        self, type: TensorType, ends: tuple[Layout, Layout], number: int, overlap: bool, gradient: bool = False
    ) -> tuple[Task, ...]:
        """
        Return the tasks (`chains.Task`) of the reshard of a value between two layouts, `ends` = (source, target).
        `type` is the value's type in the serial graph.

        `number` is the reshard's number, by which other tasks wait for its result. Without `overlap`, the tasks occupy
        compute streams, too. With `gradient`, the value's gradient is moved; `ends` are then layouts of the gradient.
        """
        steps = self.steps(type, *ends, gradient)
        return tuple(task for _, task in chain(self.streams, steps, number, (), overlap))

    def update(self, value: Value, layout: Layout) -> int:
        """
        Return the ticks (picoseconds) of the optimizer's update of the weight `value` on each device, if the weight is
        stored in `layout`.
        """
        key = (value.type.shape, value.type.dtype, value.node.master, layout)
        if key not in self._updates:
            machine = self.streams.machine
            piece = piece_as_weight(value.node, layout_type(value.type, layout, machine.mesh))
            self._updates[key] = ticks(update_time(piece, self.optimizer, machine))
        return self._updates[key]
