"""
Make the data of the picture of a graph: operators and leaves with layouts, seconds and bytes, and the moves between.

Nodes are in segments: what comes before the layers of a model (`pcg.layers`), each layer, and what comes after them. A
segment's `like` is the first one with the same operators, layouts, seconds and moves, so that a picture draws one of
these and folds the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from unity_ir.cost.plan import PlanCost, Reshard
from unity_ir.cost.stats import assignment_text, reshard_words
from unity_ir.messages import printable
from unity_ir.pcg.collectives import FREE
from unity_ir.pcg.graph import Graph, erase_with
from unity_ir.pcg.layers import Part, layers
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.reshard import Move, sum_over
from unity_ir.pcg.sharding import GridRole, role_name
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.report.packed import Json, Table, nanoseconds
from unity_ir.search.explain import operators


@dataclass(frozen=True, slots=True)
class Segment:
    """
    Part of a placed graph that a report draws together, such as a layer: its title, and its leaves and compute nodes.
    """

    title: str
    nodes: list[Node]


class NodeRow(NamedTuple):
    """
    A leaf or compute node in a report's data. The report stores each text and each layout once, in a list: `op`,
    `name`, `type` and `divided` are positions in the list of texts, `layout` one in that of layouts. `forward` and
    `backward` are nanoseconds of all micro-batches together.
    """

    op: int
    name: int
    type: int
    divided: int
    layout: int
    forward: int
    backward: int
    bytes: int
    """Bytes of a device's piece of its results."""
    operands: tuple[int, ...]
    """The numbers of the nodes that make its operands."""


class MoveRow(NamedTuple):
    """
    What a reshard moves between devices, in a report's data. `what`, `forward_kinds` and `backward_kinds` are positions
    in the report's list of texts; `forward` and `backward` are nanoseconds of all micro-batches together.
    """

    made: int
    """The number of the node that makes the value, and ..."""
    users: tuple[int, ...]
    """... those of nodes that read it in the other layout."""
    what: int
    forward: int
    backward: int
    bytes: int
    """Bytes received by all devices together."""
    forward_kinds: int
    backward_kinds: int


class SegmentRow(NamedTuple):
    """
    A segment in a report's data: its title, the number of its first node, how many nodes it has, and the number of the
    first segment that has the same operators, layouts, seconds and moves (its own number, if it is the first).
    """

    title: str
    begin: int
    nodes: int
    like: int


def graph_data(graph: Graph, plan: PlanCost) -> dict[str, Json]:
    """
    Return the data from which a report draws a placed graph, for JSON; `plan` is the graph's cost. It has the mesh
    axes, segments, nodes and moves, and the lists of texts and layouts, each once, to which their numbers refer (a
    layout is the role of every axis, as numbers of texts).
    """
    return _GraphData(graph, plan).data()


