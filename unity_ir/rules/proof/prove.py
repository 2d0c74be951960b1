"""
Proofs of substitutions, for all sizes, degrees and attributes.

Parallel operators are identities on meaning, so both sides are compared without them; that both have the same boundary
types is checked at samples. A substitution is `refuted` when some sample gives different values or no degrees above 1
fit its types, `proved` when all results are equal as forms, and `undecided` otherwise: a proof is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm
from random import Random
from time import perf_counter

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import Array, interpret
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import Attribute, Input, Operation, Pack, Substitution, Term
from unity_ir.rules.poly import Poly, number, symbol
from unity_ir.rules.proof.equal import Undecided, equal
from unity_ir.rules.proof.forms import Constraint
from unity_ir.rules.proof.lines import Lines
from unity_ir.rules.proof.sides import PACK_RANKS, degrees, ill_typed, names_function, packs, parameters, samples, sides
from unity_ir.rules.proof.solver import Facts
from unity_ir.rules.proof.tensors import Tensor, Undivided, named
from unity_ir.tdl.functions import ACTIVATIONS

SAMPLES = 6
"""Samples a substitution has to survive."""

SPLITS = 6
"""Sizes whose indices are taken apart, one after the other, before a proof is given up."""


@dataclass(frozen=True, slots=True)
class Proof:
    """`verdict` is `proved`, `refuted` or `undecided`; `detail` a counterexample or the reason."""

    verdict: str
    detail: str = ""
    seconds: float = 0.0
    questions: int = 0
    """Asked of Z3."""

    @property
    def proved(self) -> bool:
        return self.verdict == "proved"


def prove(rule: Substitution, seed: int = 0) -> Proof:
    """The verdict on a substitution."""
    begin = perf_counter()
    verdict, detail, questions = "undecided", "", 0
    try:
        counterexample = ill_typed(rule) or refute(rule, seed)
        if counterexample is not None:
            verdict, detail = "refuted", counterexample
        else:
            questions = sum(_prove_at(rule, ranks, given) for ranks in pack_ranks(rule) for given in given_names(rule))
            verdict = "proved"
    except (Undecided, Undivided, UnityError) as reason:
        detail = str(reason)
    except KeyError as reason:
        # A dim that is more than a symbol may have size 1 at the sample, where lines leave its variable out.
        detail = f"no extent is known of {reason}"
    return Proof(verdict, detail, perf_counter() - begin, questions)


# --- samples ---------------------------------------------------------------------------------------------------------


def refute(rule: Substitution, seed: int = 0) -> str | None:
    """A sample at which the sides differ, in words; None if there is none among `SAMPLES`. Raises `UnityError`."""
    for number_, bindings in enumerate(samples(rule, SAMPLES, seed)):
        leaves, source, target = sides(rule, bindings)
        random = np.random.default_rng([seed, number_])
        arrays: dict[str, Array] = {}
        for node in leaves:
            (type,) = node.types
            integers = random.integers(0, 2, type.shape) if type.is_integer else None
            arrays[node.name] = random.standard_normal(type.shape) if integers is None else integers
        values = interpret(Graph("sample", tuple(leaves), (*source, *target)), arrays, {})
        for i, (a, b) in enumerate(zip(source, target, strict=True)):
            apart = ~np.isclose(values[a], values[b], rtol=1e-7, atol=1e-9, equal_nan=True)
            if apart.any():
                at = np.unravel_index(int(np.argmax(apart)), apart.shape)
                where = ", ".join(f"{k} = {v}" for k, v in sorted(bindings.items()))
                left, right = float(values[a][at]), float(values[b][at])
                return f"at {where}: result {i} at {[int(x) for x in at]} is {left:.6g} and {right:.6g}"
    return None


# --- for all sizes ---------------------------------------------------------------------------------------------------


def pack_ranks(rule: Substitution) -> Iterator[dict[str, int]]:
    """
    So many dims of each pack as a rule is proved for. Raises `Undecided` where they do not stand for all others.

    Places of dims that are linear in the number of a pack's dims agree for all numbers when they do for these.
    """
    names = packs(rule)
    if any(sum(s.startswith("#") for s in m) > 1 for p in rule.polys for m, _ in p.terms) or any(
        s.startswith("#") for c in rule.conditions for s in c.poly.symbols
    ):
        raise Undecided("numbers of dims are multiplied, or in a condition")
    for ranks in product(PACK_RANKS, repeat=len(names)):
        yield dict(zip(names, ranks, strict=True))


def given_names(rule: Substitution) -> Iterator[dict[str, float | str]]:
    """Every choice of functions for attributes that name them, and some number for the others, which stay symbols."""
    own = parameters(rule)
    names = [p for p, of in own.items() if names_function(of)]
    numbers: dict[str, float | str] = dict.fromkeys((p for p in own if p not in names), 0.5)
    for choice in product(ACTIVATIONS, repeat=len(names)):
        yield {**numbers, **dict(zip(names, choice, strict=True))}


def _prove_at(rule: Substitution, ranks: Mapping[str, int], given: Mapping[str, float | str]) -> int:
    """Proves a rule whose packs have so many dims; returns the questions asked. Raises `Undecided`."""
    splits: dict[Poly, Poly] = {}
    sample = spelled_at(rule, ranks, given)
    for _ in range(SPLITS):
        lines = Lines(dict(sample), given, splits=splits)
        try:
            return _compare(rule, ranks, lines)
        except Undivided as need:
            size = lines.sizes.get(need.position)
            if size is None or size in splits:
                raise
            splits = {**splits, size: need.by}
    raise Undecided(f"more than {SPLITS} sizes have to be taken apart")


def spelled_at(rule: Substitution, ranks: Mapping[str, int], given: Mapping[str, float | str]) -> dict[str, int]:
    """Values of all symbols at which lines are spelled out: none 1, so that no dim is lost."""
    random = Random(1)
    last: UnityError | None = None
    symbols = sorted(s for s in rule.symbols if not s.startswith("#"))
    divided = degrees(rule)
    shapes = frozenset[str]().union(*(s.symbols for i in rule.inputs for s in i.shape if isinstance(s, Poly)))
    for attempt in range(400):
        values: dict[str, int | tuple[int, ...]] = {s: random.randint(2, 4 + attempt // 40) for s in symbols}
        if attempt % 2:
            # Sizes that degrees divide twice.
            unit = lcm(2, *(v for s, v in values.items() if s in divided and isinstance(v, int))) ** 2
            values |= {s: random.randint(1, 3) * unit for s in shapes - divided}
        values |= {p: tuple(random.randint(2, 4) for _ in range(rank)) for p, rank in ranks.items()}
        try:
            sides(rule, {**values, **given})
        except UnityError as error:
            last = error
            continue
        found = {s: v for s, v in values.items() if isinstance(v, int)}
        for p, dims in values.items():
            if isinstance(dims, tuple):
                found |= {f"{p}.{i}": size for i, size in enumerate(dims)}
                found[f"#{p}"] = len(dims)
        return found
    raise Undecided(f"it is not well typed at sizes and degrees above 1: {last}")


def _compare(rule: Substitution, ranks: Mapping[str, int], lines: Lines) -> int:
    fixed = {f"#{p}": number(rank) for p, rank in ranks.items()}
    inputs = inputs_at(rule, ranks)
    source, target = (tensors(rule, side, inputs, lines, fixed)[0] for side in (rule.source, rule.target))
    positive = [Constraint(symbol(s) - 1) for s in lines.sample if "#" not in s]
    given = [Constraint(c.poly.substitute(fixed)) for c in rule.conditions]
    questions = 0
    for left, right in zip(source, target, strict=True):
        if left.shape != right.shape:
            facts = Facts([*positive, *given, *lines.assumed])
            for a, b in zip(left.shape, right.shape, strict=True):
                if not facts.imply(Constraint(a - b, equal=True)):
                    raise Undecided(f"sizes {a} and {b} are not shown to be equal")
        position: list[Poly] = []
        within: list[Constraint] = []
        for size in left.shape:
            at, _, inside = lines.index("i", size)
            position.append(at)
            within += inside
        a, b = left.element(tuple(position)), right.element(tuple(position))
        facts = Facts([*positive, *given, *lines.assumed, *within])
        verdict = equal(a, b, facts)
        questions += facts.questions
        if not verdict.proved:
            raise Undecided(verdict.reason)
    return questions


def inputs_at(rule: Substitution, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """The inputs of a rule whose packs have so many dims."""
    inputs: dict[str, Tensor] = {}
    for i in rule.inputs:
        shape: list[Poly] = []
        for size in i.shape:
            if isinstance(size, Pack):
                shape += [symbol(f"{size.name}.{d}") for d in range(ranks[size.name])]
            else:
                shape.append(size)
        inputs[i.name] = named(i.name, tuple(shape))
    return inputs


def tensors(
    rule: Substitution, side: tuple[Term, ...], inputs: Mapping[str, Tensor], lines: Lines, fixed: Mapping[str, Poly]
) -> tuple[list[Tensor], dict[int, Sequence[Tensor]]]:
    """The results of a side, and of every operation by its id; parallel operators are left out."""
    made: dict[int, Sequence[Tensor]] = {}

    def tensor(term: Term) -> Tensor:
        return inputs[term.name] if isinstance(term, Input) else made[id(term.operation)][term.index]

    for operation in rule.operations(side):
        operands = [tensor(t) for t in operation.operands]
        made[id(operation)] = (
            operands
            if operation.op in PARALLEL_OPERATORS
            else lines.apply(operation.op, operands, _given(operation, fixed))
        )
    return [tensor(t) for t in side], made


def _given(operation: Operation, fixed: Mapping[str, Poly]) -> dict[str, Attribute]:
    def known(value: Attribute) -> Attribute:
        match value:
            case Poly():
                return value.substitute(fixed)
            case tuple():
                return tuple(p.substitute(fixed) for p in value)
            case _:
                return value

    return {name: known(value) for name, value in operation.attributes}
