"""
Price products of experts' rows that devices exchange (`plan.routes`), on a forward graph: what a product, with its
backward, takes where its experts are, and what is sent there and back for it.

A device that divides experts with p - 1 others has r rows of its own, computes `live` rows, and has buffers of `held`
rows. Against a product that gathers p r rows, FLOPs and bytes are those of its buffers, and

    x -> product        sends `live` rows of x there, and brings as many of its gradient back
    product -> readers  brings `live` rows of the result back, and sends as many of its gradient there

unless x is made of such products, element by element, or the result is read for such alone. Products that read one x
share what is sent of it, and products of one route (the integers that say where rows go) share the count of rows. That
each buffer is packed, and unpacked, counts as a kernel that copies its rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

import numpy as np

from unity_ir.cost.table import Floats, Ints, kernel_counts, template
from unity_ir.machine.model import Machine
from unity_ir.ops.routed import ROUTED_MATMUL
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.routes import is_elementwise

EXPERTS = "v"
"""The index variable of the experts in the lines of products of rows (`ops.routed`)."""

NUMBER = "i64"
"""The element type in which rows are counted, and their experts sent."""


@dataclass(frozen=True, slots=True)
class ProductRows:
    """The moves of rows that a product with experts' weights needs, and with how many products it shares each."""

    sharers: int
    """The products that read the same rows, this one among them; 0 if the rows are made where the experts are."""
    is_expanded: bool
    """Whether its rows are tokens, each several times, of which a device sends the tokens."""
    between: int
    """The products from whose results its rows are made, if they are made where the experts are; else 0."""
    is_returned: bool
    """Whether its result is read where the tokens are."""
    products: int
    """The products whose rows go the same way."""


@lru_cache(maxsize=64)
def product_rows(nodes: frozenset[Node]) -> Mapping[Node, ProductRows]:
    """
    Return what each product of rows among the nodes of a serial forward graph takes part in if its rows are exchanged.
    `nodes` are those with a gradient (`differentiate.nodes_with_gradient`), which all readers of such products are.
    """
    products = [node for node in nodes if node.op == ROUTED_MATMUL.name]
    if not products:
        return {}
    readers: dict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for value in dict.fromkeys(node.operands):
            readers[value].append(node)
    there = _There()
    found: dict[Node, ProductRows] = {}
    for node in products:
        (x, _, chosen), (result,) = node.operands, node.results
        alike = [user for user in readers[x] if user.op == node.op and user.operands[2] == chosen]
        is_there = there.route(x) == chosen
        found[node] = ProductRows(
            0 if is_there else sum(user.operands[0] == x for user in alike),
            x.node.op == "expand",
            len(there.products(x)) if is_there else 0,
            not readers[result] or not all(there.is_read_there(user, result, chosen) for user in readers[result]),
            sum(user.operands[2] == chosen for user in products),
        )
    return found


class _There:
    """Tells which values can be made where the experts are."""

    def __init__(self) -> None:
        self._routes: dict[Value, Value | None] = {}

    def route(self, value: Value) -> Value | None:
        """
        Return the integers that say where rows of a value go: of one that products make, or that is made of such alone,
        element by element; None for others.
        """
        if value not in self._routes:
            self._routes[value] = self._route(value)
        return self._routes[value]

    def _route(self, value: Value) -> Value | None:
        node = value.node
        if node.op == ROUTED_MATMUL.name:
            return node.operands[2]
        if not node.is_compute or len(node.results) != 1 or {v.shape for v in node.operands} != {value.shape}:
            return None
        if not is_elementwise(node.analysis.bound):
            return None
        routes = {self.route(operand) for operand in node.operands}
        return routes.pop() if len(routes) == 1 else None

    def products(self, value: Value) -> set[Node]:
        """Return the products from whose results such a value is made."""
        if value.node.op == ROUTED_MATMUL.name:
            return {value.node}
        return set[Node]().union(*(self.products(operand) for operand in value.node.operands))

    def is_read_there(self, user: Node, value: Value, chosen: Value) -> bool:
        """Return whether an operator reads a value of a route where the experts are."""
        if user.op == ROUTED_MATMUL.name:
            return user.operands[2] == chosen and user.operands[0] == value
        return len(user.results) == 1 and self.route(user.results[0]) == chosen


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows on a device for many choices of degrees, [choice]."""

    own: Ints
    """Rows of its own tokens: an even share."""
    live: Ints
    """Received rows that prices count."""
    held: Ints
    """Rows of a buffer."""


def pieces_of(product: Node, variables: Sequence[str], degrees: Ints) -> Ints:
    """Return, [choice], how many pieces the rows of a product are in where its experts' devices have no part in it."""
    first = product.analysis.result_dims[0][0]
    return degrees[:, variables.index(first)] if first in variables else np.ones(len(degrees), dtype=np.int64)


