"""
Rewriting terms with substitutions (rewrite rules), in both directions, wherever the result is well typed and of the
same type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity_ir.rules.pattern import AttrExpr, AttrParameter, Input, Operation, ResultOf, Substitution
from unity_ir.rules.pattern import Term as Pattern
from unity_ir.rules.poly import Poly
from unity_ir.rules.research.generate.attributes import NUMBER
from unity_ir.rules.research.generate.sizes import DEGREE
from unity_ir.rules.research.generate.terms import Terms, TermStep, TypedTerm
from unity_ir.rules.solve import Equations
from unity_ir.tdl.syntax import AttrValue

AttrSamples = list[tuple[AttrExpr, tuple[AttrValue, ...]]]
"""Attributes that sizes have to fit, and what they are at each set of sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """One direction of a rule: result number `index` of `source` is rewritten to `target`."""

    source: Operation
    index: int
    target: Pattern
    sized: bool
    """Some attribute depends on sizes, which have to be solved for."""


def _commutes(rule: Substitution) -> str | None:
    """Return the operator if a rule says just that it is commutative, `op(a, b) = op(b, a)`; else None."""
    match rule.source, rule.target:
        case (ResultOf(Operation(op, (Input() as a, Input() as b), p)),), (ResultOf(Operation(other, operands, q)),):
            if op == other and p == q and operands == (b, a) and a is not b:
                return op
        case _:
            pass
    return None


