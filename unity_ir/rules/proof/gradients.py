"""
The vector-Jacobian products of a substitution's sides at symbolic sizes.

Gradients of operators are written over the protocol `ops.operator.Tensor`. Here a tensor is a `TensorForm`, calling an
operator applies its line, and sizes are integers that remember their polynomial. So the gradients that are compared are
those that `pcg-differentiate` puts into the graph, with the same behaviour at ties of maxima.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Self, SupportsIndex

from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Application, Operator
from unity_ir.ops.operator import Tensor as OperatorTensor
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import AttrExpr, AttrParameter, Input, Substitution, Term
from unity_ir.rules.poly import Poly, exact_quotient, number
from unity_ir.rules.proof.cases import Case, attributes_at, result_of, tensors
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.lines import apply_operator
from unity_ir.rules.proof.tensors import TensorForm, added, named, zeros
from unity_ir.tdl.syntax import AttrValue


class SymbolicInt(int):
    """
    The value that a size has in the sample, as an integer that also carries the size as a polynomial in symbols. The
    operators' gradient functions, written for integers, compute with it in a proof for all sizes.

    Sums, differences, products and exact quotients keep track of polynomials, and `==` compares these. An order (`<`)
    that is not the same for all sizes, or other arithmetic, raises `Undecided`, so that no gradient is built for the
    sample only.
    """

    poly: Poly

    @classmethod
    def at(cls, poly: Poly, sample: Mapping[str, int]) -> Self:
        """
        Make the integer that is the value of `poly` when its symbols have the values in `sample`, by name; it carries
        `poly`.
        """
        return cls.of(poly, poly.at(sample))

    @classmethod
    def of(cls, poly: Poly, value: int) -> Self:
        """Make the integer `value`, which carries the polynomial `poly` in symbolic sizes."""
        made = cls(value)
        made.poly = poly
        return made

    def __add__(self, other: int) -> SymbolicInt:
        return SymbolicInt.of(self.poly + _poly(other), _int(self) + _int(other))

    def __radd__(self, other: int) -> SymbolicInt:
        return self + other

    def __sub__(self, other: int) -> SymbolicInt:
        return SymbolicInt.of(self.poly - _poly(other), _int(self) - _int(other))

    def __rsub__(self, other: int) -> SymbolicInt:
        return SymbolicInt.of(_poly(other) - self.poly, _int(other) - _int(self))

    def __mul__(self, other: object) -> SymbolicInt:
        if not isinstance(other, int):
            return NotImplemented
        return SymbolicInt.of(self.poly * _poly(other), _int(self) * _int(other))

    def __rmul__(self, other: object) -> SymbolicInt:
        return self * other

    def __neg__(self) -> SymbolicInt:
        return SymbolicInt.of(-self.poly, -_int(self))

    def __floordiv__(self, other: int) -> SymbolicInt:
        quotient = exact_quotient(self.poly, _poly(other))
        if quotient is None:
            raise Undecided(f"a gradient divides {self.poly} by {_poly(other)}")
        return SymbolicInt.of(quotient, _int(self) // _int(other))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return NotImplemented
        # A size that is a symbol is taken to be no other number: at sizes of 1, lines say the same.
        return self.poly == _poly(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self._compared(0, bool(_int(self)))

    def __hash__(self) -> int:
        return hash(self.poly)

    def __lt__(self, other: int) -> bool:
        return self._compared(other, _int(self) < _int(other))

    def __le__(self, other: int) -> bool:
        return self._compared(other, _int(self) <= _int(other))

    def __gt__(self, other: int) -> bool:
        return self._compared(other, _int(self) > _int(other))

    def __ge__(self, other: int) -> bool:
        return self._compared(other, _int(self) >= _int(other))

    def _compared(self, other: int, answer: bool) -> bool:
        if (self.poly - _poly(other)).constant is None:
            raise Undecided(f"a gradient depends on how {self.poly} and {_poly(other)} compare")
        return answer

    def _unknown(self, other: object = None) -> NoReturn:
        raise Undecided(f"a gradient computes with {self.poly} in a way that polynomials cannot follow")

    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __rfloordiv__ = _unknown
    __pow__ = __rpow__ = _unknown  # pyright: ignore[reportAssignmentType]
    __float__ = __str__ = __repr__ = __format__ = __divmod__ = __rdivmod__ = __abs__ = __round__ = _unknown
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __invert__ = _unknown

    def __index__(self) -> int:
        if self.poly.constant is None:
            self._unknown()
        return _int(self)

    __int__ = __trunc__ = __index__


def _int(value: int) -> int:
    """Return the plain integer."""
    return int.__int__(value)


def _poly(value: SupportsIndex) -> Poly:
    return value.poly if isinstance(value, SymbolicInt) else number(int(value))


class _Number(float):
    """The number of an attribute that a match gives. Gradients may hand it on, not compute with it."""

    parameter: AttrParameter

    def _unknown(self, other: object = None) -> NoReturn:
        raise Undecided(f"a gradient computes with ${self.parameter.name}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __neg__ = __abs__ = __bool__ = __int__ = _unknown
    __float__ = __str__ = __repr__ = __format__ = __round__ = __trunc__ = __floor__ = __ceil__ = _unknown
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _unknown
    __pow__ = _unknown  # pyright: ignore[reportAssignmentType]
    __hash__ = float.__hash__


@dataclass(frozen=True, eq=False)
class _Application(Application):
    """An operator applied, whose numbers are handed on as they are."""

    def float(self, name: str) -> float:
        value = self.attributes[name]
        return value if isinstance(value, float) else super().float(name)


@dataclass(frozen=True, eq=False)
class _Symbolic(OperatorTensor):
    """A proof's tensor, as operators' gradients see it."""

    context: ProofContext
    tensor: TensorForm

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(SymbolicInt.at(size, self.context.sample) for size in self.tensor.shape)

    @property
    def degrees(self) -> tuple[int, ...]:
        return (1,) * len(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def build(
        self, operator: Operator, operands: Sequence[OperatorTensor], attributes: Mapping[str, AttrValue]
    ) -> tuple[_Symbolic, ...]:
        tensors = [o.tensor for o in operands if isinstance(o, _Symbolic)]
        polys = {name: _attribute(value) for name, value in attributes.items()}
        return tuple(_Symbolic(self.context, t) for t in apply_operator(self.context, operator.name, tensors, polys))


def _attribute(value: AttrValue) -> AttrExpr:
    match value:
        case _Number():
            return value.parameter
        case int():
            return _poly(value)
        case tuple():
            return tuple(map(_poly, value))
        case _:
            return value


class _Unknown:
    """The gradient of what reaches an operator that has none."""


NO_GRADIENT = _Unknown()
"""The gradient of operands of an operator that has none, and of all that is before it."""

Product = TensorForm | _Unknown | None
"""The gradient of a value: None where it is zero everywhere, `NO_GRADIENT` where an operator on the way has none."""


def vector_jacobian_products(
    rule: Substitution, side: tuple[Term, ...], inputs: Mapping[str, TensorForm], context: ProofContext, case: Case
) -> tuple[dict[str, Product], list[TensorForm]]:
    """
    Differentiate a side of a rule (source or target) at symbolic sizes; return (the gradient of each floating point
    input, by name; the side's results, in order). A gradient is None where no result depends on the input,
    `NO_GRADIENT` where an operator on the way has none.

    `inputs` are the rule's inputs by name, `case` the case of the proof they are for; constraints that are assumed on
    the way are added to `context`. The gradients of the results are unknown tensors, so these are vector-Jacobian
    products. Raises `Undecided` for operators whose results cannot be written as sums of monomials.
    """
    results, made = tensors(rule, side, inputs, context, case.fixed)
    grads: dict[object, Product] = {}
    for n, (term, tensor) in enumerate(zip(side, results, strict=True)):
        if tensor.floating:
            _add(grads, _key(term), _cotangent(n, tensor))
    for operation in reversed(rule.operations(side)):
        own = made[id(operation)]
        found = [grads.get((id(operation), i)) for i in range(len(own))]
        operands = [result_of(t, inputs, made) for t in operation.operands]
        if all(g is None for g in found) or not any(t.floating for t in operands):
            continue
        values = _operand_gradients(operation.op, attributes_at(operation, case.fixed), operands, own, found, context)
        for term, operand, value in zip(operation.operands, operands, values, strict=True):
            if operand.floating and value is not None:
                _add(grads, _key(term), value)
    return {i.name: grads.get(i.name) for i in rule.inputs if inputs[i.name].floating}, results


def _key(term: Term) -> object:
    return term.name if isinstance(term, Input) else (id(term.operation), term.index)


def _cotangent(n: int, of: TensorForm) -> TensorForm:
    return replace(named(f"gradient of result {n}", of.shape, of.dtype), gradient=True)


def _add(grads: dict[object, Product], key: object, grad: Product) -> None:
    old = grads.get(key)
    if isinstance(old, TensorForm) and isinstance(grad, TensorForm):
        grads[key] = added(old, grad)
    else:
        grads[key] = old if isinstance(old, _Unknown) or grad is None else grad


def _operand_gradients(
    op: str,
    attributes: Mapping[str, AttrExpr],
    operands: Sequence[TensorForm],
    results: Sequence[TensorForm],
    grads: Sequence[Product],
    context: ProofContext,
) -> Sequence[Product]:
    if any(isinstance(g, _Unknown) for g in grads):
        return [NO_GRADIENT] * len(operands)
    if op in PARALLEL_OPERATORS:
        return grads
    operator = find_operator(op)
    if operator.gradient is None:
        return [NO_GRADIENT] * len(operands)
    whole = [g if isinstance(g, TensorForm) else zeros(t.shape, t.dtype) for g, t in zip(grads, results, strict=True)]
    given = {a.name: a.default for a in operator.line.attributes if a.default is not None}
    known = {**given, **{name: _value(value, context) for name, value in attributes.items()}}
    floating, values, made = (
        tuple(_Symbolic(context, t) for t in of)
        for of in ([g for g, t in zip(whole, results, strict=True) if t.floating], operands, results)
    )
    try:
        found = operator.gradient(_Application(floating, values, made, known))
    except (IndexError, ValueError) as error:
        raise Undecided(f"{op} has no gradient at these attributes") from error
    return [f.tensor if isinstance(f, _Symbolic) else None for f in found]


def _value(attribute: AttrExpr, context: ProofContext) -> AttrValue:
    match attribute:
        case Poly():
            return SymbolicInt.at(attribute, context.sample)
        case tuple():
            return tuple(SymbolicInt.at(p, context.sample) for p in attribute)
        case AttrParameter(name):
            given = context.given[name]
            if isinstance(given, str):
                return given
            made = _Number(given)
            made.parameter = attribute
            return made
        case _:
            return attribute
