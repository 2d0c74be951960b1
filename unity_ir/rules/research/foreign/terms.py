"""
Foreign rules (of TASO and FlexFlow) as substitutions over our operators.

Tensors there have dims [replica, rows, columns]. The replica dim is what types here say as `sum` and `copy`: a
replicate of it makes copies, a reduce adds addends up, and a concatenation along it makes addends. Along rows and
columns a replicate tiles and a reduce folds, as they do in the generator that made the rules. A weight is [outputs,
inputs]. Every degree k is one unknown. Inputs are as little divided as fits.

A tile is divided, a piece for each of the copies, and the fold of a divided dim is a sum of its pieces, so that the two
go with a combine and a partition of the same dim. Copies in one place, a combine of the replica dim, are none of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import AttrExpr, Condition, Input, Operation, ResultOf, Substitution, Term
from unity_ir.rules.poly import ONE, Poly, number
from unity_ir.rules.proof.sides import divisible, misfits
from unity_ir.rules.research.foreign.collection import ForeignOp, ForeignRule
from unity_ir.rules.research.foreign.sizes import SizeEquations, Unsupported

ACTIVATIONS = {0: None, 1: "sigmoid", 2: "relu", 3: "tanh"}
"""PM_ACTI."""

ELEMENTWISE = {
    **{"OP_RELU": "relu", "OP_SIGMOID": "sigmoid", "OP_TANH": "tanh"},
    **{"OP_EW_ADD": "add", "OP_EW_MUL": "mul"},
}
PARALLEL = {"OP_PARTITION": "partition", "OP_COMBINE": "combine", "OP_REPLICATE": "replicate", "OP_REDUCE": "reduce"}

OPERANDS = {"OP_EW_ADD": 2, "OP_EW_MUL": 2, "OP_CONCAT": 2, "OP_LINEAR": 2}
"""Others have one."""

REPLICA = 0
"""The dim of a tensor there that is none here."""


@dataclass(frozen=True, slots=True)
class _Typed:
    """A term with its rows and columns; `cuts` are, by dim, the two parts that the last concatenation made it of."""

    term: Term
    shape: tuple[Poly, Poly]
    cuts: Mapping[int, tuple[Poly, Poly]] = field(default_factory=dict[int, tuple[Poly, Poly]])
    divided: tuple[int, int] = (0, 0)
    """The number of times that rows, and columns, have been divided."""


def substitution(foreign: ForeignRule) -> Substitution:
    """
    Convert another system's rule to a substitution over our operators. Its degrees become symbols, and its inputs get
    the fewest degrees at which both sides, or else the source, are well typed.

    Raises `Unsupported` for a rule that these operators cannot express, `UnityError` where no sizes fit.
    """
    ops = (*foreign.source, *foreign.target)
    sizes = SizeEquations(fixed=any(op.type == "OP_CONCAT" and op.parameters.get("PM_AXIS") == REPLICA for op in ops))
    inputs: dict[tuple[int, int], _Typed] = {}
    sides: list[tuple[Term, ...]] = []
    results: list[list[_Typed]] = []
    for side, at in ((foreign.source, 0), (foreign.target, 1)):
        made: list[list[_Typed]] = []
        for op in side:
            made.append(list(_apply(op, [_operand(i, made, inputs, sizes) for i in op.inputs], sizes)))
        outputs = [_result(made, *pair[at]) for pair in foreign.outputs]
        results.append(outputs)
        sides.append(tuple(o.term for o in outputs))
    for left, right in zip(*results, strict=True):
        for a, b in zip(left.shape, right.shape, strict=True):
            sizes.equate("its outputs", a, b)
    plain = {i: Input(_name(i), tuple(map(sizes.now, t.shape))) for i, t in inputs.items()}
    degrees = {sizes.degree(_degree(op)) for op in ops if op.type in PARALLEL}
    return _divided(_resolved(foreign.name, plain, inputs, sides, sizes), sorted(degrees, key=str))


def _name(of: tuple[int, int]) -> str:
    return f"x{-of[0]}" if of[1] == 0 else f"x{-of[0]}_{of[1]}"


def _result(made: Sequence[Sequence[_Typed]], op: int, index: int) -> _Typed:
    if not 0 <= index < len(made[op]):
        raise UnityError(f"operation {op} has no result {index}")
    return made[op][index]


def _operand(
    of: tuple[int, int], made: Sequence[Sequence[_Typed]], inputs: dict[tuple[int, int], _Typed], sizes: SizeEquations
) -> _Typed:
    if of[0] >= 0:
        return _result(made, *of)
    if of not in inputs:
        shape = (sizes.unknown(), sizes.unknown())
        inputs[of] = _Typed(Input(_name(of), shape), shape)
    return inputs[of]


def _apply(op: ForeignOp, operands: Sequence[_Typed], sizes: SizeEquations) -> Iterator[_Typed]:
    """Yield the results of an operation."""
    count = OPERANDS.get(op.type, 1)
    if len(operands) != count:
        raise Unsupported(f"{op.type} of {len(operands)} operands")
    first, *others = operands
    match op.type:
        case "OP_LINEAR":
            yield _linear(op, first, others[0], sizes)
        case "OP_CONCAT":
            yield _concat(_axis(op, "PM_AXIS"), first, others[0], sizes)
        case "OP_SPLIT":
            yield from _split(op, first, sizes)
        case kind if kind in PARALLEL:
            yield _parallel(PARALLEL[kind], op, first, sizes)
        case kind if kind in ELEMENTWISE:
            for other in others:
                _alike(kind, first, other, sizes)
            yield _Typed(_op(ELEMENTWISE[kind], operands), first.shape, _common(operands), first.divided)
        case kind:
            raise Unsupported(f"operator {kind}")


def _op(name: str, operands: Sequence[_Typed], **attributes: AttrExpr) -> ResultOf:
    return ResultOf(Operation(name, tuple(t.term for t in operands), tuple(sorted(attributes.items()))))


def _alike(where: str, one: _Typed, other: _Typed, sizes: SizeEquations) -> None:
    for a, b in zip(one.shape, other.shape, strict=True):
        sizes.equate(where, a, b)


def _common(operands: Sequence[_Typed]) -> dict[int, tuple[Poly, Poly]]:
    """Return the cuts that all operands have."""
    first, *others = operands
    return {dim: cut for dim, cut in first.cuts.items() if all(o.cuts.get(dim) == cut for o in others)}


def _axis(op: ForeignOp, key: str) -> int:
    axis = op.parameters.get(key)
    if axis not in (0, 1, 2) or op.parameters.get("PM_NUMDIM", 3) != 3:
        raise Unsupported(f"{op.type} along dim {axis} of {op.parameters.get('PM_NUMDIM', 3)}")
    return axis


def _linear(op: ForeignOp, x: _Typed, w: _Typed, sizes: SizeEquations) -> _Typed:
    acti = op.parameters.get("PM_ACTI", 0)
    if acti not in ACTIVATIONS:
        raise Unsupported(f"activation {acti}")
    sizes.equate("OP_LINEAR", x.shape[1], w.shape[1])
    cuts = {dim: of.cuts[0] for dim, of in enumerate((x, w)) if 0 in of.cuts}
    divided = (x.divided[0], w.divided[0])
    made = _Typed(_op("matmul_nt", (x, w)), (x.shape[0], w.shape[0]), cuts, divided)
    name = ACTIVATIONS[acti]
    return made if name is None else _Typed(_op(name, (made,)), made.shape, cuts, divided)


def _concat(axis: int, x: _Typed, y: _Typed, sizes: SizeEquations) -> _Typed:
    if axis == REPLICA:
        # Each of the two is one addend, the other is zero there.
        _alike("OP_CONCAT", x, y, sizes)
        pads = [_Typed(_op("zero_pad", (t,), by=number(2)), t.shape) for t in (x, y)]
        return _Typed(_op("add", pads), x.shape, _common((x, y)))
    dim = axis - 1
    sizes.equate("OP_CONCAT", x.shape[1 - dim], y.shape[1 - dim])
    shape = list(x.shape)
    shape[dim] = x.shape[dim] + y.shape[dim]
    cuts = {**_common((x, y)), dim: (x.shape[dim], y.shape[dim])}
    return _Typed(_op("concat", (x, y), dim=number(dim)), (shape[0], shape[1]), cuts)


def _split(op: ForeignOp, x: _Typed, sizes: SizeEquations) -> Iterator[_Typed]:
    axis = _axis(op, "PM_AXIS")
    if axis == REPLICA or op.parameters.get("PM_NUM_OUTPUTS", 2) != 2:
        raise Unsupported(f"OP_SPLIT along dim {axis} into {op.parameters.get('PM_NUM_OUTPUTS', 2)}")
    dim = axis - 1
    parts = x.cuts.get(dim)
    if parts is None:
        half = sizes.unknown()
        parts = half, half
    sizes.equate("OP_SPLIT", x.shape[dim], parts[0] + parts[1])
    made = _op("split", (x,), dim=number(dim), sizes=parts).operation
    cuts = {d: c for d, c in x.cuts.items() if d != dim}
    for i, part in enumerate(parts):
        yield _Typed(ResultOf(made, i), (part, x.shape[1]) if dim == 0 else (x.shape[0], part), cuts)


def _degree(op: ForeignOp) -> int:
    by = op.parameters.get("PM_PARALLEL_DEGREE", 0)
    if by < 2:
        raise Unsupported(f"{op.type} by {by}")
    return by


def _parallel(name: str, op: ForeignOp, x: _Typed, sizes: SizeEquations) -> _Typed:
    axis, degree = _axis(op, "PM_PARALLEL_DIM"), sizes.degree(_degree(op))
    if axis == REPLICA:
        if name in ("partition", "combine"):
            raise Unsupported(f"{op.type} of the replica dim")
        return replace(x, term=_op(name, (x,), by=degree))
    dim = axis - 1
    match name:
        case "replicate":
            return _divide("partition", _tiled(x, dim, degree), dim, degree)
        case "reduce":
            return _folded(x, dim, degree, sizes)
        case _:
            return _divide(name, x, dim, degree)


def _divide(name: str, x: _Typed, dim: int, by: Poly) -> _Typed:
    """Return a tensor partitioned or combined along a dim."""
    divided = [*x.divided]
    divided[dim] += 1 if name == "partition" else -1
    return replace(x, term=_op(name, (x,), dim=number(dim), by=by), divided=(divided[0], divided[1]))


def _tiled(x: _Typed, dim: int, by: Poly) -> _Typed:
    """Return a tensor repeated `by` times along a dim."""
    shape = [*x.shape]
    shape[dim] = by * x.shape[dim]
    wide = replace(x, term=_op("expand", (x,), dim=number(dim), sizes=(by,), degrees=(ONE,)))
    return _Typed(_op("reshape", (wide,), shape=tuple(shape)), (shape[0], shape[1]), divided=x.divided)


def _folded(x: _Typed, dim: int, by: Poly, sizes: SizeEquations) -> _Typed:
    """
    Return the sum of the `by` parts of a dim; if the dim is divided, the pieces become addends, which are reduced.
    """
    part = sizes.unknown()
    sizes.equate("OP_REDUCE", x.shape[dim], by * part)
    shape = [*x.shape]
    shape[dim] = part
    parts = replace(x, term=_op("reshape", (x,), shape=(*x.shape[:dim], by, part, *x.shape[dim + 1 :])))
    total = _Typed(_op("reduce_sum", (parts,), dim=number(dim)), (shape[0], shape[1]), divided=x.divided)
    if x.divided[dim] <= 0:
        return total
    divided = [*x.divided]
    divided[dim] -= 1
    return replace(total, term=_op("reduce", (total,), by=by), divided=(divided[0], divided[1]))


# --- sizes and degrees -----------------------------------------------------------------------------------------------


def _resolved(
    name: str,
    plain: Mapping[tuple[int, int], Input],
    inputs: Mapping[tuple[int, int], _Typed],
    sides: Sequence[tuple[Term, ...]],
    sizes: SizeEquations,
) -> Substitution:
    """Return the rule with all sizes replaced by their solved values."""
    new: dict[int, Term] = {id(inputs[i].term): plain[i] for i in inputs}
    source, target = (_rebuilt(side, new, sizes.now) for side in sides)
    differences = [s for i in plain.values() for s in i.shape if isinstance(s, Poly) and any(c < 0 for _, c in s.terms)]
    return Substitution(name, tuple(plain.values()), source, target, tuple(Condition(s - 1) for s in differences))


def _solved(value: AttrExpr, now: Callable[[Poly], Poly]) -> AttrExpr:
    match value:
        case Poly():
            return now(value)
        case tuple():
            return tuple(map(now, value))
        case _:
            return value


def _rebuilt(side: tuple[Term, ...], inputs: Mapping[int, Term], now: Callable[[Poly], Poly]) -> tuple[Term, ...]:
    made: dict[int, Operation] = {}

    def term(of: Term) -> Term:
        if isinstance(of, Input):
            return inputs[id(of)]
        key = id(of.operation)
        if key not in made:
            attributes = tuple((n, _solved(v, now)) for n, v in of.operation.attributes)
            made[key] = Operation(of.operation.op, tuple(map(term, of.operation.operands)), attributes)
        return ResultOf(made[key], of.index)

    return tuple(map(term, side))


MOST_DIVIDED = 3
"""Degrees of inputs that are tried together."""

TRIED = 3
"""Bindings at which each choice is tried."""


def _divided(rule: Substitution, degrees: Sequence[Poly]) -> Substitution:
    """
    Return the rule with its inputs divided if it is not well typed otherwise, as a combine or reduce of an input needs.

    Fewest degrees are tried first. Where none fit both sides, those that fit the source are taken.
    """
    kinds = [(i.name, kind) for i in rule.inputs for kind in ("sum", "copy", "0", "1")]
    choices = [c for most in range(MOST_DIVIDED + 1) for c in combinations(kinds, most)]
    candidates = [_with_degrees(rule, frozenset(c), by) for by in degrees for c in choices]
    for both in (True, False):
        for candidate in candidates:
            tried = candidate if both else replace(candidate, target=candidate.source)
            if not misfits(tried, islice(divisible(tried), TRIED)):
                return candidate
    return rule


def _with_degrees(rule: Substitution, chosen: frozenset[tuple[str, str]], by: Poly) -> Substitution:
    def degree(of: Input, kind: str) -> Poly:
        return by if (of.name, kind) in chosen else ONE

    new = {
        id(i): Input(i.name, i.shape, (degree(i, "0"), degree(i, "1")), degree(i, "sum"), degree(i, "copy"))
        for i in rule.inputs
    }
    source, target = (_rebuilt(side, new, lambda p: p) for side in (rule.source, rule.target))
    return Substitution(rule.name, tuple(new.values()), source, target, rule.conditions)