class Rewriting:
    """
    Rewrites terms by the rules given to `add`, in both directions; the operands of commutative operators are kept in a
    fixed order.

    `terms` makes the new terms, `sets` is the number of sets of sizes at which they are typed, `degree` the degree of
    the parallel operators.
    """

    def __init__(self, terms: Terms, sets: int, degree: int):
        self.terms, self.sets, self.degree = terms, sets, degree
        self.commutative: set[str] = set()
        self._rules: dict[str, list[Rewrite]] = {}
        self._version = 0
        self._roots: dict[TypedTerm, tuple[int, dict[TypedTerm, None]]] = {}
        self._near: dict[TypedTerm, tuple[int, dict[TypedTerm, None]]] = {}
        self._steps: dict[int, TermStep] = {}
        self._kept: list[Pattern] = []

    def add(self, rule: Substitution) -> None:
        """
        Add a rule of one result, to rewrite by it in both directions; a direction in which the new term would have an
        input that the old one lacks is left out. For a rule that only says that an operator is commutative, sort that
        operator's operands from now on.
        """
        self._version += 1
        op = _commutes(rule)
        if op is not None:
            self.commutative.add(op)
            self._roots.clear()
            self._near.clear()
            return
        (source,), (target,) = rule.source, rule.target
        for a, b in ((source, target), (target, source)):
            if isinstance(a, ResultOf) and _inputs(b) <= _inputs(a):
                sized = any(_is_sized(v) for side in (a, b) for v in _attributes(side))
                self._rules.setdefault(a.operation.op, []).append(Rewrite(a.operation, a.index, b, sized))

    # -- terms

    def make(self, step: TermStep, operands: list[TypedTerm]) -> TypedTerm | None:
        """
        Apply the operator of `step` to terms, with operands of commutative operators in a fixed order; return the term,
        None where it is not well typed.
        """
        if step.op in self.commutative and len(operands) == 2 and operands[0].text > operands[1].text:
            operands = operands[::-1]
        return self.terms.make(step, operands)

    def normal(self, term: TypedTerm) -> TypedTerm:
        """Return the term with operands of commutative operators in a fixed order."""
        if term.step is None:
            return term
        made = self.make(term.step, [self.normal(o) for o in term.operands])
        assert made is not None, "commutative operators have symmetric types"
        return made

    def near(self, term: TypedTerm) -> dict[TypedTerm, None]:
        """
        Return the terms that one application of one rule makes of a term, at the term itself or at any subterm, and
        that have its type. They are the keys of a dict (in a fixed order). Cached: do not change the dict.
        """
        known = self._near.get(term)
        if known is not None and known[0] == self._version:
            return known[1]
        found = dict(self._at_root(term))
        if term.step is not None:
            for i, operand in enumerate(term.operands):
                for new in self.near(operand):
                    made = self.make(term.step, [*term.operands[:i], new, *term.operands[i + 1 :]])
                    if made is not None and made.type == term.type:
                        found[made] = None
        self._near[term] = (self._version, found)
        return found

    def _at_root(self, term: TypedTerm) -> dict[TypedTerm, None]:
        if term.step is None:
            return {}
        rules = self._rules.get(term.step.op, [])
        start, found = self._roots.get(term, (0, dict[TypedTerm, None]()))
        for rule in rules[start:]:
            for new in self._apply(rule, term):
                found[new] = None
        self._roots[term] = (len(rules), found)
        return found

    def replaced(self, rule: Substitution, terms: Sequence[TypedTerm]) -> list[TypedTerm] | None:
        """
        Apply a rule of several results to `terms`, one for each result of its source; return the new terms, in the same
        order.

        None when the terms do not match its source, or when the new terms would not be well typed or would have other
        types.
        """
        found: list[tuple[Mapping[Input, TypedTerm], AttrSamples]] = [({}, [])]
        for pattern, term in zip(rule.source, terms, strict=True):
            found = [new for inputs, sized in found for new in self._match(pattern, term, inputs, sized)]
        for inputs, sized in found:
            sizes = self._sizes(inputs, sized)
            if sizes is not None:
                made = [self._build(t, inputs, sizes) for t in rule.target]
                whole = [t for t in made if t is not None]
                if [t.type for t in whole] == [t.type for t in terms]:
                    return whole
        return None

    # -- one rule

    def _apply(self, rule: Rewrite, term: TypedTerm) -> Iterator[TypedTerm]:
        for inputs, sized in self._match(ResultOf(rule.source, rule.index), term, {}, []):
            sizes: list[dict[str, int]] | None = []
            if rule.sized:
                sizes = self._sizes(inputs, sized)
                if sizes is None:
                    continue
            made = self._build(rule.target, inputs, sizes)
            if made is not None and made.type == term.type:
                yield made

    def _match(
        self, pattern: Pattern, term: TypedTerm, inputs: Mapping[Input, TypedTerm], sized: AttrSamples
    ) -> Iterator[tuple[Mapping[Input, TypedTerm], AttrSamples]]:
        if isinstance(pattern, Input):
            if inputs.get(pattern, term) is term:
                yield {**inputs, pattern: term}, sized
            return
        step, operation = term.step, pattern.operation
        if step is None or step.op != operation.op or step.result != pattern.index:
            return
        if len(operation.operands) != len(term.operands):
            return
        for name, value in operation.attributes:
            given = tuple(dict(own)[name] for own in step.attributes)
            if _is_sized(value):
                sized = [*sized, (value, given)]
            elif given[0] != self._fixed(value):
                return
        orders = [term.operands]
        if step.op in self.commutative and term.operands[0] is not term.operands[1]:
            orders.append(term.operands[::-1])
        for order in orders:
            yield from self._match_all(list(zip(operation.operands, order, strict=True)), inputs, sized)

    def _match_all(
        self, pairs: list[tuple[Pattern, TypedTerm]], inputs: Mapping[Input, TypedTerm], sized: AttrSamples
    ) -> Iterator[tuple[Mapping[Input, TypedTerm], AttrSamples]]:
        if not pairs:
            yield inputs, sized
            return
        (pattern, term), *rest = pairs
        for found, own in self._match(pattern, term, inputs, sized):
            yield from self._match_all(rest, found, own)

    def _sizes(self, inputs: Mapping[Input, TypedTerm], sized: AttrSamples) -> list[dict[str, int]] | None:
        """Return the values of a rule's symbols at each set of sizes; None where they do not fit."""
        found: list[dict[str, int]] = []
        for i in range(self.sets):
            equations = Equations({DEGREE: self.degree})
            for pattern, term in inputs.items():
                # Inputs may be divided in other ways than the rule says, which the types of both sides settle.
                shape = term.type[i].shape
                sizes = [s for s in pattern.shape if isinstance(s, Poly)]
                if len(shape) != len(sizes) or not all(map(equations.equal, sizes, shape)):
                    return None
            if not all(equations.attribute(value, given[i]) for value, given in sized):
                return None
            if not equations.again() or equations.open:
                return None
            found.append(equations.known)
        return found

    def _build(
        self, pattern: Pattern, inputs: Mapping[Input, TypedTerm], sizes: list[dict[str, int]]
    ) -> TypedTerm | None:
        if isinstance(pattern, Input):
            return inputs[pattern]
        operands: list[TypedTerm] = []
        for p in pattern.operation.operands:
            operand = self._build(p, inputs, sizes)
            if operand is None:
                return None
            operands.append(operand)
        step = self._step(pattern, sizes)
        return None if step is None else self.make(step, operands)

    def _step(self, pattern: ResultOf, sizes: list[dict[str, int]]) -> TermStep | None:
        operation = pattern.operation
        if any(_is_sized(v) for _, v in operation.attributes):
            if any(not _symbols(v) <= known.keys() | {DEGREE} for known in sizes for _, v in operation.attributes):
                return None
            own = tuple(
                tuple((n, _at(v, {**known, DEGREE: self.degree})) for n, v in operation.attributes) for known in sizes
            )
            return TermStep(operation.op, own, pattern.index)
        key = id(pattern)
        if key not in self._steps:
            attributes = tuple((n, self._fixed(v)) for n, v in operation.attributes)
            self._steps[key] = TermStep(operation.op, (attributes,) * self.sets, pattern.index)
            self._kept.append(pattern)
        return self._steps[key]

    def _fixed(self, value: AttrExpr) -> AttrValue:
        return _at(value, {DEGREE: self.degree})


def _at(value: AttrExpr, symbols: Mapping[str, int]) -> AttrValue:
    match value:
        case Poly():
            return value.at(symbols)
        case tuple():
            return tuple(p.at(symbols) for p in value)
        case AttrParameter():
            return NUMBER
        case _:
            return value


def _symbols(value: AttrExpr) -> frozenset[str]:
    match value:
        case Poly():
            return value.symbols
        case tuple():
            return frozenset[str]().union(*(p.symbols for p in value))
        case _:
            return frozenset()


def _is_sized(value: AttrExpr) -> bool:
    return not _symbols(value) <= {DEGREE}


def _inputs(pattern: Pattern) -> set[Input]:
    if isinstance(pattern, Input):
        return {pattern}
    return {i for o in pattern.operation.operands for i in _inputs(o)}


def _attributes(pattern: Pattern) -> Iterator[AttrExpr]:
    if isinstance(pattern, ResultOf):
        yield from (v for _, v in pattern.operation.attributes)
        for o in pattern.operation.operands:
            yield from _attributes(o)
