"""
Instructions of a rank's program, on registers: the numbers of local tensors, whose types say what each device holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Literal

from unity_ir.ops.operator import Attributes
from unity_ir.pcg.collectives import BETWEEN_DEVICES
from unity_ir.pcg.sharding import Assignment, Layout, Mesh, role_name
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.tdl.divisibility import Halos
from unity_ir.tdl.syntax import Bound

Register = int
"""Number of a local tensor in a program."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """
    The type of a register (the number of a local tensor): global shape, element type, and the role of each mesh axis.

    `halo` has, for each dim, how many elements (before, after) of its neighbours a piece holds besides its shard;
    `halo_sum` likewise how many of its neighbours' elements it holds addends of. () stands for none.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    halo: Halos = ()
    halo_sum: Halos = ()
    row: int = 0
    """Elements that a row, along the last dim, is stored with, if more than it has (`padded_rows`); else 0."""
    is_channels_last: bool = False
    """Whether the second dim is stored as the last one (`plan.channels_last`)."""

    def __str__(self) -> str:
        """Return global shape, element type and the role of each mesh axis: `[64, 32] f32, dim 0, repeat`."""
        roles = ", ".join(map(role_name, self.layout)) or "one device"
        return f"{list(self.shape)} {self.dtype}, {roles}"

    @property
    def borders(self) -> Halos:
        """
        The halo of a rank's piece: per dim, the number of elements (before, after) that it has in addition to its
        shard. They equal the neighbours' elements (`halo`) or are addends of them (`halo_sum`).
        """
        return self.halo or self.halo_sum or ((0, 0),) * len(self.shape)

    def local(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of one rank's piece, including its halo."""
        return _local(self, mesh.sizes)

    def bytes(self, mesh: Mesh) -> int:
        """Return the bytes of a rank's piece, including its halo, but not the padding of its rows."""
        return _bytes(self, mesh.sizes)


@lru_cache(maxsize=65536)
def _local(tensor: Tensor, mesh: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        size // prod(s for s, r in zip(mesh, tensor.layout, strict=True) if r == dim) + low + high
        for dim, (size, (low, high)) in enumerate(zip(tensor.shape, tensor.borders, strict=True))
    )


@lru_cache(maxsize=65536)
def _bytes(tensor: Tensor, mesh: tuple[int, ...]) -> int:
    return prod(_local(tensor, mesh)) * ELEMENT_BYTES[tensor.dtype]


@dataclass(frozen=True, slots=True)
class Leaf:
    """
    A tensor that a program reads and does not compute. `op` is its kind: `input`, `weight`, `cast` (the kept cast of
    the weight called `name`), or `constant` (all elements are `value`). It is in its resting layout.

    In a part of a step (`pipeline.parts`), what other parts make is a leaf, too. Its `op` is `once` for what is made
    once per step, `sum` for a sum over micro-batches, `kept` for what was made for this micro-batch and later parts
    read as well, `last` for the same where this part reads it last and may free it, and `started` for a sum over
    devices that is under way and must be waited for.
    """

    op: str
    result: Register
    name: str = ""
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Compute:
    """
    An operator on a rank's pieces. `assignment` has, for each mesh axis, the role of the axis in the operator, such as
    the index variable that it shards.
    """

    operator: str
    operands: tuple[Register, ...]
    results: tuple[Register, ...]
    attributes: Attributes
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Fused(Compute):
    """
    Consecutive operators (`members`) computed as one kernel, of the TDL line `line`, bound to local shapes.

    `operator` is made of the members' names; `assignment` has the variable of `line` that each mesh axis shards.
    """

    members: tuple[Compute, ...] = ()
    line: Bound | None = field(default=None, compare=False, hash=False)
    implementation: str = "triton"
    """`torch` for a product that BLAS makes in float32."""


@dataclass(frozen=True, slots=True)
class ReshardMove:
    """
    One move of a reshard, a collective or a local step: the role of the mesh axes `axes` changes from `source` to
    `target`.

    If it carries a value between two stages of a pipeline, `stages` are (sender, receiver); where both are on the same
    devices, it is a `retype` without axes, which moves nothing.
    """

    operand: Register
    result: Register
    kind: str
    axes: tuple[int, ...]
    source: int
    target: int
    stages: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class RowMove(ReshardMove):
    """
    A move of the rows of a mixture of experts to the devices that own their experts (`send_rows`), or back
    (`return_rows`): how many rows go where is data, which `count_rows` makes (`plan.routes`).

    `counts` is the register of that; None for `count_rows` itself.
    """

    counts: Register | None = None
    rows: int = 0
    """Most rows that a device may receive: those of its buffer."""
    live: int = 0
    """Rows that a device sends or receives, for prices."""
    experts: int = 0
    """Experts of a device."""
    layer: str = ""
    """The name of the experts' weights, for messages."""


@dataclass(frozen=True, slots=True)
class HaloExchange:
    """
    An exchange of border elements between neighbours along a dim, which the mesh axes `axes` shard.

    Kind `halo` fetches the `low` elements before and `high` after each piece; `halo_reduce` adds the elements that
    pieces hold beyond their shard to the neighbours' shards.
    """

    operand: Register
    result: Register
    kind: str
    axes: tuple[int, ...]
    dim: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class TimeStep:
    """
    A step in time: an instruction that leads into the loop over micro-batches or out of it, on each device by itself.
    `kind` is one of `pcg.parallel.IN_TIME`: `pipeline` takes a micro-batch's part of a tensor, `reuse` all of it;
    `accumulate` adds up what micro-batches make, `batch` joins it. With `is_of_pieces` the loop is that over the pieces
    of the loss.
    """

    operand: Register
    result: Register
    kind: str
    is_of_pieces: bool = False
    is_added: bool = False
    """Whether the kernel that makes an addend adds it to the total, in place (`plan.additions`)."""


@dataclass(frozen=True, slots=True)
class UpdateWeight:
    """
    The optimizer's step on a weight, given its gradient, which also writes the weight's kept `cast`, if it has one; all
    are in the weight's resting layout. The gradient may be of a shorter type than the weight.
    """

    weight: Register
    grad: Register
    cast: Register | None = None


@dataclass(frozen=True, slots=True)
class StateMove:
    """
    A copy of the optimizer's state of a rank's piece of a weight, which rests in the memory of the host: `kind` is
    `from_host`, before the weight's update, or `to_host`, after it. The state has no register.
    """

    weight: Register
    kind: str


@dataclass(frozen=True, slots=True)
class ValueMove:
    """
    A copy of a value that the forward saves for the backward: `kind` is `to_host`, whose result is in the memory of the
    host, or `from_host`, whose operand is such a result, and whose result is on the device again.
    """

    operand: Register
    result: Register
    kind: str


Instruction = Leaf | Compute | ReshardMove | HaloExchange | TimeStep | UpdateWeight | StateMove | ValueMove

When = Literal["early", "first", "every", "last"]
"""
In which micro-batches a line of the step runs: in the first alone (what is made once, before it is needed), in every
one, or in the last alone (what needs a sum over all of them); or `early`, in every one of a loop before.
"""


def reads(instruction: Instruction) -> tuple[Register, ...]:
    """
    Return the registers (numbers of local tensors) that an instruction reads: for an update, the weight and its
    gradient; () for a copy of state, which is no register.
    """
    if isinstance(instruction, Compute):  # most are, and tests are faster than patterns
        return instruction.operands
    if isinstance(instruction, Leaf | StateMove):
        return ()
    if isinstance(instruction, UpdateWeight):
        return instruction.weight, instruction.grad
    if isinstance(instruction, RowMove) and instruction.counts is not None:
        return instruction.operand, instruction.counts
    return (instruction.operand,)


def makes(instruction: Instruction) -> tuple[Register, ...]:
    """
    Return the registers (numbers of local tensors) that an instruction makes: its results; () for an update, which
    changes the weight in place, and for a copy of state.
    """
    if isinstance(instruction, Compute):
        return instruction.results
    return () if isinstance(instruction, UpdateWeight | StateMove) else (instruction.result,)


def reading(instruction: Instruction, names: Mapping[Register, Register]) -> Instruction:
    """Return an instruction that reads registers under other names: `names` has the new one of each that has one."""
    match instruction:
        case Compute():
            return replace(instruction, operands=tuple(names.get(r, r) for r in instruction.operands))
        case RowMove(operand, counts=int(counts)):
            return replace(instruction, operand=names.get(operand, operand), counts=names.get(counts, counts))
        case ReshardMove() | HaloExchange() | TimeStep() | ValueMove():
            return replace(instruction, operand=names.get(instruction.operand, instruction.operand))
        case UpdateWeight(weight, grad):
            return replace(instruction, weight=names.get(weight, weight), grad=names.get(grad, grad))
        case StateMove(weight):
            return replace(instruction, weight=names.get(weight, weight))
        case Leaf():
            return instruction


def makers_of(body: Iterable[Instruction]) -> Mapping[Register, Instruction]:
    """Return the instruction that makes each register (number of a local tensor), keyed by the register."""
    return {r: i for i in body for r in makes(i)}


def equal_registers(body: Iterable[Instruction]) -> set[Register]:
    """
    Return all registers (numbers of local tensors) that hold the same values as another one, as recompute makes them.
    Two are equal if they are made by the same kind of operator, move, or step into or out of a loop (`TimeStep`), with
    equal attributes and roles, of operands that are the same or equal.
    """
    makers: dict[object, list[Register]] = {}
    for register, value in _values(body):
        makers.setdefault(value, []).append(register)
    return {register for equal in makers.values() if len(equal) > 1 for register in equal}


def repeated_registers(body: Iterable[Instruction]) -> set[Register]:
    """
    Return those of `equal_registers` that hold the same values as an earlier one: all but the first of each. They are
    what a step makes a second time, such as a weight gathered again for the backward.
    """
    known = set[object]()
    found = set[Register]()
    for register, value in _values(body):
        if value in known:
            found.add(register)
        known.add(value)
    return found


def _values(body: Iterable[Instruction]) -> Iterator[tuple[Register, object]]:
    """Yield each register that instructions make, in order, and what stands for its values: equal for equal ones."""
    numbers: dict[object, int] = {}
    of: dict[Register, object] = {}
    for instruction in body:
        match instruction:
            case Compute(operator, operands, _, attributes, assignment):
                work: object = (operator, tuple(map(of.get, operands)), attributes, assignment)
            case RowMove():
                work = (instruction.kind, tuple(of[r] for r in reads(instruction)), instruction.axes, instruction.rows)
            case ReshardMove(operand, _, kind, axes, source, target):
                work = (kind, of[operand], axes, source, target)
            case TimeStep(operand, _, kind, is_of_pieces):
                work = (kind, is_of_pieces, of[operand])
            case _:
                work = instruction
        number = numbers.setdefault(work, len(numbers))
        for i, register in enumerate(makes(instruction)):
            of[register] = number, i
            yield register, of[register]


def communicates(instruction: Instruction) -> bool:
    """Return whether an instruction starts communication between ranks, whose result must be waited for."""
    return isinstance(instruction, HaloExchange) or (
        isinstance(instruction, ReshardMove) and instruction.kind in BETWEEN_DEVICES
    )
