"""List the schedules from which that of a pipeline is chosen."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.search.pipeline.ranges import CountedSchedule

ScheduleKind = tuple[str | None, int]
"""The name of a schedule, None for any, and the stages that it has on each part."""

SYNCHRONOUS = tuple(name for name, order in ORDERS.items() if not order.is_asynchronous)
"""Schedules whose step computes what the serial step does."""

TRIED: tuple[tuple[str, int], ...] = (
    *((name, 1) for name in SYNCHRONOUS if ORDERS[name].chunks == 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-v", 2),
    ("dualpipe-v", 2),
)
"""Schedules from which one is chosen."""

ACTIONS = 100_000
"""
Forwards and backwards up to which schedules of several stages per part are tried: making and simulating one takes about
a second, and with as many micro-batches the bubble that they shorten is small.
"""


def schedules(parts: int, micro_batches: int, kind: ScheduleKind | None, units: int) -> list[CountedSchedule]:
    """
    Return the synchronous schedules to choose from for `parts` ranks and `micro_batches`, those of one stage per rank
    first.

    `kind` is a pair (name, stages per rank): that schedule alone or, if the name is None, those of `TRIED` with that
    number of stages per rank. If `kind` itself is None, all of `TRIED`. Left out of `TRIED` are schedules that cannot
    run that number of micro-batches and, with several stages per rank, those with more stages than the graph has
    `units`, or with more than `ACTIONS` forwards and backwards in a step.

    Raises `UnityError` for a name that is none of `SYNCHRONOUS`, and for a named schedule that cannot run that number
    of micro-batches.
    """
    forced, per_part = kind or (None, None)
    if forced is not None and per_part is not None:
        if forced not in SYNCHRONOUS:
            raise UnityError(f"pipeline schedule {forced}: not synchronous; use {', '.join(SYNCHRONOUS)}")
        return [_counted(forced, per_part, parts, micro_batches)]
    found: list[CountedSchedule] = []
    for name, chunks in TRIED:
        if per_part not in (None, chunks):
            continue
        if chunks == 1 or (parts * chunks <= units and 2 * parts * chunks * micro_batches <= ACTIONS):
            with suppress(UnityError):  # a number of micro-batches that the schedule is not for
                found.append(_counted(name, chunks, parts, micro_batches))
    return found


@lru_cache(maxsize=64)
def _counted(name: str, chunks: int, parts: int, micro_batches: int) -> CountedSchedule:
    return CountedSchedule.of(pipeline_schedule(name, parts, micro_batches, chunks))
