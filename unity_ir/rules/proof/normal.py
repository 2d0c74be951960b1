"""
Brings forms (values of tensor elements, as sums of monomials) to a normal form, so that many equal forms become
identical.

All steps are equalities of finite sums: a binder determined by an equation is substituted; two binders that occur only
as `s*m + i` over a whole box become one binder over the product; a binder over an interval that no factor mentions
becomes a number; a sum over `index + shift` becomes one over `index`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from math import lcm
from operator import attrgetter

from unity_ir.rules.poly import ZERO, Poly, exact_quotient, symbol
from unity_ir.rules.proof.conditions import complement, condition, is_condition
from unity_ir.rules.proof.forms import (
    UNIT,
    Apply,
    Constraint,
    Extreme,
    Form,
    Mono,
    MonoFactor,
    Quantified,
    Read,
    SymbolValue,
    apply,
    as_poly,
    box,
    fresh,
    multiplied_out,
    of_poly,
    scaled,
    substitute,
    substitute_factor,
    times,
)
from unity_ir.rules.proof.lattice import extreme_of_values, pulled_out
from unity_ir.rules.proof.powers import with_powers
from unity_ir.rules.proof.scalar import simplified
from unity_ir.rules.proof.signs import CONDITIONS, nonempty
from unity_ir.rules.proof.solver import Facts

SMALL = 2**20
"""Constants up to this are small beside what 64 bits hold."""

ZERO_AT_ZERO = ("relu", "gelu", "erf", "sqrt", "tanh", "sin", "abs", "floor")
"""Functions that are 0 at 0."""


def normal(form: Form, facts: Facts) -> Form:
    """
    Return a form (a sum of monomials) in normal form, in which equal monomials are written alike and added up, using
    the constraints `facts`, which hold; monomials that cancel are left out.
    """
    found: dict[tuple[object, ...], Mono] = {}
    for mono in multiplied_out(form):
        for m in _normal(mono, facts):
            key = (m.binders, m.domain, m.factors)
            before = found.get(key)
            found[key] = m if before is None else Mono(before.coefficient + m.coefficient, *key)
    return tuple(m for m in found.values() if m.coefficient)


def _normal(mono: Mono, facts: Facts) -> Form:
    inner = facts.also(mono.domain)
    coefficient, factors, domain = mono.coefficient, list[MonoFactor](), mono.domain
    sums: list[Form] = []
    for f in mono.factors:
        if isinstance(f, Read | SymbolValue):
            position = f.indices[0].constant if isinstance(f, Read) and f.tensor == "#" else None
            if position is None:
                factors.append(f)
            else:
                # The element of the tensor of all indices at a known one is that number.
                coefficient *= position
            continue
        # A function may turn out to be a product or a sum once its arguments are in normal form.
        value = inner.normal_forms.get(f)
        if value is None:
            value = inner.normal_forms[f] = _factor(f, inner)
        if len(value) != 1 or value[0].binders:
            sums.append(value)
            continue
        (part,) = value
        if part.coefficient is not UNIT:
            coefficient *= part.coefficient
        factors += part.factors
        if part.domain:
            domain |= part.domain
    powers = with_powers(factors, inner)
    if powers is None:
        return ()
    factors, more = powers
    sums += more
    if not coefficient:
        return ()
    if sums:
        product: Form = (Mono(coefficient, mono.binders, domain, tuple(factors)),)
        for each in sums:
            product = times(product, each)
        return normal(product, facts)
    kept = tuple(_without_repeats(_without_sizes(factors, inner)))
    mono = _united(_pinned(Mono(coefficient, mono.binders, domain, kept), facts))
    facts_in_it = [c for c in mono.domain if c in facts.constraints or _is_true(c)]
    if facts_in_it:
        mono = Mono(mono.coefficient, mono.binders, mono.domain.difference(facts_in_it), mono.factors)
    if any([c.poly.constant is not None for c in mono.domain]):
        return ()
    mono = _fused(mono)
    for counted in _counted(mono, facts):
        return tuple(_named(_shifted(m)) for m in counted)
    return (_named(_shifted(mono)),)


def _is_true(c: Constraint) -> bool:
    value = c.poly.constant
    return value is not None and (value == 0 if c.equal else value >= 0)


def _factor(factor: MonoFactor, facts: Facts) -> Form:
    """
    Return the value of a factor as a form in normal form, mostly of one monomial without binders; a comparison of
    indices becomes a guard, 0 a coefficient.
    """
    match factor:
        case Apply(function, arguments):
            known = tuple(normal(a, facts) for a in arguments)
            if function in ("if", "if not"):
                return known[0] if function == "if" else normal(complement(known[0]), facts)
            if function.removesuffix("'") in ZERO_AT_ZERO and not known[0]:
                return (Mono(Fraction(0)),)
            inner = _extreme(known[0]) if function == "relu" else None
            if inner is not None and inner.parts and all(nonempty(p, facts) for p in inner.parts):
                # It is monotone; of nothing at all there is no maximum, but relu of that would be 0.
                moved = tuple(Quantified(p.binders, p.domain, apply("relu", (p.body,))) for p in inner.parts)
                return _factor(Extreme(inner.reducer, moved), facts)
            if (value := simplified(function, known, facts)) is not None:
                return normal(value, facts)
            if function.startswith("as ") and (held := _held(function, known[0])):
                return held
            guard = _comparison(function, known)
            if guard is not None:
                return (Mono(UNIT, (), frozenset({guard})),)
            if function == "gt" and _as_number(known[1]) == ZERO:
                # relu(x) > 0 is x > 0.
                known = (_under_relu(known[0]), known[1])
            value = condition(function, known, facts)
            if value is None:
                value = _one_hit(function, known)
            if value is not None:
                return normal(value, facts)
            found = apply(function, known)
            # What an exponential of a sum is a product of may have laws of its own.
            return normal(found, facts) if len(found[0].factors) > 1 else found
        case Extreme(reducer, parts):
            done = (q for p in parts for q in _extremes(reducer, p, facts))
            factor = Extreme(reducer, tuple(sorted((_named_bound(p) for p in done), key=attrgetter("text"))))
            if reducer == "prod" and len(factor.parts) > 1:
                return (Mono(UNIT, (), frozenset(), tuple(Extreme(reducer, (p,)) for p in factor.parts)),)
            for law in (pulled_out, extreme_of_values):
                if (value := law(factor, facts)) is not None:
                    return normal(value, facts)
        case _:
            pass
    return (Mono(UNIT, (), frozenset(), (factor,)),)


def _one_hit(function: str, arguments: tuple[Form, ...]) -> Form | None:
    """
    Return f of an element that an id picks as the sum that picks f of it, for f that is 0 at 0: of all positions v at
    most one equals the id. Returns None for other calls.
    """
    match arguments:
        case ((Mono(coefficient, (v,), domain, factors),),) if function.removesuffix("'") in ZERO_AT_ZERO:
            picks = next((f for f in factors if _picks(f, v)), None)
            if picks is None:
                return None
            rest = (Mono(coefficient, (), frozenset(), tuple(f for f in factors if f is not picks)),)
            picked = apply(function, (rest,))
            return tuple(Mono(m.coefficient, (v, *m.binders), m.domain | domain, (picks, *m.factors)) for m in picked)
        case _:
            return None


def _picks(factor: MonoFactor, v: str) -> bool:
    """Return whether a factor is the condition that position `v` equals a value that does not depend on it."""
    match factor:
        case Apply("eq", (a, b)):
            return any(_as_number(x) == symbol(v) and all(v not in m.free for m in y) for x, y in ((a, b), (b, a)))
        case _:
            return False


def _united(mono: Mono) -> Mono:
    """Return a monomial with one binder for two that equal the same value, which is at most one position."""
    for v in mono.binders:
        for picks in (f for f in mono.factors if isinstance(f, Apply) and _picks(f, v)):
            a, b = picks.arguments
            value = b if _as_number(a) == symbol(v) else a
            for other in mono.factors:
                place = None if other is picks else _place(other, value)
                if place is not None and v not in place.symbols:
                    one = _rewritten(mono, {v: place}, tuple(x for x in mono.binders if x != v))
                    return _united(Mono(one.coefficient, one.binders, one.domain, tuple(_without_repeats(one.factors))))
    return mono


def _place(factor: MonoFactor, value: Form) -> Poly | None:
    """Return the p of a condition that position p equals a value; None for other factors."""
    match factor:
        case Apply("eq", (a, b)) if value in (a, b):
            return _as_number(a if b == value else b)
        case _:
            return None


def _held(cast: str, form: Form) -> Form:
    """
    Return a form as the cast leaves it, if every element type holds its value; empty where nothing is known.

    That is so for conditions, and for positions and sizes, which 64 bits hold.
    """
    number = _as_number(form)
    if number is not None and (number.constant in (0, 1) or (cast in ("as f64", "as i64") and _is_small(number))):
        if number.constant is not None:
            return (Mono(Fraction(number.constant)),)
        return (Mono(UNIT, (), frozenset(), (Read("#", (number,)),)),)
    return form if is_condition(form) else ()


def _is_small(number: Poly) -> bool:
    """
    Return whether a number is one size or index, or the difference of two, up to a small constant: far below 2^53.
    """
    return all(len(m) < 2 and abs(c) <= (1 if m else SMALL) for m, c in number.terms) and len(number.terms) <= 3


def _under_relu(form: Form) -> Form:
    match form:
        case (Mono(coefficient, (), domain, (Apply("relu", (inner,)),)),) if coefficient == 1 and not domain:
            return inner
        case _:
            return form


def _without_repeats(factors: Sequence[MonoFactor]) -> list[MonoFactor]:
    """Return the factors without repeated conditions, which are 0 or 1, so that their powers are themselves."""
    out: list[MonoFactor] = []
    for f in factors:
        if not (isinstance(f, Apply) and f.function in CONDITIONS and f in out):
            out.append(f)
    return out


def _without_sizes(factors: list[MonoFactor], facts: Facts) -> list[MonoFactor]:
    """Return the factors without pairs n, recip(n) of a size or index that the facts say is at least 1."""
    out = list(factors)
    for f in factors:
        match f:
            case Apply("recip", ((Mono(coefficient, (), domain, (SymbolValue(name) as size,)),),)) if (
                coefficient == 1 and not domain and size in out and facts.imply(Constraint(symbol(name) - 1))
            ):
                out.remove(f)
                out.remove(size)
            case _:
                pass
    return out


def _extreme(form: Form) -> Extreme | None:
    """Return the maximum or minimum that a form consists of; None if it is anything else."""
    if len(form) != 1 or form[0].coefficient != 1 or form[0].binders or form[0].domain or len(form[0].factors) != 1:
        return None
    (factor,) = form[0].factors
    return factor if isinstance(factor, Extreme) and factor.reducer in ("max", "min") else None


def _extremes(reducer: str, part: Quantified, facts: Facts) -> Iterator[Quantified]:
    """
    Split the set of values `part`, of which a maximum or minimum is taken (`reducer` is `max` or `min`), into simpler
    sets that have the same values together: by constraints on which its elements depend, and where its elements are
    themselves maxima (or minima). For products (`prod`), the simpler sets have the same product. For other reducers,
    yield only `part` in normal form.

    `facts` are constraints that hold.
    """
    if reducer not in ("max", "min", "prod"):
        yield Quantified(part.binders, part.domain, normal(part.body, facts.also(part.domain)))
        return
    guard = next((c for m in part.body for c in sorted(m.domain, key=str) if _splits(c, m, part)), None)
    if guard is not None:
        for case in ((guard,), *((c,) for c in guard.negated)):
            domain = part.domain | frozenset(case)
            if not facts.contradict(domain):
                yield from _extremes(reducer, Quantified(part.binders, domain, within(part.body, domain)), facts)
        return
    body = normal(part.body, facts.also(part.domain))
    only = body[0] if len(body) == 1 and body[0].coefficient == 1 and not body[0].binders else None
    if only is not None and not only.domain and len(only.factors) == 1:
        (factor,) = only.factors
        if isinstance(factor, Extreme) and factor.reducer == reducer:
            for inner in factor.parts:
                names = {b: fresh(b) for b in inner.binders}
                values = {old: symbol(new) for old, new in names.items()}
                yield Quantified(
                    part.binders + tuple(names.values()),
                    part.domain | frozenset(c.substitute(values) for c in inner.domain),
                    substitute(inner.body, values),
                )
            return
    if reducer == "prod" and only is not None and not only.domain and len(only.factors) > 1:
        for f in only.factors:
            yield from _extremes(
                reducer, Quantified(part.binders, part.domain, ((Mono(UNIT, (), frozenset(), (f,))),)), facts
            )
        return
    yield _shifted_bound(Quantified(part.binders, part.domain, body))


def _splits(c: Constraint, mono: Mono, part: Quantified) -> bool:
    """Return whether a guard is about the binders of the part, and not decided by its domain."""
    symbols = c.poly.symbols
    about = not symbols.isdisjoint(part.binders) and symbols.isdisjoint(mono.binders)
    return about and not c.equal and c not in part.domain


def within(body: Form, domain: frozenset[Constraint]) -> Form:
    """
    Return a form without guards that are in the domain, and without monomials with a guard whose opposite is in it.
    """
    out: list[Mono] = []
    for m in body:
        if any(not c.equal and c.negated[0] in domain for c in m.domain):
            continue
        out.append(Mono(m.coefficient, m.binders, m.domain - domain, m.factors))
    return tuple(out)


def _shifted_bound(part: Quantified) -> Quantified:
    """Return the part with each binder that is in an index of the body as binder + rest replaced by that index."""
    if len(part.body) != 1:
        return part
    (mono,) = part.body
    shifted = _shifted(Mono(UNIT, part.binders, part.domain, mono.factors))
    if mono.binders or mono.domain:
        return part
    return Quantified(shifted.binders, shifted.domain, (Mono(mono.coefficient, (), frozenset(), shifted.factors),))


def _comparison(function: str, arguments: tuple[Form, ...]) -> Constraint | None:
    """
    Return the constraint that a comparison of two numbers given by sizes and indices states; None for other calls.
    """
    if function not in ("eq", "gt", "ge", "lt", "le"):
        return None
    left, right = map(_as_number, arguments)
    if left is None or right is None:
        return None
    above = left - right if function in ("eq", "gt", "ge") else right - left
    return Constraint(above - 1 if function in ("gt", "lt") else above, equal=function == "eq")


def _as_number(form: Form) -> Poly | None:
    """
    Return the polynomial that a form equals, or None; an index may be written as an element of the tensor of all
    indices.
    """
    if len(form) == 1 and not form[0].binders and not form[0].domain and form[0].coefficient == 1:
        match form[0].factors:
            case (Read("#", (index,)),):
                return index
            case _:
                pass
    return as_poly(form)


def _rewritten(mono: Mono, values: dict[str, Poly], binders: tuple[str, ...]) -> Mono:
    """Return a monomial with other binders and with symbols replaced by polynomials."""
    return Mono(
        mono.coefficient,
        binders,
        frozenset([c.substitute(values) for c in mono.domain]),
        tuple([substitute_factor(f, values) for f in mono.factors]),
    )


def _pinned(mono: Mono, facts: Facts) -> Mono:
    """Return a monomial without the binders whose value an equation gives, or two bounds that meet."""
    for c in mono.domain:
        if not c.equal and (opposite := Constraint(-c.poly)) in mono.domain:
            met = (mono.domain - {c, opposite}) | {Constraint(c.poly, equal=True)}
            return _pinned(Mono(mono.coefficient, mono.binders, met, mono.factors), facts)
    for c in mono.domain:
        if not c.equal:
            continue
        for b in mono.binders:
            rest = _rest(c.poly, b, facts)
            if rest is not None:
                return _pinned(_rewritten(mono, {b: -rest}, tuple(x for x in mono.binders if x != b)), facts)
    return mono


def _rest(poly: Poly, binder: str, facts: Facts) -> Poly | None:
    """Return the r of an equation `f * (binder + r) = 0` whose factor f is not 0; None for others."""
    factor = poly.coefficient(binder)
    if factor.constant in (1, -1):
        divided = poly if factor.constant == 1 else -poly
    elif factor.constant or facts.imply(Constraint(factor - 1)):
        divided = exact_quotient(poly, factor)
    else:
        return None
    return None if divided is None or binder in (divided - symbol(binder)).symbols else divided - symbol(binder)


def _size_of(mono: Mono, binder: str, alone: bool = True) -> Poly | None:
    """Return the n of a binder with 0 <= binder < n, or None; with `alone`, nothing else may constrain the binder."""
    own = [c for c in mono.domain if binder in c.poly.symbols]
    if Constraint(symbol(binder)) not in own or (alone and len(own) != 2):
        return None
    for c in sorted(own, key=str):
        size = c.poly + symbol(binder) + 1
        if not c.equal and binder not in size.symbols and size.symbols.isdisjoint(mono.binders):
            return size
    return None


def _positions(factor: MonoFactor, added: bool = False) -> list[Poly]:
    """
    Return every polynomial of a factor in which an index may stand. If `added`, those that are added to each other are
    one, times a constant that makes it one of integers: of `floor(i / 4 + s * m / 4) + i + s * m`, twice `i + s * m`.
    """
    match factor:
        case Read(_, indices):
            return list(indices)
        case SymbolValue(name):
            return [symbol(name)]
        case Apply(_, arguments):
            return [p for form in arguments for p in _form_positions(form, added)]
        case Extreme(_, parts):
            return [
                p
                for part in parts
                for p in (*(c.poly for c in part.domain), *(p for m in part.body for p in _mono_positions(m, added)))
            ]


def _form_positions(form: Form, added: bool) -> list[Poly]:
    """Return the polynomials of a form in which an index may stand; the form's own if it is a number."""
    number = as_poly(form)
    if number is not None:
        return [number]
    if not added:
        return [p for m in form for p in _mono_positions(m, added)]
    whole = lcm(*(m.coefficient.denominator for m in form))
    alone = [as_poly(scaled((m,), whole)) if m.is_monomial else None for m in form]
    polynomial = [p for p in alone if p is not None]
    others = [p for m, own in zip(form, alone, strict=True) if own is None for p in _mono_positions(m, added)]
    return [sum(polynomial[1:], polynomial[0]), *others] if polynomial else others


