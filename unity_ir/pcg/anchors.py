"""Finds which values of a parallel graph are materialised on devices, and which are only steps of a reshard."""

from __future__ import annotations

from unity_ir.pcg.graph import Graph, Value
from unity_ir.pcg.parallel import IN_TIME


class Anchors:
    """
    Finds which values of a parallel graph exist on devices; the others are only steps of a reshard: a change of layout,
    written as a chain of parallel operators (`reduce`, then `partition`, say).

    A chain of parallel operators is one reshard, from the value it starts at to where it is read. A value in the middle
    exists only if its operator has a view, it is an output, or it is also read by a compute operator. A chain ends, and
    another starts, at a value that is recomputed (`recompute`), sent to another stage, or on either side of an operator
    that leads into the loop over micro-batches or out of it.
    """

    def __init__(self, graph: Graph):
        self._users = graph.users()
        self._outputs = {*graph.outputs, *(u.grad for u in graph.updates)}

    def materialised(self, value: Value) -> bool:
        """
        Return whether a value is a tensor of its own on devices: True for leaves and results of compute operators.

        The result of a parallel operator is one if it has a machine view (says on which devices it is), is an output or
        a gradient that an update reads, if a compute operator and another user read it, if it is read again
        (`recompute`), if another stage has sent it, or if it enters or leaves the loop over micro-batches; else it is
        only a step, or the end, of a reshard.
        """
        node = value.node
        is_start = node.op in (*IN_TIME, "recompute", "send")
        if not node.is_parallel or is_start or node.view is not None or value in self._outputs:
            return True
        users = self._users.get(value, ())
        if any(user.op in IN_TIME for user, _ in users):
            return True
        return len(users) > 1 and any(user.is_compute for user, _ in users)

    def of(self, value: Value) -> Value:
        """
        Return the nearest value before `value`, along its chain of parallel operators, that is a tensor on devices:
        where the reshard that makes `value` starts. That is `value` itself if it is one (`materialised`).
        """
        while not self.materialised(value):
            value = value.node.operands[0]
        return value
