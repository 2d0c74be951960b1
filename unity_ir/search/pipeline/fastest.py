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
    """
    Return the load of each stage of `choice`, a result of `choose_stages`: seconds of a micro-batch's forward and
    backward, bytes held throughout the step, and bytes for each live micro-batch.
    """
    options = [stage.option for stage in choice.stages]
    return StageLoads(choice.seconds, tuple(o.held for o in options), tuple(o.live for o in options))


@dataclass(frozen=True)
class ScheduleOutcome:
    """
    A pipeline schedule as simulated: when each rank does what, and the peak bytes of the fullest device of each rank.
    """

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
    Simulate every synchronous schedule by which given stages can be run, and return the outcomes, that of the least
    makespan first, whether they fit the memory or not.

    `by_chunks` has, by the number of stages per rank, the seconds and bytes of all stages if each rank has that many.
    Schedules for other numbers of stages per rank or of micro-batches are left out, and so are those that run backwards
    in halves if the seconds of the halves are not given. With `is_clipped` (gradients are clipped by their norm),
    updates wait for all ranks. Raises `UnityError` if the stages given cannot be dealt out evenly, that many to each
    rank.
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
    Return the outcome of the fastest synchronous schedule under which no device holds more than `memory` bytes. The
    other arguments are those of `simulated_schedules`. Raises `UnityError` if no schedule fits.
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
    Return the peak bytes of the fullest device of each rank under `schedule`: [rank]. A rank's peak is the sum of two:
    the bytes that its stages hold throughout (`load.held`), and the most bytes that micro-batches hold there at any
    moment. A micro-batch holds `load.live` bytes of a stage from its forward until the gradient of the stage's input is
    made, and `load.late` bytes from then until the gradients of the stage's weights are made.
    """
    live = peak_live(schedule, load.live, load.late)
    return tuple(sum(load.held[s] for s in schedule.stages_of(rank)) + live[rank] for rank in range(len(live)))
