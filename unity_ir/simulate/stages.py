"""
Simulate a step whose operators are in stages: the plan of each of its parts is replayed by itself (`replay`), and the
pipeline's schedule with the seconds that they take (`pipeline`). A part is replayed as it runs for the first
micro-batch; for another one it takes longer by the additions of gradients to those before.

What starts sums of gradients over devices, for its last micro-batch, is replayed with them, too. They go on beside what
its rank still has to do, one after the other where they cross links of one level; moves of parts that follow are taken
not to be held up by them. What is left of them when the rank has done its last backward is replayed with `after`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from unity_ir.cost.kernels import kernel_seconds, seconds_of_update
from unity_ir.cost.plan import norm_seconds
from unity_ir.cost.stats import bytes_text, seconds_text
from unity_ir.machine.model import Machine
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Layout, Pins, pins_of
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.instructions import (
    Compute,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    TimeStep,
    UpdateWeight,
    makers_of,
    makes,
    reads,
)
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.pipeline.parts import StepPart
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.plan import Plan
from unity_ir.simulate.full import Timeline, simulate
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.pipeline import PipelineTimes, Seconds, StageSeconds, sends_waited_for, simulate_pipeline
from unity_ir.simulate.replay import StartedSum, leaf_bytes, replay
from unity_ir.simulate.streams import TICKS, Streams, ticks
from unity_ir.simulate.tasks import BACKWARD, FORWARD, SYNC, UPDATE, Label, TaskGraph, flat


@dataclass(frozen=True, slots=True)
class RunningSum:
    """
    A sum of a gradient over devices, while the rank computes: the register of its result, the machine levels it
    crosses, and when it begins and ends, in seconds. Time 0 is the start of the part that starts the sum; in
    `StagedStep.started` it is the end of the rank's last backward, so that seconds may be negative.
    """

    result: Register
    levels: tuple[int, ...]
    begin: float
    end: float


@dataclass(frozen=True)
class StagedStep:
    """
    A simulated step in stages: when each rank of the pipeline does what, how many seconds this takes, and how many
    bytes are held. For an asynchronous schedule, `times` cover several steps, and `seconds` is from the end of one step
    to the end of the next.
    """

    times: PipelineTimes
    stages: StageSeconds
    sums: Seconds
    """Seconds that each rank takes, after its last backward, for sums of gradients over devices."""
    updates: Seconds
    """Seconds that each rank takes for its updates."""
    norm: float
    """Seconds of the sum over all devices of the squares of gradients, which all updates wait for; 0 without."""
    peaks: tuple[int, ...]
    """The most bytes that a device of each rank holds at once."""
    streams: Streams
    always: tuple[int, ...]
    """The bytes that a device of each rank holds throughout: weights, optimizer state, inputs, sums of gradients."""
    inside: Mapping[str, int]
    """The most bytes that each action, such as `2F`, holds beside those: of what it makes and receives."""
    kept: Mapping[str, int]
    """By how many bytes each action, such as `2F`, changes what its rank keeps of micro-batches."""
    started: tuple[tuple[RunningSum, ...], ...]
    """Of each rank, the sums of gradients that start before its last backward of a step has ended; from then, in s."""

    @cached_property
    def seconds(self) -> float:
        """
        The seconds of the whole step, updates included. For an asynchronous schedule, which does not drain between
        steps, those from the end of one step to the end of the next.
        """
        if self.is_asynchronous:
            return self.times.period
        ends = [each[-1] + after for each, after in zip(self.times.ends, self.sums, strict=True)]
        if self.norm:
            return max(ends) + self.norm + max(self.updates)
        return max(end + update for end, update in zip(ends, self.updates, strict=True))

    @property
    def bubble(self) -> float:
        """
        Seconds by which the step is longer than the work of the busiest rank, whose sums of gradients and updates count
        as work.
        """
        if self.is_asynchronous:
            return self.times.bubble
        extra = zip(self.times.work, self.sums, self.updates, strict=True)
        return self.seconds - max(map(sum, extra)) - self.norm

    @property
    def is_asynchronous(self) -> bool:
        """Whether the pipeline schedule is asynchronous: updates use gradients of older weights."""
        return self.times.schedule.gradient_delay > 0

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that `--stats` prints about the pipeline: one or two on its schedule, then one for each stage."""
        schedule, stages = self.times.schedule, self.stages
        ranks, per_rank = len(schedule.ranks), schedule.stages // len(schedule.ranks)
        more = f", {per_rank} stages on each" if per_rank > 1 else ""
        idle = f"bubble {seconds_text(self.bubble)}, {self.bubble / self.seconds:.1%} of the step"
        found = [
            f"{schedule.stages} stages on {ranks} parts of the machine{more}; {schedule.name}, "
            f"{schedule.micro_batches // schedule.steps} micro-batches; {idle}"
        ]
        if self.is_asynchronous:
            found.append(
                f"asynchronous: {schedule.computes}, g(w) the gradient at w; two versions of the weights are held; "
                "seconds are those from step to step, without fill and drain"
            )
        live = peak_live(schedule, [1] * schedule.stages)
        for s, (forward, backward) in enumerate(zip(stages.forward, stages.backward, strict=True)):
            rank = schedule.rank_of[s]
            found.append(
                f"stage {s}: forward {seconds_text(forward)}, backward {seconds_text(backward)} of a micro-batch; "
                f"at most {live[rank]:g} live; {bytes_text(self.peaks[rank])}"
            )
        return tuple(found)

    def timeline(self) -> Timeline:
        """
        Return when each rank does what, for pictures and traces: a device class stands for each rank of the pipeline.
        Tasks are the actions of the schedule, sums of gradients, and updates; their dependencies are left out. Memory
        is that of one device of each rank.
        """
        times = self.times
        ticks_of: list[int] = []
        ends: list[int] = []
        held: list[tuple[int, ...]] = []
        labels: list[Label] = []
        buffers: list[tuple[int, list[int]]] = []

        def add(rank: int, kind: int, word: str, begin: float, end: float, levels: Sequence[int] = ()) -> int:
            # A class of devices for each rank.
            ports = tuple(self.streams.port(rank, level) for level in levels)
            held.append(ports or (self.streams.compute(rank),))
            labels.append(Label(kind, word, "", ""))
            ticks_of.append(ticks(end) - ticks(begin))
            ends.append(ticks(end))
            return len(ends) - 1

        for rank, actions in enumerate(times.schedule.computation().ranks):
            kept: dict[tuple[int, int | None], list[int]] = {}
            for action, begin, end in zip(actions, times.starts[rank], times.ends[rank], strict=True):
                part = f"{action.stage}{action.kind}"
                task = add(rank, FORWARD if action.kind == "F" else BACKWARD, str(action), begin, end)
                kept.setdefault((action.stage, action.micro_batch), []).append(task)
                buffers.append((self.inside.get(part, 0), [task]))
            buffers += [(self.kept.get(f"{stage}F", 0), tasks) for (stage, _), tasks in kept.items()]
            for last in times.ends_of_steps(rank):
                for each in self.started[rank]:
                    add(rank, SYNC, "sum of a gradient", last + each.begin, last + each.end, each.levels)
                summed = last + self.sums[rank]
                end = summed + self.updates[rank] if self.is_asynchronous else self.seconds
                add(rank, SYNC, "sums of gradients", last, summed)
                add(rank, UPDATE, "update", end - self.updates[rank], end)
        tasks = TaskGraph(
            self.streams,
            np.array(ticks_of, dtype=np.int64),
            flat([] for _ in ticks_of),
            flat(held),
            tuple(labels),
            np.array([size for size, _ in buffers], dtype=np.int64),
            flat(uses for _, uses in buffers),
            self.always,
        )
        return Timeline(tasks, np.array(ends, dtype=np.int64))


