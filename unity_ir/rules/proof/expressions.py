"""
Expressions of TDL (the tensor description language in which operators are defined) as forms, sums of monomials: the
value of an expression at symbolic positions of its index variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from unity_ir.rules.pattern import AttrParameter
from unity_ir.rules.poly import ONE, ZERO, Poly, product, symbol
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.forms import (
    REAL,
    UNIT,
    Apply,
    Constraint,
    Extreme,
    Form,
    Mono,
    Quantified,
    Read,
    apply,
    as_poly,
    constant,
    guarded,
    of_poly,
    scaled,
    summed,
    times,
)
from unity_ir.rules.proof.scalar import defined, in_exact
from unity_ir.rules.proof.symbolic_line import SymbolicLine
from unity_ir.tdl.functions import ROUNDED
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    Access,
    Affine,
    Binary,
    Call,
    Composite,
    Const,
    Expr,
    Name,
    Segments,
    Size,
    Var,
    accesses,
    joined_position,
)
from unity_ir.tdl.syntax import Reduce as ReduceExpr

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
"""Functions of two values that are 0 or 1."""

SIMPLE = 1000
"""The largest denominator of a fraction that a constant is taken for."""


@dataclass(frozen=True)
class ExpressionForms:
    """Converts the TDL expressions of a line to forms: sums of monomials, by which the prover represents values."""

    line: SymbolicLine
    divided: Mapping[str, tuple[Poly, Poly]]
    """Maps each reduced variable of which only one shard is reduced to (number of that shard, its size)."""

    def form(self, expr: Expr, where: Mapping[str, Poly]) -> Form:
        """
        Return the value of `expr`, an expression of the TDL line, at one position, as a sum of monomials. `where` has
        the position along each index variable that `expr` itself does not reduce over, as a polynomial by name.

        Raises `Undecided` for expressions that are no sum of monomials, such as opaque functions.
        """
        match expr:
            case Access():
                return self._access(expr, where)
            case Const(value):
                return constant(number_of(value))
            case Name(name):
                return of_poly(where[name]) if name in where else self._attribute(name)
            case Size(indices):
                return of_poly(product(self.line.extent(i) for i in indices))
            case Binary(op, left, right):
                return self._binary(op, self.form(left, where), self.form(right, where))
            case Call("where", (condition, yes, no)):
                return self._where(condition, self.form(yes, where), self.form(no, where), where)
            case Call(function, (number,)) if function == ROUNDED and not self.line.context.rounds:
                return self.form(number, where)
            case Call(function, args):
                value = self._compared if function in COMPARISONS else self.form
                return self._call(function, tuple(value(a, where) for a in args))
            case ReduceExpr():
                return self._reduce(expr, where)
            case _:
                raise Undecided(f"{self.line.name}: forms cannot say {type(expr).__name__.lower()}")

    def _call(self, function: str, arguments: tuple[Form, ...]) -> Form:
        if not self.line.context.exact:
            return defined(function, arguments)
        return apply(in_exact(function), arguments)

    def _compared(self, expr: Expr, where: Mapping[str, Poly]) -> Form:
        """
        Return the value of an operand of a comparison. Sums and products of integers are compared as their element type
        holds them: 2^63 - 1 is above what is 1 more.
        """
        found = self.form(expr, where)
        if isinstance(expr, Access):
            tensor = self.line.tensors[expr.tensor]
            if tensor.dtype in ("i64", "i32") and not tensor.stored:
                return _wrapped(found, tensor.dtype)
        return found

    def _attribute(self, name: str) -> Form:
        value = self.line.attributes.get(name)
        match value:
            case Poly():
                return of_poly(value)
            case AttrParameter(parameter):
                return of_poly(symbol(REAL + parameter))
            case int() | float():
                return constant(number_of(value))
            case _:
                raise Undecided(f"{self.line.name}: attribute {name} is no number")

    def _access(self, access: Access, where: Mapping[str, Poly]) -> Form:
        tensor = self.line.tensors[access.tensor]
        position: list[Poly] = []
        guards: list[Constraint] = []
        for index, size in zip(access.indices, tensor.shape, strict=True):
            match index:
                case Var(name):
                    position.append(where.get(name, ZERO) if self.line.extents[name] == ONE else where[name])
                case Composite(names):
                    at = joined_position(index, self.line.extents, where.__getitem__)
                    self._remember(names, at, where)
                    position.append(at)
                case Segments(_, active) if active is not None:
                    position.append(joined_position(index, self.line.extents, where.__getitem__))
                case _:
                    at, inside = self._inside(index, size, where)
                    position.append(at)
                    guards += inside
        return guarded(tensor.element(tuple(position)), guards)

    def _remember(self, names: Sequence[str], at: Poly, where: Mapping[str, Poly]) -> None:
        """Record the quotient and remainder of a position in a dim of several variables."""
        inner = product(self.line.extents[n] for n in names[1:])
        rest = ZERO
        for n in names[1:]:
            rest = rest * self.line.extents[n] + where[n]
        self.line.context.digits[at, inner] = (where[names[0]], rest)

    def _inside(self, index: object, size: Poly, where: Mapping[str, Poly]) -> tuple[Poly, list[Constraint]]:
        """Return the position of a window, and the constraints that it lies in the dim."""
        if not isinstance(index, Affine):
            raise Undecided(f"{self.line.name}: {index} is no index")
        terms, at = self.line.terms(index)
        for factor, variable in terms:
            at = at + factor * where[variable]
        return at, [Constraint(at), Constraint(size - 1 - at)]

    def _binary(self, op: str, left: Form, right: Form) -> Form:
        if self.line.context.exact and (as_poly(left) is None or as_poly(right) is None):
            return _rounded(op, left, right)
        match op:
            case "+":
                return (*left, *right)
            case "-":
                return (*left, *scaled(right, -1))
            case "*":
                return _product(left, right)
            case _:
                return _product(left, apply("recip", (right,)))

    def _where(self, condition: Expr, yes: Form, no: Form, where: Mapping[str, Poly]) -> Form:
        """
        Return the form of `where(condition, yes, no)`.

        A condition on indices becomes a guard; one on values becomes a factor of each branch.
        """
        match condition:
            case Call(comparison, (a, b)) if comparison in COMPARISONS:
                left, right = self._compared(a, where), self._compared(b, where)
                difference = as_poly((*left, *scaled(right, -1)))
                if difference is not None:
                    holds, fails = _guards(comparison, difference)
                    return (*(m for g in holds for m in guarded(yes, g)), *(m for g in fails for m in guarded(no, g)))
                factor = self._call(comparison, (_position(left), _position(right)))
            case Call(function, args):
                factor = self._call(function, tuple(self.form(a, where) for a in args))
            case _:
                factor = self.form(condition, where)
        chosen, other = (_branch(function, factor) for function in ("if", "if not"))
        return (*times(chosen, yes), *times(other, no))

    def _reduce(self, expr: ReduceExpr, where: Mapping[str, Poly]) -> Form:
        inner = dict(where)
        binders: list[str] = []
        domain: list[Constraint] = []
        for name in expr.names:
            task, size = self.divided.get(name, (ZERO, self.line.extents[name]))
            position, own, within = self.line.context.index(name, size)
            inner[name] = task * size + position
            binders += own
            domain += within
        # A reduction passes over the positions at which a window of its body lies outside.
        for access in accesses(expr.body):
            for index, size in zip(access.indices, self.line.tensors[access.tensor].shape, strict=True):
                if isinstance(index, Affine) and any(t.variable in expr.names for t in index.terms):
                    free = {t.variable for t in index.terms if t.variable is not None} - self.line.attributes.keys()
                    if free <= inner.keys():
                        domain += self._inside(index, size, inner)[1]
        body = self.form(expr.body, inner)
        if self.line.context.exact and expr.reducer in ("sum", "prod") and len(expr.names) > 1:
            # Additions round by their order: a sum over the same elements, columns first, is another.
            order = Apply("in order", tuple(_position(of_poly(inner[name])) for name in expr.names))
            body = times((Mono(UNIT, (), frozenset(), (order,)),), body)
        if expr.reducer == "sum" and not (self.line.context.exact and gather(expr) is None):
            return summed(body, tuple(binders), domain)
        part = Quantified(tuple(binders), frozenset(domain), body)
        # A product that is to round alike is no product of products.
        reducer = "prod'" if self.line.context.exact and expr.reducer == "prod" else expr.reducer
        return (Mono(UNIT, (), frozenset(), (Extreme(reducer, (part,)),)),)


def number_of(value: float) -> Fraction:
    """
    Return the number that a constant stands for: the simplest fraction that is written so in floating point, 1/6 for
    0.16666666666666666 and 1/10 for 0.1; otherwise the decimal.
    """
    simple = Fraction(value).limit_denominator(SIMPLE)
    return simple if float(simple) == value else Fraction(repr(float(value)))


def _product(left: Form, right: Form) -> Form:
    """Return a product; 0 times what may be no number keeps it, with 0 as its coefficient."""
    if left and right:
        return times(left, right)
    return tuple(Mono(Fraction(0), m.binders, m.domain, m.factors) for m in left or right if m.factors)


def _rounded(op: str, left: Form, right: Form) -> Form:
    """
    Return an operation of arithmetic that rounds, as an uninterpreted function.

    Only laws that hold to the last bit are used: negation, and adding 0 or multiplying by 1 or -1.
    """
    if op == "-":
        op, right = "+", scaled(right, -1)
    units = {constant(1): 1, constant(-1): -1}
    if op == "+" and not (left and right):
        return left or right
    if op == "*" and left in units:
        return scaled(right, units[left])
    if op in "*/" and right in units:
        return scaled(left, units[right])
    return (Mono(UNIT, (), frozenset(), (Apply(op, (left, right)),)),)


def _branch(function: str, condition: Form) -> Form:
    """Return 1 where a branch of `where` is chosen, else 0."""
    return (Mono(UNIT, (), frozenset(), (Apply(function, (condition,)),)),)


def _wrapped(form: Form, dtype: str) -> Form:
    """Return what is left of an integer result of arithmetic in its element type."""
    return form if as_poly(form) is not None else (Mono(UNIT, (), frozenset(), (Apply(f"wrapped {dtype}", (form,)),)),)


def _position(form: Form) -> Form:
    """
    Return the form of an index that is compared with a value: the element at this index of a tensor of all indices.
    """
    poly = as_poly(form)
    return form if poly is None else (Mono(UNIT, (), frozenset(), (Read("#", (poly,)),)),)


def _guards(comparison: str, difference: Poly) -> tuple[list[tuple[Constraint, ...]], list[tuple[Constraint, ...]]]:
    """
    Return the disjoint cases in which the comparison of `difference` with 0 holds, and those in which it does not.
    """
    above, below = Constraint(difference - 1), Constraint(-difference - 1)
    zero = Constraint(difference, equal=True)
    not_below, not_above = Constraint(difference), Constraint(-difference)
    match comparison:
        case "gt":
            return [(above,)], [(not_above,)]
        case "ge":
            return [(not_below,)], [(below,)]
        case "lt":
            return [(below,)], [(not_below,)]
        case "le":
            return [(not_above,)], [(above,)]
        case "eq":
            return [(zero,)], [(above,), (below,)]
        case _:
            return [(above,), (below,)], [(zero,)]
