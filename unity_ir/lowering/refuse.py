"""What no kernel, generated or of PyTorch, covers yet."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.tdl.syntax import Bound, Expr, Opaque, Window, accesses, children


def refuse(bound: Bound) -> None:
    """Raises `UnityError` for a line that cannot be lowered, naming what it has."""
    if not all(_is_slice(i, bound) for r in bound.results for a in accesses(r.expr) for i in a.indices) or any(
        isinstance(i, Window) for r in bound.results for i in r.indices
    ):
        raise UnityError(f"pcg.{bound.operator}: no kernel reads or writes windows yet, so it cannot be lowered")
    if any(_is_opaque(r.expr) for r in bound.results):
        raise UnityError(f"pcg.{bound.operator}: no kernel for opaque functions yet, so it cannot be lowered")


def _is_slice(index: object, bound: Bound) -> bool:
    """Whether an index is a window of at most one variable that never leaves the dim, or no window."""
    if not isinstance(index, Window):
        return True
    first = index.offset + index.low
    return len(index.terms) < 2 and first >= 0 and first + index.span(bound.extents) < index.size


def _is_opaque(expr: Expr) -> bool:
    return isinstance(expr, Opaque) or any(map(_is_opaque, children(expr)))