def simulate_stages(plan: Plan, machine: Machine, overlap: bool = True) -> StagedStep:
    """
    Simulate a plan in stages (`Plan.pipeline` is not None) on a machine. Without `overlap`, collectives inside a stage
    are waited for at once, and a stage waits until its sends have arrived.
    """
    return _Stages(plan, machine, overlap).step()


class _Stages:
    def __init__(self, plan: Plan, machine: Machine, overlap: bool):
        assert plan.pipeline is not None
        self.program = plan.program
        self.machine = machine
        self.parts = plan.pipeline
        self.schedule = plan.pipeline.schedule
        self.ranks = range(len(self.schedule.ranks))
        self.timelines: dict[str, Timeline] = {}
        """How parts run for the first micro-batch."""
        self.additions: dict[str, float] = {}
        """Seconds that a part takes more for another one, to add its gradients to those before."""
        self.lasts: dict[str, _LastRun] = {}
        """How parts that start sums run for their last micro-batch."""
        for part, own in plan.parts:
            if part.kind != "after":
                self.additions[part.name] = _additions(own, machine)
                self.timelines[part.name] = simulate(replay(own, machine, overlap, is_last=part.stage is None))
            if own.program.started:
                self.lasts[part.name] = _last_run(own, simulate(replay(own, machine)))
        self.after = next(own for part, own in plan.parts if part.kind == "after")
        self.overlap = overlap
        self._most: dict[tuple[str, int, bool], int] = {}
        """What `_inside` has found."""
        self._changes: dict[str, int] = {}
        """What `_change` has found, in bytes by part: it is the same for every micro-batch."""
        self._known_runs: dict[int, list[tuple[_Run, ...]]] = {}
        """What `_runs` has found of the plan's own schedule, by rank."""

    def step(self) -> StagedStep:
        optimizer = self.program.optimizer or Optimizer()
        norm = norm_seconds(optimizer, self.machine) if optimizer.clip and self.program.devices > 1 else 0.0
        updates = tuple(self._updates(rank, optimizer) for rank in self.ranks)
        stages, order = self._stage_seconds(), self.schedule
        if order.gradient_delay:
            # Of a rank that does the actions of a step without a break.
            started = tuple(self._started(rank) for rank in self.ranks)
            sums = self._sums_after(started)
            order = pipeline_schedule(order.name, len(order.ranks), order.micro_batches)
            once = [sums[rank] + updates[rank] for rank in order.rank_of]
            stages = replace(stages, update=tuple(once))
            times = simulate_pipeline(order, stages, longer=self._longer(order))
        else:
            times = simulate_pipeline(order, stages, longer=self._longer(order))
            started = tuple(self._started(rank, times.starts[rank]) for rank in self.ranks)
            sums = self._sums_after(started)
        always = tuple(self._always(rank, optimizer) for rank in self.ranks)
        peaks = tuple(self._peak(rank, optimizer) for rank in self.ranks)
        inside: dict[str, int] = {}
        kept: dict[str, int] = {}
        for rank, actions in enumerate(self.schedule.computation().ranks):
            kinds = dict.fromkeys((action.stage, action.kind) for action in actions)
            for word, parts in {f"{stage}{kind}": self.parts.run_by(stage, kind) for stage, kind in kinds}.items():
                inside[word] = max((self._inside(p.name, rank) + self._received(p) for p in parts), default=0)
                kept[word] = sum(map(self._change, parts))
        streams = Streams(self.machine, tuple(range(len(self.parts.mesh.sizes))))
        return StagedStep(times, stages, sums, updates, norm, peaks, streams, always, inside, kept, started)

    # -- seconds

    def _stage_seconds(self) -> StageSeconds:
        stages = range(self.schedule.stages)
        forward, whole, inputs, weights = (
            tuple(self._seconds(f"{s}{kind}") for s in stages) for kind in ("F", "B", "I", "W")
        )
        if self.schedule.splits_backward:
            whole = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        first = {rank: self.schedule.stages_of(rank)[0] for rank in self.ranks}
        before = tuple(self._end("before", rank) for rank in self.ranks)
        by_stage = [before[self.schedule.rank_of[s]] if first[self.schedule.rank_of[s]] == s else 0.0 for s in stages]
        seconds = StageSeconds(
            forward,
            whole,
            inputs if self.schedule.splits_backward else (),
            weights if self.schedule.splits_backward else (),
            tuple(self._send(s, "F") for s in stages[:-1]),
            before=tuple(by_stage),
            send_back=tuple(self._send(s + 1, "B") for s in stages[:-1]),
        )
        return seconds if self.overlap else sends_waited_for(seconds, self.schedule.rank_of)

    def _seconds(self, name: str) -> float:
        """Return the seconds of a part for any micro-batch but the first."""
        timeline = self.timelines.get(name)
        return 0.0 if timeline is None else timeline.seconds + self.additions[name]

    def _runs(self, order: PipelineSchedule, rank: int) -> list[tuple[_Run, ...]]:
        """
        Return, for each computation of a rank, the parts that it runs: one object for all that run the same alike.
        """
        if order is self.schedule and rank in self._known_runs:
            return self._known_runs[rank]
        parts: dict[tuple[int, str], list[tuple[str, StepPart]]] = {}
        done: Counter[str] = Counter()
        alike: dict[tuple[int, str, tuple[int, ...]], tuple[_Run, ...]] = {}
        found: list[tuple[_Run, ...]] = []
        count = self.program.micro_batches
        for stage, kind, _ in order.computation().ranks[rank]:
            if (stage, kind) not in parts:
                parts[stage, kind] = [(part.name, part) for part in self.parts.run_by(stage, kind)]
            at: list[int] = []
            for name, _ in parts[stage, kind]:
                done[name] += 1
                at.append(done[name] % count)
            key = stage, kind, tuple([k if k <= 1 else 2 for k in at])
            if key not in alike:
                runs = zip(parts[stage, kind], at, strict=True)
                alike[key] = tuple(_Run(part, k == 1 % count, k == 0) for (_, part), k in runs)
            found.append(alike[key])
        if order is self.schedule:
            self._known_runs[rank] = found
        return found

    def _run_seconds(self, run: _Run) -> float:
        name = run.part.name
        starts_sums = run.is_last and self.overlap and name in self.lasts
        alone = self.lasts[name].seconds if starts_sums else self.timelines[name].seconds
        return alone + (0.0 if run.is_first else self.additions[name])

    def _longer(self, order: PipelineSchedule) -> list[dict[int, float]]:
        """Return by how much computations of each rank take longer that also start sums; less those of the first."""
        found: list[dict[int, float]] = []
        for rank in self.ranks:
            every = self._runs(order, rank)
            extra = {
                id(runs): sum(self._run_seconds(run) - self._seconds(run.part.name) for run in runs)
                for runs in {id(runs): runs for runs in every}.values()
            }
            found.append({i: extra[id(runs)] for i, runs in enumerate(every) if extra[id(runs)]})
        return found

    def _started(self, rank: int, starts: Sequence[float] | None = None) -> tuple[RunningSum, ...]:
        """Return the sums that a rank starts, given when its computations do; None: one after the other."""
        free: dict[int, float] = {}
        found: list[RunningSum] = []
        now = 0.0
        known: dict[int, list[tuple[float, tuple[RunningSum, ...]]]] = {}
        for i, runs in enumerate(self._runs(self.schedule, rank)):
            now = now if starts is None else starts[i]
            if id(runs) not in known:
                sums = [
                    self.lasts[n].sums if run.is_last and (n := run.part.name) in self.lasts else () for run in runs
                ]
                known[id(runs)] = [(self._run_seconds(run), each) for run, each in zip(runs, sums, strict=True)]
            for seconds, sums in known[id(runs)]:
                for each in sums:
                    begin = max([now + each.begin, *(free.get(level, 0.0) for level in each.levels)])
                    end = begin + each.end - each.begin
                    free.update(dict.fromkeys(each.levels, end))
                    found.append(replace(each, begin=begin, end=end))
                now += seconds
        return tuple(replace(each, begin=each.begin - now, end=each.end - now) for each in found)

    def _starts(self, run: _Run) -> tuple[RunningSum, ...]:
        """Return the sums that a run of a part starts; () but for the last."""
        name = run.part.name
        return self.lasts[name].sums if run.is_last and name in self.lasts else ()

    def _sums_after(self, started: Sequence[Sequence[RunningSum]]) -> Seconds:
        """Return the seconds that each rank takes for sums after its last backward, given those that it has started."""
        left = [
            StartedSum(each.result, self._rest(each), each.levels, self._operand(each.result))
            for mine in started
            for each in mine
        ]
        self.timelines["after"] = simulate(replay(self.after, self.machine, self.overlap, under_way=left))
        return tuple(self._end("after", rank) for rank in self.ranks)

    @cached_property
    def _makers(self) -> Mapping[Register, Instruction]:
        """The instruction that makes each register of the step."""
        return makers_of(self.program.body)

    def _rest(self, each: RunningSum) -> float:
        """Return the seconds for which a sum goes on after its rank's last backward: all, if it is waited for."""
        return max(each.end - max(each.begin, 0.0), 0.0) if self.overlap else each.end - each.begin

    def _operand(self, started: Register) -> int:
        """Return the bytes of what a sum over devices reads, where it is not done in place."""
        move = self._makers[started]
        is_in_place = isinstance(move, ReshardMove) and move.kind == "all_reduce"
        return 0 if is_in_place else sum(self.program.bytes[r] for r in reads(move))

    def _send(self, stage: int, kind: str) -> float:
        """Return the seconds of the sends of a stage's forward, or of its backward."""
        names = (f"{stage}F",) if kind == "F" else (f"{stage}B", f"{stage}I")
        sent = {s.received for name in names if (part := self.parts.by_name.get(name)) for s in part.sends}
        moves = [i for i in self.program.body if isinstance(i, ReshardMove) and i.result in sent]
        tensors = self.program.tensors
        return sum(self.machine.move_time(move_of(self.program, m), tensors[m.result].dtype) for m in moves)

    def _end(self, name: str, rank: int) -> float:
        """Return the seconds after which a rank has done a part of all of them."""
        timeline = self.timelines[name]
        tasks = timeline.tasks
        if not len(tasks):
            return 0.0
        classes = tasks.held.flat // tasks.streams.width
        mine = np.isin(classes, self._classes(timeline, rank))
        return float(timeline.ends[tasks.held.owners[mine]].max(initial=0)) / TICKS

    def _classes(self, timeline: Timeline, rank: int) -> list[int]:
        """Return the device classes of a timeline that a rank has."""
        streams = timeline.tasks.streams
        place = self.parts.mesh.coordinates(rank)
        at = self._coordinates
        return sorted({streams.class_of(d) for d in range(self.program.devices) if at[d][: len(place)] == place})

    @cached_property
    def _coordinates(self) -> list[tuple[int, ...]]:
        """The coordinates of every device on the mesh of all of the machine."""
        mesh = self.machine.mesh
        return [mesh.coordinates(device) for device in range(self.program.devices)]

    def _is_on(self, register: Register, rank: int) -> bool:
        """Return whether some device of a rank holds a register."""
        return rank in self._ranks_with[self._pinned[register]]

    @cached_property
    def _pinned(self) -> Mapping[Register, Pins]:
        """Where each register is, on the axes of the pipeline."""
        axes = len(self.parts.mesh.sizes)
        of: dict[Layout, Pins] = {}
        found: dict[Register, Pins] = {}
        for register, tensor in self.program.tensors.items():
            if tensor.layout not in of:
                of[tensor.layout] = tuple(pin for pin in pins_of(tensor.layout) if pin[0] < axes)
            found[register] = of[tensor.layout]
        return found

    @cached_property
    def _ranks_with(self) -> Mapping[Pins, frozenset[int]]:
        """The ranks that are at all of these pins."""
        places = [self.parts.mesh.coordinates(rank) for rank in self.ranks]
        return {
            every: frozenset(rank for rank in self.ranks if all(places[rank][axis] == c for axis, c in every))
            for every in {*self._pinned.values()}
        }

    @cached_property
    def _all_updates(self) -> list[UpdateWeight]:
        return [i for i in self.program.body if isinstance(i, UpdateWeight)]

    @cached_property
    def _all_leaves(self) -> list[Leaf]:
        return [i for i in self.program.body if isinstance(i, Leaf)]

    def _updates(self, rank: int, optimizer: Optimizer) -> float:
        updates = [i for i in self._all_updates if self._is_on(i.weight, rank)]
        return sum(seconds_of_update(self.program, i, optimizer, self.machine.device) for i in updates)

    # -- memory

    def _peak(self, rank: int, optimizer: Optimizer) -> int:
        """Return the most bytes that a device of a rank holds at once."""
        actions = self.schedule.ranks[rank]
        ahead = [a for a in actions if a.kind == "F" and self.schedule.ahead(a)]
        # What a step begins of the next one was there when it began itself.
        live = most = begun = sum(self._change(part) for a in ahead for part in self.parts.run_by(a.stage, "F"))
        known: dict[int, list[tuple[int, int]]] = {}
        for runs in self._runs(self.schedule, rank):
            if id(runs) not in known:
                known[id(runs)] = [self._bytes_of_run(run, rank) for run in runs]
            for inside, change in known[id(runs)]:
                most = max(most, live + inside)
                live += change
        last = self._held(rank, optimizer) + begun + self._inside("after", rank)
        return max(self._always(rank, optimizer) + most, last)

    def _bytes_of_run(self, run: _Run, rank: int) -> tuple[int, int]:
        """
        Return (the most bytes that a run of a part adds to what its rank holds; by how many it changes that).
        """
        part, _, is_last = run
        last = self.lasts.get(part.name) if is_last else None
        inside = self._inside(part.name, rank, is_last) - (last.summed if last else 0)
        return inside + self._received(part), self._change(part) + (last.change if last else 0)

    @cached_property
    def _sums(self) -> set[Register]:
        """The registers in which micro-batches add up what they make."""
        steps = (i for i in self.program.body if isinstance(i, TimeStep) and not i.is_of_pieces)
        added = (i.result for i in steps if i.kind in ("accumulate", "batch"))
        return {r for r in added if self.program.when[r] == "every"}

    def _always(self, rank: int, optimizer: Optimizer) -> int:
        """Return the bytes that a device of a rank holds while micro-batches run."""
        added = sum(self.program.held_bytes(r) for r in self._sums if self._is_on(r, rank))
        return self._held(rank, optimizer) + added

    def _held(self, rank: int, optimizer: Optimizer) -> int:
        once = self._held_by("before", rank)
        if self.schedule.gradient_delay:
            is_ahead = any(a.kind == "F" and self.schedule.ahead(a) for a in self.schedule.ranks[rank])
            once += once * is_ahead + self._second(rank)
        return self._leaves(rank, optimizer) + once

    def _second(self, rank: int) -> int:
        """Return the bytes of a second version of a rank's weights and casts, and of the inputs of a second batch."""
        updated = {i.weight for i in self._all_updates}
        leaves = [i for i in self._all_leaves if self._is_on(i.result, rank)]
        twice = [i.result for i in leaves if i.op in ("input", "cast") or i.result in updated]
        return sum(leaf_bytes(self.program, r, 0) for r in twice)

    def _leaves(self, rank: int, optimizer: Optimizer) -> int:
        """Return the bytes of a rank's weights, with the optimizer's state of them, and inputs."""
        updated = {i.weight for i in self._all_updates}
        leaves = (i.result for i in self._all_leaves if self._is_on(i.result, rank))
        return sum(leaf_bytes(self.program, r, optimizer.states if r in updated else 0) for r in leaves)

    def _held_by(self, name: str, rank: int) -> int:
        """Return the bytes of what a part hands to others on a rank."""
        program = self.parts.by_name[name].program
        made = {r for i in program.body if not isinstance(i, Leaf) for r in makes(i)}
        return sum(program.bytes[r] for r in program.outputs if r in made and self._is_on(r, rank))

    def _inside(self, name: str, rank: int, is_last: bool = False) -> int:
        """Return the most bytes that a device of a rank holds at once of what a part makes itself."""
        key = name, rank, is_last and name in self.lasts
        if key not in self._most:
            timeline = self.lasts[name].timeline if key[2] else self.timelines[name]
            self._most[key] = max(held_over_time(timeline, k).peak for k in self._classes(timeline, rank))
        return self._most[key]

    def _received(self, part: StepPart) -> int:
        """Return the bytes that a part receives, and holds beside what its rank had."""
        return sum(self.program.bytes[r] for r in self._receives(part))

    def _receives(self, part: StepPart) -> tuple[Register, ...]:
        """Return the registers that a part receives: of a stage without an I, as the first one is, W does."""
        if part.stage is None or (part.kind == "W" and f"{part.stage}I" in self.parts.by_name):
            return ()
        return self.parts.received(part.stage, "F" if part.kind == "F" else "B")

    def _change(self, part: StepPart) -> int:
        """Return by how many bytes a part changes what its rank keeps of micro-batches."""
        if part.name not in self._changes:
            self._changes[part.name] = self._change_of(part)
        return self._changes[part.name]

    def _change_of(self, part: StepPart) -> int:
        size, received = self.program.bytes, self._receives(part)
        given = {i.result: i.op for i in _handed(part)}
        made = {r for i in part.program.body if not isinstance(i, Leaf) for r in makes(i)}
        kept = {r for r in self.parts.keys if r in made and r not in self._sums | part.program.started}
        kept |= {r for r in received if given.get(r) == "kept"}
        freed = {r for r, op in given.items() if op == "last" and r not in received}
        return sum(size[r] for r in kept) - sum(size[r] for r in freed)


