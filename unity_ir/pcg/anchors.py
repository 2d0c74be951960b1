"""Which values of a parallel graph exist on the devices, and which are only on the way from one place to another."""

from __future__ import annotations

from unity_ir.pcg.graph import Graph, Value


class Anchors:
    """
    Which values exist on the devices.

    A chain of parallel operators is one reshard from the value it starts at to where it is read, unless an operator in
    the middle has a view, is an output, or is read by an operator beside going on: then its value is materialised
    there.
    """

    def __init__(self, graph: Graph):
        self._users = graph.users()
        self._outputs = {*graph.outputs, *(u.grad for u in graph.updates)}

    def materialised(self, value: Value) -> bool:
        node = value.node
        if not node.is_parallel or node.view is not None or value in self._outputs:
            return True
        users = self._users.get(value, ())
        return len(users) > 1 and any(user.is_compute for user, _ in users)

    def of(self, value: Value) -> Value:
        """The materialised value a value is a reshard of; itself if it is one."""
        while not self.materialised(value):
            value = value.node.operands[0]
        return value
