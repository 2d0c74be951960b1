"""Decide which equations between terms follow from others: a bounded search for a chain of rewrites, from both ends."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.rules.pattern import Substitution
from unity_ir.rules.research.generate.generalise import Pair
from unity_ir.rules.research.generate.rewrite import Rewriting
from unity_ir.rules.research.generate.terms import Terms, TypedTerm, leaves

MOST = 200
"""Most terms looked at for one equation."""

SLACK = 2
"""Number of operators that a term on the way may have more than either end."""


def order(pair: Pair) -> tuple[object, ...]:
    """
    Return the sort key of an equation between two terms. In ascending order of it, the equations most worth keeping as
    rules come first.

    These have the fewest operators. Of those with equally many, the more general comes first: the one with more
    variables; then the one whose variables are divided into fewer pieces, have fewer different types, and fewer
    elements.
    """
    left, right = pair
    variables = {*leaves(left), *leaves(right)}
    pieces = sum(v.type[0].pieces for v in variables) - len(variables)
    types, elements = len({v.type for v in variables}), sum(v.type[0].elements for v in variables)
    size = (max(left.size, right.size), left.size + right.size)
    return (*size, -len(variables), pieces, types, elements, left.text, right.text)


def follows(pair: Pair, rules: Rewriting, most: int = MOST) -> bool:
    """
    Return whether an equation between two terms follows from the rules: whether they rewrite one term to the other.

    False may also mean that the search was given up after `most` terms.
    """
    sides = [dict.fromkeys([rules.normal(t)]) for t in pair]
    if not sides[0].keys().isdisjoint(sides[1].keys()):
        return True
    largest = max(t.weight for t in pair) + SLACK
    frontiers = [list(side) for side in sides]
    while any(frontiers):
        # The smaller frontier that is not empty goes on.
        at = min((0, 1), key=lambda i: (not frontiers[i], len(frontiers[i])))
        reached: list[TypedTerm] = []
        for term in frontiers[at]:
            for new in rules.near(term):
                if new.weight <= largest and new not in sides[at]:
                    if new in sides[1 - at]:
                        return True
                    sides[at][new] = None
                    reached.append(new)
            if len(sides[0]) + len(sides[1]) > most:
                return False
        frontiers[at] = reached
    return False


def superfluous(rules: Sequence[tuple[Pair, Substitution]], terms: Terms, sets: int, degree: int) -> set[int]:
    """
    Return the indices of the rules that the remaining ones imply. A rule may also follow from rules that come after it
    in `rules`.

    `rules` are (equation between two terms, its substitution); `sets` is the number of sets of sizes at which `terms`
    are tried, `degree` the degree of the parallel operators. Rules whose sides repeat variables most often are the
    first to be dropped.
    """

    def special(i: int) -> int:
        return sum(len(list(leaves(t))) - len(set(leaves(t))) for t in rules[i][0])

    dropped: set[int] = set()
    for i in sorted(range(len(rules)), key=lambda i: (-special(i), -i)):
        others = Rewriting(terms, sets, degree)
        for j, (_, rule) in enumerate(rules):
            if j != i and j not in dropped:
                others.add(rule)
        if follows(rules[i][0], others):
            dropped.add(i)
    return dropped
