"""
Replay the plan of a step: a task for every kernel, every collective that is started, and every wait, in its order.

Each device has a compute stream, and a port to each level of links (`streams`). A kernel or local move runs on the
compute stream. A collective starts once the compute stream has come to it and its ports are free, as NCCL's stream
waits for the current one; it holds its ports. A wait makes the compute stream wait for it. The optimizer's updates come
last. A tensor is held from the line that makes it to the end of the last line that reads it, the operand of a
collective until that is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from unity_ir.cost.lines import kernel_seconds, update_seconds
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Optimizer
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import Layout
from unity_ir.plan.collective_calls import bucket_move, move_of
from unity_ir.plan.deadlock import makers
from unity_ir.plan.plan import Plan
from unity_ir.plan.program import Compute, HaloExchange, Leaf, Register, ReshardMove, UpdateWeight
from unity_ir.plan.schedule import Bucket, Wait, crosses, piece_bytes
from unity_ir.simulate.streams import Classes, Streams, pinned_axes, ticks
from unity_ir.simulate.tasks import BACKWARD, BACKWARD_MOVE, FORWARD, FORWARD_MOVE, SYNC, UPDATE, Label, TaskGraph, flat


def replay(plan: Plan, machine: Machine, overlap: bool = True, axes: Sequence[int] | None = None) -> TaskGraph:
    """
    Return the task graph of one iteration of a rank's planned step on a machine: a task for every kernel, collective
    and wait, in the plan's order, then the updates. Simulate it with `simulate.full.simulate`.

    Without `overlap`, every collective holds the compute stream, too. `axes` are the mesh axes along which devices are
    simulated separately: by default those that some tensor is pinned on, so that devices differ.
    """
    if axes is None:
        axes = pinned_axes(t.layout for t in plan.program.tensors.values())
    return _Replay(plan, Streams(machine, tuple(axes)), overlap).tasks()


class _Replay:
    def __init__(self, plan: Plan, streams: Streams, overlap: bool):
        self.plan = plan
        self.program = plan.program
        self.streams = streams
        self.overlap = overlap
        self.names = makers(plan.program)
        self.ticks: list[int] = []
        self.before: list[list[int]] = []
        self.held: list[tuple[int, ...]] = []
        self.labels: list[Label] = []
        self.last = [-1] * streams.count
        """The last task on each stream."""
        self.pending: dict[tuple[Register, int], int] = {}
        """The collective that makes a register, by device class, until it is waited for."""
        self.operands: dict[Register, tuple[Register, ...]] = {}
        """The operands that a collective holds, by its first result, until it is waited for."""
        self.uses: dict[Register, list[int]] = {}
        self.is_backward = False
        self.syncs = _syncs(plan)

    def tasks(self) -> TaskGraph:
        program = self.program
        loss = program.outputs[0] if program.optimizer and program.outputs else None
        for line in self.plan.schedule.lines:
            match line.action:
                case Leaf():
                    pass
                case Compute() as compute:
                    self._compute(compute)
                    self.is_backward |= loss in compute.results
                case Wait(registers):
                    self._wait(registers)
                case Bucket(moves):
                    self._start(moves, bucket_move(program, moves))
                case ReshardMove() | HaloExchange() as move:
                    self._start((move,), move_of(program, move))
        updates = [i for i in program.body if isinstance(i, UpdateWeight)]
        for update in updates:
            self._update(update)
        return self._graph(updates)

    def _compute(self, compute: Compute) -> None:
        seconds = kernel_seconds(self.program, compute, self.streams.machine.device)
        kind = BACKWARD if self.is_backward else FORWARD
        where = self.streams.where(self._layout(compute.results[0]))
        label = Label(kind, compute.operator, "", self.program.tensors[compute.results[0]])
        done = [self._on_compute(k, ticks(seconds), label) for k in where]
        self._use((*compute.operands, *compute.results), done)

    def _start(self, moves: Sequence[ReshardMove | HaloExchange], move: Move) -> None:
        """Add the collective, or local move, that several moves of a program are."""
        first, layout = moves[0], self._layout(moves[0].operand)
        tensor = self.program.tensors[first.result]
        kind, length, levels, groups = self.streams.step(move, layout, tensor.dtype)
        of = self.names[first.operand] if len(moves) == 1 else f"{len(moves)} values"
        label = Label(self._kind(first.result), kind, of, tensor)
        operands, results = [m.operand for m in moves], [m.result for m in moves]
        if not crosses(first):
            done = [self._on_compute(k, length, label) for group in groups for k in group]
            self._use((*operands, *results), done)
            return
        done = [self._collective(group, levels, length, label, results) for group in groups]
        # An all-reduce is done in place, on a buffer that is its result.
        held = () if first.kind == "all_reduce" else tuple(operands)
        self._use((*held, *results), done)
        self.operands[results[0]] = held

    def _collective(
        self, group: Classes, levels: Iterable[int], length: int, label: Label, results: Iterable[Register]
    ) -> int:
        """Add a collective among device classes, over the links of these levels."""
        computes = tuple(self.streams.compute(k) for k in group)
        ports = tuple(self.streams.port(k, level) for k in group for level in levels)
        task = self._add(length, (*computes, *ports), ports if self.overlap else (*computes, *ports), (), label)
        self.pending.update({(register, k): task for register in results for k in group})
        return task

    def _wait(self, registers: Sequence[Register]) -> None:
        first = registers[0]
        label = Label(self._kind(first), "wait", self.names[first], self.program.tensors[first])
        done: list[int] = []
        for k in range(self.streams.classes):
            arrived = [self.pending.pop((r, k)) for r in registers if (r, k) in self.pending]
            if arrived:
                done.append(self._on_compute(k, 0, label, arrived))
        self._use((*registers, *self.operands.pop(first, ())), done)

    def _update(self, update: UpdateWeight) -> None:
        program, optimizer = self.program, self.program.optimizer
        assert optimizer is not None
        seconds = update_seconds(program, update.weight, optimizer, self.streams.machine.device)
        label = Label(UPDATE, optimizer.name, self.names[update.weight], program.tensors[update.weight])
        where = self.streams.where(self._layout(update.weight))
        self._use((update.grad,), [self._on_compute(k, ticks(seconds), label) for k in where])

    def _on_compute(self, of: int, length: int, label: Label, waits: Iterable[int] = ()) -> int:
        stream = (self.streams.compute(of),)
        return self._add(length, stream, stream, waits, label)

    def _add(self, length: int, after: Iterable[int], held: tuple[int, ...], waits: Iterable[int], label: Label) -> int:
        """Add a task of `length` ticks that follows the last tasks of the streams `after`, and return its number."""
        number = len(self.ticks)
        self.before.append(sorted({*(self.last[s] for s in after), *waits} - {-1}))
        self.ticks.append(length)
        self.held.append(held)
        self.labels.append(label)
        for stream in held:
            self.last[stream] = number
        return number

    def _use(self, registers: Iterable[Register], tasks: Sequence[int]) -> None:
        for register in registers:
            self.uses.setdefault(self.plan.schedule.held(register), []).extend(tasks)

    def _kind(self, moved: Register) -> int:
        """Return the kind of a move's task, given its result."""
        return SYNC if moved in self.syncs else BACKWARD_MOVE if self.is_backward else FORWARD_MOVE

    def _layout(self, register: Register) -> Layout:
        return self.program.tensors[register].layout

    def _graph(self, updates: Sequence[UpdateWeight]) -> TaskGraph:
        """Return the tasks as arrays. Leaves are held throughout, and so is the optimizer's state."""
        program = self.program
        optimizer = program.optimizer or Optimizer()
        always = [0] * self.streams.classes
        updated = {update.weight for update in updates}
        leaves = {i.result for i in program.body if isinstance(i, Leaf)}
        for register in leaves:
            tensors = 1 + (optimizer.states if register in updated else 0)
            for k in self.streams.where(self._layout(register)):
                always[k] += tensors * piece_bytes(program, register)
        used = [(register, tasks) for register, tasks in self.uses.items() if register not in leaves and tasks]
        return TaskGraph(
            self.streams,
            np.array(self.ticks, dtype=np.int64),
            flat(self.before),
            flat(self.held),
            tuple(self.labels),
            np.array([piece_bytes(program, register) for register, _ in used], dtype=np.int64),
            flat(tasks for _, tasks in used),
            tuple(always),
        )


def _syncs(plan: Plan) -> set[Register]:
    """Return the registers between gradients as operators make them and as updates read them."""
    moves = {i.result: i for i in plan.program.body if isinstance(i, ReshardMove | HaloExchange)}
    found: set[Register] = set()
    for update in plan.program.body:
        at = update.grad if isinstance(update, UpdateWeight) else None
        while at in moves:
            found.add(at)
            at = moves[at].operand
    return found
