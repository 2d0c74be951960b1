"""
Define what counts as memory held on a device, for plans (`cost.plan`) and the search's tables (`search`) alike.

At the end of the forward a device holds its pieces of: every weight, with gradient and optimizer state; inputs; every
other value the backward reads; and resharded copies that the backward reads (the emitted program gathers a weight once
and keeps it for the backward). With pinned layouts, devices hold different amounts: the largest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod

from unity_ir.pcg.collectives import FREE
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import Layout, Mesh, pins_of, shard_count
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.host_values import bytes_at_host

HOLDS = ("weights", "gradients", "optimizer state", "activations")


def leaf_bytes(leaf: Node, updated: bool, optimizer: Optimizer) -> int:
    """
    Return the bytes of memory that a leaf (weight, input or constant) takes per element.

    A weight that is `updated` counts itself as stored, its gradient and the optimizer's states, each in the stored type
    (`Node.master`), and its cast to the type in which it is computed with, if that is another; the cast is kept from
    step to step (`plan.kept_casts`). Other leaves count only themselves and such a cast.
    """
    tensors = 1
    if leaf.op == "weight" and updated:
        tensors = 2 + optimizer.held_states - is_master_at_host(leaf, optimizer)
    return tensors * ELEMENT_BYTES[leaf.master] + cast_bytes(leaf)


def is_master_at_host(weight: Node, optimizer: Optimizer) -> bool:
    """
    Return whether a trained weight rests in the memory of the host with the optimizer's state: devices compute with its
    cast, and read it in its update alone.
    """
    return optimizer.at_host and cast_bytes(weight) > 0


def cast_bytes(leaf: Node) -> int:
    """
    Return the bytes per element of the cast of a weight to the type it is computed with (bf16 of an f32 master: 2); 0
    if the weight is stored in that type.
    """
    (type,) = leaf.types
    return 0 if leaf.master == type.dtype else ELEMENT_BYTES[type.dtype]


def _makes_tensor(moves: Iterable[Move]) -> bool:
    """Return whether the moves of a reshard make a new tensor in memory, rather than only rename roles."""
    return any(m.kind not in FREE for m in moves)


def held(
    values: Iterable[tuple[Value, Layout]],
    weights: Iterable[Node],
    reshards: Iterable[tuple[Value, Layout, tuple[Move, ...]]],
    mesh: Mesh,
    optimizer: Optimizer,
    may_go: Callable[[Value], bool] | None = None,
    staying: int = 0,
) -> Mapping[str, int]:
    """
    Return the bytes held at the end of the forward on the device that holds most, by kind (`HOLDS`: weights, gradients,
    optimizer state, activations). Large activations that `may_go` are in the memory of the host, but for a window of
    them and `staying` bytes (`plan.host_values`).

    `values` are (value, layout) pairs of the values that are held in the layout in which they are made or stored,
    leaves included. `weights` are the weights that are updated. `reshards` are the held copies of values in other
    layouts: (value, target layout, moves).
    """

    updated = set(weights)
    found = _Parts(mesh)
    going: list[int] = []
    for value, layout in values:
        elements = prod(value.type.piece_shape)
        if value.node.op != "weight":
            # Of inputs, all micro-batches are held; of other values, those of one.
            whole = value.type.micro_batches if value.node.op == "input" else 1
            found.add("activations", whole * elements * ELEMENT_BYTES[value.type.dtype], layout)
            if may_go is not None and may_go(value) and not pins_of(layout):
                going.append(elements * ELEMENT_BYTES[value.type.dtype])
            continue
        size = elements * ELEMENT_BYTES[value.node.master]
        own = 0 if value.node in updated and is_master_at_host(value.node, optimizer) else size
        found.add("weights", own + elements * cast_bytes(value.node), layout)
        if value.node in updated:
            found.add("gradients", size, layout)
            found.add("optimizer state", optimizer.held_states * size, layout)
    for value, target, moves in reshards:
        if _makes_tensor(moves):
            found.add("activations", size := _layout_bytes(value, target, mesh), target)
            if may_go is not None and may_go(value) and not pins_of(target):
                going.append(size)
    found.add("activations", -bytes_at_host(going, staying), ())
    return found.most()


class _Parts:
    """Bytes by kind, and by the coordinates of pinned axes at which they are held; () is all devices."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._bytes: dict[tuple[tuple[int, int], ...], Counter[str]] = {}

    def add(self, what: str, size: int, layout: Layout) -> None:
        self._bytes.setdefault(pins_of(layout), Counter())[what] += size

    def most(self) -> dict[str, int]:
        """Return the bytes by kind on the device that holds most; on the first, if several do."""
        axes = sorted({axis for part in self._bytes for axis, _ in part})
        best = Counter[str]()
        for coordinates in product(*(range(self._mesh.sizes[axis]) for axis in axes)):
            here = set(zip(axes, coordinates, strict=True))
            device = sum((of for part, of in self._bytes.items() if here.issuperset(part)), Counter[str]())
            if device.total() > best.total():
                best = device
        return {what: best[what] for what in HOLDS}


def _layout_bytes(value: Value, layout: Layout, mesh: Mesh) -> int:
    """Return the bytes of a value, in this layout, on each device that holds a shard of it."""
    return prod(value.type.micro_shape) // shard_count(layout, mesh.sizes) * ELEMENT_BYTES[value.type.dtype]
