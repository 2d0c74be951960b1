"""
Turn a bound line (an operator's definition in the tensor description language TDL at given shapes) into `linalg`
operations on whole tensors.

It says the same as `tdl.evaluate`, the reference. A reduction is one `linalg.generic`, and so is what is computed at
every position of a result; reductions inside of an expression are tensors of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.builtin import Float32Type, Float64Type, IndexType
from xdsl.ir import SSAValue

from unity_ir.forms.float8 import without_rounding
from unity_ir.forms.windows import masked
from unity_ir.interop.linalg.nests import LoopNest
from unity_ir.interop.linalg.opaque import written_out
from unity_ir.interop.linalg.reads import PreparedRead, prepared
from unity_ir.interop.linalg.scalars import BOOL, INT, STORED_BOOL, TYPES, Element, Scalar, ScalarBuilder
from unity_ir.interop.linalg.tensors import collapsed, concatenated, element_of, emit, shape_of
from unity_ir.interop.linalg.writes import WrittenDim, fix_writer, written_dim
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import Pick, gather
from unity_ir.tdl.segments import segments
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Const,
    Expr,
    Index,
    Name,
    Opaque,
    Reduce,
    Result,
    Var,
    Window,
    children,
    index_names,
)

_COSTLY = ("exp", "log", "erf", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "gelu", "pow", "philox")
"""Functions not to be computed again at every position of a loop that they do not depend on."""


Replicate: TypeAlias = Callable[[SSAValue], SSAValue]
"""Annotates a tensor as one that every device has whole; returns the annotated tensor."""


def compute(
    bound: Bound,
    operands: Sequence[SSAValue],
    builder: Builder,
    replicate: Replicate | None = None,
    offsets: Mapping[str, SSAValue] | None = None,
) -> tuple[SSAValue, ...]:
    """
    Insert operations that compute a bound TDL line, of tensors of the shapes that it was bound to, one per operand, at
    `builder`; return its results, in order.

    Numbers of 16 bits are computed with in f32, and rounded once, in the results. An id out of range reads 0.

    With `replicate`, loops can be divided over devices: a body reads nothing but its arguments. Positions are read from
    tensors that hold them, and what ids pick is a sum over all there is to pick, as the line says.

    If the line is of one device's piece, `offsets` has, for an index variable that is used as a value, the global index
    at which the piece begins, an i64 (0 if left out).
    """
    # MLIR's passes decide in what its products are computed.
    bound = without_rounding(bound)
    line = _LinalgLine(bound, operands, builder, replicate, offsets or {})
    return tuple(map(line.result, bound.results))


@dataclass
class _InBody:
    """A loop nest, what emits scalars in its body, and the expressions that are computed there, by fixed positions."""

    nest: LoopNest
    scalars: ScalarBuilder
    known: dict[tuple[Expr, tuple[tuple[str, SSAValue], ...]], Scalar]


class _LinalgLine:
    """Expressions of one line as tensors over their index variables, each computed once."""

    def __init__(
        self,
        bound: Bound,
        operands: Sequence[SSAValue],
        builder: Builder,
        replicate: Replicate | None,
        offsets: Mapping[str, SSAValue],
    ):
        self.builder, self.replicate, self.offsets = builder, replicate, offsets
        self.ranges: dict[int, SSAValue] = {}
        self.extents: dict[str, int] = dict(bound.extents)
        self.tensors: dict[str, SSAValue] = {p.name: v for p, v in zip(bound.operands, operands, strict=True)}
        floats = [element_of(self.tensors[p.name]) for p in bound.operands if p.floating]
        self.element: Element = floats[0] if floats else Float32Type()
        """The element type of results that have none of their own."""
        self.number: Element = Float64Type() if Float64Type() in floats or not floats else Float32Type()
        """The element type that it is computed in."""
        self.bound = {n for r in bound.results for i in r.indices for n in index_names(i)}
        for result in bound.results:
            self.bound |= _bound_inside(result.expr)
        self.reads: dict[Access, PreparedRead] = {}
        self.known: dict[tuple[Expr, tuple[str, ...], Element | None], SSAValue] = {}

    # -- results

    def result(self, result: Result) -> SSAValue:
        element = self.element if result.dtype is None else TYPES[result.dtype]
        axis, branches = segments(result)
        parts = [self._folded(indices, masked(expr, self.extents), element) for indices, expr in branches]
        return parts[0] if len(parts) == 1 else concatenated(self.builder, parts, axis)

    def _folded(self, indices: Sequence[Index], expr: Expr, element: Element) -> SSAValue:
        """Return an expression over all values of the indices' variables, one dim for each index."""
        if any(isinstance(i, Window) for i in indices):
            return self._written(indices, expr, element)
        names = [n for i in indices for n in index_names(i)]
        return collapsed(self.builder, self.tensor(expr, names, element), [len(index_names(i)) for i in indices])

    def _written(self, indices: Sequence[Index], expr: Expr, element: Element) -> SSAValue:
        """Return a result that is written through windows: at each position, the sum of what is written there."""
        names, dims, counts = list[str](), list[WrittenDim](), list[int]()
        for number, index in enumerate(indices):
            own = index_names(index)
            if isinstance(index, Window):
                own = (f"<{number}>",)
                self.extents[own[0]] = index.size
                dims.append(written_dim(own[0], index, self.extents))
            names += own
            counts.append(len(own))
        body, summed = expr, [tap for dim in dims for tap in dim.taps]
        if isinstance(expr, Reduce) and expr.reducer == "sum" and self._gather(expr) is None:
            body, summed = expr.body, [*summed, *expr.names]
        at = self._nest(names, summed)
        there = at.scalars.all_of([fix_writer(at.nest, dim) for dim in dims])
        value = at.scalars.chosen(there, self.scalar(body, at), 0)
        if summed:
            made = self._as_element(at.nest.finish(value, "sum"), element)
        else:
            made = at.nest.finish(at.scalars.converted(value, element))
        return collapsed(self.builder, made, counts)

    # -- tensors

    def tensor(self, expr: Expr, names: Sequence[str], element: Element | None = None) -> SSAValue:
        """
        Return an expression as a tensor with a dim for each of `names`, in order. `element` is the type of its
        elements; None leaves it in that in which it is computed.
        """
        key = (expr, tuple(names), element)
        if key not in self.known:
            self.known[key] = self._tensor(_pulled(expr) if self.replicate is None else expr, names, element)
        return self.known[key]

    def _tensor(self, expr: Expr, names: Sequence[str], element: Element | None) -> SSAValue:
        if isinstance(expr, Access):
            read = self._read(expr)
            if element == element_of(read.tensor) and read.dims == tuple(map(Var, names)):
                return read.tensor
        if not isinstance(expr, Reduce) or self._gather(expr) is not None:
            at = self._nest(names, ())
            value = self.scalar(expr, at)
            held = at.scalars.type_of(value)
            wanted = element or (STORED_BOOL if held == BOOL else held)
            return at.nest.finish(at.scalars.converted(value, wanted))
        body, summed = expr.body, list(expr.names)
        while isinstance(body, Reduce) and body.reducer == expr.reducer and self._gather(body) is None:
            if not {*summed, *names}.isdisjoint(body.names):
                break
            body, summed = body.body, [*summed, *body.names]
        at = self._nest(names, summed)
        value = self.scalar(body, at)
        held = at.scalars.type_of(value)
        if held == BOOL:
            # Conditions count as numbers: a sum of them is no disjunction.
            held = INT
        return self._as_element(at.nest.finish(at.scalars.converted(value, held), expr.reducer), element)

    def _as_element(self, value: SSAValue, element: Element | None) -> SSAValue:
        """Return a tensor with its elements converted."""
        if element is None or element == element_of(value):
            return value
        names = [f"<{d}>" for d in range(len(shape_of(value)))]
        sizes = dict(zip(names, shape_of(value), strict=True))
        nest = LoopNest(self.builder, sizes, names, ())
        read = nest.element(PreparedRead(value, tuple(map(Var, names))))
        return nest.finish(nest.scalars(self.number).converted(read, element))

    def _nest(self, names: Sequence[str], reduced: Sequence[str]) -> _InBody:
        nest = LoopNest(self.builder, self.extents, names, reduced)
        return _InBody(nest, nest.scalars(self.number), {})

    # -- scalars

    def scalar(self, expr: Expr, at: _InBody) -> Scalar:
        """Return an expression at one position of a loop nest."""
        free = free_variables(expr)
        key = (expr, tuple((n, p) for n, p in at.nest.positions.items() if n in free))
        if key not in at.known:
            at.known[key] = self._scalar(expr, at)
        return at.known[key]

    def _scalar(self, expr: Expr, at: _InBody) -> Scalar:
        match expr:
            case Const(value):
                return int(value) if value.is_integer() and abs(value) < 2**53 else value
            case Name(name):
                return self._position(name, at)
            case Access():
                return at.scalars.widened(at.nest.element(self._read(expr)))
            case Reduce():
                picked = self._gather(expr)
                return self._kept(expr, at) if picked is None else self._gathered(picked, at)
            case Opaque(function, _, _, body):
                (made,), (taken,) = expr.made, expr.names
                return self._kept(self._opaque(function, made, taken, body, at), at)
            case _ if self._is_worth_keeping(expr, at):
                return self._kept(expr, at)
            case Binary(op, left, right):
                return at.scalars.arithmetic(op, self.scalar(left, at), self.scalar(right, at))
            case Call(function, args):
                return at.scalars.call(function, [self.scalar(a, at) for a in args])
            case _:
                raise TypeError(f"{expr} cannot stand inside an expression")

    def _kept(self, expr: Expr, at: _InBody) -> SSAValue:
        """Return an expression that is computed before, as a tensor over its variables."""
        free = free_variables(expr)
        names = [n for n in self.extents if n in free and at.nest.runs_over(n)]
        read = PreparedRead(self.tensor(expr, names), tuple(map(Var, names)))
        return at.scalars.widened(at.nest.element(read))

    def _is_worth_keeping(self, expr: Expr, at: _InBody) -> bool:
        """Return whether an expression has a costly function, and repeats along a loop of this nest."""
        free = free_variables(expr)
        if not free.isdisjoint(at.nest.positions) or not _is_costly(expr):
            return False
        return any(n not in free and self.extents[n] > 1 for n in at.nest.loops)

    def _gathered(self, picked: Pick, at: _InBody) -> SSAValue:
        """Return the body at the one position that the integers name, where there is such a position; 0 elsewhere."""
        index = at.scalars.converted(self.scalar(picked.at, at), INT)
        index = self._moved("-", index, picked.variable, at)
        zero, size = at.scalars.constant(0, INT), at.scalars.constant(self.extents[picked.variable], INT)
        inside = [at.scalars.call("ge", [index, zero]), at.scalars.call("lt", [index, size])]
        there = at.scalars.all_of([c for c in inside if isinstance(c, SSAValue)])
        position = emit(at.nest.inside, arith.IndexCastOp(at.scalars.chosen(there, index, zero), IndexType()))
        with at.nest.fixed(picked.variable, position):
            body = self.scalar(picked.body, at)
        return at.scalars.chosen(there, body, 0)

    def _opaque(self, function: str, made: str, taken: str, body: Expr, at: _InBody) -> Expr:
        """Write out an opaque function of a body, which becomes a tensor that it reads."""
        free = free_variables(body)
        names = [*(n for n in self.extents if n in free and at.nest.runs_over(n)), taken]
        own, other = f"<{function} {len(self.tensors)}>", f"<{taken}>"
        self.tensors[own] = self.tensor(body, names)
        self.extents[other] = self.extents[taken]
        self.bound |= {other, taken}
        read = Access(own, tuple(map(Var, names)))
        return written_out(function, made, taken, other, read, self.extents[taken])

    def _position(self, name: str, at: _InBody) -> Scalar:
        """Return the position of an index variable."""
        if not at.nest.runs_over(name):
            return 0
        if self.replicate is None or name in at.nest.positions:
            return self._moved("+", at.nest.number(name), name, at)
        size = self.extents[name]
        if size not in self.ranges:
            nest = LoopNest(self.builder, {name: size}, [name], ())
            self.ranges[size] = self.replicate(nest.finish(nest.number(name)))
        return at.nest.element(PreparedRead(self.ranges[size], (Var(name),)))

    def _moved(self, op: str, position: SSAValue, variable: str, at: _InBody) -> SSAValue:
        """Return a position of an index variable, moved by the global index at which this piece begins."""
        if variable not in self.offsets:
            return position
        moved = at.scalars.arithmetic(op, position, self.offsets[variable])
        assert isinstance(moved, SSAValue)
        return moved

    def _gather(self, expr: Expr) -> Pick | None:
        """Return the parts of a gather that reads at the position that integers name."""
        return gather(expr) if self.replicate is None else None

    def _read(self, access: Access) -> PreparedRead:
        if access not in self.reads:
            self.reads[access] = prepared(
                self.builder, self.tensors[access.tensor], access.indices, self.extents, self.bound
            )
        return self.reads[access]


