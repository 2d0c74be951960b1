"""What the kernel tests share: operators bound as a case says, and what no kernel covers."""

from __future__ import annotations

from case import Case

from unity_ir.ops import operator
from unity_ir.tdl.syntax import Bound

NO_EXPRESSION = dict.fromkeys(
    ("dropout", "uniform", *(f"attention_dropout{kind}" for kind in ("", "_grad", "_saved_grad", "_saving"))),
    "no PyTorch expression of one line draws random numbers",
)
"""Operators that have kernels, but no PyTorch expression of one line."""


def bound_of(name: str, case: Case) -> Bound:
    one = operator(name)
    return one.bind(case.shapes, one.attributes(case.attributes), case.dtypes).bound


def operand_dtypes(bound: Bound, dtype: str = "f32") -> list[str]:
    """Element types for the operands, floating ones as given."""
    return [{"int": "i64", "bool": "bool"}.get(p.kind, dtype) for p in bound.operands]


def refusal(bound: Bound, impl: str = "triton") -> str | None:
    """What the launcher has to say of a line it does not cover."""
    if any(r.dtype == "f64" for r in bound.results):
        return "no kernel takes f64"
    return None
