"""
Price the units of a placed micro-batch (`cuts`): what each takes in a step of several micro-batches, as a stage of a
pipeline runs it. Every move is waited for, as in `cost.plan`.

Moves of weights, sums of their gradients, and updates are done once per step. What a weight is moved to is kept for all
micro-batches, and its gradient accumulates there: each micro-batch but one adds its own to those before. A move of an
activation belongs to the unit that reads it. The last value of a unit is held by the next one, which reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

import numpy as np

from unity_ir.cost.memory import leaf_bytes
from unity_ir.cost.plan import PlanCost, Reshard, update_time
from unity_ir.cost.table import addition_seconds
from unity_ir.cost.work import adds_gradients, gradient_reads, work_of
from unity_ir.pcg.collectives import FREE
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph, erase_with
from unity_ir.pcg.layers import layers
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.pipeline.cuts import Units, units
from unity_ir.search.pipeline.table import Floats
from unity_ir.search.recompute.chosen import ANY_PRICE, Recomputable
from unity_ir.search.recompute.min_cut import SavedValues, recomputed_at_price

PRICES = 12
"""Prices of a byte at which what is recomputed is looked for, between that of the cheapest operator and the dearest."""

ADDED = 3
"""Times that an addition of a gradient to those before reads or writes its bytes: it reads both, and writes the sum."""

Sent = tuple[float, int]
"""Elements of a piece, and the bytes of each."""


class TiedWeight(NamedTuple):
    """
    A weight of one unit that a later one reads, too; if that is on another stage, it is sent there, and its gradient
    back.
    """

    unit: int
    reader: int
    sent: Sent
    held: float
    """Bytes on a device of the reader's stage."""
    added: float
    """Seconds per micro-batch of adding its gradients there to those before."""


@dataclass(frozen=True)
class UnitRows:
    """
    What each unit (a contiguous run of operators, of which stages are made: `cuts`) takes on a device, in seconds and
    bytes, for one of several micro-batches in given layouts. Arrays are [unit] unless said otherwise.
    """

    forward: Floats
    """Seconds of a micro-batch's forward."""
    input_gradient: Floats
    """Seconds of the half of its backward that makes gradients of values."""
    weight_gradient: Floats
    """Seconds of the half that makes gradients of weights, and adds them up."""
    once: Floats
    """Seconds once per step: updates, moves of weights, sums of gradients over devices."""
    held: Floats
    """Bytes whatever is live: weights, gradients, the optimizer's state, inputs of all micro-batches."""
    again: Floats
    """Seconds [level, unit] of what is recomputed in a micro-batch; of level 0 nothing is."""
    live: Floats
    """Bytes [level, unit] for each live micro-batch."""
    late: Floats
    """Bytes [unit] per micro-batch whose input gradients are made and whose weight gradients are not."""
    working: Floats
    """Bytes [level, unit] held only while the backward of the unit runs."""
    sent: tuple[tuple[Sent, ...], ...]
    """The tensors that a stage sends to the next if it ends at a cut, for each cut."""
    tied: tuple[TiedWeight, ...]

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self.forward)

    def is_like(self, other: UnitRows) -> bool:
        """
        Return whether `other` has the same seconds and bytes as these rows, and so probably the same layouts;
        `PipelineSearch.variants` then leaves it out.
        """
        pairs = ((self.forward, other.forward), (self.once, other.once), (self.held, other.held))
        same = all(np.array_equal(a, b) for a, b in pairs)
        return same and self.live.shape == other.live.shape and np.array_equal(self.live, other.live)

    def picked(self, of: Sequence[int]) -> UnitRows:
        """
        Return rows in which unit i takes what unit `of[i]` takes here; there are as many units as `of` has. This
        expands a graph with few equal layers to one with all of them. Weights that two units read are kept only if both
        units are in `of`.
        """
        at = np.array(of)
        cuts = [min(i, self.count - 2) for i in of[:-1]]
        number = {unit: i for i, unit in reversed([*enumerate(of)])}
        return UnitRows(
            self.forward[at],
            self.input_gradient[at],
            self.weight_gradient[at],
            self.once[at],
            self.held[at],
            self.again[:, at],
            self.live[:, at],
            self.late[at],
            self.working[:, at],
            tuple(self.sent[i] for i in cuts),
            tuple(
                each._replace(unit=number[each.unit], reader=number[each.reader])
                for each in self.tied
                if {each.unit, each.reader} <= number.keys()
            ),
        )


