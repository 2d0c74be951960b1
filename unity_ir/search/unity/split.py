"""
Split a graph into subgraphs where one tensor connects them, and join these again (Unity, section 5.3).

Cuts are after operators that all paths go through, where they disrupt the fewest substitutions, such that every
subgraph has a minimum number of operators. A subgraph reads the tensor that flows into it from a leaf, its entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph, topological
from unity_ir.pcg.node import Node, Value, leaf, rebuild
from unity_ir.pcg.sharding import Layout
from unity_ir.rules.derivation import RuleApplication, apply_at
from unity_ir.rules.rule import Rule
from unity_ir.search.unity.device_shares import Degrees, divisors, views, whole
from unity_ir.search.unity.machine_mapping import Floats, Flow, Subgraph
from unity_ir.search.unity.substitutions import CandidatePCG

ENTRY = "what flows in"
"""Name of the leaf that a subgraph reads; no weight of a module has blanks in its name."""


@dataclass(frozen=True, eq=False)
class Selection:
    """
    The best candidate for a subgraph, for each layout in which its entry may arrive and each in which its result may
    leave.

    `candidates` is [entry][exit], `seconds` [entry, exit].
    """

    seconds: Floats
    candidates: list[list[CandidatePCG]]


@dataclass(frozen=True, eq=False)
class Chosen:
    """A subgraph of the graph that was split, and the candidate chosen for it."""

    piece: Subgraph
    candidate: CandidatePCG


# --- cutting


def subgraphs(graph: Graph, machine: Machine, rules: Sequence[Rule], least: int) -> list[Subgraph]:
    """
    Split a serial graph into subgraphs at operators that all paths go through (Unity, section 5.3); return them in
    order. Each says in which layouts its values at the cuts may pass (`partitionings`).

    Every subgraph has at least `least` operators. Cuts are where they disrupt the fewest matches of `rules`. Where the
    graph cannot be cut, the result is the whole graph as one subgraph.
    """
    cuts = _cuts(graph, rules, least)
    if not cuts:
        return [Subgraph(graph)]
    with_gradient = nodes_with_gradient(graph)
    entries = [leaf("weight" if n in with_gradient else "input", n.types[0], name=ENTRY) for n in cuts]
    layouts = [partitionings(n.types[0].shape, machine) for n in cuts]
    new: dict[Value, Value] = {}
    out: list[Subgraph] = []
    ends = [*((n.result,) for n in cuts), graph.outputs]
    order = topological(graph.outputs)
    position = {n: i for i, n in enumerate([n for n in order if n.is_compute])}
    begin = -1
    for i, outputs in enumerate(ends):
        entry = entries[i - 1] if i else None
        if entry is not None:
            new[cuts[i - 1].result] = entry.result
        end = position[cuts[i]] if i < len(cuts) else len(position)
        for node in order:
            if node.is_leaf:
                new.setdefault(node.result, node.result)
            elif begin < position[node] <= end:
                built = rebuild(node, [new[v] for v in node.operands])
                new.update(zip(node.results, built.results, strict=True))
        begin = end
        results = tuple(new[v] for v in outputs)
        inputs = tuple(n for n in topological(results) if n.op == "input")
        part = Graph(graph.name, inputs, results)
        into = layouts[i - 1] if i else ()
        out.append(Subgraph(part, entry, into, layouts[i] if i < len(cuts) else ()))
    return out


def _cuts(graph: Graph, rules: Sequence[Rule], least: int) -> list[Node]:
    """
    Return the operators to cut after: at least `least` operators between any two, where cuts disrupt the fewest rules.
    """
    flow = Flow(graph)
    nodes = flow.nodes
    place = {n: i for i, n in enumerate(nodes)}
    across = [0] * len(nodes)
    for rule in rules:
        for match in rule.matches(graph):
            at = [place[n] for n in match.nodes if n in place]
            for i in range(min(at, default=0), max(at, default=0)):
                across[i] += 1
    possible = [place[n] for n in flow.cuts(None, nodes, None) if len(n.types) == 1 and n.result not in graph.outputs]

    def between(begin: int, end: int) -> list[int]:
        """Return the cuts within `nodes[begin:end]`; a cut ends a part."""
        may = [i for i in possible if begin + least <= i + 1 <= end - least]
        if not may:
            return []
        at = min(may, key=lambda i: (across[i], abs(2 * (i + 1) - begin - end), i))
        return [*between(begin, at + 1), at, *between(at + 1, end)]

    return [nodes[i] for i in between(0, len(nodes))]


def partitionings(shape: Sequence[int], machine: Machine) -> tuple[Layout, ...]:
    """
    Return the layouts (a role per mesh axis) in which a tensor of shape `shape` may pass from one subgraph to the next:
    whole on every device; one dim sharded, by any degree; or two dims sharded, together over all devices. Of the
    layouts that have the same degrees on other mesh axes only one is returned, since the mapping of the whole graph
    chooses axes again.
    """
    found: dict[tuple[tuple[int, int], ...], None] = {(): None}
    for degree in divisors(machine.devices)[1:]:
        found.update(dict.fromkeys(((dim, degree),) for dim in range(len(shape))))
        for two in combinations(range(len(shape)), 2):
            found[tuple(zip(two, (degree, machine.devices // degree), strict=True))] = None
    out: dict[Layout, None] = {}
    for degrees in found:
        fits = all(shape[dim] % degree == 0 for dim, degree in degrees)
        if fits and all(degree > 1 for _, degree in degrees):
            first = views(degrees, whole(machine), machine.mesh.sizes, machine.axis_levels)[0]
            out[tuple(r for r in first if isinstance(r, int))] = None
    return tuple(out)


# --- putting together


def compose(graph: Graph, chosen: Sequence[Chosen]) -> tuple[Graph, dict[Node, Degrees]]:
    """
    Join the graphs of the chosen candidates, one per subgraph in order, into one serial graph: each subgraph reads what
    the one before makes. Return (the joined graph, the degrees of each of its operators).

    The joined graph has the name and inputs of `graph`, the one that was split. Degrees are (role, degree) pairs; ()
    for operators without degrees in the candidate.
    """
    whole, degrees = _joined(graph, [(c.piece, c.candidate.piece.graph) for c in chosen])
    return whole, {
        new: c.candidate.degrees.get(old, ())
        for c, nodes in zip(chosen, degrees, strict=True)
        for old, new in nodes.items()
    }


def _joined(graph: Graph, graphs: Sequence[tuple[Subgraph, Graph]]) -> tuple[Graph, list[Mapping[Node, Node]]]:
    """Join parts in sequence, each part's entry being the output of the one before."""
    outputs: list[Value] = []
    nodes: list[Mapping[Node, Node]] = []
    for piece, part in graphs:
        new: dict[Value, Value] = {}
        found: dict[Node, Node] = {}
        for node in topological(part.outputs):
            if node is piece.entry:
                new[node.result] = outputs[0]
                continue
            built = node if node.is_leaf else rebuild(node, [new[v] for v in node.operands])
            new.update(zip(node.results, built.results, strict=True))
            if node.is_compute:
                found[node] = built
        outputs = [new[v] for v in part.outputs]
        nodes.append(found)
    return Graph(graph.name, graph.inputs, tuple(outputs)), nodes


