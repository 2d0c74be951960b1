"""Questions about integers that proofs come down to: what follows from constraints over sizes and indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from unity_ir.rules.poly import Poly
from unity_ir.rules.proof.forms import Constraint

z3: Any = import_module("z3")  # Its types are not known.

TIMEOUT = 4000
"""Milliseconds a question may take; without an answer nothing is concluded."""


def _z3(poly: Poly) -> Any:
    total: Any = z3.IntVal(0)
    for m, c in poly.terms:
        product: Any = z3.IntVal(c)
        for s in m:
            product = product * z3.Int(s)
        total = total + product
    return total


def condition(constraint: Constraint) -> Any:
    """A constraint as Z3 has it."""
    expression = _z3(constraint.poly)
    return expression == 0 if constraint.equal else expression >= 0


class Facts:
    """What is known of the symbols: sizes and degrees are at least 1, and what a case assumes."""

    def __init__(self, constraints: Iterable[Constraint]):
        self.constraints = frozenset(constraints)
        self.questions = 0

    def also(self, constraints: Iterable[Constraint]) -> Facts:
        return Facts(self.constraints | frozenset(constraints))

    def imply(self, claim: Constraint) -> bool:
        """Whether a constraint follows."""
        if claim in self.constraints or self._trivial(claim):
            return True
        if claim.poly.constant is not None:
            return False
        return self._unsatisfiable([z3.Not(condition(claim))], claim.poly.symbols)

    def imply_all(self, claims: Iterable[Constraint]) -> bool:
        return all(map(self.imply, claims))

    def contradict(self, constraints: Iterable[Constraint]) -> bool:
        """Whether constraints cannot hold together with what is known."""
        found = frozenset(constraints) - self.constraints
        if any(c.poly.constant is not None and not self._trivial(c) for c in found):
            return True
        opposite = {Constraint(-c.poly - 1) for c in found if not c.equal}
        if opposite & (found | self.constraints):
            return True
        if not found or all(self._trivial(c) for c in found):
            return False
        symbols = frozenset[str]().union(*(c.poly.symbols for c in found))
        return self._unsatisfiable([condition(c) for c in found], symbols)

    def weights_cancel(self, weighted: Sequence[tuple[int, frozenset[Constraint]]]) -> bool:
        """Whether, for all values of the symbols, the weights of the constraints that hold add up to 0."""
        total = z3.Sum(
            [z3.If(z3.And([condition(c) for c in domain]), z3.IntVal(w), z3.IntVal(0)) for w, domain in weighted]
        )
        symbols = frozenset[str]().union(*(c.poly.symbols for _, domain in weighted for c in domain))
        return self._unsatisfiable([total != 0], symbols)

    @staticmethod
    def _trivial(claim: Constraint) -> bool:
        value = claim.poly.constant
        return value is not None and (value == 0 if claim.equal else value >= 0)

    def _unsatisfiable(self, assertions: Sequence[Any], symbols: frozenset[str]) -> bool:
        self.questions += 1
        solver = z3.Solver()
        solver.set("timeout", TIMEOUT)
        solver.add(*assertions)
        solver.add(*(condition(c) for c in self._about(symbols)))
        return bool(solver.check() == z3.unsat)

    def _about(self, symbols: frozenset[str]) -> list[Constraint]:
        """The facts that have to do with some symbols, directly or through others."""
        left, found = set(self.constraints), list[Constraint]()
        while True:
            near = [c for c in left if not c.poly.symbols.isdisjoint(symbols)]
            if not near:
                return found
            found += near
            left -= set(near)
            symbols = symbols.union(*(c.poly.symbols for c in near))
