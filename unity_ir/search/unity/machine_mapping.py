"""
Find the fastest machine mapping of a PCG by dynamic programming over sequences and branches (Unity, section 5.2).

A PCG is a serial graph and the degrees of its operators; a mapping gives each operator a view. Each region
(`search.unity.series_parallel`) has a table over the views of its two ends:

    edge       the cost of moving a value from one view to the other, and its gradient back
    sequence   min over the views of the operator in the middle of  left + operator + right
    parallel   min of  first + rest, both with the whole share,  and  max(first, rest), each with a part of it
    block      a beam over the operators in order; the paper has no answer for graphs that are not series-parallel

Tables are memoised by structure, so equal subgraphs, of one candidate or of several, are costed once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from unity_ir.budget import spend
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import Assignment, Layout, operand_layout, result_layout
from unity_ir.search.layouts.limits import limits
from unity_ir.search.unity import series_parallel
from unity_ir.search.unity.device_shares import Degrees, Share, splits, view_at, views, whole
from unity_ir.search.unity.series_parallel import Block, DirectEdge, Flow, Parallel, Region
from unity_ir.search.unity.view_costs import ViewCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Subgraph:
    """
    A serial graph to map to a machine; it may be cut out of a larger graph.

    The value that flows into a cut graph is the leaf `entry`, in one of the layouts `entries`; the first output leaves
    in one of the layouts `exits`. `entries` and `exits` are empty at an end that is not cut.
    """

    graph: Graph
    entry: Node | None = None
    entries: tuple[Layout, ...] = ()
    exits: tuple[Layout, ...] = ()

    @cached_property
    def numbers(self) -> dict[Node | DirectEdge, int]:
        """
        The number that stands for the structure of each operator and edge that a `Mapper` has seen: operators with
        equal `keys` have one number, so that they share memoised views and tables. It is empty at first and filled by
        the mapper; one subgraph may be given to one mapper only.
        """
        return {}

    @cached_property
    def flow(self) -> Flow:
        """The operators of the graph in order, and their users."""
        return Flow(self.graph, self.entry)

    @cached_property
    def region(self) -> Region:
        """The decomposition of the graph into sequences and branches."""
        return series_parallel.decompose(self.flow)

    @cached_property
    def trained(self) -> frozenset[Node]:
        """The nodes whose values have a gradient."""
        return nodes_with_gradient(self.graph)

    @cached_property
    def uses(self) -> Mapping[Value, int]:
        """
        For each leaf of the subgraph, the number of operators that read it. The leaf `entry`, which stands for the
        value that flows into a subgraph cut out of a larger graph, is left out.
        """
        found: dict[Value, int] = {}
        for node in self.flow.nodes:
            for value in dict.fromkeys(node.operands):
                if value.node.is_leaf and value.node is not self.entry:
                    found[value] = found.get(value, 0) + 1
        return found

    def wires(self, edge: DirectEdge) -> tuple[tuple[Value, int], ...]:
        """
        Return the values that an edge between two operators carries, as (value, index of the operand by which the
        edge's target reads it) pairs.

        An edge whose source is None leads from the leaf `entry`, the value that flows into a subgraph cut out of a
        larger graph. An edge whose target is None leads out of the subgraph: it carries the first output, as operand 0,
        if the graph goes on there (`exits`) and the edge's source makes that output; else nothing.
        """
        if edge.target is None:
            value = self.graph.outputs[0] if self.exits else None
            return ((value, 0),) if value is not None and value.node is edge.source else ()
        source = edge.source if edge.source is not None else self.entry
        return tuple((v, i) for i, v in enumerate(edge.target.operands) if source is not None and v.node is source)

    @cached_property
    def keys(self) -> Mapping[Node, Hashable]:
        """
        A memo key of each operator: operators with equal keys cost the same if they have the same degrees. It holds
        kind, attributes, operand types, and which operands are leaves, equal, or have a gradient.
        """
        return {
            node: (
                node.op,
                node.attributes,
                tuple(v.type for v in node.operands),
                tuple(node.operands.index(v) for v in node.operands),
                tuple((v.node.op, self.uses[v]) if v in self.uses else v.index for v in node.operands),
                node in self.trained,
                tuple(v.node in self.trained for v in node.operands),
            )
            for node in self.flow.nodes
        }


@dataclass(frozen=True, eq=False)
class Views:
    """
    The machine views of an operator on a share of the machine: its seconds in each, with the leaves it reads, and the
    layouts it needs and makes there. None if `assignments` is empty.
    """

    assignments: tuple[Assignment, ...]
    seconds: Floats
    needs: tuple[tuple[Layout, ...], ...]
    """Per operand, the layout under each view."""
    makes: tuple[tuple[Layout, ...], ...]
    """Per result, the layout under each view."""

    def __len__(self) -> int:
        return len(self.seconds)


NO_VIEWS = Views(((),), np.zeros(1), (), ())


@dataclass
class Mapper:
    """
    Finds the fastest machine mapping of candidates on one machine (Unity, section 5.2), memoising tables by structure.
    A candidate is a serial graph and the degrees of its operators: (role, degree) pairs, where a role is an index
    variable to divide, or a set of operands in partial sums. A mapping gives each operator a view: the role of each
    mesh axis.

    Without `cache`, nothing is kept from one candidate to the next.
    """

    prices: ViewCosts
    cache: bool = True
    _numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    _views: dict[Hashable, Views] = field(default_factory=dict[Hashable, Views])
    tables: dict[Hashable, Floats] = field(default_factory=dict[Hashable, Floats])

    def number(self, key: Hashable) -> int:
        """
        Return a small number that stands for `key` in the memo's keys: equal keys get the same number. A key describes
        the structure of an operator or a subgraph.
        """
        return self._numbers.setdefault(key, len(self._numbers))

    def number_of(self, piece: Subgraph, node: Node) -> int:
        """
        Return the number that stands for an operator of `piece` in the memo's keys: the same for operators with equal
        `Subgraph.keys`, so of one kind, shapes and surroundings; degrees are not part of it.
        """
        if node not in piece.numbers:
            piece.numbers[node] = self.number(piece.keys[node])
        return piece.numbers[node]

    def costs(self, piece: Subgraph, degrees: Mapping[Node, Degrees]) -> Floats:
        """
        Return the seconds of the fastest machine mapping of `piece`, for each layout in which the value at its entry
        may arrive and each in which its first output may leave: [index in `piece.entries`, index in `piece.exits`]. An
        axis has size 1 where these are empty: where the graph begins or ends with `piece`.

        `degrees` has (role, degree) pairs per operator of `piece`; operators left out are not sharded.
        """
        if not self.cache:
            self.tables.clear()
            self._views.clear()
        return _Mapping(self, piece, degrees).costs()

    def views(
        self, piece: Subgraph, degrees: Mapping[Node, Degrees], entry: int = 0, exit: int = 0
    ) -> dict[Node, Assignment]:
        """
        Return every operator's view (the role of each mesh axis) in the fastest machine mapping of `piece`.

        `degrees` has (role, degree) pairs per operator of `piece`; `entry` and `exit` are the indices of the layouts in
        which its value at the entry arrives and its first output leaves, among `piece.entries` and `piece.exits`.
        """
        return _Mapping(self, piece, degrees).chosen(entry, exit)

    def of(self, piece: Subgraph, node: Node, degrees: Degrees, share: Share) -> Views:
        """
        Return the machine views in which an operator of `piece` has these degrees on a share of the machine (the number
        of usable coordinates of each mesh axis), with its seconds in each view, and the layouts that it needs and makes
        there; memoised.
        """
        key = (self.number_of(piece, node), degrees, share)
        if key not in self._views:
            machine = self.prices.machine
            ways = views(degrees, share, machine.mesh.sizes, machine.axis_levels)
            analysis = node.analysis
            gradients = tuple(v.node in piece.trained for v in node.operands)
            seconds = [self.prices.operator(node, way, node in piece.trained, gradients, piece.uses) for way in ways]
            self._views[key] = Views(
                ways,
                np.array(seconds, dtype=np.float64),
                tuple(tuple(operand_layout(analysis, i, way) for way in ways) for i in range(len(node.operands))),
                tuple(tuple(result_layout(analysis, i, way) for way in ways) for i in range(len(node.types))),
            )
        return self._views[key]


class _Mapping:
    """Maps one candidate."""

    def __init__(self, mapper: Mapper, piece: Subgraph, degrees: Mapping[Node, Degrees]):
        self.mapper = mapper
        self.piece = piece
        self.degrees = degrees
        self.machine = mapper.prices.machine
        self.share = whole(self.machine)
        self.entry = Views(piece.entries, np.zeros(len(piece.entries)), (), (piece.entries,))
        self.exit = Views(piece.exits, np.zeros(len(piece.exits)), (piece.exits,), ())
        self._ids: dict[Region, int] = {}

    def costs(self) -> Floats:
        """Return the seconds of the fastest mapping, [entry, exit]."""
        return self.table(self.piece.region, self.share, self.share, self.share)

    # -- what things are

    def number(self, region: Region) -> int:
        """Return the number of a region's structure; equal ones have equal tables."""
        if region not in self._ids:
            self._ids[region] = self.mapper.number(self._structure(region))
        return self._ids[region]

    def _structure(self, region: Region) -> Hashable:
        match region:
            case DirectEdge(source, target):
                ends = self._end(source, self.piece.entries), self._end(target, self.piece.exits)
                return ("edge", *ends, self._wiring(region))
            case series_parallel.Sequence(left, middle, right):
                return ("sequence", self.number(left), self._end(middle, ()), self.number(right))
            case Parallel(first, rest):
                return ("parallel", self.number(first), self.number(rest))
            case Block():
                order = {n: i for i, n in enumerate((region.source, *region.inner))}
                to = {n: i for i, n in enumerate((*region.inner, region.target))}
                edges = tuple((order[e.source], to[e.target], self.number(e)) for e in region.edges)
                return ("block", edges, tuple(self._end(n, ()) for n in region.inner))

    def _end(self, node: Node | None, layouts: tuple[Layout, ...]) -> Hashable:
        if node is None:
            return layouts
        return self.mapper.number_of(self.piece, node), self.degrees.get(node, ())

    def _wiring(self, edge: DirectEdge) -> int:
        numbers = self.piece.numbers
        if edge not in numbers:
            wires = self.piece.wires(edge)
            gradients = tuple(self._has_gradient(v, edge.target) for v, _ in wires)
            numbers[edge] = self.mapper.number((tuple((v.index, i, v.type) for v, i in wires), gradients))
        return numbers[edge]

    def _has_gradient(self, value: Value, target: Node | None) -> bool:
        return value.node in self.piece.trained and (target is None or target in self.piece.trained)

    def views(self, node: Node | None, share: Share, of_end: Views) -> Views:
        """Return the views of an operator on a share; for an end of the graph (None), `of_end`."""
        if node is not None:
            return self.mapper.of(self.piece, node, self.degrees.get(node, ()), share)
        return of_end if len(of_end) else NO_VIEWS

    def source(self, region: Region, share: Share) -> Views:
        """Return the views of the operator before a region, on a share."""
        return self.views(region.source, share, self.entry)

    def target(self, region: Region, share: Share) -> Views:
        """Return the views of the operator after a region, on a share."""
        return self.views(region.target, share, self.exit)

    def inside(self, node: Node, share: Share) -> Views:
        """Return the views of an operator inside a region, on a share."""
        return self.views(node, share, NO_VIEWS)

    def fits(self, region: Region, share: Share) -> bool:
        """Return whether all operators of a region have a view on a share."""
        return all(len(self.inside(n, share)) for n in region.inner)

    # -- what they cost

    def table(self, region: Region, before: Share, share: Share, after: Share) -> Floats:
        """
        Return the seconds [source view on `before`, target view on `after`] of a region on a share, without its ends.
        """
        key = (self.number(region), before, () if isinstance(region, DirectEdge) else share, after)
        tables = self.mapper.tables
        if key not in tables:
            spend(limits().work_region)
            tables[key] = self._table(region, before, share, after)
        return tables[key]

    def _table(self, region: Region, before: Share, share: Share, after: Share) -> Floats:
        match region:
            case DirectEdge():
                return self._edge(region, before, after)
            case series_parallel.Sequence(left, middle, right):
                own = self.inside(middle, share).seconds
                first, second = self.table(left, before, share, share), self.table(right, share, share, after)
                return np.min(first[:, :, None] + (own[:, None] + second)[None], axis=1, initial=np.inf)
            case Parallel():
                return np.min([t for t, _ in self._ways(region, before, share, after)], axis=0)
            case Block():
                states, seconds = self._block(region, before, share, after)
                out = np.full((len(self.source(region, before)), len(self.target(region, after))), np.inf)
                out[states[:, 0], states[:, -1]] = seconds
                return out

    def _edge(self, edge: DirectEdge, before: Share, after: Share) -> Floats:
        source, target = self.source(edge, before), self.target(edge, after)
        out = np.zeros((len(source), len(target)))
        wires = self.piece.wires(edge)
        spend(limits().work_view_pair * len(source) * len(target) * len(wires))
        for i, made in enumerate(zip(*source.makes, strict=True) if wires else ()):
            for j in range(len(target)):
                # One value that is needed in one layout twice is brought there once.
                brought = dict.fromkeys((v, target.needs[operand][j]) for v, operand in wires)
                out[i, j] = sum(
                    self.mapper.prices.move(v.type, made[v.index], need, self._has_gradient(v, edge.target))
                    for v, need in brought
                )
        return out

    def _ways(
        self, region: Parallel, before: Share, share: Share, after: Share
    ) -> list[tuple[Floats, tuple[int, Share, Share] | None]]:
        """Return the table of both sides in sequence on the whole share, and of each split with both at once."""
        first, rest = region.first, region.rest
        ways: list[tuple[Floats, tuple[int, Share, Share] | None]] = [
            (self.table(first, before, share, after) + self.table(rest, before, share, after), None)
        ]
        if first.inner and rest.inner:
            for way in splits(share, self.machine.mesh.sizes, self.machine.axis_levels):
                _, one, other = way
                if self.fits(first, one) and self.fits(rest, other):
                    both = self.table(first, before, one, after), self.table(rest, before, other, after)
                    ways.append((np.maximum(*both), way))
        return ways

    def _block(self, region: Block, before: Share, share: Share, after: Share) -> tuple[Ints, Floats]:
        """
        Return the best partial mappings by beam search, and their seconds.

        A mapping is a row with a view per column: the source first, the target last.
        """
        order = (*region.inner, region.target)
        column: dict[Node | None, int] = {n: i + 1 for i, n in enumerate(region.inner)}
        column[region.source] = 0
        last_use = {e.source: order.index(e.target) for e in region.edges}
        states = np.arange(len(self.source(region, before)))[:, None]
        seconds = np.zeros(len(states))
        of_each = [self.inside(n, share).seconds for n in region.inner]
        for i, node in enumerate(order):
            ends = i == len(region.inner)
            own = np.zeros(len(self.target(region, after))) if ends else of_each[i]
            total = seconds[:, None] + own[None]
            spend(limits().work_region + limits().work_block_entry * states.size * len(own))
            for edge in region.edges:
                if edge.target is node:
                    at = before if edge.source is region.source else share
                    total = (
                        total + self.table(edge, at, share, after if ends else share)[states[:, column[edge.source]]]
                    )
            states = np.hstack(
                [np.repeat(states, len(own), axis=0), np.tile(np.arange(len(own)), len(states))[:, None]]
            )
            live = [
                0,
                *(column[n] for n in region.inner[: i + 1] if last_use.get(n, 0) > i),
                *([i + 1] if ends else []),
            ]
            states, seconds = _best(states, total.reshape(-1), live, None if ends else limits().beam)
        return states, seconds

    # -- which views they are

    def chosen(self, entry: int, exit: int) -> dict[Node, Assignment]:
        """Return the view of every operator."""
        found: dict[Node, Assignment] = {}
        start = (0,) * len(self.share)
        self._choose(self.piece.region, (self.share, self.share, self.share), (entry, exit), start, found)
        return found

    def _choose(
        self,
        region: Region,
        shares: tuple[Share, Share, Share],
        ends: tuple[int, int],
        start: Sequence[int],
        found: dict[Node, Assignment],
    ) -> None:
        """Choose the views inside a region whose share begins at `start`, given one view of each of its ends."""
        before, share, after = shares
        match region:
            case DirectEdge():
                return
            case series_parallel.Sequence(left, middle, right):
                first, second = self.table(left, before, share, share), self.table(right, share, share, after)
                of_middle = self.inside(middle, share)
                # As in the table, so that the same one is least.
                at = int(np.argmin(first[ends[0]] + (of_middle.seconds + second[:, ends[1]])))
                found[middle] = view_at(of_middle.assignments[at], start)
                self._choose(left, (before, share, share), (ends[0], at), start, found)
                self._choose(right, (share, share, after), (at, ends[1]), start, found)
            case Parallel(first, rest):
                ways = self._ways(region, before, share, after)
                _, way = min(ways, key=lambda w: w[0][ends])
                axis, one, other = way if way is not None else (0, share, share)
                self._choose(first, (before, one, after), ends, start, found)
                if way is not None:
                    start = [c + (one[axis] if a == axis else 0) for a, c in enumerate(start)]
                self._choose(rest, (before, other, after), ends, start, found)
            case Block():
                states, _ = self._block(region, before, share, after)
                at = np.flatnonzero((states[:, 0] == ends[0]) & (states[:, -1] == ends[1]))[0]
                for node, view in zip(region.inner, states[at, 1:-1], strict=True):
                    found[node] = view_at(self.inside(node, share).assignments[int(view)], start)


def _best(states: Ints, seconds: Floats, live: Sequence[int], beam: int | None) -> tuple[Ints, Floats]:
    """Return the fastest of the mappings equal in their live columns; at most `beam` for each view of the source."""
    order = np.argsort(seconds, kind="stable")
    order = order[np.isfinite(seconds[order])]
    states, seconds = states[order], seconds[order]
    if not len(states):
        return states, seconds
    _, first = np.unique(states[:, live], axis=0, return_index=True)
    first = np.sort(first)
    states, seconds = states[first], seconds[first]
    if beam is None:
        return states, seconds
    by_source = np.argsort(states[:, 0], kind="stable")
    _, begins, counts = np.unique(states[by_source, 0], return_index=True, return_counts=True)
    rank = np.arange(len(states)) - np.repeat(begins, counts)
    keep = np.sort(by_source[rank < beam])
    return states[keep], seconds[keep]
