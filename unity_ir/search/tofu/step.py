"""
Tabulate one step of Tofu's recursion: the roles that operators and tensors may have on one more mesh axis, and the
bytes moved for each pair.

Every tensor is sharded along one dim, every operator along one index variable; bytes are those of the forward and of
the backward that follows from it. Roles on earlier axes are fixed and shrink the pieces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from unity_ir.cost.halos import exchanges
from unity_ir.pcg.differentiate import has_gradient, nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.reshard import Move, move_kind
from unity_ir.pcg.sharding import REPEAT, SUM, GridRole, Mesh, dual, is_shard, operand_role, result_role, shard_count
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.layouts.axes import Floats
from unity_ir.search.tofu.coarsen import Groups
from unity_ir.simulate.choices import fits

Roles = tuple[int, ...]
"""A tensor's role on each axis so far."""


@dataclass(frozen=True)
class StepProblem:
    """
    The choices of one step of Tofu's recursion, which partitions everything along one more mesh axis.

    `operators` and `values` list, for every group, its possible roles on the axis; `edges` has, for an operator group
    and a value group, the bytes of all their moves [operator's choice, value's choice].
    """

    operators: list[list[GridRole]]
    values: list[Roles]
    own: list[Floats]
    """Bytes [choice] of an operator group's halos."""
    edges: dict[tuple[int, int], Floats]
    sizes: list[int]
    """Bytes of one value of each value group, whole."""


