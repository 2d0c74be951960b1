"""
Bound the makespan of a pipeline from below: of every synchronous order of given stages on given ranks.

A rank's first action waits for the forwards of one micro-batch through all stages before its first one (fill). After
the last gradient that it sends back, that micro-batch still has to go back through the same stages (drain). Between, it
does all of its own work. So, of rank i with one stage,

    makespan >= sum of F before i + m (F_i + B_i) + max(sum of B before i, update_i)

and where backwards may be in halves, of which only I is waited for by others,

    makespan >= sum of F before i + max(m (F_i + B_i) + update_i, m (F_i + I_i) + sum of I before i).

Sends add to fill and drain.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.simulate.pipeline import StageSeconds


def makespan_bound(
    seconds: StageSeconds,
    micro_batches: int,
    rank_of: Sequence[int] | None = None,
    is_split: bool = False,
    is_clipped: bool = False,
) -> float:
    """
    Return a lower bound in seconds on the makespan (the time of a step) of every synchronous pipeline schedule of given
    stages, up to rounding.

    `seconds` is what each stage takes; stage s runs on rank `rank_of[s]`, by default on rank s. Backwards are run whole
    or, with `is_split`, also in two halves: the input's gradient, later the weights'. With `is_clipped` (gradients are
    clipped by their norm), updates wait for all ranks (`simulate_pipeline`).
    """
    m = micro_batches
    forward = seconds.forward
    stages = range(len(forward))
    ranks = list(rank_of or stages)
    update: dict[int, float] = dict.fromkeys(ranks, 0)
    for stage, extra in zip(stages, seconds.update, strict=False):
        update[ranks[stage]] += extra
    after = 0
    if is_clipped:
        after = max(update.values())
        update = dict.fromkeys(ranks, 0)
    returns, rests = backward_seconds(seconds, is_split)
    sends = [send * (ranks[s] != ranks[s + 1]) for s, send in enumerate(seconds.send or (0,) * (len(forward) - 1))]
    # Seconds before a stage can begin, and from the end of its last input gradient to the end of the step.
    fill: list[float] = [0]
    tail = [rests[0] + update[ranks[0]]]
    for s in stages[1:]:
        fill.append(fill[-1] + forward[s - 1] + sends[s - 1])
        tail.append(max(rests[s] + update[ranks[s]], sends[s - 1] + returns[s - 1] + tail[-1]))
    bound = fill[-1] + forward[-1] + returns[-1] + tail[-1]
    of_rank: dict[int, list[int]] = {}
    for s, rank in zip(stages, ranks, strict=True):
        of_rank.setdefault(rank, []).append(s)
    for rank, mine in of_rank.items():
        first = mine[0]
        own = m * sum(forward[s] + returns[s] for s in mine)
        work = own + m * sum(rests[s] for s in mine)
        bound = max(bound, fill[first] + work + update[rank], fill[first] + own + tail[first])
    return bound + after


def backward_seconds(seconds: StageSeconds, is_split: bool) -> tuple[list[float], list[float]]:
    """
    Return two lists of seconds, [stage], for `makespan_bound`: from the start of a backward until the gradient of the
    stage's input is made, and from then until those of its weights are made.

    A whole backward makes both at its end, so that the second list is 0. If `is_split` is set and `seconds` has the
    halves, a backward may also run in halves: the first list, and the sum of both, are then the lesser of the two ways.
    """
    if not is_split or not seconds.input_gradient:
        return list(seconds.backward), [0] * len(seconds.backward)
    parts = zip(seconds.backward, seconds.input_gradient, seconds.weight_gradient, strict=True)
    least = [(min(b, i), min(b, i + w)) for b, i, w in parts]
    return [first for first, _ in least], [both - first for first, both in least]