@dataclass(frozen=True)
class PricedUnits:
    """
    The units of a placed graph of one micro-batch, with their seconds and bytes, and which operators each recomputes at
    each level of recompute.
    """

    units: Units
    rows: UnitRows
    recomputable: Recomputable
    levels: tuple[tuple[frozenset[int], ...], ...]
    """[level][unit]: the operators that are recomputed, as indices in `recomputable.nodes[unit]`."""
    serials: Mapping[Node, Node]
    """The node of the serial graph for each of the placed graph."""

    def marked(self, levels: Sequence[int]) -> Graph:
        """Return the placed graph with recompute: in unit u, what its level `levels[u]` says; at level 0, nothing."""
        return self.recomputable.marked([self.levels[level][u] for u, level in enumerate(levels)])


def priced_units(priced: PlanCost, plan: Graph, optimizer: Optimizer, micro_batches: int) -> PricedUnits:
    """
    Return what each unit of `plan` takes in a step, in seconds and bytes on a device; units are the contiguous runs of
    operators of which stages are made (`cuts`). `plan` is the placed forward graph of one micro-batch, of
    `micro_batches` in the step, and `priced` its cost; every move is waited for.
    """
    serial, serials = erase_with(plan)
    found = units(serial)
    sums = _Sums(priced, plan, serials, found, optimizer, micro_batches)
    recomputable = Recomputable.of(priced, plan, with_products=True, given=found.parts)
    values = _without_tail(recomputable.layers, len(found.parts) - len(layers(serial).tail))
    levels = _levels(values)
    ends = [0.0, *(sums.made[part.end.node] for part in found.parts[:-1] if part.end is not None)]
    again, live, working = (np.zeros((len(levels), len(values))) for _ in range(3))
    for i, level in enumerate(levels):
        for u, (of, these) in enumerate(zip(values, level, strict=True)):
            again[i, u] = sum(of.seconds[k] for k in these)
            live[i, u] = sum(of.bytes[k] for k in of.saved(these)[0]) + ends[u]
            working[i, u] = sum(of.bytes[k] for k in these) + 2 * max(of.bytes, default=0.0)
    rows = UnitRows(
        sums.forward,
        sums.input_gradient,
        sums.weight_gradient,
        sums.once,
        sums.held,
        again,
        live,
        sums.late,
        working,
        tuple(tuple(map(sums.sent, values)) for values in found.passing),
        tuple(sums.tied(weight, found.unit_of[weight], unit) for weight, unit in found.tied),
    )
    return PricedUnits(found, rows, recomputable, levels, serials)


