"""
Choose the attributes to try for an operator when rules are generated, from the uses of each attribute in the operator's
TDL line (its definition).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import TypeAlias

from unity_ir.ops import operator as find_operator
from unity_ir.rules.research.generate.terms import TermStep, Type
from unity_ir.tdl.functions import ACTIVATIONS
from unity_ir.tdl.syntax import (
    Access,
    Affine,
    Attribute,
    AttrValue,
    Entry,
    Expr,
    Line,
    Pack,
    Starred,
    WrittenIndex,
    children,
)

SizeAt: TypeAlias = tuple[int, ...]
"""A size at each set of sizes."""

NUMBER = 3.0
"""The value of attributes of kind `float`, for which a rule takes whatever the match gives."""


@dataclass(frozen=True, slots=True)
class AttributeRoles:
    """
    What an attribute is used for in an operator's TDL line, which decides the values to try for it: a dim's number, an
    order of dims, sizes, or sizes of parts of a dim.
    """

    axis: bool = False
    """The rank of a pack: the number of a dim."""
    order: bool = False
    """The order of a pack's dims."""
    size: bool = False
    """Sizes of dims, or the factors and offsets of windows."""
    pieces: bool = False
    """Sizes of parts of a dim."""
    factors: tuple[int, ...] = ()
    """The value to try for each entry, where windows use it: 1 for a factor or a size, 0 for an offset."""


def roles(line: Line, attribute: str) -> AttributeRoles:
    """
    Return what the attribute called `attribute` is used for in an operator's TDL line (as a dim's number, an order of
    dims, a size, ...), which decides the values to try for it.
    """
    clauses = [c for c in line.clauses if c.value == Entry(attribute) or str(c.value).split(".")[0] == attribute]
    axis = any(c.kind == "rank" for c in clauses)
    pieces = any(c.kind == "size" and isinstance(c.index, Starred) for c in clauses)
    indices: list[WrittenIndex] = []
    for r in line.results:
        indices += [*r.indices, *(i for access in reads(r.expr) for i in access.indices)]
    order = any(isinstance(i, Pack) and i.permuted_by == attribute for i in indices)
    entries: dict[int, int] = {}
    for c in clauses:
        if c.kind in ("size", "degree") and isinstance(c.value, Entry):
            entries[c.value.at or 0] = 2 if c.kind == "size" else 1
    for index in indices:
        for term in index.terms if isinstance(index, Affine) else ():
            if isinstance(term.factor, Entry) and term.factor.attribute == attribute:
                entries.setdefault(term.factor.at or 0, 0 if term.variable is None else 1)
            if term.variable == attribute:
                entries.setdefault(0, 1)
    factors = tuple(entries.get(i, 0) for i in range(max(entries, default=-1) + 1))
    return AttributeRoles(axis, order, bool(factors), pieces, factors)


def reads(expr: Expr) -> Iterator[Access]:
    """Yield every tensor read in an expression of a TDL line, as written, in reading order."""
    if isinstance(expr, Access):
        yield expr
    for child in children(expr):
        yield from reads(child)


def steps(
    op: str, operands: tuple[Type, ...], sizes: Sequence[SizeAt], functions: frozenset[str]
) -> Iterator[TermStep]:
    """
    Yield the operator called `op` with every combination of attributes to try on operands of these types, each as a
    step of a term; some combinations are not well typed. Of an operator with several results, the step takes the first.

    Terms are evaluated at several sets of sizes at once (say a = 4, b = 6 and a = 8, b = 9). So each type, and each of
    `sizes`, has one entry for each set: an element of `sizes` is a size that an attribute may name, as (4, 8) for a.
    `functions` are the names of functions (such as `relu`) that an attribute may have besides its default.
    """
    line = find_operator(op).line
    choices = [[(a.name, v) for v in _values(line, a, operands, sizes, functions)] for a in line.attributes]
    sets = range(len(operands[0]))
    for chosen in product(*choices):
        yield TermStep(op, tuple(tuple(sorted((name, value[i]) for name, value in chosen)) for i in sets))


def _values(
    line: Line, attribute: Attribute, operands: tuple[Type, ...], sizes: Sequence[SizeAt], functions: frozenset[str]
) -> Iterator[tuple[AttrValue, ...]]:
    """Yield the values to try for an attribute, at each set of sizes."""
    sets = len(operands[0])
    role = roles(line, attribute.name)
    rank = max(len(t[0].shape) for t in operands)
    if attribute.default is not None:
        yield (attribute.default,) * sets
    match attribute.kind:
        case "name":
            yield from ((f,) * sets for f in ACTIVATIONS if f in functions and f != attribute.default)
        case _ if attribute.default is not None:
            return
        case "float":
            yield (NUMBER,) * sets
        case "int" if role.axis:
            yield from ((dim,) * sets for dim in range(rank + 1))
        case "int" if role.size:
            yield from ((n,) * sets for n in (1, 2))
            yield from sizes
        case "int":
            yield from ((n,) * sets for n in (0, 1))
        case "ints" if role.order:
            yield from ((p,) * sets for p in permutations(range(rank)) if p != tuple(range(rank)))
        case "ints" if role.pieces:
            # Two parts that are a dim of the operand together.
            dims = {tuple(t.shape[d] for t in of) for of in operands for d in range(len(of[0].shape))}
            for a, b in product(sizes, repeat=2):
                if tuple(x + y for x, y in zip(a, b, strict=True)) in dims:
                    yield tuple(zip(a, b, strict=True))
        case "ints" if role.factors:
            yield (role.factors,) * sets
        case _:
            return
