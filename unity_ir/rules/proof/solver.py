"""
Answers questions about integers in proofs: which constraints on sizes and indices follow from which.

Simple ones are answered at once (`integers`), all others by Z3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from unity_ir.rules.poly import Poly
from unity_ir.rules.proof.forms import Constraint, Form, MonoFactor
from unity_ir.rules.proof.integers import contradictory, holds, solution

z3: Any = import_module("z3")  # Its types are not known.

TIMEOUT = 4000
"""Milliseconds a question may take; without an answer nothing is concluded."""

FAST = 500
"""Milliseconds for a first try with the solver that starts fastest."""

MODELS = 32
"""Models kept for later questions of one proof."""


def _z3(poly: Poly) -> Any:
    total: Any = z3.IntVal(0)
    for m, c in poly.terms:
        product: Any = z3.IntVal(c)
        for s in m:
            product = product * z3.Int(s)
        total = total + product
    return total


@lru_cache(maxsize=4096)
def condition(constraint: Constraint) -> Any:
    """Convert a constraint to a Z3 expression."""
    expression = _z3(constraint.poly)
    return expression == 0 if constraint.equal else expression >= 0


class _Model(dict[str, int]):
    """Values of symbols; those it does not have are 1."""

    def __init__(self, values: Iterable[tuple[str, int]]):
        super().__init__(values)
        self._held: dict[Constraint, bool] = {}

    def __missing__(self, key: str) -> int:
        return 1

    def satisfies(self, constraints: Iterable[Constraint]) -> bool:
        """Return whether all constraints hold at these values."""
        held = self._held
        for c in constraints:
            known = held.get(c)
            if known is None:
                known = held[c] = holds(c, self)
            if not known:
                return False
        return True


class Answers:
    """
    Answers questions about integers in the proof of one rule, by Z3, and caches the answers; `questions` counts those
    that Z3 was asked.
    """

    def __init__(self) -> None:
        self.questions = 0
        self.known: dict[object, bool] = {}
        self.models: list[_Model] = []
        """Values at which some question had an answer; often they are an answer to the next one."""

    def unsatisfiable(self, constraints: frozenset[Constraint]) -> bool:
        """Return True if it is shown that no integers satisfy all constraints; False if some do, or if Z3 gives up."""
        known = self.known.get(constraints)
        if known is None:
            known = self.known[constraints] = not self._at_hand(constraints) and self._decide(constraints)
        return known

    def cancel(self, weighted: tuple[tuple[int, frozenset[Constraint]], ...], facts: frozenset[Constraint]) -> bool:
        """
        Return True if it is shown that a sum is 0 for all integers that satisfy `facts`: the sum of the weights of
        those constraint sets whose constraints all hold. False if not, or if Z3 gives up.

        `weighted` are (weight, constraint set) pairs.
        """
        known = self.known.get((weighted, facts))
        if known is None:
            known = self.known[weighted, facts] = self._cancel(weighted, facts)
        return known

    def _cancel(self, weighted: tuple[tuple[int, frozenset[Constraint]], ...], facts: frozenset[Constraint]) -> bool:
        shared = frozenset[Constraint].intersection(*(domain for _, domain in weighted))
        given = shared | facts
        if all(self._follows(c, given) for _, domain in weighted for c in domain - given):
            # All sets hold where the shared constraints do.
            return sum(w for w, _ in weighted) == 0 or self.unsatisfiable(given)
        held = [z3.If(z3.And([condition(c) for c in domain]), w, 0) for w, domain in weighted]
        answer, _ = self.check([z3.Sum(held) != 0, *map(condition, sorted(facts, key=str))])
        return bool(answer == z3.unsat)

    def _follows(self, claim: Constraint, given: frozenset[Constraint]) -> bool:
        return all(self.unsatisfiable(given | {case}) for case in claim.negated)

    def _at_hand(self, constraints: frozenset[Constraint]) -> bool:
        """Return whether a model is known already. The one found moves to the front."""
        for i, model in enumerate(self.models):
            if model.satisfies(constraints):
                self.models.insert(0, self.models.pop(i))
                return True
        return False

    def _decide(self, constraints: frozenset[Constraint]) -> bool:
        if contradictory(constraints):
            return True
        found = solution(constraints)
        if found is None:
            return self._ask(constraints)
        self._keep(_Model(found.items()))
        return False

    def _ask(self, constraints: frozenset[Constraint]) -> bool:
        answer, solver = self.check([condition(c) for c in sorted(constraints, key=str)])
        if answer == z3.sat:
            found = solver.model()
            self._keep(_Model((d.name(), found[d].as_long()) for d in found.decls() if d.arity() == 0))
        return bool(answer == z3.unsat)

    def _keep(self, model: _Model) -> None:
        self.models = [model, *self.models[: MODELS - 1]]

    def check(self, assertions: Sequence[Any]) -> tuple[Any, Any]:
        """
        Ask Z3 whether the Z3 expressions `assertions` can hold together; return (answer, solver): `z3.sat`, `z3.unsat`
        or `z3.unknown` (it timed out), and the solver that answered, which has the model. A simple, quick solver is
        tried first.
        """
        self.questions += 1
        answer = solver = None
        for make, milliseconds in ((z3.SimpleSolver, FAST), (z3.Solver, TIMEOUT)):
            solver = make()
            solver.set("timeout", milliseconds)
            solver.add(*assertions)
            answer = solver.check()
            if answer != z3.unknown:
                break
        return answer, solver


class Facts:
    """
    Constraints taken as true in a proof: sizes and degrees are at least 1, and the assumptions of a case.

    `answers` is the cache that all facts of one proof share; None begins a new one.
    """

    def __init__(self, constraints: Iterable[Constraint], answers: Answers | None = None):
        self.constraints = frozenset(constraints)
        self._answers = answers or Answers()
        self._near: dict[frozenset[str], frozenset[Constraint]] = {}
        self._more: dict[frozenset[Constraint], Facts] = {}
        self.normal_forms: dict[MonoFactor, Form] = {}
        """The normal forms of factors where these facts hold, filled by `proof.normal`."""

    @property
    def questions(self) -> int:
        """The number of questions put to Z3 about these facts and those derived from them."""
        return self._answers.questions

    def also(self, constraints: Iterable[Constraint]) -> Facts:
        """Return these facts together with further constraints."""
        found = frozenset(constraints)
        if found <= self.constraints:
            return self
        facts = self._more.get(found)
        if facts is None:
            facts = self._more[found] = Facts(self.constraints | found, self._answers)
        return facts

    def imply(self, claim: Constraint) -> bool:
        """Return whether it is shown that `claim` follows from the facts. Returns False, too, if Z3 gives up."""
        if claim in self.constraints or self._trivial(claim):
            return True
        if claim.poly.constant is not None:
            return False
        return all(self._unsatisfiable(frozenset({case})) for case in claim.negated)

    def imply_all(self, claims: Iterable[Constraint]) -> bool:
        """Return whether it is shown that all claims follow from the facts. Returns False, too, if Z3 gives up."""
        return all(map(self.imply, claims))

    def contradict(self, constraints: Iterable[Constraint]) -> bool:
        """
        Return whether it is shown that the constraints cannot hold together with the facts. Returns False, too, if Z3
        gives up.
        """
        found = frozenset([c for c in constraints if c not in self.constraints and not self._trivial(c)])
        if not found:
            return False
        if any([c.poly.constant is not None for c in found]):
            return True
        if any([o in found or o in self.constraints for c in found if not c.equal for o in c.negated]):
            return True
        return self._unsatisfiable(found)

    def weights_cancel(self, weighted: Sequence[tuple[int, frozenset[Constraint]]]) -> bool:
        """
        Return True if it is shown that a sum is 0 wherever the facts hold: the sum of the weights of those constraint
        sets whose constraints all hold. Monomials with these weights and domains then cancel. False if not, or if Z3
        gives up.

        `weighted` are (weight, constraint set) pairs.
        """
        symbols = frozenset[str]().union(*(c.poly.symbols for _, domain in weighted for c in domain))
        return self._answers.cancel(tuple(weighted), self._about(symbols))

    @staticmethod
    def _trivial(claim: Constraint) -> bool:
        value = claim.poly.constant
        return value is not None and (value == 0 if claim.equal else value >= 0)

    def _unsatisfiable(self, constraints: frozenset[Constraint]) -> bool:
        symbols = frozenset[str]().union(*[c.poly.symbols for c in constraints])
        return self._answers.unsatisfiable(constraints | self._about(symbols))

    def _about(self, symbols: frozenset[str]) -> frozenset[Constraint]:
        """Return the facts that have to do with some symbols, directly or through others."""
        known = self._near.get(symbols)
        if known is not None:
            return known
        left, found, reached = set(self.constraints), set[Constraint](), symbols
        while True:
            near = [c for c in left if not c.poly.symbols.isdisjoint(reached)]
            if not near:
                self._near[symbols] = known = frozenset(found)
                return known
            found.update(near)
            left.difference_update(near)
            reached = reached.union(*[c.poly.symbols for c in near])
