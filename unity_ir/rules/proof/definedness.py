"""
Which operations of a value may be no number: divisions, logarithms, roots and powers of what is not shown to be in
their domain. A rule may not bring such an operation where its source has none: equal forms do not say that both sides
are numbers, since what is multiplied by 0, or subtracted from itself, is in neither.

An operation of a branch that `where` did not choose does no harm; there it is masked by the branch's condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from unity_ir.rules.proof.equal import open_guards, settled
from unity_ir.rules.proof.forms import UNIT, Apply, Constraint, Extreme, Form, Mono, MonoFactor, form_text
from unity_ir.rules.proof.normal import normal
from unity_ir.rules.proof.signs import is_positive, not_negative
from unity_ir.rules.proof.solver import Facts

PARTIAL = ("recip", "log", "sqrt", "pow", "/")
"""Functions that are no number at some arguments."""

CASES = 6
"""Guards that are looked at case by case."""

BRANCHES = ("if", "if not")
"""Conditions that choose a branch of `where`, as factors of what is in the branch."""


@dataclass(frozen=True)
class _Operation:
    """An operation that may be no number, where it is computed."""

    text: str
    masks: frozenset[str]
    """Conditions of the branches that it is in."""
    guards: frozenset[Constraint]
    """Constraints on sizes and free indices under which it is computed."""


def undefined_in(target: Form, source: Form, facts: Facts, cases: int = CASES) -> str | None:
    """
    Return the text of an operation of `target` that may be no number and that `source` does not have where `target`
    has it; None if there is none. Both are forms as expressions gave them, not in normal form; `facts` are constraints
    that hold. `cases` is how many guards on free indices may be looked at, case by case.
    """
    find = _Operations(facts)
    needed = set(find.of(target))
    given = set(find.of(source)) if needed else set[_Operation]()
    for one in sorted(needed, key=lambda o: o.text):
        known = facts.also(one.guards)
        if any(o.text == one.text and o.masks <= one.masks and known.imply_all(o.guards) for o in given):
            continue
        guard = next(iter(find.guards), None)
        if guard is None or cases == 0:
            return one.text
        for case in ((guard,), *((c,) for c in guard.negated)):
            if not facts.contradict(case) and (found := undefined_in(target, source, facts.also(case), cases - 1)):
                return found
        return None
    return None


@dataclass
class _Operations:
    """Finds the operations of forms that may be no number."""

    facts: Facts
    """Constraints that hold."""
    known: dict[tuple[Apply, tuple[str, ...], frozenset[Constraint]], tuple[str, ...]] = field(
        default_factory=dict[tuple[Apply, tuple[str, ...], frozenset[Constraint]], tuple[str, ...]]
    )
    """What a factor under binders and their domain is made of (`_made_of`)."""
    guards: dict[Constraint, None] = field(default_factory=dict[Constraint, None])
    """Guards on free indices in the operations, which are not decided."""

    def of(
        self,
        form: Form,
        binders: tuple[str, ...] = (),
        domain: frozenset[Constraint] = frozenset(),
        masks: frozenset[str] = frozenset(),
    ) -> Iterator[_Operation]:
        for mono in form:
            if not any(map(_mentions, mono.factors)):
                continue
            inside, where = (*binders, *mono.binders), domain | mono.domain
            branches = [f for f in mono.factors if isinstance(f, Apply) and f.function in BRANCHES]
            masked = masks.union(_mask(f, self.facts) for f in branches)
            for factor in mono.factors:
                match factor:
                    case Apply(function, arguments):
                        own = masks if factor in branches else masked
                        for argument in arguments:
                            yield from self.of(argument, inside, where, own)
                        if function.removesuffix("'") in PARTIAL:
                            bound = frozenset(c for c in where if not c.poly.symbols.isdisjoint(inside))
                            for text in self._made_of(factor, inside, bound):
                                yield _Operation(text, own, where - bound)
                    case Extreme(_, parts):
                        for p in parts:
                            yield from self.of(p.body, (*inside, *p.binders), where | p.domain, masked)
                    case _:
                        pass

    def _made_of(self, factor: Apply, binders: tuple[str, ...], bound: frozenset[Constraint]) -> tuple[str, ...]:
        """Return the operations that a factor is made of in normal form, without those that are numbers everywhere."""
        used = tuple(b for b in binders if b in factor.free)
        about = frozenset(c for c in bound if not c.poly.symbols.isdisjoint(used))
        found = self.known.get((factor, used, about))
        if found is None:
            whole = normal(settled((Mono(UNIT, used, about, (factor,)),), self.facts), self.facts)
            whole = normal(settled(whole, self.facts), self.facts)
            self.guards.update(dict.fromkeys(open_guards(whole, self.facts)))
            each = (f for m in whole for f in _partial(m.factors, self.facts.also(m.domain)))
            found = self.known[factor, used, about] = tuple(dict.fromkeys(_zero_set(f).text for f in each))
        return found


def _zero_set(factor: Apply) -> Apply:
    """Return 1 / x for 1 / |x|, which is no number at the same places."""
    match factor:
        case Apply("recip", ((Mono(coefficient, (), domain, (Apply("abs", x),)),),)) if coefficient == 1 and not domain:
            return Apply("recip", x)
        case _:
            return factor


def _mask(branch: Apply, facts: Facts) -> str:
    return f"{branch.function} {form_text(normal(branch.arguments[0], facts))}"


def _mentions(factor: MonoFactor) -> bool:
    match factor:
        case Apply(function, arguments):
            inside = any(_mentions(f) for a in arguments for m in a for f in m.factors)
            return inside or function.removesuffix("'") in PARTIAL
        case Extreme(_, parts):
            return any(_mentions(f) for p in parts for m in p.body for f in m.factors)
        case _:
            return False


def _partial(factors: tuple[MonoFactor, ...], facts: Facts) -> Iterator[Apply]:
    for factor in factors:
        match factor:
            case Apply(function, arguments):
                if function.removesuffix("'") in PARTIAL and not _is_defined(
                    function.removesuffix("'"), arguments, facts
                ):
                    yield factor
                for argument in arguments:
                    for mono in argument:
                        yield from _partial(mono.factors, facts.also(mono.domain))
            case Extreme(_, parts):
                for p in parts:
                    for mono in p.body:
                        yield from _partial(mono.factors, facts.also((*p.domain, *mono.domain)))
            case _:
                pass


def _is_defined(function: str, arguments: tuple[Form, ...], facts: Facts) -> bool:
    """Return whether it is shown that an operation is a number wherever its arguments are."""
    match function, arguments:
        case "sqrt", (x,):
            return not_negative(x, facts)
        case ("recip", (x,)) | ("/", (_, x)):
            return is_positive(x, facts) or (len(x) == 1 and not x[0].factors and not x[0].domain)
        case _, (x, *_):
            return is_positive(x, facts)
        case _:
            return False