@dataclass
class StepBuilder:
    """
    Builds the steps of Tofu's recursion for a graph, each of which partitions everything along one more mesh axis;
    `done` are the sizes of the axes partitioned so far.

    `operators` and `values` have each group's roles on those axes.
    """

    graph: Graph
    groups: Groups
    reduction: bool = True
    """Whether an operator may be divided along what it sums over (Tofu's output reduction)."""
    done: tuple[int, ...] = ()
    operators: dict[int, tuple[GridRole, ...]] = field(default_factory=dict[int, tuple[GridRole, ...]])
    values: dict[int, Roles] = field(default_factory=dict[int, Roles])

    def __post_init__(self) -> None:
        self._with_gradient = nodes_with_gradient(self.graph)
        self._of_operator: dict[int, Node] = {}
        for node, group in self.groups.operators.items():
            self._of_operator.setdefault(group, node)
        self._of_value: dict[int, Value] = {}
        for value, group in self.groups.values.items():
            self._of_value.setdefault(group, value)
        self.operators = dict.fromkeys(self._of_operator, ())
        self.values = dict.fromkeys(self._of_value, ())

    def step(self, size: int) -> StepProblem:
        """
        Return the choices of the next step of Tofu's recursion, along one more mesh axis of `size` devices: each
        group's possible roles on the axis (an index variable of the operators, or a dim of the values, to divide), and
        the bytes moved for each pair of choices of an operator group and a value group. The builder is left unchanged:
        `choose` takes the step.
        """
        alike: dict[Hashable, tuple[list[GridRole], Floats]] = {}
        may: list[list[GridRole]] = []
        own: list[Floats] = []
        for group in sorted(self._of_operator):
            node, roles = self._of_operator[group], self.operators[group]
            key = (self._form(node), roles)
            if key not in alike:
                choices = self._may_operator(node, roles, size)
                alike[key] = choices, self._halos(node, roles, choices, size)
            may.append(alike[key][0])
            own.append(alike[key][1])
        rests = [self._may_value(self._of_value[g], self.values[g], size) for g in sorted(self._of_value)]
        edges: dict[tuple[int, int], Floats] = {}
        known: dict[Hashable, Floats] = {}
        seen = set[tuple[int, Value]]()
        for node, group in self.groups.operators.items():
            for value in dict.fromkeys((*node.operands, *node.results)):
                # Operators of one group read a value in one layout, and so share what is fetched.
                if (group, value) in seen:
                    continue
                seen.add((group, value))
                of = self.groups.values[value]
                slots = tuple(i for i, v in enumerate(node.operands) if v == value)
                made = value.index if value.node == node else None
                gradient = has_gradient(value, self._with_gradient, (node,))
                key = (self._form(node), self.operators[group], slots, made, gradient, rests[of])
                if key not in known:
                    known[key] = self._bytes(node, value, slots, made, gradient, may[group], rests[of], size)
                edges[group, of] = edges.get((group, of), 0.0) + known[key]
        sizes = [self._of_value[g].type.elements * _item(self._of_value[g]) for g in sorted(self._of_value)]
        return StepProblem(may, rests, own, edges, sizes)

    def choose(self, step: StepProblem, size: int, operators: Iterable[int], values: Iterable[int]) -> None:
        """
        Take one step of Tofu's recursion: record the roles chosen for all groups on one more mesh axis, of `size`
        devices.

        `operators` and `values` have, for each operator group and value group by number, the index of its choice in
        `step`.
        """
        for group, choice in enumerate(operators):
            self.operators[group] = (*self.operators[group], step.operators[group][choice])
        for group, choice in enumerate(values):
            self.values[group] = (*self.values[group], step.values[group][choice])
        self.done = (*self.done, size)

    def assignments(self) -> dict[Node, tuple[GridRole, ...]]:
        """Return every operator's role on each mesh axis partitioned so far, such as the index variable it shards."""
        return {n: self.operators[g] for n, g in self.groups.operators.items()}

    def layouts(self) -> dict[Value, Roles]:
        """
        Return the layout in which every value is stored between the operators that make and read it: its role on each
        mesh axis partitioned so far.
        """
        return {v: self.values[g] for v, g in self.groups.values.items()}

    def _form(self, node: Node) -> Hashable:
        """Return a key of an operator's choices and bytes."""
        return node.op, node.attributes, tuple(v.type for v in node.operands), node.types

    # -- what may be

    def _degrees(self, roles: Iterable[GridRole]) -> dict[GridRole, int]:
        degrees: dict[GridRole, int] = {}
        for what, size in zip(roles, self.done, strict=True):
            degrees[what] = degrees.get(what, 1) * size
        return degrees

    def _may_value(self, value: Value, roles: Roles, size: int) -> Roles:
        degrees = self._degrees(roles)
        dims = [d for d, s in enumerate(value.type.shape) if s % (degrees.get(d, 1) * size) == 0]
        return tuple(dims) or (REPEAT,)

    def _may_operator(self, node: Node, roles: tuple[GridRole, ...], size: int) -> list[GridRole]:
        analysis = node.analysis
        found: list[GridRole] = []
        for v in analysis.splittable:
            if not fits(node, (*roles, v), Mesh((*self.done, size))):
                continue
            if self.reduction or all(result_role(analysis, i, v) != SUM for i in range(len(node.types))):
                found.append(v)
        return found or [REPEAT]

    # -- what it moves

    def _halos(self, node: Node, roles: tuple[GridRole, ...], may: list[GridRole], size: int) -> Floats:
        out = np.zeros(len(may))
        if not node.analysis.operand_halos:
            return out
        before = {str(k): d for k, d in self._degrees(roles).items() if isinstance(k, str)}
        for row, what in enumerate(may):
            if isinstance(what, str):
                degrees = {**before, what: before.get(what, 1) * size}
                out[row] = sum(
                    2 * e.border * (size - 1) * _item(node.operands[e.operand])
                    for e in exchanges(node, degrees)
                    if e.variable == what
                )
        return out

    def _bytes(
        self,
        node: Node,
        value: Value,
        slots: tuple[int, ...],
        made: int | None,
        gradient: bool,
        may: list[GridRole],
        rests: Roles,
        size: int,
    ) -> Floats:
        """Return the bytes [operator's choice, value's choice] received in a group of `size` devices."""
        before = self.operators[self.groups.operators[node]]
        table = np.zeros((len(may), len(rests)))
        for row, what in enumerate(may):
            ends: dict[tuple[Roles, int], bool] = {}
            for slot in slots:
                layout = tuple(operand_role(node.analysis, slot, r) for r in (*before, what))
                ends[layout[:-1], layout[-1]] = True
            if made is not None:
                layout = tuple(result_role(node.analysis, made, r) for r in (*before, what))
                ends[layout[:-1], layout[-1]] = False
            for (earlier, role), reads in ends.items():
                elements = value.type.elements // shard_count(earlier, self.done)
                for column, rest in enumerate(rests):
                    source, target = (rest, role) if reads else (role, rest)
                    table[row, column] += received(source, target, elements, size) * _item(value)
                    if gradient:
                        (back,), (to,) = dual((target,)), dual((source,))
                        item = ELEMENT_BYTES[value.type.grad_dtype]
                        table[row, column] += received(back, to, elements, size) * item
        return table


@lru_cache(maxsize=65536)
def received(source: int, target: int, elements: int, size: int) -> float:
    """
    Return the elements that all `size` devices of a group receive together when a tensor goes from role `source` to
    role `target` on their mesh axis; 0 if the roles are equal.

    A role is a dim's number or one of `pcg.sharding`'s negative ones (SUM, REPEAT, ..). `elements` are those of the
    part of the tensor that earlier axes leave to the group, before this axis divides it.
    """
    if source == target:
        return 0.0
    piece = elements // size if is_shard(source) else elements
    return Move(move_kind(source, target), (0,), source, target, size, piece).traffic(Mesh((size,)))


def _item(value: Value) -> int:
    return ELEMENT_BYTES[value.type.dtype]


def group_sizes(step: StepProblem) -> Mapping[int, int]:
    """
    Return the number of choices (roles on one more mesh axis) of each group in a step of Tofu's recursion, by number:
    operator groups first, then value groups.
    """
    counts = [*map(len, step.operators), *map(len, step.values)]
    return dict(enumerate(counts))
