"""
Arrange the reshards of a plan as trees: each starts where a value is made, where a leaf is stored, or where another
reshard ends (a relay: a layout from which several users are served).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unity_ir.cost.plan import PlanCost, Reshard
from unity_ir.pcg.anchors import Anchors
from unity_ir.pcg.collectives import HALO_EXCHANGES
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import dual
from unity_ir.simulate.streams import Step, Streams

Use = tuple[int, int]
"""The position of an operator among the compute nodes, and the index of an operand."""


@dataclass(slots=True)
class Hop:
    """
    A reshard of a value (moves from its source layout to its target layout), as a node in the tree of all reshards of
    that value: a child reshards its parent's result further. Its *way back* is the reshard of the value's gradient in
    the backward, from the target layout to the source layout, so that gradients come from the children.

    `number` is the reshard's index in `Hops.all`; its way back has number (count of reshards) + `number`.
    """

    reshard: Reshard
    number: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    parent: Hop | None = None
    children: list[Hop] = field(default_factory=list["Hop"])
    uses: list[Use] = field(default_factory=list[Use])
    """The uses that read its result."""
    first: Use | None = None
    """The first use of its result, or of a result below it in the tree."""
    last: Use | None = None
    """The use, of those with a backward, whose backward comes last."""

    @property
    def depth(self) -> int:
        """The number of reshards between the root of the tree and this one."""
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def root(self) -> Value:
        """
        The value at the root of the tree, before any reshard: an input, weight or constant, or the result of an
        operator.
        """
        return self.reshard.value if self.parent is None else self.parent.root

    @property
    def awaited(self) -> tuple[int, ...]:
        """
        The numbers of the reshards to wait for before this one's result can be read. It is its own number, or, if it
        moves no data but only renames roles (COPY to REPEAT, say), those of its parent; () if there is nothing to wait
        for.
        """
        if self.forward:
            return (self.number,)
        return () if self.parent is None else self.parent.awaited

    @property
    def levels(self) -> tuple[int, ...]:
        """
        The numbers of the machine levels crossed by the last collective on the way from the tree's root to this
        reshard's result; () if there is no collective.
        """
        return _crossed(self.forward) or (() if self.parent is None else self.parent.levels)

    def awaited_at_source(self, count: int) -> tuple[int, ...]:
        """
        Return the numbers of the reshards to wait for before the gradient can be read in this reshard's source layout.
        It is the number of its way back, or, if that moves no data but only renames roles, those that the gradient in
        the target layout waits for (`awaited_at_target`).

        `count` is how many reshards the plan has: the way back of reshard n has number `count` + n.
        """
        return (count + self.number,) if self.backward else self.awaited_at_target(count)

    def awaited_at_target(self, count: int) -> tuple[int, ...]:
        """
        Return the numbers of the reshards to wait for before the gradient can be read in this reshard's target layout:
        those of the ways back of its children. A child whose way back moves no data is replaced by its own children.

        `count` is how many reshards the plan has: the way back of reshard n has number `count` + n.
        """
        return tuple(n for child in self.children for n in child.awaited_at_source(count))

    @property
    def levels_at_source(self) -> tuple[int, ...]:
        """
        The numbers of the machine levels crossed by the last collective that brings the gradient to this reshard's
        source layout: one of its way back or, without one, of its children's ways back; () if there is no collective.
        """
        return _crossed(self.backward) or self.levels_at_target

    @property
    def levels_at_target(self) -> tuple[int, ...]:
        """
        The numbers of the machine levels crossed by the last collective that brings the gradient to this reshard's
        target layout, one of its children's ways back; () if there is no collective.
        """
        return next((levels for child in self.children if (levels := child.levels_at_source)), ())


def _crossed(steps: Sequence[Step]) -> tuple[int, ...]:
    return next((levels for _, _, levels, _ in reversed(steps) if levels), ())


@dataclass(frozen=True)
class Hops:
    """All reshards of a plan, except halo exchanges, arranged as trees, with indices to find them by."""

    all: list[Hop]
    starting: dict[Value, list[Hop]]
    """The reshards that start at a leaf or an operator's result, in the order of their first use."""
    reading: dict[Node, list[Hop]]
    """The reshards that an operator reads, one per operand."""
    leading: dict[Value, Hop]
    """The reshard whose result a parallel operator names."""
    exchanges: dict[int, list[Reshard]]
    """Halo exchanges, by the position of the compute node they precede."""


def hops(graph: Graph, plan: PlanCost, streams: Streams, with_gradient: frozenset[Node]) -> Hops:
    """
    Arrange the reshards of a placed graph (one with machine views) as trees, whose roots are its inputs, weights,
    constants and operators' results. Halo exchanges are not in the trees, but in `Hops.exchanges`. `plan` is the cost
    of the graph, whose `plan.reshards` are arranged.

    `streams` gives the ticks and streams of their moves; `with_gradient` are the nodes that have a backward.
    """
    nodes = graph.nodes()
    order = [n for n in nodes if n.is_compute]
    position = {n: i for i, n in enumerate(order)}
    found: list[Hop] = []
    leading: dict[Value, Hop] = {}
    reading: dict[Node, list[Hop]] = {}
    exchanges: dict[int, list[Reshard]] = {}
    following = _next_compute(nodes, position)
    for reshard in plan.reshards:
        if any(m.kind in HALO_EXCHANGES for m in (*reshard.forward, *reshard.backward)):
            at = min(following[reshard.users[0]], len(order) - 1)
            exchanges.setdefault(at, []).append(reshard)
            continue
        type = reshard.value.type
        hop = Hop(
            reshard,
            len(found),
            streams.steps(reshard.forward, reshard.source, type.dtype),
            streams.steps(reshard.backward, dual(reshard.target), type.grad_dtype),
        )
        found.append(hop)
        for user in reshard.users:
            if user.is_parallel:
                leading[user.result] = hop
    by_place = {(h.reshard.value, h.reshard.target): h for h in found}
    starting: dict[Value, list[Hop]] = {}
    for hop in found:
        hop.parent = leading.get(hop.reshard.value)
        if hop.parent is None:
            starting.setdefault(hop.reshard.value, []).append(hop)
        else:
            hop.parent.children.append(hop)
    anchors = Anchors(graph)
    for node in order:
        for i, value in enumerate(node.operands):
            hop = by_place[anchors.of(value), plan.placement.needs(node, i)]
            reading.setdefault(node, []).append(hop)
            hop.uses.append((position[node], i))
    for hop in sorted(found, key=lambda h: -h.depth):
        below = [c.first for c in hop.children if c.first is not None]
        hop.first = min([*hop.uses, *below], default=None)
        back = [u for u in hop.uses if order[u[0]] in with_gradient]
        hop.last = min([*back, *(c.last for c in hop.children if c.last is not None)], default=None)
    for group in (*starting.values(), *(h.children for h in found)):
        group.sort(key=lambda h: (h.first is None, h.first or (0, 0)))
    return Hops(found, starting, reading, leading, exchanges)


def _next_compute(nodes: Sequence[Node], position: dict[Node, int]) -> dict[Node, int]:
    """Return, for every node, the position of the first compute node from it on."""
    found: dict[Node, int] = {}
    at = len(position)
    for node in reversed(nodes):
        at = position.get(node, at)
        found[node] = at
    return found
