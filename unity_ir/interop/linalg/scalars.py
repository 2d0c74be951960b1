"""Emit scalar arithmetic and functions of TDL (the language in which operators are defined) in `arith` and `math`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any, TypeAlias

from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IntegerAttr,
    IntegerType,
)
from xdsl.ir import Operation, SSAValue

Element: TypeAlias = BFloat16Type | Float16Type | Float32Type | Float64Type | IntegerType

TYPES: Mapping[str, Element] = {
    "f64": Float64Type(),
    "f32": Float32Type(),
    "bf16": BFloat16Type(),
    "f16": Float16Type(),
    "i64": IntegerType(64),
    "i32": IntegerType(32),
    "bool": IntegerType(8),
}
"""
MLIR's element type for each of the compiler's, in tensors. Conditions are bytes there, 0 or 1: MLIR 22 does not lower
memory of i1 to LLVM (`finalize-memref-to-llvm` fails an assertion).
"""

INT, BOOL, STORED_BOOL = IntegerType(64), IntegerType(1), TYPES["bool"]

Scalar: TypeAlias = SSAValue | int | float
"""A number at one position: an SSA value, or a constant that takes the type of what it is used with."""

_OF_NUMBERS: Mapping[str, Callable[[SSAValue], Operation]] = {
    "exp": math.ExpOp,
    "log": math.LogOp,
    "erf": math.ErfOp,
    "sqrt": math.SqrtOp,
    "rsqrt": math.RsqrtOp,
    "tanh": math.TanhOp,
    "sin": math.SinOp,
    "cos": math.CosOp,
}
"""Functions of one floating point number that are one operation."""

_ARITHMETIC: Mapping[str, tuple[Callable[..., Operation], Callable[..., Operation], Callable[..., Operation]]] = {
    "+": (arith.AddfOp, arith.AddiOp, arith.OrIOp),
    "-": (arith.SubfOp, arith.SubiOp, arith.XOrIOp),
    "*": (arith.MulfOp, arith.MuliOp, arith.AndIOp),
    "maximum": (arith.MaximumfOp, arith.MaxSIOp, arith.OrIOp),
    "minimum": (arith.MinimumfOp, arith.MinSIOp, arith.AndIOp),
}
"""Operations of two numbers, integers and conditions; those of conditions are NumPy's."""

_COMPARISONS: Mapping[str, tuple[str, str]] = {
    "lt": ("olt", "slt"),
    "le": ("ole", "sle"),
    "gt": ("ogt", "sgt"),
    "ge": ("oge", "sge"),
    "eq": ("oeq", "eq"),
    "ne": ("une", "ne"),
}
"""Predicates of `arith.cmpf` and `arith.cmpi`; numbers that are NaN are unequal."""

REDUCERS: Mapping[str, str] = {"sum": "+", "prod": "*", "max": "maximum", "min": "minimum"}
"""The operation of two numbers that a reduction applies."""

_LOW = 0xFFFFFFFF


def neutral(reducer: str, element: Element) -> int | float:
    """Return the value of a reduction (`sum`, `prod`, `max` or `min`) over no elements, for an element type."""
    if reducer in ("sum", "prod"):
        return int(reducer == "prod")
    if not isinstance(element, IntegerType):
        return -inf if reducer == "max" else inf
    return -(2**63) if reducer == "max" else 2**63 - 1


