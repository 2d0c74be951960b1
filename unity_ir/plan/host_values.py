"""
Choose the values, of those that the forward saves for the backward, that are in the memory of the host meanwhile (Rhu
et al., 2016, vDNN), and say how far copies run ahead.

A value goes after its last use in the forward, and comes back before its first use in the backward of the same
micro-batch: no copy is under way from one micro-batch to the next. All values go that

- have `VALUE_BYTES` or more on a device, and are made of inputs by operators or collectives (weights, what is gathered
  or cast of them, and what all micro-batches share stay);
- the loss does not read, as its backward would read them at once;
- are not among the first that the backward reads, which take a window together, or among as many more as are to stay.

Copies to the host hold their values until they are waited for; the plan (`plan.schedule`) does that when those under
way would take more than a window (`window_bytes`), or with the values that stay more than these. A copy from the host
begins as soon as it, and what is on the device for the backward that it has not read yet, take no more than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    TimeStep,
    ValueMove,
    makes,
    reading,
    reads,
)
from unity_ir.plan.program import Program

VALUE_BYTES = 2**20
"""Fewest bytes of a value that goes: at 50 GB/s a copy of them takes 20 us, about twice its latency."""

VALUE_WINDOW = 256 * 2**20
"""
Least bytes of a window: 5 ms of copies at 50 GB/s, in which a device does several kernels. A window has room for two of
the largest values at least, so that one is on its way while another one waits to be read, or to be freed.
"""


WINDOW_PART = 1 / 32
"""
Least part of all bytes that go in a window: of a model of 32 layers it has room for what one of them saves, all of
which may be made at its end, while attention takes most of the time.
"""


def window_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of a window (module docstring). `sizes` are the bytes of each value that goes."""
    return max(VALUE_WINDOW, 2 * max(sizes, default=0), int(WINDOW_PART * sum(sizes)))


