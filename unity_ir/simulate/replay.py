"""
Replay the plan of a step: a task for every kernel, every collective that is started, and every wait, in its order; and
one for the copies that a collective needs before it starts, or once it was waited for.

Each device has a compute stream, and a port to each level of links (`streams`). A kernel or local move runs on the
compute stream. A collective starts once the compute stream has come to it and its ports are free, as NCCL's stream
waits for the current one; it holds its ports. A wait makes the compute stream wait for it. The optimizer's updates come
last. A tensor is held from the line that makes it to the end of the last line that reads it, the operand of a
collective until that is waited for.

What is copied between a device and its host has streams of its own, one for each way, beside kernels. Of optimizer
state (`plan.host_state`) the device holds a window from the start of its copy from the host to the end of the one back.
A value (`plan.host_values`) it holds until its copy to the host was waited for, and again from the line that begins the
copy back, which may wait for others.

The lines of a step in micro-batches are played once for each of them, with those of the first and of the last; those
of the loop over the pieces of the loss once for each piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from unity_ir.cost.kernels import kernel_seconds, seconds_of_update, work_key
from unity_ir.cost.plan import norm_seconds
from unity_ir.machine.model import Machine
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Layout
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.collective_calls import bucket_move
from unity_ir.plan.copies import Copies
from unity_ir.plan.deadlock import register_names
from unity_ir.plan.host_state import SLOTS, StateCopy, UpdateAction, WindowUpdate, state_bytes
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Leaf,
    Register,
    ReshardMove,
    TimeStep,
    UpdateWeight,
    ValueMove,
    communicates,
    reads,
)
from unity_ir.plan.plan import Plan
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import Action, ScheduledLine, Start, Wait, moves_of
from unity_ir.simulate.streams import Classes, Step, Streams, pinned_axes, ticks
from unity_ir.simulate.tasks import (
    BACKWARD,
    BACKWARD_MOVE,
    FORWARD,
    FORWARD_MOVE,
    SYNC,
    UPDATE,
    Label,
    PlayedLine,
    TaskGraph,
    flat,
)


def replay(
    plan: Plan,
    machine: Machine,
    overlap: bool = True,
    axes: Sequence[int] | None = None,
    micro_batches: int | None = None,
    is_last: bool = True,
    under_way: Sequence[StartedSum] = (),
    is_first: bool = True,
) -> TaskGraph:
    """
    Return the task graph of one iteration of a rank's planned step on a machine: a task for every kernel, collective
    and wait, in the plan's order, then the updates. `simulate.full.simulate` gives its timeline.

    Without `overlap`, every collective occupies the compute stream, too. `axes` are the mesh axes along which devices
    are simulated separately: None for those on which some tensor is pinned, so that devices differ. `micro_batches` is
    the number of micro-batches to simulate (None: all). For a part of a step, that number is 1; `is_first` says whether
    it is the step's first micro-batch, whose gradients are added to none, and `is_last` whether it is the last, in
    which lines marked `last` run, too. `under_way` are the collectives that other parts have started and this part
    waits for.
    """
    if axes is None:
        axes = pinned_axes(t.layout for t in plan.program.tensors.values())
    count = plan.program.micro_batches if plan.program.part_of is None else 1
    played = count if micro_batches is None else min(count, micro_batches)
    streams = Streams(machine, tuple(axes), plan.program.copies_to_host)
    return _Replay(plan, streams, overlap).tasks(played, is_last, under_way, is_first)


@dataclass(frozen=True, slots=True)
class StartedSum:
    """
    A sum of gradients over devices that one part of a step has started and another waits for: the register of its
    result, the seconds that it still takes, the machine levels it crosses, and the bytes of its operand, held until the
    wait.
    """

    result: Register
    seconds: float
    levels: tuple[int, ...]
    bytes: int


class _Replay:
    def __init__(self, plan: Plan, streams: Streams, overlap: bool):
        self.plan = plan
        self.program = plan.program
        self.streams = streams
        self.overlap = overlap
        self.names = register_names(plan.program)
        self.ticks: list[int] = []
        self.before: list[list[int]] = []
        self.held: list[tuple[int, ...]] = []
        self.labels: list[Label] = []
        self.last = [-1] * streams.count
        """The last task on each stream."""
        self.first = [-1] * streams.count
        """The first task on each stream."""
        self.pending: dict[tuple[Register, int], int] = {}
        """The collective that makes a register, by device class, until it is waited for."""
        self.started: dict[Register, tuple[Start, Copies]] = {}
        """
        The collectives that have started and are not waited for yet, by their first result, with the copies of what
        they receive.
        """
        self.of_copy: dict[Register, Register] = {}
        """What copies between the device and its host read that are not waited for yet, by their result."""
        self.held_until: dict[Register, tuple[int, list[int]]] = {}
        """Of collectives that other parts started: the bytes they hold until they are waited for, and their tasks."""
        self.copied: list[tuple[int, list[int]]] = []
        """For each buffer that holds copies: its bytes, and the tasks that use it."""
        self.uses: dict[tuple[Register, int, int], list[int]] = {}
        """
        The tasks that use a register, by the micro-batch and the piece of the loss in which it is made; 0 for what is
        made once.
        """
        self.micro_batch = self.piece = 0
        self.state_copies: dict[tuple[str, int, int], int] = {}
        """The last copy of each kind of a window's state, by its number, by device class."""
        self.state: dict[tuple[int, int], list[int]] = {}
        """The copies during and between which a device class holds the state of a window, by its number."""
        self.update_of = {i.weight: i for i in plan.program.body if isinstance(i, UpdateWeight)}
        copied = (a for a in plan.updates if isinstance(a, StateCopy))
        self.window_bytes = {a.number: sum(state_bytes(plan.program, p) for p in a.parts) for a in copied}
        self.lengths: dict[object, int] = {}
        """The ticks of kernels, by what they do."""
        self.steps: dict[object, Step] = {}
        """Moves as the simulation needs them, by what they do."""
        self.places: dict[Register, tuple[Register, bool, bool]] = {}
        """The results of `_place`, by register."""
        self.played: list[PlayedLine] = []
        self.is_backward = False
        self.syncs = _syncs(plan)
        self.loss = plan.program.loss
        steps = (i for i in plan.program.body if isinstance(i, TimeStep) and not i.is_of_pieces)
        self.kept = {step.result for step in steps if step.kind != "pipeline"}
        """Results that accumulate over micro-batches."""
        moves = {i.result: i for i in plan.program.body if isinstance(i, ReshardMove)}
        own = plan.program.started - plan.in_place
        self.summed = {plan.schedule.held(moves[r].operand): r for r in own}
        """Of a part, the sums over micro-batches of which it starts sums over devices in memory of their own."""

    def tasks(
        self, micro_batches: int, is_last: bool, under_way: Sequence[StartedSum], is_first: bool = True
    ) -> TaskGraph:
        """Return the tasks of a step of which `micro_batches` are played, from the first one on or from the second."""
        program = self.program
        begin, end = (0, micro_batches) if is_first else (1, 1 + micro_batches)
        for each in under_way:
            self._started_before(each)
        early = [line for line in self.plan.schedule.lines if line.when == "early"]
        for self.micro_batch in range(begin, end if early else begin):
            for line in early:
                self._line(line)
        for self.micro_batch in range(begin, end):
            self.is_backward = False
            skipped = {"early", *(["first"] if self.micro_batch else ())}
            skipped |= set[str]() if is_last and self.micro_batch == end - 1 else {"last"}
            lines = (line for line in self.plan.schedule.lines if line.when not in skipped)
            for in_pieces, found in groupby(lines, lambda line: line.in_pieces):
                body = [*found]
                for self.piece in range(program.loss_pieces if in_pieces else 1):
                    self.is_backward &= not in_pieces
                    for line in body:
                        self._line(line)
        if program.part_of is not None:
            self._hand_on(is_last)
        updates = [i for i in program.body if isinstance(i, UpdateWeight)]
        if updates and program.optimizer is not None and program.optimizer.clip and program.devices > 1:
            self._norm(program.optimizer, updates[0])
        for action in self.plan.updates:
            self._play(action)
            match action:
                case UpdateWeight():
                    self._update(action)
                case StateCopy():
                    self._copy_state(action)
                case WindowUpdate():
                    self._update_window(action)
        return self._graph(updates, is_last)

    def _hand_on(self, is_last: bool) -> None:
        """Hold what a part hands to others to its end, and from its beginning what it gives back in its last run."""
        for register in self.program.outputs:
            if is_last or register not in self.program.started:
                self._use([register], self._at_ends(register, self.last))
        for of, made in self.summed.items() if is_last else ():
            self._use([of], self._at_ends(of, self.first))
            if any(register == made for register, _ in self.pending):
                self._use([of], self._at_ends(of, self.last))

    def _at_ends(self, register: Register, tasks: Sequence[int]) -> list[int]:
        """Return which of these tasks, the first or the last of each stream, are kernels where a register is."""
        found = (tasks[self.streams.compute(k)] for k in self.streams.where(self._layout(register)))
        return [task for task in found if task >= 0]

    def _line(self, line: ScheduledLine) -> None:
        self._play(line.action)
        if isinstance(line.action, Compute):  # most are, and a test is faster than a pattern
            self._compute(line.action)
            self.is_backward |= self.loss in line.action.results
            return
        match line.action:
            case Leaf():
                pass
            case Wait(registers):
                self._wait(registers)
            case TimeStep() as step:
                self._time_step(step)
            case ValueMove() as move:
                self._copy_value(move)
            case start:
                self._start(start)

    def _play(self, action: Action | UpdateAction | None) -> None:
        self.played.append(PlayedLine(len(self.ticks), action, self.micro_batch, self.piece))

    def _time_step(self, step: TimeStep) -> None:
        """Add a micro-batch's, or piece's, addition to what those before have accumulated, or the copy of a piece."""
        every = self.plan.time_step_bytes(step)
        if not any(every):
            # A product's kernel has added it, or nothing is to be done.
            self._use((step.operand, step.result), [])
            return
        moved = every[self.piece if step.is_of_pieces else self.micro_batch]
        length = ticks(self.streams.machine.memory_seconds(1, moved)) if moved else 0
        kind = SYNC if step.result in self.syncs else BACKWARD if self.is_backward else FORWARD
        label = Label(kind, step.kind, self.names[step.operand], self.program.tensors[step.result])
        done = [self._on_compute(k, length, label) for k in self.streams.where(self._layout(step.operand))]
        self._use((step.operand, step.result), done)

    def _compute(self, compute: Compute) -> None:
        is_first = (self.piece if self.program.is_in_pieces(compute) else self.micro_batch) == 0
        added = 0 if is_first else self.plan.added_bytes(compute)
        key = added, work_key(self.program, compute)
        length = self.lengths.get(key)
        if length is None:
            seconds = kernel_seconds(self.program, compute, self.streams.machine.device, added)
            length = self.lengths[key] = ticks(seconds)
        kind = BACKWARD if self.is_backward else FORWARD
        result = self.program.tensors[compute.results[0]]
        label = Label(kind, compute.operator, "", result)
        done = [self._on_compute(k, length, label) for k in self.streams.where(result.layout)]
        self._use((*compute.operands, *compute.results), done)

    def _start(self, start: Start) -> None:
        """Add a collective, and the copies that it needs before, or a local move."""
        moves = moves_of(start)
        first, layout = moves[0], self._layout(moves[0].operand)
        tensor = self.program.tensors[first.result]
        kind, length, levels, groups = self._step(moves)
        of = self.names[first.operand] if len(moves) == 1 else f"{len(moves)} values"
        label = Label(self._kind(first.result), kind, of, tensor)
        operands, results = [r for m in moves for r in reads(m)], [m.result for m in moves]
        if not communicates(first):
            done = [self._on_compute(k, length, label) for group in groups for k in group]
            self._use((*operands, *results), done)
            return
        before, after = self.plan.copies(start)
        packed = self._copy(before, label, layout)
        done = [self._collective(group, levels, length, label, results) for group in groups]
        if first.kind == "all_reduce":
            # It is done in place, on its result, into which operands that are still wanted were copied.
            self._use(operands, packed)
            self._use(results, [*packed, *done])
        else:
            self._use(operands, [*packed, *done])
            self._use(results, done)
            self._hold(operands, packed)
        self.started[results[0]] = start, after

    def _step(self, moves: Sequence[ReshardMove | HaloExchange]) -> Step:
        """Return the move that several are as one call."""
        tensors = self.program.tensors
        dtype = tensors[moves[0].result].dtype
        key = tuple([(replace(move, operand=0, result=0), tensors[move.operand]) for move in moves]), dtype
        found = self.steps.get(key)
        if found is None:
            move, layout = bucket_move(self.program, moves), self._layout(moves[0].operand)
            found = self.steps[key] = self.streams.step(move, layout, dtype)
        return found

    def _started_before(self, each: StartedSum) -> None:
        """Add what is left of a sum that another part has started, on each device class that takes part."""
        label = Label(SYNC, "rest", self.names[each.result], self.program.tensors[each.result])
        where = self.streams.where(self._layout(each.result))
        left = ticks(each.seconds)
        done = [self._collective((k,), each.levels, left, label, [each.result]) for k in where]
        # All are under way from the beginning.
        held = [*done, *(self.first[self.streams.port(k, level)] for k in where for level in each.levels)]
        self._use([each.result], held)
        self.held_until[each.result] = each.bytes, held

    def _copy(self, copied: Copies, of: Label, layout: Layout) -> list[int]:
        """Add the kernels that copy for a collective, as one task, on the devices that hold something of a layout."""
        if not copied.kernels:
            return []
        length = ticks(self.streams.machine.memory_seconds(copied.kernels, copied.bytes))
        label = replace(of, what="copy")
        return [self._on_compute(k, length, label) for k in self.streams.where(layout)]

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
        """Add a wait for collectives, and the copies of what they received."""
        first = registers[0]
        label = Label(self._kind(first), "wait", self.names[first], self.program.tensors[first])
        done: list[int] = []
        for k in range(self.streams.classes):
            arrived = [self.pending.pop((r, k)) for r in registers if (r, k) in self.pending]
            if arrived:
                done.append(self._on_compute(k, 0, label, arrived))
        self._use(registers, done)
        for register in registers:
            if register in self.held_until:
                size, tasks = self.held_until.pop(register)
                self.copied.append((size, [*tasks, *done]))
            if register in self.of_copy:
                self._use([self.of_copy.pop(register)], done)
            if (started := self.started.pop(register, None)) is None:
                continue
            start, received = started
            moves = moves_of(start)
            if moves[0].kind != "all_reduce":
                self._use([r for m in moves for r in reads(m)], done)
            joined = self._copy(received, label, self._layout(register))
            results = [m.result for m in moves]
            self._use(results, joined)
            self._hold(results, joined)

    def _hold(self, copied: Iterable[Register], tasks: list[int]) -> None:
        """Hold copies of these registers during some tasks."""
        if tasks:
            self.copied.append((sum(self.program.bytes[register] for register in copied), tasks))

    def _norm(self, optimizer: Optimizer, first: UpdateWeight) -> None:
        """Add the sum over all devices of the squares of gradients, which every update waits for."""
        self._play(None)
        machine = self.streams.machine
        label = Label(SYNC, "norm of gradients", "", self.program.tensors[first.grad])
        length, every = ticks(norm_seconds(optimizer, machine)), tuple(range(self.streams.classes))
        levels = sorted(set(machine.axis_levels))
        task = self._collective(every, levels, length, label, ())
        for k in every:
            self._on_compute(k, 0, label, [task])

    def _copy_value(self, move: ValueMove) -> None:
        """Add the copy of a value between the device and its host, beside the kernels that follow."""
        tensor, streams = self.program.tensors[move.operand], self.streams
        length = ticks(streams.machine.host_link.seconds(move.kind, self.program.bytes[move.operand]))
        label = Label(self._kind(move.result), move.kind, self.names[move.operand], tensor)
        done, begun = list[int](), list[int]()
        for k in streams.where(tensor.layout):
            if move.kind == "from_host":
                # It has its memory on the device from here on, however long it waits for the copies before it.
                begun.append(self._on_compute(k, 0, replace(label, what="start")))
            # What it reads is made, and the memory that it writes is free, once the kernels before have ended.
            after = (streams.copies(k, move.kind), streams.compute(k))
            done.append(self._add(length, after, after[: None if not self.overlap else 1], (), label))
            self.pending[move.result, k] = done[-1]
        self.of_copy[move.result] = move.operand
        self._use((move.operand, move.result), [*begun, *done])

    def _copy_state(self, copy: StateCopy) -> None:
        """Add the copy of a window's state, beside kernels, behind what it needs and what has its buffer before."""
        program, streams, host = self.program, self.streams, self.streams.machine.host_link
        for k in range(streams.classes):
            parts = [part for part in copy.parts if k in streams.where(self._layout(part.weight))]
            if not parts:
                continue
            length = ticks(host.seconds(copy.kind, sum(state_bytes(program, p) for p in parts), both=True))
            first = parts[0].weight
            label = Label(UPDATE, copy.kind, self.names[first], program.tensors[first])
            stream, compute = streams.copies(k, copy.kind), streams.compute(k)
            is_back = copy.kind == "to_host"
            # The first copies use memory that kernels have used; others that of windows that are back.
            before = () if is_back else self._back(copy.number - SLOTS, k)
            held = (stream,) if self.overlap else (stream, compute)
            after = (stream, compute) if is_back or copy.number < SLOTS else held
            task = self._add(length, after, held, before, label)
            self.state_copies[copy.kind, copy.number, k] = task
            self.state.setdefault((copy.number, k), []).append(task)

    def _back(self, number: int, of: int) -> tuple[int, ...]:
        """Return the copy back to the host of a window's state on a device class, if there is one."""
        task = self.state_copies.get(("to_host", number, of))
        return () if task is None else (task,)

    def _update_window(self, update: WindowUpdate) -> None:
        """Add the update of parts of weights, behind the copy of their state from the host."""
        program, optimizer, machine = self.program, self.program.optimizer, self.streams.machine
        assert optimizer is not None
        for part in update.parts:
            own, tensor = self.update_of[part.weight], program.tensors[part.weight]
            share = part.size * ELEMENT_BYTES[tensor.dtype] / program.bytes[part.weight]
            seconds = share * seconds_of_update(program, own, optimizer, machine.device)
            label = Label(UPDATE, optimizer.name, self.names[part.weight], tensor)
            done = [
                self._on_compute(k, ticks(seconds), label, [self.state_copies["from_host", update.number, k]])
                for k in self.streams.where(self._layout(part.weight))
            ]
            self._use((own.grad,), done)

    def _update(self, update: UpdateWeight) -> None:
        program, optimizer = self.program, self.program.optimizer
        assert optimizer is not None
        seconds = seconds_of_update(program, update, optimizer, self.streams.machine.device)
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
            if self.first[stream] < 0:
                self.first[stream] = number
        return number

    def _use(self, registers: Iterable[Register], tasks: Sequence[int]) -> None:
        places, uses = self.places, self.uses
        for register in registers:
            found = places.get(register)
            if found is None:
                found = places[register] = self._place(register)
            of, is_made_once, is_in_pieces = found
            use = of, 0 if is_made_once else self.micro_batch, self.piece if is_in_pieces else 0
            uses.setdefault(use, []).extend(tasks)

    def _place(self, register: Register) -> tuple[Register, bool, bool]:
        """Return the register in whose memory this one is, and whether it is made once, and in pieces of the loss."""
        held = self.plan.schedule.held(register)
        of = self.program.added.get(held, held)
        is_made_once = of in self.kept or self.program.when.get(of) not in ("early", "every")
        return of, is_made_once, of in self.program.in_pieces

    def _kind(self, moved: Register) -> int:
        """Return the kind of a move's task, given its result."""
        return SYNC if moved in self.syncs else BACKWARD_MOVE if self.is_backward else FORWARD_MOVE

    def _layout(self, register: Register) -> Layout:
        return self.program.tensors[register].layout

    def _graph(self, updates: Sequence[UpdateWeight], is_last: bool) -> TaskGraph:
        """Return the tasks as arrays. Leaves are held throughout, and so is the optimizer's state."""
        program = self.program
        optimizer = program.optimizer or Optimizer()
        always = [0] * self.streams.classes
        updated = {update.weight for update in updates}
        leaves = {i.result for i in program.body if isinstance(i, Leaf) and i.op not in ("sum", "started")}
        if program.part_of is not None:
            # Held by the step, as what a part adds to is; sums over devices in place are in its memory.
            leaves |= self.kept | (program.started & self.plan.in_place)
            leaves -= self.summed.keys() if is_last else set()
        for register in leaves - program.at_host if program.part_of is None else ():
            states = optimizer.states if register in updated and register not in program.state_at_host else 0
            for k in self.streams.where(self._layout(register)):
                always[k] += leaf_bytes(program, register, states)
        elsewhere = leaves | program.values_at_host.keys()
        used = [(program.held_bytes(r), tasks) for (r, *_), tasks in self.uses.items() if r not in elsewhere and tasks]
        used += self.copied
        used += [(self.window_bytes[number], tasks) for (number, _), tasks in self.state.items()]
        return TaskGraph(
            self.streams,
            np.array(self.ticks, dtype=np.int64),
            flat(self.before),
            flat(self.held),
            tuple(self.labels),
            np.array([size for size, _ in used], dtype=np.int64),
            flat(tasks for _, tasks in used),
            tuple(always),
            {r: tuple(t for (of, _), t in self.pending.items() if of == r) for r, _ in self.pending},
            tuple(self.played),
        )


def leaf_bytes(program: Program, leaf: Register, states: int) -> int:
    """
    Return the bytes that a leaf (an input, weight or constant) takes throughout a step on a device that has a piece of
    it: those of the piece, and as many for each of `states` tensors of optimizer state. For an input, pieces of all
    micro-batches count. `leaf` is the register.
    """
    count = program.micro_batches if program.when[leaf] == "every" else 1
    return (1 + states) * count * program.bytes[leaf]


def _syncs(plan: Plan) -> set[Register]:
    """Return the registers between gradients as operators make them and as updates read them."""
    moves = {i.result: i for i in plan.program.body if isinstance(i, ReshardMove | HaloExchange | TimeStep)}
    found: set[Register] = set()
    for update in plan.program.body:
        at = update.grad if isinstance(update, UpdateWeight) else None
        while at in moves:
            found.add(at)
            at = moves[at].operand
    return found
