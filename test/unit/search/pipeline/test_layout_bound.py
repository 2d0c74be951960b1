"""No pipeline takes less than the bound, whatever its layouts, stages and schedule, nor does a range of units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from random import Random

import numpy as np
import pytest
from graphs import boxes, with_memory

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import part
from unity_ir.models import from_text
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.exact.solver import ExactPlan
from unity_ir.search.layouts.axes import Floats
from unity_ir.search.layouts.objective import Price
from unity_ir.search.pipeline import layout_bound, range_bound
from unity_ir.search.pipeline.equal import PipelineSearch
from unity_ir.search.pipeline.layout_bound import LayoutBounds
from unity_ir.search.pipeline.orders import TRIED
from unity_ir.search.pipeline.range_bound import range_bounds
from unity_ir.search.pipeline.ranges import CountedSchedule, StageRanges
from unity_ir.search.pipeline.rows import UnitRows, priced_units

OPTIMIZER = Optimizer("adamw")

MODELS = (
    "mlp,batch=32,layers=4,hidden=32",
    "gpt2,batch=8,sequence=16,layers=2,hidden=32,heads=2,vocabulary=64",
    "gpt2,batch=8,sequence=16,layers=7,hidden=32,heads=2,vocabulary=64",
)

MACHINES = {
    "slow": boxes(2, 2, overhead=1e-7, bandwidth=1e8),
    "fast": boxes(2, 2, overhead=1e-9, bandwidth=1e11),
    "four": boxes(2, 4, overhead=1e-8, bandwidth=1e9),
}


def plans(small: Graph, search: PipelineSearch, stages: int, m: int) -> Iterator[UnitRows]:
    """Rows of the best layouts at several prices of a byte, and of random ones."""
    on, solver = part(search.machine, stages), search.solver(stages, m)
    for byte in (0.0, 1e-12, 1e-10, 1e-8):
        priced = solver.with_price(replace(solver.price, byte=byte))
        yield search.priced(small, search.solved(small, priced), priced, m).rows
    for seed in range(8):
        placed = sample(small, on, seed)
        yield priced_units(cost(placed, on, OPTIMIZER), placed, OPTIMIZER, m).rows


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_no_pipeline_is_faster_than_the_bound(model: str, name: str):
    machine, p, m = MACHINES[name], 2, 4
    search = PipelineSearch(from_text(model), machine, OPTIMIZER)
    whole, split = LayoutBounds(search, is_split=False), LayoutBounds(search, is_split=True)
    least = {False: whole.of_layouts(p, m), True: split.of_layouts(p, m)}
    assert 0 < whole.of_kernels(p, m) <= whole.of_kernels_that_fit(p, m) <= whole.of_some_layouts(p, m) <= least[False]
    assert least[True] <= least[False]
    work = split.work_of_layouts(p, m)
    assert 0 < split.work_of_kernels(p, m) <= work <= least[True]
    best = {False: float("inf"), True: float("inf")}
    orders = [CountedSchedule.of(pipeline_schedule(name, p, m)) for name, chunks in TRIED if chunks == 1]
    several = [CountedSchedule.of(pipeline_schedule(name, p, m, chunks)) for name, chunks in TRIED if chunks == 2]
    for rows in plans(search.small(m), search, p, m):
        ranges = StageRanges([rows], machine, p, machine.device.usable)
        for cuts, order in product(combinations(range(1, rows.count), p - 1), orders):
            found = ranges.makespan(cuts, order, False, best[order.is_split])
            if found is not None:
                best[order.is_split] = min(best[order.is_split], found[1])
        for order in several:
            for cuts in combinations(range(1, min(rows.count, 9)), order.schedule.stages - 1):
                found = ranges.makespan(cuts, order, False)
                assert found is None or work <= found[1] * (1 + 1e-9)
    assert least[False] <= best[False] * (1 + 1e-9)
    assert least[True] <= min(best.values()) * (1 + 1e-9)
    if name == "fast" and model in MODELS[1:]:
        # Where neither sends nor a single unit count for much.
        assert best[False] <= 1.3 * least[False]


@pytest.mark.slow
def test_gradients_of_weights_wait_for_no_other_part():
    """With more parts than micro-batches, gradients of weights are made while other parts compute, and delay none."""
    machine, p, m = boxes(2, 4, overhead=0.0, bandwidth=1e14), 8, 2
    search = PipelineSearch(from_text("mlp,batch=4096,layers=8,hidden=512,classes=512"), machine, Optimizer())
    whole, split = LayoutBounds(search, is_split=False), LayoutBounds(search, is_split=True)
    halves, v = (search.plan(p, m, kind).makespan for kind in (("zb-h1", 1), ("zb-v", 2)))
    work = split.work_of_kernels(p, m), split.work_of_layouts(p, m)
    assert 0 < max(work) <= min(halves, v)
    assert max(*work, split.of_layouts(p, m)) <= halves < whole.work_of_kernels(p, m)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("name", MACHINES)
def test_no_range_of_units_takes_less_than_its_bound(name: str, in_blocks: bool, monkeypatch: pytest.MonkeyPatch):
    """Layouts are changed at random while that makes the range faster, whatever becomes of the others."""
    machine, p, m, random = MACHINES[name], 2, 4, Random(1)
    search = PipelineSearch(from_text(MODELS[0]), machine, OPTIMIZER)
    small, solver = search.small(m), search.solver(p, m).with_price(Price(once=0.0))
    if in_blocks:
        monkeypatch.setattr(range_bound, "PAIRS", 0)
    bound = range_bounds(small, solver, 9, 3)
    best = search.solved(small, solver)
    count = len(bound) - 1
    assert bound[0, count] <= best.seconds
    assert in_blocks or bound[0, count] == pytest.approx(best.seconds, rel=1e-3)

    def seconds(plan: ExactPlan) -> Floats:
        rows = search.priced(small, plan, solver, m).rows
        return rows.forward + rows.input_gradient + rows.weight_gradient

    for i, j in random.sample(list(combinations(range(count + 1), 2)), 6):
        plan, least = best, float(seconds(best)[i:j].sum())
        for _ in range(60):
            node = random.choice([*plan.rows])
            rows = len(solver.table(node, nodes_with_gradient(small)))
            layouts = {v: random.randrange(len(solver.space(v))) for v in plan.layouts if not v.node.is_leaf}
            rest = layouts if random.random() < 0.3 else {}
            other = replace(plan, rows={**plan.rows, node: random.randrange(rows)}, layouts={**plan.layouts, **rest})
            found = float(seconds(other)[i:j].sum())
            if found < least:
                plan, least = other, found
        assert bound[i, j] <= least * (1 + 1e-9), (i, j)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS[:2])
@pytest.mark.parametrize("byte", [0.0, 0.2, 1.6])
def test_no_range_costs_less_than_its_bound_at_the_prices_of_bounds(byte: float, model: str):
    """
    At prices of bytes held and of live micro-batches, whatever is recomputed: with gradients added up over
    micro-batches, and a weight that two units read (GPT-2's embedding), which may be added up with the later one.
    """
    p, m = 2, 4
    search = PipelineSearch(from_text(model), MACHINES["fast"], OPTIMIZER)
    bounds, every = LayoutBounds(search, is_split=False), [*plans(search.small(m), search, p, m)]
    price = bounds.byte_price(p, m, byte)
    for live in (1, m):
        found = bounds.costs_of_ranges(p, m, price, live, 0.0)
        for rows in every:
            each = rows.forward + rows.input_gradient + rows.weight_gradient + price * rows.held
            for again, bytes in zip(rows.again, rows.live, strict=True):
                sums = np.concatenate([[0.0], np.cumsum(each + again + price * live * bytes)])
                assert (found <= np.maximum(sums[None, :] - sums[:, None], 0.0) * (1 + 1e-9)).all()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS[1:])
def test_where_memory_is_short_the_bound_is_below_what_fits(model: str, monkeypatch: pytest.MonkeyPatch):
    """At every price of a byte: without the price of all memory taken off, it would be above."""
    machine, graph = boxes(2, 2, overhead=1e-9, bandwidth=1e11), from_text(model)
    alone = PipelineSearch(graph, machine, OPTIMIZER)
    wide = alone.plan(2, 4, ("1f1b", 1))
    least = LayoutBounds(alone, is_split=False).of_layouts(2, 4)
    for share in (0.9, 0.75):
        search = PipelineSearch(graph, with_memory(machine, int(share * max(wide.peaks))), OPTIMIZER)
        makespan = search.plan(2, 4, ("1f1b", 1)).makespan
        with suppress(UnityError):  # it holds more, and may not fit
            makespan = min(makespan, search.plan(2, 4, ("eager-1f1b", 1)).makespan)
        for prices in ((0.1,), (0.5,), (2.0,), (0.1, 0.4, 1.6)):
            monkeypatch.setattr(layout_bound, "BYTE_PRICES", prices)
            bound = LayoutBounds(search, is_split=False).of_layouts(2, 4)
            assert least * (1 - 1e-9) <= bound <= makespan
