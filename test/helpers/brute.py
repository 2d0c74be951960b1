"""
The least cost of a small graph by trying everything, on numpy arrays; nothing of the search's own code is used.

A table over the configurations of all operators adds up, entry by entry, what `cost.plan` charges the plan: kernels,
halos, and for every value the best of all layouts it may rest in or be relayed through. Operators that read a value in
one layout share the move, as in the emitted program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt
from devices import layouts

from unity_ir.cost.halos import halo_moves
from unity_ir.cost.plan import update_time
from unity_ir.cost.work import work
from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import Node, Value, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.reshard import moves_from
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    GridRole,
    Layout,
    dual,
    layout_type,
    operand_layout,
    result_layout,
)
from unity_ir.tdl.syntax import NOT_FLOATING

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass
class Distances:
    """Seconds of the cheapest moves between any two layouts, on one machine: Floyd and Warshall's shortest paths."""

    machine: Machine
    _found: dict[object, tuple[list[Layout], Floats]] = field(default_factory=dict)

    def of(self, value: Value) -> tuple[list[Layout], Floats]:
        """The layouts a value may have, and seconds [from, to]."""
        shape, dtype = value.type.shape, value.type.dtype
        if (shape, dtype) not in self._found:
            every = [x for x in layouts(shape, self.machine.mesh) if dtype not in NOT_FLOATING or SUM not in x]
            number = {layout: i for i, layout in enumerate(every)}
            seconds = np.full((len(every), len(every)), np.inf)
            np.fill_diagonal(seconds, 0.0)
            for layout, i in number.items():
                for move, after in moves_from(layout, shape, self.machine.mesh):
                    if after in number:
                        j = number[after]
                        seconds[i, j] = min(seconds[i, j], self.machine.move_time(move, dtype))
            for middle in range(len(every)):
                np.minimum(seconds, seconds[:, middle, None] + seconds[middle], out=seconds)
            self._found[shape, dtype] = every, seconds
        return self._found[shape, dtype]


class TooMany(Exception):
    """More combinations than there is room for."""


@dataclass(frozen=True)
class _Use:
    """One operand of an operator."""

    node: Node
    layouts: Ints
    """Per configuration."""
    trained: bool


