"""
Choose below how many bytes gathers of weights and sums of gradients share calls (`Graph.bucket`), by simulating.

A call over many devices takes long however little it moves: 50 us over 64 GPUs in 8 nodes, in which 8 MB could be
summed. Where a step waits for such calls, fewer and larger ones are up to twice as fast, though each starts only once
its last member is made; where they are hidden behind kernels, small ones are.
"""

from __future__ import annotations

from dataclasses import replace

from unity_ir.machine.model import Machine
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import REPEAT, SUM
from unity_ir.plan.plan import Plan
from unity_ir.plan.schedule import BUCKET_BYTES, schedule

GROWTH = 4
"""Times the size before: each size is tried only if the one before was faster than the one before that."""

MOST_BYTES = 256 * 2**20
"""The largest size tried."""

FASTER = 0.999
"""A larger size is taken if the step then takes less than this many times the seconds."""


def latency_bytes(machine: Machine) -> float:
    """Return how many bytes all devices could sum in the time that a sum of few bytes takes."""
    axes, devices = tuple(range(len(machine.mesh.sizes))), machine.mesh.devices
    if devices == 1:
        return 0.0

    def seconds(elements: int) -> float:
        return machine.move_time(Move("all_reduce", axes, SUM, REPEAT, devices, elements, 0, ()), "f32")

    few, many = seconds(devices), seconds(2**28)
    return 4 * 2**28 * few / (many - few)


def sizes(machine: Machine) -> list[int]:
    """
    Return the sizes in bytes to try after `BUCKET_BYTES`, ascending: none where calls are short, within a node, so that
    larger buckets gain nothing.
    """
    first = GROWTH * BUCKET_BYTES
    if 2 * latency_bytes(machine) < first:
        return []
    found = [first]
    while found[-1] * GROWTH <= MOST_BYTES:
        found.append(found[-1] * GROWTH)
    return found


def with_bucket(plan: Plan, size: int) -> Plan:
    """Return the plan of a step that is not in stages with another size of buckets."""
    return replace(plan, schedule=schedule(plan.program, size))
