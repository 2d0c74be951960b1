"""
Recognise rows that are sorted by their expert, multiplied group by group, and put back in order, as the mixtures of
transformers do: each row may as well stay where it is, and pick the weight of its expert.

    order = ids.argsort()                                        x'[t, k, :] = x[t, :]
    y = grouped(x[order // chosen])                       ->     y = routed_matmul(x', w, ids)
    out = y[order.argsort()]                                     out = y

So tokens [t] stay a dim that devices can divide, where sorted rows of all tokens are no such dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unity_ir.frontends.torch.values import constant, op, reshape
from unity_ir.pcg.node import Value, apply

BY_ROWS = {
    *("add", "sub", "mul", "div", "maximum", "minimum", "neg", "scale", "shift", "square", "cast", "select"),
    *("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "int_add", "int_mul", "lt", "le", "gt", "ge", "eq"),
    *("split", "slice", "concat", "embedding", "routed_matmul", "routed_matmul_nt", "rms_norm"),
}
"""Operators that compute each row of their result from the same row of their operands."""


@dataclass
class Orders:
    """
    What an import knows of sorted rows, by values of the graph: filled by the mappings of sorting and indexing.
    """

    sorted: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The indices that sort values [n], by the sorted ones, smallest first."""
    quotients: dict[Value, tuple[Value, int]] = field(default_factory=dict[Value, tuple[Value, int]])
    """(Indices [n] that sort, a number) by the indices divided by the number, rounded down."""
    inverses: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The indices that sort, by those that put back."""
    gathered: dict[Value, tuple[Value, Value]] = field(default_factory=dict[Value, tuple[Value, Value]])
    """(Value, indices) by what the value's rows at these indices are."""
    counts: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The integers [n] that were counted, by how many of them are 0, 1, 2, .., or by the running sums of that."""

    def restored(self, value: Value, order: Value) -> Value | None:
        """
        Return what `value` [n, ..] holds, of rows that `order` [n] has sorted, with rows in their order before: [t, k,
        ..], for `k` rows of each of `t` tokens. None where some operator that made `value` mixes rows, or is not known
        to leave them be.
        """
        chosen = next((count for by, count in self.quotients.values() if by == order), 0)
        if not chosen or order.shape[0] % chosen:
            return None
        return _Restored(self, order, chosen).of(value)


class _Restored:
    """Rebuilds values of sorted rows from the same rows in their order before."""

    def __init__(self, orders: Orders, order: Value, chosen: int):
        self.orders, self.order = orders, order
        self.lead = (order.shape[0] // chosen, chosen)
        self.known: dict[Value, Value | None] = {}

    def of(self, value: Value) -> Value | None:
        if value not in self.known:
            self.known[value] = self._of(value)
        return self.known[value]

    def _of(self, value: Value) -> Value | None:
        node, rest, (tokens, chosen) = value.node, value.shape[1:], self.lead
        if value in self.orders.gathered:
            source, at = self.orders.gathered[value]
            if at == self.order:
                return reshape(source, (*self.lead, *rest))
            if self.orders.quotients.get(at) == (self.order, chosen) and source.shape[0] == tokens:
                return op("expand", source, dim=1, sizes=(chosen,), degrees=(1,))
            return None
        if node.op == "constant":
            return constant(node.attribute("value"), (*self.lead, *rest), value.type.dtype)
        if node.op == "reshape" and node.operands[0].shape[:1] == value.shape[:1]:
            inner = self.of(node.operands[0])
            return None if inner is None else reshape(inner, (*self.lead, *rest))
        return self._rebuilt(value) if node.op in BY_ROWS else None

    def _rebuilt(self, value: Value) -> Value | None:
        """Return the operator that made a value, of restored operands; those without rows stay."""
        node, analysis = value.node, value.node.analysis
        row = analysis.result_dims[value.index][0]
        operands: list[Value] = []
        for parameter, operand in zip(analysis.bound.operands, node.operands, strict=True):
            dims = analysis.operand_dims.get(parameter.name, ())
            if row is None or row in dims[1:]:
                return None
            new = self.of(operand) if dims[:1] == (row,) else operand
            if new is None:
                return None
            operands.append(new)
        attributes = dict(node.attributes)
        if "dim" in attributes:
            attributes["dim"] = node.attribute("dim") + 1  # of the rows' one dim are two
        return apply(node.op, operands, attributes).results[value.index]
