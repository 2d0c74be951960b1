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
from math import prod

from unity_ir.budget import OutOfBudget, spend
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, GridRole, Mesh, pinned_at
from unity_ir.search.baselines.attention import has_sequence
from unity_ir.search.baselines.follow import follow, settled_along
from unity_ir.search.baselines.operands import (
    column_variable,
    is_recurrent,
    row_variable,
    table_operand,
    weight_of,
    weight_operands,
)
from unity_ir.search.baselines.recipe import Axes, inputs, megatron_form, megatron_plan
from unity_ir.search.layouts.limits import limits

Template = Callable[[Graph, Machine], Iterator[Graph]]


def expert(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    price: Callable[[Graph], PlanCost] | None = None,
    rewrite: bool = False,
) -> Graph:
    """
    Return the plan that an expert would write for a serial graph of its kind: of such plans with every split of the
    mesh axes, the one that fits a device's memory and takes the fewest seconds, all moves waited for. If none fits,
    returns the one that exceeds the memory least. Where the work budget in force ends, only the plans made until then
    are compared.

    Plans are Megatron-LM's for transformers, Neo's for recommenders, Krizhevsky's (2014) for networks with
    convolutions, and layers on devices of their own for recurrent networks; both Megatron-LM's and Krizhevsky's for
    others. `optimizer` is the one the plan is trained with. `price` returns a plan's cost, by default `cost.plan.cost`;
    callers pass one that memoises. With `rewrite`, plans may be of a rewritten serial graph, in which the heads of
    fused query-key-value products and the classes of the loss can be sharded (`rewrites`).
    """
    plans = list(dict.fromkeys(_plans(graph, machine, rewrite)))
    costs = [cost(plan, machine, optimizer) if price is None else price(plan) for plan in plans]
    over = [max(0, c.memory_bytes - machine.device.usable) for c in costs]
    best = min(range(len(plans)), key=lambda i: (over[i], costs[i].time))
    return plans[best]


def _plans(graph: Graph, machine: Machine, rewrite: bool = False) -> Iterator[Graph]:
    """Yield the plans of all templates for the graph, at least one; fewer where the budget ends."""
    for template in _templates(graph, rewrite):
        for plan in template(graph, machine):
            yield plan
            try:
                spend(limits().work_baseline * len(graph.nodes()))
            except OutOfBudget:
                return


def _templates(graph: Graph, rewrite: bool) -> list[Template]:
    nodes = graph.nodes()
    by_columns = _rewritten_megatron if rewrite else megatron
    if is_recurrent(graph):
        return [by_layer]
    if any("attention" in n.op or n.op == "softmax" for n in nodes):
        return [by_columns]
    if any(table_operand(n) is not None for n in nodes):
        return [_neo]
    if any(n.op.startswith("conv") for n in nodes):
        return [_weird_trick]
    return [by_columns, _weird_trick]


# --- the plans


def megatron(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield Megatron-LM's plans of a serial graph, one for each number of innermost mesh axes that shard matrix products,
    from all to none; the other axes shard the samples. If the graph has attention, each plan that shards products comes
    a second time, with sequence parallelism.
    """
    for data in range(len(machine.mesh.sizes) + 1):
        yield from _megatron(graph, machine.mesh, data)


def _megatron(graph: Graph, mesh: Mesh, data: int) -> Iterator[Graph]:
    """Yield the plans with `data` outer axes that divide samples."""
    end = len(mesh.sizes)
    axes = Axes(range(data), range(data, end), range(0))
    yield megatron_plan(graph, mesh, axes, sp=False)
    if data < end and has_sequence(graph):
        yield megatron_plan(graph, mesh, axes, sp=True)


def _rewritten_megatron(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield the plans of `megatron`, each of the graph rewritten (`recipe.megatron_form`) so that the plan's
    tensor-parallel devices can shard the heads of fused query-key-value products and the classes of the loss; the last,
    without tensor parallelism, of `graph` itself.
    """
    mesh = machine.mesh
    for data in range(len(mesh.sizes)):
        form = megatron_form(graph, prod(mesh.sizes[data:]))
        yield from _megatron(form, mesh, data)
    yield from _megatron(graph, mesh, len(mesh.sizes))


def _neo(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield Neo's plans of a recommender's serial graph (Mudigere et al., 2021), one for each number of innermost mesh
    axes, from none to all, along which embedding tables are sharded by columns; the others shard them by rows, and all
    axes shard the samples elsewhere.
    """
    mesh = machine.mesh
    for columns in range(len(mesh.sizes) + 1):

        def choose(node: Node, axis: int, followed: str | None, columns: int = columns) -> GridRole | None:
            ids = table_operand(node)
            if ids is None:
                return followed or REPEAT
            return column_variable(node, ids) if axis >= len(mesh.sizes) - columns else row_variable(node, ids)

        yield _by_samples(graph, mesh, choose)


def _weird_trick(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield Krizhevsky's plans (2014) of a serial graph, one for each number of innermost mesh axes, from all to none,
    that shard dense layers by columns; the other axes, and all axes in convolutions and the rest, shard the samples.
    """
    mesh, dense = machine.mesh, weight_operands(graph)
    for data in range(len(mesh.sizes) + 1):

        def choose(node: Node, axis: int, followed: str | None, data: int = data) -> GridRole | None:
            matrix = dense[node]
            return column_variable(node, matrix) if matrix is not None and axis >= data else followed

        yield _by_samples(graph, mesh, choose)


def by_layer(graph: Graph, machine: Machine) -> Iterator[Graph]:
    """
    Yield plans of a recurrent network with whole layers on devices of their own, one for each split of the mesh axes.

    For n from 0 to all axes, the n outermost shard the samples, and each group of devices along the others takes a
    contiguous run of layers. A layer is the operators that read the weights of one module, and those after them that
    read none.
    """
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

        yield follow(graph, mesh, choose, inputs(graph, mesh, range(data)))


def _layers(graph: Graph) -> dict[Node, int]:
    """
    Return the layer number of every operator: that of its weights' module, in the order of use, else the deepest of its
    operands.
    """
    modules: dict[str, int] = {}
    depth: dict[Node, int] = {}
    for node in graph.nodes():
        if node.is_compute:
            own = [w.name.rpartition(".")[0] for v in node.operands if (w := weight_of(v)) is not None]
            for module in own:
                modules.setdefault(module, len(modules))
            below = max((depth[v.node] for v in node.operands if v.node in depth), default=0)
            depth[node] = modules[own[0]] if own else below
    return depth


def _by_samples(graph: Graph, mesh: Mesh, choose: Callable[[Node, int, str | None], GridRole | None]) -> Graph:
    """
    Apply a rule; results it shards otherwise are resharded to samples, and all other operators follow the samples.
    """
    return follow(graph, mesh, choose, inputs(graph, mesh, range(len(mesh.sizes))), settle=settled_along(0, mesh))
