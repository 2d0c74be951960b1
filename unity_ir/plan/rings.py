"""
Write attention around a ring: devices that divide a sequence hand on their keys and values, piece by piece, while they
attend to those that they have, instead of gathering all of them first (Liu et al., 2023).

    k, v = all_gather(k0), all_gather(v0)      k1, v1 = ring_shift(k0), ring_shift(v0)
    out = attention(q, k, v)                   out, sums = attention_part(q, k0, v0)
                                           ->  k2, v2 = ring_shift(k1), ring_shift(v1)
                                               out, sums = merge_parts(out, sums, *attention_part(q, k1, v1))
                                               ..

Each `ring_shift` is under way while the line after it runs. In the backward each piece takes the gradients of its keys
and values along: every device adds its own, and one more shift brings them home. A device holds two pieces at most.

The lines are those of a program as any other: they are scheduled, priced, simulated and printed as such. That each
device attends to a piece of its own is said by types: the pieces of a sequence are counted as samples, so queries and
keys [b, h, n, e] that p devices divide along n are [b p, h, n / p, e], divided along the first dim. They are the same
local tensors. Sample i p + r then stands for piece r of sample i on whichever device has it; as all operands are
counted alike, and samples do not meet, results are right in any order of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from unity_ir.ops import operator
from unity_ir.ops.attention import ATTENTION, ATTENTION_RANGES, SAVINGS
from unity_ir.ops.striped import ATTENTION_STRIPED
from unity_ir.ops.striped import SAVINGS as STRIPED_SAVINGS
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import (
    REPEAT,
    Assignment,
    assignment_for,
    copies_as_repeats,
    is_pinned,
    operand_layout,
    result_layout,
)
from unity_ir.plan.instructions import Compute, Instruction, Leaf, Register, ReshardMove, Tensor, reads
from unity_ir.plan.program import Program, global_line
from unity_ir.plan.saved_softmax import first_with_values
from unity_ir.tdl.element_types import HALVES
from unity_ir.tdl.syntax import AttrValue

_RINGED = (ATTENTION.name, ATTENTION_RANGES.name, ATTENTION_STRIPED.name)

BACKWARD_OF = {of.forward: of.backward for of in (*SAVINGS, *STRIPED_SAVINGS) if of.forward in _RINGED}
"""The names of attention that can go around a ring, each with that of its backward."""

MOST_PIECES = 16
"""
Most devices of a ring: each turn is some lines of the step, of every layer. Over more devices, a ring along some mesh
axes and heads divided along others move less.
"""

SEQUENCE = 2
"""The dim of queries, keys and values that is the sequence."""


@dataclass(frozen=True)
class Ring:
    """
    Attention that can go around a ring: the mesh axes along which its devices divide the sequence, and the operators,
    forward and backward, on the same queries, keys and values (those made again among them).
    """

    axes: tuple[int, ...]
    forwards: tuple[Compute, ...]
    backwards: tuple[Compute, ...]


def rings(program: Program) -> tuple[Ring, ...]:
    """
    Return the attention of a program that can go around a ring. Queries must be divided along the sequence, keys and
    values gathered over the same devices, and their gradients, where they are read, divided over these, by collectives
    whose results nothing else reads; a causal mask needs natural order, or striped order with a stripe per device.
    """
    found = _Finder(program)
    alike: dict[tuple[object, ...], list[Compute]] = defaultdict(list)
    firsts = first_with_values(program)
    for i in program.body:
        if isinstance(i, Compute) and (i.operator in BACKWARD_OF or i.operator in BACKWARD_OF.values()):
            own = found.given(i)
            name = i.operator.removesuffix("_grad")
            attributes = tuple(sorted(i.attributes))
            alike[name, tuple(firsts.get(r, r) for r in own), attributes, i.assignment].append(i)
    made: list[Ring] = []
    for computes in alike.values():
        axes = {found.axes(i) for i in computes}
        forwards = tuple(i for i in computes if i.operator in BACKWARD_OF)
        if forwards and len(axes) == 1 and (ring := axes.pop()) is not None:
            made.append(Ring(ring, forwards, tuple(i for i in computes if i.operator not in BACKWARD_OF)))
    # A gather whose result others read stays, and saves nothing.
    known = {i.results for ring in made for i in (*ring.forwards, *ring.backwards)}
    return tuple(
        ring
        for ring in made
        if all(
            isinstance(reader, Compute) and reader.results in known
            for i in (*ring.forwards, *ring.backwards)
            for r in found.given(i)[1:3]
            for reader in found.readers[r]
        )
    )


class _Finder:
    """Finds attention that can go around a ring, from the moves that make registers and what reads each."""

    def __init__(self, program: Program):
        self.program = program
        self.makers: dict[Register, ReshardMove] = {}
        self.readers: dict[Register, list[Instruction]] = defaultdict(list)
        for i in program.body:
            if isinstance(i, ReshardMove):
                self.makers[i.result] = i
            for register in reads(i):
                self.readers[register].append(i)

    def given(self, compute: Compute) -> tuple[Register, ...]:
        """Return the queries, keys and values, and ranges if there are any, of an attention, forward or backward."""
        return compute.operands[compute.operator.endswith("_grad") :]

    def axes(self, compute: Compute) -> tuple[int, ...] | None:
        """Return the mesh axes of the ring around which an attention can go; None if it cannot."""
        program = self.program
        q, k, v, *_ = self.given(compute)
        layout = program.tensors[q].layout
        axes = tuple(axis for axis in range(program.axes) if layout[axis] == SEQUENCE)
        pieces = prod(program.mesh.sizes[axis] for axis in axes)
        others = (what for axis, what in enumerate(compute.assignment) if axis not in axes)
        length = program.tensors[q].shape[SEQUENCE]
        if not (
            2 <= pieces <= MOST_PIECES
            and all(compute.assignment[axis] == "i" for axis in axes)
            and all(isinstance(what, int) or what in ("b", "h", "g") for what in others)
            and program.tensors[k].shape[SEQUENCE] == length
            and all(self.gathers(r, axes) for r in (k, v))
        ):
            return None
        given = dict(compute.attributes)
        if given.get("stripes", pieces) != pieces:
            return None
        if compute.operator in BACKWARD_OF:
            return axes
        return axes if all(self.scatters(r, axes) for r in compute.results[1:] if self.readers[r]) else None

    def gathers(self, register: Register, axes: tuple[int, ...]) -> tuple[ReshardMove, ...]:
        """
        Return the collectives, in order, that gather a register over these mesh axes alone, each axis once, and none of
        whose results others read; () if there are none, or if devices cannot have contiguous pieces of the sequence
        instead.
        """
        found: list[ReshardMove] = []
        left = {*axes}
        while left:
            move = self.makers.get(register)
            if move is None or move.kind != "all_gather" or not left.issuperset(move.axes):
                return ()
            if found and len(self.readers[register]) > 1:
                return ()
            left -= {*move.axes}
            found.insert(0, move)
            register = move.operand
        return tuple(found) if can_stay_divided(found) else ()

    def scatters(self, register: Register, axes: tuple[int, ...]) -> tuple[ReshardMove, ...]:
        """
        Return the collectives, in order, that divide a register's sum over these mesh axes, each axis once, and alone
        read it and each other's results; () if there are none, or if they cannot do so with devices that have
        contiguous pieces of the sequence of the sum.
        """
        found: list[ReshardMove] = []
        left = {*axes}
        while left:
            match self.readers[register]:
                case [ReshardMove(kind="reduce_scatter") as move] if left.issuperset(move.axes):
                    left -= {*move.axes}
                    found.append(move)
                    register = move.result
                case _:
                    return ()
        divided = {*axes}
        for move in found:
            if move.target != SEQUENCE:
                divided -= {*move.axes}
                if not _is_inside(move.axes, divided):
                    return ()
        return tuple(found)


def can_stay_divided(gathers: Sequence[ReshardMove | Move]) -> bool:
    """
    Return whether devices can have contiguous pieces of the sequence of what these all-gathers, in order, would bring
    together: each mesh axis divides the sequence before, or can enter it inside of all that divide it then.
    """
    divided = {axis for move in gathers if move.source == SEQUENCE for axis in move.axes}
    for move in gathers:
        if move.kind != "all_gather" or (move.source != SEQUENCE and not _is_inside(move.axes, divided)):
            return False
        divided |= {*move.axes}
    return True


def _is_inside(axes: Collection[int], divided: Collection[int]) -> bool:
    """Return whether mesh axes can enter or leave a dim that others divide: the last come first to leave."""
    return min(axes) > max(divided, default=-1)


def with_rings(program: Program) -> Program:
    """Return the program with all attention that can (`rings`) going around a ring; itself, if there is none."""
    found = rings(program)
    return _Writer(program, found).program() if found else program


@dataclass
class _Writer:
    """Writes a program whose attention goes around rings."""

    of: Program
    rings: tuple[Ring, ...]
    body: list[Instruction] = field(default_factory=list[Instruction])
    _ranges: dict[object, tuple[Register, Register]] = field(default_factory=dict[object, tuple[Register, Register]])
    """The ranges of keys that queries see in a turn, by all that they depend on."""
    _constants: dict[tuple[Tensor, int], Register] = field(default_factory=dict[tuple[Tensor, int], Register])
    _moved: dict[object, Register] = field(default_factory=dict[object, Register])
    """The registers that `_exchanged` has made, by its arguments."""
    _samples: dict[tuple[Register, tuple[int, ...]], Register] = field(
        default_factory=dict[tuple[Register, tuple[int, ...]], Register]
    )
    """A register with pieces counted as samples, by the register and the axes of the ring."""

    def __post_init__(self) -> None:
        self.finder = _Finder(self.of)
        self.tensors: dict[Register, Tensor] = dict(self.of.tensors)
        self.ring_of = {i.results: ring for ring in self.rings for i in (*ring.forwards, *ring.backwards)}
        self.saved: dict[int, tuple[Register, Register]] = {}
        """By ring, what its last forward has made, and the logarithms of its sums, pieces counted as samples."""

    def program(self) -> Program:
        """Return the program."""
        gone: set[Register] = set()
        for ring in self.rings:
            for i in (*ring.forwards, *ring.backwards):
                gone |= {m.result for r in self.finder.given(i)[1:3] for m in self.finder.gathers(r, ring.axes)}
            for i in ring.backwards:
                gone |= {m.result for r in i.results[1:] for m in self.finder.scatters(r, ring.axes)}
        for i in self.of.body:
            if isinstance(i, Compute) and i.results in self.ring_of:
                ring = self.ring_of[i.results]
                (self._forward if i.operator in BACKWARD_OF else self._backward)(ring, i)
            elif not (isinstance(i, ReshardMove) and i.result in gone):
                self.body.append(i)
        return replace(self.of, body=tuple(self.body), tensors=self.tensors)

    def _forward(self, ring: Ring, compute: Compute) -> None:
        q, k, v = self._given(ring, compute)
        dtype = self.tensors[q].dtype
        longer = "f32" if dtype in HALVES else dtype
        total: tuple[Register, ...] = ()
        for turn in range(self._pieces(ring)):
            operands = (q, k, v, *self._range(ring, compute, turn))
            k, v = self._handed_on(ring, turn, k, v)
            attributes = self._attributes(ring, compute, turn) | {"sums": longer}
            out, sums = self._compute(ring, compute, "attention_part", operands, attributes)
            if total:
                # Casts come right before what reads them, so that they are one kernel with it.
                both = self._cast(total[0], longer), total[1], self._cast(out, longer), sums
                total = self._pointwise("merge_parts", both)
            else:
                total = out, sums
        assert total, "a ring has two devices, at least"
        out, sums = self._cast(total[0], dtype), total[1]
        self.saved[id(ring)] = out, sums
        self._renamed(out, compute.results[0])

    def _backward(self, ring: Ring, compute: Compute) -> None:
        q, k, v = self._given(ring, compute)
        y, dtype = self._as_samples(ring, compute.operands[0]), self.tensors[q].dtype
        longer = "f32" if dtype in HALVES else dtype
        of_queries: tuple[Register, ...] = ()
        of_pieces: tuple[Register, ...] = ()
        # The gradient of what only frozen weights make is not.
        read = [number for number, r in enumerate(compute.results[1:]) if self.finder.readers[r]]
        for turn in range(self._pieces(ring)):
            operands = (y, q, k, v, *self._range(ring, compute, turn), *self.saved[id(ring)])
            k, v = self._handed_on(ring, turn, k, v)
            given = self._attributes(ring, compute, turn)
            dq, *made = self._compute(ring, compute, "attention_part_grad", operands, given)
            if self.finder.readers[compute.results[0]]:
                addends = [self._cast(r, longer) for r in (*of_queries, dq)] if of_queries else []
                of_queries = self._pointwise("add", addends) if of_queries else (dq,)
            own = [made[number] for number in read]
            arrived = [self._shift(ring, r) for r in of_pieces]
            sums = (self._pointwise("add", pair)[0] for pair in zip(arrived, own, strict=True)) if arrived else own
            of_pieces = tuple(sums)
        for total in of_queries:
            self._renamed(self._cast(total, dtype), compute.results[0])
        for number, total in zip(read, of_pieces, strict=True):
            result = compute.results[1 + number]
            moves = self.finder.scatters(result, ring.axes)
            tensor = self.tensors[result]
            layout = tuple(SEQUENCE if axis in ring.axes else role for axis, role in enumerate(tensor.layout))
            home = self._register(replace(tensor, layout=layout))
            self._renamed(self._shift(ring, total), home)
            for move in moves:
                if move.target != SEQUENCE:
                    home = self._exchanged(home, move.axes, SEQUENCE, move.target)
            self._renamed(home, moves[-1].result)

    def _pieces(self, ring: Ring) -> int:
        return prod(self.of.mesh.sizes[axis] for axis in ring.axes)

    def _given(self, ring: Ring, compute: Compute) -> tuple[Register, Register, Register]:
        """Return the queries, and the keys and values of each device's own piece, with pieces counted as samples."""
        q, *others = self.finder.given(compute)[:3]
        k, v = (self._own_piece(ring, r) for r in others)
        return self._as_samples(ring, q), k, v

    def _own_piece(self, ring: Ring, gathered: Register) -> Register:
        """Return the piece of each device of what was gathered, counted as a sample."""
        moves = self.finder.gathers(gathered, ring.axes)
        register = moves[0].operand
        for move in moves:
            if move.source != SEQUENCE:
                register = self._exchanged(register, move.axes, move.source, SEQUENCE)
        return self._as_samples(ring, register)

    def _exchanged(self, register: Register, axes: tuple[int, ...], source: int, target: int) -> Register:
        """Return a register whose shards along dim `source`, over these mesh axes, are along dim `target`."""
        key = register, axes, source, target
        if key not in self._moved:
            tensor = self.tensors[register]
            layout = tuple(target if axis in axes else role for axis, role in enumerate(tensor.layout))
            self._moved[key] = self._register(replace(tensor, layout=layout))
            self.body.append(ReshardMove(register, self._moved[key], "all_to_all", axes, source, target))
        return self._moved[key]

    def _handed_on(self, ring: Ring, turn: int, *given: Register) -> tuple[Register, ...]:
        """Return keys and values of the piece of the next turn; after the last there is none."""
        return given if turn == self._pieces(ring) - 1 else tuple(self._shift(ring, r) for r in given)

    def _attributes(self, ring: Ring, compute: Compute, turn: int) -> dict[str, AttrValue]:
        given, pieces = dict(compute.attributes), self._pieces(ring)
        length = self.of.tensors[self.finder.given(compute)[0]].shape[SEQUENCE] // pieces
        # What ranges leave is no more than a causal mask in natural order does, if they are causal.
        block = _block(given, length)
        return {"scale": given["scale"], "seen": 1.0 if block is None else seen_in_turn(turn, length, block)}

    def _range(self, ring: Ring, compute: Compute, turn: int) -> tuple[Register, Register]:
        """Return the first key that each query sees in a turn, and that after the last."""
        q, _, _, *ranges = self.finder.given(compute)
        pieces, attributes = self._pieces(ring), dict(compute.attributes)
        shape, layout = self.of.tensors[q].shape, self.of.tensors[q].layout
        length = shape[SEQUENCE] // pieces
        block = _block(attributes, length)
        own = tuple({0: 0, SEQUENCE: 1}.get(role, role if is_pinned(role) else REPEAT) for role in layout)
        whole = Tensor((shape[0], shape[SEQUENCE]), "i64", own)
        key = ring.axes, whole, block, tuple(ranges), turn if ranges or block is not None else -1
        if key not in self._ranges:
            order = {"turn": turn, "pieces": pieces, "length": length}
            if ranges:
                first, end = self._pointwise("ranges_part", ranges, order)
            elif block is None:
                first, end = self._constant(whole, 0), self._constant(whole, length)
            else:
                first = self._constant(whole, 0)
                (end,) = self._pointwise("causal_part", (first,), order | {"block": block})
            self._ranges[key] = self._as_samples(ring, first, 1), self._as_samples(ring, end, 1)
        return self._ranges[key]

    # -- instructions

    def _register(self, tensor: Tensor) -> Register:
        register = len(self.tensors)
        self.tensors[register] = tensor
        return register

    def _constant(self, tensor: Tensor, value: int) -> Register:
        if (tensor, value) not in self._constants:
            register = self._constants[tensor, value] = self._register(tensor)
            self.body.append(Leaf("constant", register, "", float(value)))
        return self._constants[tensor, value]

    def _as_samples(self, ring: Ring, register: Register, dim: int = SEQUENCE) -> Register:
        """Return a register whose pieces along `dim`, over the ring, are counted as samples; no line does anything."""
        key = register, ring.axes
        if key not in self._samples:
            tensor, pieces = self.tensors[register], self._pieces(ring)
            shape = (tensor.shape[0] * pieces, *tensor.shape[1:])
            shape = (*shape[:dim], shape[dim] // pieces, *shape[dim + 1 :])
            layout = tuple(0 if axis in ring.axes else role for axis, role in enumerate(tensor.layout))
            made = self._samples[key] = self._register(replace(tensor, shape=shape, layout=layout))
            self._renamed(register, made)
        return self._samples[key]

    def _renamed(self, register: Register, result: Register) -> None:
        self.body.append(ReshardMove(register, result, "retype", (), REPEAT, REPEAT))

    def _shift(self, ring: Ring, register: Register) -> Register:
        result = self._register(self.tensors[register])
        self.body.append(ReshardMove(register, result, "ring_shift", ring.axes, 0, 0))
        return result

    def _cast(self, register: Register, dtype: str) -> Register:
        if self.tensors[register].dtype == dtype:
            return register
        return self._pointwise("cast", (register,), {"to": dtype})[0]

    def _pointwise(
        self, name: str, operands: Sequence[Register], given: Mapping[str, AttrValue] | None = None
    ) -> tuple[Register, ...]:
        """Append an operator that makes results in the layout of its first operand; return them."""
        layout = self.tensors[operands[0]].layout
        analysis = global_line(name, self._all(operands), self._checked(name, given or {}))
        assignment = assignment_for(analysis, [self.tensors[r].layout for r in operands], layout)
        assert assignment is not None, f"{name} of {[str(self.tensors[r]) for r in operands]}"
        return self._made(name, operands, given or {}, assignment)

    def _compute(
        self, ring: Ring, of: Compute, name: str, operands: Sequence[Register], given: Mapping[str, AttrValue]
    ) -> tuple[Register, ...]:
        """Append an attention that is divided as that which it is a part of, with pieces counted as samples."""
        assignment = tuple("b" if axis in ring.axes else what for axis, what in enumerate(of.assignment))
        return self._made(name, operands, given, assignment)

    def _made(
        self, name: str, operands: Sequence[Register], given: Mapping[str, AttrValue], assignment: Assignment
    ) -> tuple[Register, ...]:
        attributes, tensors = self._checked(name, given), self._all(operands)
        analysis = global_line(name, tensors, attributes)
        results: list[Register] = []
        for number, result in enumerate(analysis.bound.results):
            shape, layout = analysis.bound.result_shape(result), result_layout(analysis, number, assignment)
            results.append(self._register(Tensor(shape, result.dtype or tensors[0].dtype, layout)))
        for number, tensor in enumerate(tensors):
            want = operand_layout(analysis, number, assignment)
            assert copies_as_repeats(want) == copies_as_repeats(tensor.layout), (
                f"operand {number} of {name} is {tensor}, wanted in {want}"
            )
        self.body.append(Compute(name, tuple(operands), tuple(results), attributes, assignment))
        return tuple(results)

    def _checked(self, name: str, given: Mapping[str, AttrValue]) -> tuple[tuple[str, AttrValue], ...]:
        return operator(name).attributes(given)

    def _all(self, registers: Iterable[Register]) -> list[Tensor]:
        return [self.tensors[r] for r in registers]


def _block(attributes: Mapping[str, object], length: int) -> int | None:
    """
    Return the tokens of a block under an attention's causal mask, of which a piece of `length` tokens has one in each
    round: all of them in natural order. None without a mask.
    """
    if "stripes" in attributes:
        return int(str(attributes["block"]))
    return length if attributes.get("causal") else None


def seen_in_turn(turn: int, length: int, block: int) -> float:
    """
    Return the part of the scores of a turn that a causal mask leaves to the device that sees most of them: in later
    turns one whose piece comes after the one that it has the keys of.
    """
    rounds = length // block
    own = (block + 1) / 2 if turn == 0 else block
    return ((rounds - 1) / 2 * block + own) / length
