"""Bound the emitted time of all placements of a graph from below: by its arithmetic, spread evenly over all devices."""

from __future__ import annotations

from unity_ir.cost.plan import cost, update_bytes
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer, erase
from unity_ir.pcg.types import ELEMENT_BYTES


def emitted_bound(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> float:
    """
    Return a lower bound in seconds on one emitted training step of `graph`, for any plan of it on all or part of
    `machine`.

    Counted are the FLOPs of all kernels, forward and backward, and the bytes of the optimizer's update (of `optimizer`,
    or else SGD, if the graph names none), spread evenly over all devices: no fusion, order or sharding removes these.
    Bytes that fusion may save, launches, and communication that overlap may hide count nothing. Rates are the device's
    peaks if it has a measured profile or fitted curves, else its `efficiency` times these.
    """
    serial = erase(graph)
    optimizer = graph.optimizer or optimizer or Optimizer()
    device = machine.device
    reached = 1.0 if device.curves or device.profile else device.efficiency
    priced = cost(serial, machine, optimizer)
    kernels = (k for o in priced.operators for k in (*o.work.forward, *o.work.backward))
    arithmetic = sum(kernel.flops / device.peak(kernel.dtype) for kernel in kernels if kernel.flops)
    updated = [u.weight for u in serial.updates] or [r.value for r in priced.weight_reshards]
    moved = sum(update_bytes(v.type.elements * ELEMENT_BYTES[v.node.master], optimizer) for v in updated)
    return (arithmetic + moved / device.memory_bandwidth) / reached / machine.devices
