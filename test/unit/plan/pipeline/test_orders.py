"""Orders of pipelines: torch's, action by action, where the algorithm is theirs; what ranks hold; wrong sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from random_pipelines import order_sizes
from torch.distributed.pipelining import schedules as torch_schedules

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.plan.pipeline.csv_text import from_csv
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.pipeline.sends import with_sends
from unity_ir.plan.pipeline.total_order import check

THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "eager-1f1b": "ScheduleInterleaved1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}

ONE_STAGE = ("gpipe", "1f1b")


def torch_schedule(name: str, p: int, m: int, v: int) -> Any:
    """Torch's schedule of an order, of stages that are never run."""
    made = getattr(torch_schedules, THEIRS[name])
    stages = [
        SimpleNamespace(
            stage_index=i, num_stages=p * v, group_size=p, group_rank=0, is_last=False, has_backward=True, submod=None
        )
        for i in range(v)
    ]
    return made(stages[0] if name in ONE_STAGE else stages, m)


def torch_csv(name: str, p: int, m: int, v: int) -> str:
    """What torch writes of an order: its computations, blanks where it thinks that a rank waits."""
    schedule = torch_schedule(name, p, m, v)
    order = schedule._get_pipeline_order() if name in ONE_STAGE else schedule.pipeline_order
    if name == "1f1b":
        # Of the last rank, torch 2.13 prints forwards 1 to m, and runs 0 to m - 1.
        order[p - 1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a and a.computation_type == "F" else a
            for a in order[p - 1]
        ]
    return "\n".join(",".join("" if a is None else str(a) for a in order[rank]) for rank in sorted(order))


@pytest.mark.slow
@given(order_sizes(tuple(THEIRS)))
def test_orders_are_torchs(size: tuple[str, int, int, int]):
    name, p, m, v = size
    if name == "1f1b":
        m = max(m, p)  # torch prints, and does not run, forwards of micro-batches that there are not
    if name in ("eager-1f1b", "zb-h1"):
        m -= m % max(1, m // p)  # torch's is interleaved, too
    ours = pipeline_schedule(name, p, m, v)
    theirs = from_csv(torch_csv(name, p, m, v), "torch").computation()
    assert (ours.ranks, ours.rank_of) == (theirs.ranks, theirs.rank_of)


@given(order_sizes())
def test_orders_do_all_once_and_end(size: tuple[str, int, int, int]):
    check(pipeline_schedule(*size))


def expected_live(name: str, p: int, m: int, v: int, r: int) -> float:
    return {
        "gpipe": m,
        "1f1b": p - r,
        "eager-1f1b": 2 * (p - r) - 1,
        "interleaved": ((v - 1) * p + 2 * (p - 1 - r) + 1) / v,
        "looped-bfs": m,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": p,
        "dualpipe-v": p + 1 / 2,
        "2bw": p - r,
    }[name]


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_hold_what_the_table_says(name: str):
    for p in range(1, 9):
        for v in (1, 2, 3, 4):
            for m in (2 * p, 3 * p, 4 * p):
                if ORDERS[name].chunks in (None, v):
                    live = peak_live(pipeline_schedule(name, p, m, v))
                    assert live == [expected_live(name, p, m, v, r) for r in range(p)], (p, m, v)


def test_what_only_weight_gradients_read_may_be_less():
    """ZB-H1 holds p - r micro-batches whole on rank r, and r more from their I to their W."""
    schedule = pipeline_schedule("zb-h1", 4, 16)
    assert peak_live(schedule, [1] * 4, [0] * 4) == [4, 3, 2, 1]
    assert peak_live(schedule, [1] * 4, [0.5] * 4) == [4, 3.5, 3, 2.5]
    assert peak_live(schedule, [10, 20, 30, 40], [1] * 4) == [40, 61, 62, 43]


@given(order_sizes())
def test_ranks_hold_every_micro_batch_at_some_time(size: tuple[str, int, int, int]):
    """A model of what is held, step by step, with sets in place of counts."""
    schedule = pipeline_schedule(*size)
    for actions, peak in zip(schedule.ranks, peak_live(schedule, range(1, schedule.stages + 1)), strict=True):
        held: set[tuple[int, int | None]] = set()
        most = 0
        for stage, kind, k in actions:
            if kind == "F":
                held.add((stage, k))
            elif kind in ("B", "W"):
                held.remove((stage, k))
            most = max(most, sum(stage + 1 for stage, _ in held))
        assert peak == most


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (("1f1b", 0, 4, 1), r"1f1b: 0 stages, 4 micro-batches; use at least 1 of each"),
        (("gpipe", 4, 0, 1), r"gpipe: 4 stages, 0 micro-batches; use at least 1 of each"),
        (("interleaved", 4, 8, 0), r"interleaved: 0 stages, 8 micro-batches; use at least 1 of each"),
        (("interleaved", 4, 9, 2), r"interleaved: 9 micro-batches do not divide into 2 rounds on 4 ranks; use 8 "),
        (("zb-h1", 4, 8, 2), r"zb-h1: 2 stages per rank; it is for 1"),
        (("zb-v", 4, 8, 1), r"zb-v: 1 stages per rank; it is for 2"),
        (("dualpipe-v", 4, 7, 2), r"dualpipe-v: 7 micro-batches for 8 stages; use at least as many"),
        (("2bw", 4, 3, 1), r"2bw: 3 micro-batches on 4 ranks would need more than two versions of the weights; use at"),
        (("2f2b", 4, 8, 1), r"2f2b: not one of gpipe, 1f1b, "),
    ],
)
def test_sizes_an_order_is_not_for_are_refused(size: tuple[str, int, int, int], error: str):
    with pytest.raises(UnityError, match=f"^pipeline schedule {error}"):
        pipeline_schedule(*size)


def test_only_one_order_computes_something_else_than_the_serial_step():
    computes = {name: pipeline_schedule(name, 2, 4, ORDERS[name].chunks or 2).computes for name in ORDERS}
    assert computes.pop("2bw") == "w(t+1) = update(w(t), g(w(t - 1)))"
    assert set(computes.values()) == {"w(t+1) = update(w(t), g(w(t)))"}


def torch_sends(schedule: PipelineSchedule) -> list[list[str]]:
    """Return the schedule with the sends and receives that torch's runtime adds."""
    actions = {
        rank: [torch_schedules._Action.from_str(str(a)) for a in actions] for rank, actions in enumerate(schedule.ranks)
    }
    found = torch_schedules._add_send_recv(actions, lambda stage: schedule.rank_of[stage], schedule.stages)
    return [list(map(str, found[rank])) for rank in sorted(found)]


@given(order_sizes())
def test_sends_are_where_torch_puts_them(size: tuple[str, int, int, int]):
    schedule = pipeline_schedule(*size)
    assert [list(map(str, actions)) for actions in with_sends(schedule).ranks] == torch_sends(schedule)