def _mono_positions(mono: Mono, added: bool) -> list[Poly]:
    return [*(c.poly for c in mono.domain), *(p for f in mono.factors for p in _positions(f, added))]


def _fused(mono: Mono) -> Mono:
    """
    Return the monomial with pairs of binders s < d and i < m that occur only as s*m + i replaced by one binder below
    d*m.
    """
    if len(mono.binders) < 2:
        return mono
    sizes = {b: _size_of(mono, b, alone=False) for b in mono.binders}
    in_factors: list[Poly] | None = None
    for i, m in sizes.items():
        if m is None:
            continue
        for s, d in sizes.items():
            if s == i or d is None:
                continue
            boxes = {*box(i, m), *box(s, d)}
            guards = [c for c in mono.domain if c not in boxes]
            if in_factors is None:
                in_factors = [p for f in mono.factors for p in _positions(f, added=True)]
            places = [p for p in (*in_factors, *(c.poly for c in guards)) if i in p.symbols or s in p.symbols]
            if not places or not all(_is_radix(p, s, i, m) for p in places):
                continue
            k = fresh("k")
            # s*m + i is k: put k for i and drop s.
            values = {i: symbol(k), s: Poly(())}
            fused = Mono(
                mono.coefficient,
                (*(b for b in mono.binders if b not in (s, i)), k),
                frozenset(c.substitute(values) for c in guards) | frozenset(box(k, d * m)),
                tuple(substitute_factor(f, values) for f in mono.factors),
            )
            return _fused(fused)
    return mono


