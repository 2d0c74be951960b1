"""
Applies operators to tensors of symbolic sizes: the elements of the results as forms (sums of monomials, `forms`), for
all sizes at once.

A line is spelled out at sample sizes, which settle ranks and the number of variadic operands. Its index variables then
get symbolic extents from the operands' shapes (`symbolic_line`), and its expressions become forms (`expressions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Operator, Shapes
from unity_ir.rules.pattern import AttrExpr, AttrParameter
from unity_ir.rules.poly import ZERO, Poly, product
from unity_ir.rules.proof.casts import converted
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.dims import number_of
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.expressions import ExpressionForms
from unity_ir.rules.proof.forms import Constraint, Form, Mono, guarded, summed
from unity_ir.rules.proof.normal import CONDITIONS
from unity_ir.rules.proof.symbolic_line import SymbolicLine
from unity_ir.rules.proof.tensors import PADDING, ElementPosition, TensorForm, Undivided, padded, reshaped, unbroadcast
from unity_ir.tdl import syntax
from unity_ir.tdl.bind import Spelled, spell
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    NOT_FLOATING,
    Access,
    AttrValue,
    Call,
    Cases,
    Composite,
    Const,
    Entry,
    Expr,
    Segments,
    Var,
)
from unity_ir.tdl.syntax import Reduce as ReduceExpr


def apply_operator(
    context: ProofContext, name: str, operands: Sequence[TensorForm], attributes: Mapping[str, AttrExpr]
) -> list[TensorForm]:
    """
    Apply the operator called `name` to tensors of symbolic shapes, as its TDL line defines it; return its results, in
    order.

    `attributes` has values by name, others have their defaults; constraints that are assumed on the way are added to
    `context`, the state of the proof. Raises `Undecided` for lines whose results cannot be written as sums of
    monomials, `UnityError` where the operator does not apply to these operands.
    """
    operator = find_operator(name)
    results = _results(context, operator, operands, attributes)
    return [replace(r, gradient=True) for r in results] if any(t.gradient for t in operands) else results


def _results(
    context: ProofContext, operator: Operator, operands: Sequence[TensorForm], attributes: Mapping[str, AttrExpr]
) -> list[TensorForm]:
    name = operator.name
    if not isinstance(operator.tdl, str):
        return [_moved(context, name, operands[0], attributes)]
    for clause in operator.line.clauses:
        given = attributes.get(clause.value.attribute) if isinstance(clause.value, Entry) else None
        if clause.kind == "rank" and isinstance(given, Poly) and given.constant is None:
            raise Undecided(f"{name}: {given} says which dims there are, but depends on sizes")
    shapes = [tuple([context.at_sample(s) for s in t.shape]) for t in operands]
    values = {a: _at_sample(context, v) for a, v in attributes.items()}
    spelled = _spelled(operator, tuple(shapes), tuple(values.items()), tuple(t.dtype for t in operands))
    return line_results(SymbolicLine(context, operator, spelled, operands, attributes))


@lru_cache(maxsize=4096)
def _spelled(
    operator: Operator, shapes: Shapes, attributes: tuple[tuple[str, AttrValue], ...], dtypes: tuple[str, ...]
) -> Spelled:
    # Every claim about a rule is at the same sample sizes.
    return spell(operator.line, shapes, dict(attributes), dtypes)


def _moved(context: ProofContext, name: str, of: TensorForm, attributes: Mapping[str, AttrExpr]) -> TensorForm:
    """Return the result of an operator whose line is written from the sizes."""
    match name, attributes.get("shape"):
        case "pad", _:
            dim, before, after, interior = (number_of(Entry(n), {n: ZERO, **attributes}) for n in PADDING)
            return padded(of, dim, before, after, interior)
        case "reshape", tuple() as shape:
            return reshaped(of, shape, context.digits, context.divided)
        case "broadcast_grad", tuple() as shape:
            if context.exact:
                raise Undecided("broadcast_grad: in which order its sum rounds is not known")
            return unbroadcast(of, shape)
        case _:
            raise Undecided(f"the line of {name} depends on the sizes")


def _at_sample(context: ProofContext, value: AttrExpr) -> AttrValue:
    match value:
        case Poly():
            return context.at_sample(value)
        case tuple():
            return tuple([context.at_sample(p) for p in value])
        case AttrParameter(name):
            return context.given[name]
        case _:
            return value


def line_results(line: SymbolicLine, divided: Mapping[str, tuple[Poly, Poly]] | None = None) -> list[TensorForm]:
    """
    Return the results of an operator's line at symbolic sizes, in order.

    With `divided`, they are the partial sums of one rank, for the proof that these add up to the whole: it maps each
    index variable that the line sums over, and of which the rank has one shard, to (number of the shard, from 0;
    positions in a shard), two polynomials. All other variables, or all if it is None, run over their whole extent.
    """
    make = _Results(line, ExpressionForms(line, divided or {}))
    return [make.result(r) for r in line.spelled.bound.results]


@dataclass(frozen=True)
class _Results:
    """Makes the tensors of a line's results."""

    line: SymbolicLine
    forms: ExpressionForms

    def result(self, result: syntax.Result) -> TensorForm:
        """Return one result: its symbolic shape, its element at any position, and its element type."""
        shape = tuple(self.line.extent(i) for i in result.indices)

        def element(at: ElementPosition) -> Form:
            return self._element(result, at)

        if isinstance(result.expr, Access) and result.dtype is not None:
            source = self.line.tensors[result.expr.tensor]
            made = TensorForm(shape, element, source.dtype, source.stored, source.held)
            return converted(made, result.dtype, self.line.context.rounds and not source.gradient)
        dtype = result.dtype or self.line.dtype
        stored = dtype == "bool" or (dtype == self.line.dtype and self._selects(result.expr))
        return TensorForm(shape, element, dtype, stored)

    def _selects(self, expr: Expr) -> bool:
        """
        Return whether every element is an element of an operand as it is stored, a negated one, or a small number.
        """
        match expr:
            case Access(tensor):
                return self.line.tensors[tensor].stored
            case Const(value):
                return value in (0, 1, -1)
            case Cases(branches):
                return all(self._selects(e) for _, e in branches)
            case Call(function, _) if function in CONDITIONS:
                return True
            case Call("where", (_, yes, no)):
                return self._selects(yes) and self._selects(no)
            case Call("relu" | "maximum" | "minimum" | "abs", args) if self.line.dtype not in NOT_FLOATING:
                return all(map(self._selects, args))
            case ReduceExpr("max" | "min", _, body):
                return self._selects(body)
            case ReduceExpr("sum", _, _):
                picked = gather(expr)
                return picked is not None and self._selects(picked.body)
            case _:
                return False

    def _element(self, result: syntax.Result, at: ElementPosition) -> Form:
        """
        Return the element of a result at a position; of a result written through windows, the sum of what is written
        there.
        """
        where: dict[str, Poly] = {}
        guards: list[Constraint] = []
        bound: list[str] = []
        segment: tuple[tuple[str, ...], Poly] | None = None
        for index, position in zip(result.indices, at, strict=True):
            match index:
                case Var(name):
                    where[name] = position
                case Composite(names):
                    where |= self._digits(names, position)
                case Segments(names):
                    segment = (names, position)
                case _:
                    terms, offset = self.line.terms(index)  # pyright: ignore[reportArgumentType]
                    reached = offset
                    for factor, variable in terms:
                        if variable not in where:
                            size = self.line.extents[variable]
                            where[variable], own, within = self.line.context.index(variable, size)
                            bound += own
                            guards += within
                        reached = reached + factor * where[variable]
                    guards.append(Constraint(reached - position, equal=True))
        if segment is not None and isinstance(result.expr, Cases):
            return self._segments(result.expr, segment, where)
        if bound and self.line.context.exact:
            raise Undecided(f"{self.line.name}: in which order its sums round is not known")
        return summed(self.forms.form(result.expr, where), tuple(bound), guards)

    def _segments(self, cases: Cases, segment: tuple[tuple[str, ...], Poly], where: Mapping[str, Poly]) -> Form:
        _, position = segment
        out: list[Mono] = []
        start = ZERO
        for variable, expr in cases.branches:
            end = start + self.line.extents[variable]
            inside = (Constraint(position - start), Constraint(end - 1 - position))
            out += guarded(self.forms.form(expr, {**where, variable: position - start}), inside)
            start = end
        return tuple(out)

    def _digits(self, names: Sequence[str], position: Poly) -> dict[str, Poly]:
        """Return the values of a dim's variables, given a position in the dim."""
        if len(names) == 1:
            return {names[0]: position}
        inner = product(self.line.extents[n] for n in names[1:])
        found = self.line.context.divided(position, inner)
        if found is None:
            raise Undivided(position, inner)
        quotient, remainder = found
        return {names[0]: quotient, **self._digits(names[1:], remainder)}
