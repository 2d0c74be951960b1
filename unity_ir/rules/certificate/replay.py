"""
Replays certificates: checks that each step follows by a law, to the end at which nothing is left of the difference.

A certificate of a rule has, for each case of its proof (0 or 2 dims of each pack, each name an attribute may have), and
for each pair of results and of gradients, both sides' elements as text and the steps that take their difference to 0.
The sides are elaborated again here, so that a certificate of another rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.node import leaf
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.certificate.defined import EXTREMES, quotient, require_defined
from unity_ir.rules.certificate.elaborate import Elaborator, Tensor, values
from unity_ir.rules.certificate.gradients import GRADIENT, gradients
from unity_ir.rules.certificate.laws import (
    MONOMIALS,
    SETS,
    Facts,
    cancel,
    constraint,
    of_set,
    poly,
    require,
    symbols_of,
)
from unity_ir.rules.certificate.ranks import RANK, check_ranks
from unity_ir.rules.certificate.terms import (
    PARTIAL,
    REDUCERS,
    Apply,
    Constraint,
    Form,
    Mono,
    Refused,
    box,
    exchanged,
    one_of,
    scaled,
    substitute,
    text,
)
from unity_ir.rules.pattern import ELEMENTS, AttrParameter, DimPack, Operation, Substitution, build, input_type
from unity_ir.rules.poly import symbol
from unity_ir.tdl.functions import ACTIVATIONS, DTYPES

RANKS = (0, RANK)
"""Dims of a pack in the cases of a proof; `ranks` checks that they stand for all numbers."""

Steps: TypeAlias = list[dict[str, Any]]
Law: TypeAlias = Callable[[Mono, Facts, Mapping[str, Any]], Form]
Certificate: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Fixes the ranks, functions and element types for which one case of a proof holds."""

    ranks: Mapping[str, int]
    """The number of dims of each pack."""
    given: Mapping[str, str]
    """A function or element type for each attribute parameter that names one."""
    dtypes: Mapping[str, str]
    """An element type for each input, if the rule casts."""

    def fits(self, rule: Substitution, sample: Mapping[str, int]) -> bool:
        """Return whether both sides are well typed at some sizes, and of one type."""
        packs = {p: tuple(sample[f"{p}.{d}"] for d in range(rank)) for p, rank in self.ranks.items()}
        numbers = {v.name: 0.5 for o in _operations(rule) for _, v in o.attributes if isinstance(v, AttrParameter)}
        bindings = {**sample, **packs, **numbers, **self.given}
        try:
            leaves = {
                i.name: leaf("input", input_type(i, self.dtypes[i.name], bindings), name=i.name).result
                for i in rule.inputs
            }
            source, target = build(rule.source, leaves, bindings), build(rule.target, leaves, bindings)
        except UnityError:
            return False
        return [v.type for v in source] == [v.type for v in target]


def _operations(rule: Substitution) -> list[Operation]:
    return [o for o in rule.operations((*rule.source, *rule.target)) if o.op not in PARALLEL_OPERATORS]


def cases(rule: Substitution) -> Iterator[Case]:
    """
    Yield the cases in which a rule has to be proved: numbers of dims by pack, functions and element types by attribute
    parameter, element types of inputs. In those of a rule that casts, it may be ill typed.
    """
    packs = sorted({s.name for i in rule.inputs for s in i.shape if isinstance(s, DimPack)})
    if len({i.name for i in rule.inputs}) < len(rule.inputs):
        raise Refused("two inputs have one name")
    if any(s.startswith("#") for c in rule.conditions for s in c.poly.symbols):
        raise Refused("a condition is on the number of dims of a pack")
    named: dict[str, tuple[str, ...]] = {}
    casts = False
    for operation in _operations(rule):
        kinds = {a.name: a.kind for a in find_operator(operation.op).line.attributes}
        casts = casts or "dtype" in kinds.values()
        for name, value in operation.attributes:
            if isinstance(value, AttrParameter) and kinds[name] in CHOICES:
                named[value.name] = CHOICES[kinds[name]]
    types = [ELEMENTS[i.elements] if casts else ("",) for i in rule.inputs]
    for ranks in product(RANKS, repeat=len(packs)):
        for given in product(*named.values()):
            for dtypes in product(*types):
                known = {i.name: t for i, t in zip(rule.inputs, dtypes, strict=True) if t}
                yield Case(dict(zip(packs, ranks, strict=True)), dict(zip(named, given, strict=True)), known)


CHOICES = {"name": ACTIVATIONS, "dtype": DTYPES}
"""The values that an attribute parameter may take, by its kind, where it is no number."""