@dataclass
class ScalarBuilder:
    """
    Emits scalar operations where `builder` stands. Floating point numbers are of the type `number`, integers i64,
    conditions i1; constants get a type where they are used.
    """

    builder: Builder
    number: Element

    def __post_init__(self) -> None:
        self._constants: dict[tuple[float, Element], SSAValue] = {}

    def emit(self, op: Operation) -> SSAValue:
        """Insert an operation of one result; return that."""
        return self.builder.insert(op).results[0]

    def constant(self, value: float, element: Element) -> SSAValue:
        """Return a constant of a type, one for all uses of it."""
        key = (value, element)
        if key not in self._constants:
            self._constants[key] = self.emit(constant(value, element))
        return self._constants[key]

    def type_of(self, value: Scalar) -> Element:
        """Return the type in which a scalar is computed with; that of constants depends on whether they are whole."""
        if isinstance(value, SSAValue):
            element: Any = value.type
            return element
        return INT if isinstance(value, int) else self.number

    def widened(self, value: SSAValue) -> SSAValue:
        """Return an element that is read in the type that is computed in: `number`, i64 or i1."""
        element = self.type_of(value)
        if isinstance(element, IntegerType):
            return value if element == BOOL else self.converted(value, BOOL if element == STORED_BOOL else INT)
        return self.converted(value, self.number)

    def converted(self, value: Scalar, element: Element) -> SSAValue:
        """Return a scalar in another type: towards zero to integers, to the nearest to floats, as in PyTorch."""
        if not isinstance(value, SSAValue):
            return self.constant(value, element)
        held = self.type_of(value)
        if held == element:
            return value
        if isinstance(element, IntegerType):
            if element == STORED_BOOL:
                return self.emit(arith.ExtUIOp(self.converted(value, BOOL), element))
            if element == BOOL:
                return self._compared("ne", value, self.constant(0, held))
            if not isinstance(held, IntegerType):
                return self.emit(arith.FPToSIOp(value, element))
            if held == BOOL:
                return self.emit(arith.ExtUIOp(value, element))
            wider = element.width.data > held.width.data
            return self.emit((arith.ExtSIOp if wider else arith.TruncIOp)(value, element))
        if isinstance(held, IntegerType):
            return self.emit((arith.UIToFPOp if held == BOOL else arith.SIToFPOp)(value, element))
        if held.bitwidth == element.bitwidth:
            value, held = self.emit(arith.ExtFOp(value, Float32Type())), Float32Type()
        return self.emit((arith.ExtFOp if element.bitwidth > held.bitwidth else arith.TruncFOp)(value, element))

    def arithmetic(self, op: str, left: Scalar, right: Scalar) -> Scalar:
        """Return `left op right`, for `+ - * /`, `maximum` or `minimum`."""
        if op == "/":
            if not isinstance(left, SSAValue) and not isinstance(right, SSAValue) and right:
                return left / right
            a, b = (self.converted(x, self.number) for x in (left, right))
            return self.emit(arith.DivfOp(a, b))
        if not isinstance(left, SSAValue) and not isinstance(right, SSAValue):
            return _folded(op, left, right)
        element, (a, b) = self._unified(left, right)
        kind = 0 if not isinstance(element, IntegerType) else 2 if element == BOOL else 1
        return self.emit(_ARITHMETIC[op][kind](a, b))

    def call(self, function: str, args: Sequence[Scalar]) -> Scalar:
        """Return a scalar function of TDL (`tdl.functions`) of some scalars."""
        if function in _OF_NUMBERS:
            return self.emit(_OF_NUMBERS[function](self.converted(args[0], self.number)))
        if function in _COMPARISONS:
            return self._compared(function, *self._unified(*args)[1])
        match function:
            case "maximum" | "minimum":
                return self.arithmetic(function, *args)
            case "relu":
                return self.arithmetic("maximum", args[0], 0)
            case "gelu":
                x = self.converted(args[0], self.number)
                half = self.arithmetic("*", 0.5, x)
                of = self.call("erf", [self.arithmetic("*", x, 0.5**0.5)])
                return self.arithmetic("*", half, self.arithmetic("+", 1.0, of))
            case "sigmoid":
                x = self.converted(args[0], self.number)
                small = self.call("exp", [self.emit(arith.NegfOp(x))])
                return self.arithmetic("/", 1.0, self.arithmetic("+", 1.0, small))
            case "pow":
                a, b = (self.converted(x, self.number) for x in args)
                return self.emit(math.PowFOp(a, b))
            case "abs":
                value = self.converted(args[0], self.type_of(args[0]))
                return self.emit((math.AbsIOp if isinstance(value.type, IntegerType) else math.AbsFOp)(value))
            case "floor":
                value = args[0]
                if isinstance(self.type_of(value), IntegerType):
                    return value
                return self.emit(math.FloorOp(self.converted(value, self.number)))
            case "and" | "or":
                a, b = (self.converted(x, BOOL) for x in args)
                return self.emit((arith.AndIOp if function == "and" else arith.OrIOp)(a, b))
            case "not":
                return self.emit(arith.XOrIOp(self.converted(args[0], BOOL), self.constant(1, BOOL)))
            case "where":
                return self.chosen(self.converted(args[0], BOOL), args[1], args[2])
            case "philox":
                return self._philox(*(self.converted(x, INT) for x in args))
            case _:
                raise TypeError(f"{function} is no function of TDL")

    def chosen(self, condition: SSAValue, yes: Scalar, no: Scalar) -> SSAValue:
        """Return `yes` where the condition holds, else `no`."""
        return self.emit(arith.SelectOp(condition, *self._unified(yes, no)[1]))

    def all_of(self, conditions: Sequence[SSAValue]) -> SSAValue:
        """Return whether all of some conditions hold."""
        found = conditions[0]
        for other in conditions[1:]:
            found = self.emit(arith.AndIOp(found, other))
        return found

    def _unified(self, *values: Scalar) -> tuple[Element, list[SSAValue]]:
        """Return scalars in one type: that of numbers if any is one, else of integers, else of conditions."""
        types = [self.type_of(v) for v in values]
        element = self.number if self.number in types else INT if INT in types else BOOL
        return element, [self.converted(v, element) for v in values]

    def _compared(self, function: str, a: SSAValue, b: SSAValue) -> SSAValue:
        by_number, by_integer = _COMPARISONS[function]
        if isinstance(a.type, IntegerType):
            return self.emit(arith.CmpiOp(a, b, by_integer))
        return self.emit(arith.CmpfOp(a, b, by_number))

    def _philox(self, seed: SSAValue, position: SSAValue) -> SSAValue:
        """Return the random number in [0, 1) of `tdl.functions.philox`, which says what it is."""
        shift, low = self.constant(32, INT), self.constant(_LOW, INT)

        def high_word(x: SSAValue) -> SSAValue:
            return self.emit(arith.ShRUIOp(x, shift))

        def low_word(x: SSAValue) -> SSAValue:
            return self.emit(arith.AndIOp(x, low))

        def times(x: SSAValue, by: int) -> SSAValue:
            return self.emit(arith.MuliOp(x, self.constant(by, INT)))

        def plus(x: SSAValue, by: int) -> SSAValue:
            return low_word(self.emit(arith.AddiOp(x, self.constant(by, INT))))

        def mixed(*words: SSAValue) -> SSAValue:
            a, b, c = words
            return self.emit(arith.XOrIOp(self.emit(arith.XOrIOp(a, b)), c))

        k0, k1, c0, c1 = low_word(seed), high_word(seed), low_word(position), high_word(position)
        c2 = c3 = self.constant(0, INT)
        for _ in range(10):
            a, b = times(c0, 0xD2511F53), times(c2, 0xCD9E8D57)
            c0, c1, c2, c3 = (
                mixed(high_word(b), c1, k0),
                low_word(b),
                mixed(high_word(a), c3, k1),
                low_word(a),
            )
            k0, k1 = plus(k0, 0x9E3779B9), plus(k1, 0xBB67AE85)
        assert not isinstance(self.number, IntegerType)
        bits = self.emit(arith.UIToFPOp(self.emit(arith.ShRUIOp(c0, self.constant(8, INT))), self.number))
        return self.emit(arith.MulfOp(bits, self.constant(2.0**-24, self.number)))


def constant(value: float, element: Element) -> arith.ConstantOp:
    """Return an `arith.constant` of an element type; given 2.0 and i64, `arith.constant 2 : i64`."""
    if isinstance(element, IntegerType):
        whole = int(value != 0) if element in (BOOL, STORED_BOOL) else int(value)
        return arith.ConstantOp(IntegerAttr(whole, element))
    attribute: Any = FloatAttr(float(value), element)
    return arith.ConstantOp(attribute)


def _folded(op: str, left: float, right: float) -> float:
    match op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return 0.0 if isinf(left) and not right else left * right
        case "maximum":
            return max(left, right)
        case _:
            return min(left, right)