def derivation(graph: Graph, chosen: Sequence[Chosen], rules: Sequence[Rule]) -> tuple[RuleApplication, ...] | None:
    """
    Return the rewrites of all subgraphs as one derivation of the whole `graph`: the same rule applications in order,
    but each names (`at`) the operators that it is applied at by their numbers in the whole graph.

    `chosen` are the subgraphs in order with their candidates; `rules` are looked up by the names in the candidates'
    steps. Returns None if a rewrite cannot be replayed on the whole graph.
    """
    known = {rule.name: rule for rule in rules}
    now = [(c.piece, c.piece.graph) for c in chosen]
    whole, out = graph, list[RuleApplication]()
    for i, c in enumerate(chosen):
        for step in c.candidate.steps:
            rule, before = known[step.rule], now[i][1]
            inside = _joined(graph, now)[1][i]
            now[i] = (c.piece, apply_at(before, rule, step.at, dict(step.given)))
            target, _ = _joined(graph, now)
            if "," in step.at:
                of_part, number = before.nodes(), {node: k for k, node in enumerate(whole.nodes())}
                nodes = [inside[of_part[int(place.partition("#")[2])]] for place in step.at.split(",")]
                places = [f"{node.op}#{number[node]}" for node in nodes]
                after = rule.at_once(whole, places)
                found = ", ".join(places) if after is not None and after.outputs == target.outputs else None
            else:
                ways = rule.applications(whole)
                found = next((place for place, after in ways if after.outputs == target.outputs), None)
            if found is None:
                return None
            out.append(RuleApplication(step.rule, found))
            whole = target
    return tuple(out)


# --- equal subgraphs


def structure(subgraph: Subgraph) -> object:
    """
    Return a hashable key of a subgraph: equal for subgraphs that differ only in the names of their leaves, so that one
    search serves all of them.
    """
    nodes = topological(subgraph.graph.outputs)
    number = {n: i for i, n in enumerate(nodes)}
    return (
        subgraph.entries,
        subgraph.exits,
        number.get(subgraph.entry) if subgraph.entry is not None else None,
        tuple(
            (
                n.op,
                tuple((k, v) for k, v in n.attributes if not (n.is_leaf and k == "name")),
                n.types,
                tuple((number[v.node], v.index) for v in n.operands),
            )
            for n in nodes
        ),
        tuple((number[v.node], v.index) for v in subgraph.graph.outputs),
    )


def carried_over(found: Selection, subgraph: Subgraph, rules: Sequence[Rule]) -> Selection:
    """
    Return the best candidates for a subgraph, given those `found` for one of equal `structure`: the same degrees and
    seconds, on graphs rebuilt by replaying the candidates' rewrites on this one.

    `rules` are looked up by the names in the candidates' steps.
    """
    known = {rule.name: rule for rule in rules}
    done: dict[CandidatePCG, CandidatePCG] = {}

    def carried(candidate: CandidatePCG) -> CandidatePCG:
        if candidate not in done:
            graph = subgraph.graph
            for step in candidate.steps:
                graph = apply_at(graph, known[step.rule], step.at, dict(step.given))
            here = Subgraph(graph, subgraph.entry, subgraph.entries, subgraph.exits)
            pairs = zip(here.flow.nodes, candidate.piece.flow.nodes, strict=True)
            done[candidate] = CandidatePCG(here, {n: candidate.degrees.get(o, ()) for n, o in pairs}, candidate.steps)
        return done[candidate]

    return Selection(found.seconds, [[carried(c) for c in row] for row in found.candidates])
