"""
Say the nodes of a class of devices for each of its ranks: the process group of a collective, the other rank of a send
or receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unity_ir.interop.chakra.calls import group_of, messages
from unity_ir.interop.chakra.nodes import ClassNode, Ids
from unity_ir.interop.chakra.schema import COLLECTIVE_TYPES, NodeType, TraceAttribute, TraceNode, encoded_node
from unity_ir.pcg.sharding import Mesh

MICRO = 10**6
"""Picoseconds of a microsecond."""


@dataclass
class ProcessGroups:
    """The process groups of a trace: each set of ranks by its number, from 1 on, as they are met."""

    numbers: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def number(self, ranks: Iterable[int]) -> int:
        """Return the number of the group of some ranks."""
        return self.numbers.setdefault(tuple(sorted(ranks)), len(self.numbers) + 1)

    def by_name(self) -> Mapping[str, Sequence[int]]:
        """Return the ranks of each group by its name: the number as text, as ASTRA-sim reads it."""
        return {str(number): ranks for ranks, number in self.numbers.items()}


class ClassTrace:
    """The trace of a class of devices, in which nodes that all ranks have alike are made and encoded once."""

    def __init__(self, nodes: Sequence[ClassNode], mesh: Mesh, groups: ProcessGroups):
        self.nodes, self.mesh, self.groups = nodes, mesh, groups
        self.micros = _micros(nodes)
        messages = {node.id for node in nodes if node.call is not None and not node.call.is_collective}
        self.alike: dict[int, TraceNode] = {
            node.id: self._kernel(node, node.ctrl_deps, node.data_deps)
            for node in nodes
            if node.call is None and messages.isdisjoint((*node.ctrl_deps, *node.data_deps))
        }
        self.encoded: dict[int, bytes] = {}

    def of_rank(self, rank: int) -> Iterator[TraceNode]:
        """Yield the nodes of one rank."""
        several: dict[int, Ids] = {}
        between: Counter[tuple[int, int]] = Counter()

        def known(ids: Ids) -> Ids:
            return tuple(own for i in ids for own in several.get(i, (i,)))

        for node in self.nodes:
            if node.id in self.alike:
                yield self.alike[node.id]
            elif node.call is None:
                yield self._kernel(node, known(node.ctrl_deps), known(node.data_deps))
            elif node.call.is_collective:
                yield self._collective(node, rank, known(node.ctrl_deps), known(node.data_deps))
            else:
                made = list(self._messages(node, rank, known(node.ctrl_deps), known(node.data_deps), between))
                several[node.id] = tuple(each.id for each in made)
                yield from made

    def encoded_rank(self, rank: int) -> Iterator[bytes]:
        """Yield the nodes of one rank as messages of the schema, each behind its length."""
        for node in self.of_rank(rank):
            if node.id not in self.alike:
                yield encoded_node(node)
                continue
            if node.id not in self.encoded:
                self.encoded[node.id] = encoded_node(node)
            yield self.encoded[node.id]

    def _kernel(self, node: ClassNode, ctrl: Ids, data: Ids) -> TraceNode:
        attributes = (
            # A roofline divides by the intensity: what computes nothing has one operation.
            TraceAttribute("num_ops", "int64", max(node.flops, 1)),
            TraceAttribute("tensor_size", "uint64", node.bytes),
        )
        return self._node(node, node.id, NodeType.COMP_NODE, ctrl, data, attributes)

    def _collective(self, node: ClassNode, rank: int, ctrl: Ids, data: Ids) -> TraceNode:
        assert node.call is not None
        group = self.groups.number(group_of(rank, node.call.axes, self.mesh))
        attributes = (
            TraceAttribute("comm_type", "int64", COLLECTIVE_TYPES[node.call.kind]),
            TraceAttribute("comm_size", "int64", node.call.bytes),
            TraceAttribute("pg_name", "string", str(group)),
        )
        return self._node(node, node.id, NodeType.COMM_COLL_NODE, ctrl, data, attributes)

    def _messages(
        self, node: ClassNode, rank: int, ctrl: Ids, data: Ids, between: Counter[tuple[int, int]]
    ) -> Iterator[TraceNode]:
        """Yield the sends and receives of a rank in a call; `between` counts the messages of two ranks so far."""
        assert node.call is not None
        own = [m for m in messages(node.call, group_of(rank, node.call.axes, self.mesh)) if rank in m[:2]]
        for n, (source, target, size) in enumerate(own):
            tag = node.call.tag
            if tag is None:
                tag = 2 * between[source, target]
                between[source, target] += 1
            attributes = (
                TraceAttribute("comm_size", "int64", size),
                TraceAttribute("comm_src", "int32", source),
                TraceAttribute("comm_dst", "int32", target),
                TraceAttribute("comm_tag", "int32", tag),
            )
            type = NodeType.COMM_SEND_NODE if source == rank else NodeType.COMM_RECV_NODE
            yield self._node(node, node.id + n, type, ctrl, data, attributes)

    def _node(
        self, node: ClassNode, id: int, type: NodeType, ctrl: Ids, data: Ids, attributes: tuple[TraceAttribute, ...]
    ) -> TraceNode:
        # Without the first, a kernel is taken for one of the host.
        common = (
            TraceAttribute("is_cpu_op", "bool", 0),
            *attributes,
            TraceAttribute("duration_ps", "uint64", node.ticks),
        )
        return TraceNode(id, node.name, type, ctrl, data, self.micros[node.id], common)


def _micros(nodes: Sequence[ClassNode]) -> dict[int, int]:
    """
    Return the whole microseconds of each node. Those of kernels are rounded so that the sum of all up to any of them is
    right to half a microsecond; many a kernel takes less than one.
    """
    found: dict[int, int] = {}
    total = 0
    for node in nodes:
        if node.call is not None:
            found[node.id] = round(node.ticks / MICRO)
            continue
        found[node.id] = round((total + node.ticks) / MICRO) - round(total / MICRO)
        total += node.ticks
    return found
