"""Choose the schedule of given stages: simulate all synchronous orders there are for them, and take the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.search.pipeline.problem import StageChoice
from unity_ir.simulate.pipeline import PipelineTimes, StageSeconds, simulate_pipeline


@dataclass(frozen=True, slots=True)
class StageLoads:
    """The seconds of stages, and their bytes on the fullest device of each."""

    seconds: StageSeconds
    held: tuple[float, ...]
    """Bytes of each stage whatever is live, such as weights, gradients and the optimizer's state."""
    live: tuple[float, ...]
    """Bytes of each stage for each live micro-batch, from its forward until its input's gradient is made."""
    late: tuple[float, ...] | None = None
    """
    Bytes of each stage for each micro-batch from then until its weights' gradients are made, where the schedule makes
    them later; None for as many as `live`.
    """


def loads_of_choice(choice: StageChoice) -> StageLoads:
    """Return the seconds and bytes of chosen stages, as their options say."""
    options = [stage.option for stage in choice.stages]
    return StageLoads(choice.seconds, tuple(o.held for o in options), tuple(o.live for o in options))


@dataclass(frozen=True)
class ScheduleOutcome:
    """A schedule, simulated: its times, and the peak bytes of each rank's fullest device."""

    times: PipelineTimes
    peaks: tuple[float, ...]

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule that was simulated."""
        return self.times.schedule

    def fits(self, memory: float) -> bool:
        """Return whether every rank's peak is at most `memory` bytes."""
        return max(self.peaks) <= memory


def simulated_schedules(
    by_chunks: Mapping[int, StageLoads], micro_batches: int, is_clipped: bool = False
) -> list[ScheduleOutcome]:
    """
    Return all synchronous schedules of stages, simulated, the fastest first, whether they fit or not.

    `by_chunks[v]` are the loads of stages of which each rank has v. Left out are schedules for another v or for other
    numbers of micro-batches, and those with halves of backwards where no seconds of these are given. With `is_clipped`,
    updates wait for all ranks. Raises `UnityError` for seconds that are not of as many stages as all ranks have.
    """
    found: list[ScheduleOutcome] = []
    for chunks, load in by_chunks.items():
        ranks = len(load.seconds.forward) // chunks
        for name, order in ORDERS.items():
            # With one stage per rank, orders for any number are others of the catalogue.
            if chunks != (order.chunks or max(chunks, 2)):
                continue
            try:
                schedule = pipeline_schedule(name, ranks, micro_batches, chunks)
            except UnityError:
                continue
            if schedule.gradient_delay == 0 and (load.seconds.input_gradient or not schedule.splits_backward):
                times = simulate_pipeline(schedule, load.seconds, is_clipped)
                found.append(ScheduleOutcome(times, peaks(schedule, load)))
    return sorted(found, key=lambda outcome: outcome.times.makespan)


def fastest_schedule(
    by_chunks: Mapping[int, StageLoads], micro_batches: int, memory: float, is_clipped: bool = False
) -> ScheduleOutcome:
    """
    Return the fastest synchronous schedule of stages whose peaks fit `memory` bytes; the other arguments are those of
    `simulated_schedules`. Raises `UnityError` if none fits.
    """
    found = simulated_schedules(by_chunks, micro_batches, is_clipped)
    fitting = [outcome for outcome in found if outcome.fits(memory)]
    if not fitting:
        least = min((max(outcome.peaks) for outcome in found), default=0)
        raise UnityError(
            f"pipeline: no schedule fits devices of {memory:,.0f} bytes, the least peak is {least:,.0f}; use more "
            "stages, more recompute, or smaller micro-batches"
        )
    return fitting[0]


def peaks(schedule: PipelineSchedule, load: StageLoads) -> tuple[float, ...]:
    """
    Return the peak bytes of each rank's fullest device: what its stages hold whatever is live, and the most that live
    micro-batches take at a time under the schedule.
    """
    live = peak_live(schedule, load.live, load.late)
    return tuple(sum(load.held[s] for s in schedule.stages_of(rank)) + live[rank] for rank in range(len(live)))
