"""
The laws that certificates may use, each with its side conditions: what a step says is true of all integers and real
numbers, or the step is refused.

A law of monomials takes one monomial, the facts that hold where it stands, and what the step says of it, and returns
the form that equals it. `replay` applies them at any depth. Questions about integers are put to Z3.

| law | equal are | if |
|---|---|---|
| `domain` | sums over two domains | each constraint of either follows from the other |
| `empty` | a sum and 0 | its domain has no points, or its coefficient is 0 |
| `split` | a sum, and those where a constraint holds and where not | |
| `pin` | a sum over b, and its addend at b = v | the domain says f * (b - v) = 0, f is not 0, and v is without b |
| `rename` | sums over b and over c, for b = c + r or r - c | c is new, r is without b and c |
| `fuse` | a sum over s < d and i < m, and one over k < d * m | m > 0, and s, i occur as s * m + i only |
| `unfuse` | a sum over k < d * m, and one over s < d and i < m | m > 0, s and i are new, k = s * m + i |
| `radix` | domains with h * m + l = 0, and with h = 0 and l = 0 | -m < l < m |
| `count` | a sum over b, and its length times the addend | only constraints mention b, and say low <= b <= high |
| `number` | an integer, and the sum of products of its symbols | |
| `guard` | a comparison of integers as a value, and as a constraint | |
| `repeat` | a condition's square, and the condition | |
| `exclude` | a > b together with a = b or b > a, and 0 | |
| `vanish` | x y where x = 0, and 0 | |
| `square` | abs(x) abs(x) and x x; sqrt(x) sqrt(x) and abs(x); 1 over either | |
| `inverse` | exp(x) exp(-x) and 1 | |
| `quotient` | x / x and 1; x / abs(x) and the sign of x | x is not 0, or the source divides by it (`defined`) |
| `scalar` | a function's value, by an axiom of `scalars` | |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from itertools import permutations
from typing import Any, TypeAlias

from unity_ir.rules.certificate.elaborate import COMPARISONS
from unity_ir.rules.certificate.scalars import SCALARS
from unity_ir.rules.certificate.terms import (
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
    as_poly,
    box,
    call,
    constant,
    exchanged,
    of_factor,
    one_of,
    one_product,
    rebound,
    scaled,
    substituted,
    summed,
    times,
)
from unity_ir.rules.poly import Poly, product, symbol

z3: Any = import_module("z3")  # Its types are not known.

Facts: TypeAlias = frozenset[Constraint]
Said: TypeAlias = Mapping[str, Any]
"""A step of a certificate: plain data, with the law's name and what it is applied to."""

TIMEOUT = 4000
"""Milliseconds a question may take; without an answer the step is refused."""

FAST = 500
"""Milliseconds for a first try with the solver that starts fastest."""

EFFORT = ContextVar("EFFORT", default=0)
"""Units of work that Z3 may do for a question; 0 for any number. Who looks for steps gives up sooner."""

COMMUTATIVE = ("+", "*", "eq", "ne")
"""Functions of two arguments in either order."""

MOST_BINDERS = 4
"""Bound indices of one scope all of whose orders are compared."""


# --- integers --------------------------------------------------------------------------------------------------------


def _value(poly: Poly) -> Any:
    return sum((c * z3.Product(*map(z3.Int, m)) if m else z3.IntVal(c) for m, c in poly.terms), z3.IntVal(0))


@lru_cache(maxsize=4096)
def _condition(c: Constraint) -> Any:
    return _value(c.poly) == 0 if c.equal else _value(c.poly) >= 0


def impossible(facts: Facts) -> bool:
    """Return whether no integers satisfy all constraints; False where Z3 does not know."""
    return _impossible(facts, EFFORT.get())


@lru_cache(maxsize=16384)
def _impossible(facts: Facts, effort: int) -> bool:
    return _unsatisfiable([_condition(c) for c in sorted(facts, key=str)])