def _is_radix(poly: Poly, s: str, i: str, m: Poly) -> bool:
    factor = poly.coefficient(i)
    linear = poly.without(i).without(s) + factor * symbol(i) + poly.coefficient(s) * symbol(s) == poly
    return linear and poly.coefficient(s) == factor * m


def _counted(mono: Mono, facts: Facts) -> list[Form]:
    """
    Return the form in which a binder over an interval that no factor mentions becomes the length of the interval.

    Returns [] if there is no such binder.
    """
    for b in mono.binders:
        if any([b in f.free for f in mono.factors]):
            continue
        rest = frozenset(c for c in mono.domain if b not in c.poly.symbols)
        size = _length(mono, b, facts)
        if size is None or not facts.imply(Constraint(size)):
            continue
        binders = tuple(x for x in mono.binders if x != b)
        found: list[Mono] = []
        for n in of_poly(size):
            found += _normal(Mono(mono.coefficient * n.coefficient, binders, rest, mono.factors + n.factors), facts)
        return [tuple(found)]
    return []


def _length(mono: Mono, binder: str, facts: Facts) -> Poly | None:
    """
    Return the length of the interval a binder runs over; of several bounds, one must be known to be the narrowest.
    """
    below: list[Poly] = []
    above: list[Poly] = []
    for c in mono.domain:
        if binder not in c.poly.symbols:
            continue
        factor, rest = c.poly.coefficient(binder).constant, c.poly.without(binder)
        if c.equal or factor not in (1, -1) or not rest.symbols.isdisjoint(mono.binders):
            return None
        if rest + symbol(binder) * factor != c.poly:
            return None
        (below if factor == 1 else above).append(rest if factor == -1 else -rest)
    low = _narrowest(below, lambda a, b: a - b, facts)
    high = _narrowest(above, lambda a, b: b - a, facts)
    return None if low is None or high is None else high - low + 1


