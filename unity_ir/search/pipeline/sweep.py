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
    send_count: int,
    cap: float = np.inf,
    windows: Sequence[slice] | None = None,
) -> list[Floats]:
    """
    Minimise a value in seconds over all choices of stages. `join` says what the value is: it is called as `join(seconds
    of a micro-batch in a stage, those of its forward, its seconds once per step, value of the stages behind it)`, all
    arrays, and returns the value of that stage and those behind it together, such as their sum.

    Return a list whose entry k has the least value of k + 1 stages that end with the last layer: [first layer, number
    of the layout of its input, devices that these stages may use]. For layer 0, only the entries with all devices are
    filled, the others are inf.

    `send_count` is how often the seconds of each send count: 2 if the send of the value and that of its gradient are
    both waited for. A stage that k others follow must fit while it holds `live[k]` micro-batches. Left out are options
    of more than `cap` seconds and, for each first layer i, numbers of devices outside of the slice `windows[i]` (None:
    all are tried).
    """
    table = problem.table
    values: list[Floats] = []
    behind = nothing_behind(problem)
    windows = windows or [slice(0, problem.devices + 1)] * (table.layers + 1)
    for k in live:
        seconds = problem.fitting(k, cap)
        least = seconds.min(axis=0)
        least_forward = np.where(np.isfinite(seconds), table.forward, np.inf).min(axis=0)
        reached = np.stack([value_after(problem, behind, send_count, size) for size in table.parts], axis=1)
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


def value_after(problem: StageProblem, behind: Floats, send_count: int, devices: int) -> Floats:
    """
    Return the least value in seconds of the stages behind a stage of `devices` devices, including the send to them:
    [first layer behind it, number of the layout in which that layer's input is sent, devices that this stage and those
    behind it may use together].

    `behind` has the least values without the send: an entry of the list that `sweep` returns, or `nothing_behind`. The
    result is its value for the devices that are left, plus `send_count` times the seconds of the send.
    """
    shifted = np.full_like(behind, np.inf)
    if devices <= problem.devices:
        shifted[..., devices:] = behind[..., : problem.devices + 1 - devices]
    return (
        shifted
        + send_count * problem.send_seconds[..., None] * (np.arange(len(behind)) < len(behind) - 1)[:, None, None]
    )


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
    Return the entry that `sweep` starts from, for no stages at all: 0 where no layer is left, inf elsewhere. Axes are
    those of an entry of `sweep`.
    """
    value = np.full((problem.table.layers + 1, problem.table.layouts, problem.devices + 1), np.inf)
    value[-1] = 0
    return value


def least_by_stages(problem: StageProblem, values: Sequence[Floats]) -> Floats:
    """
    Return, for each number of stages, the least value in seconds of stages that together have all layers, on all
    devices: [k] for k + 1 stages; inf for fewer than `problem.fewest_stages`. `values` is the list that `sweep`
    returned.
    """
    enough = problem.fewest_stages - 1
    return np.array([np.inf if k < enough else value[0, :, -1].min() for k, value in enumerate(values)])


def trace(
    problem: StageProblem, values: Sequence[Floats], live: Sequence[int], send_count: int, cap: float
) -> tuple[Stage, ...]:
    """
    Return the stages, first to last, that have the least value in `values`, which is what `sweep` returned for the same
    `problem`, `live`, `send_count` and `cap`. Call it only if `join` added seconds up: those of a micro-batch in each
    stage and, for the first stage, those once per step.
    """
    count = int(np.argmin(least_by_stages(problem, values)))
    table = problem.table
    first, left, layout = 0, problem.devices, slice(None)
    stages: list[Stage] = []
    for k in range(count, -1, -1):
        behind = values[k - 1] if k else nothing_behind(problem)
        after = np.stack([value_after(problem, behind, send_count, size)[..., left] for size in table.parts], axis=1)
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
