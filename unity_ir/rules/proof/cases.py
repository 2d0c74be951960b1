"""
Splits the proof of a rewrite rule into cases: a number of dims for each pack, a value for each attribute that names a
function or element type, and element types of the inputs. In each case `tensors` applies a side's operators at symbolic
sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import lcm
from random import Random

from unity_ir.errors import UnityError
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import ELEMENTS, AttrExpr, DimPack, Input, Operation, Substitution, Term
from unity_ir.rules.poly import Poly, number, symbol
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.lines import apply_operator
from unity_ir.rules.proof.sides import DTYPES, PACK_RANKS, choices, degrees, element_types, packs, parameters, sides
from unity_ir.rules.proof.tensors import TensorForm, named


@dataclass(frozen=True)
class Case:
    """
    One case of a rule's proof. It fixes the number of dims of each pack (`a..`), the values of attributes that name a
    function or an element type, and the element types of the inputs. All sizes and numbers stay symbols; the value that
    `sample` has for each serves only to write lines out, and the proof must hold whatever it is.
    """

    ranks: Mapping[str, int]
    """The number of dims of each pack."""
    given: Mapping[str, float | str]
    """Values of attributes that a match gives: those that name something; numbers stay symbols."""
    sample: Mapping[str, int]
    """A value for every symbol, none of them 1, at which lines are spelled out (packs expanded to single dims)."""
    dtypes: Mapping[str, str] = field(default_factory=lambda: DTYPES)
    """Element types of the inputs, by name; inputs that are not in it have the first of `ELEMENTS`."""

    @property
    def fixed(self) -> dict[str, Poly]:
        """
        The number of dims of each pack (`a..`, a run of any number of dims) in this case, as a constant polynomial by
        the symbol that stands for it: `{"#a": 2}`. Attributes may contain that symbol (`attributes_at`).
        """
        return {f"#{p}": number(rank) for p, rank in self.ranks.items()}


def cases(rule: Substitution) -> Iterator[Case]:
    """
    Yield all cases in which a rule has to be proved: every choice of (1) 0 or 2 dims for each pack (`a..`, a run of any
    number of dims), (2) a value for each attribute parameter (`$act`) that names a function or an element type, and (3)
    element types of the inputs. A proof for 2 dims counts for any number from 1 on; `every_rank.check_every_rank`
    checks that it may.

    Raises `Undecided` if for some number of dims the rule is well typed in none of the cases.
    """
    for ranks in pack_ranks(rule):
        found = False
        reason: Undecided | None = None
        for given in given_names(rule):
            try:
                sample, types = sample_at(rule, ranks, given)
            except Undecided as error:
                reason = error
                continue
            found = True
            for dtypes in types:
                yield Case(ranks, given, sample, dtypes)
        if not found:
            raise reason or Undecided("it is well typed at no attributes")


def pack_ranks(rule: Substitution) -> Iterator[dict[str, int]]:
    """
    Yield the choices of a number of dims, 0 or 2, for each of a rule's packs (runs of any number of dims, `a..`), by
    the pack's name, that have to be proved; {} once for a rule without packs.

    Raises `Undecided` if a condition mentions the number of dims of a pack, since then a few numbers do not stand for
    all.
    """
    if any(s.startswith("#") for c in rule.conditions for s in c.poly.symbols):
        raise Undecided("a condition is on the number of dims of a pack")
    names = packs(rule)
    for ranks in product(PACK_RANKS, repeat=len(names)):
        yield dict(zip(names, ranks, strict=True))


def given_names(rule: Substitution) -> Iterator[dict[str, float | str]]:
    """
    Yield every choice of values for a rule's attribute parameters (`$act`), as {name of the parameter: value}. A
    parameter that names a function or an element type takes each possible name in turn. A numeric one is always 0.5, a
    sample: the proof treats it as a symbol.
    """
    named_by = {p: choices(of) for p, of in parameters(rule).items()}
    names = [p for p, values in named_by.items() if values]
    numbers: dict[str, float | str] = dict.fromkeys((p for p in named_by if p not in names), 0.5)
    for choice in product(*(named_by[p] for p in names)):
        yield {**numbers, **dict(zip(names, choice, strict=True))}


def sample_at(
    rule: Substitution, ranks: Mapping[str, int], given: Mapping[str, float | str]
) -> tuple[dict[str, int], list[Mapping[str, str]]]:
    """
    Find sizes and degrees, all above 1, at which a rule is well typed in one case of its proof; return (a value for
    each symbol, by name; the choices of element types, by input name, at which both sides are well typed).

    `ranks` has the number of dims of each pack (`a..`), by name, `given` the values of the attribute parameters. The
    pack's sizes are returned under `a.0`, `a.1`, .., their number under `#a`. Sizes of 1 are avoided since a TDL line
    bound to them loses these dims, and the proof would not hold for other sizes. Raises `Undecided` if nothing that is
    tried is well typed.
    """
    random = Random(1)
    last: UnityError | None = None
    types = list(element_types(rule))
    symbols = sorted(s for s in rule.symbols if not s.startswith("#"))
    divided = degrees(rule)
    shapes = frozenset[str]().union(*(s.symbols for i in rule.inputs for s in i.shape if isinstance(s, Poly)))
    for attempt in range(400 if len(types) == 1 else 60):
        values: dict[str, int | tuple[int, ...]] = {s: random.randint(2, 4 + attempt // 40) for s in symbols}
        if attempt % 2:
            # Sizes that degrees divide twice.
            unit = lcm(2, *(v for s, v in values.items() if s in divided and isinstance(v, int))) ** 2
            values |= {s: random.randint(1, 3) * unit for s in shapes - divided}
        values |= {p: tuple(random.randint(2, 4) for _ in range(rank)) for p, rank in ranks.items()}
        fit: list[Mapping[str, str]] = []
        for dtypes in types:
            try:
                sides(rule, {**values, **given}, dtypes)
            except UnityError as error:
                last = error
            else:
                fit.append(dtypes)
        if not fit:
            continue
        found = {s: v for s, v in values.items() if isinstance(v, int)}
        for p, dims in values.items():
            if isinstance(dims, tuple):
                found |= {f"{p}.{i}": size for i, size in enumerate(dims)}
                found[f"#{p}"] = len(dims)
        return found, fit
    raise Undecided(f"it is not well typed at sizes and degrees above 1: {last}")


def inputs_at(
    rule: Substitution, ranks: Mapping[str, int], dtypes: Mapping[str, str] = DTYPES
) -> dict[str, TensorForm]:
    """
    Return the inputs of a rule as tensors of symbolic shapes, by name. Each pack `a..` becomes `ranks[a]` dims of the
    sizes `a.0`, `a.1`, .. Element types are those in `dtypes`, by input name; an input that is not in it has the
    first of `ELEMENTS`.
    """
    inputs: dict[str, TensorForm] = {}
    for i in rule.inputs:
        shape: list[Poly] = []
        for size in i.shape:
            if isinstance(size, DimPack):
                shape += [symbol(f"{size.name}.{d}") for d in range(ranks[size.name])]
            else:
                shape.append(size)
        inputs[i.name] = named(i.name, tuple(shape), dtypes.get(i.name, ELEMENTS[i.elements][0]))
    return inputs


Made = dict[int, Sequence[TensorForm]]
"""The results of operations, by their id."""


def tensors(
    rule: Substitution,
    side: tuple[Term, ...],
    inputs: Mapping[str, TensorForm],
    context: ProofContext,
    fixed: Mapping[str, Poly],
) -> tuple[list[TensorForm], Made]:
    """
    Apply the operators of one side of a rule (source or target) to `inputs`, tensors by input name, at symbolic sizes;
    return (the side's results, in order; the results of every operation, by `id(operation)`).

    `fixed` has the number of dims of each pack `a..` by the symbol `#a` (`Case.fixed`); constraints that are assumed on
    the way are added to `context`. Parallel operators, which only divide values, are identities here. Raises
    `Undecided` for operators whose results cannot be written as sums of monomials, `UnityError` for those that do not
    apply to their operands.
    """
    made: Made = {}
    for operation in rule.operations(side):
        operands = [result_of(t, inputs, made) for t in operation.operands]
        if operation.op not in PARALLEL_OPERATORS:
            operands = apply_operator(context, operation.op, operands, attributes_at(operation, fixed))
        made[id(operation)] = operands
    return [result_of(t, inputs, made) for t in side], made


def result_of(term: Term, inputs: Mapping[str, TensorForm], made: Made) -> TensorForm:
    """
    Return the tensor of a term of a rule: from `inputs`, by name, for an input, else from `made`, which has the results
    of each operation by `id(operation)`.
    """
    return inputs[term.name] if isinstance(term, Input) else made[id(term.operation)][term.index]


def attributes_at(operation: Operation, fixed: Mapping[str, Poly]) -> dict[str, AttrExpr]:
    """
    Return the attributes of an operation in a rule, by name, with `fixed` substituted: the number of dims of each pack
    `a..`, by the symbol `#a` (`Case.fixed`). Other symbols stay.
    """

    def known(value: AttrExpr) -> AttrExpr:
        match value:
            case Poly():
                return value.substitute(fixed)
            case tuple():
                return tuple(p.substitute(fixed) for p in value)
            case _:
                return value

    return {name: known(value) for name, value in operation.attributes}