def _unsatisfiable(conditions: Sequence[Any]) -> bool:
    # The simple solver starts fastest and answers most.
    for make, milliseconds in ((z3.SimpleSolver, FAST), (z3.Solver, TIMEOUT)):
        solver = make()
        solver.set("timeout", milliseconds)
        solver.set("rlimit", EFFORT.get())
        solver.add(*conditions)
        if (answer := solver.check()) != z3.unknown:
            return bool(answer == z3.unsat)
    return False


def follows(claim: Constraint, facts: Facts) -> bool:
    """Return whether a constraint holds wherever all facts do."""
    value = claim.poly.constant
    if claim in facts or (value is not None and (value == 0 if claim.equal else value >= 0)):
        return True
    own = frozenset(c for c in facts if c.poly.symbols <= claim.poly.symbols)
    near = about(claim.poly.symbols, facts)
    return all(impossible(own | {case}) or impossible(near | {case}) for case in claim.negated())


def about(symbols: frozenset[str], facts: Facts) -> Facts:
    """Return the facts that have to do with some symbols, directly or through others."""
    found, left = set[Constraint](), set(facts)
    while near := {c for c in left if not c.poly.symbols.isdisjoint(symbols)}:
        found |= near
        left -= near
        symbols = symbols.union(*(c.poly.symbols for c in near))
    return frozenset(found)


def symbols_of(facts: Facts) -> frozenset[str]:
    """Return the names of all symbols in facts."""
    return frozenset[str]().union(*(c.poly.symbols for c in facts))


def require(claim: Constraint, facts: Facts) -> None:
    """Raise `Refused` unless a constraint follows from facts."""
    if not follows(claim, facts):
        raise Refused(f"{claim} does not follow")


# --- what steps say --------------------------------------------------------------------------------------------------


def poly(said: Any) -> Poly:
    """Return the polynomial that plain data says: `[[2, "n"], [-1]]` is 2 n - 1."""
    terms = (product(map(symbol, map(str, names))) * int(c) for c, *names in said)
    return sum(terms, Poly(()))


def constraint(said: Any) -> Constraint:
    """Return the constraint that plain data says: `["==", polynomial]` or `[">=", polynomial]`."""
    return Constraint(poly(said[1]), said[0] == "==")


# --- laws of monomials -----------------------------------------------------------------------------------------------


def _domain(mono: Mono, facts: Facts, said: Said) -> Form:
    new = frozenset(map(constraint, said["to"]))
    for c in new - mono.domain:
        require(c, facts | mono.domain)
    for c in mono.domain - new:
        require(c, facts | new)
    return (replace(mono, domain=new),)


def _empty(mono: Mono, facts: Facts, said: Said) -> Form:
    if mono.coefficient and not impossible(facts | mono.domain):
        raise Refused("not shown to be empty")
    return ()


def _split(mono: Mono, facts: Facts, said: Said) -> Form:
    on = constraint(said["on"])
    return tuple(replace(mono, domain=mono.domain | {c}) for c in (on, *on.negated()))


def _without(mono: Mono, binder: str) -> tuple[str, ...]:
    if binder not in mono.binders:
        raise Refused(f"{binder} is not bound here")
    return tuple(b for b in mono.binders if b != binder)


def _put(mono: Mono, binders: tuple[str, ...], domain: Facts, values: Mapping[str, Poly]) -> Mono:
    """Return the monomial with other binders, over `domain`, with values for symbols, which must not be captured."""
    inner = tuple(substituted(f, values) for f in mono.factors)
    return Mono(mono.coefficient, binders, frozenset(c.substitute(values) for c in domain), inner)


def _new(mono: Mono, *names: str) -> None:
    if len(set(names)) < len(names) or set(names) & (mono.free | set(mono.binders)):
        raise Refused(f"{', '.join(names)} is not new")


