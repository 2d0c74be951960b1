"""
Make a plan from a rule for some operators; all others follow the layouts of their operands.

An operator follows the index variable along which its operands are sharded. Where there is none, or several, or sizes
do not divide, it is replicated. Partial sums are reduced where they are made. The cast of a weight is sharded as its
first reader needs it, so that a weight is seen through casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise, resting
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    GridRole,
    Layout,
    Mesh,
    is_pinned,
    is_shard,
    operand_layout,
    result_layout,
)
from unity_ir.search.baselines.operands import is_weight, is_weight_cast
from unity_ir.simulate.choices import fits

Choose = Callable[[Node, int, str | None], GridRole | None]
"""
Given an operator, a mesh axis and the variable it would follow there, returns the operator's role; None to follow. A
role that does not fit is ignored.
"""

Rest = Callable[[Value], Layout | None]
"""
Given a leaf, returns the layout it rests in; None to replicate an input, or to rest a weight where it is first used.
"""


Settle = Callable[[Value, Layout], Layout]
"""
Given an operator's result and the layout in which it is made, returns the layout to which it is brought, without SUM.
"""

Store = Callable[[Value, Layout], Layout]
"""Given a weight and the layout in which its first reader needs it, returns the layout in which it rests."""


def follow(
    graph: Graph,
    mesh: Mesh,
    choose: Choose,
    rest: Rest,
    settle: Settle | None = None,
    store: Store | None = None,
    *,
    again: bool = False,
) -> Graph:
    """
    Return the parallel graph of a serial one in which a rule, `choose`, shards some operators, and all others follow:
    on each mesh axis, an operator divides the index variable along which its operands are sharded; where these are
    sharded along none or several, it is replicated.

    The rules are functions of the caller; a layout is a role for each mesh axis:

    - `choose(operator, number of a mesh axis, index variable it would follow or None)` returns the operator's role on
      the axis, such as the index variable that the axis divides; None to follow.
    - `rest(leaf)` returns the layout in which a leaf is stored. If it returns None, an input is replicated, and a
      weight is stored as its first reader needs it or, if `store` is given, in the layout that
      `store(weight, layout that its first reader needs)` returns.
    - `settle(result, layout in which its operator makes it)` returns the layout to which a result is brought; by
      default, partial sums are all-reduced (`reduced`).

    With `again`, weights that `store` does not store as they are read are gathered a second time, for the backward.
    """
    outputs = set(graph.outputs)
    users = graph.users()
    layouts: dict[Value, Layout] = {}
    rests: dict[Value, Layout] = {}
    assignments: dict[Node, Assignment] = {}
    casts: list[Node] = []
    outer = _outer(mesh)
    for node in graph.nodes():
        if node.is_leaf:
            (value,) = node.results
            wanted = rest(value)
            if wanted is not None:
                rests[value] = wanted
            if node.op == "input":
                layouts[value] = rests[value] = wanted or (REPEAT,) * len(mesh.sizes)
            continue
        if is_weight_cast(node) and users.get(node.result):
            casts.append(node)
            continue
        assignment = _assignment(node, outer, layouts, choose)
        assignments[node] = assignment
        for i, value in enumerate(node.results):
            made = result_layout(node.analysis, i, assignment)
            if value in outputs or is_weight(value):
                continue
            layouts[value] = reduced(value, made) if settle is None else settle(value, made)
            if SUM in made or any(is_shard(a) and a != b for a, b in zip(made, layouts[value], strict=True)):
                rests[value] = layouts[value]
    for node in reversed(casts):
        user, i = users[node.result][0]
        needs = operand_layout(user.analysis, i, assignments[user])
        assignments[node] = tuple(
            node.analysis.result_dims[0][r] or REPEAT if is_shard(r) else REPEAT if r == SUM else r for r in needs
        )
    relays: dict[Value, Layout] = {}
    for node in graph.nodes():
        if store is None or node.op != "weight" or node.result in rests or node.result not in users:
            continue
        user, i = users[node.result][0]
        needs = operand_layout(user.analysis, i, assignments[user])
        at = rests[node.result] = store(node.result, resting(needs))
        if at != resting(needs):
            # Gradients are summed among the devices that gather the weight first, then among its copies.
            relays[node.result] = tuple(n if r == REPEAT else r for n, r in zip(needs, at, strict=True))
    return materialise(graph, assignments, mesh, rests, relays, {value.node for value in relays} if again else ())


def reduced(value: Value, made: Layout) -> Layout:
    """
    Return the layout of a result after its partial sums are all-reduced: `made`, the layout in which its operator makes
    it (a role per mesh axis), with REPEAT (replicas that all do the same work) in the place of SUM (addends) and COPY
    (replicas that do different work). `value` is not read; it is a parameter so that this function can be the rule
    `settle` of `follow`.
    """
    del value
    return tuple(REPEAT if r in (SUM, COPY) else r for r in made)


def settled_along(dim: int, mesh: Mesh) -> Settle:
    """
    Return a rule `settle` for `follow`: a function from a result, and the layout in which it is made, to the layout to
    which it is brought.

    A result in partial sums, or sharded along another dim than number `dim`, is brought to shards along `dim` over
    every axis of `mesh` whose size divides what earlier axes leave of it, and replicated along the others. Results
    without that dim only have their partial sums all-reduced.
    """

    def settle(value: Value, made: Layout) -> Layout:
        whole = reduced(value, made)
        if all(r in (dim, REPEAT) for r in made) or dim >= len(value.type.shape):
            return whole
        settled, left = list(whole), value.type.shape[dim]
        for axis, role in enumerate(whole):
            if is_pinned(role):
                continue
            fits_there = left % mesh.sizes[axis] == 0
            settled[axis], left = (dim, left // mesh.sizes[axis]) if fits_there else (REPEAT, left)
        return tuple(settled)

    return settle


@lru_cache(maxsize=16)
def _outer(mesh: Mesh) -> tuple[Mesh, ...]:
    """Return, for each mesh axis, the mesh of the axes up to it."""
    return tuple(Mesh(mesh.sizes[: axis + 1]) for axis in range(len(mesh.sizes)))


def _assignment(node: Node, outer: Sequence[Mesh], layouts: Mapping[Value, Layout], choose: Choose) -> Assignment:
    """Return the role of each mesh axis in an operator, of the axes up to each of which `outer` has the mesh."""
    out: list[GridRole] = []
    for axis, mesh in enumerate(outer):
        followed = _followed(node, axis, layouts)
        chosen = choose(node, axis, followed)
        may: list[GridRole | None] = [chosen, followed, _pinned(node, axis, layouts) if chosen is None else None]
        fitting = (what for what in may if what is not None and fits(node, (*out, what), mesh))
        out.append(next(fitting, REPEAT))
    return tuple(out)


def _followed(node: Node, axis: int, layouts: Mapping[Value, Layout]) -> str | None:
    """Return the variable along which an axis shards the operands, if there is exactly one."""
    found: set[str | None] = set()
    for parameter, value in zip(node.analysis.bound.operands, node.operands, strict=True):
        layout = layouts.get(value)
        if layout is not None and is_shard(layout[axis]):
            found.add(node.analysis.operand_dims[parameter.name][layout[axis]])
    return found.pop() if len(found) == 1 else None


def _pinned(node: Node, axis: int, layouts: Mapping[Value, Layout]) -> int | None:
    """Return the role by which an axis pins all operands; None if they are not all pinned alike."""
    roles = {layouts[v][axis] for v in node.operands if v in layouts}
    return roles.pop() if len(roles) == 1 and all(map(is_pinned, roles)) else None