def bytes_at_host(sizes: Sequence[int], staying: int = 0) -> int:
    """Return about how many bytes go, of values of `sizes` bytes each, if `staying` bytes stay beside a window."""
    large = [size for size in sizes if size >= VALUE_BYTES]
    return max(sum(large) - window_bytes(large) - staying, 0)


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value that the forward saves for the backward: its register, its last reader before, and its first there."""

    register: Register
    last: int
    """The number of the instruction that reads it last in the forward, or makes it if none does."""
    first: int
    """The number of the first instruction of the backward that reads it."""


def saved_values(program: Program) -> list[SavedValue]:
    """
    Return the values of a step without values at the host that may go, in the order in which the backward reads them.
    """
    begin, end = _loss(program)
    alias = _aliases(program.body)
    made: dict[Register, int] = {}
    last: dict[Register, int] = {}
    first: dict[Register, int] = {}
    of_inputs: set[Register] = set()
    out: set[Register] = {alias.get(r, r) for r in program.outputs}
    for place, instruction in enumerate(program.body):
        read = [alias.get(r, r) for r in reads(instruction)]
        if place < begin:
            is_made = isinstance(instruction, Compute | ReshardMove | HaloExchange)
            for register in makes(instruction):
                if (isinstance(instruction, Leaf) and instruction.op == "input") or not of_inputs.isdisjoint(read):
                    of_inputs.add(register)
                    if is_made and register not in alias:
                        made[register] = place
            last.update(dict.fromkeys(read, place))
        elif place <= end:
            out.update(read)
        else:
            for register in read:
                first.setdefault(register, place)
    found = [
        SavedValue(r, last.get(r, place), first[r])
        for r, place in made.items()
        if r in first and r not in out and _may_go(program, r)
    ]
    return sorted(found, key=lambda value: (value.first, value.register))


def _loss(program: Program) -> tuple[int, int]:
    """Return the numbers of the first and of the last instruction that make the loss, and of those that move it."""
    if program.loop_of_pieces is not None:
        loop, _ = program.loop_of_pieces
        return program.body.index(loop[0]), program.body.index(loop[-1])
    made, end = program.loss, len(program.body)
    for place in reversed(range(len(program.body))):
        instruction = program.body[place]
        if made in makes(instruction):
            end = min(end, place)
            if not isinstance(instruction, ReshardMove):
                return place, end
            made = instruction.operand
    return end, end


def _aliases(body: Iterable[Instruction]) -> dict[Register, Register]:
    """Return the registers that are made without any work, and the register whose tensor each shares."""
    found: dict[Register, Register] = {}
    for instruction in body:
        match instruction:
            case ReshardMove(operand, result, "retype") | TimeStep(operand, result, "reuse"):
                found[result] = found.get(operand, operand)
            case _:
                pass
    return found


def _may_go(program: Program, register: Register) -> bool:
    tensor = program.tensors[register]
    is_each = program.when[register] == "every" and register not in program.in_pieces
    return is_each and program.bytes[register] >= VALUE_BYTES and not tensor.row and not pins_of(tensor.layout)


def values_to_host(program: Program, staying: int = 0) -> frozenset[Register]:
    """
    Return the values of a step that go to the host (module docstring), if `staying` bytes are to stay on the device
    beside a window. Those that stay are spread over the step, so that the link has as much to do as long as it lasts.
    """
    values = saved_values(program)
    sizes = [program.bytes[value.register] for value in values]
    room = window_bytes(sizes)
    part = staying / max(sum(sizes) - room, 1)
    going: set[Register] = set()
    due = 0.0
    for value, size in zip(values, sizes, strict=True):
        room -= size
        if room < 0:
            due += part * size
            if due >= size:
                due -= size
            else:
                going.add(value.register)
    return frozenset(going)


def with_values_at_host(program: Program, values: Collection[Register]) -> Program:
    """
    Return the program in which those of `values` that the backward still reads are in the memory of the host meanwhile.

    rewrite: x = f(..); y = g(x) .. z = h(x)
          -> x = f(..); y = g(x); a = to_host(x) .. b = from_host(a); z = h(b)
    """
    going = [value for value in saved_values(program) if value.register in values]
    leaving: dict[int, list[Register]] = {}
    coming: dict[int, list[Register]] = {}
    for value in going:
        leaving.setdefault(value.last, []).append(value.register)
        coming.setdefault(value.first, []).append(value.register)
    tensors, body = dict(program.tensors), list[Instruction]()
    at_host: dict[Register, Register] = {}
    back: dict[Register, Register] = {}
    alias = _aliases(program.body)
    moves = {i.result: i for i in program.body if isinstance(i, ReshardMove | TimeStep) and i.result in alias}

    def new(register: Register) -> Register:
        tensors[number := len(tensors)] = tensors[register]
        return number

    def returned(register: Register) -> Register:
        """Return what the backward reads in place of a register, and make it if it has another type alone."""
        if register not in back and alias.get(register) in back:
            move = moves[register]
            operand = returned(move.operand)
            back[register] = new(register)
            body.append(replace(move, operand=operand, result=back[register]))
        return back.get(register, register)

    for place, instruction in enumerate(program.body):
        for register in coming.get(place, ()):
            back[register] = new(register)
            body.append(ValueMove(at_host[register], back[register], "from_host"))
        names = {r: returned(r) for r in reads(instruction)} if back else {}
        body.append(reading(instruction, names))
        for register in leaving.get(place, ()):
            at_host[register] = new(register)
            body.append(ValueMove(register, at_host[register], "to_host"))
    return replace(program, tensors=tensors, body=tuple(body))


def still_going(program: Program, going: Collection[Register], staying: Collection[Register]) -> frozenset[Register]:
    """
    Return the values that go of a step whose operators were fused since the values `going` and `staying` were chosen:
    the former, and what kernels save in their place. What these save of values that stay is read earlier, and stays.
    """
    values = saved_values(program)
    first = min((value.first for value in values if value.register in going), default=0)
    return values_to_host(program).intersection(
        v.register for v in values if v.register in going or (v.first > first and v.register not in staying)
    )


def without_values_at_host(program: Program) -> tuple[Program, frozenset[Register]]:
    """
    Return (the same step with all values on the device, those of its values that may go, and did not). A step without
    values at the host is returned as it is.
    """
    if not program.values_at_host:
        return program, frozenset()
    of = dict(program.values_at_host)
    body: list[Instruction] = []
    for instruction in program.body:
        if isinstance(instruction, ValueMove):
            of[instruction.result] = of.get(instruction.operand, instruction.operand)
        else:
            body.append(reading(instruction, of))
    bare = replace(program, body=tuple(body))
    return bare, frozenset(value.register for value in saved_values(bare)) - {*program.values_at_host.values()}
