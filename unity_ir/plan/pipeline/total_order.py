"""
Check a pipeline schedule: everything is computed once, on the rank of its stage, and no rank waits for ever.

A schedule that passes has a total order of its computations of which each rank's list is a restriction.
"""

from __future__ import annotations

from collections.abc import Iterator

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import StageAction
from unity_ir.plan.pipeline.schedule import PipelineSchedule


def check(schedule: PipelineSchedule) -> None:
    """
    Check the computations of a schedule; its sends and receives are checked by `sends.check_sends`.

    Raises `UnityError`, naming the action, if one is missing, there twice, or on another rank than its stage, or if
    ranks wait for each other for ever.
    """
    _check_all_once(schedule)
    for _ in total_order(schedule):
        pass


def total_order(schedule: PipelineSchedule) -> Iterator[tuple[int, StageAction]]:
    """
    Yield (rank, action) for all computations of a schedule, in an order in which each comes after what it needs. Rounds
    follow each other, in which every rank does at most one action, as in torch (`_add_send_recv`).

    Raises `UnityError` if actions are left and no rank can go on.
    """
    stages = schedule.stages
    ranks = schedule.computation().ranks
    at = [0] * len(ranks)
    done: set[StageAction] = set()
    left = [rank for rank, actions in enumerate(ranks) if actions]
    while left:
        moved = False
        for rank in left:
            action = ranks[rank][at[rank]]
            if _missing(action, done, stages) is None:
                at[rank] += 1
                moved = True
                done.add(action)
                if action.kind == "B":
                    done.add(action._replace(kind="I"))
                yield rank, action
        if not moved:
            rank = left[0]
            action = ranks[rank][at[rank]]
            needed = _missing(action, done, stages)
            raise UnityError(
                f"pipeline schedule {schedule.name}, rank {rank}: {action} waits for {needed}, which is never done; "
                "all ranks wait, so change the order of their actions"
            )
        left = [rank for rank in left if at[rank] < len(ranks[rank])]


def _missing(action: StageAction, done: set[StageAction], stages: int) -> StageAction | None:
    """Return an action that must be done before this one and is not."""
    stage, kind, _ = action
    needed: list[StageAction] = []
    if kind == "F" and stage > 0:
        needed.append(action._replace(stage=stage - 1))
    if kind in ("B", "I"):
        needed.append(action._replace(kind="F"))
        if stage < stages - 1:
            needed.append(action._replace(stage=stage + 1, kind="I"))
    if kind == "W":
        needed.append(action._replace(kind="I"))
    return next((each for each in needed if each not in done), None)


def _check_all_once(schedule: PipelineSchedule) -> None:
    """Check that every stage does each micro-batch's forward and backward once, the backward whole or in halves."""
    seen: set[StageAction] = set()
    for rank, actions in enumerate(schedule.computation().ranks):
        for action in actions:
            stage, kind, k = action
            where = f"pipeline schedule {schedule.name}, rank {rank}: {action}"
            if stage >= schedule.stages or k is None or k >= schedule.micro_batches:
                raise UnityError(
                    f"{where} is not among {schedule.stages} stages and {schedule.micro_batches} micro-batches, both "
                    "numbered from 0"
                )
            if schedule.rank_of[stage] != rank:
                raise UnityError(f"{where}: stage {stage} is on rank {schedule.rank_of[stage]}; move the action there")
            if action in seen:
                raise UnityError(f"{where} is there twice; leave one out")
            whole, halves = StageAction(stage, "B", k), (StageAction(stage, "I", k), StageAction(stage, "W", k))
            if other := seen.intersection(halves if kind == "B" else (whole,) if action in halves else ()):
                raise UnityError(f"{where} and {min(other)} are one backward; leave one out")
            seen.add(action)
    for stage, rank in enumerate(schedule.rank_of):
        for k in range(schedule.micro_batches):
            backward = [StageAction(stage, "I", k), StageAction(stage, "W", k)]
            if not seen.intersection(backward):
                backward = [StageAction(stage, "B", k)]
            missing = next((a for a in (StageAction(stage, "F", k), *backward) if a not in seen), None)
            if missing is not None:
                raise UnityError(f"pipeline schedule {schedule.name}, rank {rank}: {missing} is missing; add it")
