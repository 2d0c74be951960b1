"""
Proves what parallelizing an operator rests on (its proof obligations), from its TDL line alone.

Such a rule divides an index variable v into d pieces of size m, or takes operands as addends. It is right if

- each task reads, and writes, within its piece and halo of every dim v indexes: positions at v = p*m + i;
- a sum over v is the sum over p of the sums over the pieces: what a reduce adds up;
- the line is linear in the operands that are addends together: the line of a sum is the sum of the lines.

`tdl.divisibility` decides which variables and operands may be divided; none of its code is used here but that decision.
Gradients are operators with lines of their own, so their obligations are proved like all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Operator
from unity_ir.rules.pattern import AttrExpr
from unity_ir.rules.poly import ONE, ZERO, Poly, number, product, symbol
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.dims import number_of
from unity_ir.rules.proof.equal import Undecided, equal
from unity_ir.rules.proof.forms import UNIT, Constraint, Mono, Read, box, summed
from unity_ir.rules.proof.lines import line_results
from unity_ir.rules.proof.samples import sample
from unity_ir.rules.proof.solver import Facts
from unity_ir.rules.proof.symbolic_line import SymbolicLine
from unity_ir.rules.proof.tensors import ElementPosition, TensorForm, Undivided, named
from unity_ir.rules.proof.verdict import Proof
from unity_ir.tdl.bind import Spelled, spell
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import (
    Affine,
    AttrValue,
    Composite,
    Entry,
    Result,
    Segments,
    Var,
    WrittenIndex,
    accesses,
    joined_extent,
    joined_position,
)

DEGREE, PIECE, TASK = "degree", "piece", "task"
"""Symbols: the pieces of a variable, the size of each, and which of them a task has."""


@dataclass(frozen=True, slots=True)
class Obligation:
    """
    One statement that parallelizing an operator rests on, and its proof. `about` is `reads of v`, `sum over v` or
    `addends of x, y`.
    """

    operator: str
    about: str
    proof: Proof


def obligations(operator: Operator) -> Iterator[Obligation]:
    """
    Try to prove, for all sizes, every statement that makes it right to parallelize an operator (its proof obligations);
    yield each with its verdict.

    These are: tasks read only their shard and its halo of each dim; a sum over a sharded index variable is the sum of
    the shards' sums; the operator is linear in operands that may be held as partial sums.
    """
    shapes, given = sample(operator)
    analysis = operator.bind(shapes, operator.attributes(given))
    for variable in analysis.splittable:
        if analysis.bound.extents[variable] > 1:
            yield _timed(operator, f"reads of {variable}", lambda v=variable: _reads(operator, v))
            if any(variable not in dims for dims in analysis.result_dims):
                yield _timed(operator, f"sum over {variable}", lambda v=variable: _sums(operator, v))
    for carriers in analysis.carriers:
        about = f"addends of {', '.join(sorted(carriers))}"
        yield _timed(operator, about, lambda c=carriers: _addends(operator, analysis, c))


def _timed(operator: Operator, about: str, check: object) -> Obligation:
    begin = perf_counter()
    try:
        assert callable(check)
        check()
        proof = Proof("proved", "", perf_counter() - begin)
    except (Undecided, Undivided, UnityError) as reason:
        proof = Proof("undecided", str(reason), perf_counter() - begin)
    return Obligation(operator.name, about, proof)


# --- an operator at symbolic sizes -----------------------------------------------------------------------------------


@dataclass
class _Symbolic:
    """An operator whose index variables have symbols for extents; `divided` is degree * piece."""

    spelled: Spelled
    context: ProofContext
    extents: dict[str, Poly]
    shapes: dict[str, tuple[Poly, ...]]
    attributes: dict[str, AttrExpr]


def _spelled(operator: Operator) -> tuple[Spelled, tuple[tuple[int, ...], ...], Mapping[str, AttrValue]]:
    """Return an operator's line at its sample, with the shapes and attributes of the sample."""
    shapes, given = sample(operator)
    values = dict(operator.attributes(given))
    if isinstance(operator.tdl, str):
        return spell(operator.line, shapes, values), shapes, values
    return spell(parse_line(operator.tdl(shapes, values)), shapes, {}), shapes, {}


def _classes(spelled: Spelled) -> dict[str, str]:
    """
    Return, for every variable, the first variable that indexes the same dim of some operand, and so has the same
    extent.
    """
    first: dict[str, str] = {}
    places: dict[tuple[str, int], str] = {}

    def root(name: str) -> str:
        while first.get(name, name) != name:
            name = first[name]
        return name

    for result in spelled.bound.results:
        for access in accesses(result.expr):
            for dim, index in enumerate(access.indices):
                if isinstance(index, Var):
                    first[root(index.name)] = root(places.setdefault((access.tensor, dim), index.name))
    return {name: root(name) for name in spelled.bound.extents}


