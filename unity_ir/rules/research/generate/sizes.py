"""
The sizes of a term's tensors as polynomials in symbols, found from their values at several sets of sizes: index
variables that a TDL line (an operator's definition) uses for two dims are unified, and what is left free may be any
size.

Every symbol keeps its value at each set of sizes, which says how sums go together: `a + b = c + e` is solved by the
pairs that have the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from unity_ir.ops import operator as find_operator
from unity_ir.rules.pattern import AttrExpr, AttrParameter
from unity_ir.rules.poly import ONE, Poly, number, symbol
from unity_ir.rules.proof.dims import dim_size, number_of
from unity_ir.rules.research.generate.attributes import AttributeRoles, SizeAt, roles
from unity_ir.rules.research.generate.terms import TermStep, TypedTerm
from unity_ir.tdl.bind import Spelled, spell
from unity_ir.tdl.syntax import Access, Affine, WrittenIndex, accesses

DEGREE = "d"
"""The degree of all parallel operators."""

PolyShape: TypeAlias = tuple[Poly, ...]

AppliedStep: TypeAlias = tuple[TermStep, tuple[TypedTerm, ...]]
"""An operator applied, whichever of its results is taken."""


class Special(Exception):
    """Raised where the sizes of a term at samples have no general form."""


class TermSizes:
    """
    Finds the general form of terms over the same variables: their shapes and attributes as polynomials in symbols, from
    their values at several sets of sizes. `degree` is the degree of the parallel operators.

    `shape` also fills `attributes` (by applied operator) and `variables` (in order of use). Methods raise `Special` for
    what holds at these sizes only and has no general form.
    """

    def __init__(self, degree: int):
        self.values: dict[str, SizeAt] = {}
        self.degree = degree
        self.bindings: dict[str, Poly] = {}
        self.windows: dict[str, tuple[Poly, ...]] = {}
        """The number of windows along a dim, by what it follows from."""
        self._shapes: dict[TypedTerm, PolyShape] = {}
        self._results: dict[AppliedStep, list[PolyShape]] = {}
        self.attributes: dict[AppliedStep, dict[str, AttrExpr]] = {}
        self.variables: dict[TypedTerm, None] = {}

    # -- symbols

    def fresh(self, values: SizeAt) -> Poly:
        """Make a new symbol, given its value at each set of sizes at which the terms were tried; return it."""
        # In order of creation, so that sums are compared term by term.
        name = f"s{len(self.values):04}"
        self.values[name] = values
        return symbol(name)

    def known(self, poly: Poly) -> Poly:
        """
        Return the polynomial with every symbol that `unify` or `divide` has solved for replaced by its value, so that
        it has only symbols that may still have any value.
        """
        while not poly.symbols.isdisjoint(self.bindings):
            poly = poly.substitute(self.bindings)
        return poly

    def value(self, poly: Poly) -> SizeAt:
        """Return the value of a polynomial in sizes at each set of sizes at which the terms were tried: [set]."""
        sets = len(next(iter(self.values.values())))
        return tuple(poly.at({DEGREE: self.degree, **{s: v[i] for s, v in self.values.items()}}) for i in range(sets))

    def unify(self, a: Poly, b: Poly) -> None:
        """
        Make two sizes equal for all values of the symbols: add the equation `a = b`, and solve it for symbols. Raises
        `Special` where they can be equal at some values only, or at none.
        """
        a, b = self.known(a), self.known(b)
        if a == b:
            return
        if self.value(a) != self.value(b):
            raise Special(f"{a} is {b}")
        # The later of two symbols is replaced, so that the terms of a sum stay in order.
        for x, y in ((a, b), (b, a)) if str(a) > str(b) else ((b, a), (a, b)):
            name = _bare(x)
            if name is not None and name not in y.symbols:
                self._bind(name, y)
                return
        if DEGREE in (a.symbols | b.symbols):
            factors = [all(DEGREE in m for m, _ in p.terms) for p in (a, b)]
            if factors[0] != factors[1]:
                self.divide(b if factors[0] else a)
                self.unify(a, b)
                return
            if all(factors):
                self.unify(a.coefficient(DEGREE), b.coefficient(DEGREE))
                return
        self._pair(a, b)

    def _bind(self, name: str, to: Poly) -> None:
        other = _bare(to)
        if name in self.windows and other in self.windows:
            self.bindings[name] = to
            for x, y in zip(self.windows[name], self.windows[other], strict=True):
                self.unify(x, y)
        elif name in self.windows and other is not None:
            self.bindings[other] = symbol(name)
        elif name in self.windows:
            raise Special(f"{to} is a number of windows")
        else:
            self.bindings[name] = to

    def _pair(self, a: Poly, b: Poly) -> None:
        """Unify sums term by term: in order where values agree, else any two terms of the same value."""
        left, right = (
            [Poly(((m, 1),)) for m, c in sorted(p.terms, key=lambda t: t[0]) for _ in range(c)] for p in (a - b, b - a)
        )
        if len(left) != len(right):
            raise Special(f"{a} is {b}")
        pairs: list[tuple[Poly, Poly]] = []
        for x in left:
            y = next((y for y in right if self.value(y) == self.value(x)), None)
            if y is None or not (_bare(x) or _bare(y)):
                raise Special(f"{a} is {b}")
            right.remove(y)
            pairs.append((x, y))
        for x, y in pairs:
            self.unify(x, y)

    def divide(self, size: Poly) -> Poly:
        """
        Make a size (a polynomial) a multiple of the degree of the parallel operators, by writing one of its symbols as
        degree times a new one; return the quotient. Raises `Special` where that is not possible in general.
        """
        size = self.known(size)
        for m, _ in size.terms:
            if DEGREE in m:
                continue
            name = next(
                (s for s in m if s not in self.windows and not any(v % self.degree for v in self.values[s])), None
            )
            if name is None:
                raise Special(f"{size} is a multiple of the degree")
            rest = self.fresh(tuple(v // self.degree for v in self.values[name]))
            self.bindings[name] = symbol(DEGREE) * rest
            return self.divide(size)
        return size.coefficient(DEGREE)

    # -- terms

    def shape(self, term: TypedTerm) -> PolyShape:
        """
        Return the shape of a term as polynomials in symbols for sizes; computing it unifies the sizes that its
        operators require to be equal. Raises `Special` where it has no general form.
        """
        found = self._shapes.get(term)
        if found is None:
            found = self._shapes[term] = self._variable(term) if term.step is None else self._result(term.step, term)
        return tuple(map(self.known, found))

    def results(self, of: AppliedStep) -> list[PolyShape]:
        """
        Return the shapes, as polynomials, of all results of an operator applied to terms, in order. `shape` must have
        been called before with one of the results.
        """
        return [tuple(map(self.known, shape)) for shape in self._results[of]]

    def _variable(self, term: TypedTerm) -> PolyShape:
        self.variables[term] = None
        sizes = zip(*(t.shape for t in term.type), strict=True)
        shape = tuple(self.fresh(s) for s in sizes)
        for size, degree in zip(shape, term.type[0].degrees, strict=True):
            if degree > 1:
                self.divide(size)
        return shape

    def _result(self, step: TermStep, term: TypedTerm) -> PolyShape:
        key = application(term)
        if key not in self._results:
            self._results[key] = self._apply(*key)
        return self._results[key][step.result]

    def _parallel(self, step: TermStep, operands: tuple[TypedTerm, ...]) -> PolyShape:
        (operand,) = operands
        given = dict(step.attributes[0])
        if given["by"] != self.degree:
            raise Special(f"{step.op} by {given['by']}")
        attributes: dict[str, AttrExpr] = {"by": symbol(DEGREE)}
        shape = self.shape(operand)
        if "dim" in given:
            dim = int(str(given["dim"]))
            attributes["dim"] = number(dim)
            if step.op == "partition":
                self.divide(shape[dim])
        self.attributes[step, operands] = attributes
        return shape

    def _apply(self, step: TermStep, operands: tuple[TypedTerm, ...]) -> list[PolyShape]:
        if step.is_parallel:
            return [self._parallel(step, operands)]
        shapes = [self.shape(o) for o in operands]
        line = find_operator(step.op).line
        spelled = [
            spell(line, [o.type[i].shape for o in operands], dict(given)) for i, given in enumerate(step.attributes)
        ]
        attributes = self.attributes[step, operands] = self._attributes(step)
        return _Line(self, spelled, shapes, attributes).results()

    def _attributes(self, step: TermStep) -> dict[str, AttrExpr]:
        """
        Return an operator's attributes: symbols for those that the line uses as sizes, the given numbers for others.
        """
        line = find_operator(step.op).line
        found: dict[str, AttrExpr] = {}
        for a in line.attributes:
            values = [dict(given)[a.name] for given in step.attributes]
            role = roles(line, a.name)
            first = values[0]
            if first == a.default:
                role = AttributeRoles()
            if a.kind == "float" and a.default is None:
                found[a.name] = AttrParameter(a.name)
            elif isinstance(first, tuple):
                entries = zip(*(v for v in values if isinstance(v, tuple)), strict=True)
                sizes = role.size or role.pieces
                found[a.name] = tuple(self._entry(e) if sizes else number(e[0]) for e in entries)
            elif isinstance(first, int) and a.kind == "int":
                entry = tuple(v for v in values if isinstance(v, int))
                found[a.name] = self._entry(entry) if role.size and not role.axis else number(first)
            else:
                found[a.name] = float(first) if a.kind == "float" else first
        return found

    def _entry(self, values: SizeAt) -> Poly:
        """Return a symbol for a number that is a size, or, where it is 0, one less."""
        return self.fresh(values) if min(values) > 0 else self.fresh(tuple(v + 1 for v in values)) - 1


def application(term: TypedTerm) -> AppliedStep:
    """
    Return (operator with attributes, operands) of a term that is no variable, without saying which result of the
    operator it is: equal for all results of one operator.
    """
    assert term.step is not None
    return TermStep(term.step.op, term.step.attributes), term.operands


def _bare(poly: Poly) -> str | None:
    """Return the symbol a polynomial is, other than the degree."""
    if len(poly.terms) == 1 and poly.terms[0][1] == 1 and len(poly.terms[0][0]) == 1:
        (name,) = poly.terms[0][0]
        return None if name == DEGREE else name
    return None


class _Line:
    """A line at symbolic shapes, spelled out at each set of sizes."""

    def __init__(
        self,
        sizes: TermSizes,
        spelled: Sequence[Spelled],
        shapes: Sequence[PolyShape],
        attributes: Mapping[str, AttrExpr],
    ):
        self.sizes, self.spelled, self.attributes = sizes, spelled, attributes
        self.first = spelled[0]
        bound = self.first.bound
        extents = bound.extents
        self.extents = {
            n: ONE if size == 1 else sizes.fresh(tuple(s.bound.extents[n] for s in spelled))
            for n, size in extents.items()
        }
        for name, of in self.first.sizes.items():
            if name in self.extents:
                sizes.unify(self.extents[name], number_of(of, attributes))
        operands = {p.name: s for p, s in zip(bound.operands, shapes, strict=True)}
        reads: list[Access] = [a for r in bound.results for a in accesses(r.expr)]
        places = [(i, s) for a in reads for i, s in zip(a.indices, operands[a.tensor], strict=True)]
        for index, size in places:
            if not isinstance(index, Affine):
                sizes.unify(size, self._extent(index))
        for index, size in places:
            if isinstance(index, Affine):
                self._window(index, size)

    def _extent(self, index: WrittenIndex) -> Poly:
        return dim_size(index, self.extents, self.first, self.attributes)

    def _window(self, index: Affine, size: Poly) -> None:
        """Give the first variable of a window whose size is not known as many values as windows fit."""
        names = [t.variable for t in index.terms if t.variable in self.extents]
        open_ = [n for n in names if _bare(self.sizes.known(self.extents[n])) is not None and n not in self.first.sizes]
        if len(names) < 2 or not open_:
            raise Special("a window of a form that is not generalised")
        name = _bare(self.sizes.known(self.extents[open_[0]]))
        assert name is not None
        rest = [number_of(t.factor, self.attributes) for t in index.terms]
        others = [self.extents[n] for n in names if n != open_[0]]
        args = (size, *rest, *others)
        known = tuple(map(self.sizes.known, args))
        for other, before in self.sizes.windows.items():
            if tuple(map(self.sizes.known, before)) == known:
                self.sizes.bindings[name] = symbol(other)
                return
        self.sizes.windows[name] = args

    def results(self) -> list[PolyShape]:
        """Return the sizes of all results of the line."""
        return [tuple(map(self._extent, r.indices)) for r in self.first.bound.results]