def _narrowest(bounds: list[Poly], beyond: Callable[[Poly, Poly], Poly], facts: Facts) -> Poly | None:
    for one in bounds:
        if all(one == other or facts.imply(Constraint(beyond(one, other))) for other in bounds):
            return one
    return None


def _shifted(mono: Mono) -> Mono:
    """Return the monomial with each binder that is in some index as binder + rest replaced by that index."""
    done: set[str] = set()
    while True:
        step = _shift(mono, done)
        if step is None:
            return mono
        mono = step


def _reads(factor: MonoFactor) -> Iterator[Read]:
    """Yield the reads of a factor that no inner sum is over."""
    match factor:
        case Read():
            yield factor
        case Apply(_, arguments):
            yield from (r for form in arguments for m in form if not m.binders for f in m.factors for r in _reads(f))
        case _:
            return


def _shift(mono: Mono, done: set[str]) -> Mono | None:
    if done.issuperset(mono.binders):
        return None
    reads = sorted([r for f in mono.factors for r in _reads(f)], key=lambda f: (f.tensor, len(f.indices)))
    for f in reads:
        for index in f.indices:
            if not index.symbols.isdisjoint(done):
                continue
            for b in mono.binders:
                if b not in index.symbols:
                    continue
                factor = index.coefficient(b).constant
                if factor not in (1, -1) or b in index.without(b).symbols:
                    continue
                if index == symbol(b):
                    done.add(b)
                    break
                k = fresh("k")
                rest = index.without(b)
                value = symbol(k) - rest if factor == 1 else rest - symbol(k)
                done.add(k)
                return _rewritten(mono, {b: value}, tuple(k if x == b else x for x in mono.binders))
    return None