class _Sums:
    """Adds up what the operators, moves and leaves of each unit take."""

    def __init__(
        self,
        priced: PlanCost,
        plan: Graph,
        serials: Mapping[Node, Node],
        found: Units,
        optimizer: Optimizer,
        micro_batches: int,
    ):
        self.machine = priced.machine
        self.with_gradient = nodes_with_gradient(plan)
        self.placed = {serial: node for node, serial in serials.items()}
        count = len(found.parts)
        self.forward, self.input_gradient, self.weight_gradient, self.once, self.held, self.late = np.zeros((6, count))
        users = plan.users()
        kept: set[tuple[Value, bool]] = set()
        self.again = (micro_batches - 1) / micro_batches
        self.moved: set[Node] = set()
        """Weights whose gradients accumulate elsewhere than they rest."""
        self.multiplied = {node for node in plan.nodes() if node.op == "weight" and _is_multiplied(node, users)}
        """Weights whose gradients are added up by the products that make them."""
        self.made: dict[Node, float] = {}
        """Bytes that the results of a serial compute node take, with those of their moved copies."""
        unit_of = _placed_units(plan, serials, found)
        for each in priced.operators:
            unit, node = unit_of[each.node], each.node
            self.forward[unit] += each.forward
            half = self._input_gradient(node)
            self.input_gradient[unit] += min(half, each.backward)
            self.weight_gradient[unit] += max(each.backward - half, 0.0) + self._additions(node)
            self.made[serials[node]] = each.made_bytes
            self.late[unit] += self._late(node, kept, users)
        for reshard in priced.reshards:
            self._reshard(reshard, min(unit_of[user] for user in reshard.users), serials)
        for reshard in priced.weight_reshards:
            moved = sum(self.machine.move_time(m, dtype) for m, dtype in reshard.moves)
            self.once[unit_of[reshard.value.node]] += moved
        for node in plan.nodes():
            if not node.is_leaf:
                continue
            (type,) = node.types
            is_updated = node.op == "weight" and node in self.with_gradient
            each = leaf_bytes(node, is_updated, optimizer) * (micro_batches if node.op == "input" else 1)
            self.held[unit_of[node]] += each * prod(type.piece_shape)
            if is_updated:
                self.once[unit_of[node]] += update_time(node, optimizer, self.machine)
                if node not in self.moved and node not in self.multiplied:
                    bytes = prod(type.piece_shape) * ELEMENT_BYTES[type.grad_dtype]
                    self.weight_gradient[unit_of[node]] += self._addition(bytes)

    def sent(self, value: Value) -> Sent:
        """Return what is sent of a value of the serial graph."""
        type = self.placed[value.node].types[value.index]
        return prod(type.piece_shape), max(ELEMENT_BYTES[type.dtype], ELEMENT_BYTES[type.grad_dtype])

    def tied(self, weight: Node, unit: int, reader: int) -> TiedWeight:
        """Return what a weight of the serial graph takes where a later unit reads it."""
        (type,) = self.placed[weight].types
        elements, item = prod(type.piece_shape), ELEMENT_BYTES[type.dtype]
        grad = ELEMENT_BYTES[type.grad_dtype] if weight.is_trained else 0
        sent, held = (elements, max(item, grad)), float(elements * (item + grad))
        return TiedWeight(unit, reader, sent, held, self._addition(elements * grad))

    def _additions(self, node: Node) -> float:
        """Return the seconds, per micro-batch, by which products take longer that add up gradients of weights."""
        if not self.again:
            return 0.0
        variables = tuple(node.analysis.splittable)
        degrees = np.array([[node.configuration.degrees.get(v, 1) for v in variables]], dtype=np.int64)
        found = 0.0
        for i, value in enumerate(node.operands):
            if _root(value) in self.multiplied and self._is_trained(value):
                elements = np.array([prod(value.type.piece_shape)], dtype=np.int64)
                longer, reading = addition_seconds(node, i, variables, degrees, elements, self.machine.device)
                found += float(longer[0] + self.again * reading[0])
        return found

    def _addition(self, bytes: float) -> float:
        """Return the seconds, per micro-batch, in which a kernel of its own adds a gradient to those before."""
        return self.again * self.machine.memory_seconds(1, ADDED * bytes)

    def _late(self, node: Node, kept: set[tuple[Value, bool]], users: Users) -> float:
        """
        Return the bytes from which an operator makes gradients of weights, beside what is `kept` already; add them to
        that: values, and values' gradients (True).
        """
        of = tuple(node in self.with_gradient and self._is_trained(v) for v in node.operands)
        if not any(of):
            return 0.0
        reads = gradient_reads(node, of)
        found = {(node.operands[i], False) for i in reads.operands if _root(node.operands[i]).is_compute}
        if reads.results:
            found |= {(_with_gradient_of(v, users), True) for v in node.results}
        new = found - kept
        kept |= new
        types = ((v.type, v.type.grad_dtype if is_gradient else v.type.dtype) for v, is_gradient in new)
        return sum(prod(type.piece_shape) * ELEMENT_BYTES[dtype] for type, dtype in types)

    def _is_trained(self, value: Value) -> bool:
        """Return whether a value is a weight with a gradient, moved or not."""
        return _root(value).op == "weight" and _root(value) in self.with_gradient

    def _input_gradient(self, node: Node) -> float:
        """Return the seconds of a compute node's backward that do not make gradients of weights."""
        needs = tuple(
            node in self.with_gradient and v.node in self.with_gradient and _root(v).op != "weight"
            for v in node.operands
        )
        return work_of(node, needs).backward_time(self.machine.device)

    def _reshard(self, reshard: Reshard, unit: int, serials: Mapping[Node, Node]) -> None:
        forward = self.machine.moves_time(reshard.forward_moves)
        backward = self.machine.moves_time(reshard.backward_moves)
        type, maker = reshard.value.type, _root(reshard.value)
        brought = reshard.brought if any(m.kind not in FREE for m in reshard.forward) else 0
        if maker.op == "weight":
            self.once[unit] += forward + backward
            grad = ELEMENT_BYTES[type.grad_dtype] if reshard.backward else 0
            self.held[unit] += brought * (ELEMENT_BYTES[type.dtype] + grad)
            if brought and reshard.backward:
                self.moved.add(maker)
                self.weight_gradient[unit] += 0.0 if maker in self.multiplied else self._addition(brought * grad)
            return
        self.forward[unit] += forward
        self.input_gradient[unit] += backward
        if maker.is_compute:
            self.made[serials[maker]] += brought * ELEMENT_BYTES[type.dtype]


