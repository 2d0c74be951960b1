"""
Rewrite rules (substitutions) as data: a source and a target pattern over the same inputs, with sizes, degrees and
attributes as symbols.

    matmul(relu(x), concat(v, w)) of x [a.., k], v [k, n], w [k, m]

A side (source or target) is a tuple of terms, one per result; a shared subterm is one object. The prover and the
matcher both read them, and `build` makes the graph of a side once all symbols have values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from unity_ir.errors import UnityError
from unity_ir.pcg.node import Value, apply, parallel
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.types import TensorType, tensor_type
from unity_ir.rules.poly import ONE, Poly, number
from unity_ir.tdl.syntax import AttrValue


@dataclass(frozen=True, slots=True)
class DimPack:
    """An entry of a rule's shape that stands for any number of dims: `a..`. Their number is the symbol `#a`."""

    name: str


@dataclass(frozen=True, slots=True)
class AttrParameter:
    """
    An attribute parameter of a rule, `$act`: it stands for the value of an attribute, a float or a name, that the
    matched operator has.
    """

    name: str


AttrExpr: TypeAlias = Poly | tuple[Poly, ...] | AttrParameter | float | str
"""Value of an attribute in a rule: polynomials for kinds `int` and `ints`, a parameter, or a constant."""

ShapeEntry: TypeAlias = Poly | DimPack

ELEMENTS: Mapping[str, tuple[str, ...]] = {
    "float": ("f64", "f32", "bf16", "f16"),
    "int": ("i64", "i32", "bool"),
    "bool": ("bool",),
}
"""Element types that an input of a rule may have, by what its text says of them; the first is that of samples."""

Bindings: TypeAlias = Mapping[str, int | float | str | tuple[int, ...]]
"""Values of sizes, degrees and attribute parameters by name; for packs, the sizes of their dims."""


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """
    An input of a rule: it matches any value of this shape and division into pieces. Compared by identity.

    `degrees` has the number of pieces of each entry of `shape` (1 for packs); if empty, all are 1. `sum` pieces are
    addends of the value, `copy` pieces are equal. `elements` says of what types elements may be: a key of `ELEMENTS`.
    """

    name: str
    shape: tuple[ShapeEntry, ...]
    degrees: tuple[Poly, ...] = ()
    sum: Poly = ONE
    copy: Poly = ONE
    elements: str = "float"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """
    An operator of a rule's pattern, parallel or compute, applied to terms (inputs of the rule, or results of
    operations). Compared by identity: a shared subterm is one object. Attributes that are not written have the
    operator's defaults.
    """

    op: str
    operands: tuple[Term, ...]
    attributes: tuple[tuple[str, AttrExpr], ...] = ()


@dataclass(frozen=True, slots=True)
class ResultOf:
    """A term of a rule's pattern: result number `index`, from 0, of an operation."""

    operation: Operation
    index: int = 0