class Brute:
    """Every plan of a serial graph on a machine of few axes."""

    def __init__(
        self, graph: Graph, machine: Machine, optimizer: Optimizer, distances: Distances, limit: int = 2_000_000
    ):
        """Raises `TooMany` where a table would have more entries than `limit`."""
        self.graph, self.machine, self.optimizer, self.distances = graph, machine, optimizer, distances
        self.mesh = machine.mesh
        self.nodes = graph.nodes()
        self.operators = [n for n in self.nodes if n.is_compute]
        self.users = graph.users()
        self.ways: dict[Node, list[Assignment]] = {}
        for node in self.operators:
            self.ways[node] = self._configurations(node)
            if prod(map(len, self.ways.values())) > limit:
                raise TooMany
        self.limit = limit

    # -- what there is to choose from

    @cached_property
    def trained(self) -> set[Node]:
        """The nodes between a weight and the loss, or any output if there is no loss."""
        whole = self.graph.outputs[0].shape == ()
        above = self._before(v.node for v in (self.graph.outputs[:1] if whole else self.graph.outputs))
        below: set[Node] = set()
        for node in self.nodes:
            if node.op == "weight" or any(v.node in below and v.type.is_floating for v in node.operands):
                below.add(node)
        return above & below

    def _before(self, nodes: Iterable[Node]) -> set[Node]:
        found, stack = set[Node](), list(nodes)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [v.node for v in node.operands]
        return found

    def _configurations(self, node: Node) -> list[Assignment]:
        """Everything each axis may do, as far as sizes divide and integers are not added up."""
        analysis = node.analysis
        may: tuple[GridRole, ...] = (*analysis.splittable, COPY, REPEAT, *analysis.carriers)
        out: list[Assignment] = []
        for way in product(may, repeat=len(self.mesh.sizes)):
            degrees = {v: 1 for v in analysis.splittable}
            for what, size in zip(way, self.mesh.sizes, strict=True):
                if isinstance(what, str):
                    degrees[what] *= size
            there = [(v, operand_layout(analysis, i, way)) for i, v in enumerate(node.operands)]
            there += [(v, result_layout(analysis, i, way)) for i, v in enumerate(node.results)]
            if all(analysis.bound.extents[v] % d == 0 for v, d in degrees.items()) and all(
                layout in self.distances.of(v)[0] for v, layout in there
            ):
                out.append(way)
        return out

    # -- what it costs

    @cached_property
    def seconds(self) -> Floats:
        """Of every combination of configurations, with the best rests and relays: an axis per operator."""
        total = np.zeros(tuple(len(self.ways[n]) for n in self.operators))
        for node in self.operators:
            total += self._spread([node], np.array([self._operator(node, way) for way in self.ways[node]]))
        for node in self.nodes:
            for value in node.results:
                if node.is_leaf or value in self.users:
                    involved, seconds = self._value(value)
                    total += self._spread(involved, seconds)
        return total

    def _spread(self, involved: Sequence[Node], seconds: Floats) -> Floats:
        """A table over some operators, as one over all."""
        places = [self.operators.index(n) for n in involved]
        seconds = seconds.transpose(np.argsort(places))
        return seconds.reshape([len(self.ways[n]) if i in places else 1 for i, n in enumerate(self.operators)])

    def _operator(self, node: Node, way: Assignment) -> float:
        """Kernels, and halos there and back."""
        degrees: dict[str, int] = {}
        for what, size in zip(way, self.mesh.sizes, strict=True):
            if isinstance(what, str):
                degrees[what] = degrees.get(what, 1) * size
        needs = tuple(node in self.trained and v.node in self.trained for v in node.operands)
        operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
        named = tuple((v, degrees[v]) for v in node.analysis.bound.extents if v in degrees)
        read = [(v, operand_layout(node.analysis, i, way)) for i, v in enumerate(node.operands)]
        done = work(node.op, operands, node.attributes, named, needs, tuple(read.index(r) for r in read))
        seconds = done.forward_time(self.machine.device) + done.backward_time(self.machine.device)
        for i, exchanged in halo_moves(node, way, self.mesh).items():
            dtype = node.operands[i].type.dtype
            seconds += sum(self.machine.move_time(m, dtype) for pair in exchanged for m in pair[: 1 + needs[i]])
        return seconds

    def _uses(self, value: Value) -> list[_Use]:
        number = {layout: i for i, layout in enumerate(self.distances.of(value)[0])}
        out: list[_Use] = []
        for user, i in self.users.get(value, ()):
            needed = [number[operand_layout(user.analysis, i, way)] for way in self.ways[user]]
            out.append(_Use(user, np.array(needed), {user, value.node} <= self.trained))
        return out

    def _value(self, value: Value) -> tuple[list[Node], Floats]:
        """Seconds to bring a value to its users, over the configurations of the operators that make and read it."""
        every, _ = self.distances.of(value)
        uses = self._uses(value)
        made = None
        if not value.node.is_leaf:
            number = {layout: i for i, layout in enumerate(every)}
            made = np.array(
                [number[result_layout(value.node.analysis, value.index, way)] for way in self.ways[value.node]]
            )
        involved = list(dict.fromkeys([*([] if made is None else [value.node]), *(u.node for u in uses)]))
        # Configurations that make and need the same count once.
        codes: list[Ints] = []
        firsts: list[Ints] = []
        for node in involved:
            columns = [u.layouts for u in uses if u.node is node]
            columns += [made] if made is not None and node is value.node else []
            _, first, code = np.unique(np.stack(columns, 1), axis=0, return_index=True, return_inverse=True)
            codes.append(code.reshape(-1))
            firsts.append(first)
        if prod(map(len, firsts)) * len(every) > 40 * self.limit:
            raise TooMany

        def along(node: Node, of_ways: Ints) -> Ints:
            at = involved.index(node)
            return of_ways[firsts[at]].reshape([-1 if i == at else 1 for i in range(len(involved))])

        needs = [(along(u.node, u.layouts), u.trained) for u in uses]
        start = None if made is None else along(value.node, made)
        best = np.full([len(f) for f in firsts], np.inf)
        for seconds in self._relayed(value, start, needs):
            np.minimum(best, seconds, out=best)
        return involved, best[np.ix_(*codes)]

    def _relayed(self, value: Value, made: Ints | None, needs: Sequence[tuple[Ints, bool]]) -> Iterator[Floats]:
        """For every relay the seconds from where a value is made, or where it then best rests, to all that read it."""
        there, back = self._ways(value)
        trained = any(t for _, t in needs)
        # Of those who read it in one layout the first one pays, and for the gradient the first that has one.
        pays: list[tuple[Ints, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]] = []
        for i, (need, is_trained) in enumerate(needs):
            first, first_back = np.asarray(True), np.asarray(is_trained)
            for other, other_trained in needs[:i]:
                first = first & (need != other)
                first_back = first_back & ((need != other) | (not other_trained))
            pays.append((need, first, first_back))
        rests = self._rests(value)[:, None] + there + trained * back if made is None else None
        for at in range(len(there)):
            total = there[made, at] + trained * back[made, at] if rests is None else rests[:, at].min()
            for need, first, first_back in pays:
                total = total + first * there[at, need] + first_back * back[at, need]
            yield total

    def _ways(self, value: Value) -> tuple[Floats, Floats]:
        """Seconds [from, to] of a value, and of its gradient back between the duals."""
        every, seconds = self.distances.of(value)
        if value.type.dtype in NOT_FLOATING:
            return seconds, np.zeros_like(seconds)
        number = {layout: i for i, layout in enumerate(every)}
        duals = np.array([number[dual(layout)] for layout in every])
        return seconds, seconds[np.ix_(duals, duals)].T

    def _rests(self, value: Value) -> Floats:
        """Per layout, what a leaf costs that rests in it; nothing rests in copies or addends."""
        every, _ = self.distances.of(value)
        out = np.full(len(every), np.inf)
        for i, layout in enumerate(every):
            if COPY not in layout and SUM not in layout:
                out[i] = 0.0
                if value.node.op == "weight" and value.node in self.trained:
                    type = layout_type(value.type, layout, self.mesh)
                    out[i] = update_time(leaf("weight", type, name="piece"), self.optimizer, self.machine)
        return out

    # -- plans

    def plan(self, choice: Sequence[int]) -> Graph:
        """The plan of one combination of configurations, with the best rests and relays."""
        ways = {n: self.ways[n][i] for n, i in zip(self.operators, choice, strict=True)}
        rests: dict[Value, Layout] = {}
        relays: dict[Value, Layout] = {}
        for value in (v for n in self.nodes for v in n.results if n.is_leaf or v in self.users):
            every, _ = self.distances.of(value)
            number = {layout: i for i, layout in enumerate(every)}
            node = value.node
            made = None if node.is_leaf else np.asarray(number[result_layout(node.analysis, value.index, ways[node])])
            needs = [
                (np.asarray(number[operand_layout(u.analysis, i, ways[u])]), {u, node} <= self.trained)
                for u, i in self.users.get(value, ())
            ]
            at = int(np.argmin(list(self._relayed(value, made, needs))))
            relays[value] = rests[value] = every[at]
            if node.is_leaf:
                there, back = self._ways(value)
                seconds = self._rests(value) + there[:, at] + any(t for _, t in needs) * back[:, at]
                rests[value] = every[int(np.argmin(seconds))]
        return materialise(self.graph, ways, self.mesh, rests, relays)
