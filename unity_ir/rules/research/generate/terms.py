"""
Terms: operators applied to variables, with their types at several sets of sizes at once (say a = 4, b = 6 and a = 8, b
= 9).

What holds at one set of sizes only (a square matrix, 4 + 8 = 6 + 6) is then no accident that looks like a law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.infer_types import infer_types
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.types import TensorType

Type: TypeAlias = tuple[TensorType, ...]
"""A type at each set of sizes."""


@dataclass(frozen=True, slots=True)
class TermStep:
    """An operator to apply in a term: its attributes at each set of sizes, and which of its results is taken."""

    op: str
    attributes: tuple[Attributes, ...]
    result: int = 0

    @property
    def is_parallel(self) -> bool:
        """
        Whether the step's operator is a parallel operator (partition, replicate, reduce, ...), which only changes how a
        value is divided.
        """
        return self.op in PARALLEL_OPERATORS


def parallel_step(op: str, sets: int, **attributes: int) -> TermStep:
    """
    Return the application of the parallel operator called `op` as a step of a term, with the attributes given, such as
    `dim=0, by=2`. They are the same at each of the `sets` sets of sizes at which terms are tried.
    """
    return TermStep(op, (tuple(sorted(attributes.items())),) * sets)


@cache
def result_types(op: str, attributes: tuple[Attributes, ...], operands: tuple[Type, ...]) -> tuple[Type, ...]:
    """
    Return the type of each result of the operator called `op`; () where it is not well typed at all sets of sizes.

    `attributes` has the attributes at every set of sizes at which terms are tried; a type, of an operand or a result,
    is a tensor type at each.
    """
    found: list[tuple[TensorType, ...]] = []
    try:
        for i, given in enumerate(attributes):
            types = tuple(t[i] for t in operands)
            if op in PARALLEL_OPERATORS:
                found.append((PARALLEL_OPERATORS[op].type(types[0], {n: v for n, v in given if isinstance(v, int)}),))
            else:
                operator = find_operator(op)
                found.append(infer_types(operator, types, operator.attributes(dict(given))))
    except UnityError:
        return ()
    return tuple(zip(*found, strict=True))


def _result_type(step: TermStep, operands: tuple[Type, ...]) -> Type | None:
    """
    Return the type of the one result of the operator that `step` takes, on operands of these types; None where it is
    not well typed at all sets of sizes.

    A type, of an operand or the result, is a tuple with a tensor type at every set of sizes at which terms are tried.
    """
    found = result_types(step.op, step.attributes, operands)
    return found[step.result] if step.result < len(found) else None


class TypedTerm:
    """A variable, or an operator applied to terms, with its types. Equal terms of one `Terms` are one object."""

    __slots__ = ("index", "name", "number", "operands", "size", "step", "text", "type", "weight")

    name: str
    """The name of a variable; empty for other terms."""
    index: int
    """The number of a variable among those of its type; 0 for other terms."""
    step: TermStep | None
    operands: tuple[TypedTerm, ...]
    type: Type
    size: int
    """Number of operators, those of shared subterms counted as often as they occur."""
    weight: int
    """
    Number of operators, where one with a fused function counts as the two it stands for, so that it may be written out.
    """
    number: int
    """Identifies the term among those of its `Terms`, in the order in which they were made."""
    text: str
    """The term as text, with operators, attributes (at the first set of sizes) and variables."""

    @property
    def is_variable(self) -> bool:
        """Whether the term is a variable."""
        return self.step is None

    def __repr__(self) -> str:
        return self.text


class Terms:
    """Makes terms, hash-consed: equal terms are one object."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], TypedTerm] = {}

    def __len__(self) -> int:
        return len(self._made)

    def variable(self, index: int, type: Type) -> TypedTerm:
        """
        Return variable number `index` (from 0) of the given type, which is a tensor type at each of the sets of sizes
        at which terms are tried; the same object each time.
        """
        key = (index, type)
        if key not in self._made:
            name = f"x{index}{'|'.join(map(_type_text, type))}"
            self._made[key] = self._term(name, None, (), type, 0, name)
            self._made[key].index = index
        return self._made[key]

    def make(self, step: TermStep, operands: Sequence[TypedTerm]) -> TypedTerm | None:
        """Apply the operator of `step` to terms; return the term, or None where it is not well typed."""
        key = (step, *(o.number for o in operands))
        found = self._made.get(key)
        if found is None:
            type = _result_type(step, tuple(o.type for o in operands))
            if type is None:
                return None
            size = 1 + sum(o.size for o in operands)
            text = f"{_step_text(step)}({', '.join(o.text for o in operands)})"
            found = self._made[key] = self._term("", step, tuple(operands), type, size, text)
        return found

    def _term(
        self, name: str, step: TermStep | None, operands: tuple[TypedTerm, ...], type: Type, size: int, text: str
    ) -> TypedTerm:
        term = TypedTerm()
        term.name, term.step, term.operands, term.type, term.size, term.text = name, step, operands, type, size, text
        term.number, term.index = len(self._made), 0
        term.weight = sum(o.weight for o in operands) + (0 if step is None else 1 + _fused(step))
        return term

    def replaced(self, term: TypedTerm, values: Mapping[TypedTerm, TypedTerm]) -> TypedTerm | None:
        """
        Substitute terms for subterms of `term`, as `values` maps them; return the new term, or None where that is not
        well typed.
        """
        found = values.get(term)
        if found is not None or term.step is None:
            return found or term
        operands: list[TypedTerm] = []
        for o in term.operands:
            new = self.replaced(o, values)
            if new is None:
                return None
            operands.append(new)
        return self.make(term.step, operands)

    def renamed(self, *terms: TypedTerm) -> tuple[TypedTerm, ...]:
        """
        Return terms with their variables numbered anew: from 0 for each type, in the order in which they occur in all
        terms together.
        """
        counts: dict[Type, int] = {}
        values: dict[TypedTerm, TypedTerm] = {}
        for term in terms:
            for v in leaves(term):
                if v not in values:
                    at = counts.get(v.type, 0)
                    counts[v.type] = at + 1
                    values[v] = self.variable(at, v.type)
        renamed = [self.replaced(t, values) for t in terms]
        return tuple(t for t in renamed if t is not None)