def _pin(mono: Mono, facts: Facts, said: Said) -> Form:
    binder, value, factor = said["binder"], poly(said["value"]), poly(said["factor"])
    equation = Constraint(factor * (symbol(binder) - value), equal=True)
    binders = _without(mono, binder)
    if equation not in mono.domain or binder in value.symbols:
        raise Refused(f"the domain does not give {binder}")
    if not factor.constant:
        require(Constraint(factor - 1), facts | mono.domain)
    return (_put(mono, binders, mono.domain, {binder: value}),)


def _rename(mono: Mono, facts: Facts, said: Said) -> Form:
    binder, new, shift = said["binder"], said["new"], poly(said["shift"])
    _new(mono, new)
    if {binder, new} & shift.symbols or said["sign"] not in (1, -1):
        raise Refused("no shift of an index")
    binders = (*_without(mono, binder), new)
    return (_put(mono, binders, mono.domain, {binder: symbol(new) * said["sign"] + shift}),)


def _fuse(mono: Mono, facts: Facts, said: Said) -> Form:
    outer, inner, new = said["outer"], said["inner"], said["new"]
    d, m = poly(said["d"]), poly(said["m"])
    boxes = {*box(outer, d), *box(inner, m)}
    _new(mono, new)
    rest = tuple(b for b in _without(mono, outer) if b != inner)
    if inner not in mono.binders or outer == inner or not boxes <= mono.domain or {outer, inner} & (d * m).symbols:
        raise Refused("the two indices do not run over a box")
    require(Constraint(m - 1), facts | (mono.domain - boxes))
    found = _put(mono, (*rest, new), mono.domain - boxes, {inner: symbol(new) - symbol(outer) * m})
    if outer in found.free:
        raise Refused(f"{outer} and {inner} do not occur as {outer}*{m} + {inner} only")
    return (replace(found, domain=found.domain | set(box(new, d * m))),)


def _unfuse(mono: Mono, facts: Facts, said: Said) -> Form:
    binder, outer, inner = said["binder"], said["outer"], said["inner"]
    d, m = poly(said["d"]), poly(said["m"])
    _new(mono, outer, inner)
    if not set(box(binder, d * m)) <= mono.domain or binder in (d * m).symbols:
        raise Refused(f"{binder} does not run over {d * m}")
    rest = mono.domain - set(box(binder, d * m))
    require(Constraint(m - 1), facts | rest)
    found = _put(mono, (*_without(mono, binder), outer, inner), rest, {binder: symbol(outer) * m + symbol(inner)})
    return (replace(found, domain=found.domain | {*box(outer, d), *box(inner, m)}),)


def _radix(mono: Mono, facts: Facts, said: Said) -> Form:
    high, low, m = poly(said["high"]), poly(said["low"]), poly(said["m"])
    equation = Constraint(high * m + low, equal=True)
    if equation not in mono.domain:
        raise Refused(f"{equation} is not in the domain")
    rest = mono.domain - {equation}
    require(Constraint(m - 1 - low), facts | rest)
    require(Constraint(m - 1 + low), facts | rest)
    return (replace(mono, domain=rest | {Constraint(high, equal=True), Constraint(low, equal=True)}),)


def _count(mono: Mono, facts: Facts, said: Said) -> Form:
    binder, low, high = said["binder"], poly(said["low"]), poly(said["high"])
    binders = _without(mono, binder)
    own = frozenset(c for c in mono.domain if binder in c.poly.symbols)
    if any(binder in f.free for f in mono.factors) or binder in (low + high).symbols | (low - high).symbols:
        raise Refused(f"{binder} is mentioned")
    rest = mono.domain - own
    interval = {Constraint(symbol(binder) - low), Constraint(high - symbol(binder))}
    for c in interval - own:
        require(c, facts | mono.domain)
    for c in own - interval:
        require(c, facts | rest | interval)
    require(Constraint(high - low + 1), facts | rest)
    return times((replace(mono, binders=binders, domain=rest),), of_factor(Number(high - low + 1)))


