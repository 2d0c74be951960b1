"""
Proofs of substitutions (rewrite rules): that both sides are equal for all sizes, degrees, attributes and element types
at which both are well typed.

Parallel operators are identities on meaning, so both sides are compared without them; that both have the same boundary
types is checked at samples. A rule means its values and its vector-Jacobian products, since rules are applied before a
graph is differentiated. The verdicts:

- `proved`: values and gradients are equal, those at ties included;
- `almost everywhere`: values are equal, and so gradients wherever they are derivatives; at ties they are not shown to
  be;
- `forward only`: values are equal, gradients are not, or not shown to be;
- `refuted`: at some sample values differ, or no degrees above 1 fit the types;
- `undecided`: nothing is known. A proof is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import tee
from textwrap import shorten
from time import perf_counter

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.poly import Poly, symbol
from unity_ir.rules.proof.cases import Case, cases, inputs_at, tensors
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.definedness import undefined_in
from unity_ir.rules.proof.equal import Undecided, equal
from unity_ir.rules.proof.every_rank import check_every_rank
from unity_ir.rules.proof.forms import Constraint, restart
from unity_ir.rules.proof.gradients import Product, vector_jacobian_products
from unity_ir.rules.proof.refute import refute, refute_gradients
from unity_ir.rules.proof.sides import ill_typed
from unity_ir.rules.proof.solver import Answers, Facts
from unity_ir.rules.proof.tensors import TensorForm, Undivided, zeros
from unity_ir.rules.proof.verdict import Proof, Verdict

NOT_DERIVATIVES = ("detach", "cast", "bce")
"""
Operators whose gradient is, on more than single points, not the derivative of their line: `detach` has none, a cast is
constant between the numbers it makes, the divisor in that of `bce` is bounded.
"""

SPLITS = 6
"""Sizes whose indices are taken apart, one after the other, before a proof is given up."""

DETAIL = 240
"""Characters of a reason that are shown: what does not cancel may be pages."""


def prove(rule: Substitution, seed: int = 0) -> Proof:
    """
    Try to prove that both sides of a substitution are equal, for all sizes and degrees; return the verdict, with the
    reason or a counterexample, the seconds taken, and the number of questions asked of Z3.

    The verdict is `proved` (values and gradients are equal), `almost everywhere` (gradients perhaps not at ties of a
    maximum), `forward only` (values are equal, gradients perhaps not), `refuted`, or `undecided`. A rule that is not
    well typed is `refuted` or `undecided`; no error is raised for it. `seed` is that of the random samples on which the
    rule is tested first.
    """
    begin = perf_counter()
    verdict, detail, questions = _prove(rule, seed)
    detail = shorten(detail, DETAIL, placeholder=" ..") if detail else ""
    return Proof(verdict, detail, perf_counter() - begin, questions)


def _prove(rule: Substitution, seed: int) -> tuple[Verdict, str, int]:
    if len({i.name for i in rule.inputs}) < len(rule.inputs):
        return "undecided", "two inputs have one name", 0
    try:
        counterexample = ill_typed(rule) or refute(rule, seed)
        if counterexample is not None:
            return "refuted", counterexample, 0
        if not rule.rewrites:
            return "proved", "", 0
        # The first to look at a case makes it.
        places, found = tee(cases(rule))
        check_every_rank(rule, places)
        found, answers = list(found), Answers()
        for case in found:
            if rule.exact:
                _exact(rule, case, answers)
            else:
                _split(_Values(rule, case), answers)
    except (Undecided, Undivided, UnityError) as reason:
        return "undecided", str(reason), 0
    except KeyError as reason:
        # A dim that is more than a symbol may have size 1 at the sample, where lines leave its variable out.
        return "undecided", f"no extent is known of {reason}", 0
    try:
        for case in found:
            _split(_Gradients(rule, case), answers)
    except (Undecided, Undivided, UnityError, KeyError) as reason:
        return *_without_ties(rule, str(reason), seed), answers.questions
    return "proved", "", answers.questions


def _without_ties(rule: Substitution, reason: str, seed: int) -> tuple[Verdict, str]:
    """Return the verdict on a rule whose values are equal, but whose gradient lines are not shown to be."""
    different = refute_gradients(rule, seed)
    if different is not None and different[1]:
        return "forward only", different[0]
    try:
        _has_derivatives(rule)
    except Undecided as error:
        return "forward only", f"gradients are not shown to be equal: {error}"
    at_ties = f"not at ties: {different[0]}" if different is not None else f"not shown at ties: {reason}"
    return "almost everywhere", f"gradients {at_ties}"


def _has_derivatives(rule: Substitution) -> None:
    """
    Raise `Undecided` unless the gradients of all operators are their derivatives almost everywhere.

    Only then do equal values have equal gradients there.
    """
    for operation in rule.operations((*rule.source, *rule.target)):
        if operation.op in NOT_DERIVATIVES:
            raise Undecided(f"the gradient of {operation.op} is not its derivative")
    for operation in rule.operations(rule.target):
        if operation.op not in PARALLEL_OPERATORS and find_operator(operation.op).gradient is None:
            raise Undecided(f"{operation.op} has no gradient")


# --- equality in one case --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Values:
    """The claim that both sides have the same values in a case."""

    rule: Substitution
    case: Case
    exact: bool = False

    def pairs(self, context: ProofContext) -> Iterator[tuple[TensorForm, TensorForm]]:
        """Return the tensors that have to be equal."""
        inputs = inputs_at(self.rule, self.case.ranks, self.case.dtypes)
        source, target = (
            tensors(self.rule, side, inputs, context, self.case.fixed)[0]
            for side in (self.rule.source, self.rule.target)
        )
        return zip(source, target, strict=True)


@dataclass(frozen=True)
class _Gradients:
    """
    The claim that both sides have the same vector-Jacobian products in a case, up to the rounding of casts of
    gradients.
    """

    rule: Substitution
    case: Case
    exact: bool = False

    def pairs(self, context: ProofContext) -> Iterator[tuple[TensorForm, TensorForm]]:
        """Yield the gradients that have to be equal. One that the source does not have asks for nothing."""
        inputs = inputs_at(self.rule, self.case.ranks, self.case.dtypes)
        source, target = (
            vector_jacobian_products(self.rule, side, inputs, context, self.case)[0]
            for side in (self.rule.source, self.rule.target)
        )

        def whole(name: str, of: Product) -> TensorForm:
            if of is None:
                return zeros(inputs[name].shape, inputs[name].dtype)
            if not isinstance(of, TensorForm):
                raise Undecided(f"{name} has no gradient in the target")
            return of

        for name, of in source.items():
            if of is None or isinstance(of, TensorForm):
                yield whole(name, of), whole(name, target[name])


def _exact(rule: Substitution, case: Case, answers: Answers) -> None:
    """Prove that both sides have the same values and round alike. Raises `Undecided`."""
    try:
        _split(_Values(rule, case, exact=True), answers)
    except (Undecided, Undivided, UnityError, KeyError) as reason:
        raise Undecided(f"its sides are not shown to round alike; do not call it exact: {reason}") from None


def _split(claim: _Values | _Gradients, answers: Answers) -> None:
    """Prove a claim, splitting the indices over those sizes that the proof asks for. Raises `Undecided`."""
    splits: dict[tuple[str, Poly], Poly] = {}
    case = claim.case
    for _ in range(SPLITS):
        restart()
        context = ProofContext(dict(case.sample), case.given, splits=splits, exact=claim.exact)
        try:
            _compare(claim, context, answers)
            return
        except Undivided as need:
            splits = context.finer(need)
    raise Undecided(f"more than {SPLITS} sizes have to be taken apart")


def _compare(claim: _Values | _Gradients, context: ProofContext, answers: Answers) -> None:
    pairs = list(claim.pairs(context))
    positive = [Constraint(symbol(s) - 1) for s in context.sample if "#" not in s]
    given = [Constraint(c.poly.substitute(claim.case.fixed)) for c in claim.rule.conditions]
    for left, right in pairs:
        if left.shape != right.shape:
            facts = Facts([*positive, *given, *context.assumed], answers)
            for a, b in zip(left.shape, right.shape, strict=True):
                if not facts.imply(Constraint(a - b, equal=True)):
                    raise Undecided(f"sizes {a} and {b} are not shown to be equal")
        position: list[Poly] = []
        within: list[Constraint] = []
        for size in left.shape:
            at, _, inside = context.index("i", size)
            position.append(at)
            within += inside
        # The sums of either side are taken apart as its own reshapes ask for.
        context.side = "left"
        a = left.element(tuple(position))
        context.side = "right"
        b = right.element(tuple(position))
        context.side = ""
        facts = Facts([*positive, *given, *context.assumed, *within], answers)
        verdict = equal(a, b, facts, where_left=isinstance(claim, _Gradients))
        if not verdict.proved:
            raise Undecided(verdict.reason)
        if (operation := undefined_in(b, a, facts)) is not None:
            raise Undecided(f"the target may be no number where the source is one: {operation}")