def check_certificate(rule: Substitution, certificate: Certificate) -> bool:
    """
    Check that a certificate proves a rule; return whether it does so for gradients, too, and not for values only.
    Raises `Refused`, saying why, where it does not.
    """
    try:
        said = list(certificate["cases"])
        fit: dict[tuple[int, ...], Any] = {}
        fitting = set[tuple[int, ...]]()
        for case in cases(rule):
            found = said.pop(0)
            ranks = tuple(case.ranks.values())
            if case.dtypes:
                # Whether it casts to what is well typed does not depend on sizes: one choice has to fit these.
                if fit.setdefault(ranks, found["sample"]) != found["sample"]:
                    raise Refused("a case has a sample of its own")
                if not case.fits(rule, found["sample"]):
                    continue
                fitting.add(ranks)
            pairs = list(found["pairs"])
            if ranks and set(ranks) == {RANK}:
                check_ranks(_elaborator(rule, case, found["sample"]), rule, case.ranks)
            for goal in goals(rule, case, found["sample"], bool(certificate["gradients"])):
                goal.check(pairs.pop(0))
        if fit.keys() != fitting:
            raise Refused("it is well typed in no case")
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise Refused(f"incomplete: {type(error).__name__} {error}") from error
    return bool(certificate["gradients"])


@dataclass(frozen=True)
class Goal:
    """Two elements that have to be equal wherever facts hold."""

    claim: str
    source: Form
    target: Form
    facts: Facts

    @property
    def difference(self) -> Form:
        """Return the form that has to be 0 for the claim to hold."""
        return (*self.source, *scaled(self.target, -1))

    def check(self, pair: Mapping[str, Any]) -> None:
        """Check what a certificate says of it. Raises `Refused`."""
        written = {"claim": self.claim, "source": text(self.source), "target": text(self.target)}
        if any(pair[name] != value for name, value in written.items()):
            raise Refused(f"{self.claim}: the certificate is of other elements")
        # An element of an empty window has no gradient, so that in gradients no maximum is of nothing.
        looked_at = PARTIAL if self.claim.startswith(GRADIENT) else (*PARTIAL, *EXTREMES)
        require_defined(self.target, self.source, self.facts, looked_at)
        _check(self.difference, self.facts, pair["steps"], Given(self.source, self.facts))


def goals(rule: Substitution, case: Case, sample: Mapping[str, int], differentiable: bool) -> Iterator[Goal]:
    """
    Yield what has to be shown in a case: of all results, as they round, too, if the rule is to be exact, and of
    gradients if `differentiable`.
    """
    wanted = ((values, False), (values, True), (gradients, False))
    for pairs, rounds in (w for w in wanted if (rule.exact or not w[1]) and (differentiable or w[0] is not gradients)):
        of = _elaborator(rule, case, sample, rounds)
        try:
            for claim, left, right in pairs(of, rule, case.ranks):
                yield _goal(of, claim, left, right)
        except (UnityError, KeyError, IndexError, ValueError) as error:
            raise Refused(f"not elaborated: {error}") from error


def _elaborator(rule: Substitution, case: Case, sample: Mapping[str, int], rounds: bool = False) -> Elaborator:
    symbols = {s for s in rule.symbols if not s.startswith("#")}
    symbols |= {f"{p}.{d}" for p, rank in case.ranks.items() for d in range(rank)}
    if any(sample.get(s, 0) < 2 for s in symbols):
        raise Refused("the sample has no size above 1 for every symbol")
    facts = [*(Constraint(symbol(s) - 1) for s in sorted(symbols)), *(Constraint(c.poly) for c in rule.conditions)]
    return Elaborator({s: sample[s] for s in symbols}, case.given, facts, case.dtypes, rounds)


def _goal(of: Elaborator, claim: str, left: Tensor, right: Tensor) -> Goal:
    if len(left.shape) != len(right.shape):
        raise Refused("sides have other numbers of dims")
    at = [of.fresh("i") for _ in left.shape]
    position = tuple(map(symbol, at))
    source, target = left.element(position), right.element(position)
    facts = frozenset(of.facts)
    for a, b in zip(left.shape, right.shape, strict=True):
        require(Constraint(a - b, equal=True), facts)
    return Goal(claim, source, target, facts.union(*(box(i, n) for i, n in zip(at, left.shape, strict=True))))


@dataclass(frozen=True)
class Given:
    """The source of a goal, which is a number, and what holds of it."""

    source: Form = ()
    facts: Facts = frozenset()