def row_counts(product: Node, variables: Sequence[str], degrees: Ints, most: float) -> RowCounts:
    """
    Return the numbers of rows on a device, as `plan.routes` has them, of a product of rows whose index `variables` have
    these `degrees` [choice, variable]; `most` is as `Graph.exchange_rows`.
    """
    _, weights, chosen = product.operands
    experts, ways = weights.shape[0], degrees[:, variables.index(EXPERTS)]
    own = prod(chosen.shape) // (ways * pieces_of(product, variables, degrees))
    times = chosen.shape[-1] if len(chosen.shape) == 2 and _root(chosen).op == "topk" else 1
    worst = own * ways * np.minimum(times, experts // ways) // times
    if most == inf:
        return RowCounts(own, np.minimum(worst, own), worst)
    share = np.ceil(own * most).astype(np.int64)
    held = np.minimum(worst, share)
    return RowCounts(own, held, held)


def _root(value: Value) -> Node:
    while value.node.is_parallel:
        value = value.node.operands[0]
    return value.node


@dataclass(frozen=True)
class ExchangedSeconds:
    """Seconds of the kernels of a product whose rows are exchanged, for many choices of degrees, [choice]."""

    forward: Floats
    backward: Floats
    product: Floats
    """Those of the forward's product alone."""


def exchanged_seconds(
    node: Node,
    needs: Sequence[bool],
    rows: ProductRows,
    variables: tuple[str, ...],
    degrees: Ints,
    most: float,
    machine: Machine,
) -> ExchangedSeconds | None:
    """
    Return the seconds of the kernels of a serial product of rows if these are exchanged over the devices that divide
    its experts, with those that pack rows and, of what is made between products element by element, the rows of buffers
    that home's have not. The arguments are those of `cost.table.seconds`; None where that does not know them.
    """
    x, _, chosen = node.operands
    form = template(node, tuple(needs), variables, tuple(map(node.operands.index, node.operands)))
    if not form.is_exact(degrees).all():
        return None
    pieces = pieces_of(node, variables, degrees)
    counts = row_counts(node, variables, degrees, most)
    width, made = x.shape[-1], node.result.shape[-1]
    item, out = (ELEMENT_BYTES[v.dtype] for v in (x, node.result))
    fewer = (prod(chosen.shape) // pieces - counts.held) * (width * item + made * out + ELEMENT_BYTES[chosen.dtype])
    kernels = [
        machine.device.kernel_times(
            each.flops * counts.live // counts.own, each.bytes - fewer, each.kernel.dtype, each.kernel.kind
        )
        for each in kernel_counts(form, degrees)
    ]
    forward, backward = kernels[0], sum(kernels[1:], np.zeros(len(degrees)))
    # Rows of x there, of the result back; of its gradient there, of that of x back.
    packed = (2 * counts.own * width * item, 2 * counts.own * made * out)
    share = 1 / rows.sharers if rows.sharers else 0.0
    if share:
        forward = forward + share * (not rows.is_expanded) * _copies(machine, packed[0])
        backward = backward + share * needs[0] * _copies(machine, packed[0])
    if rows.is_returned:
        forward = forward + _copies(machine, packed[1])
        backward = backward + any(needs) * _copies(machine, packed[1])
    if rows.between:
        more = (counts.held - counts.own) * width * item / machine.device.memory_bandwidth / machine.device.efficiency
        forward = forward + (rows.between + 1) * more
        backward = backward + needs[0] * (2 * rows.between + 1) * more
    return ExchangedSeconds(forward, backward, kernels[0])


def _copies(machine: Machine, bytes: Ints) -> Floats:
    return machine.device.launch + bytes / machine.device.memory_bandwidth / machine.device.efficiency


@dataclass(frozen=True, slots=True)
class RowSend:
    """A move of rows, forward or backward, that a product of rows takes part in."""

    kind: str
    elements: int
    """Elements of a device before the move."""
    dtype: str
    share: float
    """The part of it that the product counts, as it shares the move with others."""


def row_sends(node: Node, needs: Sequence[bool], rows: ProductRows, ways: int, live: int) -> Iterator[RowSend]:
    """
    Yield the moves of rows of a serial product, over `ways` devices that divide its experts: `live` rows to and from a
    device. `needs` says, per operand, whether its gradient is wanted.
    """
    x, result = node.operands[0], node.result
    yield RowSend("count_rows", ways, NUMBER, 1 / rows.products)
    yield RowSend("send_rows", live, NUMBER, 1 / rows.products)
    if rows.sharers:
        yield RowSend("send_rows", live * x.shape[-1], x.dtype, 1 / rows.sharers)
        if needs[0]:
            yield RowSend("return_rows", live * x.shape[-1], x.type.grad_dtype, 1 / rows.sharers)
    if rows.is_returned:
        yield RowSend("return_rows", live * result.shape[-1], result.dtype, 1.0)
        if any(needs):
            yield RowSend("send_rows", live * result.shape[-1], result.type.grad_dtype, 1.0)
