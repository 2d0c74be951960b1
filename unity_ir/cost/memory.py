"""
What counts as held on a device: the one place that plans (`cost.plan`) and the tables of the search (`search`) ask.

At the end of the forward a device holds its pieces of every weight with its gradient and the optimizer's state, of
inputs, of every other value the backward reads, and, of one that it reads where it was brought, what came there: the
emitted program gathers a weight once and keeps it for the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from unity_ir.pcg.graph import Node, Optimizer, Value
from unity_ir.pcg.layout import Layout, Mesh
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.types import ELEMENT_BYTES


def optimizer_states(optimizer: Optimizer) -> int:
    """Tensors of a weight's size the optimizer keeps."""
    return 2 if optimizer.name == "adam" else 0


def leaf_tensors(leaf: Node, updated: bool, optimizer: Optimizer) -> int:
    """Tensors of a leaf's size that are held where it rests: itself, its gradient and the optimizer's state."""
    return 2 + optimizer_states(optimizer) if leaf.op == "weight" and updated else 1


def arrives(moves: Iterable[Move]) -> bool:
    """Whether a reshard makes a tensor of its own, rather than another name for the one there is."""
    return any(m.kind != "retype" for m in moves)


def held(
    values: Iterable[Value],
    weights: Iterable[Node],
    reshards: Iterable[tuple[Value, Layout, tuple[Move, ...]]],
    mesh: Mesh,
    optimizer: Optimizer,
) -> Mapping[str, int]:
    """
    Bytes on each device at the end of the forward, by what they hold.

    `values` are those held where they are made, leaves among them; `weights` are those that are updated; `reshards` say
    of what is held where it was brought: where, and how.
    """

    def piece(value: Value) -> int:
        return prod(value.type.piece_shape) * ELEMENT_BYTES[value.type.dtype]

    updated = set(weights)
    found: dict[str, int] = dict.fromkeys(("weights", "gradients", "optimizer state", "activations"), 0)
    for value in values:
        size = piece(value)
        if value.node.op != "weight":
            found["activations"] += size
            continue
        found["weights"] += size
        if value.node in updated:
            found["gradients"] += size
            found["optimizer state"] += (leaf_tensors(value.node, True, optimizer) - 2) * size
    for value, target, moves in reshards:
        if arrives(moves):
            found["activations"] += layout_bytes(value, target, mesh)
    return found


def layout_bytes(value: Value, layout: Layout, mesh: Mesh) -> int:
    """Bytes of a value on each device that has it in a layout."""
    parts = prod(s for s, role in zip(mesh.sizes, layout, strict=True) if role >= 0)
    return value.type.elements // parts * ELEMENT_BYTES[value.type.dtype]
