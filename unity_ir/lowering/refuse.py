"""What no kernel, generated or of PyTorch, covers yet."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.tdl.syntax import Bound, Expr, Opaque, children


def refuse(bound: Bound) -> None:
    """Raises `UnityError` for a line that cannot be lowered, naming what it has."""
    if bound.has_windows:
        raise UnityError(f"pcg.{bound.operator}: no kernel reads or writes windows yet, so it cannot be lowered")
    if any(_is_opaque(r.expr) for r in bound.results):
        raise UnityError(f"pcg.{bound.operator}: no kernel for opaque functions yet, so it cannot be lowered")


def _is_opaque(expr: Expr) -> bool:
    return isinstance(expr, Opaque) or any(map(_is_opaque, children(expr)))
