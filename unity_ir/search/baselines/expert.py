"""
Make the plans that experts write by hand, each with its best degrees: the baselines of Unity's and FlexFlow's papers.

    megatron       transformers: matrix products by columns, then by rows, on inner axes; samples on the others
                   (Megatron-LM)
    neo            embedding tables by columns or by rows, everything else by samples (Neo, for DLRM and XDL)
    weird_trick    convolutions by samples, dense layers by columns (Krizhevsky, 2014)
    by_layer       each layer of a recurrent network on devices of its own, samples across nodes (Wu et al., 2016)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unity_ir.budget import OutOfBudget, spend
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Node, Optimizer, Value
from unity_ir.pcg.sharding import REPEAT, GridRole, Layout, Mesh, pinned_at
from unity_ir.search.baselines.batch_dims import batch_dims
from unity_ir.search.baselines.follow import follow
from unity_ir.search.layouts.limits import limits
from unity_ir.tdl.counts import contraction_flops

Template = Callable[[Graph, Machine], Iterator[Graph]]


def expert(
    graph: Graph, machine: Machine, optimizer: Optimizer, price: Callable[[Graph], PlanCost] | None = None
) -> Graph:
    """
    Return the fastest plan that fits among those an expert would consider for the kind of graph; if none fits, the
    smallest.

    `price` returns a plan's cost, by default `cost.plan.cost`; callers pass one that memoises.
    """
    plans = list(dict.fromkeys(_plans(graph, machine)))
    costs = [cost(plan, machine, optimizer) if price is None else price(plan) for plan in plans]
    over = [max(0, c.memory_bytes - machine.device.memory) for c in costs]
    best = min(range(len(plans)), key=lambda i: (over[i], costs[i].time))
    return plans[best]


def _plans(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """Yield the plans of all templates for the graph, at least one; fewer where the budget ends."""
    for template in _templates(graph):
        for plan in template(graph, machine):
            yield plan
            try:
                spend(limits().work_baseline * len(graph.nodes()))
            except OutOfBudget:
                return


def _templates(graph: Graph) -> list[Template]:
    nodes = graph.nodes()
    if is_recurrent(graph):
        return [by_layer]
    if any("attention" in n.op or n.op == "softmax" for n in nodes):
        return [megatron]
    if any(table_operand(n) is not None for n in nodes):
        return [neo]
    if any(n.op.startswith("conv") for n in nodes):
        return [weird_trick]
    return [megatron, weird_trick]


# --- questions that the templates ask about operators


def weight_operand(node: Node) -> int | None:
    """Return the index of the operand that is the weight matrix of a dense layer; None for other operators."""
    if not node.is_compute or node.op.startswith("conv") or table_operand(node) is not None:
        return None
    weights = [i for i, v in enumerate(node.operands) if v.node.op == "weight" and len(v.type.shape) > 1]
    multiplies = node.is_compute and contraction_flops(node.analysis.bound) > 0
    return weights[0] if len(weights) == 1 and multiplies else None


def weight_operands(graph: Graph) -> dict[Node, int | None]:
    """Return for every node the index of its weight matrix among the operands, as `weight_operand` does."""
    seen: dict[object, int | None] = {}
    found: dict[Node, int | None] = {}
    for node in graph.nodes():
        key = node.op, node.attributes, tuple((v.type, v.node.op == "weight") for v in node.operands)
        if key not in seen:
            seen[key] = weight_operand(node)
        found[node] = seen[key]
    return found


def table_operand(node: Node) -> int | None:
    """Return the index of the operand that is the table of an embedding lookup; None for other operators."""
    if not node.is_compute:
        return None
    bound = node.analysis.bound
    ids = any(p.integer for p in bound.operands)
    weights = [i for i, v in enumerate(node.operands) if v.node.op == "weight" and len(v.type.shape) == 2]
    return weights[0] if ids and len(weights) == 1 else None


def is_recurrent(graph: Graph) -> bool:
    """
    Return whether a graph is an unrolled recurrent network: more than two operators each read several of its weights.
    """
    users = graph.users()
    return sum(len(users.get(n.result, ())) > 2 for n in graph.weights()) > 1


def column_variable(node: Node, operand: int) -> str | None:
    """
    Return the index variable of the columns of weight number `operand`, which occurs in the result, too; None if none
    does.
    """
    analysis = node.analysis
    made = set(analysis.result_dims[0])
    dims = analysis.operand_dims[analysis.bound.operands[operand].name]
    return next((v for v in dims if v is not None and v in made), None)


def row_variable(node: Node, operand: int) -> str | None:
    """
    Return the index variable of the rows of a weight, which is summed over; None if none is. `operand` is the weight's
    place among the node's operands.
    """
    analysis = node.analysis
    made = set(analysis.result_dims[0])
    dims = analysis.operand_dims[analysis.bound.operands[operand].name]
    return next((v for v in dims if v is not None and v not in made), None)


def batched(graph: Graph, mesh: Mesh, axes: range) -> Callable[[Value], Layout | None]:
    """
    Return a function for `follow` that shards inputs along their samples over `axes`, as far as sizes are divisible.

    It leaves all other leaves to `follow`.
    """
    dims = batch_dims(graph)

    def rest(value: Value) -> Layout | None:
        dim = dims.get(value)
        if value.node.op != "input" or dim is None:
            return None
        layout, left = [REPEAT] * len(mesh.sizes), value.type.shape[dim]
        for axis in axes:
            if left % mesh.sizes[axis] == 0:
                layout[axis], left = dim, left // mesh.sizes[axis]
        return tuple(layout)

    return rest


# --- the plans


def megatron(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield Megatron-LM's plan for every number of inner axes that shard matrix products; samples are on the outer ones.
    """
    mesh, dense = machine.mesh, weight_operands(graph)
    for data in range(len(mesh.sizes) + 1):

        def choose(node: Node, axis: int, followed: str | None, data: int = data) -> GridRole | None:
            if axis < data or followed is not None:
                return None
            matrix = dense[node]
            if matrix is not None:
                return column_variable(node, matrix)
            ids = table_operand(node)
            return row_variable(node, ids) if ids is not None else None

        yield follow(graph, mesh, choose, batched(graph, mesh, range(data)))


