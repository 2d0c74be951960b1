"""
Make a substitution (rewrite rule) of two equal terms: sizes become symbols, and shared subterms and repeated variables
become variables of their own wherever the two stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from unity_ir.rules.pattern import AttrExpr, Input, Operation, ResultOf, Substitution
from unity_ir.rules.pattern import Term as Pattern
from unity_ir.rules.poly import ONE, Poly, symbol
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.research.generate.fingerprint import Values
from unity_ir.rules.research.generate.sizes import DEGREE, AppliedStep, Special, TermSizes, application
from unity_ir.rules.research.generate.terms import Terms, TypedTerm, leaves, subterms

Pair: TypeAlias = tuple[TypedTerm, TypedTerm]

Sides: TypeAlias = tuple[TypedTerm, ...]
"""Equal terms: each of the first half is equal to its counterpart in the second."""

OCCURRENCES = 6
"""Most occurrences of a variable, on all sides together, at which it is still split."""

_NAMES = [*"nkmpqrstbcefghijluvwxyz", *(f"n{i}" for i in range(100))]


def most_general(
    sides: Sides, terms: Terms, values: Values, allowed: Callable[[Sides], bool] = lambda sides: True
) -> Sides:
    """
    Generalise an equation between terms: put variables in the place of subterms, and several variables in the place of
    one, as long as both sides stay equal and `allowed(new sides)` is True.

    `sides` are the terms: each of the first half equals its counterpart in the second. `terms` makes the new terms;
    `values` evaluates terms on random tensors, by which they are compared.

    Returns the sides with variables numbered in order of use. Given `add(relu(x), y)` and `add(y, relu(x))`, returns
    `add(x, y)` and `add(y, x)`; given `matmul(add(x, x), w)` and `add(matmul(x, w), matmul(x, w))`, returns both over
    `add(x, y)`.
    """
    for more_general in (_without_subterm, _split_variables):
        while True:
            new = next((n for n in more_general(sides, terms) if allowed(n) and _hold(n, values)), None)
            if new is None:
                break
            sides = new
    return terms.renamed(*sides)


def _hold(sides: Sides, values: Values) -> bool:
    half = len(sides) // 2
    return all(values.equal(a, b) for a, b in zip(sides[:half], sides[half:], strict=True))


def _without_subterm(sides: Sides, terms: Terms) -> Iterator[Sides]:
    """Yield the sides with a variable in the place of one subterm, the largest subterm first."""
    used = {v for side in sides for v in leaves(side)}
    inner = {t for side in sides for t in subterms(side) if not t.is_variable and t not in sides}
    for term in sorted(inner, key=lambda t: (-t.size, t.text)):
        variable = next(v for i in range(32) if (v := terms.variable(i, term.type)) not in used)
        new = [terms.replaced(side, {term: variable}) for side in sides]
        if None not in new:
            yield tuple(t for t in new if t is not None)


def _split_variables(sides: Sides, terms: Terms) -> Iterator[Sides]:
    """
    Yield the sides with a new variable in the place of some occurrences of a variable; its first occurrence stays.
    """
    used = dict.fromkeys(v for side in sides for v in leaves(side))
    for v in used:
        counts = [sum(x is v for x in leaves(side)) for side in sides]
        if (max(counts) < 2 and len(sides) == 2) or sum(counts) > OCCURRENCES:
            continue
        new = next(x for i in range(32) if (x := terms.variable(i, v.type)) not in used)
        for choice in product((False, True), repeat=sum(counts)):
            if any(choice) and not choice[0]:
                chosen = iter(choice)
                made = [_chosen(side, v, new, chosen, terms) for side in sides]
                if None not in made:
                    yield tuple(t for t in made if t is not None)


def _chosen(term: TypedTerm, old: TypedTerm, new: TypedTerm, choice: Iterator[bool], terms: Terms) -> TypedTerm | None:
    if term is old:
        return new if next(choice) else old
    if term.step is None:
        return term
    operands = [_chosen(o, old, new, choice, terms) for o in term.operands]
    return None if None in operands else terms.make(term.step, [o for o in operands if o is not None])


@dataclass(frozen=True)
class General:
    """A substitution with symbols for sizes, and a function that returns the shape of any of its terms."""

    rule: Substitution
    shape: Callable[[Pattern], tuple[Poly, ...]]


def general(name: str, sources: Sequence[TypedTerm], targets: Sequence[TypedTerm], degree: int) -> General | None:
    """
    Make the substitution called `name` that replaces the terms `sources` by the terms `targets`, one for each result,
    with symbols for all sizes and degrees; return it, with the shapes of its terms.

    The shapes of the terms are known at a few sets of sizes only. Returns None if no polynomials in symbols give these
    shapes and the attributes, or if the two sides have equal shapes at some sizes only. `degree` is the degree of the
    parallel operators in the terms.
    """
    sizes = TermSizes(degree)
    try:
        for source, target in zip(sources, targets, strict=True):
            for a, b in zip(sizes.shape(source), sizes.shape(target), strict=True):
                sizes.unify(a, b)
    except (Special, Undecided):
        return None
    names = _Names(sizes)
    letters = _input_names(sizes.variables)
    inputs = {v: _input(letters[v], v, [names(s) for s in sizes.shape(v)]) for v in sizes.variables}
    made: dict[AppliedStep, Operation] = {}

    def pattern(term: TypedTerm) -> Pattern:
        if term.step is None:
            return inputs[term]
        key = application(term)
        if key not in made:
            operands = tuple(map(pattern, term.operands))
            attributes = {n: names.attribute(v) for n, v in sizes.attributes[key].items()}
            made[key] = Operation(term.step.op, operands, tuple(sorted(attributes.items())))
        return ResultOf(made[key], term.step.result)

    sides = [tuple(map(pattern, side)) for side in (sources, targets)]
    shapes: dict[tuple[int, int], tuple[Poly, ...]] = {}
    for key, operation in made.items():
        for i, shape in enumerate(sizes.results(key)):
            shapes[id(operation), i] = tuple(map(names, shape))

    def shape_of(term: Pattern) -> tuple[Poly, ...]:
        if isinstance(term, Input):
            return tuple(s for s in term.shape if isinstance(s, Poly))
        return shapes[id(term.operation), term.index]

    rule = Substitution(name, tuple(inputs.values()), sides[0], sides[1])
    # Shapes are known by operations, which live as long as the rule.
    return General(rule, shape_of)


def _input_names(variables: Mapping[TypedTerm, None]) -> dict[TypedTerm, str]:
    """Return the names of variables: x, y, z, .. in order of use."""
    letters = [*"xyzwvuts", *(f"x{i}" for i in range(len(variables)))]
    return dict(zip(variables, letters, strict=False))


def _input(name: str, variable: TypedTerm, shape: Sequence[Poly]) -> Input:
    def degree(pieces: int) -> Poly:
        return symbol(DEGREE) if pieces > 1 else ONE

    of = variable.type[0]
    degrees = tuple(map(degree, of.degrees)) if any(d > 1 for d in of.degrees) else ()
    return Input(name, tuple(shape), degrees, degree(of.sum), degree(of.copy), "float" if of.is_floating else "int")


class _Names:
    """Sizes with letters for symbols, in order of use."""

    def __init__(self, sizes: TermSizes):
        self.sizes = sizes
        self.letters: dict[str, Poly] = {}

    def __call__(self, poly: Poly) -> Poly:
        poly = self.sizes.known(poly)
        for s in (s for m, _ in poly.terms for s in m):
            if s != DEGREE and s not in self.letters:
                self.letters[s] = symbol(_NAMES[len(self.letters)])
        return poly.substitute(self.letters)

    def attribute(self, value: AttrExpr) -> AttrExpr:
        """Return an attribute expression with letters for its symbols."""
        match value:
            case Poly():
                return self(value)
            case tuple():
                return tuple(map(self, value))
            case _:
                return value
