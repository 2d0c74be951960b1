"""Name the pipeline schedules there are, and make one by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.orders import (
    double_buffered,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    looped_breadth_first,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.pipeline.vee_orders import dual_pipe_v, zb_v

STEPS = 4
"""Training steps of an asynchronous schedule: the second and the third are as all further ones."""


@dataclass(frozen=True, slots=True)
class Order:
    """
    A kind of pipeline schedule, such as 1F1B: `make(ranks, micro_batches, chunks)` returns the schedule of these sizes.

    `chunks` is the number of stages per rank that it needs; None if any number will do.
    """

    make: Callable[[int, int, int], PipelineSchedule]
    chunks: int | None = 1
    is_asynchronous: bool = False
    """Whether its step computes something else than the serial step: gradients are of older weights."""


ORDERS: Mapping[str, Order] = {
    "gpipe": Order(lambda p, m, v: gpipe(p, m)),
    "1f1b": Order(lambda p, m, v: one_f_one_b(p, m)),
    "eager-1f1b": Order(lambda p, m, v: eager_one_f_one_b(p, m)),
    "interleaved": Order(interleaved, None),
    "looped-bfs": Order(looped_breadth_first, None),
    "zb-h1": Order(lambda p, m, v: zb_h1(p, m)),
    "zb-h2": Order(lambda p, m, v: zb_h2(p, m)),
    "zb-v": Order(lambda p, m, v: zb_v(p, m), 2),
    "dualpipe-v": Order(lambda p, m, v: dual_pipe_v(p, m), 2),
    "2bw": Order(lambda p, m, v: double_buffered(p, m, STEPS), is_asynchronous=True),
}
"""All orders by name; every one but `2bw` is synchronous."""


def pipeline_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """
    Return the schedule called `name` (a key of `ORDERS`) for these numbers of ranks, micro-batches, and stages per rank
    (`chunks`). It has computations only, no sends. The asynchronous `2bw` covers `STEPS` training steps of
    `micro_batches` each.

    Raises `UnityError` for an unknown name, and for numbers that this kind of schedule does not allow.
    """
    order = ORDERS.get(name)
    if order is None:
        raise UnityError(f"pipeline schedule {name}: not one of {', '.join(ORDERS)}")
    if order.chunks not in (None, chunks):
        raise UnityError(f"pipeline schedule {name}: {chunks} stages per rank; it is for {order.chunks}")
    return order.make(ranks, micro_batches, chunks)
