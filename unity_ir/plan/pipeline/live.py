"""
Count the micro-batches that a rank of a pipeline holds: forwards done whose backward is not.

Of one whose input gradient (I) is computed and its weight gradient (W) is not, only a part is held: what W reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unity_ir.plan.pipeline.schedule import PipelineSchedule


def peak_live(
    schedule: PipelineSchedule, sizes: Sequence[float] | None = None, late: Sequence[float] | None = None
) -> list[float]:
    """
    Return, for each rank, the most that it holds at once for backwards of micro-batches that are still to come. Buffers
    of sends do not count.

    `sizes[s]` is what one micro-batch holds at stage s from its forward to its backward. In a backward in halves, that
    ends with the first half, the gradient of the stage's input; `late[s]` is what is held from there to the second
    half, the gradient of the weights (None: as much as `sizes`; it may be more, since gradients are held as well).
    Sizes are in any unit, such as bytes; the result has the same.

    Without `sizes`, the unit is what one micro-batch holds for all layers of one rank, whose stages count equally (as
    in the table of docs/pipelines.md); `late` is then ignored.
    """
    if sizes is None:
        return [
            peak / len(schedule.stages_of(rank)) for rank, peak in enumerate(peak_live(schedule, [1] * schedule.stages))
        ]
    late = sizes if late is None else late
    peaks: list[float] = []
    for rank in range(len(schedule.ranks)):
        own = schedule.stages_of(rank)
        # Counted, not added up: sums of thirds would round.
        peaks.append(
            max(
                sum(n * sizes[s] + m * late[s] for s, (n, m) in zip(own, counts, strict=True))
                for counts in live_counts(schedule, rank)
            )
        )
    return peaks


LiveCounts = tuple[tuple[int, int], ...]
"""Of each stage of a rank, the micro-batches that it holds whole, and those of which it holds what W reads."""


def live_counts(schedule: PipelineSchedule, rank: int) -> tuple[LiveCounts, ...]:
    """
    Return the numbers of micro-batches that a rank holds for backwards at its peaks. A peak is one pair per stage of
    the rank, in ascending order: (micro-batches after the forward and before the backward, micro-batches between its
    halves). The halves are the gradient of the stage's input and that of its weights.

    Counts are taken after each action that adds to them. Counts that are at most those of another peak in every number
    are left out, which leaves a Pareto front; the result has at least one.
    """
    own = schedule.stages_of(rank)
    whole = dict.fromkeys(own, 0)
    half = dict.fromkeys(own, 0)
    actions = schedule.ranks[rank]
    for action in actions:
        # What a step begins of the next one was there when it began itself.
        whole[action.stage] += action.kind == "F" and schedule.ahead(action)
    found: dict[LiveCounts, None] = {}
    for stage, kind, _ in actions:
        if kind == "F":
            whole[stage] += 1
        elif kind in ("B", "I"):
            whole[stage] -= 1
            half[stage] += kind == "I"
        elif kind == "W":
            half[stage] -= 1
        if kind in ("F", "I"):
            found[tuple((whole[s], half[s]) for s in own)] = None
    return _most(found) or (((0, 0),) * len(own),)


def _most(found: Iterable[LiveCounts]) -> tuple[LiveCounts, ...]:
    """Return those counts that no other has at least."""
    kept: list[LiveCounts] = []
    for counts in sorted(found, reverse=True):
        flat = [n for pair in counts for n in pair]
        if not any(all(a >= b for a, b in zip((n for p in k for n in p), flat, strict=True)) for k in kept):
            kept.append(counts)
    return tuple(kept)
