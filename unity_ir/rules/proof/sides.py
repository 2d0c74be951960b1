"""
A substitution at bindings: where both its sides are well typed, and whether they ever are.

A rule holds wherever its sizes fit, so sizes that do not fit say nothing about it. But a rule that is not well typed at
any degrees above 1, or whose sides never have the same types, is no substitution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from math import lcm
from random import Random

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.graph import Node, Value, leaf
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import (
    Bindings,
    Input,
    Operation,
    Pack,
    Parameter,
    Result,
    Substitution,
    Term,
    build,
    input_type,
)
from unity_ir.rules.poly import ONE, Poly
from unity_ir.tdl.functions import ACTIVATIONS

PACK_RANKS = (0, 1, 2)
"""Dims of a pack for which a substitution is proved; lines treat all dims of a pack alike."""

TYPED = 120
"""Bindings with degrees above 1 that are tried before a rule is called ill-typed, and without degrees."""

APART = "its sides are of types"


def packs(rule: Substitution) -> list[str]:
    """The packs of a rule."""
    return sorted({s.name for i in rule.inputs for s in i.shape if isinstance(s, Pack)})


def parameters(rule: Substitution) -> dict[str, str]:
    """The attributes the match gives, and an operator's attribute each is."""
    found: dict[str, str] = {}
    for operation in rule.operations((*rule.source, *rule.target)):
        for name, value in operation.attributes:
            if isinstance(value, Parameter):
                found.setdefault(value.name, f"{operation.op}.{name}")
    return found


def samples(rule: Substitution, most: int, seed: int = 0) -> Iterator[Bindings]:
    """Bindings at which both sides are well typed, sizes small and mostly unequal."""
    found = 0
    last: UnityError | None = None
    for bindings in islice(_small(rule, seed), 400):
        try:
            sides(rule, bindings)
        except UnityError as error:
            last = error
            continue
        yield bindings
        found += 1
        if found == most:
            return
    if not found:
        raise UnityError(f"rule {rule.name}: no small sizes fit both sides ({last})")


def _small(rule: Substitution, seed: int) -> Iterator[Bindings]:
    random = Random(seed)
    symbols = sorted(s for s in rule.symbols if not s.startswith("#"))
    for attempt in count():
        largest = 3 + attempt // 40
        found: dict[str, int | float | str | tuple[int, ...]] = {s: random.randint(1, largest) for s in symbols}
        found |= {p: tuple(random.randint(1, 3) for _ in range(random.choice(PACK_RANKS))) for p in packs(rule)}
        found |= {p: _attribute(of, random) for p, of in parameters(rule).items()}
        yield found


def names_function(of: str) -> bool:
    """Whether an operator's attribute names a function."""
    operator, _, name = of.partition(".")
    return any(a.name == name and a.kind == "name" for a in find_operator(operator).line.attributes)


def _attribute(of: str, random: Random) -> float | str:
    return random.choice(ACTIVATIONS) if names_function(of) else random.choice([0.5, 1.5, 2.0])


def sides(rule: Substitution, bindings: Bindings) -> tuple[list[Node], tuple[Value, ...], tuple[Value, ...]]:
    """The inputs and both sides at bindings. Raises `UnityError` where they are not well typed or differ in type."""
    for condition in rule.conditions:
        values = {s: v for s, v in bindings.items() if isinstance(v, int)}
        values |= {f"#{s}": len(v) for s, v in bindings.items() if isinstance(v, tuple)}
        if condition.poly.at(values) < 0:
            raise UnityError(f"rule {rule.name}: {condition.poly} >= 0 does not hold")
    leaves = [leaf("input", input_type(i, "i64" if i.integer else "f64", bindings), name=i.name) for i in rule.inputs]
    inputs = {n.name: n.result for n in leaves}
    source, target = build(rule.source, inputs, bindings), build(rule.target, inputs, bindings)
    for a, b in zip(source, target, strict=True):
        if a.type != b.type:
            raise UnityError(f"rule {rule.name}: {APART} {a.type} and {b.type}")
    return leaves, source, target


# --- types -----------------------------------------------------------------------------------------------------------


def degrees(rule: Substitution) -> frozenset[str]:
    """The symbols that are degrees: of inputs, or of parallel operators."""
    found: list[Poly] = [p for i in rule.inputs for p in (*i.degrees, i.sum, i.copy)]
    for operation in rule.operations((*rule.source, *rule.target)):
        if operation.op in PARALLEL_OPERATORS:
            found += [v for n, v in operation.attributes if n == "by" and isinstance(v, Poly)]
    return frozenset[str]().union(*(p.symbols for p in found))


def ill_typed(rule: Substitution) -> str | None:
    """
    Why a rule is not well typed at any degrees above 1, in words; None if it is at some.

    So is one whose sides differ in shape wherever each of them has one. Raises `UnityError` where even the serial form
    of the rule fits no sizes that were tried: then nothing is known.
    """
    error = misfits(rule, islice(divisible(rule), TYPED))
    if not error:
        return None
    serial = erased(rule)
    others = misfits(serial, islice(_small(serial, 0), TYPED))
    if not others:
        # The sizes fit as long as nothing is divided: what does not fit is the degrees.
        return f"ill-typed: {error[0]}"
    apart = [e for e in others if APART in e]
    if apart:
        return f"ill-typed: {apart[0]}"
    raise UnityError(f"rule {rule.name}: no small sizes fit both sides ({others[-1]})")


def misfits(rule: Substitution, tried: Iterable[Bindings]) -> list[str]:
    """The errors at bindings; none if at some of them there is none."""
    found: list[str] = []
    for bindings in tried:
        try:
            sides(rule, bindings)
        except UnityError as error:
            found.append(str(error))
        else:
            return []
    return found


def divisible(rule: Substitution) -> Iterator[Bindings]:
    """Bindings with degrees above 1; in every second one they divide all sizes."""
    random = Random(2)
    divided = degrees(rule)
    symbols = sorted(s for s in rule.symbols if not s.startswith("#"))
    shapes = frozenset[str]().union(*(s.symbols for i in rule.inputs for s in i.shape if isinstance(s, Poly)))
    for attempt in count():
        found: dict[str, int | float | str | tuple[int, ...]] = {s: random.choice((2, 3)) for s in divided}
        unit = lcm(*(v for v in found.values() if isinstance(v, int)), 2) ** 2 if attempt % 2 == 0 else 1
        for s in symbols:
            if s not in divided:
                found[s] = random.randint(1, 3) * (unit if s in shapes else 1)
        found |= {p: (unit * 2,) * random.choice(PACK_RANKS) for p in packs(rule)}
        found |= {p: _attribute(of, random) for p, of in parameters(rule).items()}
        yield found


def erased(rule: Substitution) -> Substitution:
    """The rule without parallel operators and degrees."""
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
        return Result(made[key], of.index)

    source, target = tuple(map(term, rule.source)), tuple(map(term, rule.target))
    return Substitution(rule.name, tuple(inputs.values()), source, target, rule.conditions, rule.exact)