# --- names -----------------------------------------------------------------------------------------------------------


def _named(mono: Mono) -> Mono:
    """Return the monomial with its factors in order and its binders named by where they first occur."""
    factors, names = _ordered(mono.factors, mono.binders)
    if not names:
        return Mono(mono.coefficient, mono.binders, mono.domain, tuple(factors)) if len(factors) > 1 else mono
    values = {old: symbol(new) for old, new in names.items()}
    return Mono(
        mono.coefficient,
        tuple(sorted(names.values())),
        frozenset(c.substitute(values) for c in mono.domain),
        tuple(_in_order([substitute_factor(f, values) for f in factors])),
    )


def _in_order(factors: Iterable[MonoFactor], key: Callable[[MonoFactor], str] = attrgetter("text")) -> list[MonoFactor]:
    """Return factors sorted by their text; of a single one none is made."""
    found = list(factors)
    return sorted(found, key=key) if len(found) > 1 else found


def _named_bound(bound: Quantified) -> Quantified:
    factors = tuple(f for m in bound.body for f in m.factors)
    _, found = _ordered(factors, bound.binders)
    # Sums in the body have names of the same depth.
    names = {old: new.replace("@", "@@") for old, new in found.items()}
    values = {old: symbol(new) for old, new in names.items()}
    whole = tuple(
        Mono(
            m.coefficient,
            m.binders,
            frozenset(c.substitute(values) for c in m.domain),
            tuple(substitute_factor(f, values) for f in m.factors),
        )
        for m in bound.body
    )
    domain = frozenset(c.substitute(values) for c in bound.domain)
    return Quantified(tuple(sorted(names.values())), domain, whole)


