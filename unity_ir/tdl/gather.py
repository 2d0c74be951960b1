"""
Data-dependent indexing, as TDL says it: a sum that picks the one position an operand of integers names.

    embedding(ids, t)  out[b.., e] = sum[v](where(eq(v, ids[b..]), t[v, e], 0))

So the vocabulary is an index variable like any other, and can be divided. Nothing that evaluates or counts has to run
over it, though: `gather` and `scatter` see what the sum amounts to.
"""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.tdl.syntax import Access, Call, Const, Expr, Name, Reduce, Var, index_names


@dataclass(frozen=True, slots=True)
class Pick:
    """`body` where `variable` is the element of `at`, and 0 elsewhere."""

    variable: str
    at: Access
    body: Expr


def pick(expr: Expr) -> Pick | None:
    """Given `where(eq(v, ids[b]), t[v, e], 0)`, returns v, ids[b] and t[v, e]."""
    match expr:
        case Call("where", (Call("eq", (Name(variable), Access() as at)), body, Const(0))):
            return Pick(variable, at, body)
        case _:
            return None


def gather(expr: Expr) -> Pick | None:
    """
    A sum over the very variable that is picked: one element is read where there were to be all of them.

    The integers do not depend on it.
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
    """A sum over the positions of the integers: every element of the body is added to the one place picked for it."""
    match expr:
        case Reduce("sum", _, body):
            found = pick(body)
            return found if found is not None and found.variable not in expr.names else None
        case _:
            return None
