"""
Bound from below what the units of a graph take as parts of stages, by kernels alone: seconds and bytes of a
micro-batch, divided evenly over the devices of a part, as if nothing moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from unity_ir.cost.keeps import Keeps
from unity_ir.cost.memory import leaf_bytes
from unity_ir.cost.plan import cost
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.node import Value
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.exact.shared_moves import without_free_moves
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.equal import PipelineSearch
from unity_ir.search.pipeline.table import Floats


@dataclass(frozen=True)
class UnitKernels:
    """
    What the units of the graph of one micro-batch take on all devices of a machine together. Arrays are [unit] or, of
    operators whose results the backward reads, [operator].
    """

    devices: int
    both: Floats
    """Seconds of forward and backward."""
    held: Floats
    """Bytes whatever is live: weights, gradients, the optimizer's state, inputs of all micro-batches."""
    unit: Sequence[int]
    """The first unit whose backward reads a result of the operator."""
    bytes: Floats
    """Bytes of the results, for each live micro-batch."""
    again: Floats
    """Seconds of making them once more."""
    seconds: float
    """All of `both` divided evenly over the devices, less what rounding may be."""
    forward_part: float
    """The least part of the seconds of a unit that is forward."""

    @staticmethod
    def of(search: PipelineSearch, micro_batches: int) -> UnitKernels:
        """
        Return what units take of one of `micro_batches` of a search's graph. Seconds are 0 on a device with a measured
        profile, whose smaller kernels may have any time.
        """
        graph, machine = search.small(micro_batches), search.machine
        of, with_gradient, keeps = units(graph), nodes_with_gradient(graph), Keeps(graph)
        forward, both, held = np.zeros((3, len(of.parts)))
        read: dict[Value, int] = {}
        for node in graph.nodes():
            if node.is_leaf:
                each = leaf_bytes(node, node.op == "weight" and node in with_gradient, search.optimizer)
                times = micro_batches if node.op == "input" else 1
                held[of.unit_of[node]] += times * each * prod(node.types[0].shape)
                continue
            for value, is_read in zip(node.operands, keeps.operands(node), strict=True):
                if is_read:
                    read[value] = min(read.get(value, of.unit_of[node]), of.unit_of[node])
        is_known = machine.device.profile is None
        unit: list[int] = []
        saved: list[tuple[float, float]] = []
        for each in cost(graph, machine, search.optimizer).operators if is_known else ():
            node, own = each.node, of.unit_of[each.node]
            forward[own] += each.forward
            both[own] += each.forward + each.backward
            values = [v for v in node.results if v in keeps.values]
            if values:
                unit.append(min(read.get(v, own) for v in values))
                bytes = sum(prod(v.shape) * ELEMENT_BYTES[v.dtype] for v in values)
                saved.append((float(bytes), each.forward))
        bytes, again = np.array(saved).reshape(-1, 2).T
        parts = forward[both > 0] / both[both > 0]
        seconds = without_free_moves(float(both.sum()) / machine.devices, graph, machine)
        return UnitKernels(machine.devices, both, held, unit, bytes, again, seconds, float(parts.min(initial=1.0)))

    def ranges(self, parts: int, byte: float, live: float) -> Floats:
        """
        Return what ranges of units cost at least on one of equal parts of the machine, [first, unit behind the last]:
        seconds, and a price for each byte that a device holds with so many micro-batches live, whatever is recomputed.
        """
        each = self.both + byte * self.held
        if byte:
            np.add.at(each, self.unit, np.minimum(byte * live * self.bytes, self.again))
        sums = np.concatenate([[0.0], np.cumsum(each)]) * (parts / self.devices)
        lost = max(float(self.both.sum()) / self.devices - self.seconds, 0.0) * parts
        return sums[None, :] - sums[:, None] - lost
