"""The baseline everyone starts from: every operator splits the batch over all devices."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Node, Value, leaf, parallel, rebuild, rewrite
from unity_ir.pcg.layout import REPEAT, Layout, layout_type, layout_view


def data_parallel(graph: Graph, machine: Machine) -> Graph:
    """
    Inputs divided along dim 0 over all devices, weights copied, and whatever follows from that by the operators' types.

    Raises `UnityError` if the batch is not divisible, or an operator mixes samples so that types do not follow.
    """
    devices = machine.devices
    mesh = machine.mesh
    everywhere: Layout = (REPEAT,) * len(mesh.sizes)
    divided: Layout = (0,) * len(mesh.sizes)

    def place(node: Node, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        if not node.is_leaf:
            return rebuild(node, operands).results
        (type,) = node.types
        if node.op == "input":
            if not type.shape or type.shape[0] % devices:
                raise UnityError(
                    f"data-parallel: input {node.name} has batch {type.shape[0] if type.shape else 1}, "
                    f"which {devices} devices do not divide"
                )
            view = layout_view(divided, len(type.shape), mesh)
            return leaf("input", layout_type(type.shape, type.dtype, divided, mesh), view, name=node.name).results
        view = layout_view(everywhere, len(type.shape), mesh)
        weight = leaf(node.op, type, view, **dict(node.attributes)).result
        return parallel("replicate", weight, by=devices).results if devices > 1 else (weight,)

    return rewrite(graph, place)
