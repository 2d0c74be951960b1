"""
Choose the stages of a pipeline: ranges of layers, the part of the machine for each, layouts between, and options such
as recompute, exactly.

Stages are chosen to minimise the time of 1F1B as planners take it (Alpa: Zheng et al., OSDI 2022, section 5),

    sum of t + 2 (sum of sends) + (m - 1) (largest t) + once of the first stage,      t = forward + backward,

where a stage fits its devices with the micro-batches that 1F1B holds there: min(m, stages from it on). It is a formula,
neither the time of a schedule nor a bound of it: candidates are simulated afterwards (`choose`).

For one cap on t the rest is a sum, minimised by dynamic programming from the last layer to the first; state: first
layer, devices left over, stages so far (which say how many micro-batches are live), layout. Caps are lowered as in
Alpa, but exactly: with sum s found under a cap and the best time T so far, a better choice has its largest t below
(T - s) / (m - 1), which is the next cap, until it is below the least that there is.

The same recursion with `max` in place of the sum minimises the bound of `bound.py` over all choices of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from unity_ir.errors import UnityError
from unity_ir.search.pipeline.table import Floats, StageOption, StageTable
from unity_ir.simulate.pipeline import StageSeconds

Join = Callable[[Floats, Floats, Floats, Floats], Floats]
"""Given a stage's seconds, its forward's, its seconds once, and the value of the stages behind it: that of all."""

Bools = npt.NDArray[np.bool_]

Orders = Literal["1f1b", "whole", "split"]


@dataclass(frozen=True)
class StageProblem:
    """
    What stages are chosen for: `devices` of `memory` bytes each, `micro_batches` per step, at most `most_stages` (by
    default as many as there are layers and devices).

    `sends[i, a]` are the seconds of a value, or its gradient, in layout a between the stages before and from layer i.
    """

    table: StageTable
    devices: int
    micro_batches: int
    memory: float = float("inf")
    sends: Floats | None = None
    most_stages: int | None = None

    def __post_init__(self) -> None:
        layers, most = self.table.layers, self.most_stages
        if self.devices < 1 or self.micro_batches < 1 or (most is not None and most < 1):
            raise UnityError("pipeline: devices, micro-batches and stages must be at least 1")
        for what, there in (("layers", layers), ("devices", self.devices)):
            if most is not None and most > there:
                raise UnityError(f"pipeline: {most} stages for {there} {what}; use at most {there}")
        shape = (layers + 1, self.table.layouts)
        if self.sends is not None and (self.sends.shape != shape or not (self.sends >= 0).all()):
            raise UnityError(f"pipeline: sends must be {shape[0]} by {shape[1]} numbers of at least 0")

    @property
    def stages(self) -> int:
        """Return the most stages that are tried."""
        return self.most_stages or min(self.table.layers, self.devices)

    @cached_property
    def send_seconds(self) -> Floats:
        if self.sends is None:
            return np.zeros((self.table.layers + 1, self.table.layouts))
        return self.sends

    def fitting(self, live: int, cap: float, first: int | slice = slice(None)) -> Floats:
        """
        Return the seconds of the options that begin at layer `first`, as in the table, inf for those of more seconds
        than `cap`, or that do not fit with so many micro-batches live.
        """
        table = self.table
        seconds, held, each = (array[:, first] for array in (table.seconds, table.held, table.live))
        return np.where((held + live * each <= self.memory) & (seconds <= cap), seconds, np.inf)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` .. `last` - 1 on a part of so many devices, run as `option` says."""

    first: int
    last: int
    devices: int
    option: StageOption


@dataclass(frozen=True)
class StageChoice:
    """The stages of least `formula`, seconds; `send` are those between them. `passes` is how many caps were tried."""

    stages: tuple[Stage, ...]
    formula: float
    send: tuple[float, ...]
    passes: int = 1

    @property
    def seconds(self) -> StageSeconds:
        """Return the seconds of the stages, for simulation; with halves of backwards if all options say them."""
        options = [stage.option for stage in self.stages]
        halves = [o.input_gradient for o in options if o.input_gradient is not None]
        is_split = len(halves) == len(options)
        return StageSeconds(
            tuple(o.forward for o in options),
            tuple(o.backward for o in options),
            tuple(halves) if is_split else (),
            tuple(o.backward - half for o, half in zip(options, halves, strict=True)) if is_split else (),
            self.send,
            tuple(o.once for o in options),
        )


