"""
Put a plan of one part of a machine in stages: cut its graph into contiguous parts of about equal seconds, at values
that are all that later operators read of earlier ones (`pcg.layers.parts`) where there are enough of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from unity_ir.cost.plan import cost, update_time
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.machine.parts import part, send_seconds
from unity_ir.pcg.graph import Graph, Pipeline, erase_with
from unity_ir.pcg.layers import parts
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.stages import in_stages
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.search.pipeline.balance import balanced
from unity_ir.search.pipeline.orders import SYNCHRONOUS

DEFAULT_ORDER = "1f1b"
"""The schedule of stages if none is named."""

CHUNKS = 2
"""Stages per rank of schedules that are for any number of them."""


@dataclass(frozen=True, slots=True)
class Stages:
    """
    The stages that a user asks for: how many, and under which pipeline schedule. Raises `UnityError` for fewer than 2,
    for an unknown schedule, and for numbers of stages that the schedule is not for.
    """

    count: int
    order: str | None = None
    """The schedule's name; None is 1F1B or, of joint searches, the fastest schedule of one stage per part."""
    per_part: int | None = None
    """Stages per part, where the order is for any number of them; by default `CHUNKS`."""

    @staticmethod
    def of(count: int, schedule: str | None) -> Stages:
        """
        Return `count` stages under the schedule that the text `schedule` names, such as `1f1b`, or `interleaved:5` with
        5 stages per part. None names no schedule (see `Stages.order`). Raises `UnityError` if no number of 1 or more
        follows a colon, and as `Stages` does.
        """
        if schedule is None:
            return Stages(count)
        order, colon, chunks = schedule.partition(":")
        if colon and not (chunks.isdecimal() and int(chunks) > 0):
            raise UnityError(f"schedule: {schedule!a} has no number of stages per part after the colon")
        return Stages(count, order, int(chunks) if colon else None)

    def __post_init__(self) -> None:
        if self.count < 2:
            raise UnityError(f"stages: {self.count} is not a number of them; a pipeline has 2 or more")
        if self.order is not None and self.order not in ORDERS:
            raise UnityError(f"schedule: {self.order!a} is not one; there are {', '.join(ORDERS)}")
        known = ORDERS[self.order or DEFAULT_ORDER].chunks
        if self.per_part is not None and known is not None and self.per_part != known:
            raise UnityError(f"schedule: {self.order} is for {known} stages per part, not {self.per_part}")
        if self.count % self.pipeline.chunks:
            raise UnityError(
                f"stages: {self.order} has {self.pipeline.chunks} stages per part, which do not divide {self.count}"
            )
        if self.pipeline.ranks < 2:
            raise UnityError(
                f"stages: {self.order} has {self.pipeline.chunks} stages per part, so {self.count} are one part, which"
                f" is no pipeline; use {2 * self.pipeline.chunks} or more"
            )

    @property
    def pipeline(self) -> Pipeline:
        """The schedule's name, the number of its ranks (equal parts of the machine), and of stages per rank."""
        order = self.order or DEFAULT_ORDER
        chunks = ORDERS[order].chunks or self.per_part or CHUNKS
        return Pipeline(order, max(self.count // chunks, 1), chunks)

    @property
    def is_searched(self) -> bool:
        """
        Whether the strategy `joint` may choose which operators are in each stage: True if no schedule is named, or a
        synchronous one, whose step computes what the serial step does. Else the stages are cut after the search.
        """
        return self.order is None or self.order in SYNCHRONOUS

    def part(self, machine: Machine) -> Machine:
        """
        Return the machine that each rank has: one of the equal parts of `machine`. Raises `UnityError` where it has no
        such parts.
        """
        return part(machine, self.pipeline.ranks)

    def rank_of(self, micro_batches: int) -> tuple[int, ...]:
        """
        Return the rank that runs each stage, first to last, if a step has `micro_batches` (their number). Raises
        `UnityError` if the schedule cannot run that number.
        """
        pipeline = self.pipeline
        return pipeline_schedule(pipeline.order, pipeline.ranks, micro_batches, pipeline.chunks).rank_of


def staged(plan: Graph, stages: Stages, micro_batches: int, machine: Machine, optimizer: Optimizer) -> Graph:
    """
    Return the plan of one micro-batch on all of `machine` in stages, made from its `plan` on one part (`Stages.part`).
    Operators are cut into contiguous stages so that the longest is as short as possible, by its seconds of one
    micro-batch, forward and backward. If steps overlap (the schedule `2bw`), a stage's share of what is done once per
    step counts, too, and so do its sends. `micro_batches` is their number in a step.

    Raises `UnityError` for more stages than operators, and for numbers of micro-batches that the schedule is not for.
    """
    rank_of = stages.rank_of(micro_batches)
    is_asynchronous = ORDERS[stages.pipeline.order].is_asynchronous
    cut = _Cut(plan, stages.part(machine), optimizer, stages.count)
    if is_asynchronous:
        cut = _OverlappingCut(plan, stages.part(machine), optimizer, stages.count, machine, micro_batches)
    return replace(in_stages(plan, cut.stages(), rank_of, machine.mesh), pipeline=stages.pipeline)


class _Cut:
    """The cut of a plan into stages whose slowest is as fast as can be."""

    def __init__(self, plan: Graph, machine: Machine, optimizer: Optimizer, count: int):
        self.plan = plan
        self.machine = machine
        self.optimizer = optimizer
        self.count = count

    def stages(self) -> dict[Node, int]:
        """Return the stage of each compute node that a cut divides."""
        found: dict[Node, int] = {}
        seconds = [sum(self._seconds.get(n, 0.0) for n in atom) for atom in self._atoms]
        ends = balanced(seconds, self.count, self._sends)
        begin = 0
        for stage, end in enumerate(ends):
            found.update((node, stage) for atom in self._atoms[begin:end] for node in atom)
            begin = end
        return found

    @cached_property
    def _sends(self) -> Sequence[float]:
        """The seconds of a send, and of one back, behind each atom as far as they count."""
        return [0.0] * len(self._atoms)

    @cached_property
    def _atoms(self) -> list[list[Node]]:
        """What stages are made of, in graph order: parts between single values or, if too few, operators."""
        serial, serials = erase_with(self.plan)
        number = {node: i for i, each in enumerate(parts(serial)) for node in each.nodes}
        nodes = [n for n in self.plan.nodes() if n.is_compute and serials[n] in number]
        if len(nodes) < self.count:
            raise UnityError(f"stages: {self.count} of a model of {len(nodes)} operators with gradients; use fewer")
        if len(set(number.values())) < self.count:
            return [[node] for node in nodes]
        found: dict[int, list[Node]] = {}
        for node in nodes:
            found.setdefault(number[serials[node]], []).append(node)
        return [found[i] for i in sorted(found)]

    @cached_property
    def _seconds(self) -> dict[Node, float]:
        """The seconds of each operator of a micro-batch, forward and backward, with the moves of what it reads."""
        priced = cost(self.plan, self.machine, self.optimizer)
        found = {each.node: each.forward + each.backward for each in priced.operators}
        for reshard in priced.reshards:
            if reshard.value.node.op != "weight":
                seconds = sum(self.machine.move_time(move, dtype) for move, dtype in reshard.moves)
                found[reshard.users[0]] = found.get(reshard.users[0], 0.0) + seconds
        return found


class _OverlappingCut(_Cut):
    """
    The cut where steps overlap: of the slowest stage also what it does once per step counts, a part in each of
    `micro_batches`, and the sends behind it, since 1F1B waits for them there and back. It is between any operators.
    """

    def __init__(
        self, plan: Graph, part: Machine, optimizer: Optimizer, count: int, machine: Machine, micro_batches: int
    ):
        super().__init__(plan, part, optimizer, count)
        self.whole = machine
        self.micro_batches = micro_batches

    @cached_property
    def _atoms(self) -> list[list[Node]]:
        return [[node] for atom in super()._atoms for node in atom]

    @cached_property
    def _seconds(self) -> dict[Node, float]:
        found = dict(super()._seconds)
        priced = cost(self.plan, self.machine, self.optimizer)
        moved = dict.fromkeys(self._readers, 0.0)
        for reshard in (*priced.reshards, *priced.weight_reshards):
            if reshard.value.node in moved:
                moved[reshard.value.node] += sum(self.machine.move_time(move, dtype) for move, dtype in reshard.moves)
        for weight, readers in self._readers.items():
            first, last = readers[0], readers[-1]
            sent = (1 + weight.is_trained) * self._send(weight.result) if last is not first else 0.0
            update = update_time(weight, self.optimizer, self.machine) if weight.is_trained else 0.0
            once = {first: update + moved[weight] + sent}
            if sent:
                once[last] = moved[weight] + sent  # of its own copy, whose gradient it sends back
            for node, seconds in once.items():
                found[node] = found.get(node, 0.0) + seconds / self.micro_batches
        return found

    @cached_property
    def _readers(self) -> dict[Node, list[Node]]:
        """The operators that read each weight, in graph order."""
        found: dict[Node, list[Node]] = {}
        for node in self.plan.nodes():
            for value in map(_made, node.operands) if node.is_compute else ():
                if value.node.op == "weight":
                    found.setdefault(value.node, []).append(node)
        return found

    def _send(self, value: Value) -> float:
        """Return the seconds of a send of a value to the next stage."""
        elements = prod(value.shape) // prod(value.degrees)
        return send_seconds(self.whole, self.count, 0, 1, elements, ELEMENT_BYTES[value.type.dtype])

    @cached_property
    def _sends(self) -> Sequence[float]:
        number = {node: i for i, (node,) in enumerate(self._atoms)}
        last: dict[Value, int] = {}
        for node, i in number.items():
            for value in map(_made, node.operands):
                if value.node in number:
                    last[value] = max(i, last.get(value, 0))
        found = [0.0] * len(number)
        for value, end in last.items():
            for i in range(number[value.node], end):
                found[i] += 2 * self._send(value)
        return found


def _made(value: Value) -> Value:
    """Return what a chain of parallel operators begins with."""
    while value.node.is_parallel:
        value = value.node.operands[0]
    return value