def _ordered(factors: tuple[MonoFactor, ...], binders: tuple[str, ...]) -> tuple[list[MonoFactor], dict[str, str]]:
    """Return the factors sorted without regard to the names of binders, and new names in order of occurrence."""
    if not binders:
        return _in_order(factors), {}
    hidden = {b: symbol("_") for b in binders}
    ordered = _in_order(factors, lambda f: substitute_factor(f, hidden).text)
    seen: dict[str, None] = {}
    for f in ordered:
        for p in _positions(f):
            for m, _ in p.terms:
                seen.update(dict.fromkeys(s for s in m if s in binders))
    seen.update(dict.fromkeys(sorted(binders)))
    return ordered, {old: f"@{depth(factors)}.{i}" for i, old in enumerate(seen)}


def depth(factors: tuple[MonoFactor, ...]) -> int:
    """
    Return how deep functions, maxima and products over a domain are nested in the factors of a monomial; 0 if there are
    none. The symbols that a monomial is summed over are named by this depth, so that those of an inner sum have other
    names than those of an outer one.
    """
    return max((_factor_depth(f) for f in factors), default=0)


def _factor_depth(factor: MonoFactor) -> int:
    match factor:
        case Apply(_, arguments):
            return 1 + max((depth(m.factors) for form in arguments for m in form), default=0)
        case Extreme(_, parts):
            return 1 + max((depth(m.factors) for p in parts for m in p.body), default=0)
        case _:
            return 0
