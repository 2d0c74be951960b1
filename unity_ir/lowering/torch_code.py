"""
A bound line as plain PyTorch expressions: what a person would write, and autograd can differentiate.

The `Writer` here makes results of values, and has the functions of each family make those: `torch_reads`,
`torch_functions`, `torch_softmax`, `torch_indexing`, `torch_routed`, `torch_sums`, `torch_windows`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import isinf, prod
from typing import cast

from unity_ir.errors import UnityError
from unity_ir.lowering.kernels.expression import ATOM, COMPARISONS, LOGIC, UNARY, Text
from unity_ir.lowering.kernels.layout import Names, operand_shapes
from unity_ir.lowering.kernels.rewrite import canonical, is_work, simplified
from unity_ir.lowering.torch_functions import BINARY, FUNCTIONS, chosen, compared, joined, of_two, opaque, uniform
from unity_ir.lowering.torch_indexing import gathered, scattered
from unity_ir.lowering.torch_reads import atom, read
from unity_ir.lowering.torch_routed import routed_product
from unity_ir.lowering.torch_softmax import softmax, softmax_axis
from unity_ir.lowering.torch_sums import product, reduced
from unity_ir.lowering.torch_value import TORCH_DTYPES, Value
from unity_ir.lowering.torch_windows import convolved, pooled, target, written
from unity_ir.lowering.windows import masked_body
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
    Index,
    Name,
    Opaque,
    Reduce,
    Result,
    Segments,
    Var,
    Window,
    children,
    index_names,
)


def torch_expression(bound: Bound, operand_names: Sequence[str]) -> tuple[str, ...]:
    """
    One expression of one line per result, over operands of these names and the shapes the extents imply.

    Given a matmul of `x` and `w`, returns `("x @ w",)`. Results may be views, or laid out in another order.
    """
    writer = Writer(bound, operand_names, {})
    return tuple(writer.result(r).text for r in writer.bound.results)


def torch_body(
    bound: Bound, operand_names: Sequence[str], starts: Mapping[str, str], names: Names
) -> tuple[list[str], tuple[str, ...]]:
    """
    Statements that name what occurs twice, and an expression per result, which is contiguous.

    `starts` names the global index at which a variable used as a value starts; 0 for all others.
    """
    first = Writer(bound, operand_names, starts)
    first.sharing = _Sharing(Names(), {})
    for result in first.bound.results:
        first.result(result)
    writer = Writer(bound, operand_names, starts)
    writer.sharing = sharing = _Sharing(names, first.sharing.uses)
    texts: list[str] = []
    # Dims of size 1 may have any stride, and the order in memory of what PyTorch makes of them follows from it.
    writer.strided = any(len(shape) > 1 and 1 in shape for shape in writer.shapes.values())
    for result in writer.bound.results:
        text = writer.result(result)
        texts.append((writer.method(text, "contiguous()") if writer.strided else text).text)
    return sharing.lines, tuple(texts)


def torch_reference(
    bound: Bound, operand_names: Sequence[str], taken: Iterable[str]
) -> tuple[list[str], tuple[str, ...]]:
    """
    The same in double precision, whatever floating point numbers the line says: statements, if it takes any, whose
    names are none of `taken` and no one else's, and an expression per result.
    """
    results = (replace(r, dtype="f64") if r.dtype is not None and r.floating else r for r in bound.results)
    bound = replace(bound, results=tuple(results))
    if any(_draws(r.expr) for r in bound.results):
        return torch_body(bound, operand_names, {}, Names(taken))
    return [], torch_expression(bound, operand_names)


def _draws(expr: Expr) -> bool:
    return (isinstance(expr, Call) and expr.function == "philox") or any(map(_draws, children(expr)))


_UNFLATTENED = re.compile(r"(.*)\.unflatten\((\d+), \((\d+(?:, \d+)+)\)\)", re.DOTALL)
_FLATTEN = re.compile(r"flatten\((\d+), (\d+)\)")


class _Sharing:
    """What statements have computed so far."""

    def __init__(self, names: Names, wanted: Mapping[Expr, int]):
        self.names = names
        self.wanted = wanted
        """How often each form is used; those used twice get a name."""
        self.uses: Counter[Expr] = Counter()
        self.known: dict[Expr, tuple[Value, tuple[str, ...]]] = {}
        """Values by canonical form, and the free variables they were computed with."""
        self.lines: list[str] = []


class Writer:
    def __init__(self, bound: Bound, names: Sequence[str], starts: Mapping[str, str]):
        self.bound = simplified(bound, starts)
        self.extents = dict(bound.extents)
        self.names = {p.name: n for p, n in zip(bound.operands, names, strict=True)}
        self.kinds = {p.name: p.kind for p in bound.operands}
        self.shapes = operand_shapes(bound)
        self.starts = starts
        floats = [n for p, n in zip(bound.operands, names, strict=True) if p.floating]
        like = (floats or list(names))[0]
        self.device = f"{like.removesuffix('.float()')}.device"
        self.dtype = f"{like}.dtype" if floats and not like.endswith(".float()") else "torch.float32"
        self.strided = False
        """A result may not be contiguous although the operands are."""
        self.sharing: _Sharing | None = None

    def fail(self, message: str) -> UnityError:
        return UnityError(f"pcg.{self.bound.operator}: {message}")

    def method(self, value: Text, call: str) -> Text:
        if (apart := _UNFLATTENED.fullmatch(value.text)) and (together := _FLATTEN.fullmatch(call)):
            first, last = map(int, together.groups())
            if int(apart[2]) == first and apart[3].count(",") == last - first:
                # Taken apart and put together again at once.
                return Text(apart[1])
        return Text(f"{value.at(ATOM)}.{call}")

    def named(self, wish: str, text: str) -> str:
        """A text that may be repeated: a name where statements are allowed."""
        if text.isidentifier():
            return text
        if self.sharing is None:
            return f"({text})"
        name = self.sharing.names.new(wish)
        self.sharing.lines.append(f"{name} = {text}")
        return name

    # -- results

    def result(self, result: Result) -> Text:
        reshaped = self.reshaped(result)
        if reshaped is not None:
            return reshaped
        axis = next((d for d, i in enumerate(result.indices) if isinstance(i, Segments)), None)
        if any(isinstance(i, Window) for i in result.indices):
            return self.folded(result.indices, written(self, result), result.dtype)
        if axis is None:
            return self.folded(result.indices, self.value(result.expr), result.dtype)
        assert isinstance(result.expr, Cases)
        pieces: list[str] = []
        for variable, expr in result.expr.branches:
            indices = [Var(variable) if d == axis else i for d, i in enumerate(result.indices)]
            pieces.append(self.folded(indices, self.value(expr), result.dtype).text)
        return Text(f"torch.cat([{', '.join(pieces)}], {axis})")

    def reshaped(self, result: Result) -> Text | None:
        """A line that only folds or unfolds dims, as a reshape."""
        if (
            not isinstance(result.expr, Access)
            or result.dtype
            or any(isinstance(i, Segments | Window) for i in (*result.expr.indices, *result.indices))
        ):
            return None
        orders = [
            [n for i in indices for n in index_names(i) if self.extents[n] > 1]
            for indices in (result.indices, result.expr.indices)
        ]
        if orders[0] != orders[1] or prod(self.extents[n] for n in orders[0]) != prod(self.shapes[result.expr.tensor]):
            return None
        shape = self.bound.result_shape(result)
        text = atom(self, result.expr.tensor)
        if shape == self.shapes[result.expr.tensor]:
            return text
        return self.method(text, f"reshape({', '.join(map(str, shape)) or '()'})")

    def folded(self, indices: Sequence[object], value: Value, into: str | None = None) -> Text:
        """
        The value over all the indices' variables, composite dims folded into one; `into` is another element type than
        that of the floating operands.
        """
        names = self.dims(indices, target)
        if value.number:
            shape = tuple(self.extents[n] for n in names)
            dtype = self.dtype if into is None else TORCH_DTYPES[into]
            text = Text(f"torch.full({shape}, {value.text.text}, dtype={dtype}, device={self.device})")
        elif into is None:
            text = self.expanded(self.floating(value), tuple(names))
        else:
            text = self.method(self.expanded(value, tuple(names)), f"to({TORCH_DTYPES[into]})")
        dim = 0
        for index in indices:
            if isinstance(index, Composite):
                text = self.method(text, f"flatten({dim}, {dim + len(index.names) - 1})")
            dim += 1
        return text

    def dims(self, indices: Sequence[object], window: Callable[[int], str]) -> list[str]:
        """A name for each variable of indices, and one for each window."""
        numbers = count()
        return [
            n
            for i in indices
            for n in ((window(next(numbers)),) if isinstance(i, Window) else index_names(cast(Index, i)))
        ]

    def expanded(self, value: Value, order: tuple[str, ...]) -> Text:
        """A tensor with exactly the dims of `order`."""
        text = self.ordered(value, order)
        if set(order) <= set(value.dims):
            return text
        self.strided = True
        return self.method(text, f"expand({', '.join(str(self.extents[n]) for n in order)})")

    def ordered(self, value: Value, order: tuple[str, ...]) -> Text:
        """A tensor that broadcasts against dims `order`: permuted, with dims of size 1 where it lacks one."""
        have = [n for n in order if n in value.dims]
        text = value.text
        dims = [n for n in value.dims if n in have]
        # A variable of extent 1 may occur in an operand alone: it is read at position 0.
        extra = [d for d, n in enumerate(value.dims) if n not in have]
        if extra:
            text = self.method(text, f"squeeze({extra[0] if len(extra) == 1 else tuple(extra)})")
        places = [dims.index(n) for n in have]
        if places != sorted(places):
            self.strided = True
            text = self.method(text, "T" if places == [1, 0] else f"permute({', '.join(map(str, places))})")
        missing = order[order.index(have[0]) :] if have else ()
        if len(missing) > len(have):
            text = Text(f"{text.at(ATOM)}[{', '.join(':' if n in have else 'None' for n in missing)}]")
        return text

    # -- values

    def value(self, expr: Expr) -> Value:
        sharing = self.sharing
        if sharing is None or not is_work(expr):
            return self._value(expr)
        form, free = canonical(expr, self.extents, self.starts)
        sharing.uses[form] += 1
        if form not in sharing.known:
            value = self._value(expr)
            if sharing.wanted.get(form, 0) > 1:
                name = sharing.names.new("shared")
                sharing.lines.append(f"{name} = {value.text.text}")
                value = replace(value, text=Text(name))
            sharing.known[form] = value, free
        value, then = sharing.known[form]
        now = dict(zip(then, free, strict=True))
        return replace(value, dims=tuple(now[n] for n in value.dims))

    def _value(self, expr: Expr) -> Value:
        match expr:
            case Const(value) if isinf(value):
                return Value(Text(f'float("{value}")'), (), True)
            case Const(value):
                whole = value.is_integer() and abs(value) < 2**31
                text = Text(repr(int(value) if whole else value), ATOM if value >= 0 else UNARY)
                return Value(text, (), True, "int" if whole else "float")
            case Name(name):
                start, size = self.starts.get(name), self.extents[name]
                limits = f"{size}" if start is None else f"{start}, {start} + {size}"
                return Value(Text(f"torch.arange({limits}, device={self.device})"), (name,), kind="int")
            case Access():
                return read(self, expr)
            case Binary("/", Call("exp", (above,)), Reduce() as below) if (
                axis := softmax_axis(self, expr)
            ) is not None:
                del below
                return softmax(self, above, axis)
            case Binary(op, left, right):
                return joined(self, op, self.value(left), self.value(right))
            case Call(function, (left, right)) if function in COMPARISONS:
                return compared(self, COMPARISONS[function], self.value(left), self.value(right))
            case Call(function, (left, right)) if function in LOGIC:
                return compared(self, LOGIC[function], self.value(left), self.value(right), ATOM)
            case Call("not", (argument,)):
                value = self.value(argument)
                return replace(value, text=Text(f"~{value.text.at(ATOM)}", UNARY))
            case Call("philox", (Const(seed), position)):
                return uniform(self, int(seed), self.value(position))
            case Call(function, (left, right)) if function in BINARY:
                return of_two(self, BINARY[function], self.value(left), self.value(right))
            case Call("where", _) if (product_of_one := routed_product(self, expr)) is not None:
                return product_of_one
            case Call("where", (condition, yes, no)):
                return chosen(self, self.value(condition), self.value(yes), self.value(no))
            case Call(function, (argument,)) if function in FUNCTIONS:
                value = self.floating(self.value(argument))
                return Value(Text(f"{FUNCTIONS[function]}({value.text.text})"), value.dims)
            case Call(function, _):
                raise self.fail(f"no PyTorch text for function {function}; add it to lowering/torch_functions.py")
            case Reduce():
                known = convolved(self, expr) or pooled(self, expr) or routed_product(self, expr)
                known = known or gathered(self, expr) or scattered(self, expr)
                return known or product(self, expr) or reduced(self, masked_body(expr, self.extents))
            case Opaque(function, (Var(made),), (Var(taken),), body):
                return opaque(self, function, made, taken, self.value(body))
            case _:
                raise TypeError(f"{expr} cannot stand inside an expression")

    def floating(self, value: Value) -> Value:
        if value.kind == "float":
            return value
        return replace(value, text=self.method(value.text, f"to({self.dtype})"), kind="float")

    def union(self, values: Sequence[Value]) -> tuple[str, ...]:
        """The dims of a broadcast: as the widest operand has them, if it has all, else in TDL order."""
        names = {n for v in values for n in v.dims}
        widest = max(values, key=lambda v: len(v.dims))
        return widest.dims if set(widest.dims) == names else tuple(n for n in self.extents if n in names)

    def tensor(self, value: Value) -> Value:
        """A floating point tensor, also of a Python number."""
        if not value.number:
            return self.floating(value)
        return Value(Text(f"torch.full((), {value.text.text}, dtype={self.dtype}, device={self.device})"), ())