def _check(form: Form, facts: Facts, steps: Steps, given: Given | None = None) -> None:
    """Check that steps take a form to 0 wherever the source is a number. Raises `Refused`."""
    given = given or Given((), facts)
    for step in steps:
        match step["law"]:
            case "cases":
                on = constraint(step["on"])
                if not on.poly.symbols <= symbols_of(facts).union(*(m.free for m in form)):
                    raise Refused(f"{on} is not on free indices")
                alternatives = (on, *on.negated())
                if len(step["then"]) != len(alternatives):
                    raise Refused("a case is missing")
                for case, inner in zip(alternatives, step["then"], strict=False):
                    _check(form, facts | {case}, inner, replace(given, facts=given.facts | {case}))
                return
            case "digits":
                given = Given(*apply_digits(given.source, given.facts, step))
                form, facts = apply_digits(form, facts, step)
            case _:
                form = apply_step(form, facts, step, given)
    if form:
        raise Refused(f"left over: {text(form)[:200]}")


def apply_digits(form: Form, facts: Facts, step: Mapping[str, Any]) -> tuple[Form, Facts]:
    """Write a free index below d * m as s * m + i, which every such index is."""
    index, outer, inner = step["index"], step["outer"], step["inner"]
    d, m = poly(step["d"]), poly(step["m"])
    known = symbols_of(facts).union(*(x.free | set(x.binders) for x in form))
    if {outer, inner} & known or outer == inner or not set(box(index, d * m)) <= facts or index in (d * m).symbols:
        raise Refused(f"{index} does not run over {d * m}, or its digits are not new")
    require(Constraint(m - 1), facts)
    values = {index: symbol(outer) * m + symbol(inner)}
    new = frozenset(c.substitute(values) for c in facts) | {*box(outer, d), *box(inner, m)}
    return substitute(form, values), new


def apply_step(form: Form, facts: Facts, step: Mapping[str, Any], given: Given = Given()) -> Form:
    """Apply one step to a form; return the form that equals it where the source is a number. Raises `Refused`."""
    path: list[int] = list(step["at"])
    if step["law"] == "cancel":
        return _inside(form, facts, path, lambda inner, known: cancel(inner, known, step))
    law = MONOMIALS.get(step["law"])
    if step["law"] == "quotient":
        law = partial(quotient, source=given.source, facts=given.facts)
    if law is None:
        raise Refused(f"{step['law']} is no law")
    if len(path) % 3 == 0:
        return _in_set(form, facts, path, law, step)
    *path, at = path

    def change(inner: Form, known: Facts) -> Form:
        mono = one_of(inner, at)
        _only_here(mono.binders, known)
        return exchanged(inner, at, law(mono, known, step))

    return _inside(form, facts, path, change)


def _in_set(form: Form, facts: Facts, path: list[int], law: Law, step: Mapping[str, Any]) -> Form:
    """Apply a step to one of the sets of values of which a maximum, minimum or product is taken."""
    *path, at, place, argument = path

    def change(inner: Form, known: Facts) -> Form:
        mono = one_of(inner, at)
        factor, known = one_of(mono.factors, place), known | mono.domain
        if not isinstance(factor, Apply) or factor.function not in REDUCERS or step["law"] not in SETS:
            raise Refused(f"{step['law']} is no law of sets of values")
        scope = one_of(factor.arguments, argument)
        _only_here(scope.binders, known)
        found = of_set(scope, lambda m: law(m, known, step))
        new = Apply(factor.function, exchanged(factor.arguments, argument, found))
        return exchanged(inner, at, [replace(mono, factors=exchanged(mono.factors, place, [new]))])

    return _inside(form, facts, path, change)


def _inside(form: Form, facts: Facts, path: list[int], change: Callable[[Form, Facts], Form]) -> Form:
    """
    Change the form at a path, (monomial, factor, argument) by depth, knowing the facts and all domains on the way.
    """
    if not path:
        return change(form, facts)
    at, place, argument, *rest = path
    mono = one_of(form, at)
    factor = one_of(mono.factors, place)
    if not isinstance(factor, Apply):
        raise Refused(f"{factor} has no arguments")
    scope = one_of(factor.arguments, argument)
    _only_here(mono.binders, facts)
    _only_here(scope.binders, facts | mono.domain)
    body = _inside(scope.body, facts | mono.domain | scope.domain, rest, change)
    new = Apply(factor.function, exchanged(factor.arguments, argument, [replace(scope, body=body)]))
    return exchanged(form, at, [replace(mono, factors=exchanged(mono.factors, place, [new]))])


def _only_here(binders: tuple[str, ...], facts: Facts) -> None:
    """Raise `Refused` where facts are known of an index outside of what it is bound in: they are of another one."""
    if set(binders) & symbols_of(facts):
        raise Refused("facts are known of a bound index")
