"""
Say a collective of a plan in the terms of one rank: the ranks of its process group, or the messages that it sends and
receives.

Chakra has a node for a collective of a group (`schema.COLLECTIVE_TYPES`). What it has none for is a node per message: a
scatter or gather, as NCCL does them, a halo exchange, a send from one part of the machine to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unity_ir.interop.chakra.schema import COLLECTIVE_TYPES
from unity_ir.pcg.sharding import Mesh, coordinate_of, is_pinned
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.instructions import HaloExchange, RowMove
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import Start, moves_of


@dataclass(frozen=True, slots=True)
class NetworkCall:
    """
    A collective as every device of a class calls it: kind, mesh axes along which its groups lie, and the bytes of a
    device's operand. For kinds with a root, `root` and `to` are positions in the group. A halo exchange fetches `low`
    slices before and `high` after a piece of `size` slices; its `bytes` are those of one slice.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: int
    root: int = 0
    to: int = 0
    low: int = 0
    high: int = 0
    size: int = 1
    tag: int | None = None
    """The tag of its only message; None for the number of messages between the two ranks before it."""

    @property
    def is_collective(self) -> bool:
        """Whether Chakra has a node for it; else each of its messages is one."""
        return self.kind in COLLECTIVE_TYPES


NetworkMessage = tuple[int, int, int]
"""A message: the rank that sends, the rank that receives, bytes."""


def network_call(program: Program, start: Start) -> NetworkCall:
    """Return a line that starts communication (one move, or the moves of a bucket) as a call."""
    moves = moves_of(start)
    first, size = moves[0], sum(program.bytes[move.operand] for move in moves)
    if isinstance(first, HaloExchange):
        smaller = first.operand if first.kind == "halo" else first.result
        length = program.tensors[smaller].local(program.mesh)[first.dim]
        each = program.bytes[smaller] // length
        return NetworkCall(first.kind, first.axes, each, low=first.low, high=first.high, size=length)
    if isinstance(first, RowMove):
        size = move_of(program, first).elements * ELEMENT_BYTES[program.tensors[first.result].dtype]
    root, to = (coordinate_of(role) if is_pinned(role) else 0 for role in (first.source, first.target))
    return NetworkCall(first.kind, first.axes, size, root, to)


def group_of(device: int, axes: Sequence[int], mesh: Mesh) -> list[int]:
    """Return the devices that differ from one along `axes` only, in the order of their coordinates along these."""
    at = mesh.coordinates(device)
    base = device - sum(at[axis] * mesh.strides[axis] for axis in axes)
    places = product(*(range(mesh.sizes[axis]) for axis in axes))
    return [base + sum(c * mesh.strides[axis] for c, axis in zip(place, axes, strict=True)) for place in places]


def most_messages(call: NetworkCall, mesh: Mesh) -> int:
    """Return at least the number of nodes that a rank has for a call."""
    return 1 if call.is_collective else 2 * (prod(mesh.sizes[axis] for axis in call.axes) - 1)


def messages(call: NetworkCall, group: Sequence[int]) -> list[NetworkMessage]:
    """
    Return the messages of a call among the devices of a group, in an order in which ranks that do one at a time do not
    wait for each other for ever. Only for a call that is no collective of Chakra.
    """
    count = len(group)
    match call.kind:
        case "send":
            return [(group[call.root], group[call.to], call.bytes)]
        case "scatter":
            root = group[call.root]
            return [(root, other, call.bytes // count) for other in group if other != root]
        case "gather":
            root = group[call.to]
            return [(other, root, call.bytes) for other in group if other != root]
        case "ring_shift":
            return [(device, after, call.bytes) for device, after in zip(group, (*group[1:], group[0]), strict=True)]
        case "halo" | "halo_reduce":
            found: list[NetworkMessage] = []
            for place, holder in product(range(count), repeat=2):
                slices = 0 if place == holder else _within(place, holder, call)
                ends = (holder, place) if call.kind == "halo" else (place, holder)
                if slices > 0:
                    found.append((group[ends[0]], group[ends[1]], slices * call.bytes))
            return found
        case other:
            raise AssertionError(f"{other} has no messages")


def _within(place: int, holder: int, call: NetworkCall) -> int:
    """Return how many slices of the piece `holder` lie in the piece `place` with its halo (`runtime.halos`)."""
    shift = (place - holder) * call.size
    return min(call.size, shift + call.size + call.high) - max(0, shift - call.low)