def _pulled(expr: Expr) -> Expr:
    """
    Return a gather of a sum, as of products of tokens with the weights of their experts, as the sum of gathers.

    rewrite: sum[v](where(eq(v, e[t]), sum[k](x[t, k] * w[v, k, n]), 0))
             -> sum[k](sum[v](where(eq(v, e[t]), x[t, k] * w[v, k, n], 0)))
    """
    picked = gather(expr)
    if picked is None or not isinstance(picked.body, Reduce) or picked.body.reducer != "sum":
        return expr
    if not free_variables(picked.at).isdisjoint(picked.body.names):
        return expr
    inner = Call("where", (Call("eq", (Name(picked.variable), picked.at)), picked.body.body, Const(0.0)))
    return Reduce("sum", picked.body.indices, Reduce("sum", (Var(picked.variable),), inner))


def _is_costly(expr: Expr) -> bool:
    if isinstance(expr, Call) and expr.function in _COSTLY:
        return True
    return not isinstance(expr, Reduce | Opaque) and any(map(_is_costly, children(expr)))


def _bound_inside(expr: Expr) -> set[str]:
    """Return the variables that reductions inside of an expression run over."""
    found = set(expr.names) if isinstance(expr, Reduce | Opaque) else set[str]()
    return found.union(*map(_bound_inside, children(expr)))