class _Run(NamedTuple):
    """A part that is run for a micro-batch, and whether that is the first or the last one."""

    part: StepPart
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class _LastRun:
    """
    A part as it runs for its last micro-batch: its timeline, its seconds, and the sums over devices that go on from it.

    `summed` are the bytes that sums over micro-batches take, of which it makes those over devices; `change` is by how
    many more bytes are held of both at its end.
    """

    timeline: Timeline
    seconds: float
    sums: tuple[RunningSum, ...]
    summed: int
    change: int


def _additions(plan: Plan, machine: Machine) -> float:
    """
    Return the seconds that a part takes for a micro-batch beside the first to add to what those before have made, in
    kernels of their own or as a part of those of products.
    """
    program, device = plan.program, machine.device
    products = (i for i in program.body if isinstance(i, Compute) and not program.is_in_pieces(i))
    inside = sum(
        kernel_seconds(program, i, device, added) - kernel_seconds(program, i, device)
        for i in products
        if (added := plan.added_bytes(i))
    )
    every = (i for i in plan.program.body if isinstance(i, TimeStep) and i.kind == "accumulate" and not i.is_of_pieces)
    bytes = [plan.time_step_bytes(step) for step in every]
    return inside + sum(_copy_seconds(b[1], machine) - _copy_seconds(b[0], machine) for b in bytes if len(b) > 1)


