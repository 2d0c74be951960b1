"""
Insert sends and receives into a pipeline schedule, and check that they do not deadlock.

A send and its receive are placed at one point of one total order of everything that is computed, so every rank's list
is a restriction of that order. The earliest transfer not yet done then always has both ends at the head of their lists:
no rank waits for ever, however little the links buffer. Neighbouring stages on one rank send nothing.
"""

from __future__ import annotations

from dataclasses import replace

from unity_ir.errors import UnityError
from unity_ir.plan.deadlock import CollectiveCall, Place, check_order
from unity_ir.plan.pipeline.actions import TRANSFERS, StageAction
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.pipeline.total_order import total_order


def with_sends(schedule: PipelineSchedule) -> PipelineSchedule:
    """
    Return the schedule's computations with sends and receives. A send is right after each computation whose result
    another rank reads. The receive is in that rank's list: after those of its computations that come before the sent
    one in `total_order` (an order of all ranks' computations), and before the rest.

    Raises `UnityError` if ranks wait for each other for ever.
    """
    lists: list[list[StageAction]] = [[] for _ in schedule.ranks]
    for rank, action in total_order(schedule):
        lists[rank].append(action)
        pair = transfer(schedule, action)
        if pair is not None:
            send, receive = pair
            lists[rank].append(send)
            lists[schedule.rank_of[receive.stage]].append(receive)
    return replace(schedule, ranks=tuple(map(tuple, lists)))


def transfer(schedule: PipelineSchedule, action: StageAction) -> tuple[StageAction, StageAction] | None:
    """
    Return (send, receive) of what `action` makes: the result of a forward, or the gradient of a stage's input. The send
    is for the rank of `action`, the receive for the rank that reads the result. Returns None if no other rank reads it.
    """
    stage, kind, k = action
    if kind == "F" and stage + 1 < schedule.stages and schedule.crosses(stage):
        return StageAction(stage, "SEND_F", k), StageAction(stage + 1, "RECV_F", k)
    if kind in ("B", "I") and stage > 0 and schedule.crosses(stage - 1):
        return StageAction(stage, "SEND_B", k), StageAction(stage - 1, "RECV_B", k)
    return None


def check_sends(schedule: PipelineSchedule) -> None:
    """
    Check the sends and receives of a schedule. Each is there once, a send is after what it sends, and a receive is
    before what reads it. All ranks come to their end even if a send blocks until the other rank receives.

    Raises `UnityError`, naming the action, if not.
    """
    calls = _calls(schedule)
    found: dict[Place, list[CollectiveCall]] = {}
    for rank, actions in enumerate(schedule.ranks):
        where = f"pipeline schedule {schedule.name}, rank {rank}"
        done: set[StageAction] = set()
        for action in actions:
            if action.kind in TRANSFERS and action in done:
                raise UnityError(f"{where}: {action} is there twice; leave one out")
            if action.kind in TRANSFERS and action not in calls[rank]:
                raise UnityError(f"{where}: {action}: no other rank has its other end; leave it out")
            needed = _needed_here(schedule, action)
            if needed and not done.intersection(needed):
                raise UnityError(f"{where}: {action} needs {needed[0]} before it; change their order")
            done.add(action)
        absent = next((end for end in calls[rank] if end not in done), None)
        if absent is not None:
            raise UnityError(f"{where}: {absent} is missing; add it")
        found[rank,] = [calls[rank][action] for action in actions if action in calls[rank]]
    check_order(f"pipeline schedule {schedule.name}", found)


def _calls(schedule: PipelineSchedule) -> list[dict[StageAction, CollectiveCall]]:
    """Return for each rank the sends and receives it has to do, each as a call of the two ranks."""
    calls: list[dict[StageAction, CollectiveCall]] = [{} for _ in schedule.ranks]
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            pair = transfer(schedule, action)
            if pair is not None:
                send, receive = pair
                other = schedule.rank_of[receive.stage]
                call = CollectiveCall(((rank,), (other,)), (), "send", 0, str(action))
                calls[rank][send] = calls[other][receive] = call
    return calls


def _needed_here(schedule: PipelineSchedule, action: StageAction) -> tuple[StageAction, ...]:
    """Return what its own rank must have done before an action, one of them: what it sends, or the receive it reads."""
    stage, kind, _ = action
    if kind == "SEND_F":
        return (action._replace(kind="F"),)
    if kind == "SEND_B":
        return action._replace(kind="B"), action._replace(kind="I")
    if kind == "F" and stage > 0 and schedule.crosses(stage - 1):
        return (action._replace(kind="RECV_F"),)
    if kind in ("B", "I") and stage + 1 < schedule.stages and schedule.crosses(stage):
        return (action._replace(kind="RECV_B"),)
    return ()
