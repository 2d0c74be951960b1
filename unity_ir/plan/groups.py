"""
Fuse consecutive operators into one kernel: products with the pointwise operators after them, attention with copies of
its results, chains of pointwise operators, row reductions with the pointwise operators before and after them, sums of
columns with what makes or reads the same rows, and scatters and gradients of experts' weights with the cast after them.

    t = matmul(x, w);  s = add(t, b);  y = gelu(s)  ->  s, y = matmul + add + gelu(x, w, b)      # the backward reads s
    b = reduce_sum(g);  y = norm_grad(g, x)         ->  b, y = reduce_sum + norm_grad(g, x)

Results that no other operator reads are never stored. The members of a group are consecutive in the program, and each
reads the result of one before it, or, beside a sum of columns, a tensor that one before it reads; casts of stored
weights may stand between them, as moves may. A group becomes one line of TDL (`forms.compose`), and is fused if the
kernel generators save a launch for each member but one, have programs enough to keep a GPU busy or at least half as
many as any member, and read no more bytes than the members do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import operand_shapes
from unity_ir.forms.column_sums import is_column_sum, with_common_variables
from unity_ir.forms.compose import AND, Part, composed, relabelled
from unity_ir.forms.kinds import CONTRACTIONS, kind
from unity_ir.forms.row_sums import with_row_variables
from unity_ir.forms.stored import can_be_padded
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.triton.launch import LaunchWork
from unity_ir.kernels.triton.tiling import AT_WORK
from unity_ir.pcg.sharding import COPY, pins_of
from unity_ir.plan.batch_norms import with_batch_norms
from unity_ir.plan.instructions import (
    Compute,
    Fused,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    TimeStep,
    communicates,
    makes,
    reads,
)
from unity_ir.plan.local_operator import LocalOperator, local_operator
from unity_ir.plan.own_casts import IsKernel, with_own_casts
from unity_ir.plan.program import Program, global_line
from unity_ir.tdl.syntax import NOT_FLOATING, Bound, accesses, index_names

MOST_OPERATORS = 12
"""Most operators in a group; more make an unreadable comment."""
MOST_TENSORS: Mapping[str, int] = MappingProxyType(
    {"elements": 10, "rows": 10, "columns": 10, "product": 7, "scatter": 4, "grouped": 4, "attention": 10}
)
"""Most operands and results of a group, by its kernel's kind; a tile of each must fit registers."""

KINDS = ("elements", "rows", "columns", "product", "scatter", "grouped", "attention")
"""
Kinds of kernels that can be fused (`LaunchWork.kind`); a group's kernel has the last kind among its members, or, of
sums of columns with others, the kind `columns`.
"""

POINTWISE = ("elementwise", "copy")
"""Kinds of operators (`forms.kinds`) that may follow a contraction in its kernel."""

FULL = 4096
"""Programs that keep any GPU busy: 132 SMs of an H100 hold 2,048 threads each, which are 16 programs of four warps."""

BUSY = AT_WORK // 1024
"""Programs of rows, of 1,024 elements or more at a time each, that keep a GPU's memory busy."""

Choice = Callable[[LocalOperator], str]
"""
Returns the implementation of an operator: `triton` or `torch`; of a group, whether it is one kernel or is left apart.
"""


MOST_REMEMBERED = 2**16
"""Most operators and groups in a `GroupMemo`, of about 1 kB each."""

Launches = tuple[LaunchWork, ...]
"""The launches of one operator or group."""


@dataclass
class GroupMemo:
    """
    A cache of what was found out about groups of operators: their kernel launches, TDL lines and implementations.
    Programs may share one if they have the same `choice` (of Triton or PyTorch for each operator).
    """

    launches: dict[object, Launches | None] = field(default_factory=dict[object, Launches | None])
    """
    Launches of every operator, by its number (`Program.number`), and of every group, by `_key`; None if Triton does not
    compute it, or not in one kernel.
    """
    lines: dict[object, Part | None] = field(default_factory=dict[object, Part | None])
    """The one line of every group, over numbers in place of registers; None if it has none."""
    choices: dict[int, str] = field(default_factory=dict[int, str])
    """The implementation of every operator, by its number."""
    sums: dict[int, bool] = field(default_factory=dict[int, bool])
    """Whether the operator of this number sums columns."""
    convolutions: dict[int, tuple[int, int, int] | None] = field(default_factory=dict[int, tuple[int, int, int] | None])
    """Which operands and results of the operator of this number are a convolution's images and its weight."""
    images: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict[int, tuple[tuple[int, ...], ...]])
    """Which operands and results of the operator of this number are images of the same samples and channels."""

    def __reduce__(self) -> tuple[type[GroupMemo], tuple[()]]:
        """Pickle an empty cache: numbers of operators are those of a process."""
        return GroupMemo, ()

    def shrink(self) -> None:
        """Empty the cache if it has more than `MOST_REMEMBERED` operators and groups."""
        every = self.launches, self.lines, self.choices, self.sums, self.convolutions, self.images
        if sum(map(len, every)) > MOST_REMEMBERED:
            for each in every:
                each.clear()


