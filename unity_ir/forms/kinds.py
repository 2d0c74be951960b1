"""Classify kernels by kind: a device has one efficiency curve for each, the share of its peaks that kernels reach."""

from __future__ import annotations

from unity_ir.forms.attention import scores_of
from unity_ir.forms.rewrite import simplified
from unity_ir.tdl.counts import has_contractions
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.gather import pick
from unity_ir.tdl.syntax import Call, Expr, Opaque, Reduce, children

KINDS = ("attention", "contraction", "gather", "reduction", "elementwise", "copy")
"""Kinds of kernels, most specific first."""

CONTRACTIONS = ("attention", "contraction")
"""The kinds of kernels that multiply matrices, of which a kernel is at most one."""


def kind(analysis: Analysis) -> str:
    """
    Return the kind of an operator's kernel, which picks its efficiency curve in the cost model, given the `Analysis` of
    its bound TDL line (its definition at given shapes).

    `attention` if it has a softmax of products of queries and keys; else `contraction` if it has a matrix product or a
    convolution; else `gather` if it gathers or scatters by an integer operand; else `reduction` if it reduces or calls
    a function without formula (top-k); else `copy` if it only moves elements, or `elementwise`.
    """
    roots = [r.expr for r in analysis.bound.results]
    if has_contractions(analysis.bound):
        return "attention" if _has_softmax(roots) and scores_of(simplified(analysis.bound, {})) else "contraction"
    if any(pick(e) is not None for root in roots for e in _all(root)):
        return "gather"
    if any(isinstance(e, Reduce | Opaque) for root in roots for e in _all(root)):
        return "reduction"
    return "copy" if analysis.moves_data_only else "elementwise"


def _has_softmax(roots: list[Expr]) -> bool:
    """Return whether expressions have an exponential, without which there is no softmax: quick to see."""
    return any(isinstance(e, Call) and e.function == "exp" for root in roots for e in _all(root))


def _all(expr: Expr) -> list[Expr]:
    return [expr, *(e for child in children(expr) for e in _all(child))]
