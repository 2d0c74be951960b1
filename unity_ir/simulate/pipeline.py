"""
Simulate a pipeline schedule: when each rank computes what, given the seconds of each stage.

A rank does its actions in order, each once its rank is free and what it reads has arrived. A send begins when what it
sends is made; computation goes on meanwhile. Between two ranks, in each direction, one send is under way at a time.
Updates come at the end of each step, on a rank behind its last backward. This is the longest path through the order of
ranks and the needs of actions, found by running each rank until it waits. Given seconds as fractions, times are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import Kind
from unity_ir.plan.pipeline.schedule import PipelineSchedule

Seconds = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """
    Seconds of one micro-batch at each stage: forward, whole backward, and its halves, which only a schedule that splits
    backwards needs. Each field has one entry per stage; an empty tuple stands for 0 everywhere.

    `send[s]` is for a value from stage s to s + 1 if they are on different ranks, and `send_back[s]` for a gradient
    from s + 1 to s (empty: as `send`). `before[s]` comes before the first forward and `update[s]` after the last
    backward, once per step.
    """

    forward: Seconds
    backward: Seconds
    input_gradient: Seconds = ()
    weight_gradient: Seconds = ()
    send: Seconds = ()
    update: Seconds = ()
    before: Seconds = ()
    send_back: Seconds = ()


def split_seconds(
    forward: Sequence[float],
    input_gradient: Sequence[float],
    weight_gradient: Sequence[float],
    send: Sequence[float] = (),
    update: Sequence[float] = (),
) -> StageSeconds:
    """
    Return the `StageSeconds` for backwards in halves, given the seconds of both halves; the whole backward takes their
    sum. Each argument has an entry per stage, `send` one per pair of neighbouring stages.
    """
    backward = tuple(i + w for i, w in zip(input_gradient, weight_gradient, strict=True))
    return StageSeconds(
        tuple(forward), backward, tuple(input_gradient), tuple(weight_gradient), tuple(send), tuple(update)
    )


def sends_waited_for(seconds: StageSeconds, rank_of: Sequence[int]) -> StageSeconds:
    """
    Return the seconds of stages whose ranks wait until what they send has arrived. Each send is added to the forward or
    backward before it (to the input gradient, if the backward is in halves), and `send` and `send_back` are empty.

    `rank_of[s]` is the rank of stage s; a send within a rank takes no time.
    """
    links = [rank_of[s] != rank_of[s + 1] for s in range(len(rank_of) - 1)]
    ahead = [s * at for s, at in zip(seconds.send or (0,) * len(links), links, strict=True)]
    back = [s * at for s, at in zip(seconds.send_back or seconds.send or (0,) * len(links), links, strict=True)]

    def add(of: Seconds, sends: list[float]) -> Seconds:
        return tuple(each + send for each, send in zip(of, sends, strict=True)) if of else of

    return replace(
        seconds,
        forward=add(seconds.forward, [*ahead, 0.0]),
        backward=add(seconds.backward, [0.0, *back]),
        input_gradient=add(seconds.input_gradient, [0.0, *back]),
        send=(),
        send_back=(),
    )


@dataclass(frozen=True)
class PipelineTimes:
    """
    When each rank does what, in seconds: the i-th computation of rank r (`schedule.computation().ranks[r][i]`) is from
    `starts[r][i]` to `ends[r][i]`. `work` are the seconds for which each rank computes and updates.
    """

    schedule: PipelineSchedule
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    work: Seconds
    makespan: float
    """Seconds from the start to the end of the last update."""
    period: float
    """
    Seconds of a step: of one step, the makespan; of several that overlap, those from the end of one, updates included,
    to that of the next, taken at the last step but one, behind which another follows; of two, half of the makespan.
    """

    def ends_of_steps(self, rank: int) -> list[float]:
        """Return the seconds at which a rank ends the last backward of each training step of the schedule."""
        actions = self.schedule.computation().ranks[rank]
        if self.schedule.steps == 1:
            return self.ends[rank][-1:]
        each = self.schedule.micro_batches // self.schedule.steps
        last = range(each - 1, self.schedule.micro_batches, each)
        ends = zip(actions, self.ends[rank], strict=True)
        return [end for action, end in ends if action.kind == "B" and action.micro_batch in last]

    @property
    def bubble(self) -> float:
        """Seconds by which a step (`period`) is longer than the work of the busiest rank in it."""
        return self.period - max(self.work) / self.schedule.steps

    @property
    def idle_inside(self) -> float:
        """The most seconds that any rank waits between its first and its last computation."""
        pairs = zip(self.starts, self.ends, strict=True)
        return max(
            e[-1] - s[0] - sum(end - start for start, end in zip(s, e, strict=True)) for s, e in pairs if s and e
        )


def simulate_pipeline(
    schedule: PipelineSchedule,
    seconds: StageSeconds,
    is_clipped: bool = False,
    longer: Sequence[Mapping[int, float]] = (),
) -> PipelineTimes:
    """
    Simulate a pipeline schedule: return when each rank does what, given the `seconds` of each stage. The schedule must
    pass `plan.pipeline.total_order.check`. It need not list sends and receives; those that it lists are ignored. Each
    value that another rank reads is sent as soon as it is made and the link is free.

    `longer[r]` maps the index of a computation of rank r to the seconds that it takes in addition. With `is_clipped`,
    updates need the norm of the whole gradient, and begin only when all ranks have ended their backwards. Raises
    `UnityError` if `seconds` are for another number of stages, and if ranks wait for each other for ever.
    """
    check_seconds(schedule, seconds)
    computed = schedule.computation()
    stages, m = schedule.stages, schedule.micro_batches
    rank_of = schedule.rank_of
    send = seconds.send or (0,) * (stages - 1)
    send_back = seconds.send_back or send
    before: list[float] = [0] * len(computed.ranks)
    for stage, extra in enumerate(seconds.before):
        before[rank_of[stage]] += extra
    takes: dict[Kind, Seconds] = {
        "F": seconds.forward,
        "B": seconds.backward,
        "I": seconds.input_gradient,
        "W": seconds.weight_gradient,
    }
    # When the input of a forward and of a backward has arrived, at stage * m + micro-batch; -1 while it has not.
    forward_at: list[float] = [*(0,) * m, *(-1,) * ((stages - 1) * m)]
    backward_at: list[float] = [*(-1,) * ((stages - 1) * m), *(0,) * m]
    link_free: dict[tuple[int, int], float] = {}
    starts: tuple[list[float], ...] = tuple([] for _ in computed.ranks)
    ends: tuple[list[float], ...] = tuple([] for _ in computed.ranks)
    pauses = _between_steps(computed, before, seconds)
    waits = [True] * len(computed.ranks)
    runnable = list(range(len(computed.ranks)))
    while runnable:
        rank = runnable.pop()
        waits[rank] = False
        actions, mine, until, pause = computed.ranks[rank], starts[rank], ends[rank], pauses[rank]
        extra = longer[rank] if longer else None
        now = until[-1] if until else before[rank]
        for i in range(len(mine), len(actions)):
            stage, kind, k = actions[i]
            now += pause.get(i, 0) if pause else 0
            at = stage * m + (k or 0)
            arrived = forward_at[at] if kind == "F" else backward_at[at] if kind != "W" else now
            if arrived < 0:
                waits[rank] = True
                break
            start = arrived if arrived > now else now
            now = start + takes[kind][stage] + (extra.get(i, 0) if extra else 0)
            mine.append(start)
            until.append(now)
            if kind == "F" and stage < stages - 1:
                to, arrivals, at, sending = stage + 1, forward_at, at + m, send[stage]
            elif kind in ("B", "I") and stage > 0:
                to, arrivals, at, sending = stage - 1, backward_at, at - m, send_back[stage - 1]
            else:
                continue
            reader = rank_of[to]
            if reader == rank:
                arrivals[at] = now
            else:
                begin = max(now, link_free.get((rank, reader), 0))
                arrivals[at] = link_free[rank, reader] = begin + sending
                if waits[reader]:
                    waits[reader] = False
                    runnable.append(reader)
    for rank, actions in enumerate(computed.ranks):
        if len(ends[rank]) < len(actions):
            stuck = actions[len(ends[rank])]
            raise UnityError(f"pipeline schedule {schedule.name}, rank {rank}: {stuck} waits for ever; check its order")
    return _times(schedule, seconds, starts, ends, is_clipped)


def _between_steps(
    computed: PipelineSchedule, before: Sequence[float], seconds: StageSeconds
) -> list[dict[int, float]]:
    """
    Return, for each rank, by the number of an action what it does before it between steps: updates behind the last
    backward of a step, and what comes once before the first forward of one.
    """
    found: list[dict[int, float]] = []
    update = _updates(computed, seconds)
    for rank, actions in enumerate(computed.ranks):
        pauses: dict[int, float] = {}
        for step in range(1, computed.steps):
            first = step * (computed.micro_batches // computed.steps)
            for kind, k, place, extra in (("F", first, 0, before[rank]), ("B", first - 1, 1, update[rank])):
                n = place + next(i for i, a in enumerate(actions) if a.kind == kind and a.micro_batch == k)
                pauses[n] = pauses.get(n, 0) + extra
        found.append(pauses)
    return found


def _updates(schedule: PipelineSchedule, seconds: StageSeconds) -> list[float]:
    """Return the seconds of each rank's updates of a step."""
    update = seconds.update or (0,) * schedule.stages
    return [sum(update[s] for s in schedule.stages_of(rank)) for rank in range(len(schedule.ranks))]


