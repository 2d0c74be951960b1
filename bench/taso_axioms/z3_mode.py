"""
Proofs the way TASO makes them, for comparison: operators are functions of which only the axioms are known, and Z3 looks
for instances of the axioms by matching (E-matching). That each of the axioms is true is established by `proof.prove`.

TASO's functions are of tensors of any shape, and its axioms hold only because nobody applies them to shapes they were
not meant for. Here a function is named by the ranks of its operands, and an axiom asks for the sizes that it was proved
for: `dim(x, 0) = dim(y, 0)`. Every attribute is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import product
from time import perf_counter
from typing import Any

from taso_axioms.parallel import statements
from taso_axioms.taso import axioms
from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import AttrExpr, AttrParameter, Input, Operation, Substitution, Term
from unity_ir.rules.poly import Poly, number, symbol
from unity_ir.rules.proof.cases import given_names, inputs_at, pack_ranks, sample_at, tensors
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.sides import packs
from unity_ir.rules.proof.verdict import Proof
from unity_ir.tdl.syntax import AttrValue

z3: Any = import_module("z3")  # Its types are not known.

TIMEOUT = 5000
"""Milliseconds for one result of a rule, at one choice of ranks."""

QUICK = 200
"""Milliseconds for a first try with each choice of axioms: what is found at all is mostly found at once."""

MOST_RANK = 4
"""Of an input, where axioms are made for all ranks."""

ROUNDS = (1, 2)
"""Axioms are taken that are about the rule's functions; if they do not do, about the functions of those axioms, too."""


@dataclass(frozen=True, slots=True)
class _Function:
    """One result of an operator with its attributes that are no integers, on operands of these ranks."""

    op: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    integers: int
    result: int

    def __call__(self, operands: Sequence[Any], integers: Sequence[Any]) -> Any:
        name = ".".join(map(str, (self.op, *self.names, *self.ranks, self.result)))
        sorts = [_tensor_sort()] * len(self.ranks) + [z3.IntSort()] * self.integers
        return z3.Function(name, *sorts, _tensor_sort())(*operands, *integers)


@dataclass
class _Side:
    """Terms as Z3 has them: the functions that occur, and the sizes of every term."""

    functions: set[_Function] = field(default_factory=set[_Function])
    sizes: list[tuple[Any, tuple[Poly, ...]]] = field(default_factory=list[tuple[Any, tuple[Poly, ...]]])


@dataclass(frozen=True, slots=True)
class _Instance:
    """A rule at ranks: pairs of equal terms, in Z3's words, with what each side is about."""

    pairs: tuple[tuple[Any, Any], ...]
    source: _Side
    target: _Side
    inputs: tuple[tuple[Any, tuple[Poly, ...]], ...]
    symbols: Mapping[str, Any]


def _tensor_sort() -> Any:
    return z3.DeclareSort("Tensor")


def _dim(of: Any, at: Any) -> Any:
    return z3.Function("dim", _tensor_sort(), z3.IntSort(), z3.IntSort())(of, at)


