"""
Finds sizes and degrees at which both sides of a substitution (rewrite rule) are well typed, and checks that there are
some.

Sizes that do not fit say nothing about a rule. But a rule that is well typed at no degrees above 1, or whose sides
never have the same types, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice, product
from math import lcm
from random import Random
from typing import TypeAlias

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.node import Node, Value, leaf
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import (
    ELEMENTS,
    AttrParameter,
    Bindings,
    DimPack,
    Input,
    Operation,
    ResultOf,
    Substitution,
    Term,
    build,
    input_type,
)
from unity_ir.rules.poly import ONE, Poly
from unity_ir.tdl.functions import ACTIVATIONS
from unity_ir.tdl.functions import DTYPES as ELEMENT_TYPES

PACK_RANKS = (0, 2)
"""
Dims of a pack for which a substitution is proved. `every_rank` shows that they stand for all others: 1 is 2 of which
one has size 1, and any more are treated as those.
"""

SAMPLED_RANKS = (0, 1, 1, 2, 2, 3, 4)
"""Dims of a pack at samples, the more often the likelier."""

NUMBERS = (0.5, 1.5, 2.0, -1.0, 0.0, -0.25, 3.0, 1.0)
"""Values at samples of attributes that are any number."""

LARGE = 300
"""A size that rules with casts are tried at."""

MOST_OF_TWO_LARGE = 4
"""Symbols of a rule up to which two of them are large at once."""

DTYPES: Mapping[str, str] = {}
"""Element types of inputs by name; those that are not there are the first of `ELEMENTS`."""

MOST_CAST = 3
"""Inputs of a rule that casts, at most: all their element types are gone through."""

TYPED = 120
"""Bindings with degrees above 1 that are tried before a rule is called ill-typed, and without degrees."""

APART = "its sides are of types"


def packs(rule: Substitution) -> list[str]:
    """Return the names of the packs in a rule's inputs, sorted: `a` for `a..`, which stands for any number of dims."""
    return sorted({s.name for i in rule.inputs for s in i.shape if isinstance(s, DimPack)})


def parameters(rule: Substitution) -> dict[str, str]:
    """
    Return, for each attribute parameter of a rule (`$act`: an attribute whose value a match gives), an attribute for
    which it is written, as `operator.attribute`, by the parameter's name: `{"act": "matmul.act"}`. If it is written for
    several, the first.
    """
    found: dict[str, str] = {}
    for operation in rule.operations((*rule.source, *rule.target)):
        for name, value in operation.attributes:
            if isinstance(value, AttrParameter):
                found.setdefault(value.name, f"{operation.op}.{name}")
    return found


def samples(rule: Substitution, most: int, seed: int = 0) -> Iterator[Bindings]:
    """
    Yield at most `most` choices of values for a rule's symbols, by name, at which both sides are well typed: random
    sizes, mostly small.

    `seed` is that of the random sizes. Raises `UnityError` if none of 400 choices tried is well typed.
    """
    yield from (bindings for bindings, _ in typed_samples(rule, most, seed))


def typed_samples(rule: Substitution, most: int, seed: int = 0) -> Iterator[tuple[Bindings, Sides]]:
    """
    Yield at most `most` pairs (values for a rule's symbols, by name; both sides as graphs) at which both sides are well
    typed, for some choice of element types.

    `seed` is that of the random sizes. Raises `UnityError` if none of 400 choices tried is well typed.
    """
    found = 0
    last: UnityError | None = None
    dtypes = list(element_types(rule))
    for attempt, bindings in enumerate(islice(_small(rule, seed), 400)):
        start = attempt * 7 % len(dtypes)
        for chosen in (*dtypes[start:], *dtypes[:start]):
            try:
                built = sides(rule, bindings, chosen)
            except UnityError as error:
                last = error
                continue
            yield bindings, built
            found += 1
            break
        if found == most:
            return
    if not found:
        raise UnityError(f"rule {rule.name}: no small sizes fit both sides ({last})")


