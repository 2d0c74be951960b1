"""
Data-dependent indexing in TDL (the tensor description language in which operators are defined): a sum that picks the
one position that an integer operand names.

    embedding(ids, t)  out[b.., e] = sum[v](where(eq(v, ids[b..]), t[v, e], 0))

The vocabulary v is an index variable like any other, so it can be divided. Evaluation and counts need not run over
it: `gather` and `scatter` recognise such sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.tdl.syntax import Access, Call, Const, Expr, Name, Reduce, Var, index_names


@dataclass(frozen=True, slots=True)
class Pick:
    """
    The parts of `where(eq(variable, at), body, 0)`: `body` where the index `variable` equals the integer read `at`,
    else 0.
    """

    variable: str
    at: Access
    body: Expr


def pick(expr: Expr) -> Pick | None:
    """
    Match an expression `where(eq(v, ids[b]), body, 0)`: 0 except where the index variable v equals the integer read
    there; return its parts (variable, integer read, body), or None for any other expression.

    Given `where(eq(v, ids[b]), t[v, e], 0)`, returns v, ids[b] and t[v, e].
    """
    match expr:
        case Call("where", (Call("eq", (Name(variable), Access() as at)), body, Const(0))):
            return Pick(variable, at, body)
        case _:
            return None


def gather(expr: Expr) -> Pick | None:
    """
    Match a gather, such as `sum[v](where(eq(v, ids[b]), t[v, e], 0))`, which equals t[ids[b], e] and so reads one
    element of t instead of all; return its parts v, ids[b] and t[v, e], or None for any other expression.
    """
    match expr:
        case Reduce("sum", (Var(name),), body):
            found = pick(body)
            if found is None or found.variable != name or any(name in index_names(i) for i in found.at.indices):
                return None
            return found
        case _:
            return None


def scatter(expr: Expr) -> Pick | None:
    """
    Match a scatter-add, such as `sum[b](where(eq(v, ids[b]), g[b, e], 0))`, which adds g[b, e] to position ids[b] of
    the result; return its parts v, ids[b] and g[b, e], or None for any other expression.
    """
    match expr:
        case Reduce("sum", _, body):
            found = pick(body)
            return found if found is not None and found.variable not in expr.names else None
        case _:
            return None
