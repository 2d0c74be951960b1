"""
Elaborate the vector-Jacobian products of both sides of a substitution by the operators' own gradients, which are called
with symbolic tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Application, Operator
from unity_ir.ops.operator import Tensor as OperatorTensor
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.certificate.elaborate import Elaborator, Made, Tensor, fixed, inputs, key_of, named, side_of
from unity_ir.rules.certificate.terms import Refused
from unity_ir.rules.pattern import AttrExpr, AttrParameter, Operation, Substitution, Term
from unity_ir.rules.poly import Poly, number
from unity_ir.tdl.syntax import NOT_FLOATING, AttrValue


def gradients(of: Elaborator, rule: Substitution, ranks: Mapping[str, int]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """
    Yield each pair of gradients that have to be equal, by the operators' own gradients: a name, the source's, the
    target's. Where the source has no gradient at all, nothing is asked of the target.
    """
    source, target = (_gradients(of, rule, side, ranks) for side in (rule.source, rule.target))
    for name, tensor in inputs(rule, ranks, of.dtypes).items():
        if tensor.dtype not in NOT_FLOATING and source.get(name) is not NO_GRADIENT:
            none = Tensor(tensor.shape, lambda _: (), tensor.dtype)
            a, b = source.get(name, none), target.get(name, none)
            if b is NO_GRADIENT:
                raise Refused(f"{name} has no gradient in the target")
            yield f"{GRADIENT}{name}", a, b


GRADIENT = "gradient of "
"""How the names of gradients begin."""

NO_GRADIENT = Tensor((), lambda _: (), "")
"""The gradient of operands of an operator that has none, and of all that is before it."""


def _gradients(of: Elaborator, rule: Substitution, side: tuple[Term, ...], ranks: Mapping[str, int]) -> Made:
    made = side_of(of, rule, side, ranks)
    grads: Made = {}

    def add(key: object, grad: Tensor) -> None:
        old = grads.get(key)
        if old is None or old is NO_GRADIENT or grad is NO_GRADIENT:
            grads[key] = grad if old is None or grad is NO_GRADIENT else old
        else:
            grads[key] = Tensor(
                old.shape, lambda at: (*old.element(at), *grad.element(at)), old.dtype, gradient=old.gradient
            )

    for n, term in enumerate(side):
        if made[key_of(term)].dtype not in NOT_FLOATING:
            result = made[key_of(term)]
            add(key_of(term), replace(named(f"gradient {n}", result.shape, result.dtype), gradient=True))
    for operation in reversed(rule.operations(side)):
        results = [made[k] for n in range(len(made)) if (k := (id(operation), n)) in made]
        found = [grads.get((id(operation), n)) for n in range(len(results))]
        operands = [made[key_of(t)] for t in operation.operands]
        if all(g is None for g in found):
            continue
        whole = [g or Tensor(t.shape, lambda _: (), t.dtype) for g, t in zip(found, results, strict=True)]
        for term, grad in zip(
            operation.operands, _backward(of, operation, operands, results, whole, ranks), strict=True
        ):
            if grad is not None and made[key_of(term)].dtype not in NOT_FLOATING:
                add(key_of(term), grad)
    return grads


def _backward(
    of: Elaborator,
    operation: Operation,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    ranks: Mapping[str, int],
) -> Sequence[Tensor | None]:
    if operation.op in PARALLEL_OPERATORS:
        return grads
    operator = find_operator(operation.op)
    if operator.gradient is None or any(g is NO_GRADIENT for g in grads):
        return [NO_GRADIENT] * len(operands)
    known: dict[str, Any] = {a.name: a.default for a in operator.line.attributes if a.default is not None}
    known |= {name: _handed(value, of) for name, value in fixed(operation, ranks).items()}
    floating = [g for g, t in zip(grads, results, strict=True) if t.dtype not in NOT_FLOATING]
    given, taken, yielded = (tuple(_Operand(of, t) for t in tensors) for tensors in (floating, operands, results))
    found = operator.gradient(_Application(given, taken, yielded, known))
    return [g.tensor if isinstance(g, _Operand) else None for g in found]


class _Size(int):
    """A size as gradients compute with it: an integer that carries its polynomial, and is compared by it alone."""

    poly: Poly

    def _number(self, other: object = None) -> NoReturn:
        raise Refused(f"a gradient depends on the value of {self.poly}")

    def __add__(self, other: int) -> int:
        return _handed_int(self.poly + _poly(other))

    def __sub__(self, other: int) -> int:
        return _handed_int(self.poly - _poly(other))

    def __rsub__(self, other: int) -> int:
        return _handed_int(_poly(other) - self.poly)

    def __mul__(self, other: Any) -> int:
        return _handed_int(self.poly * _poly(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and self.poly == _poly(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.poly)

    __radd__, __rmul__ = __add__, __mul__
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __neg__ = __abs__ = _number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __truediv__ = __rtruediv__ = __divmod__ = _number
    __pow__ = __rpow__ = _number  # pyright: ignore[reportAssignmentType]


def _poly(value: int) -> Poly:
    return value.poly if isinstance(value, _Size) else number(value)


def _handed_int(poly: Poly) -> int:
    if poly.constant is not None:
        return poly.constant
    size = _Size()
    size.poly = poly
    return size


class _Parameter(float):
    """A number that an attribute parameter stands for: gradients may hand it on, not compute with it."""

    parameter: AttrParameter

    def _number(self, other: object = None) -> NoReturn:
        raise Refused(f"a gradient computes with ${self.parameter.name}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _number
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __neg__ = __abs__ = __bool__ = __int__ = _number
    __float__ = __str__ = __repr__ = __format__ = __pow__ = __floordiv__ = __mod__ = _number  # pyright: ignore


def _handed(value: AttrExpr, of: Elaborator) -> AttrValue:
    match value:
        case Poly():
            return _handed_int(value)
        case tuple():
            return tuple(map(_handed_int, value))
        case AttrParameter(name) if name in of.given:
            return of.given[name]
        case AttrParameter():
            made = _Parameter(0.5)
            made.parameter = value
            return made
        case _:
            return value


@dataclass(frozen=True, eq=False)
class _Application(Application):
    """An operator applied, whose numbers are handed on as they are."""

    def float(self, name: str) -> float:
        value = self.attributes[name]
        return value if isinstance(value, float) else super().float(name)


@dataclass(frozen=True, eq=False)
class _Operand(OperatorTensor):
    """A symbolic tensor, as operators' gradients see it."""

    of: Elaborator
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(_handed_int, self.tensor.shape))

    @property
    def degrees(self) -> tuple[int, ...]:
        return (1,) * len(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def build(
        self, operator: Operator, operands: Sequence[OperatorTensor], attributes: Mapping[str, AttrValue]
    ) -> tuple[_Operand, ...]:
        tensors = [o.tensor for o in operands if isinstance(o, _Operand)]
        given = {name: _expression(value) for name, value in attributes.items()}
        return tuple(_Operand(self.of, t) for t in self.of.apply(operator.name, tensors, given))


def _expression(value: AttrValue) -> AttrExpr:
    match value:
        case _Parameter():
            return value.parameter
        case int():
            return _poly(value)
        case tuple():
            return tuple(map(_poly, value))
        case _:
            return value
