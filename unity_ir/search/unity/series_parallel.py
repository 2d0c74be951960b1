"""
Decompose a graph into sequences and parallel branches (Unity, section 5.2).

    DirectEdge          no operator: the values that one operator passes to another
    Sequence            split at an operator that all paths go through
    Parallel            branches that do not depend on one another
    Block               neither: the graph is not series-parallel there (Unity, section 8)

Leaves belong to the operators that read them. An end is an operator, or None before the first and after the last.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node


@dataclass(frozen=True, eq=False)
class DirectEdge:
    """A region without operators: the values that `source` passes to `target`."""

    source: Node | None
    target: Node | None
    inner: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False)
class Sequence:
    """
    A region in sequence: the region `left`, the operator `middle`, and the region `right`. All paths through the region
    go through `middle`; `inner` are all operators of the region.
    """

    left: Region
    middle: Node
    right: Region
    inner: tuple[Node, ...]

    @property
    def source(self) -> Node | None:
        """The operator before the region; None if the region begins where the graph does."""
        return self.left.source

    @property
    def target(self) -> Node | None:
        """The operator after the region; None if the region ends where the graph does."""
        return self.right.target


@dataclass(frozen=True, eq=False)
class Parallel:
    """
    A region of two regions, `first` and `rest`, between the same ends, of which neither depends on the other; `inner`
    are all operators of the region.
    """

    first: Region
    rest: Region
    inner: tuple[Node, ...]

    @property
    def source(self) -> Node | None:
        """The operator before the region; None if the region begins where the graph does."""
        return self.first.source

    @property
    def target(self) -> Node | None:
        """The operator after the region; None if the region ends where the graph does."""
        return self.first.target


@dataclass(frozen=True, eq=False)
class Block:
    """A region that is not series-parallel, with its operators `inner` in graph order."""

    source: Node | None
    target: Node | None
    inner: tuple[Node, ...]
    edges: tuple[DirectEdge, ...]
    """The edges among its operators and ends, ordered by target in `(*inner, target)`."""


Region = DirectEdge | Sequence | Parallel | Block


class Flow:
    """
    The operators of a graph in order, and the users of each. None stands for the start and for the end of the graph.
    """

    def __init__(self, graph: Graph, boundary: Node | None = None):
        """Treat the leaf `boundary` as an operator: it is what flows in."""
        self.nodes = [n for n in graph.nodes() if n.is_compute]
        self.place: dict[Node | None, int] = {n: i for i, n in enumerate(self.nodes)}
        self.users: dict[Node | None, dict[Node | None, None]] = {n: {} for n in (None, *self.nodes)}
        for node in self.nodes:
            before = [v.node for v in node.operands if v.node.is_compute]
            if boundary is not None and any(v.node is boundary for v in node.operands):
                self.users[None][node] = None
            for source in before or [None]:
                self.users[source][node] = None
        for value in graph.outputs:
            if value.node.is_compute:
                self.users[value.node][None] = None

    def cuts(self, source: Node | None, inner: SequenceOf[Node], target: Node | None) -> list[Node]:
        """
        Return, in order, the operators of `inner` that lie on every path from `source` to `target`, ignoring edges
        between those two.

        None stands for the start of the graph as `source`, for its end as `target`.
        """
        place: dict[Node | None, int] = {n: i for i, n in enumerate((*inner, target))}
        # Nothing is reached where there are no operators.
        reach = max((place[u] for u in self.users[source] if u in place and u is not target), default=len(inner))
        found = list[Node]()
        for i, node in enumerate(inner):
            if reach <= i:
                found.append(node)
            reach = max(reach, *(place[u] for u in self.users[node] if u in place))
        return found

    def branches(self, inner: SequenceOf[Node]) -> list[list[Node]]:
        """
        Return the connected components of the operators `inner`: each in graph order, sorted by their first operator.
        """
        group = {n: [n] for n in inner}
        for node in inner:
            for user in self.users[node]:
                if user is not None and user in group and group[user] is not group[node]:
                    small, large = sorted((group[node], group[user]), key=len)
                    large.extend(small)
                    for other in small:
                        group[other] = large
        seen = list[list[Node]]()
        for node in inner:
            if not any(group[node] is g for g in seen):
                seen.append(group[node])
        return [sorted(g, key=lambda n: self.place[n]) for g in seen]


def decompose(flow: Flow) -> Region:
    """
    Return the decomposition of a whole graph as a tree of regions: a `Sequence` or `Parallel` has regions in it, a
    `DirectEdge` or `Block` (which is not series-parallel) has none.
    """
    return _region(flow, None, flow.nodes, None)


def _region(
    flow: Flow, source: Node | None, inner: SequenceOf[Node], target: Node | None, branch: bool = False
) -> Region:
    """Return the region between two ends; of a `branch`, without a direct edge between them."""
    if not inner:
        return DirectEdge(source, target)
    parts = flow.branches(inner)
    direct = target in flow.users[source] and not branch
    if len(parts) + direct == 1:
        cuts = flow.cuts(source, inner, target)
        if cuts:
            return _sequence(flow, source, inner, target, cuts)
    else:
        regions: list[Region] = [_region(flow, source, part, target, branch=True) for part in parts]
        if direct:
            regions.append(DirectEdge(source, target))
        found = regions.pop()
        while regions:
            first = regions.pop()
            found = Parallel(first, found, (*first.inner, *found.inner))
        return found
    return _block(flow, source, inner, target, branch)


def _sequence(
    flow: Flow, source: Node | None, inner: SequenceOf[Node], target: Node | None, cuts: list[Node]
) -> Region:
    """Split at the middle cut, so that a change re-costs a logarithmic number of splits."""
    if not cuts:
        return _region(flow, source, inner, target)
    middle = cuts[len(cuts) // 2]
    at = inner.index(middle)
    left = _sequence(flow, source, inner[:at], middle, cuts[: len(cuts) // 2])
    right = _sequence(flow, middle, inner[at + 1 :], target, cuts[len(cuts) // 2 + 1 :])
    return Sequence(left, middle, right, tuple(inner))


def _block(flow: Flow, source: Node | None, inner: SequenceOf[Node], target: Node | None, branch: bool) -> Block:
    members = set(inner)
    order = (*inner, target)
    edges = [
        DirectEdge(node, user)
        for node in (source, *inner)
        for user in flow.users[node]
        if user in members or (user is target and not (branch and node is source))
    ]
    number = {n: i for i, n in enumerate(order)}
    return Block(source, target, tuple(inner), tuple(sorted(edges, key=lambda e: number[e.target])))