def _copy_seconds(bytes: int, machine: Machine) -> float:
    return machine.memory_seconds(1, bytes) if bytes else 0.0


def _last_run(plan: Plan, timeline: Timeline) -> _LastRun:
    """Return the run of the plan of a part, which waits for all but the sums that it starts."""
    tasks, streams = timeline.tasks, timeline.tasks.streams
    waited = tasks.held.owners[tasks.held.flat % streams.width == 0]
    found: list[RunningSum] = []
    for result, numbers in tasks.unwaited.items():
        levels = sorted({stream % streams.width - 1 for n in numbers for stream in tasks.held[n]} - {-1})
        begin, end = (max(int(at[n]) for n in numbers) / TICKS for at in (timeline.starts, timeline.ends))
        found.append(RunningSum(result, tuple(levels), begin, end))
    seconds = float(timeline.ends[waited].max(initial=0)) / TICKS
    program, made = plan.program, plan.program.started - plan.in_place
    of = {i.result: plan.schedule.held(i.operand) for i in program.body if isinstance(i, ReshardMove)}
    freed = sum(program.held_bytes(of[r]) for r in made if r not in tasks.unwaited)
    summed = sum(program.held_bytes(of[r]) for r in made)
    change = sum(program.bytes[r] for r in made) - freed
    return _LastRun(timeline, seconds, tuple(sorted(found, key=lambda each: each.begin)), summed, change)


def _handed(part: StepPart) -> list[Leaf]:
    """Return the leaves of a part that other parts of the micro-batch have made."""
    return [i for i in part.program.body if isinstance(i, Leaf) and i.op in ("kept", "last")]