def _number(mono: Mono, facts: Facts, said: Said) -> Form:
    factor = one_of(mono.factors, said["factor"])
    if not isinstance(factor, Number):
        raise Refused(f"{factor} is no integer")
    written = tuple(
        Mono(Fraction(c), (), frozenset(), tuple(Number(symbol(s)) for s in m)) for m, c in factor.poly.terms
    )
    return put(_dropped(mono, said["factor"]), written)


def put(mono: Mono, value: Form) -> Form:
    """Return a monomial times the value of one of its factors, which its indices may be in."""
    for m in value:
        if set(m.binders) & (mono.free | set(mono.binders)):
            raise Refused(f"{', '.join(m.binders)} would be captured")
    return tuple(
        Mono(
            mono.coefficient * m.coefficient, mono.binders + m.binders, mono.domain | m.domain, mono.factors + m.factors
        )
        for m in value
    )


def _dropped(mono: Mono, at: int) -> Mono:
    return replace(mono, factors=exchanged(mono.factors, at, ()))


def _guard(mono: Mono, facts: Facts, said: Said) -> Form:
    factor = one_of(mono.factors, said["factor"])
    if not isinstance(factor, Apply) or factor.function not in COMPARISONS:
        raise Refused(f"{factor} is no comparison")
    left, right = (a.body for a in factor.arguments)
    difference = as_poly((*left, *scaled(right, -1)))
    if difference is None:
        raise Refused(f"{factor} does not compare integers")
    holds, _ = COMPARISONS[factor.function]
    where = tuple(m for c in holds for m in summed(constant(1), (), (c(difference),)))
    return put(_dropped(mono, said["factor"]), where)


def _scalar(mono: Mono, facts: Facts, said: Said) -> Form:
    factor = one_of(mono.factors, said["factor"])
    if not isinstance(factor, Apply):
        raise Refused(f"{factor} is no function's value")
    value = SCALARS[said["axiom"]](factor, lambda c: follows(c, facts | mono.domain))
    if value == of_factor(factor):
        raise Refused(f"{said['axiom']} leaves {factor} as it is")
    return put(_dropped(mono, said["factor"]), value)


def _repeat(mono: Mono, facts: Facts, said: Said) -> Form:
    factor, other = one_of(mono.factors, said["factor"]), one_of(mono.factors, said["other"])
    alike = same_factors((factor,), (other,), facts | mono.domain)
    if said["factor"] == said["other"] or not isinstance(factor, Apply) or factor.function not in TRUTH or not alike:
        raise Refused(f"{factor} is not twice the same condition")
    return (_dropped(mono, said["factor"]),)


def _exclude(mono: Mono, facts: Facts, said: Said) -> Form:
    above, equal = one_of(mono.factors, said["above"]), one_of(mono.factors, said["equal"])
    match above, equal:
        case Apply("gt", (a, b)), Apply("gt" | "eq" as function):
            # a > b, and b > a or a = b.
            if same_factors((Apply(function, (b, a)),), (equal,), facts | mono.domain):
                return ()
        case _:
            pass
    raise Refused(f"{above} and {equal} do not exclude each other")


def _square(mono: Mono, facts: Facts, said: Said) -> Form:
    factor, other = one_of(mono.factors, said["factor"]), one_of(mono.factors, said["other"])
    alike = same_factors((factor,), (other,), facts | mono.domain)
    if said["factor"] == said["other"] or not isinstance(factor, Apply) or not alike:
        raise Refused(f"{factor} is not there twice")
    match factor:
        case Apply("abs" | "sqrt" as function, (x,)):
            square = _squared(function, x.body)
        case Apply("recip", (Scope(body=(Mono(one, (), domain, (Apply("abs" | "sqrt" as function, (x,)),)),)),)) if (
            one == 1 and not domain
        ):
            square = call("recip", _squared(function, x.body))
        case _:
            raise Refused(f"{factor} has no square")
    return put(_both_dropped(mono, said), square)


