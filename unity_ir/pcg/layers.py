"""
Find the layers of a serial forward graph by its structure: where a single value is all that later operators read of
earlier ones, the graph can be cut, and a run of equal parts between such cuts is a run of layers.

    embedding | attention + x | mlp + x | attention + x | mlp + x | norm, head, loss
                \\_____ layer _________/  \\_____ layer _________/

Recompute keeps such values (checkpoints), as what is between two of them can then be computed again by itself. Searches
for rewrites look at a graph with few of its equal layers (`shortened`), since all of them want the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph, topological
from unity_ir.pcg.node import Node, Value, rebuild

LONGEST = 64
"""Parts of a layer at most: a layer of a transformer has two, one per residual sum."""


@dataclass(frozen=True, slots=True)
class Part:
    """
    Consecutive compute operators of a serial forward graph, in graph order, between two places where the graph can be
    divided since a single value leads from one side to the other. `end` is the value that leads out of the part: the
    only one made in it that later operators read; None for the last part, which has the loss.
    """

    nodes: tuple[Node, ...]
    end: Value | None

    def joined(self, other: Part) -> Part:
        """Return this part and `other`, the next in graph order, as one part."""
        return Part((*self.nodes, *other.nodes), other.end)


@lru_cache(maxsize=64)
def parts(graph: Graph) -> tuple[Part, ...]:
    """
    Return the parts of a serial forward graph, in graph order. A part ends wherever a single value is all that later
    operators read of earlier ones: after a residual sum of a transformer, say.

    The parts have all compute nodes that depend on an input and a weight, and lead to the loss. Values that other nodes
    make, such as masks that every layer reads, do not count: later parts may read them, too. Memoised.
    """
    order = [n for n in graph.nodes() if n.is_compute and n in nodes_with_gradient(graph, frozen=True)]
    flow = set[Node]()
    for node in graph.nodes():
        if node.op == "input" or any(v.node in flow for v in node.operands):
            flow.add(node)
    order = [n for n in order if n in flow]
    inside = set(order)
    last: dict[Value, int] = {}
    for i, node in enumerate(order):
        for value in node.operands:
            if value.node in inside:
                last[value] = i
    last |= {v: len(order) for v in graph.outputs if v.node in inside}
    found: list[Part] = []
    live = set[Value]()
    begin = 0
    for i, node in enumerate(order):
        live |= {v for v in node.results if v in last}
        live -= {v for v in node.operands if last.get(v) == i}
        if len(live) == 1 and i + 1 < len(order):
            (end,) = live
            if not found or found[-1].end != end:
                found.append(Part(tuple(order[begin : i + 1]), end))
                begin = i + 1
    return (*found, Part(tuple(order[begin:]), None)) if begin < len(order) else tuple(found)


@dataclass(frozen=True, slots=True)
class Layers:
    """
    The parts of a graph with every layer joined to one: `before` the first layer; `layers`, with the parts between
    them; and `tail`, after the last layer. If there are no layers, all parts are in `tail`.
    """

    before: tuple[Part, ...]
    layers: tuple[Part, ...]
    tail: tuple[Part, ...]


@lru_cache(maxsize=64)
def layers(graph: Graph) -> Layers:
    """
    Find the layers of a serial forward graph; return its parts (`parts`), those of each layer joined to one. A layer is
    a part, or several parts in a row, that occurs at least twice in a row with the same operators, connected in the
    same way, whatever the sizes. Memoised.

    From each part on, the repetition that covers most parts is taken and, of equals, that of the shortest layer. A part
    between two repetitions (such as the first block of a stage of a ResNet) is a layer by itself.
    """
    every = parts(graph)
    shapes: dict[object, int] = {}
    kinds = [shapes.setdefault(_structure(part), len(shapes)) for part in every]
    found: list[tuple[int, Part]] = []
    at, end = 0, 0
    while at < len(every):
        length, times = _run(kinds, at)
        step = length if times > 1 else 1
        for _ in range(times):
            part = every[at]
            for other in every[at + 1 : at + step]:
                part = part.joined(other)
            found.append((times, part))
            at += step
        if times > 1:
            end = len(found)
    begin = next((i for i, (times, _) in enumerate(found) if times > 1), 0)
    joined = tuple(part for _, part in found)
    return Layers(joined[:begin], joined[begin:end], joined[end:])


def _run(kinds: Sequence[int], at: int) -> tuple[int, int]:
    """Return (parts of a layer, layers) of the longest run of equal layers that begins at part `at`; (1, 1) if none."""
    best = (1, 1)
    for length in range(1, min(LONGEST, (len(kinds) - at) // 2) + 1):
        layer, times = kinds[at : at + length], 1
        while kinds[at + times * length : at + (times + 1) * length] == layer:
            times += 1
        if times > 1 and times * length > best[0] * best[1]:
            best = length, times
    return best


def shortened(graph: Graph, keep: int) -> Graph | None:
    """
    Return a serial forward graph with fewer equal layers: of its longest run of them, only the first `keep` stay, and
    what follows the run reads the result of the last of these. None if no run has more than `keep` layers.

    Layers are equal if they have the same operators, connected in the same way, with the same attributes and types.
    """
    longest = _longest_run(graph)
    if len(longest) <= keep:
        return None
    last, kept = longest[-1].end, longest[keep - 1].end
    assert last is not None
    assert kept is not None
    new: dict[Value, Value] = {last: kept}
    after = topological(graph.roots, first=graph.inputs)
    for node in after[after.index(last.node) + 1 :]:
        operands = tuple(new.get(v, v) for v in node.operands)
        if operands != node.operands:
            new.update(zip(node.results, rebuild(node, operands, node.view).results, strict=True))
    return replace(graph, outputs=tuple(new.get(v, v) for v in graph.outputs))


def shortened_with_map(graph: Graph, keep: int) -> tuple[Graph, tuple[int, ...]]:
    """
    Return (short, of): the graph as `shortened` makes it (`graph` itself if no run has more than `keep` layers), and
    the index `of[i]` of the part of `short` that is equal to part i of `graph`, as `parts` numbers both. So what a
    search finds for the parts of `short` can be carried over to `graph`.

    Layers are left out in the middle of the run; their parts are equal to those of the kept layer `keep // 2` (from 0).
    """
    every, short = parts(graph), shortened(graph, keep)
    if short is None:
        return graph, tuple(range(len(every)))
    run = _longest_run(graph)
    begin = next(i for i, part in enumerate(every) if part.nodes[0] is run[0].nodes[0])
    each = sum(part.nodes[0] in run[0].nodes for part in every)
    half, of = keep // 2, list[int]()
    for i in range(len(every)):
        layer, at = divmod(i - begin, each)
        if layer >= len(run) - keep + half:
            layer -= len(run) - keep
        elif layer > half:
            layer = half
        of.append(begin + layer * each + at)
    assert max(of) + 1 == len(parts(short))
    return short, tuple(of)


def _longest_run(graph: Graph) -> list[Part]:
    """Return the most layers in a row that are equal."""
    kinds: dict[object, int] = {}
    found = groupby(layers(graph).layers, lambda part: kinds.setdefault(_whole(part), len(kinds)))
    return max((list(run) for _, run in found), key=len, default=list[Part]())


def _whole(part: Part) -> object:
    """Return what two parts have in common if they are equal but for their weights' names."""
    own = tuple((n.attributes, n.types, tuple(v.type for v in n.operands)) for n in part.nodes)
    return _structure(part), own, None if part.end is None else part.end.type


def _structure(part: Part) -> object:
    """
    Return what two parts have in common if they have the same operators on each other's results, on weights, trained
    and frozen alike, and on what is made before them.
    """
    number = {node: i for i, node in enumerate(part.nodes)}

    def other(node: Node) -> int:
        """Return the number of a node outside of the part, below 0."""
        return -1 if node.is_trained else -2 if node.op == "weight" else -3

    return tuple(
        (node.op, tuple((number.get(v.node, other(v.node)), v.index) for v in node.operands)) for node in part.nodes
    )