def with_fusions(program: Program, choice: Choice, memo: GroupMemo | None = None) -> Program:
    """
    Return the program in which each group of consecutive operators that one Triton kernel can compute, and that is
    worth fusing, is one `Fused` instruction. Before that, an operator that reads a cast gets a cast of its own
    (`plan.own_casts`), and operators that only rearrange a result of attention (a transposition, say) move right behind
    the attention, where one kernel can do both.

    `choice` returns the implementation, `triton` or `torch`, of an operator or group: only operators in `triton` are
    fused, and only to groups in `triton`. `memo` is a cache, read and extended (None: a new one); give it to calls with
    the same `choice` only.
    """
    memo = GroupMemo() if memo is None else memo
    memo.shrink()

    def kernels_of(candidate: Program) -> IsKernel:
        fuser = _Fuser(candidate, choice, memo)
        return lambda cast, reader: fuser.is_kernel([cast, reader])

    program, casts = with_own_casts(program, kernels_of)
    program, groups = with_batch_norms(program, lambda candidate: _Fuser(candidate, choice, memo, casts).is_kernel)
    fuser = _Fuser(program, choice, memo, casts, groups)
    if (moved := fuser.with_copies_next()) is not program:
        fuser = _Fuser(moved, choice, memo, casts, groups)
    return fuser.program_of_groups()


