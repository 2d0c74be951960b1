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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import count, product

from unity_ir.forms.stored import with_channels_last, with_rows
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.graph import Pipeline
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Assignment, Mesh, Pins
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import (
    Compute,
    Fused,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    Tensor,
    TimeStep,
    UpdateWeight,
    ValueMove,
    When,
    equal_registers,
    makers_of,
    makes,
    reads,
)
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.element_types import HALVES
from unity_ir.tdl.parallel import Configuration, line_of_task
from unity_ir.tdl.syntax import Bound


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
        return {register: tensor.bytes(self.mesh) for register, tensor in self.tensors.items()}

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