def choose_stages(problem: StageProblem) -> StageChoice:
    """
    Return the stages of least formula; of equal ones any.

    Raises `UnityError` if no stages fit.
    """
    m, live = problem.micro_batches, _live_1f1b(problem)
    windows = _Windows(problem)
    # By the number of stages: the least sum under the last cap, and the least largest stage.
    sums, found = _under(problem, live, windows, np.inf)
    if found is None:
        raise UnityError(
            f"pipeline: no stages of {problem.table.layers} layers fit {problem.devices} devices of "
            f"{problem.memory:,.0f} bytes; use more devices, more recompute, or smaller micro-batches"
        )
    if m == 1:
        return found
    lowest = _totals(_sweep(problem, live, _largest, 0))
    # A first good choice, from the number of stages that promises most.
    _, other = _under(problem, live, windows, float(lowest[np.argmin(sums + (m - 1) * lowest)]))
    best, passes = _better(found, other), 2
    while found is not None:
        is_open = sums + (m - 1) * lowest < best.formula
        if not is_open.any():
            break
        live = live[: int(np.flatnonzero(is_open)[-1]) + 1]
        lowest = lowest[: len(live)]
        # Rounding must not keep the cap where it is.
        largest = max(stage.option.seconds for stage in found.stages)
        cap = float(np.nextafter(min(largest, ((best.formula - sums[is_open]) / (m - 1)).max()), 0))
        if cap < lowest.min():
            break
        sums, found = _under(problem, live, windows, cap)
        best, passes = _better(best, found), passes + 1
    return replace(best, passes=passes)


def _under(
    problem: StageProblem, live: Sequence[int], windows: _Windows, cap: float
) -> tuple[Floats, StageChoice | None]:
    """Return the least sums under a cap, by the number of stages, and the stages of the least of these."""
    values = _sweep(problem, live, _formula, 2, cap, windows.at(cap))
    sums = _totals(values)
    if sums.min() == np.inf:
        return sums, None
    stages = _trace(problem, values, cap)
    send = tuple(float(problem.send_seconds[s.first, s.option.layout_in]) for s in stages[1:])
    largest = max(stage.option.seconds for stage in stages)
    return sums, StageChoice(stages, float(sums.min()) + (problem.micro_batches - 1) * largest, send)


def _better(choice: StageChoice, other: StageChoice | None) -> StageChoice:
    return choice if other is None or choice.formula <= other.formula else other


def least_bound(problem: StageProblem, orders: Orders) -> float:
    """
    Return a lower bound, in seconds, of the makespan of all choices of at most `most_stages` stages, under all orders
    of a family.

    `1f1b`: synchronous orders with whole backwards that hold at least as many micro-batches as 1F1B; `whole`: all with
    whole backwards; `split`: also those with backwards in halves. inf if no stages fit.
    """
    m = problem.micro_batches

    def join(t: Floats, forward: Floats, once: Floats, behind: Floats) -> Floats:
        return np.maximum(m * t + once, (forward if orders == "split" else t) + behind)

    live = _live_1f1b(problem) if orders == "1f1b" else [1] * problem.stages
    return float(_totals(_sweep(problem, live, join, 1 if orders == "split" else 2)).min())


def _formula(t: Floats, forward: Floats, once: Floats, behind: Floats) -> Floats:
    """Return the sums of the formula, all but the largest stage."""
    return t + once + behind


def _largest(t: Floats, forward: Floats, once: Floats, behind: Floats) -> Floats:
    return np.maximum(t, behind)


