"""
Turn a reshard's moves (collectives, or steps on each device) into tasks on streams. Reshards have numbers; that the
result of a reshard is complete on a device class (devices that do the same at the same time) is an *arrival*.

A task is issued when the compute streams of its devices reach it in program order, as NCCL's stream waits for the
current one. It starts once its input has arrived and its ports are free.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.simulate.streams import Step, Streams

Key = int
"""An arrival: the number of a reshard (or of its gradient's) times the number of device classes, plus the class."""

Task = tuple[int, tuple[int, ...], tuple[int, ...], tuple[Key, ...], tuple[Key, ...]]
"""Ticks, the streams it is issued after, those of them it occupies, the arrivals it waits for, and those it causes."""


def arrivals(numbers: Sequence[int], streams: Streams, of: int) -> tuple[Key, ...]:
    """
    Return the keys (integers, `Key`) of the arrivals that a task waits for before it reads the results of reshards. An
    arrival says that a reshard's result is complete on a device class.

    `numbers` are the numbers of the reshards, and `of` is the number of the device class that the task runs on.
    `streams` has the number of classes, by which keys are computed.
    """
    classes = streams.classes
    return tuple([n * classes + of for n in numbers])


def chain(
    streams: Streams,
    steps: Sequence[Step],
    number: int,
    sources: Sequence[int],
    overlap: bool,
    levels: tuple[int, ...] = (),
) -> list[tuple[str, Task]]:
    """
    Return the tasks of one reshard, in order, each as (name of its collective, task). A move has one task for each
    group of device classes that exchange data. A task is a tuple (`Task`): its picoseconds (ticks), the streams whose
    earlier tasks must have ended before it starts, those of them that it occupies, the arrivals that it waits for, and
    the arrivals that it causes. An arrival says that a reshard's result is complete on a device class (`arrivals`).

    `steps` are the reshard's moves, and `number` is its own number: each move causes the arrival of that number, and
    the moves after the first wait for it. `sources` are the numbers of the reshards whose results the first move reads.
    `levels` has the numbers of the machine levels crossed by the collective that made the operand (() if none did): a
    move on the devices themselves runs on that collective's streams. Without `overlap`, every collective occupies the
    compute streams, too.
    """
    out: list[tuple[str, Task]] = []
    reads = sources
    for kind, ticks, crossed, groups in steps:
        if crossed:
            levels = crossed
        for group in groups:
            computes = tuple(streams.compute(k) for k in group)
            ports = tuple(streams.port(k, level) for k in group for level in levels)
            held = ports if ports and overlap else (*computes, *ports)
            waits = tuple(key for k in group for key in arrivals(reads, streams, k))
            sets = tuple(key for k in group for key in arrivals((number,), streams, k))
            out.append((kind, (ticks, tuple(dict.fromkeys((*computes, *ports))), held, waits, sets)))
        reads = (number,)
    return out


def stall(streams: Streams, steps: Sequence[Step], sources: Sequence[int]) -> list[tuple[str, Task]]:
    """
    Return the tasks of moves that kernels wait for, such as halo exchanges, each as (name of its collective, task), as
    `chain` does. They occupy the compute streams, too. So later tasks of these devices start after them anyway, and
    they cause no arrivals.

    `steps` are the moves. The first waits for the results of the reshards with numbers `sources`.
    """
    found = chain(streams, steps, 0, sources, overlap=False)
    first = len(steps[0][3]) if steps else 0
    return [
        (kind, (ticks, after, held, waits if i < first else (), ()))
        for i, (kind, (ticks, after, held, waits, _)) in enumerate(found)
    ]
