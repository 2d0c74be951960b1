"""
Schedule a rank's program: start moves early, wait for them late, bucket small gradient syncs, free dead tensors.

Operators stay in the program's order, but for those whose results only updates read: these are delayed to run while
others wait for a collective (the gradient of a weight beside the sum of the gradient of an activation). A collective
starts right after the operator that makes its operand; a weight's starts one operator ahead of its first reader, and a
gather of it earlier, while weights of at most `AHEAD_BYTES` are under way or wait to be read. In a chain of moves,
those after the first collective start one operator ahead of the first reader or, for a gradient, `LAG` operators after
the move before. Gradients are waited for at the end of the step, or earlier if the collectives under way hold too many
bytes. The cast of a stored weight to the type it is computed with is made where the weight is first needed, as if it
were a move, or before, where a collective is waited for. All ranks do the same lines in the same order; `plan.deadlock`
checks that for every group.

With micro-batches, all lines are in one loop, and those that only the first or the last of them runs are marked so:
weights are gathered, in the first, where they are first read; gradients are summed over devices in the last, where the
last addend was made. What lines of the loop need of all micro-batches at once is made in a loop before (`early`).

The loop over the pieces of the loss is scheduled by itself, and is one operator to the lines around it.

Values that are in the memory of the host between forward and backward (`plan.host_values`) are copied there after the
last operator of the forward that reads them. Such a copy is waited for, and its value freed, when those under way would
take more than a window, and before the first copy that comes back; copies back begin as far ahead as a window allows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import prod

from unity_ir.pcg.collectives import AMONG_ALL, COLLECTIVES
from unity_ir.pcg.sharding import is_pinned, pins_of
from unity_ir.plan.host_values import saved_values, window_bytes
from unity_ir.plan.instructions import (
    Compute,
    Fused,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    TimeStep,
    UpdateWeight,
    ValueMove,
    When,
    communicates,
    makes,
    reads,
)
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import Action, Bucket, Schedule, ScheduledLine, Start, Wait

BUCKET_BYTES = 2**20
"""Bytes of gradient syncs or weight gathers after which a bucket is full, where `Graph.bucket` says no other number."""

BUCKET_MEMBERS = 16
"""Most collectives in a bucket; a line of more is unreadable."""

AHEAD_BYTES = 256 * 2**20
"""
Bytes of gathered weights not yet read up to which the next gather starts (FSDP's prefetch). Half a layer of Llama 3 8B;
more would make collectives of activations queue behind weights that nobody needs yet.
"""

AHEAD = 6
"""Most gathers of weights, beside small ones in buckets, that are under way or wait to be read; for the same reason."""

NEAR = 8
"""Operators before one that waits for a collective among which some may be delayed; those before them hide it."""

FAR = 48
"""
As `NEAR`, for operators whose gradients are not summed over devices, so that nothing waits for them: about those of the
backward of a layer, members of groups counted one by one.
"""

SYNCS = tuple(kind for kind in AMONG_ALL if COLLECTIVES[kind].reduces)
"""Kinds of collectives that can be the last of a gradient's sync."""

LAG = 8
"""Operators between a gradient's first collective and the move that waits for it, so that it has time to end."""

CAST_BYTES = 4
"""Bytes of weights cast in the time in which a rank receives one byte: memory's bandwidth by that of links."""

SOON = 2
"""Operators after its start within which a collective is still under way, most likely, and casts may fill the wait."""

UNDER_WAY = 64 * 2**20
"""
Most bytes of operands that gradient collectives hold until the end of the step; above it the oldest are waited for.
With so much under way, links stay busy meanwhile.
"""


def bucket_bytes(program: Program, given: int | None = None) -> int:
    """Return below how many bytes moves share calls: as `given`, or else as the program says."""
    return given if given is not None else program.bucket or BUCKET_BYTES


def schedule(program: Program, bucket: int | None = None, under_way: int = UNDER_WAY) -> Schedule:
    """
    Return the lines of a rank's forward and backward in the order in which it runs them, with collectives started early
    and waited for late. The updates of weights, which follow, are not among them.

    Gathers of weights, and reductions of gradients, of fewer than `bucket` bytes each share calls of about that many
    bytes (0: none do; None: as the program says). Collectives of gradients, except all-reduces, hold their operands
    until they are waited for, mostly at the end of the step; once these operands take more than `under_way` bytes, the
    oldest collectives are waited for.
    """
    return _scheduler(program, bucket_bytes(program, bucket), under_way).schedule()


def _scheduler(program: Program, bucket: int, under_way: int) -> _Scheduler:
    """Return the scheduler of a program; the loop over the pieces of the loss, if it has one, is an operator to it."""
    if program.loop_of_pieces is None:
        return _Scheduler(program, bucket, under_way, program.body, program.returned)
    loop, whole = program.loop_of_pieces
    start = program.body.index(loop[0])
    body = (*program.body[:start], whole, *program.body[start + len(loop) :])
    inner = _Scheduler(program, bucket, under_way, (*(Leaf("input", r) for r in whole.operands), *loop), whole.results)
    return _Scheduler(program, bucket, under_way, body, program.returned, (whole, inner))


Move = ReshardMove | HaloExchange | TimeStep | ValueMove


@dataclass(frozen=True, slots=True)
class _Cast:
    """The cast of a stored weight: a step on the way from a leaf to its readers, as a local move is."""

    compute: Compute
    operand: Register
    result: Register


class _Prefetch:
    """The gathers of weights that are under way or wait to be read, in the order of their readers."""

    def __init__(self) -> None:
        self.unread: deque[tuple[int, int]] = deque()
        """The first reader of each, and its bytes."""
        self.bytes = 0
        self.at = 0
        """The operator before which the last gather starts."""

    def start(self, reader: int, size: int) -> int:
        """
        Return the operator before which to start gathering `size` bytes that the operator `reader` is the first to
        read; 0 bytes for a small weight, which shares a call.
        """
        while self.unread and (self.bytes > AHEAD_BYTES or len(self.unread) >= AHEAD):
            self.at = max(self.at, self.unread[0][0])
            self.bytes -= self.unread.popleft()[1]
        self.at = max(min(self.at, reader - 1), 0)
        if size:
            self.unread.append((reader, size))
            self.bytes += size
        return self.at


class _Scheduler:
    def __init__(
        self,
        program: Program,
        bucket: int,
        under_way: int,
        body: Sequence[Instruction],
        returned: Sequence[Register],
        loop: tuple[Compute, _Scheduler] | None = None,
    ):
        """
        Schedule the instructions `body`, of a program, which make the registers `returned`. In `loop` there are the
        operator among them that stands for the loop over pieces of the loss, and what schedules the lines of that.
        """
        self.program = program
        self.loop = loop
        self.bucket = bucket
        self.under_way = under_way
        self.same: dict[Register, Register] = {}
        self.computes: list[Compute] = []
        self.moves: list[Move | _Cast] = []
        self.leaves: dict[Register, Leaf] = {}
        self.maker: dict[Register, int] = {}
        """Index in `computes` of the operator that makes a register."""
        self.move_of: dict[Register, Move | _Cast] = {}
        self.place: dict[Register, int] = {}
        """Index in the program of the move that makes a register."""
        for place, instruction in enumerate(body):
            match instruction:
                case Leaf():
                    self.leaves[instruction.result] = instruction
                case Compute("cast", (operand,), (result,)) if operand in self.leaves:
                    cast = _Cast(instruction, operand, result)
                    self.moves.append(cast)
                    self.move_of[result] = cast
                    self.place[result] = place
                case Compute():
                    self.maker.update(dict.fromkeys(instruction.results, len(self.computes)))
                    self.computes.append(instruction)
                case ReshardMove(operand, result, "retype", _, _, target) if not is_pinned(target):
                    self.same[result] = self._held(operand)
                case TimeStep(operand, result, "reuse"):
                    self.same[result] = self._held(operand)
                case ReshardMove() | HaloExchange() | TimeStep() | ValueMove():
                    self.moves.append(instruction)
                    self.move_of[instruction.result] = instruction
                    self.place[instruction.result] = place
                case UpdateWeight() | StateMove():
                    pass
        self.sources: dict[Register, tuple[Register, bool]] = {}
        """The results of `_source`, by register."""
        self.end = len(self.computes)
        step = body if program.part_of is None else program.part_of.body
        grads = [i.grad for i in step if isinstance(i, UpdateWeight)]
        if program.part_of is not None:
            # What it hands on to updates, if through other parts.
            steps = {i.result for i in body if isinstance(i, TimeStep) and not i.is_of_pieces}
            grads = [r for r in returned if r in steps or r in program.started or r in grads]
        self.wanted = [self._held(grad) for grad in grads]
        self.returned = tuple(self._held(r) for r in returned if program.part_of is None or r not in grads)
        self._delay()
        self.first = self._first_readers()
        self.moved = {self._held(m.operand) for m in self.moves if m.result in self.first}
        self.lines: list[Action] = []
        self.made: set[Register] = set()
        self.pending: dict[Register, tuple[Register, ...]] = {}
        self.late: dict[Register, int] = {}
        """Bytes held by each collective under way whose result only the end of the step reads, oldest first."""
        self.began: dict[Register, int] = {}
        """The number of operators before each of these started."""
        self.started: dict[Register, int] = {}
        """The number of operators before each collective started, by its first result."""
        self.done = 0
        """The number of operators scheduled so far."""
        self.leaving: deque[tuple[Register, int]] = deque()
        """The copies of values to the host that nothing has waited for yet, with their bytes, oldest first."""
        self.window = window_bytes([program.bytes[r] for r in program.values_at_host])
        self.staying: dict[int, int] = {}
        """Bytes that stay on the device for the backward, by the operator before which the forward has read them."""
        self.room = self.window
        """Most bytes of these together with copies that are under way, or not read yet."""
        self.stayed = 0
        """Bytes of those made so far."""

    def _held(self, register: Register) -> Register:
        return self.same.get(register, register)

    def _first_readers(self) -> dict[Register, int]:
        """Return the first operator that reads a register, or what moves make of it; the end for returned registers."""
        first = dict.fromkeys([*self.wanted, *self.returned], self.end)
        for p, compute in reversed(list(enumerate(self.computes))):
            first.update(dict.fromkeys(map(self._held, compute.operands), p))
        for move in reversed(self.moves):
            if move.result in first:
                for operand in map(self._held, _read_by(move)):
                    first[operand] = min(first.get(operand, self.end), first[move.result])
        return first

    # -- the order of operators

    def _source(self, register: Register) -> tuple[Register, bool]:
        """Return the register from which moves make this one, and whether one of them crosses links."""
        found = self.sources.get(register)
        if found is None:
            at, crossed = self._held(register), False
            while at in self.move_of:
                move = self.move_of[at]
                at, crossed = self._held(move.operand), crossed or _crosses(move)
            found = self.sources[register] = at, crossed
        return found

    def _delay(self) -> None:
        """
        Move operators whose results only updates read to where the next operator is the first to wait for a collective.

        One is moved for each wait, the largest of those near: a product takes longer than most collectives, and others
        are left for the waits that follow.
        """
        read = {self._source(r)[0] for compute in self.computes for r in compute.operands}
        read.update(self._source(r)[0] for r in self.returned)
        sent = frozenset(source for source, crossed in map(self._source, self.wanted) if crossed)
        order: list[Compute] = []
        moved: set[tuple[Register, ...]] = set()
        """The results of operators that were delayed."""
        there: set[Register] = set()
        """The registers that earlier operators read: their collectives have been waited for."""
        for compute in self.computes:
            wanted = [r for r in map(self._held, compute.operands) if r not in there]
            there.update(wanted)
            sources = {source for source, crossed in map(self._source, wanted) if crossed}
            if any(not sources.isdisjoint(c.results) for c in order[-NEAR:]):
                may = [
                    (self._result_bytes(c), at)
                    for at, c in _last(order, sent)
                    if c.results not in moved and read.isdisjoint(c.results)
                ]
                if may:
                    order.append(order.pop(max(may)[1]))
                    moved.add(order[-1].results)
            order.append(compute)
        self.computes = order
        self.maker = {r: p for p, compute in enumerate(order) for r in compute.results}

    def _result_bytes(self, compute: Compute) -> int:
        return sum(self.program.bytes[r] for r in compute.results)

    # -- when moves start

    def _slots(self) -> dict[int, list[Move]]:
        """Return the moves to start before each operator, by its index; others start where their result is needed."""
        slots = self._slots_of_copies()
        after_crossing: set[Register] = set()
        prefetch = _Prefetch()
        chained = {self._held(m.operand) for m in self.moves if _crosses(m)}
        # Weights first, which are gathered in the order in which they are read.
        of_weights = {m.result for m in self.moves if self._made_at(m.operand) == 0}
        order = [m for m in self.moves if m.result not in of_weights]
        for move in [*sorted(filter(lambda m: m.result in of_weights, self.moves), key=self._reader), *order]:
            operand, reader = self._held(move.operand), self.first.get(move.result)
            if reader is None:
                continue  # nobody reads it
            before = self.move_of.get(operand)
            late = operand in after_crossing or _crosses(before)
            if late:
                after_crossing.add(move.result)
            ahead = max(reader - 1, 0)
            if isinstance(move, _Cast | ValueMove):
                continue
            if not communicates(move):
                # An early slice lets its operand be freed; other local steps only take memory.
                if isinstance(move, ReshardMove) and move.kind == "slice" and not late and self._made_at(operand) > 0:
                    slots[move.result] = self._made_at(operand)
                # So does adding a gradient to those of the micro-batches before, or joining it with them.
                if move.kind in ("accumulate", "batch"):
                    last = max((slots.get(r, 0) for r in self._moves_before(move)), default=0)
                    slots[move.result] = min(last + LAG, self.end) if late else self._made_at(operand)
            elif move.kind == "ring_shift":
                slots[move.result] = self._beside(operand, reader)
            elif late:
                last = max(slots.get(r, 0) for r in self._moves_before(move))
                slots[move.result] = min(last + LAG, self.end) if reader == self.end else max(last, ahead)
            else:
                ready = self._made_at(operand)
                if ready == 0 and (move.kind != "all_gather" or move.result in chained):
                    ready = ahead  # in a chain, the next move waits for it
                elif ready == 0:
                    ready = prefetch.start(reader, 0 if self._is_small_gather(move) else self._bytes(move))
                slots[move.result] = ready
        out: dict[int, list[Move]] = {}
        for move in self.moves:
            if move.result in slots and not isinstance(move, _Cast):
                out.setdefault(slots[move.result], []).append(move)
        for moves in out.values():
            # The result that is read first is moved first, as moves over the same links queue.
            moves.sort(key=lambda m: (self.first[m.result], self.place[m.result]))
        return out

    def _slots_of_copies(self) -> dict[Register, int]:
        """
        Return the operators before which copies of values start: to the host after the value's last reader in the
        forward; back as soon as what is there for the backward, and is not read yet, leaves room in the window.
        """
        copies = [move for move in self.moves if isinstance(move, ValueMove)]
        made = self.program.loss
        if not copies or made is None:
            return {}
        loss = self._made_at(made) - 1 if self.loop is None else self.computes.index(self.loop[0])
        last = {r: p for p in range(loss + 1) for r in self._read_by(p)}
        first = {r: p for p in reversed(range(loss + 1, self.end)) for r in self._read_by(p)}
        slots: dict[Register, int] = {}
        staying = [v.register for v in saved_values(self.program) if v.register in first]
        for value in staying:
            place = max(last.get(value, -1) + 1, self._made_at(value))
            self.staying[place] = self.staying.get(place, 0) + self.program.bytes[value]
        self.room = max(self.window, sum(self.staying.values()))
        unread = [(first[value], self.program.bytes[value]) for value in staying]
        heapify(unread)
        coming: list[tuple[int, Register]] = []
        for move in copies:
            if move.kind == "to_host":
                value = self._held(move.operand)
                slots[move.result] = max(last.get(value, -1) + 1, self._made_at(value))
            else:
                coming.append((first.get(move.result, self.end), move.result))
        at, held = loss + 1, sum(size for _, size in unread)
        for reader, register in sorted(coming):
            size = self.program.bytes[register]
            while unread and held + size > self.room:
                place, read = heappop(unread)
                at, held = max(at, place + 1), held - read
            slots[register] = min(at, reader)
            heappush(unread, (reader, size))
            held += size
        return slots

    def _read_by(self, place: int) -> Iterator[Register]:
        """Yield the registers that an operator reads, and those of which moves, but no copies, make these."""
        for operand in self.computes[place].operands:
            register = self._held(operand)
            yield register
            while register in self.move_of and not isinstance(self.move_of[register], ValueMove):
                register = self._held(self.move_of[register].operand)
                yield register

    def _beside(self, operand: Register, reader: int) -> int:
        """
        Return the number of the operator that runs while a piece, `operand`, is handed on around a ring, so that the
        operator number `reader` can read it on the next device: the last one before that reads the piece here or, if
        none does, the first after the piece was made.
        """
        made = self._made_at(operand)
        between = reversed(range(made, reader))
        return next((p for p in between if operand in map(self._held, self.computes[p].operands)), made)

    def _reader(self, move: Move | _Cast) -> int:
        return self.first.get(move.result, self.end)

    def _moves_before(self, move: Move) -> Iterable[Register]:
        operand = self._held(move.operand)
        while operand in self.move_of:
            yield operand
            operand = self._held(self.move_of[operand].operand)

    def _made_at(self, register: Register) -> int:
        """Return the earliest operator before which a register can exist; 0 if it is made of leaves by moves alone."""
        register, _ = self._source(register)
        return self.maker[register] + 1 if register in self.maker else 0

    def _is_small_gather(self, move: Move) -> bool:
        """Return whether a move gathers a small weight."""
        if not isinstance(move, ReshardMove) or move.kind != "all_gather":
            return False
        source = self._held(move.operand)
        before = self.move_of.get(source)
        leaf = self.leaves.get(before.operand if isinstance(before, _Cast) else source)
        return leaf is not None and leaf.op in ("weight", "cast") and self._bytes(move) < self.bucket

    def _gathers(self, slots: Mapping[int, list[Move]]) -> dict[Register, list[ReshardMove]]:
        """Return the bucket of every gather of a small weight: it and those needed next, up to a full bucket."""
        out: dict[Register, list[ReshardMove]] = {}
        room: dict[object, list[ReshardMove]] = {}
        for _, moves in sorted(slots.items()):
            for move in moves:
                if isinstance(move, ReshardMove) and self._is_small_gather(move):
                    key = self._alike(move)
                    if self._is_full(room.get(key, ())):
                        del room[key]
                    found = out[move.result] = room.setdefault(key, [])
                    found.append(move)
        return out

    def _alike(self, move: ReshardMove) -> object:
        """Return a key that is equal for moves that may be done by one call."""
        result = move.result
        tensor = self.program.tensors[result]
        return move.kind, move.axes, tensor.dtype, self.program.when[result], pins_of(tensor.layout)

    def _is_full(self, moves: Sequence[ReshardMove]) -> bool:
        return sum(map(self._bytes, moves)) >= self.bucket or len(moves) == BUCKET_MEMBERS

    def _is_small_sync(self, move: Move) -> bool:
        """Return whether a move is a small sync of a gradient that only the update reads."""
        if not isinstance(move, ReshardMove) or move.kind not in SYNCS or self.first[move.result] < self.end:
            return False
        operand = self._held(move.operand)
        is_last = move.result in self.wanted and move.result not in self.returned
        followed = move.result in self.moved
        alone = _crosses(self.move_of.get(operand))
        return is_last and not followed and not alone and self._bytes(move) < self.bucket

    def _bytes(self, move: Move | _Cast) -> int:
        """Return the bytes of a move's operand or result, whichever is larger."""
        return max(self.program.bytes[r] for r in (move.operand, move.result))

    # -- lines

    def schedule(self) -> Schedule:
        self._order_lines()
        return Schedule(tuple(self._with_deaths()), self.same)

    def _order_lines(self) -> None:
        slots = self._slots()
        full: dict[object, list[ReshardMove]] = {}
        starting = (m for moves in slots.values() for m in moves)
        syncs = [m for m in starting if isinstance(m, ReshardMove) and self._is_small_sync(m)]
        sharing = {m.result for m in syncs}
        # A bucket that gets no more members starts, full or not.
        to_come = Counter(map(self._alike, syncs))
        gathers = self._gathers(slots)
        casts = deque(
            sorted((m for m in self.moves if isinstance(m, _Cast) and m.result in self.first), key=self._reader)
        )
        for leaf in self.leaves.values():
            if leaf.op == "input":
                self._make(leaf.result)
        for p in range(self.end + 1):
            for move in slots.get(p, ()):
                if move.result in gathers:
                    self._start_bucket(gathers[move.result])
                elif isinstance(move, ValueMove):
                    self._copy(move)
                elif move.result not in sharing:
                    self._make(move.result)
                else:
                    assert isinstance(move, ReshardMove)
                    key = self._alike(move)
                    found = full.setdefault(key, [])
                    found.append(move)
                    to_come[key] -= 1
                    if self._is_full(found) or not to_come[key]:
                        self._start_bucket(found)
            self.stayed += self.staying.get(p, 0)
            self._make_room(0)
            if p < self.end:
                compute = self.computes[p]
                self._cast_meanwhile(casts, [o for o in map(self._held, compute.operands) if self._is_awaited(o)])
                for operand in compute.operands:
                    self._need(operand)
                if self.loop is not None and compute is self.loop[0]:
                    self._append_loop(self.loop[1])
                else:
                    self.lines.append(compute)
                self.done += 1
                self.made.update(compute.results)
        for register in (*self.returned, *self.wanted):
            self._make(register)
        for register in (*self.returned, *self.wanted):
            if register not in self.program.started:
                self._need(register)
        if "early" in self.program.when.values():
            # The loop before comes first, and inputs before that.
            self.lines.sort(key=lambda a: 0 if isinstance(a, Leaf) else 1 if self._when(a) == "early" else 2)

    def _append_loop(self, inner: _Scheduler) -> None:
        """Append the lines of the loop over the pieces of the loss."""
        inner._order_lines()
        self.same |= {made: self._held(held) for made, held in inner.same.items()}
        self.lines += (a for a in inner.lines if not isinstance(a, Leaf))

    def _make(self, register: Register) -> None:
        """Append the line that makes a register, unless it is made already."""
        register = self._held(register)
        if register in self.made:
            return
        self.made.add(register)
        if register in self.leaves:
            self.lines.append(self.leaves[register])
            if self.leaves[register].op == "started":
                self.pending[register] = (register,)
                self.started[register] = self.done
            return
        move = self.move_of[register]
        for operand in _read_by(move):
            self._need(operand)
        if isinstance(move, _Cast):
            self.lines.append(move.compute)
            return
        self.lines.append(move)
        if communicates(move) or isinstance(move, ValueMove):
            self.pending[register] = (register,)
            self.started[register] = self.done
            self._bound((move,))

    def _copy(self, move: ValueMove) -> None:
        """Append a copy between the device and its host, after the waits that make room for it."""
        size, is_back = self.program.bytes[move.operand], move.kind == "from_host"
        self._make_room(self.window if is_back else size)
        self._make(move.result)
        if not is_back:
            self.leaving.append((move.result, size))

    def _make_room(self, size: int) -> None:
        """Wait for copies to the host, the oldest first, until there is room for so many bytes more."""
        most = min(self.window, self.room - self.stayed)
        while self.leaving and sum(n for _, n in self.leaving) + size > most:
            self._need(self.leaving.popleft()[0])

    def _is_awaited(self, register: Register) -> bool:
        """Return whether reading a register now waits for a collective, so recently did that start."""
        return register in self.pending and self.done - self.started[self.pending[register][0]] < SOON

    def _cast_meanwhile(self, casts: deque[_Cast], waited: Iterable[Register]) -> None:
        """Make casts of stored weights that are still to be made, for about as long as some collectives take."""
        left = CAST_BYTES * sum(self._received(self.move_of[r]) for r in waited)
        while casts and left > 0:
            cast = casts.popleft()
            if cast.result not in self.made:
                left -= self.program.bytes[cast.operand]
                self._make(cast.result)

    def _received(self, move: Move | _Cast) -> float:
        """Return about how many bytes a rank receives in a move, by the larger of operand and result."""
        axes = move.axes if isinstance(move, ReshardMove | HaloExchange) else ()
        ways = prod(self.program.mesh.sizes[axis] for axis in axes)
        return self._bytes(move) * (ways - 1) / ways

    def _need(self, register: Register) -> None:
        """Append the lines after which a register can be read: those that make it, and wait for it."""
        register = self._held(register)
        self._make(register)
        if register in self.pending:
            together = self.pending[register]
            for each in together:
                del self.pending[each]
            self.late.pop(together[0], None)
            self.lines.append(Wait(together))

    def _start_bucket(self, moves: list[ReshardMove]) -> None:
        """Append the line that does several moves as one, and empty the list."""
        if len(moves) == 1:
            self._make(moves[0].result)
        elif moves:
            for move in moves:
                self._need(move.operand)
            together = tuple(m.result for m in moves)
            self.lines.append(Bucket(tuple(moves)))
            self.made.update(together)
            self.pending.update(dict.fromkeys(together, together))
            self.started[together[0]] = self.done
            self._bound(moves)
        moves.clear()

    def _bound(self, started: Sequence[Move]) -> None:
        """
        Count a collective of gradients just started; if all under way hold too much, wait for the oldest until half,
        but for those that started fewer than `LAG` operators ago.
        """
        first = started[0]
        if first.kind == "all_reduce" or (first.result not in self.wanted and first.result not in self.program.started):
            return  # an all-reduce holds nothing but its result
        self.late[first.result] = sum(self.program.bytes[m.operand] for m in started)
        self.began[first.result] = self.done
        if sum(self.late.values()) > self.under_way:
            while len(self.late) > 1 and sum(self.late.values()) > self.under_way // 2:
                oldest = next(iter(self.late))
                if self.done - self.began[oldest] < LAG:
                    break
                self._need(oldest)

    def _with_deaths(self) -> list[ScheduledLine]:
        """Return the lines, each with the registers that it reads for the last time."""
        alive = {*self.returned, *self.wanted}
        # The caller holds these.
        kept = {r for r, leaf in self.leaves.items() if leaf.op not in ("constant", "last", "sum", "started")}
        out: list[ScheduledLine] = []
        unfreed = Schedule((), self.same)
        # What is made once, or adds up, stays from one micro-batch to the next.
        steps = (m for m in self.moves if isinstance(m, TimeStep) and not m.is_of_pieces)
        sums = {m.result for m in steps if m.kind in ("accumulate", "batch")}
        once = sums | {r for r, when in self.program.when.items() if when == "first"}
        each = (unfreed.reads_and_makes(a)[0] for a in self.lines if self._when(a) in ("every", "last"))
        read_again = once.intersection(r for reads in each for r in reads)
        end: int | None = None
        """Index in `out` of the last line of the loop over pieces."""
        for action in reversed(self.lines):
            reads, makes = unfreed.reads_and_makes(action)
            when = self._when(action)
            if when == "first":
                # Lines before it, in later micro-batches, read these again.
                reads, makes = (tuple(r for r in registers if r not in read_again) for registers in (reads, makes))
            dies = tuple(r for r in dict.fromkeys((*reads, *makes)) if r not in alive and r not in kept)
            alive.update(reads)
            late = tuple(r for r in dies if r in once) if when == "every" else ()
            dies = tuple(r for r in dies if r not in late)
            if not self._is_in_pieces(action):
                out.append(ScheduledLine(action, dies, when, late))
                continue
            # Pieces that follow read what was made before the loop.
            own = tuple(r for r in dies if r in self.program.in_pieces)
            end = len(out) if end is None else end
            out.append(ScheduledLine(action, own, when, (), True))
            last = out[end]
            others = tuple(r for r in dies if r not in own)
            out[end] = replace(last, dies=(*last.dies, *others), dies_last=(*last.dies_last, *late))
        return out[::-1]

    def _is_in_pieces(self, action: Action) -> bool:
        """Return whether a line is in the loop over the pieces of the loss."""
        if not self.program.in_pieces:
            return False
        if isinstance(action, TimeStep):
            return self.program.is_in_pieces(action)
        made = action.registers if isinstance(action, Wait) else _made_by(action)
        return not self.program.in_pieces.isdisjoint(made)

    def _when(self, action: Action) -> When:
        """Return in which micro-batches a line runs: as what it makes, or waits for."""
        made = action.registers if isinstance(action, Wait) else _made_by(action)
        return self.program.when[made[0]]


def _last(order: Sequence[Compute], sent: frozenset[Register]) -> Iterator[tuple[int, Compute]]:
    """
    Yield the last operators of `order` that may be delayed, with their places: those within `NEAR`, and those within
    `FAR` whose results are not in `sent`, the gradients that are summed over devices.
    """
    passed = 0
    for at in reversed(range(len(order))):
        is_near = at >= len(order) - NEAR
        if not is_near and passed >= FAR:
            return
        compute = order[at]
        passed += len(compute.members) if isinstance(compute, Fused) else 1
        if is_near or sent.isdisjoint(compute.results):
            yield at, compute


def _made_by(action: Leaf | Compute | Start | TimeStep | ValueMove) -> tuple[Register, ...]:
    """Return the registers that a line makes."""
    return tuple(m.result for m in action.moves) if isinstance(action, Bucket) else makes(action)


def _read_by(move: Move | _Cast) -> tuple[Register, ...]:
    return (move.operand,) if isinstance(move, _Cast) else reads(move)


def _crosses(move: Move | _Cast | None) -> bool:
    """Return whether a move's result must be waited for."""
    return isinstance(move, ValueMove) or (move is not None and not isinstance(move, _Cast) and communicates(move))
