"""The FLOPs by which models are known."""

from __future__ import annotations

from collections import Counter

from unity_ir.pcg.graph import Graph
from unity_ir.tdl.counts import contraction_flops


def graph_products(graph: Graph) -> int:
    """
    Floating point operations of the matrix products, convolutions and attention of a graph (`contraction_flops`).

    Of a forward graph those of one forward pass, of a training step those of its backward too.
    """
    applied = Counter(
        (n.operator, tuple(v.shape for v in n.operands), n.attributes) for n in graph.nodes() if n.is_compute
    )
    return sum(
        times * contraction_flops(operator.bind(shapes, attributes).bound)
        for (operator, shapes, attributes), times in applied.items()
    )
