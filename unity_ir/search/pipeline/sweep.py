"""
Minimise a value over all choices of stages by dynamic programming, from the last layer to the first.

The value of some stages is made from the seconds of the first and the value of those behind it (`Join`), and rises with
both: a sum, or a maximum. State: first layer, layout of its input, devices that may be used, and the number of stages,
which says how many micro-batches are live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from unity_ir.search.pipeline.problem import Stage, StageProblem
from unity_ir.search.pipeline.table import Floats, StageOption, StageTable

Join = Callable[[Floats, Floats, Floats, Floats], Floats]
"""
Given a stage's seconds of a micro-batch, those of its forward, its seconds once, and the value of the stages behind it,
returns the value of all these stages.
"""

Bools = npt.NDArray[np.bool_]


def sweep(
    problem: StageProblem,
    live: Sequence[int],
    join: Join,
    trips: int,
    cap: float = np.inf,
    windows: Sequence[slice] | None = None,
) -> list[Floats]:
    """
    Minimise a value, such as a sum of seconds, over all choices of stages. Return a list whose entry k has the least
    value of k + 1 stages that end with the last layer: [first layer, layout of its input, most devices]. For layer 0,
    only the entries with all devices are filled, the others inf.

    `join` says what value stages have. The stage that k others follow has `live[k]` micro-batches held; between stages,
    `trips` times the seconds of a send are added. Options of more than `cap` seconds are left out and, for each first
    layer, numbers of devices outside of `windows`.
    """
    table = problem.table
    values: list[Floats] = []
    behind = nothing_behind(problem)
    windows = windows or [slice(0, problem.devices + 1)] * (table.layers + 1)
    for k in live:
        seconds = problem.fitting(k, cap)
        least = seconds.min(axis=0)
        least_forward = np.where(np.isfinite(seconds), table.forward, np.inf).min(axis=0)
        reached = np.stack([value_after(problem, behind, trips, size) for size in table.parts], axis=1)
        is_reached = np.isfinite(behind.min(axis=(1, 2)))
        value = np.full_like(behind, np.inf)
        for i in range(1, table.layers):
            if windows[i].start < windows[i].stop:
                value[i, :, windows[i]] = _least(
                    least[i], least_forward[i], np.zeros(()), reached, is_reached, windows[i], join
                )
        for option in range(len(seconds)):
            first = seconds[option, 0], table.forward[option, 0], table.once[option, 0]
            found = _least(*first, reached, is_reached, slice(problem.devices, None), join)
            value[0, :, -1:] = np.minimum(value[0, :, -1:], found)
        values.append(value)
        behind = value
    return values


def value_after(problem: StageProblem, behind: Floats, trips: int, devices: int) -> Floats:
    """
    Return the value of the stages behind one that takes `devices` devices: [first layer behind, layout, devices of
    all]. It is that in `behind`, an entry of `sweep`, for the devices that are left to them, plus `trips` times the
    seconds of the send to them.
    """
    shifted = np.full_like(behind, np.inf)
    if devices <= problem.devices:
        shifted[..., devices:] = behind[..., : problem.devices + 1 - devices]
    return shifted + trips * problem.send_seconds[..., None] * (np.arange(len(behind)) < len(behind) - 1)[:, None, None]


def _least(
    t: Floats, forward: Floats, once: Floats, reached: Floats, is_reached: Bools, window: slice, join: Join
) -> Floats:
    """
    Return the least value with a stage in front, [layout in, devices]: the stage ends anywhere, on a part of any size.

    Arrays of the stage are [last, part, layout in, layout out], `reached` is [last, part, layout, devices].
    """
    ends, parts = np.nonzero(np.isfinite(t).any(axis=(2, 3)) & is_reached[:, None])
    behind = reached[ends, parts, :, window][:, None]
    if not len(ends):
        return np.full((t.shape[2], behind.shape[-1]), np.inf)
    once = np.broadcast_to(once, t.shape)
    t, forward, once = (array[ends, parts][..., None] for array in (t, forward, once))
    return join(t, forward, once, behind).min(axis=(0, 2))


def nothing_behind(problem: StageProblem) -> Floats:
    """
    Return the value of no stages, with the axes of an entry of `sweep` [first layer, layout, devices]: 0 behind the
    last layer, inf elsewhere.
    """
    value = np.full((problem.table.layers + 1, problem.table.layouts, problem.devices + 1), np.inf)
    value[-1] = 0
    return value


def least_by_stages(problem: StageProblem, values: Sequence[Floats]) -> Floats:
    """
    Return the least value of stages that have all layers and devices, by the number of stages less 1: [k]; inf for
    fewer than `fewest_stages`. `values` is what `sweep` returned.
    """
    enough = problem.fewest_stages - 1
    return np.array([np.inf if k < enough else value[0, :, -1].min() for k, value in enumerate(values)])


def trace(
    problem: StageProblem, values: Sequence[Floats], live: Sequence[int], trips: int, cap: float
) -> tuple[Stage, ...]:
    """
    Return the stages, first to last, of the least value in `values`, which `sweep` returned with the same other
    arguments. Its `join` must have added up seconds: of a micro-batch in each stage, of sends, and once per step of the
    first stage.
    """
    count = int(np.argmin(least_by_stages(problem, values)))
    table = problem.table
    first, left, layout = 0, problem.devices, slice(None)
    stages: list[Stage] = []
    for k in range(count, -1, -1):
        behind = values[k - 1] if k else nothing_behind(problem)
        after = np.stack([value_after(problem, behind, trips, size)[..., left] for size in table.parts], axis=1)
        total = problem.fitting(live[k], cap, first)[..., layout, :] + after[:, :, None]
        if first == 0:
            total = total + table.once[:, 0]
        number, last, part, at, layout_out = np.unravel_index(int(np.argmin(total)), total.shape)
        layout_in = int(at) if first == 0 else layout.start
        option = _option(table, first, int(last), int(part), (layout_in, int(layout_out)), int(number))
        stages.append(Stage(first, int(last), table.parts[part], option))
        first, left = int(last), left - table.parts[part]
        layout = slice(int(layout_out), int(layout_out) + 1)
    return tuple(stages)


def _option(table: StageTable, first: int, last: int, part: int, ends: tuple[int, int], number: int) -> StageOption:
    """Return the option of a range and part with these layouts, by its number among those."""
    alike = [o for o in table.options(first, last, table.parts[part]) if (o.layout_in, o.layout_out) == ends]
    return alike[number]
