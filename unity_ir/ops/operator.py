"""Define operators: one TDL line and a gradient each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, TypeAlias

from unity_ir.errors import UnityError
from unity_ir.tdl.analysis import Analysis
from unity_ir.tdl.attributes import check_attributes
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import NOT_FLOATING, AttrValue, Bound, Entry, Line

Attributes: TypeAlias = tuple[tuple[str, AttrValue], ...]
"""Attributes by name, sorted, hashable."""
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class Tensor(Protocol):
    """
    What gradients are written over: a value of some graph.

    Calling an operator on tensors asks the first one to build the node, so `ops` needs to know nothing of graphs.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Global sizes."""
        ...

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degree per dim."""
        ...

    @property
    def dtype(self) -> str:
        """Element type."""
        ...

    def build(
        self, operator: Operator, operands: Sequence[Tensor], attributes: Mapping[str, AttrValue]
    ) -> tuple[Tensor, ...]:
        """The results of a new node."""
        ...


@dataclass(frozen=True, slots=True)
class Application:
    """An operator applied: what its gradient may use."""

    grads: tuple[Tensor, ...]
    """Gradient of each result that holds floating point numbers."""
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    attributes: Mapping[str, AttrValue]

    @property
    def grad(self) -> Tensor:
        """The gradient of the only result that has one."""
        (grad,) = self.grads
        return grad

    def ints(self, name: str) -> tuple[int, ...]:
        """An attribute of kind `ints`."""
        value = self.attributes[name]
        assert isinstance(value, tuple)
        return value

    def float(self, name: str) -> float:
        """An attribute of kind `float`."""
        return float(str(self.attributes[name]))

    def int(self, name: str) -> int:
        """An attribute of kind `int`."""
        value = self.attributes[name]
        assert isinstance(value, int)
        return value


Gradient: TypeAlias = Callable[[Application], Sequence["Tensor | None"]]
"""
From an application to the gradient of each operand; None for operands of integers or booleans, and
where it is zero everywhere.
"""


@dataclass(frozen=True)
class Operator:
    """
    An operator of the compiler.

    `tdl` is its line, or, where the line depends on the shapes (a reshape), `signature` is the head of the line, with
    one operand, and `tdl` a function from operand shapes and attributes to the whole line.
    """

    tdl: str | Callable[[Shapes, Mapping[str, AttrValue]], str]
    gradient: Gradient | None = None
    signature: str | None = None

    @cached_property
    def line(self) -> Line:
        """The parsed line; for a shape-dependent one only its name, parameters and attributes mean anything."""
        if isinstance(self.tdl, str):
            return parse_line(self.tdl)
        assert self.signature is not None
        first = re.split(r"[:;)]", self.signature.partition("(")[2])[0]
        return parse_line(f"{self.signature} out[a..] = {first}[a..]")

    @cached_property
    def name(self) -> str:
        return self.line.operator

    def attributes(self, given: Mapping[str, AttrValue]) -> Attributes:
        """`given` with defaults filled in, sorted. Raises `UnityError` for unknown, missing or ill-kinded ones."""
        return tuple(sorted(check_attributes(self.line, given).items()))

    def bind(self, shapes: Shapes, attributes: Attributes, dtypes: tuple[str, ...] = ()) -> Analysis:
        """
        The line at these global operand shapes, analysed. `dtypes` are the operands' element types, all floats if left
        out; they matter only to a line with operands that may hold anything.

        Raises `UnityError` where shapes or attributes do not fit.
        """
        matters = any(p.kind == "any" for p in self.line.parameters) and any(d in NOT_FLOATING for d in dtypes)
        return _bind(self, shapes, attributes, dtypes if matters else ())

    def divided(self, shapes: Shapes, attributes: Attributes, degrees: Mapping[str, int]) -> Attributes:
        """
        The attributes under other degrees: those of index variables that no operand mentions are attributes themselves.

        Given `expand` with degrees (1,) and k0 by 2, returns them with degrees (2,).
        """
        names = [c.value.attribute for c in self.line.clauses if c.kind == "degree" and isinstance(c.value, Entry)]
        if not names:
            return attributes
        free = self.bind(shapes, attributes).bound.free_degrees
        return self.attributes({**dict(attributes), names[0]: tuple(degrees.get(v, 1) for v in free)})

    def __call__(self, *operands: Tensor, **attributes: AttrValue) -> tuple[Tensor, ...]:
        """Build a node in the graph the operands live in; returns its results."""
        return operands[0].build(self, operands, attributes)

    def one(self, *operands: Tensor, **attributes: AttrValue) -> Tensor:
        """Build a node of one result; returns it."""
        (result,) = self(*operands, **attributes)
        return result


@dataclass(frozen=True, slots=True)
class Saving:
    """
    Operators by name: a forward and its backward, and the same where the forward has results more that the backward
    reads, which then takes all the forward's results after its own operands. Of the forward only the first is known.
    """

    forward: str
    backward: str
    saving: str
    saved: str


@lru_cache(maxsize=65536)
def _bind(operator: Operator, shapes: Shapes, attributes: Attributes, dtypes: tuple[str, ...]) -> Analysis:
    line = operator.line
    named = dict(attributes)
    if not isinstance(operator.tdl, str):
        expected = len(line.parameters)
        if len(shapes) != expected:
            raise UnityError(f"pcg.{line.operator}: takes {expected} operands, got {len(shapes)}")
        whole = parse_line(operator.tdl(shapes, named))
        return Analysis(_rebind(bind(whole, shapes, {}, dtypes), line.operator))
    return Analysis(bind(line, shapes, named, dtypes))


def _rebind(bound: Bound, name: str) -> Bound:
    return Bound(name, bound.operands, bound.results, bound.extents, bound.free_degrees)
