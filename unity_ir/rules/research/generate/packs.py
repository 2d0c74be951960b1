"""
Generalises rewrite rules to any number of leading dims, where they treat these alike.

What is made here is a guess: it has to be proved like every substitution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from unity_ir.ops import operator as find_operator
from unity_ir.rules.pattern import AttrExpr, DimPack, Input, Operation, ResultOf, Substitution, Term
from unity_ir.rules.poly import ONE, Poly, number, symbol
from unity_ir.rules.research.generate.attributes import roles
from unity_ir.rules.research.generate.sizes import PolyShape

PACK = "a"
"""The pack of leading dims; no size has this name."""

ShapeOf = Callable[[Term], PolyShape]
"""The sizes of a rule's terms."""


def packed(rule: Substitution, shape: ShapeOf) -> Iterator[Substitution]:
    """
    Generalise a rule to any number of leading dims, by a pack (`a..`, which stands for a run of any number of dims) in
    the place of dims that it treats alike; yield guesses, to be proved. None are yielded for a rule whose inputs have
    divided dims.

    If all terms have the same shape, and all its sizes are symbols, the first guess puts the pack in the place of the
    whole shape. There is one more guess for each symbol, n say, that is the size of dim 0 of some terms, and occurs in
    no other size or attribute: it turns the shapes [n, k] to [a.., k]. Guesses that cannot be written are left out,
    such as one in which an operator works along a dim of the pack. `shape(term)` returns the shape of a term of the
    rule, as polynomials in the rule's symbols.
    """
    terms = list(_terms(rule))
    shapes = {shape(t) for t in terms}
    plain = not any(i.degrees for i in rule.inputs)
    if plain and len(shapes) == 1 and all(_is_symbol(s) for s in next(iter(shapes))):
        made = _Packing(rule, shape, None).rule()
        if made is not None:
            yield made
    leading = {s[0] for s in shapes if s}
    alone = {
        s
        for s in leading
        if _is_symbol(s) and not any(s.symbols & p.symbols for own in shapes for p in (*own[1:], *_others(own, s)))
    }
    for s in sorted(alone, key=str):
        if plain and not any(s.symbols & _symbols(v) for o in _operations(rule) for _, v in o.attributes):
            made = _Packing(rule, shape, s).rule()
            if made is not None:
                yield made


def _others(shape: PolyShape, leading: Poly) -> tuple[Poly, ...]:
    return () if not shape or shape[0] == leading else shape[:1]


def _is_symbol(poly: Poly) -> bool:
    return len(poly.terms) == 1 and poly.terms[0][1] == 1 and len(poly.terms[0][0]) == 1


def _symbols(value: AttrExpr) -> frozenset[str]:
    polys = (value,) if isinstance(value, Poly) else value if isinstance(value, tuple) else ()
    return frozenset[str]().union(*(p.symbols for p in polys))


def _operations(rule: Substitution) -> list[Operation]:
    return rule.operations((*rule.source, *rule.target))


def _terms(rule: Substitution) -> Iterator[Term]:
    yield from rule.inputs
    for o in _operations(rule):
        yield ResultOf(o)
    yield from (t for t in (*rule.source, *rule.target) if isinstance(t, ResultOf))


class _Packing:
    """A rule with a pack for a leading size, or, without one, for all dims of everything."""

    def __init__(self, rule: Substitution, shape: ShapeOf, leading: Poly | None):
        self.source, self.shape, self.leading = rule, shape, leading
        self.inputs = {i: self._input(i) for i in rule.inputs}
        self.made: dict[int, Operation] = {}

    def _has_pack(self, term: Term) -> bool:
        shape = self.shape(term)
        return self.leading is None or (bool(shape) and shape[0] == self.leading)

    def _input(self, of: Input) -> Input:
        if not self._has_pack(of):
            return of
        rest = () if self.leading is None else of.shape[1:]
        return replace(of, shape=(DimPack(PACK), *rest))

    def rule(self) -> Substitution | None:
        """Return the rule with the pack; None where an attribute numbers a dim of the pack."""
        rule = self.source
        try:
            sides = [tuple(map(self._term, side)) for side in (rule.source, rule.target)]
        except ValueError:
            return None
        return replace(rule, inputs=tuple(self.inputs.values()), source=sides[0], target=sides[1])

    def _term(self, term: Term) -> Term:
        if isinstance(term, Input):
            return self.inputs[term]
        key = id(term.operation)
        if key not in self.made:
            o = term.operation
            operands = tuple(map(self._term, o.operands))
            here = any(self._has_pack(t) for t in (*o.operands, ResultOf(o)))
            attributes = tuple((n, self._attribute(o.op, n, v)) if here else (n, v) for n, v in o.attributes)
            self.made[key] = replace(o, operands=operands, attributes=attributes)
        return replace(term, operation=self.made[key])

    def _attribute(self, op: str, name: str, value: AttrExpr) -> AttrExpr:
        """
        Return an attribute with the number of a dim counted from the pack's end.

        Raises `ValueError` for a dim of the pack.
        """
        if op in ("partition", "combine"):
            axis = name == "dim"
        elif op in ("replicate", "reduce", "pick", "zero_pad"):
            return value
        else:
            role = roles(find_operator(op).line, name)
            if role.order:
                raise ValueError(f"{op} permutes the pack")
            axis = role.axis
        if not axis:
            return value
        if self.leading is None or not isinstance(value, Poly) or value == number(0):
            raise ValueError(f"{op} is along a dim of the pack")
        return symbol(f"#{PACK}") + value - ONE
