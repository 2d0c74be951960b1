"""Terms with the sizes of what they are: what the encodings of foreign rules (of TASO and FlexFlow) are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import AttrExpr, Condition, Input, Operation, ResultOf, ShapeEntry, Substitution, Term
from unity_ir.rules.poly import ONE, Poly, number
from unity_ir.rules.research.foreign.collection import ForeignOp, ForeignRule
from unity_ir.rules.research.foreign.sizes import SizeEquations, Unsupported

ACTIVATIONS = {0: None, 1: "sigmoid", 2: "relu", 3: "tanh"}
"""PM_ACTI."""

ELEMENTWISE = {
    **{"OP_RELU": "relu", "OP_SIGMOID": "sigmoid", "OP_TANH": "tanh"},
    **{"OP_EW_ADD": "add", "OP_EW_MUL": "mul"},
}
"""Operators by elements, and what they are called here."""

PARALLEL = {"OP_PARTITION": "partition", "OP_COMBINE": "combine", "OP_REPLICATE": "replicate", "OP_REDUCE": "reduce"}
"""Parallel operators, and what they are called here."""

OPERANDS = {"OP_EW_ADD": 2, "OP_EW_MUL": 2, "OP_MUL": 2, "OP_LINEAR": 2, "OP_MATMUL": 2, "OP_CONV2D": 2}
"""Operators of two operands, besides concatenations, which have any; others have one."""

MOST_PARTS = 16
"""Parts that a tensor is split into, at most."""


@dataclass(frozen=True, slots=True)
class Concatenation:
    """
    How a tensor was last concatenated along one dim: the sizes of the parts, and how each part was last concatenated
    along that dim itself (None if it was not).
    """

    parts: tuple[Poly, ...]
    within: tuple[Concatenation | None, ...]


@dataclass(frozen=True, slots=True)
class Sized:
    """
    A term of a rule that is being converted, with its shape. `joins` has, for each dim along which it was concatenated,
    how it was last. The shape is empty where nothing is known of it.
    """

    term: Term
    shape: tuple[Poly, ...]
    joins: Mapping[int, Concatenation] = field(default_factory=dict[int, Concatenation])
    divided: tuple[int, ...] = ()
    """The number of times that each dim has been divided, if that is followed."""


Results = Callable[[ForeignOp, Sequence[Sized]], Iterator[Sized]]
"""Given an operation and its operands, yields its results."""


def input_name(of: tuple[int, int]) -> str:
    """
    Return a name for an input of a foreign rule, as text. The input is given as in `ForeignOp.inputs`, (operation,
    result), where a negative operation stands for an input: `x7` for (-7, 0), and `x7_1` for (-7, 1).
    """
    return f"x{-of[0]}" if of[1] == 0 else f"x{-of[0]}_{of[1]}"


def converted(
    foreign: ForeignRule,
    sizes: SizeEquations,
    shape_of: Callable[[tuple[int, int]], tuple[Poly, ...]],
    results_of: Results,
    entries_of: Callable[[tuple[int, int]], tuple[ShapeEntry, ...]] | None = None,
) -> Substitution:
    """
    Convert a foreign rule to a substitution.

    The caller says by functions what shapes and operators become. An input is given to them as in `ForeignOp.inputs`,
    as (operation, result):

    - `shape_of(input)` returns its shape in symbols, or () if it has no dims or an unknown number of them.
    - `results_of(operation, operands)` yields the results of an operation as terms, and adds the equations between
      sizes that it requires to `sizes`.
    - `entries_of(input)`, if given, returns the shape to write for an input whose `shape_of` is (), such as a pack
      `a..` for any number of dims.

    Raises `Unsupported` for a rule that no substitution expresses, `UnityError` where no sizes fit.
    """
    inputs: dict[tuple[int, int], Sized] = {}

    def operand(of: tuple[int, int], made: Sequence[Sequence[Sized]]) -> Sized:
        if of[0] >= 0:
            return _result(made, *of)
        if of not in inputs:
            shape = shape_of(of)
            inputs[of] = Sized(Input(input_name(of), shape), shape, divided=(0,) * len(shape))
        return inputs[of]

    sides: list[list[Sized]] = []
    for side, at in ((foreign.source, 0), (foreign.target, 1)):
        made: list[list[Sized]] = []
        for op in side:
            operands = [operand(i, made) for i in op.inputs]
            fits = operands if op.type == "OP_CONCAT" else len(operands) == OPERANDS.get(op.type, 1)
            if not fits:
                raise Unsupported(f"{op.type} of {len(operands)} operands")
            made.append(list(results_of(op, operands)))
        sides.append([_result(made, *pair[at]) for pair in foreign.outputs])
    for left, right in zip(*sides, strict=True):
        alike("its outputs", left, right, sizes)
    plain: dict[int, Input] = {}
    for of, found in inputs.items():
        shape = tuple(map(sizes.now, found.shape))
        plain[id(found.term)] = Input(input_name(of), shape or (entries_of(of) if entries_of else ()))
    differences = [s for t in inputs.values() for s in map(sizes.now, t.shape) if any(c < 0 for _, c in s.terms)]
    source, target = (rebuilt([o.term for o in side], plain, sizes.now) for side in sides)
    conditions = tuple(Condition(s - 1) for s in dict.fromkeys(differences))
    return Substitution(foreign.name, tuple(plain.values()), source, target, conditions)


def _result(made: Sequence[Sequence[Sized]], op: int, index: int) -> Sized:
    if not 0 <= index < len(made[op]):
        raise UnityError(f"operation {op} has no result {index}")
    return made[op][index]


def rebuilt(
    side: Sequence[Term], inputs: Mapping[int, Input], now: Callable[[Poly], Poly] = lambda p: p
) -> tuple[Term, ...]:
    """
    Copy the terms of one side of a substitution, with other inputs: `inputs` maps the `id` of each input to its
    replacement. `now` is called with every polynomial in an attribute, and returns the one to write instead
    (`SizeEquations.now`); by default they stay.
    """
    made: dict[int, Operation] = {}

    def solved(value: AttrExpr) -> AttrExpr:
        match value:
            case Poly():
                return now(value)
            case tuple():
                return tuple(map(now, value))
            case _:
                return value

    def term(of: Term) -> Term:
        if isinstance(of, Input):
            return inputs[id(of)]
        key = id(of.operation)
        if key not in made:
            attributes = tuple((n, solved(v)) for n, v in of.operation.attributes)
            made[key] = Operation(of.operation.op, tuple(map(term, of.operation.operands)), attributes)
        return ResultOf(made[key], of.index)

    return tuple(map(term, side))


# --- operators that all encodings have -------------------------------------------------------------------------------


def applied(name: str, operands: Sequence[Sized], **attributes: AttrExpr) -> ResultOf:
    """
    Apply our operator called `name` to operands, with these attributes; return its first result as a term. Shapes are
    not checked.
    """
    return ResultOf(Operation(name, tuple(t.term for t in operands), tuple(sorted(attributes.items()))))


def alike(where: str, one: Sized, other: Sized, sizes: SizeEquations, but: int | None = None) -> None:
    """
    Add to `sizes` the equations that two tensors have the same size in every dim, except for dim `but` if that is not
    None. `where` begins the messages of errors, such as the operation's name.

    Raises `UnityError` where the numbers of dims differ or no sizes fit, `Unsupported` where an equation cannot be
    solved.
    """
    if len(one.shape) != len(other.shape):
        raise UnityError(f"{where}: of {len(one.shape)} and {len(other.shape)} dims")
    for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)):
        if dim != but:
            sizes.equate(where, a, b)


def activated(op: ForeignOp, of: Sized) -> Sized:
    """
    Return `of` with the activation applied that the parameter PM_ACTI of the operation `op` names; `of` itself if it
    names none. Raises `Unsupported` for an unknown activation.
    """
    acti = op.parameters.get("PM_ACTI", 0)
    if acti not in ACTIVATIONS:
        raise Unsupported(f"activation {acti}")
    name = ACTIVATIONS[acti]
    return of if name is None else Sized(applied(name, (of,)), of.shape, of.joins, of.divided)


def elementwise(op: ForeignOp, operands: Sequence[Sized], sizes: SizeEquations) -> Sized:
    """
    Apply our operator for the foreign operation `op`, one of `ELEMENTWISE`, to operands; return its result. The
    equations that their shapes are equal are added to `sizes`.
    """
    first, *others = operands
    for other in others:
        alike(op.type, first, other, sizes)
    return Sized(applied(ELEMENTWISE[op.type], operands), first.shape, common_joins(operands, sizes), first.divided)


def common_joins(operands: Sequence[Sized], sizes: SizeEquations) -> dict[int, Concatenation]:
    """
    Return how the operands, which an elementwise operator reads, were last concatenated: {dim: concatenation}, with
    each dim along which all of them were concatenated of parts of the same sizes. A `split` of the operator's result
    along such a dim can then be at the borders of these parts. Unknown sizes that `sizes` has solved for are replaced
    by their values.
    """

    def now(join: Concatenation) -> Concatenation:
        return Concatenation(tuple(map(sizes.now, join.parts)), tuple(now(c) if c else None for c in join.within))

    first, *others = operands
    own = {dim: now(join) for dim, join in first.joins.items()}
    return {d: join for d, join in own.items() if all(d in o.joins and now(o.joins[d]) == join for o in others)}


def concatenated(dim: int, operands: Sequence[Sized], sizes: SizeEquations) -> Sized:
    """
    Return the concatenation of tensors along `dim`. The equations that their other dims are equal are added to `sizes`.
    """
    first, *others = operands
    for other in others:
        alike("OP_CONCAT", first, other, sizes, but=dim)
    parts = tuple(o.shape[dim] for o in operands)
    shape = list(first.shape)
    shape[dim] = sum(parts, number(0))
    join = Concatenation(parts, tuple(o.joins.get(dim) for o in operands))
    joins = {**common_joins(operands, sizes), dim: join}
    return Sized(applied("concat", operands, dim=number(dim)), tuple(shape), joins, (0,) * len(shape))


def split(op: ForeignOp, dim: int, x: Sized, sizes: SizeEquations) -> Iterator[Sized]:
    """
    Yield the parts into which the operation `op` splits the tensor `x` along `dim`: the parts of its last concatenation
    along that dim, or equal parts if there was none. Raises `Unsupported` if that concatenation has another number of
    parts than `op`, or if `op` has fewer than 2 or more than `MOST_PARTS`.
    """
    count = op.parameters.get("PM_NUM_OUTPUTS", 2)
    if not 2 <= count <= MOST_PARTS:
        raise Unsupported(f"OP_SPLIT into {count} parts")
    join = x.joins.get(dim)
    if join is None:
        yield from parts_of(x, dim, count, sizes)
        return
    if len(join.parts) != count:
        raise Unsupported(f"OP_SPLIT into {count} of {len(join.parts)} parts")
    sizes.equate("OP_SPLIT", x.shape[dim], sum(join.parts, number(0)))
    yield from _parts(x, dim, join)


def parts_of(x: Sized, dim: int, count: int, sizes: SizeEquations) -> Iterator[Sized]:
    """
    Yield the tensor `x` split along `dim` into `count` equal parts. The equation for their size is added to `sizes`.
    """
    part = sizes.unknown()
    sizes.equate("equal parts", x.shape[dim], part * count)
    yield from _parts(x, dim, Concatenation((part,) * count, (None,) * count))


def _parts(x: Sized, dim: int, join: Concatenation) -> Iterator[Sized]:
    made = applied("split", (x,), dim=number(dim), sizes=join.parts).operation
    for i, (part, within) in enumerate(zip(join.parts, join.within, strict=True)):
        joins = _joins_but(dim, x) | ({dim: within} if within else {})
        yield Sized(ResultOf(made, i), (*x.shape[:dim], part, *x.shape[dim + 1 :]), joins)


def _joins_but(dim: int, x: Sized) -> dict[int, Concatenation]:
    return {d: join for d, join in x.joins.items() if d != dim}


def tiled(x: Sized, dim: int, by: Poly) -> Sized:
    """Return a tensor repeated `by` times along a dim."""
    wide = replace(x, term=applied("expand", (x,), dim=number(dim), sizes=(by,), degrees=(ONE,)))
    shape = (*x.shape[:dim], by * x.shape[dim], *x.shape[dim + 1 :])
    return Sized(applied("reshape", (wide,), shape=shape), shape, _joins_but(dim, x), x.divided)


def folded(x: Sized, dim: int, by: Poly, sizes: SizeEquations) -> Sized:
    """
    Split a tensor along `dim` into `by` equal parts, and return their sum. The equation for the parts' size is added to
    `sizes`.
    """
    part = sizes.unknown()
    sizes.equate("OP_REDUCE", x.shape[dim], by * part)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    parts = replace(x, term=applied("reshape", (x,), shape=(*before, by, part, *after)))
    total = applied("reduce_sum", (parts,), dim=number(dim))
    return Sized(total, (*before, part, *after), _joins_but(dim, x), x.divided)


def dim_of(op: ForeignOp, key: str, rank: int) -> int:
    """
    Return the dim that the parameter `key` of an operation names, such as PM_AXIS. Raises `Unsupported` if it names
    none of the dims below `rank`, or if the operation's PM_NUMDIM is another number of dims than `rank`.
    """
    dim = op.parameters.get(key, -1)
    if not 0 <= dim < rank or op.parameters.get("PM_NUMDIM", rank) != rank:
        raise Unsupported(f"{op.type} along dim {dim} of {op.parameters.get('PM_NUMDIM', rank)}")
    return dim


def degree_of(op: ForeignOp) -> int:
    """
    Return the degree (number of pieces) of a parallel operation, its parameter PM_PARALLEL_DEGREE. Raises `Unsupported`
    if it has none, or one below 2.
    """
    by = op.parameters.get("PM_PARALLEL_DEGREE", 0)
    if by < 2:
        raise Unsupported(f"{op.type} by {by}")
    return by