def _live_1f1b(problem: StageProblem) -> list[int]:
    """Return the micro-batches that 1F1B holds live at the last stage, the one before it, .."""
    return [min(problem.micro_batches, k + 1) for k in range(problem.stages)]


def _nothing_behind(problem: StageProblem) -> Floats:
    """Return the value of no stages, [first layer, layout, devices]: 0 behind the last layer."""
    value = np.full((problem.table.layers + 1, problem.table.layouts, problem.devices + 1), np.inf)
    value[-1] = 0
    return value


def _totals(values: Sequence[Floats]) -> Floats:
    """Return the values of all layers on all devices, by the number of stages."""
    return np.array([value[0, :, -1].min() for value in values])


class _Windows:
    """
    Which numbers of devices matter for the layers from i on: enough for these under a cap, and few enough to leave
    enough for the layers before. Close to the lowest cap these are few. Found without layouts, and with one micro-batch
    live.
    """

    def __init__(self, problem: StageProblem) -> None:
        seconds = problem.fitting(1, np.inf).min(axis=(0, 4, 5))
        square = np.concatenate([seconds, np.full_like(seconds[:1], np.inf)])
        self.behind = _bottleneck(square, problem)
        # The layers before are those behind, seen from the other end.
        self.before = _bottleneck(square[::-1, ::-1].transpose(1, 0, 2), problem)[::-1]

    def at(self, cap: float) -> list[slice]:
        """Return, for each first layer, the devices that matter."""
        least, before = ((array > cap).sum(axis=1) for array in (self.behind, self.before))
        most = self.behind.shape[1] - before
        return [slice(int(low), int(high)) for low, high in zip(least, most, strict=True)]


def _bottleneck(seconds: Floats, problem: StageProblem) -> Floats:
    """Return the least largest stage of the layers from i on, on at most d devices, given [first, last, part]."""
    value = np.full((problem.table.layers + 1, problem.devices + 1), np.inf)
    value[-1] = 0
    for i in reversed(range(problem.table.layers)):
        for part, size in enumerate(problem.table.parts):
            if size <= problem.devices:
                stage = np.maximum(seconds[i, i + 1 :, part, None], value[i + 1 :, : problem.devices + 1 - size])
                np.minimum(value[i, size:], stage.min(axis=0), out=value[i, size:])
    return value


def _sweep(
    problem: StageProblem,
    live: Sequence[int],
    join: Join,
    trips: int,
    cap: float = np.inf,
    windows: Sequence[slice] | None = None,
) -> list[Floats]:
    """
    Return the least value of k + 1 stages, for each k: [first layer, layout of its input, most devices]; of the first
    layer with all devices only.

    The k-th stage from the last has `live[k]` micro-batches live; `trips` times the seconds of a send are between
    stages. Options of more seconds than `cap` are left out, and numbers of devices outside of `windows`.
    """
    table = problem.table
    values: list[Floats] = []
    behind = _nothing_behind(problem)
    windows = windows or [slice(0, problem.devices + 1)] * (table.layers + 1)
    for k in live:
        seconds = problem.fitting(k, cap)
        least = seconds.min(axis=0)
        least_forward = np.where(np.isfinite(seconds), table.forward, np.inf).min(axis=0)
        reached = np.stack([_after(problem, behind, trips, size) for size in table.parts], axis=1)
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


def _after(problem: StageProblem, behind: Floats, trips: int, devices: int) -> Floats:
    """Return the value behind a stage on so many of the devices, with the sends to what is behind it."""
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


def _trace(problem: StageProblem, values: Sequence[Floats], cap: float) -> tuple[Stage, ...]:
    """Return stages that have the least of the values under the formula."""
    count = int(np.argmin(_totals(values)))
    table = problem.table
    live = _live_1f1b(problem)
    first, left, layout = 0, problem.devices, slice(None)
    stages: list[Stage] = []
    for k in range(count, -1, -1):
        behind = values[k - 1] if k else _nothing_behind(problem)
        after = np.stack([_after(problem, behind, 2, size)[..., left] for size in table.parts], axis=1)
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