@dataclass
class _Fuser:
    program: Program
    choice: Choice
    memo: GroupMemo
    own: frozenset[Register] = frozenset()
    """Results of the casts that readers have for themselves (`own_casts`): each begins a group."""
    given: Mapping[Register, int] = field(default_factory=dict[Register, int])
    """Sizes of groups that are known to be kernels, by the result of their first operator (`batch_norms`)."""

    def __post_init__(self) -> None:
        body = self.program.body
        self.readers: dict[Register, list[int]] = {}
        self.maker: dict[Register, int] = {}
        for place, instruction in enumerate(body):
            for register in reads(instruction):
                self.readers.setdefault(register, []).append(place)
            self.maker.update(dict.fromkeys(makes(instruction), place))
        for register in self.program.outputs:
            self.readers.setdefault(register, []).append(len(body))
        self.sources: dict[Register, tuple[Register, bool]] = {}
        """The results of `_source`, by register."""

    @cached_property
    def most(self) -> int:
        """The most bytes live at once, without inputs and weights."""
        made = (
            self.alive[p] + sum(self.program.bytes[r] for r in i.results)
            for p, i in enumerate(self.program.body)
            if isinstance(i, Compute)
        )
        return max(made, default=0)

    @cached_property
    def alive(self) -> list[int]:
        """The bytes live before every instruction, without inputs and weights."""
        change = [0] * (len(self.program.body) + 2)
        for register, place in self.maker.items():
            if not isinstance(self.program.body[place], Leaf):
                size = self.program.bytes[register]
                change[place + 1] += size
                change[max(self.readers.get(register, [place])) + 1] -= size
        alive, total = list[int](), 0
        for each in change:
            total += each
            alive.append(total)
        return alive

    # -- groups

    def with_copies_next(self) -> Program:
        """Return the program in which copies of attention's results follow it at once, if one kernel makes them all."""
        body = self.program.body
        copies: dict[int, list[int]] = {}
        for place, made in enumerate(body):
            if isinstance(made, Compute) and {each.kind for each in self._launches(made) or ()} == {"attention"}:
                only = (self.readers[r][0] for r in made.results if len(self.readers.get(r, [])) == 1)
                found = sorted(p for p in only if p < len(body) and self._is_copy(body[p]))
                if found and self._is_one([place, *found]):
                    copies[place] = found
        if not copies:
            return self.program
        moved = {p for places in copies.values() for p in places}
        order = [p for place in range(len(body)) if place not in moved for p in (place, *copies.get(place, ()))]
        return replace(self.program, body=tuple(body[p] for p in order))

    def _is_copy(self, instruction: Instruction) -> bool:
        """Return whether an instruction moves the elements of one tensor to other places in its memory."""
        return (
            isinstance(instruction, Compute)
            and len(instruction.operands) == 1
            and instruction.operator != "cast"
            and self._kind_of(instruction) == "copy"
        )

    def program_of_groups(self) -> Program:
        """Return the program with groups as one."""
        body = self.program.body
        group: list[int] = []
        out: list[Instruction] = []
        gathered = set[int]()
        for place, instruction in enumerate(body):
            if isinstance(instruction, Compute) and not self._is_weight_cast(instruction):
                if place in gathered:
                    continue
                begins = not self.own.isdisjoint(instruction.results) or instruction.results[0] in self.given
                if not group or begins or not self._is_one([*group, place]):
                    out += self._written(group, place)
                    known = self.given.get(instruction.results[0])
                    group = self._parts_of_one(place) if known is None else [*range(place, place + known)]
                    gathered = {*group}
                else:
                    group.append(place)
            elif not group:
                out.append(instruction)
        out += self._written(group, len(body))
        return replace(self.program, body=tuple(out))

    def _parts_of_one(self, place: int) -> list[int]:
        """
        Return the group that begins at `place`: the operators up to one that concatenates all their results, if one
        kernel can compute them, else the operator there alone.
        """
        body = self.program.body
        readers = {p for r in makes(body[place]) for p in self.readers.get(r, [])}
        last = min(readers, default=len(body))
        if len(readers) != 1 or last == len(body):
            return [place]
        members = [m for m in body[place : last + 1] if isinstance(m, Compute) and self.own.isdisjoint(m.results)]
        group = [*range(place, last + 1)]
        if len(members) < len(group) or not 2 < len(group) <= MOST_OPERATORS:
            return [place]
        read_elsewhere = any(self.readers.get(r) != [last] for m in members[:-1] for r in m.results)
        if read_elsewhere or not self.program.local_line(members[-1]).is_concatenation or not self._is_one(group):
            return [place]
        return group

    def _written(self, group: Sequence[int], end: int) -> list[Instruction]:
        """Return the instructions from a group up to `end`; those between members that read its results follow it."""
        if not group:
            return []
        body = self.program.body
        before: list[Instruction] = []
        after: list[Instruction] = []
        made = {r for p in group for r in makes(body[p])}
        members = {*group}
        for place, instruction in enumerate(body[group[0] : group[-1]], group[0]):
            if place in members:
                continue
            if made.isdisjoint(reads(instruction)):
                before.append(instruction)
            else:
                after.append(instruction)
                made.update(makes(instruction))
        return [*before, self._one(group), *after, *body[group[-1] + 1 : end]]

    def _one(self, group: Sequence[int]) -> Compute:
        members = [m for p in group if isinstance(m := self.program.body[p], Compute)]
        if len(members) == 1:
            return members[0]
        line = self._line(members)
        assert line is not None
        return self._instruction(members, line)

    def _instruction(self, members: Sequence[Compute], line: Part) -> Fused:
        assignment = tuple(
            next((name for name, axes in line.axes.items() if axis in axes), COPY)
            for axis in range(len(self.program.mesh.sizes))
        )
        name = AND.join(m.operator for m in members)
        return Fused(name, line.operands, line.results, (), assignment, tuple(members), line.line)

    # -- what may be one

    def _is_one(self, group: Sequence[int]) -> bool:
        members = [m for p in group if isinstance(m := self.program.body[p], Compute)]
        *before, last = members
        made = {r for m in before for r in m.results}
        if made.isdisjoint(last.operands) and not self._reads_the_same(before, last):
            return False
        if len(members) > MOST_OPERATORS:
            return False
        return self._is_there(group, members) and self._fits(group, members) and self.is_kernel(members)

    def _reads_the_same(self, before: Sequence[Compute], last: Compute) -> bool:
        """
        Return whether an operator sums the columns of what others read, or reads the rows of which others sum columns,
        or make what is summed (`cost.floors` takes no others for one kernel).
        """
        sums = [m for m in before if self._sums_columns(m)]
        summed = {r for m in sums for r in m.operands}
        those = before if self._sums_columns(last) else [m for m in before if m in sums or summed & {*m.results}]
        read = {r for m in those for r in m.operands if self.program.tensors[r].dtype not in NOT_FLOATING}
        return any(r in read and self._is_larger(r, last) for r in last.operands)

    def _is_larger(self, register: Register, than: Compute) -> bool:
        """Return whether a tensor has as many elements as any operand of an operator: it is no vector beside rows."""
        return self.program.bytes[register] >= max(self.program.bytes[r] for r in than.operands)

    def _sums_columns(self, member: Compute) -> bool:
        """Return whether an operator sums a tensor over all dims but the last ones."""
        number, sums = self.program.number(member), self.memo.sums
        if number not in sums:
            sums[number] = all(map(is_column_sum, self.program.local_line(member).results))
        return sums[number]

    def _is_there(self, group: Sequence[int], members: Sequence[Compute]) -> bool:
        """
        Return whether the same ranks do all members, and their fusion waits for no collective that the first member did
        not wait for, and delays none.
        """
        tensors, body = self.program.tensors, self.program.body
        made = {r: tensors[r].layout for m in members for r in m.results}
        if len({pins_of(layout) for layout in {*made.values()}}) > 1:
            return False
        first = {self._source(r)[0] for r in members[0].operands}
        for member in members[1:]:
            for register in member.operands:
                if register in made:
                    continue
                source, crossed = self._source(register)
                place = self.maker[source]
                is_late = place >= group[0] or (crossed and source not in first)
                if is_late and not isinstance(body[place], Leaf):
                    return False
        moved: set[Register] = set()
        for member in members[:-1]:
            for register in member.results:
                for place in self.readers.get(register, ()):
                    if place < len(body) and isinstance(body[place], ReshardMove | HaloExchange):
                        moved.add(register)
        # What is summed of columns is so little that its collective may start a few kernels later.
        return not moved or moved <= self._sums(members)

    def _sums(self, members: Sequence[Compute]) -> set[Register]:
        """Return the sums of columns that members make, and what others make of such alone."""
        found: set[Register] = set()
        for member in members:
            if found.issuperset(member.operands) or self._sums_columns(member):
                found.update(member.results)
        return found

    def _source(self, register: Register) -> tuple[Register, bool]:
        """
        Return the register from which moves, and the cast of a stored weight, make this one, and whether one of these
        moves crosses links.
        """
        found = self.sources.get(register)
        if found is None:
            at, crossed = register, False
            move = self.program.body[self.maker[at]]
            while isinstance(move, ReshardMove | HaloExchange | TimeStep) or self._is_weight_cast(move):
                at = reads(move)[0]
                crossed = crossed or communicates(move)
                move = self.program.body[self.maker[at]]
            found = self.sources[register] = at, crossed
        return found

    def _is_weight_cast(self, instruction: Instruction) -> bool:
        """Return whether an instruction casts a stored weight: like a move it is made where the weight is needed."""
        return self._casts_weight(instruction) and self.own.isdisjoint(makes(instruction))

    def _casts_weight(self, instruction: Instruction) -> bool:
        if not isinstance(instruction, Compute) or instruction.operator != "cast":
            return False
        maker = self.program.body[self.maker[instruction.operands[0]]]
        return isinstance(maker, Leaf) and maker.op == "weight"

    def _kept(self, members: Sequence[Compute]) -> list[Register]:
        """Return the results of a group that others read, and those of its last member."""
        maker, readers = self.maker, self.readers
        places = {maker[m.results[0]] for m in members}
        early = [r for m in members[:-1] for r in m.results if not places.issuperset(readers.get(r, ()))]
        return [*early, *members[-1].results]

    def _fits(self, group: Sequence[int], members: Sequence[Compute]) -> bool:
        """Return whether the group keeps live memory at or below the program's peak."""
        made = {r for m in members for r in m.results}
        # Registers that moves between the members make; only the last of several moves' results is live here.
        moved = {r for m in members for r in m.operands if r not in made and self.maker[r] > group[0]}
        sizes = self.program.bytes
        size = sum([sizes[r] for r in (*self._kept(members), *moved)])
        return self.alive[group[0]] + size <= self.most

    # -- lines and kernels

    def _key(self, members: Sequence[Compute]) -> object:
        """Return a key that is equal for groups of the same operators on the same shapes, connected in the same way."""
        numbers: dict[Register, int] = {}
        wired: list[int] = []
        for member in members:
            wired.append(self.program.number(member))
            for register in (*member.operands, *member.results):
                wired.append(numbers.setdefault(register, len(numbers)))
        return tuple(wired), tuple([numbers[r] for r in self._kept(members)])

    def _line(self, members: Sequence[Compute]) -> Part | None:
        key = self._key(members)
        numbers = list(dict.fromkeys(r for m in members for r in (*m.operands, *m.results)))
        lines = self.memo.lines
        if key not in lines:
            found = self._composed(members)
            found = found and self._with_types(found)
            at = {r: n for n, r in enumerate(numbers)}
            lines[key] = found and replace(
                found, operands=tuple(at[r] for r in found.operands), results=tuple(at[r] for r in found.results)
            )
        line = lines[key]
        return line and replace(
            line, operands=tuple(numbers[n] for n in line.operands), results=tuple(numbers[n] for n in line.results)
        )

    def _composed(self, members: Sequence[Compute]) -> Part | None:
        """
        Return the line of a group whose members read each other's results, or sum columns or rows of the same tensor,
        or parts of what one member divides.
        """
        parts, kept = [self._part(m) for m in members], self._kept(members)
        found = composed(parts, kept)
        found = found or relabelled(parts, kept)
        if found is not None:
            return found
        if not any(map(self._sums_columns, members)):
            several = any(len(m.results) > 1 for m in members)
            apart = composed(parts, kept, apart=True) if several else None
            if apart is None or _reads_once(apart.line):
                return apart
            whole = with_row_variables(apart.line, apart.axes)
            return None if whole is None else replace(apart, line=whole[0], axes=whole[1], apart=False)
        apart = composed(parts, kept, apart=True)
        whole = apart and with_common_variables(apart.line, apart.axes)
        return None if apart is None or not whole else replace(apart, line=whole[0], axes=whole[1])

    def _with_types(self, line: Part) -> Part:
        """Return a group's line with the element type of each result that has another than the first float operand."""
        tensors = self.program.tensors
        floats = (tensors[r].dtype for r, p in zip(line.operands, line.line.operands, strict=True) if p.floating)
        usual = next(floats, "f32")
        types = (tensors[r].dtype for r in line.results)
        results = tuple(
            replace(r, dtype=None if t == usual else t) for r, t in zip(line.line.results, types, strict=True)
        )
        return replace(line, line=replace(line.line, results=results))

    def _part(self, member: Compute) -> Part:
        axes: dict[str, tuple[int, ...]] = {}
        for axis, what in enumerate(member.assignment):
            if isinstance(what, str):
                axes[what] = (*axes.get(what, ()), axis)
        return Part(self.program.local_line(member), member.operands, member.results, axes)

    def _launches(self, member: Compute) -> Launches | None:
        """Return the launches of one operator in Triton; None for PyTorch's, and for results that are no floats."""
        number, made = self.program.number(member), self.memo.launches
        if number not in made:
            made[number] = self._of_operator(member)
        return made[number]

    def _of_operator(self, member: Compute) -> Launches | None:
        operator = local_operator(self.program, member)
        floats = {d for d in operator.dtypes if d not in NOT_FLOATING}
        if not floats or any(self.program.tensors[r].dtype in NOT_FLOATING for r in member.results):
            return None
        if operator.line.has_windows or self.choice(operator) != "triton":
            return None
        try:
            made = launcher(operator.line, operator.dtypes, "triton", operator.divided)
        except UnityError:
            return None  # such as f64, which no kernel takes
        kinds = {each.kind for each in made.work}
        # Gradients of attention read sums of rows in float32.
        takes = kinds == {"attention"} or len(floats) == 1
        return made.work if kinds and takes and kinds.issubset(KINDS) else None

    def is_kernel(self, members: Sequence[Compute]) -> bool:
        """Return whether one Triton kernel computes these operators, of which each reads a result of one before it."""
        if any(self._launches(m) is None for m in members):
            return False
        key, made = self._key(members), self.memo.launches
        if key not in made:
            made[key] = self._of_group(members)
        return made[key] is not None

    def _kind_of(self, member: Compute) -> str:
        """Return the kind of an operator's kernel (`forms.kinds`), that of its line at global shapes."""
        read = [self.program.tensors[r] for r in member.operands]
        return kind(global_line(member.operator, read, member.attributes))

    def _of_group(self, members: Sequence[Compute]) -> Launches | None:
        """
        Return a group's launches; None unless kernels do it as much at once as its members, and read no more.

        Beside a contraction there are only pointwise operators, after it: lower bounds rely on it (`cost.floors`).
        """
        kinds = [self._kind_of(m) for m in members]
        if not {*kinds}.isdisjoint(CONTRACTIONS) and not {*kinds[1:]}.issubset(POINTWISE):
            return None
        line = self._line(members)
        if line is None or not self._takes_rows(line):
            return None
        operator = local_operator(self.program, self._instruction(members, line))
        try:
            made = launcher(operator.line, operator.dtypes, "triton", operator.divided)
        except UnityError:
            return None
        if self.choice(operator) != "triton":
            return None
        each = [self._launches(m) or () for m in members]
        alone = [launch for launches in each for launch in launches]
        most = max((launch.kind for launch in alone), key=KINDS.index)
        are_saved = len(made.work) <= len(alone) - len(members) + 1
        if made.work[0].kind == "columns" and most == "rows":
            most = "columns"
        elif most == "columns" and {launch.kind for launch in made.work} == {"rows"}:
            # Means of columns and of their distances, in one pass.
            return made.work if are_saved and _passes(made.work) == 1 else None
        elif line.apart and (most != "elements" or len(made.work) > len(alone)):
            return None
        elif not line.apart and not are_saved:
            return None
        if made.work[0].kind != most or _passes(made.work) > _passes(alone):
            return None
        if len(line.operands) + len(line.results) > MOST_TENSORS[most]:
            return None
        # A row that is too long to be held is read anew in every pass, all its operands.
        before = sum(self._moved(m.operands, m.results, of) for m, of in zip(members, each, strict=True))
        moved = self._moved(line.operands, line.results, made.work)
        if moved > before or (len(made.work) == len(alone) and moved == before):
            return None
        # With fewer programs, a part of the GPU would be idle.
        if most == "columns":
            # It has enough, however many the members have.
            return made.work if len(made.work) < len(alone) or moved < before else None
        if most in ("scatter", "grouped"):
            # It has the programs that it has alone.
            return made.work if all(launch.kind == most for launch in made.work) else None
        # Of a weight's cast a group computes only what it reads.
        whole = [launches for m, launches in zip(members, each, strict=True) if not self._casts_weight(m)]
        enough = min(2 * FULL, max(launch.programs for launches in whole or each for launch in launches))
        is_busy = {launch.kind for launch in made.work} == {"rows"} and made.work[0].programs >= BUSY
        return made.work if is_busy or made.work[0].programs * 2 >= enough else None

    def _takes_rows(self, line: Part) -> bool:
        """Return whether a group's line steps through padded rows by one variable, as each of its members does."""
        named = zip((*line.line.operands, *line.line.results), (*line.operands, *line.results), strict=True)
        padded = ((p.name, self.program.tensors[r]) for p, r in named if self.program.tensors[r].row)
        return all(can_be_padded(line.line, name, t.local(self.program.mesh)[-1]) for name, t in padded)

    def _moved(self, operands: Sequence[Register], results: Sequence[Register], launches: Launches) -> int:
        """Return the bytes that launches read, in all passes, and write."""
        read, written = (sum(self.program.bytes[r] for r in registers) for registers in (operands, results))
        return _passes(launches) * read + written


def _reads_once(line: Bound) -> bool:
    """Return whether a line whose results have variables of their own reads no more than all operands, once."""
    read = [a for r in line.results for a in dict.fromkeys(accesses(r.expr))]
    names = [dict.fromkeys(n for i in a.indices for n in index_names(i)) for a in read]
    shapes = operand_shapes(line)
    return sum(prod(line.extents[n] for n in own) for own in names) <= sum(prod(s) for s in shapes.values())


def _passes(launches: Sequence[LaunchWork]) -> int:
    return max((launch.passes for launch in launches), default=1)
