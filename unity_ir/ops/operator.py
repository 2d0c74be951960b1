"""
Define operators: for each a TDL line (tensor description language: an einsum-like definition such as `matmul(x, w)
out[m, n] = sum[k](x[m, k] * w[k, n])`) and the function that builds its gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, TypeAlias

from unity_ir.errors import UnityError
from unity_ir.tdl.attributes import check_attributes
from unity_ir.tdl.bind import bind
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import NOT_FLOATING, Attribute, AttrValue, Bound, Entry, Line

Attributes: TypeAlias = tuple[tuple[str, AttrValue], ...]
"""Attributes by name, sorted, hashable."""
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class Tensor(Protocol):
    """
    A value of some graph (the compiler's, or the prover's symbolic one), as gradient functions see it.

    Calling an operator on tensors asks the first one to build the node, so `ops` does not depend on any graph class.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The global size of each dim, not that of a shard."""
        ...

    @property
    def degrees(self) -> tuple[int, ...]:
        """The number of shards that each dim is divided into; 1 where it is not divided."""
        ...

    @property
    def dtype(self) -> str:
        """Element type, such as `f32`."""
        ...

    def build(
        self, operator: Operator, operands: Sequence[Tensor], attributes: Mapping[str, AttrValue]
    ) -> tuple[Tensor, ...]:
        """
        Add a node that applies `operator` to `operands`, with `attributes`, to the graph of this tensor; return its
        results.
        """
        ...


@dataclass(frozen=True, slots=True)
class Application:
    """
    One use of an operator, as its gradient function sees it: the gradients of its results, and its operands, results
    and attributes.
    """

    grads: tuple[Tensor, ...]
    """Gradient of each result that holds floating point numbers, in order."""
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    attributes: Mapping[str, AttrValue]

    @property
    def grad(self) -> Tensor:
        """The gradient of the operator's result, for operators with exactly one result that has a gradient."""
        (grad,) = self.grads
        return grad

    def ints(self, name: str) -> tuple[int, ...]:
        """Return the value of the operator's attribute `name`, which must be declared as several integers."""
        value = self.attributes[name]
        assert isinstance(value, tuple)
        return value

    def float(self, name: str) -> float:
        """Return the value of the operator's attribute `name`, which must be declared as a number."""
        return float(str(self.attributes[name]))

    def int(self, name: str) -> int:
        """Return the value of the operator's attribute `name`, which must be declared as one integer."""
        value = self.attributes[name]
        assert isinstance(value, int)
        return value


Gradient: TypeAlias = Callable[[Application], Sequence["Tensor | None"]]
"""
From an application to the gradient of each operand; None for operands of integers or booleans, and
where it is zero everywhere.
"""


