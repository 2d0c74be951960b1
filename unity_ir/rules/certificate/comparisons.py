"""Axioms of comparisons and of propositional logic, as the checker knows them. Conditions are values of 0 or 1."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import product

from unity_ir.rules.certificate.terms import (
    PARTIAL,
    TRUTH,
    Apply,
    Axiom,
    Factor,
    Form,
    Holds,
    Mono,
    Refused,
    as_poly,
    call,
    constant,
    not_below_zero,
    of_factor,
    one_product,
    scaled,
    times,
)

MOST_CONDITIONS = 6
"""Conditions in a value all of whose combinations are gone through."""


def _two(of: Apply, function: str) -> tuple[Form, Form]:
    if of.function != function or len(of.arguments) != 2:
        raise Refused(f"{of} is no {function}")
    return of.arguments[0].body, of.arguments[1].body


def _numbers(*forms: Form) -> None:
    """Raise `Refused` unless values are numbers where the inputs are; what is none is not above, below or equal."""
    for factor in (f for form in forms for m in form for f in m.factors):
        if isinstance(factor, Apply):
            empty = all(a.binders or a.domain for a in factor.arguments)
            if factor.function in PARTIAL or (factor.function in ("max", "min") and empty):
                raise Refused(f"{factor} may be no number")
            _numbers(*(a.body for a in factor.arguments))


def complement(form: Form) -> Form:
    """Return 1 minus a form."""
    return (*constant(1), *scaled(form, -1))


def _conditions(*forms: Form) -> None:
    """Raise `Refused` unless values are 0 or 1 whatever the conditions in them are."""
    for form in forms:
        known = list(dict.fromkeys(f for m in form for f in m.factors))
        plain = all(not m.binders and not m.domain for m in form) and len(known) <= MOST_CONDITIONS
        if not plain or not all(isinstance(f, Apply) and f.function in TRUTH for f in known):
            raise Refused("no condition")
        for chosen in product((0, 1), repeat=len(known)):
            at: dict[Factor, int] = dict(zip(known, chosen, strict=True))
            if any(at[f] and at[g] and _exclusive(f, g) for f in known for g in known):
                continue
            total = sum((m.coefficient for m in form if all(at[f] for f in m.factors)), Fraction(0))
            if total not in (0, 1):
                raise Refused("no condition")


def _exclusive(one: Factor, other: Factor) -> bool:
    """Return whether two comparisons of the same two values cannot both hold: a > b, and b > a or a = b."""
    match one, other:
        case Apply("gt", (a, b)), Apply("gt" | "eq" as function, (c, d)):
            return (a, b) == (d, c) or (function == "eq" and (a, b) == (c, d))
        case _:
            return False


def _less(of: Apply, holds: Holds) -> Form:
    """a < b is b > a."""
    a, b = _two(of, "lt")
    return call("gt", b, a)


def _at_most(of: Apply, holds: Holds) -> Form:
    """a <= b is b > a or a = b."""
    a, b = _two(of, "le")
    return (*call("gt", b, a), *call("eq", a, b))


def _at_least(of: Apply, holds: Holds) -> Form:
    """a >= b is a > b or a = b."""
    a, b = _two(of, "ge")
    return (*call("gt", a, b), *call("eq", a, b))


def _unequal(of: Apply, holds: Holds) -> Form:
    """a is not b where a = b does not hold."""
    return complement(call("eq", *_two(of, "ne")))


def _above_itself(of: Apply, holds: Holds) -> Form:
    """Nothing is above itself."""
    a, b = _two(of, "gt")
    if a != b:
        raise Refused(f"{of} compares two values")
    return ()


def _itself(of: Apply, holds: Holds) -> Form:
    """A number is itself."""
    a, b = _two(of, "eq")
    if a != b:
        raise Refused(f"{of} compares two values")
    _numbers(a)
    return constant(1)


def _trichotomy(of: Apply, holds: Holds) -> Form:
    """Return a > b, of two numbers, as what is left of 1 without a < b and a = b."""
    a, b = _two(of, "gt")
    _numbers(a, b)
    return complement((*call("gt", b, a), *call("eq", a, b)))


def _of_truth(of: Apply, holds: Holds) -> Form:
    """A condition equals 1 where it holds, and 0 where not."""
    a, b = _two(of, "eq")
    _conditions(a)
    if b not in (constant(1), ()):
        raise Refused(f"{of} does not compare with 0 or 1")
    return a if b else complement(a)


def _no_product(of: Apply, holds: Holds) -> Form:
    """A product is 0 where one of its factors is, and exp(x) never."""
    a, b = _two(of, "eq")
    factors = one_product(a)
    _numbers(a)
    rest = [f for f in factors if not (isinstance(f, Apply) and f.function == "exp")]
    if b or not factors or (rest and len(factors) < 2):
        raise Refused(f"{of} is not whether a product is 0")
    found = constant(1)
    for f in rest:
        found = times(found, complement(call("eq", of_factor(f), ())))
    return () if found == constant(1) else complement(found)


def _never_below(of: Apply, holds: Holds) -> Form:
    """0 is not above what is 0 or above."""
    a, b = _two(of, "gt")
    if a or not not_below_zero(b, holds):
        raise Refused(f"{of} may hold")
    return ()


def _not(of: Apply, holds: Holds) -> Form:
    """The opposite of a condition is 1 minus it."""
    if of.function != "not":
        raise Refused(f"{of} is no not")
    _conditions(of.arguments[0].body)
    return complement(of.arguments[0].body)


def _and(of: Apply, holds: Holds) -> Form:
    """Two conditions hold together where their product is 1."""
    a, b = _two(of, "and")
    _conditions(a, b)
    return times(a, b)


def _or(of: Apply, holds: Holds) -> Form:
    """One of two conditions holds where a + b - a b is 1."""
    a, b = _two(of, "or")
    _conditions(a, b)
    return (*a, *b, *scaled(times(a, b), -1))


def _above_extreme(of: Apply, holds: Holds) -> Form:
    """A number is above a maximum if it is above all values, above a minimum if above one; so from below."""
    a, b = _two(of, "gt")
    _numbers(a, b)
    for own, other, left in ((a, b, True), (b, a, False)):
        match own:
            case (mono,) if mono.coefficient == 1 and not mono.binders and not mono.domain and len(mono.factors) == 1:
                (factor,) = mono.factors
            case _:
                continue
        if not isinstance(factor, Apply) or factor.function not in ("max", "min"):
            continue
        if any(p.binders or p.domain for p in factor.arguments):
            continue
        each = [call("gt", p.body, other) if left else call("gt", other, p.body) for p in factor.arguments]
        one = left == (factor.function == "max")
        found = constant(1)
        for condition in each:
            found = times(found, complement(condition) if one else condition)
        return complement(found) if one else found
    raise Refused(f"{of} compares with no maximum")


def _multiples(of: Apply, holds: Holds) -> Form:
    """c a > c b is a > b for c above 0; so is c a = c b."""
    if of.function not in ("gt", "eq"):
        raise Refused(f"{of} compares no multiples")
    by = next((abs(m.coefficient) for x in of.arguments for m in x.body if m.coefficient), Fraction(1))
    return call(of.function, *(scaled(x.body, 1 / by) for x in of.arguments))


def _small(of: Apply, holds: Holds) -> Form:
    """0 and 1 are the same in every element type; positions, sizes and differences of two are in those of 64 bits."""
    if not of.function.startswith(("as ", "wrapped ")):
        raise Refused(f"{of} is no cast")
    (x,) = (a.body for a in of.arguments)
    size = as_poly(x)
    if len(x) == 1 and x[0] == Mono(Fraction(1), (), x[0].domain):
        return x
    if size is None or size.constant is not None:
        _conditions(x)
    elif of.function not in WIDE or len(size.terms) > 2 or any(len(m) > 1 or abs(c) > 1 for m, c in size.terms):
        raise Refused(f"{of} may be another number")
    return x


WIDE = ("as f64", "as i64", "wrapped i64")
"""Casts that change no number below 2^53."""


COMPARED: Mapping[str, Axiom] = {
    "compared multiples": _multiples,
    "above a maximum": _above_extreme,
    "less": _less,
    "at most": _at_most,
    "at least": _at_least,
    "unequal": _unequal,
    "above itself": _above_itself,
    "equals itself": _itself,
    "trichotomy": _trichotomy,
    "equals a truth value": _of_truth,
    "product equals 0": _no_product,
    "below 0": _never_below,
    "cast of a small number": _small,
    "not": _not,
    "and": _and,
    "or": _or,
}
"""Axioms by name."""
