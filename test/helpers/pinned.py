"""Plans of which single operators and values are on a part of the machine only."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from graphs import boxes

from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, rebuild
from unity_ir.pcg.view import View
from unity_ir.search.baselines.random_plan import sample


def pinned(graph: Graph, seed: int, inner: int = 2, outer: int = 2) -> tuple[Graph, Machine]:
    """
    A random plan of a serial graph on `outer` boxes of `inner` devices: what a random plan of one box is, with each
    operator, leaf and place in between on a box drawn at random, or the same on all.
    """
    random = Random(seed)
    plan = sample(graph, boxes(inner), seed)

    def place(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.view is None:
            return rebuild(node, operands).results
        box = random.randrange(outer + 1)
        if box == outer:
            view = View(0, node.view.axes, ((outer, inner), *node.view.repeat))
        else:
            view = View(box * inner, node.view.axes, node.view.repeat)
        return rebuild(node, operands, view).results

    return rewrite(plan, place), boxes(outer, inner)