def neo(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield Neo's plan for every number of inner axes that shard tables by columns; the outer axes shard them by rows.
    """
    mesh = machine.mesh
    for columns in range(len(mesh.sizes) + 1):

        def choose(node: Node, axis: int, followed: str | None, columns: int = columns) -> GridRole | None:
            ids = table_operand(node)
            if ids is None:
                return followed or REPEAT
            return column_variable(node, ids) if axis >= len(mesh.sizes) - columns else row_variable(node, ids)

        yield _by_samples(graph, mesh, choose)


def weird_trick(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield Krizhevsky's plan (2014): convolutions by samples, dense layers by columns over any number of inner axes.
    """
    mesh, dense = machine.mesh, weight_operands(graph)
    for data in range(len(mesh.sizes) + 1):

        def choose(node: Node, axis: int, followed: str | None, data: int = data) -> GridRole | None:
            matrix = dense[node]
            return column_variable(node, matrix) if matrix is not None and axis >= data else followed

        yield _by_samples(graph, mesh, choose)


def by_layer(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """Yield a plan for every number of inner axes along which layers are pinned to devices of their own."""
    mesh = machine.mesh
    layers = _layers(graph)
    count = max(layers.values(), default=0) + 1
    for data in range(len(mesh.sizes) + 1):

        def choose(node: Node, axis: int, followed: str | None, data: int = data) -> GridRole | None:
            if axis < data:
                return followed
            inner = Mesh(mesh.sizes[data:])
            device = layers[node] * inner.devices // count
            return pinned_at(inner.coordinates(device)[axis - data])

        yield follow(graph, mesh, choose, batched(graph, mesh, range(data)))


def _layers(graph: Graph) -> dict[Node, int]:
    """
    Return the layer number of every operator: that of its weights' module, in the order of use, else the deepest of its
    operands.
    """
    modules: dict[str, int] = {}
    depth: dict[Node, int] = {}
    for node in graph.nodes():
        if node.is_compute:
            own = [v.node.name.rpartition(".")[0] for v in node.operands if v.node.op == "weight"]
            for module in own:
                modules.setdefault(module, len(modules))
            below = max((depth[v.node] for v in node.operands if v.node in depth), default=0)
            depth[node] = modules[own[0]] if own else below
    return depth


def _by_samples(graph: Graph, mesh: Mesh, choose: Callable[[Node, int, str | None], GridRole | None]) -> Graph:
    """
    Apply a rule; results it shards otherwise are resharded to samples, and all other operators follow the samples.
    """
    return follow(graph, mesh, choose, batched(graph, mesh, range(len(mesh.sizes))), settle=0)
