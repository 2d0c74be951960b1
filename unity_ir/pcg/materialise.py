"""
Writing a placed graph out: parallel operators and views around the operators of a serial one. A layout gives each mesh
axis a role: the dim that it shards, SUM (its devices hold addends), COPY (replicas whose gradients are addends), REPEAT
(replicas whose gradients are equal) or pinned (one coordinate only); an assignment gives it one in an operator, such as
the index variable that it divides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value, divide, leaf, parallel
from unity_ir.pcg.parallel import type_steps
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    Layout,
    Mesh,
    grid_order,
    layout_type,
    layout_view,
    operand_layout,
    result_layout,
    view_of,
)
from unity_ir.pcg.types import TensorType
from unity_ir.pcg.view import View
from unity_ir.tdl.divisibility import Halos
from unity_ir.tdl.parallel import Configuration, operand_degrees


def resting(layout: Layout) -> Layout:
    """
    Return the layout in which an input or weight is stored if its first reader wants `layout`: the same, but with
    REPEAT in place of COPY and SUM.

    So devices store values, not addends of them, and the gradient that updates a weight is whole on each replica
    (REPEAT), not in addends (as for COPY).
    """
    return tuple(REPEAT if role in (COPY, SUM) else role for role in layout)


def _resting_layouts(graph: Graph, assignments: Mapping[Node, Assignment], mesh: Mesh) -> dict[Value, Layout]:
    """
    Return the layout in which each leaf of a serial graph is stored (rests): as its first use reads it, in graph order
    (see `resting`).

    `assignments` has the role of each mesh axis in every operator. A leaf without a use is repeated on all devices.
    """
    found: dict[Value, Layout] = {}
    nodes = graph.nodes()
    for node in nodes:
        for i, value in enumerate(node.operands):
            if value.node.is_leaf and value not in found:
                found[value] = resting(operand_layout(node.analysis, i, assignments[node]))
    everywhere: Layout = (REPEAT,) * len(mesh.sizes)
    return {n.result: found.get(n.result, everywhere) for n in nodes if n.is_leaf}


def materialise(
    graph: Graph,
    assignments: Mapping[Node, Assignment],
    mesh: Mesh,
    rests: Mapping[Value, Layout] | None = None,
    relays: Mapping[Value, Layout] | None = None,
    again: Collection[Node] = (),
) -> Graph:
    """
    Return the parallel graph that a serial forward graph and its assignments describe: the same operators, sharded and
    with machine views, and parallel operators that reshard values between them. `assignments` has the role of each mesh
    axis in each compute node.

    `rests` gives values of the serial graph a layout: an input or weight is stored in it (if left out: as its first use
    reads it, see `resting`), and the result of an operator is resharded to it once it is made. `relays` gives inputs
    and weights a layout to which they are resharded once, before all uses. The results of compute nodes in `again` are
    recomputed in the backward; inputs and weights in it are resharded again there.

    Raises `UnityError` if an assignment does not fit.
    """
    rests = {**_resting_layouts(graph, assignments, mesh), **(rests or {})}
    new: dict[Value, Value] = {}
    made: dict[Value, Layout] = {}
    leaves: dict[Node, Node] = {}
    for node in graph.nodes():
        if node.is_leaf:
            (value,) = node.results
            made[value] = rests[value]
            new[value] = _stored_leaf(value, rests[value], mesh)
            leaves[node] = new[value].node
            if relays is not None and value in relays:
                new[value] = apply_reshard(new[value], made[value], relays[value], mesh)
                made[value] = relays[value]
            continue
        assignment = assignments[node]
        operands: list[Value] = []
        for i, value in enumerate(node.operands):
            operand = apply_reshard(new[value], made[value], operand_layout(node.analysis, i, assignment), mesh)
            is_again = value.node.is_leaf and value.node in again and operand != new[value]
            operands.append(parallel("recompute", operand).result if is_again else operand)
        built = _assigned(node, operands, assignment, mesh)
        for i, value in enumerate(node.results):
            made[value] = result_layout(node.analysis, i, assignment)
            new[value] = parallel("recompute", built.results[i]).result if node in again else built.results[i]
            if value in rests:
                new[value] = apply_reshard(new[value], made[value], rests[value], mesh)
                made[value] = rests[value]
    inputs, outputs = tuple(leaves[n] for n in graph.inputs), tuple(new[v] for v in graph.outputs)
    return Graph(graph.name, inputs, outputs, offload=graph.offload, staying=graph.staying)


def _stored_leaf(value: Value, layout: Layout, mesh: Mesh) -> Value:
    """Return the leaf of a parallel graph that stores the serial leaf `value` in `layout` (a role per mesh axis)."""
    type = layout_type(value.type, layout, mesh)
    return _retyped(value.node, type, layout_view(layout, len(value.type.shape), mesh))


def piece_as_weight(node: Node, type: TensorType) -> Node:
    """
    Return a weight node that stands for one piece of the leaf `node`, to price the piece by itself: it has type `type`,
    the name "piece", and the other attributes of `node`, such as its master.
    """
    own = dict(node.attributes)
    return leaf("weight", type, None, **{**own, "name": "piece"})


def _retyped(node: Node, type: TensorType, view: View | None) -> Value:
    """
    Make the leaf `node` again, with its name and other attributes but another parallel type and view (None: without a
    view); return its result.
    """
    return leaf(node.op, type, view, **dict(node.attributes)).result


def _assigned(node: Node, operands: Sequence[Value], assignment: Assignment, mesh: Mesh) -> Node:
    """
    Apply the operator of the serial compute node `node` to parallel values, sharded and placed as `assignment` (the
    role of each axis of `mesh`) says; return the parallel node.

    `operands` must be in the layouts in which the operator reads them under that assignment; halo exchanges, where it
    needs any, are added here.
    """
    configuration = Configuration(variable_degrees(assignment, mesh.sizes))
    needs = operand_degrees(node.analysis, configuration)
    operands = [_with_halo(v, d.halo) for v, d in zip(operands, needs, strict=True)]
    view = view_of(assignment, grid_order(node), mesh) if mesh.sizes else None
    return divide(node, operands, configuration, view)


def apply_reshard(value: Value, source: Layout, target: Layout, mesh: Mesh) -> Value:
    """
    Return the value brought from layout `source` to layout `target`, by parallel operators. The last of them has the
    machine view of the target. The value itself if the layouts are equal.
    """
    if source == target:
        return value
    end = layout_type(value.type, target, mesh)
    # The same pieces on other devices: a replication by 1 that says where.
    steps = type_steps(value.type, end) or [("replicate", {"by": 1})]
    view = layout_view(target, len(value.type.shape), mesh)
    for i, (op, attributes) in enumerate(steps):
        value = parallel(op, value, view if i == len(steps) - 1 else None, **attributes).result
    return value


def _with_halo(value: Value, halo: Halos) -> Value:
    """
    Apply halo exchanges to a value: `halo` has, per dim, the numbers of elements (before, after) a piece to receive
    from the neighbouring pieces.
    """
    for dim, (low, high) in enumerate(halo):
        if low + high > 0:
            value = parallel("halo", value, None, dim=dim, low=low, high=high).result
    return value


def variable_degrees(assignment: Assignment, sizes: Sequence[int]) -> dict[str, int]:
    """
    Return the degree (number of parts) of every index variable that an assignment divides, by name: the product of the
    sizes of the mesh axes that divide it. `sizes` are those of the mesh axes, in order, as in `assignment`.
    """
    found: dict[str, int] = {}
    for what, size in zip(assignment, sizes, strict=True):
        if isinstance(what, str):
            found[what] = found.get(what, 1) * size
    return found
