"""
Terms written as Python: `op("concat", tensor("x", "n a"), tensor("y", "n b"), dim=1)`.

Sizes and attributes are text that `rules.parse.parse_poly` reads.
"""

from __future__ import annotations

from typing import TypeAlias

from unity_ir.ops import operator as find_operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.parse import parse_poly
from unity_ir.rules.pattern import (
    AttrExpr,
    AttrParameter,
    Condition,
    DimPack,
    Input,
    Operation,
    ResultOf,
    Substitution,
    Term,
)
from unity_ir.rules.poly import number

Given: TypeAlias = str | int | float
"""An attribute: polynomials apart by spaces (`"f-1 g-1"`), a number, or what the match gives (`"$act"`)."""


def tensor(
    name: str, shape: str = "", degrees: str = "", sum: str = "1", copy: str = "1", elements: str = "float"
) -> Input:
    """An input: `tensor("x", "a.. d*n k", degrees="1 d 1")`."""
    sizes = tuple(DimPack(s[:-2]) if s.endswith("..") else parse_poly(s) for s in shape.split())
    return Input(name, sizes, tuple(map(parse_poly, degrees.split())), parse_poly(sum), parse_poly(copy), elements)


def op(name: str, /, *operands: Term, **attributes: Given) -> ResultOf:
    """An operator's first result on terms."""
    return results(name, 1, *operands, **attributes)[0]


def results(name: str, count: int, /, *operands: Term, **attributes: Given) -> tuple[ResultOf, ...]:
    """As many results of an operator on terms."""
    kinds = {} if name in PARALLEL_OPERATORS else {a.name: a.kind for a in find_operator(name).line.attributes}
    given = tuple(sorted((a, _attribute(kinds.get(a, "int"), v)) for a, v in attributes.items()))
    operation = Operation(name, operands, given)
    return tuple(ResultOf(operation, i) for i in range(count))


def _attribute(kind: str, value: Given) -> AttrExpr:
    if isinstance(value, str) and value.startswith("$"):
        return AttrParameter(value[1:])
    match kind:
        case "ints":
            return tuple(map(parse_poly, str(value).split()))
        case "int":
            return number(value) if isinstance(value, int) else parse_poly(str(value))
        case _:
            return value


def rule(name: str, source: Term | tuple[Term, ...], target: Term | tuple[Term, ...], *where: str) -> Substitution:
    """A substitution over the inputs its sides have, in order of occurrence; `where` are polynomials of at least 0."""
    left, right = (s if isinstance(s, tuple) else (s,) for s in (source, target))
    inputs: dict[str, Input] = {}

    def visit(term: Term) -> None:
        if isinstance(term, Input):
            inputs.setdefault(term.name, term)
        else:
            for operand in term.operation.operands:
                visit(operand)

    for term in (*left, *right):
        visit(term)
    return Substitution(name, tuple(inputs.values()), left, right, tuple(Condition(parse_poly(w)) for w in where))


def partition(x: Term, dim: Given, by: Given = "d") -> ResultOf:
    """Divided along a dim."""
    return op("partition", x, dim=dim, by=by)


def combine(x: Term, dim: Given, by: Given = "d") -> ResultOf:
    """Divided less along a dim."""
    return op("combine", x, dim=dim, by=by)


def replicate(x: Term, by: Given = "d") -> ResultOf:
    """In copies."""
    return op("replicate", x, by=by)


def reduce(x: Term, by: Given = "d") -> ResultOf:
    """The addends added up."""
    return op("reduce", x, by=by)
