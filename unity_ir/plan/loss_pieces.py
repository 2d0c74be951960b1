"""
Make a step's loss in pieces of the tokens: the head's product, the loss, and their gradients run in a loop over the
pieces, forward and backward together, so that a rank never holds the logits of more than one piece. It is exact.

    h: hidden state, w: weight of the head         for each piece:
    logits = h @ w                                     logits = h[piece] @ w
    loss = cross_entropy(logits)               ->      loss += cross_entropy(logits)
    g = cross_entropy_grad(logits)                     g = cross_entropy_grad(logits)
    dh, dw = g @ wT, hT @ g                            dh[piece], dw += g @ wT, h[piece]T @ g

The pieces are one more mesh axis of the program, in time, as micro-batches are. Which part of each tensor a piece has
follows from the operators' lines (`Analysis`), from the head on: a shard along the index variable of the tokens, or an
addend where that is summed. The loop ends at addends and at the products of the backward. What it reads is taken from
tensors made before, and moves of what it has made, such as the sum of a weight's gradient over devices, come after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from unity_ir.errors import UnityError
from unity_ir.pcg.loss_part import dims_along, has_contraction, piece_variable
from unity_ir.pcg.sharding import REPEAT, SUM, Assignment, GridRole, Mesh, is_shard, operand_role, result_role
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    Tensor,
    TimeStep,
    UpdateWeight,
    equal_registers,
    makes,
    reading,
    reads,
)
from unity_ir.plan.program import Program
from unity_ir.tdl.element_types import HALVES

T = TypeVar("T")


def in_loss_pieces(program: Program, count: int, head: Register) -> Program:
    """
    Return the program that computes its loss in a loop over `count` pieces of the tokens. `head` is the register
    (number of a local tensor) that the last matrix product before the loss makes, such as the logits. Registers are
    renumbered. With a `count` of 1, returns `program` itself.

    The pieces are shards of one dim of `head`. It is the first dim, the last one of the tensor excepted, whose size on
    a rank is a multiple of `count` and along which the loss is a sum. Raises `UnityError` if there is no such dim.
    """
    if count == 1:
        return program
    where = f"spmd.program @{program.name}: cannot make its loss in {count} pieces"
    program = _without_repeats(program, head)
    place = next(p for p, i in enumerate(program.body) if head in makes(i))
    product = program.body[place]
    assert isinstance(product, Compute)
    local = program.tensors[head].local(program.mesh)[:-1]
    dims = [dim for dim, size in enumerate(local) if size % count == 0]
    if count < 1 or not dims:
        sizes = " x ".join(map(str, local)) or "1"
        raise UnityError(
            f"{where}: a rank has {sizes} tokens of {product.operator}; give loss_pieces a divisor of these"
        )
    variables = program.analysis(product).result_dims[0]
    failed: UnityError | None = None
    for variable in (variables[dim] for dim in dims):
        try:
            return _in_order(_Loop(program, where, place, variable).program_of(count))
        except UnityError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _without_repeats(program: Program, head: Register) -> Program:
    """
    Return the program in which what is made twice of equal tensors, as recompute does for the backward, is made once
    where the loop over pieces reads it: forward and backward stand together there.
    """
    twice = equal_registers(program.body)
    if not twice:
        return program
    first: dict[Register, Register] = {}
    makers: dict[object, tuple[Register, ...]] = {}
    for instruction in program.body:
        made = makes(instruction)
        if made and twice.issuperset(made):
            key = _work(instruction, first)
            first.update(zip(made, makers.setdefault(key, made), strict=True))
    # Only what reads the head, or what is made of it, is in the loop.
    inside = {head}
    body: list[Instruction] = []
    for instruction in program.body:
        again = reading(instruction, first)
        if not inside.isdisjoint((*reads(again), *makes(again))):
            is_end = (
                isinstance(again, Compute) and head not in again.results and has_contraction(program.analysis(again))
            )
            inside.update(() if is_end else makes(again))
            instruction = again
        body.append(instruction)
    used = {*program.outputs}
    kept: list[Instruction] = []
    for instruction in reversed(body):
        made = makes(instruction)
        if not made or isinstance(instruction, Leaf) or not used.isdisjoint(made):
            kept.append(instruction)
            used.update(reads(instruction))
    left = {r for i in kept for r in makes(i)}
    return replace(program, body=tuple(reversed(kept)), anew=program.anew | (frozenset(twice) & left))


def _work(instruction: Instruction, first: Mapping[Register, Register]) -> object:
    """Return a key that is equal for instructions that do the same with equal tensors."""
    again = reading(instruction, first)
    if isinstance(again, Compute):
        return replace(again, results=())
    assert not isinstance(again, UpdateWeight | StateMove)
    return again if isinstance(again, Leaf) else replace(again, result=-1)


def _in_order(program: Program) -> Program:
    """Return the program with registers numbered in the order in which they are made, as its text has them."""
    names: dict[Register, Register] = {}
    body: list[Instruction] = []
    for instruction in program.body:
        new = reading(instruction, names)
        made = tuple(names.setdefault(r, len(names)) for r in makes(instruction))
        if isinstance(new, Compute):
            new = replace(new, results=made)
        elif not isinstance(new, UpdateWeight | StateMove):
            new = replace(new, result=made[0])
        body.append(new)
    tensors = {names[r]: program.tensors[r] for r in names}
    anew = frozenset(names[r] for r in program.anew)
    return replace(
        program, tensors=tensors, body=tuple(body), outputs=tuple(names[r] for r in program.outputs), anew=anew
    )


@dataclass
class _Loop:
    """The loop over pieces along an index variable of the instruction number `start`, the head's product."""

    program: Program
    where: str
    start: int
    variable: str | None
    inside: dict[int, GridRole] = field(default_factory=dict[int, GridRole])
    """The instructions of the loop, by place: the index variable that an operator divides, REPEAT for moves."""
    dims: dict[Register, int] = field(default_factory=dict[Register, int])
    """The dim of each register of the loop of which a piece has a shard."""
    exits: dict[Register, int] = field(default_factory=dict[Register, int])
    """What the loop makes for others: the dim of which a piece has a shard, or SUM."""
    late: set[Register] = field(default_factory=set[Register])
    """What is known only after all pieces."""
    steps: dict[tuple[Register, int], TimeStep] = field(default_factory=dict[tuple[Register, int], TimeStep])
    """The steps into the loop, by what they take and a piece's role in it."""
    tensors: dict[Register, Tensor] = field(default_factory=dict[Register, Tensor])
    """The types of registers in the mesh that has the axis of the pieces."""

    def program_of(self, count: int) -> Program:
        """Return the program with the loop. Raises `UnityError` where an operator needs several pieces at once."""
        for place in range(self.start, len(self.program.body)):
            self._follow(place, self.program.body[place])
        return self._written(count)

    # -- what is in the loop

    def _follow(self, place: int, instruction: Instruction) -> None:
        read = reads(instruction)
        own = [r for r in read if r in self.dims]
        if place != self.start and not own:
            if not self.late.isdisjoint(read):
                self.late.update(makes(instruction))
            return
        if not self.late.isdisjoint(read):
            raise UnityError(
                f"{self.where}: its {_name(instruction)} reads a piece, and what is known only after all of them; "
                "leave loss_pieces out"
            )
        if isinstance(instruction, Compute):
            self._operator(place, instruction)
        elif isinstance(instruction, ReshardMove) and self._keeps_tokens(instruction):
            self.inside[place] = REPEAT
            self.dims[instruction.result] = self.dims[instruction.operand]
        else:
            raise self._moved(_name(instruction))

    def _operator(self, place: int, compute: Compute) -> None:
        analysis = self.program.analysis(compute)
        is_start, dims = place == self.start, [self.dims.get(r) for r in compute.operands]
        variable = piece_variable(analysis, dims_along(analysis, self.variable) if is_start else dims)
        if variable is None:
            raise UnityError(f"{self.where}: its {compute.operator} does not keep tokens apart; leave loss_pieces out")
        if self._axes(compute.assignment, variable) != self._tokens:
            raise self._moved(compute.operator)
        self.inside[place] = variable
        is_last = not is_start and has_contraction(analysis)
        for i, register in enumerate(compute.results):
            role = result_role(analysis, i, variable)
            if is_last or role == SUM:
                self.exits[register] = role
                self.late.add(register)
            else:
                self.dims[register] = role

    def _moved(self, what: str) -> UnityError:
        return UnityError(
            f"{self.where}: its {what} divides tokens in another way over devices; use another plan, or leave "
            "loss_pieces out"
        )

    @property
    def _tokens(self) -> tuple[int, ...]:
        """The mesh axes that divide the head's tokens."""
        product = self.program.body[self.start]
        assert isinstance(product, Compute)
        return self._axes(product.assignment, self.variable)

    @staticmethod
    def _axes(assignment: Assignment, variable: str | None) -> tuple[int, ...]:
        return tuple(axis for axis, what in enumerate(assignment) if what == variable)

    def _keeps_tokens(self, move: ReshardMove) -> bool:
        """Return whether a move leaves tokens where they are; other dims may go to other devices."""
        dim, layouts = self.dims[move.operand], [self.program.tensors[r].layout for r in (move.operand, move.result)]
        before, after = ([axis for axis, role in enumerate(layout) if role == dim] for layout in layouts)
        return before == after

    # -- the program

    def _written(self, count: int) -> Program:
        body, axes = self.program.body, self.program.axes
        sizes = self.program.mesh.sizes
        self.tensors = {r: _with_role(t, axes, REPEAT) for r, t in self.program.tensors.items()}
        for register, role in self.dims.items():
            self.tensors[register] = _with_role(self.program.tensors[register], axes, role)
        casts = self._casts()
        needed = {r for place in self.inside for r in reads(body[place])}
        before: list[Instruction] = []
        for place in reversed(range(self.start, len(body))):
            if place not in self.inside and not needed.isdisjoint(makes(body[place])):
                needed.update(reads(body[place]))
                before.append(body[place])
        first = {r for i in before for r in makes(i)}
        dropped = {casts[r].results[0] for r in casts}
        after = [
            i
            for place, i in enumerate(body[self.start :], self.start)
            if place not in self.inside and first.isdisjoint(makes(i)) and dropped.isdisjoint(makes(i))
        ]
        loop = [i for place in sorted(self.inside) for i in self._in_loop(body[place], self.inside[place], casts)]
        ordered = (*body[: self.start], *reversed(before))
        whole = (*(_along(i, axes) for i in ordered), *loop, *(_along(i, axes) for i in after))
        mesh = Mesh((*sizes[:axes], count, *sizes[axes:]))
        return replace(self.program, mesh=mesh, tensors=self.tensors, body=whole, loss_pieces=count)

    def _casts(self) -> dict[Register, Compute]:
        """Return the casts to a longer type that alone read what pieces add up: the sum is of that type, instead."""
        found: dict[Register, Compute] = {}
        for register, role in self.exits.items():
            users = [i for i in self.program.body if register in reads(i)]
            cast = users[0] if len(users) == 1 and register not in self.program.outputs else None
            half = self.program.tensors[register].dtype in HALVES
            if role == SUM and half and isinstance(cast, Compute) and cast.operator == "cast":
                if self.program.tensors[cast.results[0]].dtype not in HALVES:
                    found[register] = cast
        return found

    def _in_loop(
        self, instruction: Instruction, variable: GridRole, casts: dict[Register, Compute]
    ) -> list[Instruction]:
        """Return an instruction of the loop, after the steps that take what it reads, before those of what it makes."""
        if not isinstance(instruction, Compute):
            return [instruction]
        analysis = self.program.analysis(instruction)
        entered: list[Instruction] = []
        operands: list[Register] = []
        for i, register in enumerate(instruction.operands):
            if register in self.dims:
                operands.append(register)
                continue
            role = operand_role(analysis, i, variable)
            if is_shard(role) and self._shards(register, role) != self._tokens:
                raise self._moved(instruction.operator)
            if (register, role) not in self.steps:
                kind = "pipeline" if is_shard(role) else "reuse"
                step = TimeStep(register, self._new(register, role), kind, True)
                self.steps[register, role] = step
                entered.append(step)
            operands.append(self.steps[register, role].result)
        results: list[Register] = []
        left: list[Instruction] = []
        for register in instruction.results:
            if register not in self.exits:
                results.append(register)
                continue
            role = self.exits[register]
            piece = self._new(register, role)
            results.append(piece)
            whole = casts[register].results[0] if register in casts else register
            left.append(TimeStep(piece, whole, "accumulate" if role == SUM else "batch", True))
        assignment = _inserted(instruction.assignment, self.program.axes, variable)
        made = replace(instruction, operands=tuple(operands), results=tuple(results), assignment=assignment)
        return [*entered, made, *left]

    def _shards(self, register: Register, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that divide a dim of a register."""
        return tuple(axis for axis, role in enumerate(self.program.tensors[register].layout) if role == dim)

    def _new(self, register: Register, role: int) -> Register:
        """Return a new register: what a piece has of another one."""
        new = max(self.tensors) + 1
        self.tensors[new] = _with_role(self.program.tensors[register], self.program.axes, role)
        return new


def _with_role(tensor: Tensor, axis: int, role: int) -> Tensor:
    return replace(tensor, layout=_inserted(tensor.layout, axis, role))


def _inserted(roles: Sequence[T], axis: int, role: T) -> tuple[T, ...]:
    return (*roles[:axis], role, *roles[axis:])


def _along(instruction: Instruction, axis: int) -> Instruction:
    """Return an instruction outside of the loop in a mesh that has the axis of the pieces."""
    if not isinstance(instruction, Compute):
        return instruction
    return replace(instruction, assignment=_inserted(instruction.assignment, axis, REPEAT))


def _name(instruction: Instruction) -> str:
    match instruction:
        case Compute(operator):
            return operator
        case ReshardMove() | HaloExchange() | TimeStep():
            return instruction.kind
        case _:
            return "a leaf" if isinstance(instruction, Leaf) else "an update"
