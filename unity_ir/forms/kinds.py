"""Classify kernels by kind: a device has one efficiency curve for each, the share of its peaks that kernels reach."""

from __future__ import annotations

from unity_ir.tdl.counts import contraction_flops
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.gather import pick
from unity_ir.tdl.syntax import Expr, Opaque, Reduce, children

KINDS = ("contraction", "gather", "reduction", "elementwise", "copy")
"""Kinds of kernels, most specific first."""


def kind(analysis: Analysis) -> str:
    """
    Return the kind of an operator's kernel, which picks its efficiency curve in the cost model, given the `Analysis` of
    its bound TDL line (its definition at given shapes).

    `contraction` if it has a matrix product, a convolution or attention; else `gather` if it gathers or scatters by an
    integer operand; else `reduction` if it reduces or calls a function without formula (top-k); else `copy` if it only
    moves elements, or `elementwise`.
    """
    roots = [r.expr for r in analysis.bound.results]
    if contraction_flops(analysis.bound):
        return "contraction"
    if any(pick(e) is not None for root in roots for e in _all(root)):
        return "gather"
    if any(isinstance(e, Reduce | Opaque) for root in roots for e in _all(root)):
        return "reduction"
    return "copy" if analysis.moves_data_only else "elementwise"


def _all(expr: Expr) -> list[Expr]:
    return [expr, *(e for child in children(expr) for e in _all(child))]
