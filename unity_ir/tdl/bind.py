"""
Binding: takes the TDL line of an operator (its definition in the tensor description language, such as `matmul(x, w)
out[m, n] = sum[k](x[m, k] * w[k, n])`) and given operand shapes and attributes to a bound line, in which every index
variable (m, n, k) has its extent (number of positions).

Spells out packs and variadic names, replaces attributes by their values, and solves for the extent of every index
variable. This is the serial shape rule of every operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from unity_ir.tdl.attributes import check_attributes
from unity_ir.tdl.extents import Extents
from unity_ir.tdl.ranks import Shape
from unity_ir.tdl.syntax import (
    Access,
    Affine,
    AttrValue,
    Binary,
    Bound,
    Call,
    Cases,
    Const,
    Entry,
    Expr,
    Index,
    Line,
    Name,
    Opaque,
    Pack,
    Position,
    Reduce,
    Result,
    Segments,
    Size,
    Starred,
    Var,
    WrittenIndex,
    WrittenResult,
    children,
    index_names,
)


def bind(line: Line, shapes: Sequence[Shape], attributes: Mapping[str, AttrValue], dtypes: Sequence[str] = ()) -> Bound:
    """
    Bind an operator's TDL line to operand shapes and attributes: solve for the extent (number of positions) of every
    index variable; return the bound line.

    `shapes` are global sizes, one shape per operand (one for each operand of a variadic parameter). `dtypes` are the
    operands' element types, which matter where a parameter may hold `any`; if left out, all such operands hold floats.
    Raises `UnityError` where ranks, sizes or attributes do not fit, naming the operator and the two that disagree.
    """
    return Binder(line, shapes, check_attributes(line, attributes), dtypes).bind()


@dataclass(frozen=True, slots=True)
class Spelled:
    """
    A TDL line with packs (`a..`) and variadic names expanded to single names (`a0, a1`), as in a `Bound`, but with
    sizes, attribute values and windows still symbolic, so that it holds for all operands of the same ranks.
    """

    bound: Bound
    """Its windows are `Affine` still; names that are no index are attributes."""
    sizes: Mapping[str, Entry | int]
    """Index variables whose extent a clause gives."""
    windows: Mapping[WrittenIndex, Entry | int]
    """Windows of results, and the sizes of their dims."""


def spell(
    line: Line, shapes: Sequence[Shape], attributes: Mapping[str, AttrValue], dtypes: Sequence[str] = ()
) -> Spelled:
    """
    Expand the packs (`a..`, any number of dims) and variadic names of an operator's TDL line to single names (`a0,
    a1`), for operands of the ranks of `shapes`; keep sizes and attribute values symbolic, so that the result holds for
    all operands of these ranks, as proofs of rewrite rules need.

    The sizes in `shapes` must fit, but matter only where they are 1. `attributes` must fit them; those that give ranks,
    orders of dims, functions or element types are replaced by their values, the others stay names. `dtypes` are the
    operands' element types, floating point if left out. Raises `UnityError` where ranks, sizes or attributes do not
    fit.
    """
    return Binder(line, shapes, check_attributes(line, attributes), dtypes, keep=True).spell()


class Binder(Extents):
    """
    Binds a TDL line to the shapes and attributes given to its constructor, whose arguments `Ranks` explains; use one
    object for one binding. It does the last of four steps, writing out the expressions with bound indices; the base
    classes do the others: `Ranks`, `Indices`, `Extents`.
    """

    def expr(self, expr: Expr, copy: int | None) -> Expr:
        """
        Return an expression of the line as written with its indices bound (packs `a..` expanded to single variables),
        and attributes replaced by their values.

        Where a variadic name (`i*`) stands for several operands or results, `copy` is the number (from 0) of the one
        that the expression is written out for; elsewhere it is None.
        """
        match expr:
            case Access(tensor, indices, starred):
                name = f"{tensor}{copy}" if starred else tensor
                return Access(name, self.indices(indices, copy, name))
            case Binary(op, left, right):
                return Binary(op, self.expr(left, copy), self.expr(right, copy))
            case Call(function, args):
                if function in self.attributes:
                    function = str(self.attributes[function])
                bound = tuple(self.expr(a, copy) for a in args)
                return bound[0] if function == "identity" else Call(function, bound)
            case Reduce(reducer, indices, body):
                names = self.indices(indices, copy)
                return Reduce(reducer, names, self.expr(body, copy)) if names else self.expr(body, copy)
            case Opaque(function, outputs, inputs, body):
                made, taken = self.indices(outputs, copy), self.indices(inputs, copy)
                bound = Opaque(function, made, taken, self.expr(body, copy))
                for new, old in zip(bound.made, bound.names, strict=True):
                    if self.extents.get(new, 1) > self.extents.get(old, self.extents.get(new, 1)):
                        raise self.fail(f"{self.extents[new]} of {self.extents[old]} elements are too many; take fewer")
                return bound
            case Size(indices) if self.keep:
                return Size(self.indices(indices, copy))
            case Position(indices):
                names = [n for i in self.indices(indices, copy) for n in index_names(i)]
                position: Expr = Name(names[0]) if names else Const(0.0)
                for name in names[1:]:
                    size: Expr = Size((Var(name),)) if self.keep else Const(float(self.extents[name]))
                    position = Binary("+", Binary("*", position, size), Name(name))
                return position
            case Size(indices):
                return Const(float(prod(self.extent_of(i) for i in self.indices(indices, copy))))
            case Name(name):
                value = None if self.keep else self.attributes.get(name)
                return expr if value is None else Const(float(value)) if isinstance(value, int | float) else expr
            case _:
                return expr

    def extent_of(self, index: Index) -> int:
        """
        Return the product of the extents of a bound index's variables. For a window, that is not the size of its dim.
        """
        return prod(self.extents[n] for n in index_names(index))

    def bind(self) -> Bound:
        """
        Return the TDL line bound to the operands given to the constructor. Its windows and sizes stay symbolic if the
        object was made with `keep=True`. Raises `UnityError` where ranks, sizes or attributes do not fit.
        """
        self._solve_extents()
        self.spelling = self.keep
        results: list[Result] = []
        for written in self.line.results:
            dtype = self._dtype(written)
            if written.variadic:
                for copy in range(self.copies):
                    indices = self.indices(written.indices, copy)
                    results.append(Result(f"{written.name}{copy}", indices, self.expr(written.expr, copy), dtype))
                continue
            indices = self.indices(written.indices, None)
            segments = [i for i in indices if isinstance(i, Segments)]
            if segments:
                branches = tuple((n, self.expr(written.expr, c)) for c, n in enumerate(segments[0].names))
                results.append(Result(written.name, indices, Cases(branches), dtype))
            else:
                results.append(Result(written.name, indices, self.expr(written.expr, None), dtype))
        if self.keep:
            return Bound(self.line.operator, self.operands, tuple(results), MappingProxyType(self.extents), {})
        order = _order(results)
        missing = [n for n in order if n not in self.extents]
        if missing:
            raise self.fail(f"the size of index {missing[0]} is not given by any operand; give it in a where clause")
        extents = MappingProxyType({n: self.extents[n] for n in order})
        return Bound(self.line.operator, self.operands, tuple(results), extents, self._free_degrees())

    def spell(self) -> Spelled:
        """
        Return the TDL line with packs (`a..`, any number of dims) and variadic names expanded to single names, and with
        its sizes still symbolic, together with the sizes that its where clauses give. The object must have been made
        with `keep=True`. Raises `UnityError` where ranks, sizes or attributes do not fit.
        """
        bound = self.bind()
        sizes: dict[str, Entry | int] = {}
        windows: dict[WrittenIndex, Entry | int] = {}
        for (kind, index), clause in self.clauses.items():
            if kind == "size" and isinstance(index, Affine):
                windows[index] = clause.value
            elif kind == "size":
                names = [n for b in self._all_copies(index) for n in index_names(b)]
                value = clause.value
                many = isinstance(value, Entry) and isinstance(index, Pack | Starred)
                sizes |= {n: Entry(value.attribute, i) if many else value for i, n in enumerate(names)}  # pyright: ignore
        return Spelled(bound, sizes, windows)

    def _dtype(self, written: WrittenResult) -> str | None:
        match written.elements:
            case None:
                return self.followed
            case "int":
                return "i64"
            case "bool":
                return "bool"
            case name:
                return str(self.attributes[name])

    def _free_degrees(self) -> Mapping[str, int]:
        degrees: dict[str, int] = {}
        for (kind, index), clause in self.clauses.items():
            if kind == "degree":
                names = [n for b in self._all_copies(index) for n in index_names(b)]
                whole = isinstance(clause.value, Entry) and clause.value.at is None
                values = self._ints(clause) if whole else (self._number(clause.value),)
                for name, degree in zip(names, values, strict=True):
                    if degree < 1 or self.extents[name] % degree:
                        raise self.fail(f"degree {degree} does not divide size {self.extents[name]}")
                    degrees[name] = degree
        return MappingProxyType(degrees)


def _order(results: Sequence[Result]) -> list[str]:
    """Return the index variables in TDL order: those of the results' dims, then in the order of the expressions."""
    seen: dict[str, None] = {}

    def visit(expr: Expr) -> None:
        match expr:
            case Reduce(_, indices, body):
                seen.update(dict.fromkeys(n for i in indices for n in index_names(i)))
                visit(body)
            case Opaque(_, _, inputs, body):
                seen.update(dict.fromkeys(n for i in inputs for n in index_names(i)))
                visit(body)
            case Access(_, indices):
                seen.update(dict.fromkeys(n for i in indices for n in index_names(i)))
            case Name(name):
                seen.setdefault(name)
            case _:
                for child in children(expr):
                    visit(child)

    for result in results:
        seen.update(dict.fromkeys(n for i in result.indices for n in index_names(i)))
    for result in results:
        visit(result.expr)
    return list(seen)
