"""
When a rank's program does what: moves are issued early and waited for late, small gradient syncs go together, and what
nobody reads any more is let go of.

Operators stay in the program's order. A collective starts right after the operator that makes what it moves; that of a
weight one operator ahead of its first reader, so that gathered weights do not pile up. Of several moves after each
other, those after the first collective start one operator ahead of the first reader, and of a gradient `LAG` operators
after the one before. Gradients are waited for at the end, or where collectives that are not hold too much. All ranks do
the same lines in the same order: `lowering.rank.deadlock` checks what that means for groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.lowering.rank.program import (
    Compute,
    Exchange,
    Instruction,
    Leaf,
    Program,
    Register,
    Reshard,
    UpdateWeight,
)
from unity_ir.pcg.collectives import AMONG_ALL, BETWEEN_DEVICES, COLLECTIVES
from unity_ir.pcg.sharding import is_pinned, pins
from unity_ir.pcg.types import ELEMENT_BYTES

BUCKET_BYTES = 2**20
"""Bytes up to which gradient syncs and weight gathers share one bucket; each is smaller than that as a whole."""

BUCKET_MEMBERS = 16
"""Most collectives in a bucket; a line of more is hard to read."""

SYNCS = tuple(kind for kind in AMONG_ALL if COLLECTIVES[kind].reduces)
"""Collectives that end a gradient's sync."""

LAG = 8
"""Operators between a gradient's first collective and what must wait for it: the first has had time to end."""

