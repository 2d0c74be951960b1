"""
Count the micro-batches that a rank of a pipeline holds: forwards done whose backward is not.

Of one whose input gradient (I) is computed and its weight gradient (W) is not, only a part is held: what W reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.plan.pipeline.schedule import PipelineSchedule


def most_live(schedule: PipelineSchedule) -> list[int]:
    """Return the most micro-batches that each stage by itself holds at once for their backwards."""
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for actions in schedule.ranks:
        for stage, kind, _ in actions:
            if kind == "F":
                now[stage] += 1
                most[stage] = max(most[stage], now[stage])
            elif kind in ("B", "W"):
                now[stage] -= 1
    return most


def peak_live(
    schedule: PipelineSchedule, sizes: Sequence[float] | None = None, late: Sequence[float] | None = None
) -> list[float]:
    """
    Return the most that each rank holds at once for the backwards of micro-batches.

    `sizes[s]` is what a micro-batch takes at stage s until its I, `late[s]` from then until its W (by default as much);
    any unit, such as bytes. Without `sizes` the unit is a micro-batch of a rank's share of the layers, all its stages
    taken as equal, as in the table of docs/pipelines.md.
    """
    if sizes is None:
        return [
            peak / len(schedule.stages_of(rank)) for rank, peak in enumerate(peak_live(schedule, [1] * schedule.stages))
        ]
    if late is None:
        late = sizes
    peaks: list[float] = []
    for rank, actions in enumerate(schedule.ranks):
        # Counted, not added up: sums of thirds would round.
        whole = dict.fromkeys(schedule.stages_of(rank), 0)
        half = dict.fromkeys(whole, 0)
        for action in actions:
            # What a step begins of the next one was there when it began itself.
            whole[action.stage] += action.kind == "F" and schedule.ahead(action)
        peak = 0.0
        for stage, kind, _ in actions:
            if kind == "F":
                whole[stage] += 1
                peak = max(
                    peak, sum(sizes[s] * n for s, n in whole.items()) + sum(late[s] * n for s, n in half.items())
                )
            elif kind in ("B", "I"):
                whole[stage] -= 1
                half[stage] += kind == "I"
            elif kind == "W":
                half[stage] -= 1
        peaks.append(peak)
    return peaks
