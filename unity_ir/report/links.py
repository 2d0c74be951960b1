"""Say how much the links of each level of a machine carry in an iteration, and for how long they are busy."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.cost.plan import PlanCost
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.simulate.full import Timeline
from unity_ir.simulate.streams import TICKS


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """How much the links of one level of a machine carry in an iteration, and for how long they are busy."""

    level: str
    size: int
    """How many members the level joins."""
    bandwidth: float
    """Bytes per second of a link and direction."""
    bytes: int
    """Bytes received in moves that cross the level, over all devices; one that crosses two levels counts for both."""
    moves: int
    """Moves of an iteration that cross it."""
    busy: float | None
    """Simulated seconds for which the busiest device's port is occupied; None if that is not known."""
    share: float | None
    """The part of the simulated time that these are."""


def link_loads(plan: PlanCost, timeline: Timeline | None) -> list[LinkLoad]:
    """
    Return, for each level of the machine, outermost first, how much its links carry in one iteration of a plan: bytes
    and number of moves, and the seconds for which the busiest device's port to them is occupied (`busy`), also as a
    fraction of the iteration (`share`).

    `plan` is the plan's cost, and `timeline` its simulated iteration, as emitted. Without a timeline (None, as for a
    pipeline, which is simulated by whole parts of a step), `busy` and `share` are None.
    """
    machine = plan.machine
    found: list[LinkLoad] = []
    for i, level in enumerate(machine.levels):
        crossing = [(m, dtype) for m, dtype in plan.moves if i in {machine.axis_levels[a] for a in m.axes}]
        received = [m.traffic(machine.mesh) * ELEMENT_BYTES[dtype] for m, dtype in crossing]
        busy = share = None
        if timeline is not None:
            streams = timeline.tasks.streams
            ticks = max(timeline.busy(streams.port(k, i)) for k in range(streams.classes))
            busy, share = ticks / TICKS, ticks / max(1, timeline.makespan)
        moving = sum(size > 0 for size in received)
        found.append(LinkLoad(level.name, level.size, level.bandwidth, sum(received), moving, busy, share))
    return found
