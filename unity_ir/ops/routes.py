"""
Rows of experts that devices exchange: the operators of a step whose rows go to the devices that own their experts.

Each device has a piece, i, of the rows of a mixture of experts, and an expert for each. It sorts its rows by expert, so
that those for one device are contiguous; `send_rows` and `return_rows` (`pcg.collectives`) move them. `plan.routes`
writes a step in these.
"""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.ops.operator import Operator, Shapes
from unity_ir.ops.routed import ROWS_LINE, ROWS_NT_LINE, WEIGHTS_LINE
from unity_ir.tdl.syntax import AttrValue


def _order_line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    """Return the line for one number of rows, which it must state, as operand and result have different indices."""
    del attributes
    size = shapes[0][-1] if shapes[0] else 1
    return f"row_order(e: int)  out: int[a.., r] = opaque topk_indices[r; j](0 - e[a.., j])  where size(r) = {size}"


ROW_ORDER = Operator(_order_line, signature="row_order(e: int)")
"""The places of a piece's rows, sorted by their integers `e`, smallest first; rows of equal ones keep their order."""

ROW_TOKENS = Operator("row_tokens(order: int; chosen: int)  out: int[a..] = floor((order[a..] + 0.5) / chosen)")
"""The token of each row, if a token has `chosen` rows, one after the other."""

TAKE_ROWS = Operator("take_rows(x, at: int)  out[i, r, h] = sum[v](where(eq(v, at[i, r]), x[i, v, h], 0))")
"""The rows of each piece i of `x` [i, v, h] at the places `at` [i, r]: [i, r, h]."""

TAKE_NUMBERS = Operator("take_numbers(e: int, at: int)  out: int[i, r] = sum[v](where(eq(v, at[i, r]), e[i, v], 0))")
"""The integers of each piece i of `e` [i, v] at the places `at` [i, r]: [i, r]."""


ROWS_MATMUL = Operator(f"rows_matmul(x, w, e: int; live: float = 1.0)  {ROWS_LINE}")
"""`routed_matmul` of received rows: the part `live` of them is there, for prices; the others have no expert."""

ROWS_MATMUL_NT = Operator(f"rows_matmul_nt(x, w, e: int; live: float = 1.0)  {ROWS_NT_LINE}")
"""`routed_matmul_nt` of received rows."""

ROWS_MATMUL_TN = Operator(f"rows_matmul_tn(x, y, e: int; size: int, degrees: ints, live: float = 1.0)  {WEIGHTS_LINE}")
"""`routed_matmul_tn` of received rows."""

OPERATORS = (ROW_ORDER, ROW_TOKENS, TAKE_ROWS, TAKE_NUMBERS, ROWS_MATMUL, ROWS_MATMUL_NT, ROWS_MATMUL_TN)
