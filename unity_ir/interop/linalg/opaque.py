"""Write out the functions that TDL (the language in which operators are defined) has no formula for, as longer TDL."""

from __future__ import annotations

from unity_ir.tdl.syntax import Access, Binary, Call, Const, Expr, Name, Reduce, Slice, Var


def written_out(function: str, made: str, taken: str, other: str, read: Access, size: int) -> Expr:
    """
    Return an opaque function (`tdl.opaque`) of a tensor as an expression, which compares each pair of elements.

    It makes a dim of the index variable `made` of the last dim, of `size` elements, that `read` reads at the variable
    `taken`; `other` is a further variable for that dim. Of equal elements the first is the larger.
    """

    def at(index: Var | Slice) -> Access:
        return Access(read.tensor, (*read.indices[:-1], index))

    def where(condition: Expr, value: Expr) -> Expr:
        return Call("where", (condition, value, Const(0.0)))

    def count(condition: Expr) -> Expr:
        return Reduce("sum", (Var(other),), where(condition, Const(1.0)))

    each, one = at(Var(other)), at(Var(taken))
    if function == "equals_before":
        same = Call("eq", (each, at(Slice(Var(made), 0, size))))
        return count(Call("and", (Call("lt", (Name(other), Name(made))), same)))
    before = Call("and", (Call("eq", (each, one)), Call("lt", (Name(other), Name(taken)))))
    rank = count(Call("or", (Call("gt", (each, one)), before)))
    # Not `where(eq(made, ..), ..)`, which is a gather if what it compares with is read.
    is_it = Call("eq", (Binary("-", rank, Name(made)), Const(0.0)))
    value = {"topk_values": one, "topk_indices": Name(taken)}[function]
    return Reduce("sum", (Var(taken),), where(is_it, value))