@dataclass(frozen=True, eq=False)
class Operator:
    """
    An operator: its TDL line (einsum-like definition), and the function that builds its gradient.

    `tdl` is the line. Where the line depends on shapes (a reshape), `tdl` is a function from operand shapes and
    attributes to the line, and `signature` is the head of the line, `reshape(x: any; shape: ints)`; such an operator
    has one operand. Without `gradient`, the operator cannot be differentiated.
    """

    tdl: str | Callable[[Shapes, Mapping[str, AttrValue]], str]
    gradient: Gradient | None = None
    signature: str | None = None
    check: Callable[[Bound, Mapping[str, AttrValue]], None] | None = None
    """Given the bound line and the attributes, raises `UnityError` where they do not fit, beyond what the line says."""

    @cached_property
    def text(self) -> str:
        """
        The text of the operator's TDL line, with runs of blanks replaced by single blanks. If the line depends on
        operand shapes, it is the text of the stand-in that `line` explains.
        """
        if isinstance(self.tdl, str):
            return " ".join(self.tdl.split())
        assert self.signature is not None
        operand = re.match(r"\w+\s*\(\s*(\w+)(\s*:\s*(int|bool))?", self.signature)
        assert operand is not None
        name, _, kind = operand.groups()
        return " ".join(f"{self.signature} out{f': {kind}' if kind else ''}[a..] = {name}[a..]".split())

    @cached_property
    def line(self) -> Line:
        """
        The operator's TDL line, parsed. If the line depends on operand shapes (as of a reshape), a stand-in: only its
        name, parameters (operands) and attributes are meaningful.
        """
        return parse_line(self.text)

    @cached_property
    def name(self) -> str:
        """The operator's name in graphs, such as `matmul`."""
        # The line begins with it: of most operators a process knows no more than the name, and need not parse theirs.
        text = self.tdl if isinstance(self.tdl, str) else self.signature
        found = re.match(r"\s*(\w+)\s*\(", text or "")
        return self.line.operator if found is None else found[1]

    @cached_property
    def declared(self) -> tuple[Attribute, ...]:
        """
        The attributes (constant arguments) that the line declares, in order. The rest of the line is not parsed for
        this.
        """
        # A process that reads one graph makes the classes of all operators, and parses the lines of few.
        head, _, attributes = self.text.partition(")")[0].partition(";")
        name = head.partition("(")[0]
        return parse_line(f"{name}(x;{attributes}) out[a..] = x[a..]").attributes if attributes else ()

    def attributes(self, given: Mapping[str, AttrValue]) -> Attributes:
        """
        Check the attributes `given` for the operator, by name; return all of its attributes, with defaults filled in,
        as pairs sorted by name.

        Raises `UnityError` for attributes that are unknown, missing, or of the wrong kind.
        """
        return tuple(sorted(check_attributes(self.line, given).items())) if given else self._defaults

    @cached_property
    def _defaults(self) -> Attributes:
        """The attributes where none are given. Raises `UnityError` where one has no default."""
        return tuple(sorted(check_attributes(self.line, {}).items()))

    def bind(self, shapes: Shapes, attributes: Attributes, dtypes: tuple[str, ...] = ()) -> Analysis:
        """
        Bind the operator's TDL line to the operands' global shapes, and to attributes with defaults filled in; return
        the `Analysis`, which has the bound line (every index variable with its size) and says how the operator can be
        divided among devices. Memoised.

        `dtypes` are the operands' element types, all floating point if left out; they matter only for operators that
        take operands of any type. Raises `UnityError` where shapes or attributes do not fit.
        """
        matters = self._takes_any and any(d in NOT_FLOATING for d in dtypes)
        return _bind(self, shapes, attributes, dtypes if matters else ())

    @cached_property
    def _takes_any(self) -> bool:
        """Whether an operand may have elements of any type."""
        return any(p.kind == "any" for p in self.line.parameters)

    def divided(self, shapes: Shapes, attributes: Attributes, degrees: Mapping[str, int]) -> Attributes:
        """
        Return the operator's attributes after its index variables are divided among tasks.

        `attributes` are those before, `shapes` are the operands' global shapes, and `degrees` maps index variables to
        their numbers of parts (1 if left out). Attributes change only for an operator with dims that no operand has,
        such as `expand`: one of its attributes lists the degrees of these dims. Given `expand` with `degrees = (1,)`
        whose new dim k0 is divided by 2, returns the attributes with `degrees = (2,)`.
        """
        names = [c.value.attribute for c in self.line.clauses if c.kind == "degree" and isinstance(c.value, Entry)]
        if not names:
            return attributes
        free = self.bind(shapes, attributes).bound.free_degrees
        return self.attributes({**dict(attributes), names[0]: tuple(degrees.get(v, 1) for v in free)})

    def __call__(self, *operands: Tensor, **attributes: AttrValue) -> tuple[Tensor, ...]:
        """Build a node that applies the operator to `operands`, at least one, in their graph; return its results."""
        return operands[0].build(self, operands, attributes)

    def one(self, *operands: Tensor, **attributes: AttrValue) -> Tensor:
        """
        Build a node that applies the operator, which has a single result, to `operands` in their graph; return that
        result.
        """
        (result,) = self(*operands, **attributes)
        return result


@dataclass(frozen=True, slots=True)
class Saving:
    """
    A forward operator and its backward, by name, and variants that save values in the forward for the backward.

    `saving` returns what `forward` does, one result, and then the values to save. `saved` returns what `backward` does;
    it reads the operands of `backward`, then the result of `forward` if `reads_result`, then the saved values.
    """

    forward: str
    backward: str
    saving: str
    saved: str
    reads_result: bool = True


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
    bound = bind(line, shapes, named, dtypes)
    if operator.check is not None:
        operator.check(bound, named)
    return Analysis(bound)


def _rebind(bound: Bound, name: str) -> Bound:
    return Bound(name, bound.operands, bound.results, bound.extents, bound.free_degrees)
