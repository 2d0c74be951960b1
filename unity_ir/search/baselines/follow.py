"""
Make a plan from a rule for some operators; all others follow the layouts of their operands.

An operator follows the index variable along which its operands are sharded. Where there is none, or several, or sizes
do not divide, it is replicated. Partial sums are reduced where they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unity_ir.pcg.graph import Graph, Node, Value
from unity_ir.pcg.materialise import materialise
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
    result_layout,
)
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


def follow(graph: Graph, mesh: Mesh, choose: Choose, rest: Rest, settle: int | None = None) -> Graph:
    """
    Return the parallel graph in which some operators are sharded by a rule and all others follow their operands.

    `choose` gives operators' roles, `rest` leaves' layouts. With `settle`, results that are sharded along other dims
    are resharded along that dim, as far as sizes are divisible.
    """
    outputs = set(graph.outputs)
    layouts: dict[Value, Layout] = {}
    rests: dict[Value, Layout] = {}
    assignments: dict[Node, Assignment] = {}
    for node in graph.nodes():
        if node.is_leaf:
            (value,) = node.results
            wanted = rest(value)
            if wanted is not None:
                rests[value] = wanted
            if node.op == "input":
                layouts[value] = rests[value] = wanted or (REPEAT,) * len(mesh.sizes)
            continue
        assignment = _assignment(node, mesh, layouts, choose)
        assignments[node] = assignment
        for i, value in enumerate(node.results):
            made = result_layout(node.analysis, i, assignment)
            if value in outputs:
                continue
            layouts[value] = _resting(value, made, mesh, settle)
            if SUM in made or any(is_shard(a) and a != b for a, b in zip(made, layouts[value], strict=True)):
                rests[value] = layouts[value]
    return materialise(graph, assignments, mesh, rests)


def _resting(value: Value, made: Layout, mesh: Mesh, settle: int | None) -> Layout:
    """
    Return the layout to which an operator's result is resharded: no partial sums, and no sharded dim but `settle`.
    """
    whole = tuple(REPEAT if r in (SUM, COPY) else r for r in made)
    if settle is None or all(r in (settle, REPEAT) for r in made) or settle >= len(value.type.shape):
        return whole
    settled, left = list(whole), value.type.shape[settle]
    for axis, role in enumerate(whole):
        if is_pinned(role):
            continue
        fits_there = left % mesh.sizes[axis] == 0
        settled[axis], left = (settle, left // mesh.sizes[axis]) if fits_there else (REPEAT, left)
    return tuple(settled)


def _assignment(node: Node, mesh: Mesh, layouts: Mapping[Value, Layout], choose: Choose) -> Assignment:
    out: list[GridRole] = []
    for axis in range(len(mesh.sizes)):
        followed = _followed(node, axis, layouts)
        chosen = choose(node, axis, followed)
        may: list[GridRole | None] = [chosen, followed, _pinned(node, axis, layouts) if chosen is None else None]
        fitting = (what for what in may if what is not None and fits(node, (*out, what), Mesh(mesh.sizes[: axis + 1])))
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
