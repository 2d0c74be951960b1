"""Finds which values of a parallel graph are materialised on devices, and which are only steps of a reshard."""

from __future__ import annotations

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value
from unity_ir.pcg.parallel import IN_TIME

STARTS = frozenset((*IN_TIME, "recompute", "send"))
"""Parallel operators whose result is a tensor of its own wherever they are."""


class Anchors:
    """
    Finds which values of a parallel graph are tensors on devices. The others are only steps of a reshard, which the
    graph writes as a chain of parallel operators (`reduce`, then `partition`, say).

    Such a chain is one reshard, from the value it starts at to the value that is read. A value in the middle is a
    tensor only if its operator has a view, if it is an output, or if it is also read by a compute operator. A chain
    ends, and another starts, at a value that is recomputed (`recompute`) or sent to another stage, and on either side
    of an operator that leads into the loop over micro-batches or out of it.
    """

    def __init__(self, graph: Graph):
        self._users = graph.users()
        self._outputs = {*graph.outputs, *(u.grad for u in graph.updates)}

    def materialised(self, value: Value) -> bool:
        """
        Return whether a value is a tensor of its own on devices. Leaves (inputs, weights, constants) and results of
        compute operators always are.

        The result of a parallel operator is one if any of these holds; else it is only a step, or the end, of a
        reshard:

        - it has a machine view, which says on which devices it is;
        - it is an output, or a gradient that an update reads;
        - a compute operator and another user read it;
        - it is the result of `recompute` or of a send to another stage;
        - it enters or leaves the loop over micro-batches.
        """
        node = value.node
        if node.op in STARTS or not node.is_parallel or node.view is not None or value in self._outputs:
            return True
        users = self._users.get(value, ())
        if any(user.op in IN_TIME for user, _ in users):
            return True
        return len(users) > 1 and any(user.is_compute for user, _ in users)

    def of(self, value: Value) -> Value:
        """
        Return the value at which the reshard that makes `value` starts: the nearest tensor on devices (`materialised`),
        going back along the chain of parallel operators. That is `value` itself if it is one.
        """
        while not self.materialised(value):
            value = value.node.operands[0]
        return value
