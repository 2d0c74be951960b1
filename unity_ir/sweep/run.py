"""Answer all points of a grid: those that share a graph and a mesh together, in one process or several."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import process_time

from unity_ir.cost.work import model_flops
from unity_ir.machine.model import Machine
from unity_ir.pcg.mixed_precision import mixed_precision_options
from unity_ir.pcg.optimizer import Optimizer, optimizer_of
from unity_ir.search.baselines.recipe import has_sequence
from unity_ir.sweep.grid import Point, graph_of, machine_tables, mesh_key, samples
from unity_ir.sweep.monotone import monotone
from unity_ir.sweep.point import Answer
from unity_ir.sweep.programs import figures
from unity_ir.sweep.recipes import read_recipe
from unity_ir.sweep.search import JOINT, Best, Joint, PointSearch
from unity_ir.sweep.store import Store

Progress = Callable[[Sequence[Answer]], None]
"""Called with the answers of points that share a graph and a mesh, once they are found."""


@dataclass(frozen=True)
class How:
    """
    How a sweep searches its points: the element type of mixed precision (None for none), the optimizer to train with,
    whether pipelines are searched, and at which points the joint search (over rewritten graphs and layouts) runs, too.
    """

    mixed: str | None = None
    optimizer: str = "sgd"
    has_stages: bool = False
    joint: Joint = "none"


def sweep(
    points: Sequence[Point], how: How, store: Store, jobs: int = 1, progress: Progress | None = None
) -> list[Answer]:
    """
    Find the fastest step at each point; return the answers in the order of `points`. No answer is slower than the step
    of another point that can be run at its own (`monotone`). `how` says how to search: precision, optimizer, pipelines,
    joint search. Points with equal models and machines are searched once; those that `store`, a folder of answers, has
    are read from it, others are written to it.

    `jobs` forked processes share the work (1: this process does it). `progress` is called in this process, whenever a
    group of points with the same model and mesh is done, with their answers. Raises `UnityError` where a point's model
    or machine is impossible.
    """
    answers: dict[str, Answer] = {}
    first: dict[str, Point] = {}
    for point in points:
        first.setdefault(_key(point), point)
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in first.values():
        groups.setdefault((point.text, mesh_key(point.changed_machine())), []).append(point)
    work = partial(_answers, how=how, store=store)
    for found in _each(work, _shared(list(groups.values()), jobs), jobs):
        answers.update({_key(answer.point): answer for answer in found})
        if progress is not None:
            progress(found)
    return monotone([replace(answers[_key(point)], point=point) for point in points])


def _key(point: Point) -> str:
    return json.dumps([point.text, machine_tables(point.changed_machine())], sort_keys=True)


def _shared(groups: list[list[Point]], jobs: int) -> list[list[Point]]:
    """Return groups of points, those that take longest first, cut in two until there is one for each process."""

    def seconds(group: Sequence[Point]) -> float:
        micro_batches = samples(group[0].text) / group[0].changed_machine().devices
        return (len(group) + 4) * (1 + min(micro_batches, 4))

    while len(groups) < jobs and max(map(len, groups), default=0) > 1:
        groups.sort(key=len)
        last = sorted(groups.pop(), key=lambda p: figures(p.changed_machine()))
        groups += [last[: len(last) // 2], last[len(last) // 2 :]]
    return sorted(groups, key=seconds, reverse=True)


def _each(
    work: Callable[[list[Point]], list[Answer]], groups: Sequence[list[Point]], jobs: int
) -> Iterator[list[Answer]]:
    """Yield the answers of each group, in this process or in forked ones, as they are found."""
    if jobs == 1 or len(groups) < 2:
        yield from map(work, groups)
        return
    with multiprocessing.get_context("fork").Pool(jobs, _begin) as pool:
        yield from pool.imap_unordered(work, groups)


def _begin() -> None:
    """Leave Ctrl-C to the first process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _answers(points: list[Point], how: How, store: Store) -> list[Answer]:
    """Return the answers of points that share a graph and a mesh, from slow to fast machines."""
    known = {point: store.read(point) for point in points}
    if (found := [answer for answer in known.values() if answer is not None]) and len(found) == len(points):
        return found
    start = process_time()
    machines = {point: point.changed_machine() for point in points}
    order = sorted(points, key=lambda p: (figures(machines[p]), machines[p].device.usable))
    search = PointSearch(
        points[0].text,
        how.mixed,
        [machines[p] for p in order],
        Optimizer(how.optimizer),
        how.has_stages,
        how.joint,
    )
    about = _about(points[0], machines[points[0]], how)
    answers: dict[Point, Answer] = {}

    def add(point: Point, best: Best | None, processor: float) -> None:
        answers[point] = _answer(point, machines[point], about, search.bound(machines[point]), best, processor)
        store.write(answers[point])

    for point in order:
        answer = known[point]
        if answer is None:
            best = search.best(machines[point])
            add(point, best, process_time() - start)
            start = process_time()
        else:
            answers[point] = answer
            if answer.recipe not in (None, JOINT):
                search.plan_recipe(read_recipe(answer.recipe), machines[point])
    for point in order:
        # Programs that were found later.
        best, was = search.best_known(machines[point]), answers[point]
        if best is not None and (was.seconds is None or best.seconds < was.seconds):
            add(point, best, was.processor)
    return [answers[point] for point in points]


@dataclass(frozen=True)
class _About:
    """What the points of a group have in common."""

    mesh: str
    samples: int
    flops: float
    has_sequence: bool


def _about(point: Point, machine: Machine, how: How) -> _About:
    graph = graph_of(point.text, how.mixed)
    mesh = hashlib.sha256(f"{point.family} {mesh_key(machine)}".encode()).hexdigest()[:16]
    kinds = machine.device.flops
    mixed = how.mixed and str(mixed_precision_options(how.mixed)["type"])
    dtype = mixed or ("f32" if "f32" in kinds else next(iter(kinds)))
    flops = model_flops(graph) / machine.devices / machine.device.peak(dtype)
    return _About(mesh, samples(point.text), flops, has_sequence(graph))


def _answer(point: Point, machine: Machine, about: _About, bound: float, best: Best | None, processor: float) -> Answer:
    answer = Answer(
        point,
        about.mesh,
        figures(machine),
        machine.device.usable,
        machine.devices,
        about.samples,
        about.flops,
        bound,
        processor=processor,
    )
    if best is None:
        return answer
    recipe = JOINT if best.recipe is None else best.recipe.text(about.has_sequence)
    return replace(answer, bound=best.bound, seconds=best.seconds, memory=best.memory, recipe=recipe)


def check_how(how: How) -> None:
    """
    Raise `UnityError` if `how.optimizer` is not the name of an optimizer. `unity-sweep` calls it before it searches.
    """
    optimizer_of("sweep", how.optimizer, {})
