"""
Divide a step whose operators are in stages into the parts that a pipeline schedule orders: what is done once before all
micro-batches, a forward and a backward of each stage for one micro-batch, and what is done after all of them.

A part is a program of its own. What one part makes and others read is in their bodies a leaf (`plan.program.Leaf`).
Forward is what the step's outputs depend on; the backward of a stage can be divided further into what leads to the
gradient that an earlier stage reads (I), and the rest, which reaches gradients of weights only (W): a cut of the graph,
since the backward is explicit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from unity_ir.errors import UnityError
from unity_ir.pcg.sharding import Mesh, Pins, pins
from unity_ir.pcg.stages import stage_axes
from unity_ir.plan.deadlock import makers
from unity_ir.plan.pipeline.actions import COMPUTE
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.program import (
    Instruction,
    Leaf,
    Program,
    Register,
    ReshardMove,
    TimeStep,
    UpdateWeight,
    makers_of,
    makes,
    reads,
)

PartKind = Literal["before", "F", "B", "I", "W", "after"]

Key = tuple[PartKind, int | None]
"""A part by its kind and stage."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that a stage sends to the one after it, or (a gradient) before it: its register there, and here."""

    held: Register
    received: Register


@dataclass(frozen=True)
class StepPart:
    """
    A part of a step: what all ranks do `before` all micro-batches or `after` them, or what those of a stage do for one.

    The program's outputs are what other parts read. `sends` are the transfers of it, to the rank of another stage.
    """

    kind: PartKind
    stage: int | None
    program: Program
    sends: tuple[Sent, ...] = ()
    place: Pins = ()
    """The coordinates of the ranks that do it; () for all."""

    @property
    def name(self) -> str:
        """The part in the words of a schedule, `2F`; `before` and `after` of what has no stage."""
        return self.kind if self.stage is None else f"{self.stage}{self.kind}"


@dataclass(frozen=True)
class StepParts:
    """
    The parts of a step, and their order; `keys` names what one part makes and others read.
    """

    schedule: PipelineSchedule
    parts: tuple[StepPart, ...]
    keys: Mapping[Register, str]

    @cached_property
    def by_name(self) -> Mapping[str, StepPart]:
        return {part.name: part for part in self.parts}

    def received(self, stage: int, kind: Literal["F", "B"]) -> tuple[Register, ...]:
        """Return the registers that a stage receives for its forward, or for its backward."""
        sender = (f"{stage - 1}F",) if kind == "F" else (f"{stage + 1}B", f"{stage + 1}I")
        found = (self.by_name.get(name) for name in sender)
        return tuple(sent.received for part in found if part is not None for sent in part.sends)


def step_parts(program: Program, schedule: PipelineSchedule) -> StepParts:
    """
    Return the parts of a step for a schedule.

    Raises `UnityError` if the step's operators are not in the schedule's stages, or not for its micro-batches.
    """
    where = f"spmd.program @{program.name}"
    if schedule.gradient_delay:
        raise UnityError(f"{where}: {schedule.name} computes {schedule.computes}; no program is emitted for it")
    if program.loss_pieces > 1:
        raise UnityError(f"{where}: makes its loss in pieces, which stages do not yet; use loss_pieces=1")
    if schedule.micro_batches != program.micro_batches:
        raise UnityError(
            f"{where}: has {program.micro_batches} micro-batches, its schedule {schedule.micro_batches}; use one number"
        )
    return _Parts(program, schedule).parts()


