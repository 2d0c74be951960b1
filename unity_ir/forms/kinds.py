"""Classify kernels by how close to a device's peaks they run: one efficiency curve per kind."""

from __future__ import annotations

from unity_ir.tdl.analysis import Analysis
from unity_ir.tdl.counts import products
from unity_ir.tdl.gather import pick
from unity_ir.tdl.syntax import Expr, Opaque, Reduce, children

KINDS = ("contraction", "gather", "reduction", "elementwise", "copy")
"""Kinds of kernels, most specific first."""


def kind(analysis: Analysis) -> str:
    """
    Return the kind of an operator's kernel, from its line alone.

    `contraction` of a line with a product of matrices, a convolution or attention; `gather` of one that reads or writes
    where integers say; `reduction`, `elementwise`; `copy` of one without arithmetic.
    """
    roots = [r.expr for r in analysis.bound.results]
    if products(analysis.bound):
        return "contraction"
    if any(pick(e) is not None for root in roots for e in _all(root)):
        return "gather"
    if any(isinstance(e, Reduce | Opaque) for root in roots for e in _all(root)):
        return "reduction"
    return "copy" if analysis.moves_data_only else "elementwise"


def _all(expr: Expr) -> list[Expr]:
    return [expr, *(e for child in children(expr) for e in _all(child))]
