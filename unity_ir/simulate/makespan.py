"""
Simulate one pipeline schedule for the seconds of many stages: the makespan alone, in arrays.

The longest path of `simulate.pipeline` has the same edges whatever actions take. They are sorted by level once: an
action's is one more than that of what it waits for, so all of a level are computed together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.simulate.pipeline import StageSeconds

KINDS = "FBIW"

MOST = 1 << 22
"""Seconds of actions in an array at most, of all cases that are computed at once: 32 MiB."""


class LevelledSchedule:
    """
    A pipeline schedule of one step, prepared so that its makespan can be computed quickly for many `StageSeconds`. The
    schedule must pass `plan.pipeline.total_order.check`. Raises `UnityError` if ranks wait for each other for ever.

    Actions are numbered by level. Number `count` stands for what is there from the start, and the numbers after it for
    the start of each rank.
    """

    def __init__(self, schedule: PipelineSchedule):
        self.schedule = schedule
        computed, stages, m = schedule.computation().ranks, schedule.stages, schedule.micro_batches
        self.count = count = sum(map(len, computed))
        self.ranks = len(computed)
        rank_of = schedule.rank_of
        # Of each action, rank by rank: its level, what it waits for (before it, read, sent before), what it takes.
        level, before, read, link = ([0] * count for _ in range(4))
        kind_stage, sent = [0] * count, [0] * count
        first = [0, *accumulate(map(len, computed))]
        # Number of the action that makes the input of a forward, of a backward; -1 while it is not known.
        forward_of = [*(count,) * m, *(-1,) * ((stages - 1) * m)]
        backward_of = [*(-1,) * ((stages - 1) * m), *(count,) * m]
        last_on: dict[tuple[int, int], int] = {}
        at = [0] * self.ranks
        waits = [True] * self.ranks
        runnable = list(range(self.ranks))
        while runnable:
            rank = runnable.pop()
            waits[rank] = False
            actions = computed[rank]
            for i in range(at[rank], len(actions)):
                stage, kind, k = actions[i]
                place = stage * m + (k or 0)
                source = forward_of[place] if kind == "F" else backward_of[place] if kind != "W" else count
                if source < 0:
                    waits[rank] = True
                    break
                number = first[rank] + i
                at[rank] = i + 1
                before[number] = number - 1 if i else count + 1 + rank
                read[number] = source
                own = level[number - 1] + 1 if i else 0
                level[number] = own if source == count else max(own, level[source] + 1)
                kind_stage[number] = KINDS.index(kind) * stages + stage
                link[number] = count
                if kind == "F" and stage < stages - 1:
                    to, makers, place, send = stage + 1, forward_of, place + m, 1 + stage
                elif kind in ("B", "I") and stage > 0:
                    to, makers, place, send = stage - 1, backward_of, place - m, stages + stage - 1
                else:
                    continue
                makers[place] = number
                reader = rank_of[to]
                if reader != rank:
                    sent[number] = send
                    link[number] = last_on.get((rank, reader), count)
                    last_on[rank, reader] = number
                    if waits[reader]:
                        waits[reader] = False
                        runnable.append(reader)
        if any(at[rank] < len(actions) for rank, actions in enumerate(computed)):
            raise UnityError(f"pipeline schedule {schedule.name}: a rank waits for ever; check its order")
        levels = np.array(level, dtype=np.intp)
        order = np.argsort(levels, kind="stable")
        number_of = np.arange(count + 1 + self.ranks, dtype=np.intp)
        number_of[order] = np.arange(count)
        self.before, self.read, self.link = (number_of[np.array(of)[order]] for of in (before, read, link))
        self.kind_stage, self.sent = np.array(kind_stage)[order], np.array(sent)[order]
        sizes = Counter(level)
        self.levels = list(pairwise([0, *accumulate(sizes[each] for each in range(len(sizes)))]))
        self.last = [int(number_of[first[r + 1] - 1]) if actions else count for r, actions in enumerate(computed)]

    def makespan(self, seconds: StageSeconds, is_clipped: bool = False) -> float:
        """
        Return the seconds from the start to the end of the last update, given the seconds of each stage; it equals
        `simulate_pipeline(..).makespan`, but `seconds` are not checked. With `is_clipped`, updates begin only when all
        ranks have ended their backwards.
        """
        return self.makespans([seconds], is_clipped)[0]

    def makespans(self, cases: Sequence[StageSeconds], is_clipped: bool = False) -> list[float]:
        """
        Return the makespan, in seconds, for each of `cases`, as `makespan` does for one; together they are several
        times as quick.
        """
        at_once = max(1, MOST // self.count)
        found: list[float] = []
        for first in range(0, len(cases), at_once):
            found += self._makespans(cases[first : first + at_once], is_clipped)
        return found

    def _makespans(self, cases: Sequence[StageSeconds], is_clipped: bool) -> list[float]:
        stages, rank_of = self.schedule.stages, self.schedule.rank_of
        none = (0.0,) * stages
        own: list[list[float]] = []
        between: list[list[float]] = []
        for seconds in cases:
            halves = (seconds.input_gradient or none, seconds.weight_gradient or none)
            own.append([each for of in (seconds.forward, seconds.backward, *halves) for each in of])
            forth = seconds.send or none[1:]
            between.append([0.0, *forth, *(seconds.send_back or forth)])
        # Of one case arrays are of one dim, with which numpy is quicker.
        shape = (len(cases),) if len(cases) > 1 else ()
        takes = np.array(own, dtype=np.float64).T.reshape(-1, *shape)
        sends = np.array(between, dtype=np.float64).T.reshape(-1, *shape)
        ends = np.zeros((self.count + 1 + self.ranks, *shape))
        arrivals = np.zeros((self.count + 1, *shape))
        begun, updates = ends[self.count + 1 :].reshape(self.ranks, -1), np.zeros((self.ranks, len(cases)))
        for case, seconds in enumerate(cases):
            for stage, extra in enumerate(seconds.before):
                begun[rank_of[stage], case] += extra
            for stage, extra in enumerate(seconds.update):
                updates[rank_of[stage], case] += extra
        for low, high in self.levels:
            end = np.maximum(ends.take(self.before[low:high], 0), arrivals.take(self.read[low:high], 0))
            end += takes.take(self.kind_stage[low:high], 0)
            ends[low:high] = end
            np.maximum(end, arrivals.take(self.link[low:high], 0), out=end)
            end += sends.take(self.sent[low:high], 0)
            arrivals[low:high] = end
        ended = ends[self.last].reshape(self.ranks, -1)
        if is_clipped:
            ended = np.broadcast_to(ended.max(axis=0), ended.shape)
        return (ended + updates).max(axis=0).tolist()
