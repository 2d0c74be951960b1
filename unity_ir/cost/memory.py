"""
What counts as held on a device: the one place that plans (`cost.plan`) and the tables of the search (`search`) ask.

At the end of the forward a device holds its pieces of every weight with its gradient and the optimizer's state, of
inputs, of every other value the backward reads, and, of one that it reads where it was brought, what came there: the
emitted program gathers a weight once and keeps it for the backward. Where operators are on parts of the machine,
devices hold different things: the one that holds most counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod

from unity_ir.pcg.collectives import FREE
from unity_ir.pcg.graph import Node, Optimizer, Value
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import Layout, Mesh, pins, shards
from unity_ir.pcg.types import ELEMENT_BYTES

HOLDS = ("weights", "gradients", "optimizer state", "activations")


def leaf_tensors(leaf: Node, updated: bool, optimizer: Optimizer) -> int:
    """Tensors of a leaf's size that are held where it rests: itself, its gradient and the optimizer's state."""
    return 2 + optimizer.states if leaf.op == "weight" and updated else 1


def arrives(moves: Iterable[Move]) -> bool:
    """Whether a reshard makes a tensor of its own, rather than another name for the one there is."""
    return any(m.kind not in FREE for m in moves)


def held(
    values: Iterable[tuple[Value, Layout]],
    weights: Iterable[Node],
    reshards: Iterable[tuple[Value, Layout, tuple[Move, ...]]],
    mesh: Mesh,
    optimizer: Optimizer,
) -> Mapping[str, int]:
    """
    Bytes at the end of the forward on the device that holds most, by what they hold.

    `values` are those held where they are made, leaves among them; `weights` are those that are updated; `reshards` say
    of what is held where it was brought: where, and how.
    """

    def piece(value: Value) -> int:
        return prod(value.type.piece_shape) * ELEMENT_BYTES[value.type.dtype]

    updated = set(weights)
    found = _Parts(mesh)
    for value, layout in values:
        size = piece(value)
        if value.node.op != "weight":
            found.add("activations", size, layout)
            continue
        found.add("weights", size, layout)
        if value.node in updated:
            found.add("gradients", size, layout)
            found.add("optimizer state", (leaf_tensors(value.node, True, optimizer) - 2) * size, layout)
    for value, target, moves in reshards:
        if arrives(moves):
            found.add("activations", layout_bytes(value, target, mesh), target)
    return found.most()


class _Parts:
    """Bytes by what they hold and where: at some coordinates of pinned axes, or, where none are, on all devices."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._bytes: dict[tuple[tuple[int, int], ...], Counter[str]] = {}

    def add(self, what: str, size: int, layout: Layout) -> None:
        self._bytes.setdefault(pins(layout), Counter())[what] += size

    def most(self) -> dict[str, int]:
        """Those of the device that holds most, the first if several do."""
        axes = sorted({axis for part in self._bytes for axis, _ in part})
        best = Counter[str]()
        for coordinates in product(*(range(self._mesh.sizes[axis]) for axis in axes)):
            here = set(zip(axes, coordinates, strict=True))
            device = sum((of for part, of in self._bytes.items() if here.issuperset(part)), Counter[str]())
            if device.total() > best.total():
                best = device
        return {what: best[what] for what in HOLDS}


def layout_bytes(value: Value, layout: Layout, mesh: Mesh) -> int:
    """Return the bytes of a value on each device that holds a shard of it in a layout."""
    return value.type.elements // shards(layout, mesh.sizes) * ELEMENT_BYTES[value.type.dtype]
