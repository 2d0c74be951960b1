"""
Writes certificates: looks for the steps that take the difference of two sides to 0.

Nothing here is trusted. Steps are tried with the checker's own laws, in the order in which the prover (`proof.normal`,
`proof.equal`) brings forms to normal form: nested values first, then one-point sums, joined indices, counts and
shifts; what is left cancels, case by case of the guards on free indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import permutations, product
from random import Random
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.rules.certificate.elaborate import COMPARISONS
from unity_ir.rules.certificate.laws import (
    EFFORT,
    MOST_BINDERS,
    Facts,
    follows,
    impossible,
    same_factors,
)
from unity_ir.rules.certificate.replay import (
    Case,
    Certificate,
    Given,
    Goal,
    Steps,
    apply_digits,
    apply_step,
    cases,
    goals,
)
from unity_ir.rules.certificate.scalars import SCALARS
from unity_ir.rules.certificate.terms import (
    REDUCERS,
    TRUTH,
    Apply,
    Constraint,
    Factor,
    Form,
    Mono,
    Number,
    Read,
    Refused,
    Scope,
    rebound,
    text,
)
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.poly import ONE, ZERO, Poly, exact_quotient, number, symbol
from unity_ir.rules.proof.cases import sample_at
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.sides import parameters, sides

MOST_CASES = 64
"""Cases one difference may be split into."""

FEW = 8
"""Addends of a sum that are written out."""

TRIES = 400
"""Choices of sizes tried, where the first hide a dim."""

LITTLE, MUCH = 100_000, 1_000_000
"""Units of work of Z3 for a question: most steps that are tried do not follow, which it may take long to see."""

SQUARED = ("abs", "sqrt", "recip")
"""Functions whose squares may be simpler."""

LAST = {"maximum of minima": 1, "absolute value by sign": 2, "maximum by comparison": 2}
"""Axioms that make forms longer, so that they are used where nothing else is left, and the stage (`forced`) of each."""

MOST_STEPS = 4000
"""Steps after which the search for one difference is given up."""


class Unwritten(Exception):
    """Raised where no certificate is found; the message says what is left."""


def write_certificate(rule: Substitution, differentiable: bool = True) -> Certificate:
    """
    Return a certificate that both sides of a rule have equal values and, if `differentiable`, equal gradients, as plain
    data; raise `Unwritten`, with the reason, where none is found.
    """
    try:
        try:
            return _written(rule, differentiable, LITTLE)
        except Unwritten:
            return _written(rule, differentiable, MUCH)
    except (Refused, Undecided, UnityError) as reason:
        raise Unwritten(str(reason)) from reason


def _written(rule: Substitution, differentiable: bool, effort: int) -> Certificate:
    before = EFFORT.set(effort)
    try:
        return {"rule": rule.name, "gradients": differentiable, "cases": list(_cases(rule, differentiable))}
    finally:
        EFFORT.reset(before)


def _cases(rule: Substitution, differentiable: bool) -> Iterator[dict[str, Any]]:
    fitting: dict[tuple[int, ...], dict[str, int]] = {}
    for case in cases(rule):
        if case.dtypes:
            sample = fitting.setdefault(tuple(case.ranks.values()), _fitting(rule, case))
            found = list(goals(rule, case, sample, differentiable)) if case.fits(rule, sample) else []
        else:
            sample, found = _sampled(rule, case, differentiable)
        pairs: list[dict[str, Any]] = []
        for goal in found:
            steps = _Search(goal.difference, goal.facts, Given(goal.source, goal.facts)).steps_to_zero()
            pairs.append(
                {"claim": goal.claim, "source": text(goal.source), "target": text(goal.target), "steps": steps}
            )
        yield {"sample": sample, "pairs": pairs}


def _fitting(rule: Substitution, case: Case) -> dict[str, int]:
    """Return sizes that fit a rule that casts, for some of what its attributes and inputs may be."""
    given: dict[str, float | str] = dict.fromkeys(parameters(rule), 0.5)
    last = Undecided("it has no cases")
    for other in cases(rule):
        try:
            return sample_at(rule, case.ranks, {**given, **other.given})[0]
        except Undecided as reason:
            last = reason
    raise last


def _sampled(rule: Substitution, case: Case, differentiable: bool) -> tuple[dict[str, int], list[Goal]]:
    """Return sizes at which lines can be spelled out, and what has to be shown."""
    given: dict[str, float | str] = {**dict.fromkeys(parameters(rule), 0.5), **case.given}
    sample, _ = sample_at(rule, case.ranks, given)
    try:
        return sample, list(goals(rule, case, sample, differentiable))
    except Refused as reason:
        first = reason
    random = Random(0)
    for attempt in range(TRIES):
        # Of larger sizes, no window is the only one in its dim.
        larger = {s: v if s.startswith("#") else random.randint(2, 5 + attempt // 10) for s, v in sample.items()}
        packs = {p: tuple(larger[f"{p}.{d}"] for d in range(rank)) for p, rank in case.ranks.items()}
        try:
            sides(rule, {**larger, **packs, **given})
            return larger, list(goals(rule, case, larger, differentiable))
        except (Refused, UnityError):
            continue
    raise first


def said(of: Poly) -> list[list[Any]]:
    """Return a polynomial as plain data."""
    return [[c, *m] for m, c in of.terms]


def said_constraint(of: Constraint) -> list[Any]:
    """Return a constraint as plain data."""
    return ["==" if of.equal else ">=", said(of.poly)]


@dataclass
class _Search:
    """A search for the steps that take `form` to 0."""

    form: Form
    facts: Facts
    given: Given
    steps: Steps = field(default_factory=list[dict[str, Any]])
    made: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of names made, and of cases, in this difference."""
    forced: int = 0
    """
    How hard to try: from 1 on, pin indices that an equation gives as a remainder, and write out sums over a few values;
    use axioms of `LAST` from their stage on.
    """

    def fresh(self) -> str:
        """Return a new name."""
        self.made[0] += 1
        return f"t{self.made[0]}#"

    def do(self, law: str, at: list[int], **what: Any) -> bool:
        """Apply a step, and keep it; return False where it is refused."""
        step = {"law": law, "at": at, **what}
        try:
            found = apply_step(self.form, self.facts, step, self.given)
        except Refused:
            return False
        if found == self.form:
            return False
        self.form = found
        self.steps.append(step)
        if len(self.steps) > MOST_STEPS:
            raise Unwritten("too many steps")
        return True

    def steps_to_zero(self) -> Steps:
        """Return the steps; raise `Unwritten` where there is something left."""
        while True:
            self.simplify([])
            self.cancel([])
            if not self.form:
                return self.steps
            guard = next(self.open_guards(self.form, self.facts, frozenset()), None)
            if guard is not None:
                return self.split(guard)
            if self.digits():
                continue
            if self.forced == max(LAST.values()):
                raise Unwritten(f"left over: {text(self.form)[:600]}")
            self.forced += 1

    def split(self, guard: Constraint) -> Steps:
        """Prove each case of a constraint."""
        branches: list[Steps] = []
        for case in (guard, *guard.negated()):
            self.made[1] += 1
            if self.made[1] > MOST_CASES:
                raise Unwritten("too many cases")
            given = replace(self.given, facts=self.given.facts | {case})
            branch = _Search(self.form, self.facts | {case}, given, [], self.made, self.forced)
            branches.append(branch.steps_to_zero())
        self.steps.append({"law": "cases", "on": said_constraint(guard), "then": branches})
        return self.steps

    def open_guards(self, form: Form, facts: Facts, bound: frozenset[str]) -> Iterator[Constraint]:
        """Yield constraints on free symbols, at any depth, that facts do not decide."""
        for mono in form:
            inner = bound | set(mono.binders)
            for c in sorted(mono.domain, key=str):
                if c.poly.symbols.isdisjoint(inner) and not follows(c, facts):
                    yield c
            for f in mono.factors:
                if isinstance(f, Apply):
                    for a in f.arguments:
                        within = inner | set(a.binders)
                        for c in sorted(a.domain, key=str):
                            if c.poly.symbols.isdisjoint(within) and not follows(c, facts):
                                yield c
                        yield from self.open_guards(a.body, facts, within)

    # --- what is at a path -------------------------------------------------------------------------------------------

    def look(self, path: list[int]) -> tuple[Form, Facts]:
        """Return the form at a path, and the facts that hold there."""
        form, facts = self.form, self.facts
        for at, place, argument in zip(path[::3], path[1::3], path[2::3], strict=True):
            factor = form[at].factors[place]
            assert isinstance(factor, Apply)
            scope = factor.arguments[argument]
            form, facts = scope.body, facts | form[at].domain | scope.domain
        return form, facts

    # --- normal forms ------------------------------------------------------------------------------------------------

    def simplify(self, path: list[int]) -> None:
        """Bring the form at a path to a simple form."""
        at = 0
        while at < len(self.look(path)[0]):
            if self.simplified(path, at):
                at += 1

    def simplified(self, path: list[int], at: int) -> bool:
        """Simplify a monomial; return whether it is done, else there are others in its place."""
        here = [*path, at]
        mono = self.look(path)[0][at]
        for place, factor in enumerate(mono.factors):
            if isinstance(factor, Apply):
                self.simplify_arguments(here, place)
        while True:
            form, facts = self.look(path)
            size = len(form)
            if not any(tactic(here, form[at], facts) for tactic in self.tactics()):
                return True
            if len(self.look(path)[0]) != size:
                return False

    def simplify_arguments(self, here: list[int], place: int) -> None:
        """Simplify the arguments of a function, and the sets of which a maximum is taken."""
        n = 0
        while n < len(self.applied(here, place).arguments):
            at = [*here, place, n]
            self.simplify(at)
            self.cancel(at)
            if self.applied(here, place).function not in REDUCERS or not self.simplified_set(at):
                n += 1

    def applied(self, here: list[int], place: int) -> Apply:
        """Return the function's value that is a factor of a monomial."""
        form, _ = self.look(here[:-1])
        factor = form[here[-1]].factors[place]
        assert isinstance(factor, Apply)
        return factor

    def simplified_set(self, at: list[int]) -> bool:
        """Take a step on a set of values; return whether there was one."""
        *path, here, place, n = at
        form, facts = self.look(path)
        scope, known = self.applied([*path, here], place).arguments[n], facts | form[here].domain
        whole = Mono(Fraction(1), scope.binders, scope.domain, (Apply("", (Scope((), frozenset(), scope.body),)),))
        if any(tactic(at, whole, known) for tactic in (self.pins, self.drops, self.fuses, self.shifts)):
            return True
        for m in scope.body:
            for c in sorted(m.domain - scope.domain, key=str):
                about = c.poly.symbols
                if not c.equal and not about.isdisjoint(scope.binders) and about.isdisjoint(m.binders):
                    return self.do("split", at, on=said_constraint(c))
        return False

    def tactics(self) -> list[Any]:
        """Return what is tried on a monomial, in order."""
        found = [self.numbers, self.scalars, self.pins, self.drops, self.fuses, self.counts, self.shifts]
        return [*found, self.unrolls] if self.forced else found

    def unrolls(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Write a sum over a few values of an index addend by addend."""
        for b in mono.binders:
            size = self.size_of(mono, b)
            if size is not None and size.constant is not None and size.constant <= FEW:
                return self.do("split", here, on=said_constraint(Constraint(symbol(b) - size + 1, equal=True)))
        return False

    def numbers(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Write integers as sums of products, comparisons of them as guards."""
        for place, f in enumerate(mono.factors):
            if isinstance(f, Number) and f.poly != symbol(next(iter(f.poly.symbols), "")):
                return self.do("number", here, factor=place)
            if isinstance(f, Apply) and f.function in COMPARISONS and self.do("guard", here, factor=place):
                return True
        return False

    def scalars(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Use an axiom of scalar functions."""
        applied = [(place, f) for place, f in enumerate(mono.factors) if isinstance(f, Apply)]
        for place, f in enumerate(mono.factors):
            for other, g in applied:
                law = "quotient" if g.function == "recip" else "inverse" if g.function == "exp" else None
                if law and place != other and self.do(law, here, factor=place, other=other):
                    return True
        for place, f in applied:
            for other, g in applied:
                if f.function == "gt" and g.function in ("gt", "eq"):
                    if self.do("exclude", here, above=place, equal=other):
                        return True
                law = "repeat" if f.function in TRUTH else "square" if f.function in SQUARED else None
                if law and f.function == g.function and other < place:
                    if self.do(law, here, factor=place, other=other):
                        return True
        for place, f in applied:
            if f.function == "eq" and self.do("vanish", here, factor=place):
                return True
            for axiom in SCALARS:
                if LAST.get(axiom, 0) > self.forced or (axiom == "maximum of minima" and f.function != "max"):
                    continue
                if axiom == "trichotomy" and f.function == "gt":
                    # Of the two ways to write it, that which begins with the lesser text.
                    if text(f.arguments[0].body) <= text(f.arguments[1].body):
                        continue
                if self.do("scalar", here, factor=place, axiom=axiom):
                    return True
        return False

    def pins(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Put in the value of an index that an equation gives, or take an equation apart by digits."""
        equations = sorted((c for c in mono.domain if c.equal), key=str)
        for c in sorted(mono.domain, key=str):
            if not c.equal and Constraint(-c.poly) in mono.domain:
                to = [*(mono.domain - {c, Constraint(-c.poly)}), Constraint(c.poly, equal=True)]
                if self.do("domain", here, to=list(map(said_constraint, to))):
                    return True
        for c in equations:
            for m in {c.poly.coefficient(b) for b in c.poly.symbols} - {ZERO, ONE, -ONE}:
                if not m.symbols.isdisjoint(mono.binders):
                    continue
                terms = [(t, exact_quotient(Poly((t,)), m)) for t in c.poly.terms]
                high = sum((q for _, q in terms if q is not None), ZERO)
                low = sum((Poly((t,)) for t, q in terms if q is None), ZERO)
                if _outside(low, m, facts | mono.domain):
                    continue
                if self.do("radix", here, high=said(high), low=said(low), m=said(m)):
                    return True
        for c in equations:
            digits = [b for b in mono.binders if c.poly.coefficient(b).constant not in (0, 1, -1)]
            if digits and not self.forced and len(c.poly.symbols & set(mono.binders)) > 1:
                continue
            for b in mono.binders:
                factor = c.poly.coefficient(b)
                if factor == ZERO:
                    continue
                rest = exact_quotient(c.poly, factor)
                if rest is None or b in (rest - symbol(b)).symbols:
                    continue
                value = symbol(b) - rest
                if self.do("pin", here, binder=b, value=said(value), factor=said(factor)):
                    return True
        return False

    def drops(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Leave out guards on free indices that hold, and monomials whose guards do not."""
        if not mono.coefficient:
            return self.do("empty", here)
        boxes = {c for c in mono.domain if not c.equal and len(c.poly.symbols & set(mono.binders)) == 1}
        if mono.domain - boxes - facts and impossible(facts | mono.domain):
            return self.do("empty", here)
        if len(boxes) > 2 * len(mono.binders) and impossible(facts | mono.domain):
            return self.do("empty", here)
        hold = {c for c in mono.domain if c.poly.symbols.isdisjoint(mono.binders) and follows(c, facts)}
        return bool(hold) and self.do("domain", here, to=list(map(said_constraint, mono.domain - hold)))

    def size_of(self, mono: Mono, b: str) -> Poly | None:
        """Return the n of a binder with 0 <= b < n."""
        if Constraint(symbol(b)) not in mono.domain:
            return None
        for c in sorted(mono.domain, key=str):
            size = c.poly + symbol(b) + 1
            if not c.equal and b not in size.symbols and size.symbols.isdisjoint(mono.binders):
                return size
        return None

    def fuses(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Join two indices that occur as digits of one."""
        if len(mono.binders) < 2:
            return False
        sizes = {b: self.size_of(mono, b) for b in mono.binders}
        for inner, m in sizes.items():
            for outer, d in sizes.items():
                if inner != outer and m is not None and d is not None and any(inner in f.free for f in mono.factors):
                    new = self.fresh()
                    if self.do("fuse", here, outer=outer, inner=inner, new=new, d=said(d), m=said(m)):
                        return True
        return False

    def counts(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Count the values of an index that no factor mentions."""
        for b in mono.binders:
            if any(b in f.free for f in mono.factors):
                continue
            own = [c for c in mono.domain if b in c.poly.symbols]
            lows = [symbol(b) - c.poly for c in own if c.poly.coefficient(b) == ONE]
            highs = [symbol(b) + c.poly for c in own if c.poly.coefficient(b) == -ONE]
            for low in lows:
                for high in highs:
                    if self.do("count", here, binder=b, low=said(low), high=said(high)):
                        return True
        return False

    def shifts(self, here: list[int], mono: Mono, facts: Facts) -> bool:
        """Sum over an index as it is first read, not over another that is shifted."""
        done: set[str] = set()
        for r in sorted(_reads(mono), key=lambda r: (r.tensor, len(r.indices))):
            for index in r.indices:
                for b in mono.binders:
                    factor = index.coefficient(b).constant
                    if b in done or factor not in (1, -1) or b in index.without(b).symbols:
                        continue
                    done.add(b)
                    if index != symbol(b):
                        rest = index.without(b)
                        shift = -rest if factor == 1 else rest
                        if self.do("rename", here, binder=b, new=self.fresh(), sign=factor, shift=said(shift)):
                            return True
        return False

    # --- cancellation ------------------------------------------------------------------------------------------------

    def cancel(self, path: list[int]) -> None:
        """Take out monomials that cancel."""
        tried: set[int] = set()
        while True:
            form, facts = self.look(path)
            first = next((i for i in range(len(form)) if i not in tried), None)
            if first is None:
                return
            alike: list[tuple[int, Mapping[str, str]]] = [(first, {})]
            for i in range(first + 1, len(form)):
                names = _alike(form[first], form[i], facts)
                if names is not None:
                    alike.append((i, names))
            opposite = [[alike[0], a] for a in alike[1:] if form[a[0]].coefficient == -form[first].coefficient]
            for chosen in [alike, *opposite] if len(alike) > 1 else []:
                if self.do("cancel", path, these=[i for i, _ in chosen], names=[n for _, n in chosen]):
                    break
            else:
                tried.add(first)

    def digits(self) -> bool:
        """Take apart an index, free or bound, over a size that an equation divides."""
        for at, mono in enumerate(self.form):
            for c in sorted((c for c in mono.domain if c.equal), key=str):
                for m in {c.poly.coefficient(b) for b in c.poly.symbols & set(mono.binders)} - {ZERO, ONE, -ONE}:
                    for s in sorted(c.poly.symbols):
                        if self.taken_apart([at], mono, s, m if (m.terms[0][1]) > 0 else -m):
                            return True
        return False

    def taken_apart(self, here: list[int], mono: Mono, s: str, m: Poly) -> bool:
        """Write an index as quotient * m + remainder."""
        for size in {c.poly + symbol(s) + 1 for c in (self.facts | mono.domain) if c.poly.coefficient(s) == -ONE}:
            d = exact_quotient(size, m)
            if d is None or d == ONE or s in size.symbols:
                continue
            outer, inner = self.fresh(), self.fresh()
            if s in mono.binders:
                if self.do("unfuse", here, binder=s, outer=outer, inner=inner, d=said(d), m=said(m)):
                    return True
                continue
            step = {"law": "digits", "index": s, "outer": outer, "inner": inner, "d": said(d), "m": said(m)}
            try:
                given = Given(*apply_digits(self.given.source, self.given.facts, step))
                self.form, self.facts = apply_digits(self.form, self.facts, step)
            except Refused:
                continue
            self.given = given
            self.steps.append(step)
            return True
        return False


def _outside(low: Poly, m: Poly, facts: Facts) -> bool:
    """Return whether -m < low < m fails at an end of the range of an index, when all sizes are 3."""
    ends: dict[str, tuple[Poly, ...]] = {}
    for s in sorted(low.symbols):
        above = [c.poly + symbol(s) for c in facts if not c.equal and c.poly.coefficient(s) == -ONE]
        ends[s] = (number(3),) if "#" not in s else (ZERO, *(p for p in above if not any("#" in t for t in p.symbols)))
    for chosen in product(*ends.values()):
        value = low.substitute(dict(zip(ends, chosen, strict=True)))
        if any("#" in s for s in value.symbols | m.symbols):
            continue
        if not abs(value.at(dict.fromkeys(value.symbols, 3))) < m.at(dict.fromkeys(m.symbols, 3)):
            return True
    return False


def _reads(mono: Mono) -> list[Read]:
    """Return the reads of a monomial that no inner sum is over."""

    def inside(factor: Factor) -> Iterator[Read]:
        if isinstance(factor, Read):
            yield factor
        elif isinstance(factor, Apply):
            for a in factor.arguments:
                for m in a.body:
                    if not a.binders and not m.binders:
                        for f in m.factors:
                            yield from inside(f)

    return [r for f in mono.factors for r in inside(f)]


def _alike(one: Mono, other: Mono, facts: Facts) -> Mapping[str, str] | None:
    """Return names for the binders of `other` by which it has the factors of `one`; None if there are none."""
    if len(one.binders) != len(other.binders) or _shapes(one) != _shapes(other):
        return None
    first, second = _by_occurrence(one), _by_occurrence(other)
    for order in (first, *(permutations(first) if len(first) <= MOST_BINDERS else ())):
        names = dict(zip(second, order, strict=True))
        try:
            renamed = rebound(other, names)
            if same_factors(one.factors, renamed.factors, facts | renamed.domain):
                return names
        except Refused:
            continue
    return None


def _by_occurrence(mono: Mono) -> list[str]:
    """Return the binders of a monomial in the order in which factors, sorted without regard to names, mention them."""
    seen: dict[str, None] = {}
    for r in sorted(_reads(mono), key=lambda r: (r.tensor, len(r.indices))):
        for index in r.indices:
            seen.update(dict.fromkeys(s for s in sorted(index.symbols) if s in mono.binders))
    return [*seen, *(b for b in mono.binders if b not in seen)]


def _shapes(mono: Mono) -> list[str]:
    def shape(f: Factor) -> str:
        match f:
            case Read(tensor, indices):
                return f"{tensor}{len(indices)}"
            case Number():
                return ""
            case Apply(function, arguments):
                return f"{function}({len(arguments)})"

    return sorted(map(shape, mono.factors))
