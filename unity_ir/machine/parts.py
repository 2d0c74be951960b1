"""
Divide a machine into equal contiguous parts, as the stages of a pipeline use it: stage s has the devices s * d .. s * d
+ d - 1. What is left of the machine in one part, and what a send from each part to the next takes.

    dgx-h100:8 in 4 parts   ->  2 nodes of 8 GPUs each
    dgx-h100:8 in 16 parts  ->  4 GPUs of a node each; sends cross the node in every other place, else the network
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul

from unity_ir.errors import UnityError
from unity_ir.machine.links import Level
from unity_ir.machine.model import Machine
from unity_ir.pcg.sharding import prime_factors


def part(machine: Machine, count: int) -> Machine:
    """
    Return a machine like one of `count` equal contiguous parts of `machine`: the leading mesh axes, whose sizes
    multiply to `count`, are taken off. A shared medium (a bus) is divided among the parts on it. For a `count` of 1,
    returns `machine` itself.

    Raises `UnityError` if no leading axes multiply to `count` (`part_counts`), and if parts would differ: by links in
    addition to those of the levels, by kinds of devices that are not alike in every part, or by a ring that would be
    cut open.
    """
    if count == 1:
        return machine
    where = f"machine: {machine.name}: cannot be divided into {count} parts"
    if count not in part_counts(machine):
        counts = ", ".join(map(str, part_counts(machine)))
        raise UnityError(f"{where}: its leading mesh axes make no such number; use one of {counts}")
    if machine.links or any(level.link == "links" for level in machine.levels):
        raise UnityError(f"{where}: its links are listed one by one, so parts may differ; use 1 part")
    left, levels = count, list(machine.levels)
    while left > 1:
        outer = levels.pop(0)
        taken = min(left, outer.size)
        # Mesh axes are prime factors, so what is left is a multiple of this level's size or divides it.
        left //= taken
        if outer.kinds:
            _check_alike(outer, taken, where)
        if taken < outer.size:
            levels.insert(0, _divided(outer, taken, where))
    if levels and levels[0].size == 1 and not levels[0].kinds:
        levels.pop(0)
    return replace(machine, name=f"{machine.name}/{count}", levels=tuple(levels))


def part_counts(machine: Machine) -> list[int]:
    """Return the numbers of parts that leading mesh axes make, ascending from 1: given 2 nodes of 6, [1, 2, 4, 12]."""
    axes = [p for level in machine.levels for p in prime_factors(level.size)]
    return list(accumulate(axes, mul, initial=1))


def send_seconds(machine: Machine, count: int, source: int, target: int, elements: float, item: int) -> float:
    """
    Return the seconds of a send between two of the `count` parts of a machine (see `part`): every device of part number
    `source`, from 0, sends a piece of `elements` elements of `item` bytes each to the corresponding device of part
    number `target`, the one as far from the start of its part. All pairs of parts are assumed to send at once. From a
    part to itself nothing is sent, which takes 0 seconds.
    """
    if source == target:
        return 0.0
    return machine.move_seconds("send", _crossed(machine, count, source, target), elements, elements, item)


def _crossed(machine: Machine, count: int, source: int, target: int) -> Mapping[int, int]:
    """Return the level that a send from one part to another crosses, as `Machine.lines` takes it."""
    one, other = (k * (machine.devices // count) for k in (source, target))
    for number in range(len(machine.levels)):
        inside = prod(level.size for level in machine.levels[number + 1 :])
        if one // inside != other // inside:
            return {number: 2}
    raise AssertionError("parts have no device in common")


def _divided(level: Level, by: int, where: str) -> Level:
    """Return a level with its members dealt to `by` parts."""
    size = level.size // by
    if level.link == "ring" and size > 2:
        raise UnityError(
            f"{where}: they would cut the ring of {level.size} {level.name} open; use fewer, or parts of 2"
        )
    shared = by if level.link == "bus" else 1
    return replace(level, size=size, bandwidth=level.bandwidth / shared, kinds=level.kinds[:size])


def _check_alike(level: Level, by: int, where: str) -> None:
    size = level.size // by
    if level.kinds != level.kinds[:size] * by:
        raise UnityError(f"{where}: not all would have the same kinds of {level.name}; use fewer")