Term: TypeAlias = Input | ResultOf


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on sizes, `poly >= 0`, under which a rule holds."""

    poly: Poly


@dataclass(frozen=True, slots=True)
class ProofRecord:
    """
    The proof that a rule's text carries: the verdict, the seconds the proof took, and the conditions it assumed. It is
    a record only: `rules.trust` decides by proofs of its own.
    """

    verdict: str
    seconds: float
    assumed: tuple[str, ...] = ()
    digest: str = ""
    """`rules.trust.digest` of the rule that was proved."""


@dataclass(frozen=True, slots=True)
class Substitution:
    """A rewrite rule: values that match the pattern `source` may be replaced by those of `target`, result by result."""

    name: str
    inputs: tuple[Input, ...]
    source: tuple[Term, ...]
    target: tuple[Term, ...]
    conditions: tuple[Condition, ...] = ()
    exact: bool = False
    """Both sides are equal to the last bit; otherwise the order of floating point additions may differ."""
    proof: ProofRecord | None = None
    """The proof that the text carries, or None."""

    def operations(self, side: tuple[Term, ...]) -> list[Operation]:
        """
        Return all operations (operators applied to terms) of `side`, the rule's `source` or `target` or both joined,
        each once, operands before users.
        """
        found: dict[int, Operation] = {}

        def visit(term: Term) -> None:
            if isinstance(term, ResultOf) and id(term.operation) not in found:
                for operand in term.operation.operands:
                    visit(operand)
                found[id(term.operation)] = term.operation

        for term in side:
            visit(term)
        return list(found.values())

    @property
    def rewrites(self) -> bool:
        """Whether the rule changes anything: False if its two sides are the same terms."""
        known: dict[tuple[int, int], bool] = {}

        def same(one: Term, other: Term) -> bool:
            if isinstance(one, Input) or isinstance(other, Input):
                return one is other
            a, b = one.operation, other.operation
            key = id(a), id(b)
            if key not in known:
                alike = (a.op, dict(a.attributes), len(a.operands)) == (b.op, dict(b.attributes), len(b.operands))
                known[key] = alike and all(map(same, a.operands, b.operands))
            return known[key] and one.index == other.index

        return not all(map(same, self.source, self.target))

    @property
    def symbols(self) -> frozenset[str]:
        """
        The names of all symbols of a rule, whose values are integers: those in sizes, degrees, attributes and
        conditions; `#a` is the number of dims that the pack `a..` stands for.
        """
        return frozenset[str]().union(*(p.symbols for p in self.polys))

    @property
    def polys(self) -> list[Poly]:
        """All polynomials in a rule, in no particular order: its sizes, degrees, attributes and conditions."""
        polys: list[Poly] = [c.poly for c in self.conditions]
        for i in self.inputs:
            polys += [*(s for s in i.shape if isinstance(s, Poly)), *i.degrees, i.sum, i.copy]
        for operation in self.operations((*self.source, *self.target)):
            for _, value in operation.attributes:
                polys += [value] if isinstance(value, Poly) else value if isinstance(value, tuple) else []
        return polys


def value_of(poly: Poly, bindings: Bindings) -> int:
    """
    Return the value of a polynomial, an integer, when its symbols have the values in `bindings`, by name. Raises
    `UnityError` naming a symbol without a value.
    """
    if poly.constant is not None:
        return poly.constant
    values: dict[str, int] = {}
    for s in poly.symbols:
        found = bindings.get(s.removeprefix("#"))
        if s.startswith("#") and isinstance(found, tuple):
            values[s] = len(found)
        elif isinstance(found, int):
            values[s] = found
        else:
            raise UnityError(f"rule: {s} has no value")
    return poly.at(values)


def input_type(of: Input, dtype: str, bindings: Bindings) -> TensorType:
    """
    Return the type of a rule's input, of element type `dtype`, when its symbols have the values in `bindings`, by name.
    Raises `UnityError` for symbols without a value.
    """
    shape: list[int] = []
    degrees: list[int] = []
    for i, size in enumerate(of.shape):
        if isinstance(size, DimPack):
            dims = bindings.get(size.name)
            if not isinstance(dims, tuple):
                raise UnityError(f"rule: {size.name}.. has no sizes")
            shape += dims
            degrees += [1] * len(dims)
        else:
            shape.append(value_of(size, bindings))
            degrees.append(value_of(of.degrees[i], bindings) if of.degrees else 1)
    return tensor_type(tuple(shape), dtype, tuple(degrees), value_of(of.sum, bindings), value_of(of.copy, bindings))


def _attribute_value(value: AttrExpr, bindings: Bindings) -> AttrValue:
    """
    Return the value of an attribute in a rule: polynomials are evaluated with the values of their symbols in
    `bindings`, by name, a parameter (`$act`) has its value there, and other constants stay. Raises `UnityError` for
    symbols without a value.
    """
    match value:
        case Poly():
            return value_of(value, bindings)
        case tuple():
            return tuple(value_of(p, bindings) for p in value)
        case AttrParameter(name):
            if name not in bindings:
                raise UnityError(f"rule: ${name} has no value")
            return bindings[name]
        case _:
            return value


def attribute_expression(value: AttrValue) -> AttrExpr:
    """
    Return a constant attribute value as an attribute expression of a rule: integers become polynomials, floats and
    names stay as they are.
    """
    match value:
        case int():
            return number(value)
        case tuple():
            return tuple(map(number, value))
        case _:
            return value


def build(side: tuple[Term, ...], inputs: Mapping[str, Value], bindings: Bindings) -> tuple[Value, ...]:
    """
    Build one side of a rule (source or target) as a graph: return its values, one per result of the rule.

    `inputs` has the values to use for the rule's inputs, `bindings` the values of its symbols, packs and attribute
    parameters, both by name. Raises `UnityError` where an operator is not well typed at these bindings, and
    `IndexError` where a term is a result that its operator does not have.
    """
    made: dict[int, tuple[Value, ...]] = {}

    def value(term: Term) -> Value:
        if isinstance(term, Input):
            return inputs[term.name]
        key = id(term.operation)
        if key not in made:
            made[key] = _apply(term.operation, [value(t) for t in term.operation.operands], bindings)
        return made[key][term.index]

    return tuple(map(value, side))


def _apply(operation: Operation, operands: list[Value], bindings: Bindings) -> tuple[Value, ...]:
    values = {name: _attribute_value(value, bindings) for name, value in operation.attributes}
    if operation.op in PARALLEL_OPERATORS:
        return parallel(
            operation.op, operands[0], None, **{k: v for k, v in values.items() if isinstance(v, int)}
        ).results
    return apply(operation.op, operands, values).results