Users = Mapping[Value, Sequence[tuple[Node, int]]]
"""The nodes that read each value, and as which operand."""


def _with_gradient_of(value: Value, users: Users) -> Value:
    """Return the last value of which a value's gradient is the same tensor: behind sums, which pass gradients on."""
    while len(found := users.get(value, ())) == 1 and found[0][0].is_compute:
        (node, at) = found[0]
        if at not in gradient_reads(node, (False,) * len(node.operands)).passed:
            break
        (value,) = node.results
    return value


def _is_multiplied(weight: Node, users: Users) -> bool:
    """Return whether a weight's only reader, behind parallel operators, adds up gradients."""
    value = weight.result
    while len(found := users.get(value, ())) == 1 and found[0][0].is_parallel:
        value = found[0][0].result
    return len(found) == 1 and adds_gradients(found[0][0], value)


def _placed_units(plan: Graph, serials: Mapping[Node, Node], found: Units) -> dict[Node, int]:
    """Return the unit of every node of the placed graph; of parallel operators, the first that reads their result."""
    unit_of = {node: found.unit_of[serial] for node, serial in serials.items()}
    users, last = plan.users(), len(found.parts) - 1
    for node in reversed(plan.nodes()):
        if node.is_parallel:
            unit_of[node] = min((unit_of[user] for user, _ in users.get(node.result, ())), default=last)
    return unit_of


def _root(value: Value) -> Node:
    """Return the leaf or compute node that makes a value which parallel operators may have brought elsewhere."""
    while value.node.is_parallel:
        value = value.node.operands[0]
    return value.node


def _without_tail(values: Sequence[SavedValues], tail: int) -> list[SavedValues]:
    """Return what units save, where those from `tail` on recompute nothing: their backward comes first."""
    return [
        of if u < tail else SavedValues((inf,) * len(of.seconds), of.bytes, of.read, of.operands)
        for u, of in enumerate(values)
    ]


def _levels(values: Sequence[SavedValues]) -> tuple[tuple[frozenset[int], ...], ...]:
    """Return what units recompute at rising prices of a byte, without those that change nothing; first nothing."""
    ratios = [
        s / b for of in dict.fromkeys(values) for s, b in zip(of.seconds, of.bytes, strict=True) if 0 < s < inf and b
    ]
    found = [tuple(frozenset[int]() for _ in values)]
    prices = [*np.geomspace(min(ratios) / 2, 4 * max(ratios), PRICES).tolist(), ANY_PRICE] if ratios else []
    for price in prices:
        level = tuple(recomputed_at_price(of, price) for of in values)
        if level != found[-1]:
            found.append(level)
    return tuple(found)