def _squared(function: str, x: Form) -> Form:
    return times(x, x) if function == "abs" else call("abs", x)


def _both_dropped(mono: Mono, said: Said) -> Mono:
    """Return a monomial without two factors."""
    first, last = sorted((said["factor"], said["other"]))
    return _dropped(_dropped(mono, last), first)


def _vanish(mono: Mono, facts: Facts, said: Said) -> Form:
    factor = one_of(mono.factors, said["factor"])
    match factor:
        case Apply("eq", (x, y)) if not (x.body and y.body):
            zero = one_product(x.body or y.body)
            if zero and not Counter(zero) - Counter(mono.factors):
                return ()
        case _:
            pass
    raise Refused(f"{factor} does not say that the rest is 0")


def _inverse(mono: Mono, facts: Facts, said: Said) -> Form:
    factor, other = one_of(mono.factors, said["factor"]), one_of(mono.factors, said["other"])
    here = facts | mono.domain
    match factor, other:
        case Apply("exp", (x,)), Apply("exp", (y,)):
            one = of_factor(Apply("", (x,))), of_factor(Apply("", (replace(y, body=scaled(y.body, -1)),)))
            inverse = same_factors(one[0][0].factors, one[1][0].factors, here)
        case _:
            inverse = False
    if not inverse or said["factor"] == said["other"]:
        raise Refused(f"{factor} is not shown to be 1 / {other}")
    return (_both_dropped(mono, said),)


MONOMIALS: Mapping[str, Callable[[Mono, Facts, Said], Form]] = {
    "domain": _domain,
    "empty": _empty,
    "split": _split,
    "pin": _pin,
    "rename": _rename,
    "fuse": _fuse,
    "unfuse": _unfuse,
    "radix": _radix,
    "count": _count,
    "number": _number,
    "guard": _guard,
    "scalar": _scalar,
    "repeat": _repeat,
    "exclude": _exclude,
    "square": _square,
    "inverse": _inverse,
    "vanish": _vanish,
}
"""Laws of monomials, by name."""

SETS = ("domain", "empty", "split", "pin", "rename", "fuse", "unfuse", "radix")
"""Those that hold for sets of values, too, of which a maximum, minimum or product is taken: each value stays one."""


def of_set(scope: Scope, law: Callable[[Mono], Form]) -> tuple[Scope, ...]:
    """Apply a law to a set of values; return the sets that have the same values together, as often."""
    found = law(_as_mono(scope))
    return tuple(Scope(m.binders, m.domain, _body(m)) for m in found)


def _as_mono(scope: Scope) -> Mono:
    """Return a monomial with the indices and domain of a set, and its values as those of an unknown function."""
    return Mono(Fraction(1), scope.binders, scope.domain, (Apply("", (Scope((), frozenset(), scope.body),)),))


def _body(mono: Mono) -> Form:
    (factor,) = mono.factors
    assert isinstance(factor, Apply)
    return factor.arguments[0].body


# --- equality up to names --------------------------------------------------------------------------------------------


def same_factors(one: Sequence[Factor], other: Sequence[Factor], facts: Facts) -> bool:
    """Return whether products have equal factors, in some order, wherever facts hold."""
    return _matched(one, other, lambda a, b: _same(a, b, facts))


