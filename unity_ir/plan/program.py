"""
One rank's program: instructions on local tensors, with explicit collectives. A *register* is the number of a local
tensor; a mesh axis's *role* says what the devices along it hold: shards of a dim, addends or replicas.

Every rank runs the same instructions on its own pieces (SPMD). `plan.lower` makes it of a placed graph, `dialects.spmd`
is its text, and `lowering.emit.printer` prints it as Python.

A step may run its batch in micro-batches: those are one more mesh axis, the last in number, which divides first. A
tensor that repeats along it is made once, before the loop or after it; others are made anew in each micro-batch. So it
is with the pieces in which a step makes its loss (`plan.loss_pieces`): their axis is that before, and divides last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import count, product
from math import prod
from typing import Literal

from unity_ir.errors import UnityError
from unity_ir.forms.stored import with_channels_last, with_rows
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Assignment, Layout, Mesh, Pins, role_name
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.tdl.divisibility import Analysis, Halos
from unity_ir.tdl.element_types import HALVES
from unity_ir.tdl.parallel import Configuration, line_of_task
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


@dataclass(frozen=True)
class Program:
    """
    A rank's program: instructions in order (`body`), which read and make *registers*, the numbers of local tensors;
    `tensors` has the type of each.

    `outputs` are the results of the graph's function, the loss first; `optimizer` is None for a forward alone.
    """

    name: str
    mesh: Mesh
    tensors: Mapping[Register, Tensor]
    body: tuple[Instruction, ...]
    outputs: tuple[Register, ...]
    optimizer: Optimizer | None
    micro_batches: int = 1
    """How many micro-batches a step has; with more than 1 they are the last axis of `mesh`."""
    loss_pieces: int = 1
    """In how many pieces a step makes its loss; with more than 1 they are the axis of `mesh` after those of devices."""
    anew: frozenset[Register] = frozenset()
    """Registers that every micro-batch makes anew, though all of them read the same, as memory has no room for them."""
    pipeline: Pipeline | None = None
    """How a step is run whose operators are in stages; None for others."""
    part_of: Program | None = field(default=None, compare=False, repr=False)
    """The step that this program is a part of, if it is (`plan.pipeline.parts`)."""
    ring_attention: bool = False
    """Whether keys and values that attention gathers along a sequence go around a ring instead (`plan.rings`)."""
    exchange_rows: float = 0.0
    """As `Graph.exchange_rows`: above 0, experts' rows are exchanged instead of gathered (`plan.routes`)."""
    bucket: int = 0
    """As `Graph.bucket`: below how many bytes gathers of weights and sums of gradients share calls; 0: the default."""
    casts_alone: bool = False
    """Whether a forward alone reads casts of all weights that have one, as it is of a step with weights at the host."""
    started: frozenset[Register] = frozenset()
    """In a part of a step, the outputs whose collective this part starts and another part waits for."""

    @property
    def devices(self) -> int:
        """The number of devices, each of which is a rank."""
        return self.mesh.devices // self.micro_batches // self.loss_pieces

    @property
    def axes(self) -> int:
        """
        The number of mesh axes over devices. The axes of micro-batches and of pieces of the loss come after these, and
        are not counted.
        """
        return len(self.mesh.sizes) - (self.micro_batches > 1) - (self.loss_pieces > 1)

    @cached_property
    def in_pieces(self) -> frozenset[Register]:
        """
        The registers that the loop over the pieces of the loss makes anew in each pass, one pass per piece; empty if
        the loss is made in one piece.
        """
        if self.loss_pieces == 1:
            return frozenset()
        return frozenset(r for r, tensor in self.tensors.items() if tensor.layout[self.axes] != REPEAT)

    def is_in_pieces(self, instruction: Instruction) -> bool:
        """
        Return whether an instruction is in the loop over the pieces of the loss. The instructions that lead into that
        loop and out of it (`TimeStep`) count as in it.
        """
        if isinstance(instruction, TimeStep):
            return instruction.is_of_pieces or instruction.result in self.in_pieces
        return not self.in_pieces.isdisjoint(makes(instruction))

    @cached_property
    def loop_of_pieces(self) -> tuple[tuple[Instruction, ...], Compute] | None:
        """
        The loop over the pieces of the loss, as (its instructions, a stand-in for it); None if there is none. The
        instructions are consecutive in `body`. The stand-in is one operator in place of all of them: its operands are
        the registers that the loop reads from outside, its results those that are read after it.
        """
        loop = tuple(i for i in self.body if self.is_in_pieces(i))
        if not loop:
            return None
        made = {r for i in loop for r in makes(i)}
        given = tuple(dict.fromkeys(r for i in loop for r in reads(i) if r not in made))
        left = tuple(i.result for i in loop if isinstance(i, TimeStep) and i.result not in self.in_pieces)
        return loop, Compute("loss in pieces", given, left, (), (REPEAT,) * len(self.mesh.sizes))

    @cached_property
    def when(self) -> Mapping[Register, When]:
        """
        In which micro-batches each register is made. Without micro-batches, all are `every`. A part of a step has those
        of the whole step.

        - `first`: made once, before the loop or in the first micro-batch, and kept, such as a weight gathered for all
          of them.
        - `every`: made in every micro-batch; also values that could be kept, but are made again to save memory: those
          that the backward makes a second time (ZeRO-3), and those in `anew`.
        - `last`: made once, in the last micro-batch, from a total over all of them.
        - `early`: made in a loop before, which adds up over all micro-batches what each of them needs, such as how many
          labels count.
        """
        if self.part_of is not None:
            return self.part_of.when
        if self.micro_batches == 1:
            return dict.fromkeys(self.tensors, "every")
        early = _early(self.body)
        found: dict[Register, When] = dict.fromkeys(early, "early")
        late: set[Register] = set()
        alike: set[Register] = set()
        twice = equal_registers(self.body) | self.anew
        for instruction in self.body:
            made = makes(instruction)
            if not early.isdisjoint(made):
                continue
            step = _step_kind(instruction)
            if step in ("accumulate", "batch"):
                late.update(made)
            elif not late.isdisjoint(reads(instruction)):
                late.update(made)
                found.update(dict.fromkeys(made, "last"))
                continue
            is_in = bool(step) or any(self.tensors[r].layout[-1] != REPEAT for r in made)
            read = reads(instruction)
            is_alike = bool(read) and alike.issuperset(read) and twice.isdisjoint(made)
            # Each micro-batch has a loop over pieces of its own.
            is_alike = is_alike and not self.is_in_pieces(instruction)
            if is_alike or step == "reuse":
                alike.update(made)
            found.update(dict.fromkeys(made, "every" if is_in and not is_alike else "first"))
        return found

    def times(self, instruction: Instruction) -> int:
        """
        Return how many times one step runs an instruction that makes something (not an update). It is once per
        micro-batch if the instruction is in the loop over micro-batches, or in the one before that (`early`), else
        once. Inside the loop over the pieces of the loss, it is that number times the number of pieces.
        """
        is_in_loop = all(self.when[r] in ("early", "every") for r in makes(instruction))
        pieces = self.loss_pieces if self.is_in_pieces(instruction) else 1
        return pieces * (self.micro_batches if is_in_loop else 1)

    @cached_property
    def loss(self) -> Register | None:
        """
        The register of the loss as an operator makes it: the loss of one micro-batch, or of one piece of it, before
        these are added up. In a part of a step, that of the whole step. None for a forward alone.
        """
        if self.part_of is not None:
            return self.part_of.loss
        if self.optimizer is None or not self.outputs:
            return None
        steps = {i.result: i.operand for i in self.body if isinstance(i, TimeStep)}
        found = self.outputs[0]
        while found in steps:
            found = steps[found]
        return found

    @cached_property
    def bytes(self) -> Mapping[Register, int]:
        """The bytes of one rank's piece of each register, with its halo."""
        mesh = self.mesh.sizes
        return {register: _bytes(tensor, mesh) for register, tensor in self.tensors.items()}

    @cached_property
    def added(self) -> Mapping[Register, Register]:
        """
        For each register that its kernel adds to a total in place (`TimeStep.is_added`), such as a weight's gradient in
        one micro-batch: the register of the total. The key takes no memory of its own.
        """
        return {i.operand: i.result for i in self.body if isinstance(i, TimeStep) and i.is_added}

    @cached_property
    def sums(self) -> frozenset[Register]:
        """
        The registers that hold totals: what `accumulate` instructions add up over micro-batches, or over pieces of the
        loss.
        """
        return frozenset(i.result for i in self.body if isinstance(i, TimeStep) and i.kind == "accumulate")

    def held_bytes(self, register: Register) -> int:
        """
        Return the bytes of memory in which a rank holds a register's tensor. They equal `bytes`, except for a total
        (`sums`) in a 16-bit type: it is held in float32 until its last addend.
        """
        dtype = self.tensors[register].dtype
        longer = ELEMENT_BYTES["f32"] // ELEMENT_BYTES[dtype] if register in self.sums and dtype in HALVES else 1
        return self.bytes[register] * longer

    @cached_property
    def state_at_host(self) -> frozenset[Register]:
        """The weights whose optimizer state rests in the memory of the host."""
        return frozenset(i.weight for i in self.body if isinstance(i, StateMove))

    @cached_property
    def at_host(self) -> frozenset[Register]:
        """The weights that rest there with their state: devices read their kept casts, and them in updates alone."""
        read = {r for i in self.body if not isinstance(i, UpdateWeight) for r in reads(i)} | {*self.outputs}
        updates = (i for i in self.body if isinstance(i, UpdateWeight))
        return frozenset(
            i.weight for i in updates if i.cast is not None and i.weight in self.state_at_host and i.weight not in read
        )

    @cached_property
    def values_at_host(self) -> Mapping[Register, Register]:
        """The registers that are in the memory of the host, and the value on the device that each is a copy of."""
        return {i.result: i.operand for i in self.body if isinstance(i, ValueMove) and i.kind == "to_host"}

    @property
    def copies_to_host(self) -> bool:
        """Whether a step copies anything to the memory of the host: the optimizer's state, or values."""
        return bool(self.state_at_host or self.values_at_host)

    @property
    def returned(self) -> tuple[Register, ...]:
        """
        The registers that a step returns besides gradients: the loss, and the next values of running statistics. All
        `outputs` instead if there is no optimizer (a forward alone, a part of a step), or if the first output is no
        scalar (a part of a model).
        """
        if self.optimizer is None:
            return self.outputs
        is_whole = bool(self.outputs) and not self.tensors[self.outputs[0]].shape
        return (*self.outputs[:1], *self.replaced.values()) if is_whole else self.outputs

    @cached_property
    def running(self) -> tuple[RunningStatistic | None, ...]:
        """
        For each output, in order: the running statistic whose next value it is, or None. All are None without an
        optimizer.
        """
        if self.optimizer is None:
            return (None,) * len(self.outputs)
        made = makers_of(self.body)
        return tuple(running_statistic(made, r) for r in self.outputs)

    @property
    def replaced(self) -> Mapping[str, Register]:
        """The register of each running statistic's next value, by the name of the input that it replaces."""
        outputs = zip(self.running, self.outputs, strict=True)
        return {each.leaf.name: register for each, register in outputs if each is not None}

    def leaves(self, op: str) -> list[Leaf]:
        """
        Return the leaves, tensors that the program reads and does not compute, whose kind is `op`, in order: `input`,
        `weight`, `cast` or `constant`, and in a part of a step the other kinds that `Leaf` lists.
        """
        return [i for i in self.body if isinstance(i, Leaf) and i.op == op]

    def analysis(self, instruction: Compute) -> Analysis:
        """
        Return the analysis (which index variables can be sharded, and how) of an operator's TDL line, bound to the
        global shapes of its operands. Not for a fused group, which has no operator of its own.
        """
        return global_line(
            instruction.operator, [self.tensors[r] for r in instruction.operands], instruction.attributes
        )

    def number(self, instruction: Compute) -> int:
        """
        Return a number that is equal for operators of any programs that do the same on registers of equal types: a key
        for what is found out about them that is short to hash. Not for a fused group. Numbers are those of a process.
        """
        found = self._operator_numbers.get(id(instruction))
        if found is not None:
            return found[1]
        registers, types = (*instruction.operands, *instruction.results), self._types
        for register in registers:
            if register not in types:
                types[register] = _type_number(self.tensors[register])
        number = _operator_number(
            instruction.operator,
            instruction.attributes,
            instruction.assignment,
            self.mesh.sizes,
            len(instruction.results),
            tuple([types[r] for r in registers]),
            tuple([registers.index(r) for r in registers]),
        )
        self._operator_numbers[id(instruction)] = instruction, number
        return number

    @cached_property
    def _types(self) -> dict[Register, int]:
        """The numbers of the types of registers that `number` has met: equal for equal types."""
        return {}

    @cached_property
    def _operator_numbers(self) -> dict[int, tuple[Compute, int]]:
        """
        The results of `number` by the `id` of the operator, which is kept so that no other object takes it: operators
        are slow to hash.
        """
        return {}

    def __getstate__(self) -> dict[str, object]:
        """Pickle the fields alone: in another process objects have other identities, and types other numbers."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def local_line(self, instruction: Compute) -> Bound:
        """
        Return the TDL line of an operator or fused group, bound to the shapes of one rank's pieces, as they are stored
        (`forms.stored`): what its kernel computes.
        """
        count = len(instruction.operands)
        tensors = [self.tensors[r] for r in (*instruction.operands, *instruction.results)]
        if isinstance(instruction, Fused):
            assert instruction.line is not None
            line = instruction.line  # of its members' lines, which have channels in the places where they are stored
        else:
            line = piece_of_line(self.analysis(instruction), instruction.assignment, self.mesh)
            last = [t.is_channels_last for t in tensors]
            if any(last):
                images = {p.name for p, is_last in zip(line.operands, last[:count], strict=True) if is_last}
                line = with_channels_last(line, images, last[count:])
        rows = [t.row for t in tensors]
        if not any(rows):
            return line
        named = {p.name: row for p, row in zip(line.operands, rows[:count], strict=True) if row}
        return with_rows(line, named, rows[count:])


_numbers = count()
"""Numbers that nothing has: what was forgotten gets another one, so that no two things ever have the same."""


@lru_cache(maxsize=65536)
def _type_number(tensor: Tensor) -> int:
    del tensor
    return next(_numbers)


@lru_cache(maxsize=65536)
def _operator_number(
    name: str,
    attributes: Attributes,
    assignment: Assignment,
    mesh: tuple[int, ...],
    results: int,
    types: tuple[int, ...],
    registers: tuple[int, ...],
) -> int:
    """`types` are those of operands and results, of which `registers` has the first place of each register."""
    del name, attributes, assignment, mesh, results, types, registers
    return next(_numbers)


def makers_of(body: Iterable[Instruction]) -> Mapping[Register, Instruction]:
    """Return the instruction that makes each register (number of a local tensor), keyed by the register."""
    return {r: i for i in body for r in makes(i)}


@dataclass(frozen=True, slots=True)
class RunningStatistic:
    """A running mean or variance of a batch norm: an input that a step replaces, and its value before any step."""

    leaf: Leaf
    initial: float


def running_statistic(made: Mapping[Register, Instruction], register: Register) -> RunningStatistic | None:
    """
    Return the running statistic whose next value a register (number of a local tensor) holds, or None. It holds one if
    an operator `running_stats` made it of an input, perhaps through moves and casts, or through a chain of several
    `running_stats` (of a batch norm that is used several times). `made` has the instruction that makes each register
    (`makers_of`).
    """
    initial: float | None = None
    while True:
        match made.get(register):
            case ReshardMove(operand):
                register = operand
            case Compute("cast", (operand,)):
                register = operand
            case Compute("running_stats", operands, results):
                which = results.index(register)
                register, initial = operands[which], float(which)
            case Leaf("input") as leaf if initial is not None:
                return RunningStatistic(leaf, initial)
            case _:
                return None


def _step_kind(instruction: Instruction) -> str:
    """Return the kind of a step into the loop over micro-batches, or out of it; nothing for other instructions."""
    return instruction.kind if isinstance(instruction, TimeStep) and not instruction.is_of_pieces else ""


def _early(body: Sequence[Instruction]) -> set[Register]:
    """
    Return the registers of a loop before the one over micro-batches: sums over all of them that its lines read, and
    what nothing else is made of.
    """
    sums: dict[Register, frozenset[Register]] = {}
    wanted: set[Register] = set()
    for instruction in body:
        read = frozenset[Register]().union(*(sums.get(r, ()) for r in reads(instruction)))
        step = _step_kind(instruction)
        if step in ("accumulate", "batch"):
            read = frozenset(makes(instruction))
        elif step:
            wanted |= read
            continue
        if read:
            sums.update(dict.fromkeys(makes(instruction), read))
    if not wanted:
        return wanted
    early, others = set(wanted), set[Register]()
    for instruction in reversed(body):
        made = makes(instruction)
        if not wanted.isdisjoint(made) or (made and early.issuperset(made) and others.isdisjoint(made)):
            early.update(reads(instruction))
        else:
            others.update(reads(instruction))
    leaves = {i.result for i in body if isinstance(i, Leaf) and i.op != "constant"}
    return (early - others - leaves) | wanted


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


def global_line(operator: str, operands: Sequence[Tensor], attributes: Attributes) -> Analysis:
    """
    Return the analysis (which index variables can be sharded, and how) of the TDL line of the operator named
    `operator`, bound to the global shapes and element types of `operands`; `attributes` are sorted (name, value) pairs.
    """
    shapes, dtypes = tuple(t.shape for t in operands), tuple(t.dtype for t in operands)
    return find_operator(operator).bind(shapes, attributes, dtypes)


def piece_of_line(analysis: Analysis, assignment: Assignment, mesh: Mesh) -> Bound:
    """
    Return an operator's TDL line bound to the shapes of one rank's piece. `analysis` has the line at global shapes; the
    extent of each index variable is divided by the sizes of those axes of `mesh` that shard it, as `assignment` (the
    role of each mesh axis in the operator) says.
    """
    degrees: dict[str, int] = {}
    for what, size in zip(assignment, mesh.sizes, strict=True):
        if isinstance(what, str):
            degrees[what] = degrees.get(what, 1) * size
    return line_of_task(analysis.bound, Configuration(degrees))


def most_of_a_device(mesh: Mesh, counts: Iterable[tuple[Pins, int]]) -> int:
    """
    Return the largest total of counts on one device of a mesh. `counts` are (where, count): the count is of every
    device that has the coordinates in `where`, (mesh axis, coordinate) pairs; () are all devices.

    Given ((), 3), (((2, 0),), 4) and (((2, 1),), 5), of which the last two are at coordinates 0 and 1 of mesh axis 2,
    returns 8.
    """
    total = Counter[Pins]()
    for pinned, more in counts:
        total[pinned] += more
    apart = sorted({axis for pinned in total for axis, _ in pinned})
    places = (dict(zip(apart, at, strict=True)) for at in product(*(range(mesh.sizes[axis]) for axis in apart)))
    return max(sum(n for pinned, n in total.items() if all(at[a] == c for a, c in pinned)) for at in places)


def check_step(program: Program, reference: Graph) -> None:
    """
    Raise `UnityError` unless a program is a training step of the serial forward graph `reference`.

    It must have a backward, inputs and weights of the same names, global shapes and stored types as `reference`, one
    update of every weight that is trained there and of nothing else, and return a scalar loss first.
    """
    if program.optimizer is None or not any(isinstance(i, UpdateWeight) for i in program.body):
        raise UnityError(f"func.func @{program.name}: has no backward yet; run pcg-differentiate before lowering it")
    where = f"spmd.program @{program.name}"
    if reference.updates or any(node.is_parallel for node in reference.nodes()):
        raise UnityError(f"{where}: @{reference.name} is not its serial forward; leave it as lower-pcg-to-spmd made it")
    for op, nodes in (("input", reference.inputs), ("weight", reference.weights())):
        found = sorted(
            (i.name, program.tensors[i.result].shape, program.tensors[i.result].dtype) for i in program.leaves(op)
        )
        if found != sorted((n.name, n.types[0].shape, n.master) for n in nodes):
            raise UnityError(f"{where}: its {op}s are not those of @{reference.name}")
    updated = [i.weight for i in program.body if isinstance(i, UpdateWeight)]
    _check_state_moves(program, where)
    trained = {node.name for node in reference.weights() if node.is_trained}
    for leaf in program.leaves("weight"):
        if leaf.result not in updated and leaf.name in trained:
            raise UnityError(f"{where}: weight {leaf.name!a} has no spmd.update; it must reach the loss")
        if leaf.result in updated and leaf.name not in trained:
            raise UnityError(f"{where}: weight {leaf.name!a} is frozen, and has an spmd.update")
    if len(updated) != len(trained):
        raise UnityError(f"{where}: it must have one spmd.update of every trained weight, and none of other values")
    if not program.outputs or program.tensors[program.outputs[0]].shape:
        raise UnityError(f"{where}: what it returns first must be a scalar loss")


def _check_state_moves(program: Program, where: str) -> None:
    """Raise `UnityError` unless state is copied from the host right before its update, and back after it, or never."""
    moved = {(i.weight, i.kind): at for at, i in enumerate(program.body) if isinstance(i, StateMove)}
    if not moved:
        return
    names = {leaf.result: leaf.name for leaf in program.leaves("weight")}
    updates = {i.weight: at for at, i in enumerate(program.body) if isinstance(i, UpdateWeight)}
    for weight, at in updates.items():
        before, after = (moved.get((weight, kind)) for kind in ("from_host", "to_host"))
        if before is None or after is None or not before < at < after:
            raise UnityError(
                f"{where}: the state of weight {names[weight]!a} rests at the host; it needs spmd.from_host before its "
                "spmd.update, and spmd.to_host after it"
            )
    if len(moved) != 2 * len(updates) or sum(isinstance(i, StateMove) for i in program.body) != len(moved):
        raise UnityError(f"{where}: it must copy the state of updated weights alone, once each way")
