"""
The least makespan of a small graph as a pipeline by trying everything: parts of the machine, micro-batches, every
placement of the operators on a part, every cut, every synchronous schedule.

Placements are those of `brute`, each priced as `search.pipeline.rows` prices the one that is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from random import Random

import numpy as np
from brute import Brute, Distances
from small import given, op, weight, whole

from unity_ir.cost.plan import cost, norm_seconds
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, part, part_counts
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.micro_batches import micro_batch
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.orders import TRIED, ScheduleKind
from unity_ir.search.pipeline.ranges import CountedSchedule, StageRanges
from unity_ir.search.pipeline.rows import UnitRows, priced_units

Pair = tuple[int, int]
"""Numbers of parts and of micro-batches."""


def trunk(seed: int, size: int) -> Graph:
    """Return a random graph of `size` operators, mostly a chain, over 4 or 8 samples, with weights and a loss."""
    random = Random(seed)
    rows = random.choice((4, 8))
    widths = (4, 8, 24)
    x = given("x", rows, random.choice(widths))
    made = [x]
    for i in range(size - 1):
        last = made[-1]
        columns = last.shape[1]
        alike = [v for v in made[:-1] if v.shape == last.shape]
        kind = random.choice(("matmul", "matmul", "matmul", "relu", "add", "mul", "softmax", "skip"))
        if kind == "matmul" or i == 0:
            last = op("matmul", last, weight(f"w{i}", columns, random.choice(widths)))
        elif kind == "skip" and alike:
            last = op("add", last, random.choice(alike))
        elif kind in ("add", "mul"):
            last = op(kind, last, weight(f"b{i}", columns))
        else:
            last = op("softmax" if kind == "softmax" else "relu", last)
        made.append(last)
    return whole(op("mse", made[-1], given("target", *made[-1].shape)))


def least_pipelines(graph: Graph, machine: Machine, optimizer: Optimizer, room: int) -> dict[Pair, float]:
    """
    Return the least makespan of every pair of parts and micro-batches, in seconds. Raises `TooMany` where operators
    have more than `room` placements together.
    """
    found = least_by_schedule(graph, machine, optimizer, room)
    return {pair: min(each.values()) for pair, each in found.items()}


def least_by_schedule(
    graph: Graph, machine: Machine, optimizer: Optimizer, room: int
) -> dict[Pair, dict[ScheduleKind, float]]:
    """
    Return the least makespan of every pair of parts and micro-batches under each schedule by which it fits, in seconds.
    Raises `TooMany` where operators have more than `room` placements together.
    """
    samples = graph.inputs[0].types[0].shape[0]
    found: dict[Pair, dict[ScheduleKind, float]] = {}
    for parts in part_counts(machine)[1:]:
        own = part(machine, parts)
        distances = Distances(own)
        for m in (m for m in range(2, samples + 1) if samples % m == 0):
            try:
                small = micro_batch(graph, sample_dims(graph), m)
            except UnityError:
                continue
            if len(units(small).parts) >= parts:
                rows = list(_placements(small, own, optimizer, distances, m, room))
                found[parts, m] = dict(_makespans(rows, machine, optimizer, parts, m))
    return found


def _placements(
    graph: Graph, machine: Machine, optimizer: Optimizer, distances: Distances, micro_batches: int, room: int
) -> Iterator[UnitRows]:
    """Yield the rows of every placement, once each."""
    brute = Brute(graph, machine, optimizer, distances, room)
    known: set[tuple[bytes, object]] = set()
    for choice in product(*(range(len(brute.ways[node])) for node in brute.operators)):
        plan = brute.plan(choice)
        rows = priced_units(cost(plan, machine, optimizer), plan, optimizer, micro_batches).rows
        times = np.stack([rows.forward, rows.input_gradient, rows.weight_gradient, rows.once])
        key = times.tobytes(), (rows.sent, rows.tied)
        if key not in known:
            known.add(key)
            yield rows


def _makespans(
    rows: list[UnitRows], machine: Machine, optimizer: Optimizer, parts: int, micro_batches: int
) -> Iterator[tuple[ScheduleKind, float]]:
    last = norm_seconds(optimizer, machine)
    ranges = [StageRanges([each], machine, parts, machine.device.usable, last) for each in rows]
    for name, chunks in TRIED:
        if parts * chunks > rows[0].count:
            continue
        try:
            order = CountedSchedule.of(pipeline_schedule(name, parts, micro_batches, chunks))
        except UnityError:
            continue
        every = product(combinations(range(1, rows[0].count), parts * chunks - 1), ranges)
        fitting = [found[1] for cuts, each in every if (found := each.makespan(cuts, order, optimizer.clip > 0))]
        if fitting:
            yield (name, chunks), min(fitting)