def prove_by_axioms(rule: Substitution, timeout: int = TIMEOUT) -> Proof:
    """Proved if it follows from the axioms, else undecided; `questions` is the number of axioms that were given."""
    begin = perf_counter()
    most = 0
    try:
        for ranks in pack_ranks(rule):
            for given in given_names(rule):
                instance = _instance(rule, ranks, given, free=False)
                known = [_relevant(instance, rounds) for rounds in ROUNDS]
                most = max(most, *map(len, known))
                for left, right in instance.pairs:
                    tries = ((k, t) for t in (min(QUICK, timeout), timeout // len(known)) for k in known)
                    if not any(_follows(instance, k, left != right, t) for k, t in tries):
                        raise Undecided(f"{' '.join(f'Z3 does not find {left} = {right}'.split())}")
    except (Undecided, UnityError) as reason:
        return Proof("undecided", str(reason), perf_counter() - begin, most)
    return Proof("proved", "", perf_counter() - begin, most)


def _follows(instance: _Instance, known: Sequence[Any], differs: Any, timeout: int) -> bool:
    solver = z3.SimpleSolver()
    solver.set("timeout", timeout)
    solver.set("mbqi", False)
    solver.set("auto_config", False)
    solver.add(*known)
    for term, sizes in _facts(instance):
        solver.add(*(_dim(term, i) == _integer(s, instance.symbols) for i, s in enumerate(sizes)))
    solver.add(*(s >= 1 for s in instance.symbols.values()))
    solver.add(differs)
    return bool(solver.check() == z3.unsat)


def _facts(instance: _Instance) -> Iterator[tuple[Any, tuple[Poly, ...]]]:
    yield from instance.inputs
    yield from instance.source.sizes
    yield from instance.target.sizes


# --- terms -----------------------------------------------------------------------------------------------------------


def _integer(poly: Poly, symbols: Mapping[str, Any]) -> Any:
    total: Any = z3.IntVal(0)
    for m, c in poly.terms:
        term: Any = z3.IntVal(c)
        for s in m:
            term = term * (symbols[s] if s in symbols else z3.Int(s))
        total = total + term
    return z3.simplify(total)


def _instance(rule: Substitution, ranks: Mapping[str, int], given: Mapping[str, float | str], free: bool) -> _Instance:
    """A rule in Z3's words; `free` if its inputs and sizes are to be quantified."""
    kind = z3.FreshConst if free else None
    sample, _ = sample_at(rule, ranks, given)
    context = ProofContext(dict(sample), given)
    fixed = {f"#{p}": number(rank) for p, rank in ranks.items()}
    known = inputs_at(rule, ranks)
    names = [s for s in context.sample if not s.startswith("#")] + [
        p for p, v in given.items() if not isinstance(v, str)
    ]
    symbols = {s: kind(z3.IntSort(), s) if kind else z3.Int(s) for s in names}
    inputs = {
        i.name: kind(_tensor_sort(), i.name) if kind else z3.Const(f"{i.name}'", _tensor_sort()) for i in rule.inputs
    }
    attributes = {**fixed, **(_shifts(rule) if free else {})}
    halves: list[list[Any]] = []
    sides = _Side(), _Side()
    for terms, into in zip((rule.source, rule.target), sides, strict=True):
        _, made = tensors(rule, terms, known, context, fixed)
        shapes = {n: t.shape for n, t in known.items()}
        halves.append(_terms(rule, terms, into, inputs, shapes, made, symbols, attributes, given))
    where = tuple((inputs[n], t.shape) for n, t in known.items())
    return _Instance(tuple(zip(*halves, strict=True)), *sides, where, symbols)


def _shifts(rule: Substitution) -> dict[str, Poly]:
    """Paddings `f - 1` as symbols: matching knows no arithmetic."""
    used = frozenset[str]().union(*(s.symbols for i in rule.inputs for s in i.shape if isinstance(s, Poly)))
    found: dict[str, Poly] = {}
    for operation in rule.operations((*rule.source, *rule.target)):
        for _, value in operation.attributes:
            for poly in value if isinstance(value, tuple) else ():
                names = poly.symbols - used
                found |= {s: symbol(s) + 1 for s in names if poly == symbol(s) - 1}
    return found


def _terms(
    rule: Substitution,
    side: tuple[Term, ...],
    into: _Side,
    inputs: Mapping[str, Any],
    shapes: Mapping[str, tuple[Poly, ...]],
    made: Mapping[int, Sequence[Any]],
    symbols: Mapping[str, Any],
    fixed: Mapping[str, Poly],
    given: Mapping[str, float | str],
) -> list[Any]:
    found: dict[tuple[int, int], Any] = {}

    def term(of: Term) -> Any:
        return inputs[of.name] if isinstance(of, Input) else found[id(of.operation), of.index]

    def shape(of: Term) -> tuple[Poly, ...]:
        return shapes[of.name] if isinstance(of, Input) else made[id(of.operation)][of.index].shape

    for operation in rule.operations(side):
        names, integers = _attributes(operation, symbols, fixed, given)
        ranks = tuple(len(shape(t)) for t in operation.operands)
        for i, result in enumerate(made[id(operation)]):
            function = _Function(operation.op, names, ranks, len(integers), i)
            value = function([term(t) for t in operation.operands], integers)
            found[id(operation), i] = value
            into.functions.add(function)
            into.sizes.append((value, result.shape))
    return [term(t) for t in side]


def _attributes(
    operation: Operation, symbols: Mapping[str, Any], fixed: Mapping[str, Poly], given: Mapping[str, float | str]
) -> tuple[tuple[str, ...], list[Any]]:
    """An operation's attributes that are no integers, and those that are."""
    values: dict[str, AttrExpr | AttrValue] = {}
    if operation.op not in PARALLEL_OPERATORS:
        line = find_operator(operation.op).line
        values = {a.name: a.default for a in line.attributes if a.default is not None}
    values |= dict(operation.attributes)
    names, integers = list[str](), list[Any]()
    for _, value in sorted(values.items()):
        match value:
            case Poly():
                integers.append(_integer(value.substitute(fixed), symbols))
            case tuple():
                integers += [
                    _integer(p.substitute(fixed) if isinstance(p, Poly) else number(p), symbols) for p in value
                ]
            case AttrParameter(parameter) if parameter in symbols:
                integers.append(symbols[parameter])
            case AttrParameter(parameter):
                names.append(str(given[parameter]))
            case int():
                integers.append(z3.IntVal(value))
            case _:
                names.append(str(value))
    return tuple(names), integers


# --- axioms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Law:
    """An axiom at ranks; `about` are the functions of either side, of which one must be of interest."""

    about: tuple[frozenset[_Function], frozenset[_Function]]
    formulas: tuple[Any, ...]


@cache
def _laws() -> tuple[_Law, ...]:
    found: list[_Law] = []
    for axiom in (*axioms(), *statements()):
        if axiom.verdict != "proved":
            continue
        names = packs(axiom.rule)
        for dims in product(range(MOST_RANK + 1), repeat=len(names)):
            ranks = dict(zip(names, dims, strict=True))
            if any(len(t.shape) > MOST_RANK for t in inputs_at(axiom.rule, ranks).values()):
                continue
            found += [_law(_instance(axiom.rule, ranks, g, free=True)) for g in given_names(axiom.rule)]
    return tuple(found)


def _law(instance: _Instance) -> _Law:
    """For all inputs of the sizes that the axiom is about, the sides are equal."""
    asked = list(_asked(instance))
    formulas: list[Any] = []
    for left, right in instance.pairs:
        body = z3.Implies(z3.And(asked), left == right) if asked else left == right
        variables = [v for v in (*(t for t, _ in instance.inputs), *instance.symbols.values()) if _occurs(v, body)]
        formulas.append(z3.ForAll(variables, body))
    return _Law((frozenset(instance.source.functions), frozenset(instance.target.functions)), tuple(formulas))


def _asked(instance: _Instance) -> Iterator[Any]:
    """Equations of sizes: dims that are of one size, and dims whose size is an attribute."""
    first: dict[Poly, Any] = {}
    for term, sizes in instance.inputs:
        for i, size in enumerate(sizes):
            if size in first:
                yield _dim(term, i) == first[size]
            else:
                first[size] = _dim(term, i)
    for name, value in instance.symbols.items():
        if symbol(name) in first and any(_occurs(value, side) for pair in instance.pairs for side in pair):
            yield first[symbol(name)] == value


def _occurs(variable: Any, body: Any) -> bool:
    if z3.is_const(body):
        return bool(body.eq(variable))
    return any(_occurs(variable, child) for child in body.children())


def _relevant(instance: _Instance, rounds: int) -> list[Any]:
    """The axioms about functions that occur, and what is known of the sizes of their results."""
    functions = frozenset(instance.source.functions | instance.target.functions)
    taken: list[_Law] = []
    for _ in range(rounds):
        taken = [law for law in _laws() if any(side and side <= functions for side in law.about)]
        functions = functions.union(*(side for law in taken for side in law.about))
    return [f for law in taken for f in law.formulas] + [f for one in functions for f in _sizes(one)]


ALIKE = ("relu", "exp", "softmax", "gelu", *PARALLEL_OPERATORS)
"""Operators whose result has the sizes of their operand."""


def _sizes(function: _Function) -> Iterator[Any]:
    """The sizes of a function's results, where they are simple enough to be said."""
    operands = [z3.FreshConst(_tensor_sort(), "x") for _ in function.ranks]
    integers = [z3.FreshConst(z3.IntSort(), "a") for _ in range(function.integers)]
    of = function(operands, integers)
    asked: list[Any] = []
    match function.op, operands, function.ranks:
        case op, [x], [rank] if op in ALIKE:
            sizes = [_dim(x, i) for i in range(rank)]
        case "add" | "mul", [x, y], [rank, other] if rank >= other:
            sizes = [_dim(x, i) for i in range(rank)]
            asked = [_dim(y, i) == sizes[rank - other + i] for i in range(other)]
        case "matmul", [x, w], [rank, 2]:
            sizes = [*(_dim(x, i) for i in range(rank - 1)), _dim(w, 1)]
        case "transpose", [x], [_]:
            sizes = [_dim(x, i) for i in integers]
        case "concat", [x, y], [rank, _]:
            sizes = [_dim(x, i) + z3.If(integers[0] == i, _dim(y, i), 0) for i in range(rank)]
        case _:
            return
    for i, size in enumerate(sizes):
        says = _dim(of, i) == size
        yield z3.ForAll([*operands, *integers], z3.Implies(z3.And(asked), says) if asked else says, patterns=[of])
