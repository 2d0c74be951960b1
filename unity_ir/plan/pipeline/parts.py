"""
Divide a step whose operators are in stages into the parts that a pipeline schedule orders: what is done once before all
micro-batches, a forward and a backward of each stage for one micro-batch, and what is done after all of them.

A part is a program of its own. What one part makes and others read is a leaf in their bodies
(`plan.instructions.Leaf`). Forward is what the step's outputs depend on, and with it all of a loss in pieces, whose
gradients stand beside it. The backward of a stage can be divided further into what leads to the gradient that an
earlier stage reads (I), and the rest, which reaches gradients of weights only (W): a cut of the graph, since the
backward is explicit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

from unity_ir.errors import UnityError
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.sharding import Mesh, Pins, pins_of
from unity_ir.pcg.stages import stage_axes
from unity_ir.plan.deadlock import register_names
from unity_ir.plan.instructions import (
    Compute,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    TimeStep,
    UpdateWeight,
    makers_of,
    makes,
    reads,
)
from unity_ir.plan.pipeline.actions import COMPUTE
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.program import Program
from unity_ir.plan.schedule import SYNCS

PartKind = Literal["before", "F", "B", "I", "W", "after"]

Key = tuple[PartKind, int | None]
"""A part by its kind and stage."""


@dataclass(frozen=True, slots=True)
class Sent:
    """
    A value that a stage sends to the next stage, or a gradient that it sends to the stage before: its register on the
    sender (`held`) and on the receiver (`received`).
    """

    held: Register
    received: Register


@dataclass(frozen=True)
class StepPart:
    """
    A part of a step, with a program of its own. Kinds `before` and `after` are done once, by all ranks, around all
    micro-batches (`stage` is None). The other kinds are done by the ranks of one stage, once per micro-batch: F
    (forward), B (backward), or its halves I (gradient of the stage's input) and W (gradients of its weights).

    The outputs of `program` are what other parts read; `sends` are the values that it sends to the ranks of another
    stage.
    """

    kind: PartKind
    stage: int | None
    program: Program
    sends: tuple[Sent, ...] = ()
    place: Pins = ()
    """The coordinates of the ranks that do it; () for all."""

    @property
    def name(self) -> str:
        """The name of the part: stage and kind, such as `2F`, as in a schedule's actions, or `before` and `after`."""
        return self.kind if self.stage is None else f"{self.stage}{self.kind}"


@dataclass(frozen=True)
class StepParts:
    """
    A step in stages, divided into parts, and the schedule that orders them. `keys` gives a name to each register that
    one part makes and another reads. `mesh` has the leading axes of the machine's mesh, along which the pipeline's
    ranks lie: one rank of the pipeline for each place in it.
    """

    schedule: PipelineSchedule
    parts: tuple[StepPart, ...]
    keys: Mapping[Register, str]
    mesh: Mesh

    @cached_property
    def by_name(self) -> Mapping[str, StepPart]:
        """The parts by their names, such as `2F` or `before`."""
        return {part.name: part for part in self.parts}

    def run_by(self, stage: int, kind: str) -> list[StepPart]:
        """
        Return the parts that a rank runs, in order, for one action of the schedule: `stage` is the action's stage, and
        `kind` its kind, F (forward), B (backward), or one of its halves, I (gradient of the stage's input) and W
        (gradients of its weights). If any backward of the schedule is divided in halves, B stands for the parts I and
        W. A part with nothing to do does not exist, so the list may be empty.
        """
        halves = kind == "B" and self.schedule.splits_backward
        names = (f"{stage}I", f"{stage}W") if halves else (f"{stage}{kind}",)
        return [self.by_name[name] for name in names if name in self.by_name]

    def received(self, stage: int, kind: Literal["F", "B"]) -> tuple[Register, ...]:
        """
        Return the registers (numbers of local tensors) that a stage receives: for its forward (`F`) from the stage
        before, or for its backward (`B`, also if that is in halves) from the stage after; () if none.
        """
        sender = (f"{stage - 1}F",) if kind == "F" else (f"{stage + 1}B", f"{stage + 1}I")
        found = (self.by_name.get(name) for name in sender)
        return tuple(sent.received for part in found if part is not None for sent in part.sends)


def step_parts(program: Program, schedule: PipelineSchedule, bucket: int = 0) -> StepParts:
    """
    Divide a training step whose operators are in stages into the parts that `schedule` orders; `program` is the step of
    one rank. The schedule is synchronous, or one step of an asynchronous one (`orders.steady_step`).

    The sum of a gradient over the devices of a stage starts in the part that makes the gradient's last addend, and is
    waited for in the part `after`. Sums of fewer than `bucket` bytes start in `after`, too, where they share calls.

    Raises `UnityError` if the operators' stages are not those of the schedule, if the numbers of micro-batches differ,
    and for an asynchronous schedule of a step that clips gradients or communicates over all stages once per step.
    """
    where = f"spmd.program @{program.name}"
    if schedule.gradient_delay and program.optimizer is not None and program.optimizer.clip:
        raise UnityError(
            f"{where}: clips by the norm of all stages' gradients, for which {schedule.name} would have to drain; use "
            "clip=0, or a synchronous schedule"
        )
    if schedule.micro_batches != program.micro_batches:
        raise UnityError(
            f"{where}: has {program.micro_batches} micro-batches, its schedule {schedule.micro_batches}; use one number"
        )
    return _Parts(program, schedule, bucket).parts()


class _Parts:
    def __init__(self, program: Program, schedule: PipelineSchedule, bucket: int):
        self.program = program
        self.schedule = schedule
        self.where = f"spmd.program @{program.name}"
        sizes = program.mesh.sizes
        self.leading = stage_axes(Mesh(sizes[: program.axes]), len(schedule.ranks))
        self.mesh = Mesh(sizes[: self.leading])
        self.makers = makers_of(program.body)
        self.order = {id(i): n for n, i in enumerate(program.body)}
        self.forward = self._ancestors((*program.outputs, *self._in_pieces()))
        self.part: dict[Register, Key] = {}
        """For each register that is made in one part only: which."""
        self.received: set[Register] = set()
        """Registers that come from another rank."""
        self.started: dict[Register, Register] = {}
        """Sums over devices that begin while micro-batches run, by what they are of."""
        self._assign()
        self._start_early(bucket)

    # -- which part does what

    def _in_pieces(self) -> set[Register]:
        """
        Return what the loop over the pieces of the loss makes, and the sums over micro-batches of gradients that it
        makes of weights: with it they are of the forward, so that none is held until a backward.
        """
        loop, _ = self.program.loop_of_pieces or ((), None)
        grads = {i.result for i in loop if isinstance(i, TimeStep) and i.kind == "accumulate"}
        for instruction in self.program.body if loop else ():
            read, made = reads(instruction), makes(instruction)
            is_moved = isinstance(instruction, TimeStep | ReshardMove) and self._boundary(instruction) is None
            is_cast = isinstance(instruction, Compute) and instruction.operator == "cast"
            if read and grads.issuperset(read) and (is_moved or is_cast) and self.program.when[made[0]] == "every":
                grads.update(made)
        return {r for i in loop for r in makes(i)} | grads

    def _ancestors(self, registers: Iterable[Register]) -> set[Register]:
        """
        Return these registers, and all that they are made of, with the other results of what makes them: that is done
        in one part, whether all its results are read or not.
        """
        found: set[Register] = set()
        todo = list(registers)
        while todo:
            register = todo.pop()
            if register not in found:
                maker = self.makers[register]
                found.update(makes(maker))
                todo += reads(maker)
        return found

    def _rank(self, register: Register) -> int | None:
        """Return the rank in the pipeline that holds a register; None if all do."""
        found = [(axis, c) for axis, c in pins_of(self.program.tensors[register].layout) if axis < self.leading]
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
            case Leaf("input" | "weight" | "cast"):
                return True
            case TimeStep(_, _, "reuse"):
                return True
            case UpdateWeight() | StateMove():
                return False
            case _:
                if _is_retype(instruction):
                    return True
                (register, *_) = makes(instruction)
                return self.program.when[register] == "every" and self._rank(register) is None

    def _boundary(self, instruction: Instruction) -> tuple[int, int] | None:
        """Return the stages between which an instruction of the loop sends; None if it does not."""
        if not isinstance(instruction, ReshardMove) or self.program.when[instruction.result] != "every":
            return None
        if instruction.stages is not None and abs(instruction.stages[0] - instruction.stages[1]) != 1:
            source, target = instruction.stages
            raise UnityError(
                f"{self.where}: stage {source} sends to stage {target} in every micro-batch; only neighbours do"
            )
        return instruction.stages

    def _assign(self) -> None:
        program, when = self.program, self.program.when
        of_loss, again, loop = self._of_the_loss(), list[Instruction](), program.loop_of_pieces
        for instruction in program.body:
            made = makes(instruction)
            self._check_within(instruction)
            if not made or self._is_everywhere(instruction):
                self._check_alike(instruction)
                continue
            time = when[made[0]]
            if loop is not None and program.is_in_pieces(instruction):
                if self._boundary(instruction) is not None:
                    raise UnityError(
                        f"{self.where}: makes its loss in pieces of which each goes from stage to stage; put the last "
                        "product and the loss into one stage, or leave loss_pieces out"
                    )
                if made[0] not in self.part:
                    self._put((r for i in loop[0] for r in makes(i)), "F", self._stage(loop[1], "F"))
                continue
            if time != "every":
                self._put(made, "after" if time == "last" else "before", None)
                continue
            if made[0] not in self.forward and made[0] not in of_loss:
                again.append(instruction)
                continue
            kind: PartKind = "F" if made[0] in self.forward else "B"
            self._put(made, kind, self._stage(instruction, kind))
        self._assign_again(again)
        if self.schedule.splits_backward:
            self._split()

    def _of_the_loss(self) -> set[Register]:
        """Return the registers that the gradient of the loss goes into: not those of a forward that is done again."""
        found: set[Register] = set()
        outputs = self._ancestors(self.program.outputs)
        for instruction in self.program.body:
            made = makes(instruction)
            is_seed = isinstance(instruction, Leaf) and instruction.op == "constant"
            if outputs.isdisjoint(made) and (is_seed or not found.isdisjoint(reads(instruction))):
                found.update(made)
        return found

    def _assign_again(self, again: Sequence[Instruction]) -> None:
        """
        Put forwards that are done again in the backward of the stage that reads them; of several on one rank, of the
        last one, whose backward comes first.
        """
        made = {r for instruction in again for r in makes(instruction)}
        readers: dict[Register, set[int]] = {}
        for instruction in reversed(self.program.body) if made else ():
            own = makes(instruction)
            if not made.isdisjoint(own):
                default = self.schedule.stages_of(self._rank(own[0]) or 0)[-1]
                self._put(own, "B", max((s for r in own for s in readers.get(r, ())), default=default))
            stage = self.part[own[0]][1] if own and own[0] in self.part else None
            if stage is not None:
                for register in made & self._behind(instruction, made):
                    readers.setdefault(register, set()).add(stage)

    def _check_within(self, instruction: Instruction) -> None:
        """Check that only sends go from one stage's ranks to another's: those are never together in a collective."""
        if not isinstance(instruction, ReshardMove) or instruction.stages is not None:
            return
        if self.program.when[instruction.result] != "every":
            return
        crossed = [axis for axis in instruction.axes if axis < self.leading]
        if crossed and COLLECTIVES[instruction.kind].crosses_links:
            raise UnityError(
                f"{self.where}: every micro-batch has a {instruction.kind} along mesh axis {crossed[0]}, which its "
                "stages are along; send values to the stages that read them (pcg.send)"
            )

    def _check_alike(self, instruction: Instruction) -> None:
        """Check that what every stage does by itself reads nothing that only some stages have."""
        if isinstance(instruction, Leaf | UpdateWeight | StateMove | TimeStep) or _is_retype(instruction):
            return
        read = next((self.part[r] for r in self._behind(instruction) if self.part[r][1] is not None), None)
        if read is not None:
            raise UnityError(
                f"{self.where}: all ranks read in every micro-batch what stage {read[1]} makes; send it to the stages "
                "that read it (pcg.send)"
            )

    def _behind(self, instruction: Instruction, also: Collection[Register] = ()) -> set[Register]:
        """
        Return the registers of one part, or of `also`, that an instruction reads, also through what each part does by
        itself.
        """
        found: set[Register] = set()
        todo = [*reads(instruction)]
        while todo:
            register = todo.pop()
            if register in self.part or register in also:
                found.add(register)
            else:
                todo += reads(self.makers[register])
        return found

    def _put(self, made: Iterable[Register], kind: PartKind, stage: int | None) -> None:
        self.part.update(dict.fromkeys(made, (kind, stage)))

    def _stage(self, instruction: Instruction, kind: PartKind) -> int:
        """
        Return the stage that does an instruction of the loop: of those on its rank the nearest to what it reads, or the
        first one to run. What is sent is of the stage that receives it.
        """
        crossed = self._boundary(instruction)
        if crossed is not None:
            return self._received_by(*crossed, makes(instruction)[0])
        rank = self._rank(makes(instruction)[0])
        stages = self.schedule.stages_of(rank) if rank is not None else []
        parts = [self.part[r] for r in self._behind(instruction)]
        before = [s for k, s in parts if s is not None and (k == "F") == (kind == "F")]
        if not before:
            return stages[0 if kind == "F" else -1]
        if kind == "F":
            found = next((s for s in stages if s >= max(before)), None)
        else:
            found = next((s for s in reversed(stages) if s <= min(before)), None)
        if found is None:
            last, where = (max if kind == "F" else min)(before), "all ranks" if rank is None else f"rank {rank}"
            raise UnityError(
                f"{self.where}: {where} of the pipeline reads what stage {last} makes, and has no stage "
                f"{'after' if kind == 'F' else 'before'} it; send values to stages that read them (pcg.send)"
            )
        return found

    def _received_by(self, source: int, target: int, received: Register) -> int:
        """Return the stage that receives a register. Raises `UnityError` if the schedule has it on another rank."""
        known = self.schedule.rank_of
        if max(source, target) >= len(known):
            raise UnityError(
                f"{self.where}: stage {source} sends to stage {target}; {self.schedule.name} has {len(known)} stages"
            )
        if self._rank(received) != known[target]:
            raise UnityError(
                f"{self.where}: stage {target} is on rank {self._rank(received)} of the pipeline, in "
                f"{self.schedule.name} on rank {known[target]}"
            )
        return target

    def _split(self) -> None:
        """
        Divide backwards in halves: what the gradient of a stage's input is made of, and what other stages read, is I,
        the rest W.
        """
        wanted: set[Register] = set()
        for instruction in reversed(self.program.body):
            made = makes(instruction)
            if not made or self.part.get(made[0], ("", None))[0] != "B":
                continue
            _, stage = self.part[made[0]]
            is_boundary = self._boundary(instruction) is not None
            is_input = is_boundary or not wanted.isdisjoint(made)
            self._put(made, "I" if is_input else "W", stage)
            wanted.update(r for r in self._behind(instruction) if is_input or self.part[r][1] != stage)

    def _start_early(self, bucket: int) -> None:
        """Put sums of gradients over the devices of a stage in the part that makes the last addend."""
        readers = Counter(r for instruction in self.program.body for r in reads(instruction))
        for instruction in self.program.body:
            if not isinstance(instruction, ReshardMove) or instruction.kind not in SYNCS:
                continue
            if self.part.get(instruction.result) != ("after", None) or min(instruction.axes) < self.leading:
                continue
            moved = instruction.operand, instruction.result
            (of, *more) = self._behind(instruction)
            is_total = isinstance(self.makers[of], TimeStep) and self.part[of][1] is not None
            is_alone = not more and readers[of] == readers[instruction.operand] == 1
            if is_total and is_alone and max(self.program.bytes[r] for r in moved) >= bucket:
                self.part[instruction.result] = self.part[of]
                self.started[of] = instruction.result

    # -- their programs

    def parts(self) -> StepParts:
        bodies, sends = self._bodies()
        grads = [i.grad for i in self.program.body if isinstance(i, UpdateWeight)]
        final = (*self.program.returned, *grads)
        ends = {key: (*(s.held for s in sends.get(key, ())), *(final if key[0] == "after" else ())) for key in bodies}
        whole = {key: self._with_shared(body, ends[key]) for key, body in bodies.items()}
        given = {key: _given(body, ends[key]) for key, body in whole.items()}
        read_in: dict[Register, list[Key]] = {}
        for key, needs in given.items():
            for register in needs:
                read_in.setdefault(register, []).append(key)
        keys, last = self._keys(read_in), self._last_readers(read_in)
        made: list[StepPart] = []
        for key, body in whole.items():
            leaves = [Leaf(self._handed(key, r, last), r, keys[r]) for r in given[key]]
            own = {r for i in bodies[key] for r in makes(i)}
            handed = () if key[0] == "after" else (r for r in keys if r in own and r not in self.started)
            outputs = (*handed, *ends[key])
            used = {r for i in (*leaves, *body) for r in (*reads(i), *makes(i))}
            program = replace(
                self.program,
                tensors={r: t for r, t in self.program.tensors.items() if r in used},
                body=(*leaves, *body),
                outputs=tuple(dict.fromkeys(outputs)),
                optimizer=None,
                part_of=self.program,
                started=frozenset(r for r in self.started.values() if r in own),
            )
            made.append(StepPart(*key, program, tuple(sends.get(key, ())), self._place_of(key[1])))
        return StepParts(self.schedule, tuple(sorted(made, key=_place)), keys, self.mesh)

    def _bodies(self) -> tuple[dict[Key, list[Instruction]], dict[Key, list[Sent]]]:
        """Return the instructions that one part alone does, by part, and what each part sends to another rank."""
        bodies: dict[Key, list[Instruction]] = {("before", None): []}
        sends: dict[Key, list[Sent]] = {}
        for instruction in self.program.body:
            made = makes(instruction)
            if not made or made[0] not in self.part:
                continue
            stages = self._boundary(instruction)
            self._check_once(instruction)
            if stages is None or not isinstance(instruction, ReshardMove) or not instruction.axes:
                bodies.setdefault(self.part[made[0]], []).append(instruction)
                continue
            sender = self.part[instruction.result][0], stages[0]
            sends.setdefault(sender, []).append(Sent(instruction.operand, instruction.result))
            self.received.add(instruction.result)
            bodies.setdefault(sender, [])
        bodies.setdefault(("after", None), [])
        return bodies, sends

    def _check_once(self, instruction: Instruction) -> None:
        """
        Check, where steps overlap, that what stages do once per step keeps none of them waiting for the end of a step:
        later stages receive before it, and earlier ones after it.
        """
        if not self.schedule.gradient_delay or not isinstance(instruction, ReshardMove):
            return
        kind, stage = self.part[instruction.result]
        if stage is None and min(instruction.axes, default=self.leading) < self.leading:
            stages = instruction.stages
            if stages is None or (stages[0] < stages[1]) != (kind == "before"):
                raise UnityError(
                    f"{self.where}: once per step {instruction.kind} goes over all stages, for which "
                    f"{self.schedule.name} would have to drain; use a synchronous schedule"
                )

    def _handed(self, key: Key, register: Register, last: Mapping[Register, Key]) -> str:
        """Return how a part gets a register that another one makes: what `Leaf.op` says of it."""
        home = None if register in self.received else self.part[register][0]
        if home == "before":
            return "once"
        if key[0] == "after" and home is not None:
            return "started" if register in self.started.values() else "sum"
        return "last" if last.get(register) == key else "kept"

    def _place_of(self, stage: int | None) -> Pins:
        """Return the coordinates of the ranks of a stage."""
        if stage is None:
            return ()
        return tuple(enumerate(self.mesh.coordinates(self.schedule.rank_of[stage])))

    def _with_shared(self, body: Sequence[Instruction], ends: Iterable[Register]) -> list[Instruction]:
        """Return a part's instructions with those that it does by itself, as others do, for what it reads."""
        found = {id(i): i for i in body}
        todo = [*(r for i in body for r in reads(i)), *ends]
        while todo:
            maker = self.makers[todo.pop()]
            if id(maker) not in found and self._is_everywhere(maker):
                found[id(maker)] = maker
                todo += reads(maker)
        return sorted(found.values(), key=lambda i: self.order[id(i)])

    def _keys(self, read_in: Mapping[Register, object]) -> dict[Register, str]:
        """Return a name for each register that one part makes and others read, or receive; sums always have one."""
        steps = [i for i in self.program.body if isinstance(i, TimeStep) and not i.is_of_pieces]
        sums = [i.result for i in steps if i.kind == "accumulate" and i.result in self.part]
        joined = [i.result for i in steps if i.kind == "batch"]
        found: dict[Register, str] = {}
        names = register_names(self.program)
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
        """
        Return, for what is kept of a micro-batch, the part that is the last to read it in its rank's order; none where
        that is another one in some micro-batches.
        """
        order: list[dict[Key, tuple[int, int]]] = [{} for _ in range(self.program.micro_batches)]
        for actions in self.schedule.ranks:
            for n, action in enumerate(actions):
                stage, kind, k = action
                if kind in COMPUTE and k is not None:
                    # What is done of the next step's micro-batches was done of this step's in the step before.
                    before = len(actions) if self.schedule.ahead(action) else 0
                    halves = kind == "B" and self.schedule.splits_backward
                    for i, part in enumerate("IW" if halves else (kind,)):
                        order[k % len(order)][cast("PartKind", part), stage] = n - before, i
        found: dict[Register, Key] = {}
        for register, parts in read_in.items():
            if all(key in places for places in order for key in parts):
                last = {max(parts, key=places.__getitem__) for places in order}
                found |= {register: last.pop()} if len(last) == 1 else {}
        return found


def _is_retype(instruction: Instruction) -> bool:
    """Return whether an instruction changes only the name of a layout, within a stage."""
    return isinstance(instruction, ReshardMove) and instruction.kind == "retype" and instruction.stages is None


def _given(body: Sequence[Instruction], ends: Iterable[Register]) -> list[Register]:
    """Return the registers that a part reads, or hands on (`ends`), and other parts make."""
    own = {r for i in body for r in makes(i)}
    found = dict.fromkeys((*(r for i in body for r in reads(i)), *ends))
    return [r for r in found if r not in own]


def _place(part: StepPart) -> tuple[int, int]:
    """Return where a part is among the functions of a program: as they run in the first micro-batch."""
    order: tuple[PartKind, ...] = ("before", "F", "B", "I", "W", "after")
    is_backward = part.kind in ("B", "I", "W")
    group = 0 if part.kind == "before" else 1 if part.kind == "F" else 2 if is_backward else 3
    stage = part.stage or 0
    return group, (-stage if is_backward else stage) * len(order) + order.index(part.kind)