UNDER_WAY = 64 * 2**20
"""
Bytes that collectives of gradients may hold, beside what they make, until the end of the step; links that are behind by
so much stay busy while the oldest is waited for.
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Moves of one kind, group and element type, done as one."""

    moves: tuple[Reshard, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the collectives of these registers: of one, or of all in a bucket."""

    registers: tuple[Register, ...]


Action = Leaf | Compute | Reshard | Exchange | Bucket | Wait


@dataclass(frozen=True, slots=True)
class ScheduledLine:
    """One line of the step; `dies` are the registers read here for the last time."""

    action: Action
    dies: tuple[Register, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The lines of a step. `same` are registers that are other names of others, which are never one themselves."""

    lines: tuple[ScheduledLine, ...]
    same: Mapping[Register, Register]

    def held(self, register: Register) -> Register:
        return self.same.get(register, register)


def crosses(instruction: Instruction) -> bool:
    """Whether ranks talk to each other in it, so that its result has to be waited for."""
    return isinstance(instruction, Exchange) or (
        isinstance(instruction, Reshard) and instruction.kind in BETWEEN_DEVICES
    )


def piece_bytes(program: Program, register: Register) -> int:
    """Return the bytes of one rank's piece of a register."""
    tensor = program.tensors[register]
    return prod(tensor.local(program.mesh)) * ELEMENT_BYTES[tensor.dtype]


def schedule(program: Program, bucket: int = BUCKET_BYTES, under_way: int = UNDER_WAY) -> Schedule:
    """The lines of a training step's forward and backward. With a `bucket` of 0 bytes every sync is one by itself."""
    return _Scheduler(program, bucket, under_way).schedule()


Move = Reshard | Exchange


class _Scheduler:
    def __init__(self, program: Program, bucket: int, under_way: int):
        self.program = program
        self.bucket = bucket
        self.under_way = under_way
        self.same: dict[Register, Register] = {}
        self.computes: list[Compute] = []
        self.moves: list[Move] = []
        self.leaves: dict[Register, Leaf] = {}
        self.maker: dict[Register, int] = {}
        """Which operator makes a register."""
        self.move_of: dict[Register, Move] = {}
        self.place: dict[Register, int] = {}
        """The place in the program of a move that makes a register."""
        for place, instruction in enumerate(program.body):
            match instruction:
                case Leaf():
                    self.leaves[instruction.result] = instruction
                case Compute():
                    self.maker.update(dict.fromkeys(instruction.results, len(self.computes)))
                    self.computes.append(instruction)
                case Reshard(operand, result, "retype", _, _, target) if not is_pinned(target):
                    self.same[result] = self._held(operand)
                case Reshard() | Exchange():
                    self.moves.append(instruction)
                    self.move_of[instruction.result] = instruction
                    self.place[instruction.result] = place
                case UpdateWeight():
                    pass
        self.end = len(self.computes)
        self.wanted = [self._held(i.grad) for i in program.body if isinstance(i, UpdateWeight)]
        self.loss = self._held(program.outputs[0])
        self.first = self._first_readers()
        self.moved = {self._held(m.operand) for m in self.moves if m.result in self.first}
        self.lines: list[Action] = []
        self.made: set[Register] = set()
        self.pending: dict[Register, tuple[Register, ...]] = {}
        self.late: dict[Register, int] = {}
        """Collectives under way of which only the end reads what they make, oldest first, and the bytes each holds."""

    def _held(self, register: Register) -> Register:
        return self.same.get(register, register)

    def _first_readers(self) -> dict[Register, int]:
        """The first operator that reads a register, itself or what moves make of it; the end for what is returned."""
        first = dict.fromkeys([*self.wanted, self.loss], self.end)
        for p, compute in reversed(list(enumerate(self.computes))):
            first.update(dict.fromkeys(map(self._held, compute.operands), p))
        for move in reversed(self.moves):
            if move.result in first:
                operand = self._held(move.operand)
                first[operand] = min(first.get(operand, self.end), first[move.result])
        return first

    # -- when moves start

    def _slots(self) -> dict[int, list[Move]]:
        """The moves that start before an operator without being asked for, by its number."""
        slots: dict[Register, int] = {}
        after_crossing: set[Register] = set()
        for move in self.moves:
            operand, reader = self._held(move.operand), self.first.get(move.result)
            if reader is None:
                continue  # nobody reads it
            before = self.move_of.get(operand)
            late = operand in after_crossing or (before is not None and crosses(before))
            if late:
                after_crossing.add(move.result)
            ahead = max(reader - 1, 0)
            if not crosses(move):
                # What is cut off makes room for what it is cut from; other local steps only take some.
                if isinstance(move, Reshard) and move.kind == "slice" and not late and self._made_at(operand) > 0:
                    slots[move.result] = self._made_at(operand)
            elif late:
                last = max(slots.get(r, 0) for r in self._moves_before(move))
                slots[move.result] = min(last + LAG, self.end) if reader == self.end else max(last, ahead)
            else:
                ready = self._made_at(operand)
                slots[move.result] = ready if ready > 0 else ahead
        out: dict[int, list[Move]] = {}
        for move in self.moves:
            if move.result in slots:
                out.setdefault(slots[move.result], []).append(move)
        for moves in out.values():
            # What is wanted first goes first: moves over the same links are done one after the other.
            moves.sort(key=lambda m: (self.first[m.result], self.place[m.result]))
        return out

    def _moves_before(self, move: Move) -> Iterable[Register]:
        operand = self._held(move.operand)
        while operand in self.move_of:
            yield operand
            operand = self._held(self.move_of[operand].operand)

    def _made_at(self, register: Register) -> int:
        """The operator before which a register is there at the earliest; 0 for what is made of leaves alone."""
        while register in self.move_of:
            register = self._held(self.move_of[register].operand)
        return self.maker[register] + 1 if register in self.maker else 0

    def _is_small_gather(self, move: Move) -> bool:
        """Whether a move gathers a small weight of which every rank has a piece."""
        if not isinstance(move, Reshard) or move.kind != "all_gather":
            return False
        leaf = self.leaves.get(self._held(move.operand))
        pinned = pins(self.program.tensors[move.result].layout)
        return leaf is not None and leaf.op == "weight" and not pinned and self._bytes(move) < self.bucket

    def _gathers(self, slots: Mapping[int, list[Move]]) -> dict[Register, list[Reshard]]:
        """The gathers of small weights that are done with each, itself among them: what is wanted next goes along."""
        out: dict[Register, list[Reshard]] = {}
        room: dict[object, list[Reshard]] = {}
        for _, moves in sorted(slots.items()):
            for move in moves:
                if isinstance(move, Reshard) and self._is_small_gather(move):
                    key = self._alike(move)
                    if self._is_full(room.get(key, ())):
                        del room[key]
                    found = out[move.result] = room.setdefault(key, [])
                    found.append(move)
        return out

    def _alike(self, move: Reshard) -> object:
        """Equal for moves that may be done in one call."""
        return move.kind, move.axes, self.program.tensors[move.result].dtype

    def _is_full(self, moves: Sequence[Reshard]) -> bool:
        return sum(map(self._bytes, moves)) >= self.bucket or len(moves) == BUCKET_MEMBERS

    def _is_small_sync(self, move: Move) -> bool:
        """Whether a move is a small sync of a gradient, which nothing follows but the update."""
        if not isinstance(move, Reshard) or move.kind not in SYNCS or self.first[move.result] < self.end:
            return False
        operand = self._held(move.operand)
        is_last = move.result in self.wanted and move.result != self.loss
        followed = move.result in self.moved
        alone = operand in self.move_of and crosses(self.move_of[operand])
        pinned = pins(self.program.tensors[move.result].layout)
        return is_last and not followed and not alone and not pinned and self._bytes(move) < self.bucket

    def _bytes(self, move: Move) -> int:
        """What ranks hold more of: of a gather its result, else its operand."""
        return max(piece_bytes(self.program, r) for r in (move.operand, move.result))

    # -- lines

    def schedule(self) -> Schedule:
        slots = self._slots()
        full: dict[object, list[Reshard]] = {}
        sharing = {m.result for moves in slots.values() for m in moves if self._is_small_sync(m)}
        gathers = self._gathers(slots)
        for leaf in self.leaves.values():
            if leaf.op == "input":
                self._make(leaf.result)
        for p in range(self.end + 1):
            for move in slots.get(p, ()):
                if move.result in gathers:
                    self._start_bucket(gathers[move.result])
                elif move.result not in sharing:
                    self._make(move.result)
                else:
                    assert isinstance(move, Reshard)
                    found = full.setdefault(self._alike(move), [])
                    found.append(move)
                    if self._is_full(found):
                        self._start_bucket(found)
            if p < self.end:
                compute = self.computes[p]
                for operand in compute.operands:
                    self._need(operand)
                self.lines.append(compute)
                self.made.update(compute.results)
        for moves in full.values():
            self._start_bucket(moves)
        for register in (self.loss, *self.wanted):
            self._make(register)
        for register in (self.loss, *self.wanted):
            self._need(register)
        return Schedule(tuple(self._with_deaths()), self.same)

    def _make(self, register: Register) -> None:
        """A line that makes a register, unless it is made."""
        register = self._held(register)
        if register in self.made:
            return
        self.made.add(register)
        if register in self.leaves:
            self.lines.append(self.leaves[register])
            return
        move = self.move_of[register]
        self._need(move.operand)
        self.lines.append(move)
        if crosses(move):
            self.pending[register] = (register,)
            self._bound((move,))

    def _need(self, register: Register) -> None:
        """Lines after which a register can be read."""
        register = self._held(register)
        self._make(register)
        if register in self.pending:
            together = self.pending[register]
            for each in together:
                del self.pending[each]
            self.late.pop(together[0], None)
            self.lines.append(Wait(together))

    def _start_bucket(self, moves: list[Reshard]) -> None:
        """A line that does several moves as one, which are none afterwards."""
        if len(moves) == 1:
            self._make(moves[0].result)
        elif moves:
            for move in moves:
                self._need(move.operand)
            together = tuple(m.result for m in moves)
            self.lines.append(Bucket(tuple(moves)))
            self.made.update(together)
            self.pending.update(dict.fromkeys(together, together))
            self._bound(moves)
        moves.clear()

    def _bound(self, started: Sequence[Move]) -> None:
        """
        Wait for the oldest collectives of gradients if, with one just started, they hold too much: until it is half.
        """
        first = started[0]
        if first.result not in self.wanted or first.kind == "all_reduce":
            return  # An all-reduce is done in what it makes.
        self.late[first.result] = sum(piece_bytes(self.program, m.operand) for m in started)
        if sum(self.late.values()) > self.under_way:
            while len(self.late) > 1 and sum(self.late.values()) > self.under_way // 2:
                self._need(next(iter(self.late)))

    def _with_deaths(self) -> list[ScheduledLine]:
        alive = {self.loss, *self.wanted}
        # The caller holds these.
        kept = {r for r, leaf in self.leaves.items() if leaf.op != "constant"}
        out: list[ScheduledLine] = []
        for action in reversed(self.lines):
            reads, makes = self._reads_and_makes(action)
            dies = tuple(r for r in dict.fromkeys((*reads, *makes)) if r not in alive and r not in kept)
            alive.update(reads)
            out.append(ScheduledLine(action, dies))
        return out[::-1]

    def _reads_and_makes(self, action: Action) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
        match action:
            case Leaf(_, result):
                return (), (result,)
            case Compute(_, operands, results):
                return tuple(map(self._held, operands)), results
            case Bucket(moves):
                return tuple(self._held(m.operand) for m in moves), tuple(m.result for m in moves)
            case Wait(registers):
                return registers, ()
            case Reshard(operand, result) | Exchange(operand, result):
                return (self._held(operand),), (result,)
