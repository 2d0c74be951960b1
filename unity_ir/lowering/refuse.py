"""What no kernel, generated or of PyTorch, covers yet."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.tdl.syntax import Bound


def refuse(bound: Bound) -> None:
    """Raises `UnityError` for a line that cannot be lowered, naming what it has."""
    if bound.has_windows:
        raise UnityError(f"pcg.{bound.operator}: no kernel reads or writes windows yet, so it cannot be lowered")
