"""
The sizes of the tensors in another system's rewrite rule: unknowns, equated by its operators and solved for one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from unity_ir.errors import UnityError
from unity_ir.rules.poly import Poly, number, symbol


class Unsupported(Exception):
    """Raised for a foreign rule that no substitution can express; the message is the reason."""


@dataclass
class SizeEquations:
    """
    A system of equations between the sizes of tensors, each size a polynomial, solved for one unknown at a time.
    Unknowns are symbols; those solved for are in `values`.
    """

    fixed: bool = False
    """Whether degrees are numbers rather than symbols, as where a concatenation makes a fixed number of addends."""
    values: dict[str, Poly] = field(default_factory=dict[str, Poly])
    made: int = 0

    def unknown(self) -> Poly:
        """Make a new unknown size and return it, as a symbol."""
        self.made += 1
        return symbol(f"n{self.made}")

    def degree(self, by: int) -> Poly:
        """
        Return the parallel degree `by` of the foreign rule as a polynomial: a symbol such as `d2`, or the number itself
        if degrees are `fixed`.
        """
        return number(by) if self.fixed else symbol(f"d{by}")

    def now(self, size: Poly) -> Poly:
        """
        Return a size as it is known now: with each unknown that is solved for replaced by its value; other unknowns
        stay.
        """
        return size.substitute(self.values)

    def equate(self, where: str, left: Poly, right: Poly) -> None:
        """
        Add the equation `left = right`, and solve for one unknown. `where` begins the messages of errors, such as the
        operation's name.

        Raises `UnityError` where it has no positive solution, `Unsupported` where it cannot be solved for any unknown.
        """
        difference = _primitive(self.now(left) - self.now(right))
        if difference == number(0):
            return
        signs = {c > 0 for _, c in difference.terms}
        if len(signs) == 1:
            raise UnityError(f"{where}: sizes {self.now(left)} and {self.now(right)} differ")
        # One side is a single unknown, if that can be: then the value is a sum of others.
        own = [(m[0], c) for m, c in difference.terms if len(m) == 1 and abs(c) == 1 and m[0].startswith("n")]
        alone = [(s, c) for s, c in own if sum((k > 0) == (c > 0) for _, k in difference.terms) == 1]
        for name, factor in [*alone, *own]:
            rest = difference.without(name)
            if difference.coefficient(name) == number(factor):
                value = -rest if factor == 1 else rest
                self.values = {s: v.substitute({name: value}) for s, v in self.values.items()} | {name: value}
                return
        raise Unsupported(f"{where}: sizes {self.now(left)} and {self.now(right)} cannot be equated")


def _primitive(poly: Poly) -> Poly:
    """Return a polynomial without the factors that all its terms have."""
    if not poly.terms:
        return poly
    common = list(poly.terms[0][0])
    for m, _ in poly.terms[1:]:
        common = [s for s in dict.fromkeys(common) for _ in range(min(common.count(s), m.count(s)))]
    by = gcd(*(c for _, c in poly.terms))
    out: list[tuple[tuple[str, ...], int]] = []
    for m, c in poly.terms:
        rest = list(m)
        for s in common:
            rest.remove(s)
        out.append((tuple(rest), c // by))
    return Poly(tuple(sorted(out)))
