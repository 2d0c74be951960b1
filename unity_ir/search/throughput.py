"""
Search for pipelines as Unity's paper does (section 5, "Pipeline parallelism"): for the most samples per second, so for
the least time of the slowest stage.

All operators are in the pipeline, its stages are sequential, and steps overlap as in PipeDream-2BW, so fill and drain
are ignored. On each number of equal parts of the machine Unity's search finds the layouts of a micro-batch on one part;
it is cut where the slowest stage is the fastest, what it does once per step included (`search/pipeline/staged.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import gcd

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.machine.parts import part, part_counts
from unity_ir.pcg.graph import Graph, erase
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.result import SearchResult

SCHEDULE = "2bw"
"""The schedule that Unity's pipelines are run by: 1F1B that never drains."""

FAR = 1.15
"""More stages are not tried once fewer of them were faster by this factor."""

Search = Callable[[Stages, int], SearchResult]
"""Finds the plan of so many stages and micro-batches."""


def most_throughput(
    graph: Graph, machine: Machine, search: Search, seconds: Callable[[SearchResult], float], micro_batches: int | None
) -> SearchResult | None:
    """
    Return the fastest pipeline that `search(stages, number of micro-batches)` finds, over numbers of stages (one on
    each equal part of `machine`) and of micro-batches; None if it finds none. The fastest has the least
    `seconds(result)`, the time from one step to the next. A given `micro_batches` is their only number tried.

    The schedule (PipeDream-2BW) keeps two versions of the weights, which is enough only if a step has at least as many
    micro-batches as stages; fewer are not tried. Both numbers are tried in ascending order: those of micro-batches
    until a larger one is slower, as fewer and larger micro-batches fill devices better; those of stages until the time
    is more than `FAR` (1.15) times the best. Pairs for which `search` raises `UnityError` are skipped.
    """
    best: tuple[float, SearchResult] | None = None
    for parts in _parts(machine):
        least: float | None = None
        for count in _counts(graph, parts, micro_batches):
            with suppress(UnityError):
                found = search(Stages(parts, SCHEDULE), count)
                now = seconds(found)
                if best is None or now < best[0]:
                    best = now, found
                if least is not None and now > least:
                    break
                least = now
        if best is not None and least is not None and least > FAR * best[0]:
            break
    return None if best is None else best[1]


def _parts(machine: Machine) -> Iterator[int]:
    """Yield the numbers of equal parts of a machine, from 2 on."""
    for count in part_counts(machine)[1:]:
        with suppress(UnityError):
            part(machine, count)
            yield count


def _counts(graph: Graph, parts: int, given: int | None) -> list[int]:
    """Return the numbers of micro-batches to try with so many stages, ascending: each about twice the one before."""
    if given is not None:
        return [given] if given >= parts else []
    serial = erase(graph)
    dims = sample_dims(serial)
    samples = gcd(*(node.result.shape[dim] for node in serial.inputs if (dim := dims.get(node.name)) is not None))
    found: list[int] = []
    for count in (m for m in range(parts, samples + 1) if samples % m == 0):
        if not found or count >= 2 * found[-1]:
            found.append(count)
    return found