def _small(rule: Substitution, seed: int) -> Iterator[Bindings]:
    random = Random(seed)
    symbols = sorted(s for s in rule.symbols if not s.startswith("#"))
    casts = converts(rule)
    named, given = packs(rule), parameters(rule)
    for attempt in count():
        largest = 3 + attempt // 40
        found: dict[str, int | float | str | tuple[int, ...]] = {s: random.randint(1, largest) for s in symbols}
        ranks = {p: random.choice(SAMPLED_RANKS) for p in named}
        found |= {p: tuple(random.randint(1, 3 if rank < 3 else 2) for _ in range(rank)) for p, rank in ranks.items()}
        found |= {p: _attribute(of, random) for p, of in given.items()}
        if casts and symbols and attempt % 2:
            # So that ids reach beyond what bfloat16 holds; two sizes of many would take seconds to evaluate.
            for i in range(2 if len(symbols) <= MOST_OF_TWO_LARGE else 1):
                found[symbols[(attempt // 2 + i) % len(symbols)]] = LARGE
        yield found


def choices(of: str) -> tuple[str, ...]:
    """
    Return all values that an attribute may have, if it names a function or an element type; () if it is a number. `of`
    names it as `operator.attribute`, such as `matmul.act`.
    """
    operator, _, name = of.partition(".")
    kinds = {a.name: a.kind for a in find_operator(operator).line.attributes}
    return {"name": ACTIVATIONS, "dtype": ELEMENT_TYPES}.get(kinds[name], ())


def _attribute(of: str, random: Random) -> float | str:
    return random.choice(choices(of) or NUMBERS)


def converts(rule: Substitution) -> bool:
    """
    Return whether an operator of the rule has an element type as an attribute (a cast), so that the inputs' element
    types matter.
    """
    ops = {o.op for o in rule.operations((*rule.source, *rule.target))} - PARALLEL_OPERATORS.keys()
    return any(a.kind == "dtype" for op in ops for a in find_operator(op).line.attributes)


def element_types(rule: Substitution) -> Iterator[Mapping[str, str]]:
    """
    Yield choices of element types for a rule's inputs, by name; at some the rule may not be well typed.

    They are all choices that a match allows if an operator of the rule casts, else only one, since lines treat all
    floating point types alike. Raises `UnityError` for casts of more than `MOST_CAST` inputs.
    """
    if not converts(rule):
        yield DTYPES
        return
    names = [i.name for i in rule.inputs]
    if len(names) > MOST_CAST:
        raise UnityError(f"rule {rule.name}: casts of more than {MOST_CAST} inputs are not looked into")
    for found in product(*(ELEMENTS[i.elements] for i in rule.inputs)):
        yield dict(zip(names, found, strict=True))


Sides: TypeAlias = tuple[list[Node], tuple[Value, ...], tuple[Value, ...]]
"""A rule as graphs: the input leaves, the source's results, the target's results."""


def sides(rule: Substitution, bindings: Bindings, dtypes: Mapping[str, str] = DTYPES) -> Sides:
    """
    Build both sides of a rule as graphs; return (the input leaves, the source's results, the target's results).

    `bindings` has values for the rule's symbols and `dtypes` element types for its inputs, both by name. Raises
    `UnityError` where a side is not well typed or their types differ.
    """
    for condition in rule.conditions:
        values = {s: v for s, v in bindings.items() if isinstance(v, int)}
        values |= {f"#{s}": len(v) for s, v in bindings.items() if isinstance(v, tuple)}
        if condition.poly.at(values) < 0:
            raise UnityError(f"rule {rule.name}: {condition.poly} >= 0 does not hold")
    found = {i.name: dtypes.get(i.name, ELEMENTS[i.elements][0]) for i in rule.inputs}
    leaves = [leaf("input", input_type(i, found[i.name], bindings), name=i.name) for i in rule.inputs]
    inputs = {n.name: n.result for n in leaves}
    source, target = build(rule.source, inputs, bindings), build(rule.target, inputs, bindings)
    for a, b in zip(source, target, strict=True):
        if a.type != b.type:
            raise UnityError(f"rule {rule.name}: {APART} {a.type} and {b.type}")
    return leaves, source, target


# --- types -----------------------------------------------------------------------------------------------------------


def degrees(rule: Substitution) -> frozenset[str]:
    """
    Return the names of the symbols of a rule that are degrees of parallelism: of its inputs' dims, of their partial
    sums or copies, or of parallel operators.
    """
    found: list[Poly] = [p for i in rule.inputs for p in (*i.degrees, i.sum, i.copy)]
    for operation in rule.operations((*rule.source, *rule.target)):
        if operation.op in PARALLEL_OPERATORS:
            found += [v for n, v in operation.attributes if n == "by" and isinstance(v, Poly)]
    return frozenset[str]().union(*(p.symbols for p in found))


def ill_typed(rule: Substitution) -> str | None:
    """
    Return the type error, as text, of a rule that is well typed at none of the choices of degrees above 1 that are
    tried; None if it is well typed at one of them.

    A rule whose sides always differ in shape is ill typed, too. Raises `UnityError` if not even the rule without its
    parallel operators is well typed at the sizes tried.
    """
    error = misfits(rule, islice(divisible(rule), TYPED))
    if not error:
        return None
    serial = _erased(rule)
    others = misfits(serial, islice(_small(serial, 0), TYPED))
    if not others:
        # The sizes fit as long as nothing is divided: what does not fit is the degrees.
        return f"ill-typed: {error[0]}"
    apart = [e for e in others if APART in e]
    if apart:
        return f"ill-typed: {apart[0]}"
    raise UnityError(f"rule {rule.name}: no small sizes fit both sides ({others[-1]})")


def misfits(rule: Substitution, tried: Iterable[Bindings]) -> list[str]:
    """
    Try a rule at each choice of values for its symbols (by name) in `tried`, with each choice of its inputs' element
    types; return the type errors of all, as text, or [] if both sides are well typed at one of them.
    """
    found: list[str] = []
    types = list(element_types(rule))
    for bindings in tried:
        for dtypes in types:
            try:
                sides(rule, bindings, dtypes)
            except UnityError as error:
                found.append(str(error))
            else:
                return []
    return found


def divisible(rule: Substitution) -> Iterator[Bindings]:
    """
    Yield random choices of values for a rule's symbols, packs and attribute parameters, by name, without end. At these,
    `misfits` tries whether a rule that divides tensors is well typed. Degrees are 2 or 3. In every second choice, from
    the first on, sizes are multiples of all degrees.
    """
    random = Random(2)
    divided = degrees(rule)
    symbols = sorted(s for s in rule.symbols if not s.startswith("#"))
    shapes = frozenset[str]().union(*(s.symbols for i in rule.inputs for s in i.shape if isinstance(s, Poly)))
    named, given = packs(rule), parameters(rule)
    for attempt in count():
        found: dict[str, int | float | str | tuple[int, ...]] = {s: random.choice((2, 3)) for s in divided}
        unit = lcm(*(v for v in found.values() if isinstance(v, int)), 2) ** 2 if attempt % 2 == 0 else 1
        for s in symbols:
            if s not in divided:
                found[s] = random.randint(1, 3) * (unit if s in shapes else 1)
        found |= {p: (unit * 2,) * random.choice(SAMPLED_RANKS[:5]) for p in named}
        found |= {p: _attribute(of, random) for p, of in given.items()}
        yield found


def _erased(rule: Substitution) -> Substitution:
    """Return the rule without parallel operators, and with all degrees 1: its serial form."""
    inputs = {i.name: replace(i, degrees=(), sum=ONE, copy=ONE) for i in rule.inputs}
    made: dict[int, Operation] = {}

    def term(of: Term) -> Term:
        if isinstance(of, Input):
            return inputs[of.name]
        operation = of.operation
        if operation.op in PARALLEL_OPERATORS:
            return term(operation.operands[0])
        key = id(operation)
        if key not in made:
            made[key] = Operation(operation.op, tuple(map(term, operation.operands)), operation.attributes)
        return ResultOf(made[key], of.index)

    source, target = tuple(map(term, rule.source)), tuple(map(term, rule.target))
    return Substitution(rule.name, tuple(inputs.values()), source, target, rule.conditions, rule.exact)
