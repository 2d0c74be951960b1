"""
Choose the stages of a pipeline: ranges of layers, the part of the machine for each, layouts between, and options such
as recompute, exactly.

Stages are chosen to minimise the time of 1F1B as planners take it (Alpa: Zheng et al., OSDI 2022, section 5),

    sum of t + 2 (sum of sends) + (m - 1) (largest t) + once of the first stage,      t = forward + backward,

where a stage fits its devices with the micro-batches that 1F1B holds there: min(m, stages from it on). It is a formula,
neither the time of a schedule nor a bound of it: schedules are simulated afterwards (`fastest`).

For one cap on t the rest is a sum, minimised by dynamic programming from the last layer to the first; state: first
layer, devices left over, stages so far (which say how many micro-batches are live), layout. Caps are lowered as in
Alpa, but exactly: with sum s found under a cap and the best time T so far, a better choice has its largest t below
(T - s) / (m - 1), which is the next cap, until it is below the least that there is.

The same recursion with `max` in place of the sum minimises the bound of `bound.py` over all choices of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.search.pipeline.problem import StageChoice, StageProblem
from unity_ir.search.pipeline.sweep import least_by_stages, sweep, trace
from unity_ir.search.pipeline.table import Floats
from unity_ir.search.pipeline.windows import DeviceWindows

Orders = Literal["1f1b", "whole", "split"]


def choose_stages(problem: StageProblem) -> StageChoice:
    """
    Return the stages that take the least time of a step by 1F1B's formula (Alpa's, see the module; schedules are
    simulated later), where each stage must fit its devices with the micro-batches that 1F1B holds there. Raises
    `UnityError` if no stages fit.
    """
    m, live = problem.micro_batches, live_1f1b(problem)
    windows = DeviceWindows(problem)
    # By the number of stages: the least sum under the last cap, and the least largest stage.
    sums, found = _under(problem, live, windows, np.inf)
    if found is None:
        raise UnityError(
            f"pipeline: no stages of {problem.table.layers} layers fit {problem.devices} devices of "
            f"{problem.memory:,.0f} bytes; use more devices, more recompute, or smaller micro-batches"
        )
    if m == 1:
        return found
    lowest = least_by_stages(problem, sweep(problem, live, _largest, 0))
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
    problem: StageProblem, live: Sequence[int], windows: DeviceWindows, cap: float
) -> tuple[Floats, StageChoice | None]:
    """Return the least sums under a cap, by the number of stages, and the stages of the least of these."""
    values = sweep(problem, live, _formula, 2, cap, windows.at(cap))
    sums = least_by_stages(problem, values)
    if sums.min() == np.inf:
        return sums, None
    stages = trace(problem, values, live, 2, cap)
    send = tuple(float(problem.send_seconds[s.first, s.option.layout_in]) for s in stages[1:])
    largest = max(stage.option.seconds for stage in stages)
    return sums, StageChoice(stages, float(sums.min()) + (problem.micro_batches - 1) * largest, send)


def _better(choice: StageChoice, other: StageChoice | None) -> StageChoice:
    return choice if other is None or choice.formula <= other.formula else other


def least_bound(problem: StageProblem, orders: Orders) -> float:
    """
    Return a lower bound in seconds on the makespan of every choice of `fewest_stages` to `most_stages` stages (of
    `problem`), under every schedule of the family `orders`; inf if no stages fit.

    The family `1f1b` is all synchronous schedules with whole backwards that hold at least as many micro-batches as
    1F1B; `whole` all synchronous ones with whole backwards; `split` also those with backwards in halves (input and
    weight gradients).
    """
    m = problem.micro_batches

    def join(t: Floats, forward: Floats, once: Floats, behind: Floats) -> Floats:
        return np.maximum(m * t + once, (forward if orders == "split" else t) + behind)

    live = live_1f1b(problem) if orders == "1f1b" else [1] * problem.stages
    return float(least_by_stages(problem, sweep(problem, live, join, 1 if orders == "split" else 2)).min())


def _formula(t: Floats, forward: Floats, once: Floats, behind: Floats) -> Floats:
    """Return the sums of the formula, all but the largest stage."""
    return t + once + behind


def _largest(t: Floats, forward: Floats, once: Floats, behind: Floats) -> Floats:
    return np.maximum(t, behind)


def live_1f1b(problem: StageProblem) -> list[int]:
    """
    Return how many micro-batches 1F1B holds at the last stage, at the one before it, and so on: [k] for the stage that
    k others follow, for as many stages as are tried (`problem.stages`).
    """
    return [min(problem.micro_batches, k + 1) for k in range(problem.stages)]