def _times(
    schedule: PipelineSchedule,
    seconds: StageSeconds,
    starts: tuple[list[float], ...],
    ends: tuple[list[float], ...],
    is_clipped: bool,
) -> PipelineTimes:
    """Return the times of a schedule whose actions are from `starts` to `ends`, with the updates at its end."""
    updates = _updates(schedule, seconds)
    ended = [until[-1] if until else 0 for until in ends]
    if is_clipped:
        ended = [max(ended)] * len(ended)
    before = seconds.before or (0,) * schedule.stages
    first = [sum(before[s] for s in schedule.stages_of(rank)) for rank in range(len(ends))]
    rows = zip(starts, ends, updates, first, strict=True)
    steps = schedule.steps
    work = tuple(sum(until) - sum(mine) + steps * (extra + once) for mine, until, extra, once in rows)
    makespan = max(end + extra for end, extra in zip(ended, updates, strict=True))
    times = PipelineTimes(schedule, starts, ends, work, makespan, makespan / steps if steps > 1 else makespan)
    if steps < 3:
        return times
    found = [times.ends_of_steps(rank) for rank in range(len(ends))]
    before, end = (max(each[k] + u for each, u in zip(found, updates, strict=True)) for k in (-3, -2))
    return replace(times, period=end - before)


def check_seconds(schedule: PipelineSchedule, seconds: StageSeconds) -> None:
    """
    Raise `UnityError` unless each tuple of `seconds` has an entry per stage of the schedule (sends: per pair of
    neighbouring stages), all finite and at least 0. A tuple may be empty, except those of forwards and whole backwards
    and, if the schedule splits backwards, those of the halves.
    """
    where = f"pipeline schedule {schedule.name}"
    stages = schedule.stages
    for what, given, count in (
        ("forwards", seconds.forward, stages),
        ("backwards", seconds.backward, stages),
        ("input gradients", seconds.input_gradient, stages),
        ("weight gradients", seconds.weight_gradient, stages),
        ("sends", seconds.send, stages - 1),
        ("updates", seconds.update, stages),
        ("what comes before", seconds.before, stages),
        ("sends back", seconds.send_back, stages - 1),
    ):
        is_needed = what in ("forwards", "backwards") or ("gradients" in what and schedule.splits_backward)
        if len(given) != count and (given or is_needed):
            raise UnityError(
                f"{where}: it has {stages} stages, seconds of {what} are given for {len(given)}; give {count}"
            )
    if any(not 0 <= each < float("inf") for each in chain(*_all(seconds))):
        raise UnityError(f"{where}: seconds must be numbers of at least 0")


def _all(seconds: StageSeconds) -> tuple[Seconds, ...]:
    return (
        seconds.forward,
        seconds.backward,
        seconds.input_gradient,
        seconds.weight_gradient,
        seconds.send,
        seconds.update,
        seconds.before,
        seconds.send_back,
    )