def _matched(one: Sequence[Any], other: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    left = list(other)
    for a in one:
        found = next((i for i, b in enumerate(left) if same(a, b)), None)
        if found is None:
            return False
        left.pop(found)
    return not left


def _same(one: Factor, other: Factor, facts: Facts) -> bool:
    if one == other:
        return True
    match one, other:
        case Read(a, at), Read(b, to) if a == b and len(at) == len(to):
            return all(i == j or follows(Constraint(i - j, equal=True), facts) for i, j in zip(at, to, strict=True))
        case Number(a), Number(b):
            return follows(Constraint(a - b, equal=True), facts)
        case Apply(a, these), Apply(b, those) if a == b and len(these) == len(those):
            if a in ("max", "min", "prod"):
                return _matched(these, those, lambda x, y: _same_scope(x, y, facts))
            orders = (those, those[::-1]) if a in COMMUTATIVE else (those,)
            return any(all(_same_scope(x, y, facts) for x, y in zip(these, o, strict=True)) for o in orders)
        case _:
            return False


def _same_scope(one: Scope, other: Scope, facts: Facts) -> bool:
    def same(x: Mono, y: Mono, inner: Facts) -> bool:
        def matched(one: Form, other: Form) -> bool:
            return _matched(one, other, lambda m, n: same_monomial(m, n, inner))

        if matched(_body(x), _body(y)):
            return True
        left, right = (tuple(m for m in _body(of) if not impossible(inner | m.domain)) for of in (x, y))
        return (left, right) != (_body(x), _body(y)) and matched(left, right)

    return _same_bound(_as_mono(one), _as_mono(other), facts, same)


def same_domain(one: Scope, other: Scope, facts: Facts) -> bool:
    """Return whether two sets of values run over the same domain, up to the names of their binders."""
    return _same_bound(_as_mono(one), _as_mono(other), facts, lambda a, b, inner: True)


def same_monomial(one: Mono, other: Mono, facts: Facts) -> bool:
    """Return whether monomials are equal up to the names of their binders, wherever facts hold."""
    return one == other or (
        one.coefficient == other.coefficient
        and len(one.factors) == len(other.factors)
        and _same_bound(one, other, facts, lambda a, b, inner: same_factors(a.factors, b.factors, inner))
    )


def _same_bound(one: Mono, other: Mono, facts: Facts, same: Callable[[Mono, Mono, Facts], bool]) -> bool:
    """Return whether two domains are equal under some naming of binders, which are new, and then what is over them."""
    count = len(one.binders)
    if count != len(other.binders) or count > MOST_BINDERS:
        return False
    used = symbols_of(facts)
    names = [name for i in range(len(used) + count) if (name := f"@{i}") not in used][:count]
    left = rebound(one, dict(zip(one.binders, names, strict=True)))
    for order in permutations(names):
        right = rebound(other, dict(zip(other.binders, order, strict=True)))
        inner = facts | left.domain
        equal = left.domain == right.domain or (
            all(follows(c, inner) for c in right.domain) and all(follows(c, facts | right.domain) for c in left.domain)
        )
        if equal and same(left, right, inner):
            return True
    return False


def cancel(form: Form, facts: Facts, said: Said) -> Form:
    """
    Take from a form monomials that add up to 0: with binders named alike, each has the factors of the first wherever it
    is not 0, and at every point the coefficients of those whose domains hold there add up to 0.
    """
    chosen = [one_of(form, i) for i in said["these"]]
    if len(set(said["these"])) < len(chosen):
        raise Refused("a monomial cancels twice")
    first, weighted = chosen[0], list[tuple[Fraction, Facts]]()
    for mono, names in zip(chosen, said["names"], strict=True):
        renamed = rebound(mono, names)
        if set(renamed.binders) != set(first.binders) or set(first.binders) & symbols_of(facts):
            raise Refused("monomials run over other indices, or facts are known of these")
        if not same_factors(first.factors, renamed.factors, facts | renamed.domain):
            raise Refused(f"other factors: {first} and {renamed}")
        weighted.append((renamed.coefficient, renamed.domain))
    if len({d for _, d in weighted}) > 1 or sum(w for w, _ in weighted):
        held = [z3.If(z3.And([_condition(c) for c in d]), z3.Q(w.numerator, w.denominator), 0) for w, d in weighted]
        if not _unsatisfiable([z3.Sum(held) != 0, *map(_condition, sorted(facts, key=str))]):
            raise Refused(f"these do not cancel: {'; '.join(map(str, chosen[:4]))}")
    return tuple(m for i, m in enumerate(form) if i not in said["these"])
