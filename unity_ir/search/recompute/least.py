"""
Bound from below what a step takes that runs its whole batch at once, without stages, and fits: its kernels, and what it
has to recompute, as if all of it were divided evenly over all devices and nothing moved.

Of the values that the backward reads a device keeps at most what weights, gradients and the optimizer's state leave. At
a price of a byte the cheapest choice of what to save and what to recompute (`min_cut`), less the price of the bytes
that are left, is a Lagrangian bound; the best price is that at which just these bytes are saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from unity_ir.cost.memory import leaf_bytes
from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.exact.shared_moves import without_free_moves
from unity_ir.search.recompute.chosen import ANY_PRICE, Recomputable


@dataclass(frozen=True, slots=True)
class LeastUnstaged:
    """
    Lower bounds of a step without stages, in seconds: of its kernels alone (`kernels`), and with what it has to
    recompute to fit (`seconds`).
    """

    kernels: float
    seconds: float


def least_unstaged(graph: Graph, machine: Machine, optimizer: Optimizer) -> LeastUnstaged:
    """
    Return two lower bounds in seconds on a step of a serial forward graph, for all plans that run the whole batch at
    once, without stages, and fit the devices of `machine`: of its kernels alone, and with what it must recompute to
    fit. Both count each operator's kernels one by one (`cost.plan`), divided evenly over all devices. They are 0 on a
    device with a measured profile, whose smaller kernels may take any time.
    """
    if machine.device.profile is not None:
        return LeastUnstaged(0.0, 0.0)
    priced = cost(graph, machine, optimizer)
    kernels = sum(each.forward + each.backward for each in priced.operators)
    with_gradient = nodes_with_gradient(graph)
    held = sum(
        leaf_bytes(node, node.op == "weight" and node in with_gradient, optimizer) * prod(node.types[0].shape)
        for node in graph.nodes()
        if node.is_leaf
    )
    room = max(machine.devices * machine.device.usable - held, 0.0)
    values = Recomputable.of(priced, graph, with_products=True)
    price = values.price(room)
    price = ANY_PRICE if price is None else price
    again = values.at(price)
    seconds = kernels + max(0.0, values.seconds(again) + price * (values.bytes(again) - room))
    return LeastUnstaged(*(without_free_moves(each / machine.devices, graph, machine) for each in (kernels, seconds)))
