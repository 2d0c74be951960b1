"""
Answers most questions about integers at once, without Z3: finds a solution of constraints, or a sum of them that fails.

The constraints of proofs are mostly boxes, `0 <= i < n` and `n >= 1`. Neither function searches far; what it does not
find says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unity_ir.rules.poly import Monomial, Term
from unity_ir.rules.proof.forms import Constraint

STEPS = 12
"""Values that are changed, one after the other, before `solution` gives up."""

ADDED = 3
"""Constraints that are added to one, at most, before `contradictory` gives up."""


def holds(constraint: Constraint, values: Mapping[str, int]) -> bool:
    """Return whether a constraint on integers holds when its symbols have the integer `values`, by name."""
    value = constraint.poly.at(values)
    return value == 0 if constraint.equal else value >= 0


# --- solutions -------------------------------------------------------------------------------------------------------


def solution(constraints: Iterable[Constraint]) -> dict[str, int] | None:
    """
    Return integers, by symbol, that satisfy all constraints; None where none were found, which does not say that there
    are none.

    Begins with sizes of 1 and indices of 0. While a constraint fails, one of its symbols gets the nearest value at
    which it holds: the symbol with which the fewest constraints fail then.
    """
    # Sorted, so that it is the same solution every time.
    every = sorted(constraints, key=str)
    values = {s: _first(s) for c in every for s in c.poly.symbols}
    last = ""
    for step in range(STEPS):
        broken = [c for c in every if not holds(c, values)]
        if not broken:
            return values
        mended: tuple[int, str, int] | None = None
        for name, value in _mended(broken[step % len(broken)], values):
            # One that has just been set would be set back.
            if name != last:
                before, values[name] = values[name], value
                fail = sum(not holds(c, values) for c in every)
                values[name] = before
                if mended is None or fail < mended[0]:
                    mended = fail, name, value
        if mended is None:
            return None
        _, last, values[last] = mended
    return None


def _first(symbol: str) -> int:
    """Return the value a symbol has at first: indices are fresh symbols (`forms.fresh`) or are named by `normal`."""
    return 0 if "#" in symbol or "@" in symbol else 1


def _mended(constraint: Constraint, values: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Yield each symbol of a constraint with the nearest value at which it holds, if the others keep theirs."""
    lacks = -constraint.poly.at(values)
    for name in sorted(constraint.poly.symbols):
        slope = constraint.poly.coefficient(name).at(values)
        if slope and not (constraint.equal and lacks % slope):
            yield name, values[name] - (-lacks // slope if slope > 0 else lacks // -slope)


# --- contradictions --------------------------------------------------------------------------------------------------


def contradictory(constraints: Iterable[Constraint]) -> bool:
    """
    Return True if the constraints are shown to have no integer solution; False says nothing.

    Multiples of a few constraints are added to one of them, so as to cancel every term with a positive coefficient. The
    sum is then largest where all symbols have their least values; if it is negative even there, it contradicts the
    constraints, which say that it is at least 0.

    Given `i >= n`, `m - i - 1 >= 0` and `n - m >= 0`, the sum of all three says -1 >= 0.
    """
    least: dict[str, int] = {}
    rest: list[dict[Monomial, int]] = []
    for c in constraints:
        for terms in (c.poly.terms, (-c.poly).terms) if c.equal else (c.poly.terms,):
            bound = _bound(terms)
            if bound is None:
                rest.append(dict(terms))
            else:
                name, value = bound
                least[name] = max(least.get(name, value), value)
    return any(_fails(sum_, rest, least, ADDED) for sum_ in rest)


def _bound(terms: tuple[Term, ...]) -> tuple[str, int] | None:
    """Return the symbol that `terms >= 0` bounds from below, and the least value; None if it says anything else."""
    match terms:
        case (((name,), factor),) if factor > 0:
            return name, 0
        case (((), number), ((name,), factor)) if factor > 0:
            return name, -(number // factor)
        case _:
            return None


def _fails(sum_: Mapping[Monomial, int], rest: list[dict[Monomial, int]], least: Mapping[str, int], more: int) -> bool:
    """Return whether `sum_ >= 0` cannot be, with up to `more` multiples of constraints in `rest` added to it."""
    large = next((m for m, factor in sum_.items() if m and factor > 0), None)
    if large is None:
        most = _most(sum_, least)
        return most is not None and most < 0
    if not more:
        return False
    factor = sum_[large]
    for other in rest:
        opposite = -other.get(large, 0)
        # Then a multiple of the other takes the monomial away.
        if opposite > 0 and factor % opposite == 0:
            added = dict(sum_)
            for m, c in other.items():
                added[m] = added.get(m, 0) + c * (factor // opposite)
            if _fails({m: c for m, c in added.items() if c}, rest, least, more - 1):
                return True
    return False


def _most(sum_: Mapping[Monomial, int], least: Mapping[str, int]) -> int | None:
    """Return the largest value of a sum of negative monomials; None where a symbol may be below 0."""
    total = 0
    for m, factor in sum_.items():
        for s in m:
            if least.get(s, -1) < 0:
                return None
            factor *= least[s]
        total += factor
    return total
