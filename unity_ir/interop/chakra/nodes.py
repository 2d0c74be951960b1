"""
Make the nodes of a trace from the replay of a plan (`simulate.replay`): the kernels, collectives and waits that the
simulator times and the emitted program runs, in their order.

Devices of a class run the same lines, so they have one list of nodes, in which collectives are calls along mesh axes
(`NetworkCall`); `ranks` says it for each rank. A kernel is a node that follows the one before it on the compute stream
(`ctrl_deps`) and what makes its operands (`data_deps`). A collective follows what makes its operand, what the compute
stream has come to, and the last collective over each level of links that it crosses. A wait is no node: the next kernel
has the collective among its `data_deps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from unity_ir.cost.kernels import bytes_of_update, kernel_of_line
from unity_ir.cost.plan import NORM_BYTES, update_kernel
from unity_ir.errors import UnityError
from unity_ir.interop.chakra.calls import NetworkCall, most_messages, network_call
from unity_ir.machine.model import Machine
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.host_state import StateCopy, WindowUpdate
from unity_ir.plan.instructions import Compute, Leaf, Register, TimeStep, UpdateWeight, ValueMove, communicates, reads
from unity_ir.plan.plan import Plan
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import Start, Wait, moves_of
from unity_ir.simulate.tasks import PlayedLine, TaskGraph
from unity_ir.simulate.trace import name

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassNode:
    """
    A node of the trace of every device of a class. `ticks` are the picoseconds that the simulator gives it. A kernel
    has FLOPs and the bytes that it reads and writes; communication has a call. A call that is several messages has as
    many ids from `id` on as it needs; others refer to all of them by `id`.
    """

    id: int
    name: str
    ctrl_deps: Ids
    data_deps: Ids
    ticks: int
    flops: int = 0
    bytes: int = 0
    call: NetworkCall | None = None


@dataclass
class NodeList:
    """The nodes of one class of devices, of which `device` is one, made line by line."""

    machine: Machine
    device: int
    nodes: list[ClassNode] = field(default_factory=list[ClassNode])
    ports: dict[int, int] = field(default_factory=dict[int, int])
    """The last collective over each level of links."""
    sum_ports: dict[int, int] = field(default_factory=dict[int, int])
    """Of a step in stages, the last sum of a gradient over each level that goes on beside later parts."""
    started: dict[Register, Start] = field(default_factory=dict[Register, Start])
    """The line that starts each collective, by its first result."""
    next_id: int = 0
    last: int | None = None
    """The last kernel on the compute stream."""
    waits: dict[int, None] = field(default_factory=dict[int, None])
    """What the compute stream waits for before its next kernel."""
    makers: dict[tuple[Register, int], Ids] = field(default_factory=dict[tuple[Register, int], Ids])
    """The nodes that make a register in a micro-batch."""
    latest: dict[Register, Ids] = field(default_factory=dict[Register, Ids])

    def play(self, plan: Plan, tasks: TaskGraph, micro_batch: int | None = None) -> None:
        """
        Add the nodes of the replay of a plan. For a part of a step, `micro_batch` is the one it is run for, and its
        collectives do not queue behind those of earlier parts.
        """
        if micro_batch is not None:
            self.ports = {}
        mine, width = tasks.streams.class_of(self.device), tasks.streams.width
        firsts = [*(line.first for line in tasks.played), len(tasks)]
        for line, (begin, end) in zip(tasks.played, pairwise(firsts), strict=True):
            own = [t for t in range(begin, end) if any(s // width == mine for s in tasks.held[t])]
            self._line(plan, tasks, line, own, line.micro_batch if micro_batch is None else micro_batch)
        for register, held in plan.schedule.same.items():
            if held in self.latest:
                self.latest[register] = self.latest[held]

    def _line(self, plan: Plan, tasks: TaskGraph, line: PlayedLine, own: Sequence[int], at: int) -> None:
        """Add the nodes of a line, given its tasks on devices of the class; () where only others run it."""
        match line.action:
            case Leaf():
                pass
            case Compute() as compute:
                for task in own:
                    self._compute(plan, tasks, line, compute, task, at)
            case Wait(registers):
                self._wait(plan, tasks, registers, own, at)
            case TimeStep() as step:
                self._time_step(plan, tasks, line, step, own, at)
            case UpdateWeight() as update:
                for task in own:
                    self.update(plan.program, update, name(tasks.labels[task]), int(tasks.ticks[task]))
            case StateCopy() | WindowUpdate() | ValueMove():
                raise UnityError("chakra: a trace has no copies between a device and its host; leave offload out")
            case None:
                gradients = (i.grad for i in plan.program.body if isinstance(i, UpdateWeight))
                self.norm(gradients, int(tasks.ticks[own[0]]))
            case start:
                self._start(plan, tasks, start, own, at)

    def _compute(self, plan: Plan, tasks: TaskGraph, line: PlayedLine, compute: Compute, task: int, at: int) -> None:
        program = plan.program
        is_first = (line.piece if program.is_in_pieces(compute) else line.micro_batch) == 0
        kernel = kernel_of_line(program, compute)
        moved = kernel.bytes + (0 if is_first else plan.added_bytes(compute))
        read = self.made(plan, compute.operands, at)
        if not is_first:
            read += [i for r in compute.results for i in self.latest.get(program.added.get(r, -1), ())]
        self.make(compute.results, self._kernel(tasks, task, read, kernel.flops, moved), at)

    def _time_step(
        self, plan: Plan, tasks: TaskGraph, line: PlayedLine, step: TimeStep, own: Sequence[int], at: int
    ) -> None:
        made = tuple(self.made(plan, [step.operand], at))
        every = plan.time_step_bytes(step)
        moved = every[line.piece if step.is_of_pieces else line.micro_batch]
        # Without bytes it is done by the kernel that makes the operand, or by none.
        if own and moved:
            read = [*made, *self.latest.get(step.result, ())]
            made = self._kernel(tasks, own[0], read, 0, moved)
        self.make([step.result], made, at)

    def _wait(self, plan: Plan, tasks: TaskGraph, registers: Sequence[Register], own: Sequence[int], at: int) -> None:
        self.wait_for(self.made(plan, registers, at))
        for task in own:
            if tasks.labels[task].what == "copy":
                copied = self._kernel(tasks, task, (), 0, plan.copies(self.started[registers[0]])[1].bytes)
                self.make(registers, copied, at)

    def _start(self, plan: Plan, tasks: TaskGraph, start: Start, own: Sequence[int], at: int) -> None:
        program, moves = plan.program, moves_of(start)
        results = [move.result for move in moves]
        read = self.made(plan, [r for move in moves for r in reads(move)], at)
        if not communicates(moves[0]):
            moved = sum(program.bytes[r] for move in moves for r in (move.operand, move.result))
            is_free = not any(int(tasks.ticks[task]) for task in own)
            self.make(results, tuple(read) if is_free else self._kernel(tasks, own[0], read, 0, moved), at)
            return
        for task in own:
            if tasks.labels[task].what == "copy":
                read = [*self._kernel(tasks, task, read, 0, plan.copies(start)[0].bytes)]
                continue
            width = tasks.streams.width
            levels = sorted({s % width - 1 for s in tasks.held[task]} - {-1})
            label, length = name(tasks.labels[task]), int(tasks.ticks[task])
            goes_on = any(result in tasks.unwaited for result in results)
            self.started[results[0]] = start
            made = self.communicate(label, network_call(program, start), levels, read, length, goes_on)
            self.make(results, made, at)

    def update(self, program: Program, update: UpdateWeight, label: str, length: int) -> None:
        """Add the optimizer's update of a weight, of `length` ticks."""
        optimizer = program.optimizer
        assert optimizer is not None
        dtype = program.tensors[update.weight].dtype
        moved = bytes_of_update(program, update, optimizer)
        kernel = update_kernel(program.bytes[update.weight] // ELEMENT_BYTES[dtype], moved, dtype, optimizer)
        self._add_kernel(label, self.latest.get(update.grad, ()), length, kernel.flops, moved)

    def norm(self, gradients: Iterable[Register], length: int) -> None:
        """Add the sum over all devices of the squares of gradients, of `length` ticks, and wait for it."""
        call = NetworkCall("all_reduce", tuple(range(len(self.machine.mesh.sizes))), NORM_BYTES)
        read = [i for register in gradients for i in self.latest.get(register, ())]
        levels = sorted(set(self.machine.axis_levels))
        self.wait_for(self.communicate("norm of gradients", call, levels, read, length))

    def communicate(
        self,
        label: str,
        call: NetworkCall,
        levels: Iterable[int],
        read: Iterable[int],
        length: int,
        goes_on: bool = False,
        behind: Iterable[int] = (),
    ) -> Ids:
        """
        Add a call over some levels of links, of `length` ticks, which reads what nodes have made, and return its id.
        With `goes_on`, it is a sum that goes on beside later parts, behind others over the same levels. `behind` are
        further nodes that it is issued after.
        """
        before = [self.ports[level] for level in levels if level in self.ports]
        if goes_on:
            before += [self.sum_ports[level] for level in levels if level in self.sum_ports]
        node = self._add(label, (*self._issued(), *before, *behind), read, length, call=call)
        for level in levels:
            self.ports[level] = node
            if goes_on:
                self.sum_ports[level] = node
        return (node,)

    def wait_for(self, nodes: Iterable[int]) -> None:
        """Let the next kernel wait for nodes."""
        self.waits.update(dict.fromkeys(nodes))

    def made(self, plan: Plan, registers: Iterable[Register], micro_batch: int) -> list[int]:
        """
        Return the nodes that make registers in a micro-batch, or last made them if that one does not; none for what is
        there from the start.
        """
        found: dict[int, None] = {}
        for register in map(plan.schedule.held, registers):
            found.update(dict.fromkeys(self.makers.get((register, micro_batch), self.latest.get(register, ()))))
        return list(found)

    def make(self, registers: Iterable[Register], nodes: Ids, micro_batch: int) -> None:
        """Say which nodes make registers in a micro-batch."""
        for register in registers:
            self.makers[register, micro_batch] = self.latest[register] = nodes

    def _issued(self) -> Ids:
        """Return what the compute stream has come to: its last kernel, and what it waits for."""
        return (*(() if self.last is None else (self.last,)), *self.waits)

    def _kernel(self, tasks: TaskGraph, task: int, read: Iterable[int], flops: int, moved: int) -> Ids:
        return self._add_kernel(name(tasks.labels[task]), read, int(tasks.ticks[task]), flops, moved)

    def _add_kernel(self, label: str, read: Iterable[int], length: int, flops: int, moved: int) -> Ids:
        before = () if self.last is None else (self.last,)
        self.last = self._add(label, before, (*self.waits, *read), length, flops, moved)
        self.waits.clear()
        return (self.last,)

    def _add(
        self,
        label: str,
        before: Iterable[int],
        read: Iterable[int],
        length: int,
        flops: int = 0,
        moved: int = 0,
        call: NetworkCall | None = None,
    ) -> int:
        data = tuple(sorted(set(read)))
        ctrl = tuple(sorted(set(before) - set(data)))
        node = ClassNode(self.next_id, label, ctrl, data, length, flops, moved, call)
        self.nodes.append(node)
        self.next_id += 1 if call is None else most_messages(call, self.machine.mesh)
        return node.id
