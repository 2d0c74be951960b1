"""
Substitutions (rewrite rules) of several results: equations between single terms for all results of one operator, taken
together.

    split(matmul(x, concat(v, w)))  =  matmul(x, v), matmul(x, w)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from unity_ir.ops import operator as find_operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import ResultOf, Substitution
from unity_ir.rules.research.generate.attributes import roles
from unity_ir.rules.research.generate.fingerprint import Values
from unity_ir.rules.research.generate.generalise import Pair, most_general
from unity_ir.rules.research.generate.minimise import follows
from unity_ir.rules.research.generate.rewrite import Rewriting
from unity_ir.rules.research.generate.sizes import AppliedStep, application
from unity_ir.rules.research.generate.terms import Terms, TermStep, Type, TypedTerm, leaves, result_types

Joined = tuple[tuple[TypedTerm, ...], tuple[TypedTerm, ...]]
"""The terms equal to the results of one operator, and the results."""


MOST = 60
"""Steps tried to make up one rule by others."""

NEAR = 30
"""Terms looked at for what single rules add to such a step."""


class Join:
    """
    Collects equations about single results of operators (such as one part of a `split`), and joins those about the same
    operator to one equation about all its results.
    """

    def __init__(self) -> None:
        self._found: dict[AppliedStep, dict[int, TypedTerm]] = {}

    def add(self, pair: Pair) -> None:
        """
        Add an equation between two terms, (left, right), if left is one result of an operator that has several; ignore
        others.
        """
        term, other = pair
        if term.step is not None and not term.step.is_parallel:
            key = application(term)
            if len(_types(key)) > 1:
                self._found.setdefault(key, {}).setdefault(term.step.result, other)

    def joined(self, terms: Terms, values: Values) -> list[Joined]:
        """
        Return the equations made by joining those given to `add`, one for each operator with several results, if each
        of these has an equation: pairs (terms equal to the results, the results), small ones first. They are in their
        most general form; special cases of others are left out.

        `terms` makes terms, and `values` evaluates them on random tensors.
        """
        found: dict[Joined, None] = {}
        for (step, operands), results in self._found.items():
            if len(results) < len(_types((step, operands))):
                continue
            sources = [results[i] for i in range(len(results))]
            made = [terms.make(TermStep(step.op, step.attributes, i), operands) for i in range(len(results))]
            targets = [t for t in made if t is not None]
            sides = most_general((*sources, *targets), terms, values, _is_joined)
            found[sides[: len(sources)], sides[len(sources) :]] = None
        kept: list[Joined] = []
        for joined in sorted(found, key=_order):
            if not any(_is_instance(joined, other) for other in kept):
                kept.append(joined)
        return kept


def has_several(op: str) -> bool:
    """Return whether the operator called `op` may have several results."""
    if op in PARALLEL_OPERATORS:
        return False
    results = find_operator(op).line.results
    return len(results) > 1 or any(r.variadic for r in results)


def composite(joined: Joined, rules: Sequence[Substitution], single: Rewriting) -> bool:
    """
    Return whether a joined equation, (terms, the results of one operator that they equal), follows from other rules:
    whether a chain of rewrites leads from the terms to the results.

    `rules` are rules of several results, `single` rewrites by the rules of one result. Given rules that take `relu` and
    `matmul` out of `split`, returns True for the one that takes both out at once. False may also mean that the search
    was given up.
    """
    sources, targets = joined
    largest = max(t.size for t in (*sources, *targets))
    seen: dict[tuple[TypedTerm, ...], None] = {sources: None}
    frontier = [sources]
    while frontier:
        reached: list[tuple[TypedTerm, ...]] = []
        for terms in frontier:
            if all(follows(pair, single, NEAR) for pair in zip(terms, targets, strict=True)):
                return True
            for rule in rules:
                for new in _replaced_below(terms, rule, single):
                    if new not in seen and max(t.size for t in new) <= largest and len(seen) < MOST:
                        seen[new] = None
                        reached.append(new)
        frontier = reached
    return False


def _replaced_below(
    terms: Sequence[TypedTerm], rule: Substitution, single: Rewriting
) -> Iterator[tuple[TypedTerm, ...]]:
    """Yield the terms with a rule of several results applied at one place, above which all terms are alike."""
    if len(rule.source) != len(terms) or not all(isinstance(t, ResultOf) for t in rule.source):
        return
    here = single.replaced(rule, terms)
    if here is not None:
        yield tuple(here)
    steps = {None if t.step is None else _kind(t.step) for t in terms}
    if len(steps) > 1 or None in steps:
        return
    for i in range(len(terms[0].operands)):
        for new in _replaced_below([t.operands[i] for t in terms], rule, single):
            made: list[TypedTerm] = []
            for t, operand in zip(terms, new, strict=True):
                assert t.step is not None
                term = single.terms.make(t.step, [*t.operands[:i], operand, *t.operands[i + 1 :]])
                if term is not None and term.type == t.type:
                    made.append(term)
            if len(made) == len(terms):
                yield tuple(made)


def _is_joined(sides: tuple[TypedTerm, ...]) -> bool:
    """Return whether the second half are the results of one operator."""
    results = sides[len(sides) // 2 :]
    return all(t.step is not None and application(t) == application(results[0]) for t in results)


def _types(key: AppliedStep) -> tuple[Type, ...]:
    return result_types(key[0].op, key[0].attributes, tuple(t.type for t in key[1]))


def _order(joined: Joined) -> tuple[object, ...]:
    sources, targets = joined
    size = sum(t.size for t in sources) + targets[0].size
    names = [t.text for side in joined for t in side]
    return (size, -len({v for side in joined for t in side for v in leaves(t)}), names)


def _is_instance(special: Joined, general: Joined) -> bool:
    """Return whether `special` is `general` with terms in place of variables, sizes aside."""
    if [len(s) for s in special] != [len(s) for s in general]:
        return False
    values: dict[TypedTerm, TypedTerm] = {}
    pairs = zip((t for s in general for t in s), (t for s in special for t in s), strict=True)
    return _instance(pairs, values)


def _instance(pairs: Iterable[tuple[TypedTerm, TypedTerm]], values: dict[TypedTerm, TypedTerm]) -> bool:
    for general, special in pairs:
        if general.step is None:
            if values.setdefault(general, special) is not special:
                return False
        elif special.step is None or _kind(general.step) != _kind(special.step):
            return False
        elif not _instance(zip(general.operands, special.operands, strict=True), values):
            return False
    return True


def _kind(step: TermStep) -> tuple[object, ...]:
    """Return a step without its sizes."""
    given: Mapping[str, object] = dict(step.attributes[0])
    if not step.is_parallel:
        line = find_operator(step.op).line
        given = {n: v for n, v in given.items() if not (r := roles(line, n)).size and not r.pieces}
    return step.op, step.result, tuple(sorted(given.items(), key=lambda item: item[0]))
