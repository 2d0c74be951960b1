"""
Read and write pipeline schedules as CSV, a row per rank, a word per action: what torch's `_load_csv` reads and
`_dump_csv` writes (torch.distributed.pipelining), and torchtitan's `pipeline_parallel_schedule_csv`.

Torch calls a file without sends `compute_only`, one with them `compute_comms`.
"""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import TRANSFERS, StageAction, read_actions
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.pipeline.sends import check_sends
from unity_ir.plan.pipeline.total_order import check


def to_csv(schedule: PipelineSchedule) -> str:
    """
    Return a schedule as CSV, a row per rank and a word per action: `0F1` is stage 0's forward of micro-batch 1. Given
    1F1B of 2 ranks, the rows are `0F0,0F1,0B0,..` and `1F0,1B0,..`. The schedule's name is not in the text.
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def from_csv(text: str, name: str) -> PipelineSchedule:
    """
    Return the schedule in a CSV text (see `to_csv`), checked; `name` is the schedule's name, also used in messages.
    Blank cells are skipped. The text does not say whether a schedule is asynchronous; it is taken as synchronous.

    The rank of a stage is the first one whose row has an action of that stage. The number of micro-batches follows from
    the actions.

    Raises `UnityError` for a word that is no action, an action that is missing or there twice, a stage on two ranks,
    and ranks that wait for each other for ever. If there are any sends or receives, all must be there.
    """
    lines = text.rstrip().splitlines()
    if not lines:
        raise UnityError(f"pipeline schedule {name}: the file is empty; write a row per rank, such as 0F0,0B0")
    rows = tuple(_row(line, f"pipeline schedule {name}, rank {rank}") for rank, line in enumerate(lines))
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(rows):
        for action in actions:
            rank_of.setdefault(action.stage, rank)
    gap = next((stage for stage in range(len(rank_of)) if stage not in rank_of), None)
    if gap is not None:
        raise UnityError(f"pipeline schedule {name}: stage {gap} has no actions; number stages from 0 without gaps")
    micro_batches = 1 + max((a.micro_batch for row in rows for a in row if a.micro_batch is not None), default=-1)
    if micro_batches == 0:
        raise UnityError(f"pipeline schedule {name}: nothing is computed; add actions such as 0F0,0B0")
    schedule = PipelineSchedule(name, micro_batches, rows, tuple(rank_of[stage] for stage in range(len(rank_of))))
    check(schedule)
    if any(action.kind in TRANSFERS for row in rows for action in row):
        check_sends(schedule)
    return schedule


def _row(line: str, where: str) -> tuple[StageAction, ...]:
    try:
        actions = tuple(action for cell in line.split(",") for action in read_actions(cell))
    except UnityError as error:
        raise UnityError(f"{where}: {error}") from None
    if not actions:
        raise UnityError(f"{where}: the row is empty; leave it out, or give the rank a stage")
    return actions
