"""Data parallelism, plain and fully sharded: every operator shards the samples over all devices."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Node, Value
from unity_ir.pcg.sharding import REPEAT, GridRole, Layout, Mesh
from unity_ir.search.baselines.batch_dims import batch_dims
from unity_ir.search.baselines.follow import follow


def data_parallel(graph: Graph, machine: Machine) -> Graph:
    """
    Return the plan with inputs sharded along their samples over all devices, and tables and weights replicated.

    Raises `UnityError` if the number of samples is not divisible by the devices.
    """
    return _by_samples("data-parallel", graph, machine, sharded=False)


def fsdp(graph: Graph, machine: Machine) -> Graph:
    """
    Return data parallelism with every weight sharded as far as its sizes allow (ZeRO-3, FSDP): weights are gathered for
    use, and their gradients reduce-scattered.

    Raises `UnityError` if the batch is not divisible.
    """
    return _by_samples("fsdp", graph, machine, sharded=True)


def _by_samples(strategy: str, graph: Graph, machine: Machine, sharded: bool) -> Graph:
    mesh = machine.mesh
    batches = batch_dims(graph)
    for node in graph.inputs:
        dim = batches.get(node.result)
        size = 1 if dim is None else node.types[0].shape[dim]
        if dim is not None and size % machine.devices:
            raise UnityError(
                f"{strategy}: input {node.name} has batch {size}, which {machine.devices} devices do not divide; "
                f"use another batch or number of devices, or --search"
            )

    def choose(node: Node, axis: int, followed: str | None) -> GridRole | None:
        del node, axis
        return followed

    def rest(value: Value) -> Layout | None:
        if value.node.op == "input":
            dim = batches.get(value)
            return (REPEAT if dim is None else dim,) * len(mesh.sizes)
        if value.node.op != "weight":
            return None
        return in_pieces(value, mesh) if sharded else (REPEAT,) * len(mesh.sizes)

    return follow(graph, mesh, choose, rest)


def in_pieces(value: Value, mesh: Mesh) -> Layout:
    """Return a layout that shards a value over as many mesh axes as its sizes are divisible by, first dims first."""
    left = list(value.type.shape)
    layout: list[int] = []
    for size in mesh.sizes:
        dim = next((d for d, extent in enumerate(left) if extent % size == 0), None)
        if dim is not None:
            left[dim] //= size
        layout.append(REPEAT if dim is None else dim)
    return tuple(layout)
