"""
FlexFlow's rules as substitutions over our operators, with how tensors are divided.

Tensors there have dims [replica, rows, columns]. The replica dim is what types here say as `sum` and `copy`: a
replicate of it makes copies, a reduce adds addends up, and a concatenation along it makes addends. Along rows and
columns a replicate tiles and a reduce folds, as they do in the generator that made the rules. A weight is [outputs,
inputs]. Every degree k is one unknown. Inputs are as little divided as fits.

A tile is divided, a piece for each of the copies, and the fold of a divided dim is a sum of its pieces, so that the two
go with a combine and a partition of the same dim. Of copies in one place, a combine of the replica dim, one is picked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

from unity_ir.rules.pattern import Input, Substitution
from unity_ir.rules.poly import ONE, Poly, number
from unity_ir.rules.proof.sides import divisible, misfits
from unity_ir.rules.research.foreign.collection import ForeignOp, ForeignRule
from unity_ir.rules.research.foreign.sizes import SizeEquations, Unsupported
from unity_ir.rules.research.foreign.terms import (
    ELEMENTWISE,
    PARALLEL,
    Sized,
    activated,
    alike,
    applied,
    common_joins,
    concatenated,
    converted,
    degree_of,
    dim_of,
    elementwise,
    folded,
    rebuilt,
    split,
    tiled,
)

DIMS = 3
"""Dims of a tensor there."""

REPLICA = 0
"""The dim of a tensor there that is none here."""


def divided(foreign: ForeignRule) -> Substitution:
    """
    Convert a rule of FlexFlow's to a substitution over our operators, in which tensors are divided as in the rule:
    entries of its replica dim become partial sums or copies. Its degrees become symbols; in a rule that concatenates
    along the replica dim, they stay numbers.

    The rule does not say how its inputs are divided. They are divided along as few dims as possible, so that both sides
    are well typed or, if no way to divide them makes both so, the source is. Raises `Unsupported` for a rule that these
    operators cannot express, `UnityError` where no sizes fit.
    """
    ops = (*foreign.source, *foreign.target)
    sizes = SizeEquations(fixed=any(op.type == "OP_CONCAT" and op.parameters.get("PM_AXIS") == REPLICA for op in ops))
    rule = converted(
        foreign,
        sizes,
        lambda of: (sizes.unknown(), sizes.unknown()),
        lambda op, operands: _apply(op, operands, sizes),
    )
    degrees = {sizes.degree(degree_of(op)) for op in ops if op.type in PARALLEL}
    return _with_fewest_degrees(rule, sorted(degrees, key=str))


def _apply(op: ForeignOp, operands: Sequence[Sized], sizes: SizeEquations) -> Iterator[Sized]:
    """Yield the results of an operation."""
    first, *others = operands
    match op.type:
        case "OP_LINEAR":
            yield _linear(op, first, others[0], sizes)
        case "OP_CONCAT":
            yield _concat(dim_of(op, "PM_AXIS", DIMS), operands, sizes)
        case "OP_SPLIT":
            axis = dim_of(op, "PM_AXIS", DIMS)
            if axis == REPLICA:
                raise Unsupported("OP_SPLIT of the replica dim")
            yield from split(op, axis - 1, first, sizes)
        case kind if kind in PARALLEL:
            yield _parallel(PARALLEL[kind], op, first, sizes)
        case kind if kind in ELEMENTWISE:
            yield elementwise(op, operands, sizes)
        case kind:
            raise Unsupported(f"operator {kind}")


def _linear(op: ForeignOp, x: Sized, w: Sized, sizes: SizeEquations) -> Sized:
    sizes.equate("OP_LINEAR", x.shape[1], w.shape[1])
    joins = {dim: of.joins[0] for dim, of in enumerate((x, w)) if 0 in of.joins}
    pieces = (x.divided[0], w.divided[0])
    return activated(op, Sized(applied("matmul_nt", (x, w)), (x.shape[0], w.shape[0]), joins, pieces))


def _concat(axis: int, operands: Sequence[Sized], sizes: SizeEquations) -> Sized:
    if axis != REPLICA:
        return concatenated(axis - 1, operands, sizes)
    # Each of them is one addend, the others are zero there.
    first, *others = operands
    for other in others:
        alike("OP_CONCAT", first, other, sizes)
    count = number(len(operands))
    total, *rest = (replace(t, term=applied("zero_pad", (t,), by=count)) for t in operands)
    for pad in rest:
        total = replace(total, term=applied("add", (total, pad)))
    return Sized(total.term, first.shape, common_joins(operands, sizes), (0, 0))


def _parallel(name: str, op: ForeignOp, x: Sized, sizes: SizeEquations) -> Sized:
    axis, degree = dim_of(op, "PM_PARALLEL_DIM", DIMS), sizes.degree(degree_of(op))
    if axis == REPLICA:
        if name == "partition":
            raise Unsupported(f"{op.type} of the replica dim")
        return replace(x, term=applied("pick" if name == "combine" else name, (x,), by=degree))
    dim = axis - 1
    match name:
        case "replicate":
            return _divide("partition", tiled(x, dim, degree), dim, degree)
        case "reduce":
            return _reduced(x, dim, degree, sizes)
        case _:
            return _divide(name, x, dim, degree)


def _divide(name: str, x: Sized, dim: int, by: Poly) -> Sized:
    """Return a tensor partitioned or combined along a dim."""
    pieces = [*x.divided]
    pieces[dim] += 1 if name == "partition" else -1
    return replace(x, term=applied(name, (x,), dim=number(dim), by=by), divided=tuple(pieces))


def _reduced(x: Sized, dim: int, by: Poly, sizes: SizeEquations) -> Sized:
    """
    Return the sum of the `by` parts of a dim; if the dim is divided, the pieces become addends, which are reduced.
    """
    total = folded(x, dim, by, sizes)
    if x.divided[dim] <= 0:
        return total
    pieces = [*x.divided]
    pieces[dim] -= 1
    return replace(total, term=applied("reduce", (total,), by=by), divided=tuple(pieces))


# --- degrees ---------------------------------------------------------------------------------------------------------


MOST_DIVIDED = 3
"""Degrees of inputs that are tried together."""

TRIED = 3
"""Bindings at which each choice is tried."""


def _with_fewest_degrees(rule: Substitution, degrees: Sequence[Poly]) -> Substitution:
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
    source, target = (rebuilt(side, new) for side in (rule.source, rule.target))
    return Substitution(rule.name, tuple(new.values()), source, target, rule.conditions)