class _GraphData:
    def __init__(self, graph: Graph, plan: PlanCost):
        self.graph, self.plan = graph, plan
        self.texts = Table[str]()
        self.layouts = Table[tuple[int, ...]]()
        self.costs = {o.node: o for o in plan.operators}
        self.names = {node: name for name, node in operators(graph).items()}
        self.segments = segments(graph)
        self.number = {node: i for i, node in enumerate(n for s in self.segments for n in s.nodes)}
        self.readers = _readers(graph)

    def data(self) -> dict[str, Json]:
        """Return all of it."""
        machine = self.plan.machine
        found = [self._move(r) for r in (*self.plan.reshards, *self.plan.weight_reshards)]
        moves = [move for move in found if move is not None]
        rows = {node: self._node(node) for node in self.number}
        return {
            "axes": [
                [size, machine.levels[i].name] for size, i in zip(machine.mesh.sizes, machine.axis_levels, strict=True)
            ],
            "segments": self._segments(rows, moves),
            "nodes": list(rows.values()),
            "moves": moves,
            "layouts": self.layouts.entries,
            "texts": self.texts.entries,
        }

    def _node(self, node: Node) -> NodeRow:
        placement = self.plan.placement
        value = node.results[0]
        type = value.type
        roles: Sequence[GridRole] = placement.assignments.get(node, placement.layouts[value])
        cost = self.costs.get(node)
        times = node.micro_batches
        # A node of LEAVES has a name, but for constants.
        name = self.names.get(node) or printable(str(dict(node.attributes).get("name", node.op)))
        bytes = sum(prod(v.type.piece_shape) * ELEMENT_BYTES[v.type.dtype] for v in node.results)
        return NodeRow(
            self.texts[node.op],
            self.texts[name],
            self.texts[str(type).removeprefix("!pcg.tensor<").removesuffix(">")],
            self.texts[assignment_text(roles, placement.mesh) or "one device"],
            self.layouts[tuple(self.texts[role_name(role)] for role in roles)],
            0 if cost is None else nanoseconds(cost.forward * times),
            0 if cost is None else nanoseconds(cost.backward * times),
            bytes,
            tuple(self.number[v.node] for v in map(_made, node.operands)),
        )

    def _move(self, reshard: Reshard) -> MoveRow | None:
        """Return the row of a reshard; None if nothing is moved between devices or copied."""
        machine = self.plan.machine
        moving = [move for move in reshard.moves if move[0].kind not in FREE]
        if not moving:
            return None

        def time(moves: Sequence[tuple[Move, str]]) -> int:
            return nanoseconds(machine.moves_time(moves))

        def kinds(moves: Iterable[Move]) -> int:
            return self.texts[", ".join(m.kind for m in moves if m.kind not in FREE)]

        return MoveRow(
            self.number[_made(reshard.value).node],
            tuple(self.number[user] for user in self._users(reshard)),
            self.texts[reshard_words(reshard)],
            time(reshard.forward_moves),
            time(reshard.backward_moves),
            sum_over(moving, lambda move, dtype: move.traffic(machine.mesh) * ELEMENT_BYTES[dtype]),
            kinds(reshard.forward),
            kinds((*reshard.again, *reshard.backward)),
        )

    def _users(self, reshard: Reshard) -> list[Node]:
        """Return the compute nodes that read what is moved, by a parallel operator or themselves."""
        found = (reader for user in reshard.users for reader in (self.readers[user] if user.is_parallel else [user]))
        return list(dict.fromkeys(found))

    def _segments(self, rows: Mapping[Node, NodeRow], moves: Sequence[MoveRow]) -> list[SegmentRow]:
        around: dict[int, list[tuple[object, ...]]] = {}
        for move in moves:
            for at in {move.made, *move.users}:
                around.setdefault(at, []).append((at == move.made, *move[2:]))
        first: dict[object, int] = {}
        found: list[SegmentRow] = []
        begin = 0
        for i, segment in enumerate(self.segments):
            kind: list[object] = []
            for node in segment.nodes:
                row = rows[node]
                # Operands of earlier segments are alike wherever they are.
                near = tuple(max(-1, n - begin) for n in row.operands)
                kind.append((row._replace(name=0, operands=near), *around.get(self.number[node], ())))
            found.append(SegmentRow(segment.title, begin, len(segment.nodes), first.setdefault(tuple(kind), i)))
            begin += len(segment.nodes)
        return found


def segments(graph: Graph) -> list[Segment]:
    """
    Divide the leaves and compute nodes of a placed graph into segments, in order: what comes before the layers, each
    layer, and what comes after them; empty ones are left out. A node that belongs to no layer, such as a weight, is in
    the segment that reads it, or before the layers if several do. A graph with its backward is one segment.
    """
    nodes = [n for n in graph.nodes() if not n.is_parallel]
    if graph.updates:
        return [Segment("step", nodes)]
    serial, of = erase_with(graph)
    found = layers(serial)
    parts: list[tuple[str, tuple[Part, ...]]] = [("before the layers", found.before)]
    parts += [(f"layer {i}", (layer,)) for i, layer in enumerate(found.layers, 1)]
    parts.append(("after the layers" if found.layers else "graph", found.tail))
    at = {node: i for i, (_, each) in enumerate(parts) for part in each for node in part.nodes}
    users: dict[Node, set[int]] = {}
    places: dict[Node, int] = {}
    for node in reversed(nodes):
        used = users.get(node, set())
        places[node] = at.get(of[node], next(iter(used)) if len(used) == 1 else 0)
        for operand in node.operands:
            users.setdefault(_made(operand).node, set()).add(places[node])
    every = [Segment(title, [n for n in nodes if places[n] == i]) for i, (title, _) in enumerate(parts)]
    return [segment for segment in every if segment.nodes]


def _readers(graph: Graph) -> dict[Node, list[Node]]:
    """Map each parallel operator to the compute nodes that read its result, maybe by further parallel operators."""
    found: dict[Node, list[Node]] = {n: [] for n in graph.nodes() if n.is_parallel}
    for node in reversed(graph.nodes()):
        for operand in node.operands:
            if operand.node.is_parallel:
                found[operand.node] += found[node] if node.is_parallel else [node]
    return found


def _made(value: Value) -> Value:
    """Return the value that parallel operators have made this one of."""
    while value.node.is_parallel:
        value = value.node.operands[0]
    return value