def _symbolic(operator: Operator, divided: str | None = None) -> _Symbolic:
    spelled, shapes, values = _spelled(operator)
    classes = _classes(spelled)
    if divided is not None and isinstance(spelled.sizes.get(divided), int):
        spelled = replace(spelled, sizes={v: of for v, of in spelled.sizes.items() if v != divided})
    numbers: dict[str, int] = {}
    extents: dict[str, Poly] = {}
    for name, size in spelled.bound.extents.items():
        if divided is not None and classes[name] == classes[divided]:
            extents[name] = symbol(DEGREE) * symbol(PIECE)
            numbers |= {DEGREE: 2, PIECE: size // 2}
        elif size == 1 or isinstance(spelled.sizes.get(name), int):
            extents[name] = number(size)
        else:
            extents[name] = symbol(classes[name])
            numbers[classes[name]] = size
    attributes = _attributes(spelled, values, extents, numbers)
    # Of addends, each is cast by itself: how that rounds is policy, not part of what divides the operator.
    context = ProofContext(numbers, rounds=False)
    shape_of = {p.name: s for p, s in zip(spelled.bound.operands, shapes, strict=True)}
    found: dict[str, tuple[Poly, ...]] = {}
    for result in spelled.bound.results:
        for access in accesses(result.expr):
            dims = tuple(
                _size(i, f"{access.tensor}.{d}", extents, attributes, divided, numbers, size)
                for d, (i, size) in enumerate(zip(access.indices, shape_of[access.tensor], strict=True))
            )
            have = found.setdefault(access.tensor, dims)
            # A dim that is read in two ways has the size that an index alone says.
            found[access.tensor] = tuple(
                a if isinstance(i, Var) is False and "." not in str(a) else b
                for a, b, i in zip(have, dims, access.indices, strict=True)
            )
    return _Symbolic(spelled, context, extents, found, attributes)


def _attributes(
    spelled: Spelled, values: Mapping[str, AttrValue], extents: Mapping[str, Poly], numbers: dict[str, int]
) -> dict[str, AttrExpr]:
    """
    Return the attributes: extents for those that give extents, symbols for those in windows, the sample's values for
    others.
    """
    found: dict[str, AttrExpr] = {}
    sized: dict[tuple[str, int | None], Poly] = {}
    for variable, of in spelled.sizes.items():
        if isinstance(of, Entry):
            sized[of.attribute, of.at] = extents[variable]
    for name, value in values.items():
        if isinstance(value, tuple):
            entries: list[Poly] = []
            for i, entry in enumerate(value):
                own = sized.get((name, i))
                if own is None and _in_windows(spelled, name):
                    own = symbol(f"{name}.{i}")
                    numbers[f"{name}.{i}"] = entry
                entries.append(own if own is not None else number(entry))
            found[name] = tuple(entries)
        elif isinstance(value, int):
            found[name] = sized.get((name, None), number(value))
        else:
            found[name] = value
    return found


def _in_windows(spelled: Spelled, attribute: str) -> bool:
    indices = (
        i for r in spelled.bound.results for i in (*r.indices, *(i for a in accesses(r.expr) for i in a.indices))
    )
    return any(
        isinstance(i, Affine) and any(isinstance(t.factor, Entry) and t.factor.attribute == attribute for t in i.terms)
        for i in indices
    ) or any(isinstance(of, Entry) and of.attribute == attribute for of in spelled.windows.values())


def _size(
    index: WrittenIndex,
    name: str,
    extents: Mapping[str, Poly],
    attributes: Mapping[str, AttrExpr],
    divided: str | None,
    numbers: dict[str, int],
    sample_size: int,
) -> Poly:
    if not isinstance(index, Affine):
        return joined_extent(index, extents)
    # The steps of the outermost variable fill the dim where it is divided; else its size is its own.
    first = index.terms[0]
    if first.variable == divided and divided is not None:
        return number_of(first.factor, attributes) * extents[divided]
    numbers.setdefault(name, sample_size)
    return symbol(name)


# --- the three obligations -------------------------------------------------------------------------------------------


def _facts(it: _Symbolic, *more: Constraint) -> Facts:
    positive = [Constraint(symbol(s) - 1) for s in it.context.sample if not s.startswith("padding") and "#" not in s]
    padding = [Constraint(symbol(s)) for s in it.context.sample if s.startswith("padding")]
    return Facts([*positive, *padding, *it.context.assumed, *more])


def _reads(operator: Operator, variable: str) -> None:
    """
    Check that every dim the variable indexes is read, and written, within the task's piece and halo. Raises
    `Undecided`.
    """
    it = _symbolic(operator, variable)
    local, task = symbol("local"), symbol(TASK)
    inside = [*box("local", symbol(PIECE)), *box(TASK, symbol(DEGREE))]
    for result in it.spelled.bound.results:
        places = [(result.name, i) for i in result.indices]
        places += [(a.tensor, i) for a in accesses(result.expr) for i in a.indices]
        for where, index in places:
            position, low, high, step, within = _interval(index, variable, task * symbol(PIECE) + local, it)
            if position is None:
                continue
            facts = _facts(it, *inside, *within)
            first = position - task * step + low
            for claim in (Constraint(first), Constraint(step + low + high - 1 - first)):
                if not facts.imply(claim):
                    raise Undecided(f"{where} is not shown to be read within a piece: {claim}")


def _interval(
    index: WrittenIndex, variable: str, at: Poly, it: _Symbolic
) -> tuple[Poly | None, Poly, Poly, Poly, list[Constraint]]:
    """
    Return where an index points with the variable at a position, its halo and step, and constraints on its other
    variables.
    """
    within: list[Constraint] = []

    def other(name: str) -> Poly:
        nonlocal within
        within += box(f"at.{name}", it.extents[name])
        return symbol(f"at.{name}")

    piece = symbol(PIECE)
    match index:
        case Var(name) if name == variable:
            return at, ZERO, ZERO, piece, within
        case Composite(names) if variable in names:
            position = joined_position(index, it.extents, lambda n: at if n == variable else other(n))
            return position, ZERO, ZERO, piece * product(it.extents[n] for n in names[1:]), within
        case Affine(terms) if any(t.variable == variable for t in terms):
            position, low, high, step = ZERO, ZERO, ZERO, ONE
            for t in terms:
                factor = number_of(t.factor, it.attributes)
                if t.variable is None:
                    position = position + factor * t.sign
                    low, high = low - factor * t.sign, high + factor * t.sign
                elif t.variable == variable:
                    position, step = position + factor * at, factor
                    high = high - factor + 1
                else:
                    position = position + factor * other(t.variable)
                    high = high + factor * (it.extents[t.variable] - 1)
            return position, low, high, step * piece, within
        case Segments(names) if variable in names:
            raise Undecided(f"{variable} is one of several laid end to end")
        case _:
            return None, ZERO, ZERO, ZERO, within


def _sums(operator: Operator, variable: str) -> None:
    """Check that the line is the sum, over the pieces, of the line over a piece. Raises `Undecided`."""
    splits: dict[tuple[str, Poly], Poly] = {}
    for _ in range(4):
        it = _symbolic(operator, variable)
        it.context.splits = splits
        operands = [named(p.name, it.shapes[p.name]) for p in it.spelled.bound.operands]
        line = SymbolicLine(it.context, operator, it.spelled, operands, it.attributes)
        whole, part = line_results(line), line_results(line, {variable: (symbol(TASK), symbol(PIECE))})
        try:
            for result, a, b in zip(it.spelled.bound.results, whole, part, strict=True):
                if not _mentions(result, variable):
                    _equal_sum(it, a, b, symbol(DEGREE))
            return
        except Undivided as need:
            splits = it.context.finer(need)
    raise Undecided("too many sizes have to be taken apart")


def _addends(operator: Operator, analysis: Analysis, carriers: frozenset[str]) -> None:
    """Check that the line of a sum is the sum of the lines. Raises `Undecided`."""
    splits: dict[tuple[str, Poly], Poly] = {}
    for _ in range(4):
        it = _symbolic(operator)
        it.context.splits = splits
        it.context.sample[DEGREE] = 2

        def total(name: str, it: _Symbolic = it) -> TensorForm:
            return TensorForm(
                it.shapes[name], lambda at: summed(_addend(name, symbol("s"), at), ("s",), box("s", symbol(DEGREE)))
            )

        def addend(name: str, it: _Symbolic = it) -> TensorForm:
            return TensorForm(it.shapes[name], lambda at: _addend(name, symbol(TASK), at))

        names = [p.name for p in it.spelled.bound.operands]
        plain = {n: named(n, it.shapes[n]) for n in names if n not in carriers}
        sides = [
            line_results(
                SymbolicLine(it.context, operator, it.spelled, [plain.get(n) or make(n) for n in names], it.attributes)
            )
            for make in (total, addend)
        ]
        try:
            for i, (a, b) in enumerate(zip(*sides, strict=True)):
                if analysis.carried(i, carriers):
                    _equal_sum(it, a, b, symbol(DEGREE))
            return
        except Undivided as need:
            splits = it.context.finer(need)
    raise Undecided("too many sizes have to be taken apart")


def _addend(name: str, number_: Poly, at: ElementPosition) -> tuple[Mono, ...]:
    return (Mono(UNIT, (), frozenset(), (Read(name, (number_, *at)),)),)


def _mentions(result: Result, variable: str) -> bool:
    return any(isinstance(i, Var) and i.name == variable for i in result.indices) or any(
        isinstance(i, Composite) and variable in i.names for i in result.indices
    )


def _equal_sum(it: _Symbolic, whole: TensorForm, part: TensorForm, degree: Poly) -> None:
    """Check that `whole` is the sum of `part` over the tasks. Raises `Undecided`."""
    position: list[Poly] = []
    within: list[Constraint] = []
    for size in whole.shape:
        at, _, inside = it.context.index("i", size)
        position.append(at)
        within += inside
    left = whole.element(tuple(position))
    right = summed(part.element(tuple(position)), (TASK,), box(TASK, degree))
    verdict = equal(left, right, _facts(it, *within))
    if not verdict.proved:
        raise Undecided(verdict.reason)