@cache
def _fused(step: TermStep) -> int:
    """Return the number of functions other than the default that an operator's attributes name."""
    if step.is_parallel:
        return 0
    given = dict(step.attributes[0])
    return sum(a.kind == "name" and given[a.name] != a.default for a in find_operator(step.op).line.attributes)


def _type_text(type: TensorType) -> str:
    """Return a type as text: `[4:2, 6]`, followed by its addends and copies."""
    dims = ", ".join(f"{n}:{d}" if d > 1 else str(n) for n, d in zip(type.shape, type.degrees, strict=True))
    pieces = f"+{type.sum}" * (type.sum > 1) + f"={type.copy}" * (type.copy > 1)
    return f"[{dims}]{pieces}{'' if type.is_floating else type.dtype}"


def _step_text(step: TermStep) -> str:
    """Return a step as text: `concat{dim=1}`, `split{dim=1 sizes=(4, 6)}.0`."""
    known = dict(step.attributes[0])
    if not step.is_parallel:
        defaults = {a.name: a.default for a in find_operator(step.op).line.attributes}
        known = {name: v for name, v in known.items() if v != defaults[name]}
    text = " ".join(f"{name}={value}" for name, value in known.items())
    several = not step.is_parallel and (step.result > 0 or any(r.variadic for r in find_operator(step.op).line.results))
    return step.op + (f"{{{text}}}" if text else "") + (f".{step.result}" if several else "")


def leaves(term: TypedTerm) -> Iterator[TypedTerm]:
    """Yield the variables of a term in the order in which they occur, with repetitions."""
    if term.step is None:
        yield term
    for o in term.operands:
        yield from leaves(o)


def subterms(term: TypedTerm) -> Iterator[TypedTerm]:
    """Yield a term and all terms below it, outermost first, with repetitions."""
    yield term
    for o in term.operands:
        yield from subterms(o)
