"""Questions about integers that proofs come down to: what follows from constraints over sizes and indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from unity_ir.rules.poly import Poly
from unity_ir.rules.proof.forms import Constraint

z3: Any = import_module("z3")  # Its types are not known.

TIMEOUT = 4000
"""Milliseconds a question may take; without an answer nothing is concluded."""


@lru_cache(maxsize=65536)
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

    def __init__(self, constraints: Iterable[Constraint], memory: dict[object, bool] | None = None):
        self.constraints = frozenset(constraints)
        self._memory: dict[object, bool] = {} if memory is None else memory
        """Answers to questions, by what they were asked of: shared with facts that are derived from these."""

    @property
    def questions(self) -> int:
        """How many different questions have been asked of Z3."""
        return len(self._memory)

    def also(self, constraints: Iterable[Constraint]) -> Facts:
        """With more facts."""
        more = frozenset(constraints) - self.constraints
        return Facts(self.constraints | more, self._memory) if more else self

    def imply(self, claim: Constraint) -> bool:
        """Whether a constraint follows."""
        if claim in self.constraints or self._trivial(claim):
            return True
        if claim.poly.constant is not None:
            return False
        return all(self._impossible(frozenset({c})) for c in claim.negated())

    def imply_all(self, claims: Iterable[Constraint]) -> bool:
        """Whether all of them follow."""
        return all(map(self.imply, claims))

    def contradict(self, constraints: Iterable[Constraint]) -> bool:
        """Whether constraints cannot hold together with what is known."""
        found = frozenset(c for c in constraints if c not in self.constraints and not self._trivial(c))
        if any(c.poly.constant is not None for c in found):
            return True
        opposite = {Constraint(-c.poly - 1) for c in found if not c.equal}
        if not opposite.isdisjoint(found) or not opposite.isdisjoint(self.constraints):
            return True
        return bool(found) and self._impossible(found)

    def weights_cancel(self, weighted: Sequence[tuple[int, frozenset[Constraint]]]) -> bool:
        """Whether, for all values of the symbols, the weights of the constraints that hold add up to 0."""
        symbols = frozenset[str]().union(*(c.poly.symbols for _, domain in weighted for c in domain))
        about = self._about(symbols)
        key = (about, tuple(weighted))
        if key not in self._memory:
            total = z3.Sum(
                [z3.If(z3.And([condition(c) for c in domain]), z3.IntVal(w), z3.IntVal(0)) for w, domain in weighted]
            )
            self._memory[key] = _unsatisfiable([total != 0], about)
        return self._memory[key]

    @staticmethod
    def _trivial(claim: Constraint) -> bool:
        value = claim.poly.constant
        return value is not None and (value == 0 if claim.equal else value >= 0)

    def _impossible(self, constraints: frozenset[Constraint]) -> bool:
        symbols = frozenset[str]().union(*(c.poly.symbols for c in constraints))
        about = self._about(symbols)
        key = (about, constraints)
        if key not in self._memory:
            self._memory[key] = _unsatisfiable([condition(c) for c in constraints], about)
        return self._memory[key]

    def _about(self, symbols: frozenset[str]) -> frozenset[Constraint]:
        """The facts that have to do with some symbols, directly or through others."""
        left, found = set(self.constraints), set[Constraint]()
        while True:
            near = {c for c in left if not c.poly.symbols.isdisjoint(symbols)}
            if not near:
                return frozenset(found)
            found |= near
            left -= near
            symbols = symbols.union(*(c.poly.symbols for c in near))


def _unsatisfiable(assertions: Sequence[Any], facts: Iterable[Constraint]) -> bool:
    solver = z3.Solver()
    solver.set("timeout", TIMEOUT)
    solver.add(*assertions)
    solver.add(*(condition(c) for c in sorted(facts, key=str)))
    return bool(solver.check() == z3.unsat)