class _Parts:
    def __init__(self, program: Program, schedule: PipelineSchedule):
        self.program = program
        self.schedule = schedule
        self.where = f"spmd.program @{program.name}"
        self.leading = stage_axes(Mesh(program.mesh.sizes[: program.axes]), len(schedule.ranks))
        self.makers = makers_of(program.body)
        self.order = {id(i): n for n, i in enumerate(program.body)}
        self.forward = self._ancestors(program.outputs)
        self.part: dict[Register, Key] = {}
        """For each register that is made in one part only: which."""
        self._assign()

    # -- which part does what

    def _ancestors(self, registers: Iterable[Register]) -> set[Register]:
        """Return these registers, and all that they are made of."""
        found: set[Register] = set()
        todo = list(registers)
        while todo:
            register = todo.pop()
            if register not in found:
                found.add(register)
                todo += reads(self.makers[register])
        return found

    def _rank(self, register: Register) -> int | None:
        """Return the rank in the pipeline that holds a register; None if all do."""
        found = [(axis, c) for axis, c in pins(self.program.tensors[register].layout) if axis < self.leading]
        if not found:
            return None
        if len(found) < self.leading:
            raise UnityError(f"{self.where}: a value is on several parts of the machine, but not all; use whole stages")
        rank = 0
        for axis, coordinate in found:
            rank = rank * self.program.mesh.sizes[axis] + coordinate
        return rank

    def _is_everywhere(self, instruction: Instruction) -> bool:
        """
        Return whether each part that reads what an instruction makes does it by itself: a leaf, what takes no time, and
        what all stages do alike.
        """
        match instruction:
            case Leaf("input" | "weight"):
                return True
            case TimeStep(_, _, "reuse") | ReshardMove(_, _, "retype"):
                return True
            case UpdateWeight():
                return False
            case _:
                (register, *_) = makes(instruction)
                return self.program.when[register] == "every" and self._rank(register) is None

    def _boundary(self, instruction: Instruction) -> tuple[int, int] | None:
        """Return the ranks between which an instruction of the loop sends; None if it does not."""
        if not isinstance(instruction, ReshardMove) or self.program.when[instruction.result] != "every":
            return None
        source, target = self._rank(instruction.operand), self._rank(instruction.result)
        if source is None or target is None or source == target:
            return None
        return source, target

    def _assign(self) -> None:
        program, when = self.program, self.program.when
        for instruction in program.body:
            made = makes(instruction)
            if not made or self._is_everywhere(instruction):
                continue
            time = when[made[0]]
            if time != "every":
                self._put(made, "after" if time == "last" else "before", None)
                continue
            kind: PartKind = "F" if made[0] in self.forward else "B"
            self._put(made, kind, self._stage(instruction, kind))
        if self.schedule.splits_backward:
            self._split()

    def _put(self, made: Iterable[Register], kind: PartKind, stage: int | None) -> None:
        self.part.update(dict.fromkeys(made, (kind, stage)))

    def _stage(self, instruction: Instruction, kind: PartKind) -> int:
        """
        Return the stage that does an instruction of the loop: of those on its rank the nearest to what it reads, or the
        first one to run.
        """
        rank = self._rank(makes(instruction)[0])
        stages = self.schedule.stages_of(rank) if rank is not None else []
        parts = [self.part[r] for r in reads(instruction) if r in self.part]
        before = [s for k, s in parts if s is not None and (k == "F") == (kind == "F")]
        if kind == "B" and not before:
            # The first of a backward, or a forward done again.
            before = [s for _, s in parts if s is not None]
        if not before:
            return stages[0 if kind == "F" else -1]
        if kind == "F":
            found = next((s for s in stages if s >= max(before)), None)
        else:
            found = next((s for s in reversed(stages) if s <= min(before)), None)
        if found is None:
            raise UnityError(
                f"{self.where}: rank {rank} of the pipeline reads what a {'later' if kind == 'F' else 'earlier'} stage "
                f"makes; the stages of {self.schedule.name} are on ranks {', '.join(map(str, self.schedule.rank_of))}"
            )
        crossed = self._boundary(instruction)
        last = (max if kind == "F" else min)(before)
        if crossed is not None and found != last + (1 if kind == "F" else -1):
            raise UnityError(f"{self.where}: stage {last} sends to stage {found}; only neighbours send to each other")
        return found

    def _split(self) -> None:
        """Divide backwards in halves: what the gradient of a stage's input is made of is I, the rest W."""
        wanted: set[Register] = set()
        for instruction in reversed(self.program.body):
            made = makes(instruction)
            if not made or self.part.get(made[0], ("", None))[0] != "B":
                continue
            kind, stage = self.part[made[0]]
            if self._boundary(instruction) is not None or not wanted.isdisjoint(made):
                wanted.update(reads(instruction))
                self._put(made, "I", stage)
            else:
                self._put(made, "W", stage)

    # -- their programs

    def parts(self) -> StepParts:
        bodies: dict[Key, list[Instruction]] = {("before", None): []}
        sends: dict[Key, list[Sent]] = {}
        received: set[Register] = set()
        for instruction in self.program.body:
            made = makes(instruction)
            if not made or made[0] not in self.part:
                continue
            kind, stage = self.part[made[0]]
            if self._boundary(instruction) is None:
                bodies.setdefault((kind, stage), []).append(instruction)
                continue
            assert isinstance(instruction, ReshardMove)
            sender = self._sender(instruction)
            sends.setdefault(sender, []).append(Sent(instruction.operand, instruction.result))
            bodies.setdefault(sender, [])
            received.add(instruction.result)
        bodies.setdefault(("after", None), [])
        grads = [i.grad for i in self.program.body if isinstance(i, UpdateWeight)]
        final = (*self.program.outputs, *grads)
        given = {
            key: self._given(body, sends.get(key, ()), final if key[0] == "after" else ())
            for key, body in bodies.items()
        }
        read_in: dict[Register, list[Key]] = {}
        for key, needs in given.items():
            for register in needs:
                read_in.setdefault(register, []).append(key)
        keys = self._keys(read_in)
        last = self._last_readers(read_in)
        made: list[StepPart] = []
        for key, body in bodies.items():
            own = {r for i in body for r in makes(i)}
            leaves: list[Instruction] = []
            for register in given[key]:
                home = None if register in received else self.part[register][0]
                if key[0] == "after" and home not in ("before", None):
                    op = "sum"
                elif home == "before":
                    op = "once"
                else:
                    op = "last" if last.get(register) == key else "kept"
                leaves.append(Leaf(op, register, keys[register]))
            shared = self._shared(body, (*(s.held for s in sends.get(key, ())), *(final if key[0] == "after" else ())))
            ordered = sorted((*shared, *body), key=lambda i: self.order[id(i)])
            outputs = final if key[0] == "after" else tuple(r for r in keys if r in own)
            outputs += tuple(each.held for each in sends.get(key, ()))
            used = {r for i in (*leaves, *ordered) for r in (*reads(i), *makes(i))}
            program = replace(
                self.program,
                tensors={r: t for r, t in self.program.tensors.items() if r in used},
                body=(*leaves, *ordered),
                outputs=tuple(dict.fromkeys(outputs)),
                optimizer=None,
                part_of=self.program,
            )
            made.append(StepPart(*key, program, tuple(sends.get(key, ())), self._place_of(key[1])))
        return StepParts(self.schedule, tuple(sorted(made, key=_place)), keys)

    def _place_of(self, stage: int | None) -> Pins:
        """Return the coordinates of the ranks of a stage."""
        if stage is None:
            return ()
        leading = Mesh(self.program.mesh.sizes[: self.leading])
        return tuple(enumerate(leading.coordinates(self.schedule.rank_of[stage])))

    def _sender(self, instruction: ReshardMove) -> Key:
        """Return the part that sends what a boundary moves."""
        kind, stage = self.part[instruction.result]
        assert stage is not None
        return kind, stage - 1 if kind == "F" else stage + 1

    def _shared(self, body: Sequence[Instruction], also: Iterable[Register]) -> list[Instruction]:
        """Return the instructions that a part does by itself, as others do, for what it reads."""
        found: dict[int, Instruction] = {}
        todo = [*(r for i in body for r in reads(i)), *also]
        while todo:
            maker = self.makers[todo.pop()]
            if id(maker) not in found and self._is_everywhere(maker):
                found[id(maker)] = maker
                todo += reads(maker)
        return list(found.values())

    def _given(self, body: Sequence[Instruction], sends: Sequence[Sent], also: Iterable[Register]) -> list[Register]:
        """Return the registers that a part reads, and other parts make."""
        ends = (*(s.held for s in sends), *also)
        shared = self._shared(body, ends)
        own = {r for i in (*body, *shared) for r in makes(i)}
        found = dict.fromkeys(r for i in (*shared, *body) for r in reads(i))
        found |= dict.fromkeys(ends)
        return [r for r in found if r not in own]

    def _keys(self, read_in: Mapping[Register, object]) -> dict[Register, str]:
        """Return a name for each register that one part makes and others read, or receive; sums always have one."""
        sums = [r for r in self.program.sums if r in self.part]
        joined = [i.result for i in self.program.body if isinstance(i, TimeStep) and i.kind == "batch"]
        found: dict[Register, str] = {}
        names = makers(self.program)
        taken: set[str] = set()
        for register in (*read_in, *sums, *joined):
            if register in found:
                continue
            stem, number = names[register], 1
            name = stem
            while name in taken:
                number += 1
                name = f"{stem}_{number}"
            taken.add(name)
            found[register] = name
        return found

    def _last_readers(self, read_in: Mapping[Register, Sequence[Key]]) -> dict[Register, Key]:
        """Return, for what is kept of a micro-batch, the part that is the last to read it in the rank's order."""
        place: dict[tuple[str, int | None], int] = {}
        for actions in self.schedule.ranks:
            for n, (stage, kind, k) in enumerate(actions):
                if kind in COMPUTE and k == self.program.micro_batches - 1:
                    place[kind, stage] = n
        found: dict[Register, Key] = {}
        for register, parts in read_in.items():
            if all(key in place for key in parts):
                found[register] = max(parts, key=lambda key: place[key])
        return found


def _place(part: StepPart) -> tuple[int, int]:
    """Return where a part is among the functions of a program: as they run in the first micro-batch."""
    order: tuple[PartKind, ...] = ("before", "F", "B", "I", "W", "after")
    is_backward = part.kind in ("B", "I", "W")
    group = 0 if part.kind == "before" else 1 if part.kind == "F" else 2 if is_backward else 3
    stage = part.stage or 0
    return group, (-stage if is_backward else stage) * len(order) + order.index(part.kind)
