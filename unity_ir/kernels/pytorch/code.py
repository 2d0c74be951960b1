"""
Write a bound line (an operator's TDL line, the formula of its results' elements, at given sizes) as plain PyTorch: as a
person would write it, and differentiable by autograd.

An expression is matched against the forms in order; each form's module writes its text: `reads`, `functions`,
`grouped`, `windows`, `indexing`, `sums`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isinf, prod

from unity_ir.forms.addresses import Names
from unity_ir.forms.rewrite import canonical, is_worth_keeping
from unity_ir.forms.softmax import softmax
from unity_ir.forms.windows import masked_body
from unity_ir.kernels.pytorch.functions import BINARY, FUNCTIONS, binary_call, chosen, compared, joined, opaque, uniform
from unity_ir.kernels.pytorch.grouped import routed_product
from unity_ir.kernels.pytorch.indexing import gathered, scattered
from unity_ir.kernels.pytorch.reads import atom, read
from unity_ir.kernels.pytorch.sums import factors, product, reduced
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES, TensorText
from unity_ir.kernels.pytorch.windows import convolved, pooled, target, written
from unity_ir.kernels.pytorch.writer import Sharing, TorchWriter
from unity_ir.kernels.text import ATOM, COMPARISONS, LOGIC, UNARY, Text
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
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
    Return a tuple of PyTorch expressions, as text, one for each result of the bound line `bound`, for tensors of the
    line's sizes. `operand_names` has the Python variable of each operand.

    Given a matmul of `x` and `w`, returns `("x @ w",)`. Results may be views, or have other strides than contiguous
    tensors. Raises `UnityError` for functions that have no text in PyTorch, or need statements (random numbers).
    """
    writer = _Lines(bound, operand_names, {})
    return tuple(writer.result(r).text for r in writer.bound.results)


def torch_body(
    bound: Bound, operand_names: Sequence[str], starts: Mapping[str, str], names: Names
) -> tuple[list[str], tuple[str, ...]]:
    """
    Return (statements, expressions) in PyTorch for the bound line `bound`: statements that name repeated
    subexpressions, and an expression for each result, contiguous.

    `operand_names` has the Python variable of each operand. `starts` has, for index variables that are used as values,
    the name of the global index at which this rank's piece starts; others start at 0. `names` gives the new variables.
    Raises `UnityError` for functions that have no text in PyTorch.
    """
    first = _Lines(bound, operand_names, starts)
    first.sharing = Sharing(Names(), {})
    for result in first.bound.results:
        first.result(result)
    writer = _Lines(bound, operand_names, starts)
    writer.sharing = sharing = Sharing(names, first.sharing.uses)
    texts: list[str] = []
    # Dims of size 1 may have any stride, which may make PyTorch choose another order in memory for results.
    writer.strided = any(len(shape) > 1 and 1 in shape for shape in writer.shapes.values())
    for result in writer.bound.results:
        text = writer.result(result)
        texts.append((writer.method(text, "contiguous()") if writer.strided else text).text)
    return sharing.lines, tuple(texts)


def torch_factors(bound: Bound, operand_names: Sequence[str]) -> tuple[str, str] | None:
    """
    Return PyTorch expressions (a, b) of two matrices such that the result of the bound line `bound` is `a @ b`, if it
    is a product summed over the first dims of two tensors, as a weight's gradient is; None for other lines.

    `operand_names` has the Python variable of each operand.
    """
    writer = _Lines(bound, operand_names, {})
    result, *more = writer.bound.results
    if more or not isinstance(result.expr, Reduce) or not all(isinstance(i, Var) for i in result.indices):
        return None
    found = factors(writer, result.expr)
    if found is None or found[-1] != tuple(n for i in result.indices for n in index_names(i)):
        return None
    a, b, _ = found
    return a.text, b.text


def torch_reference(
    bound: Bound, operand_names: Sequence[str], taken: Iterable[str]
) -> tuple[list[str], tuple[str, ...]]:
    """
    Return (statements, expressions) in PyTorch that compute the bound line `bound` in double precision, an expression
    for each result.

    `operand_names` has the Python variable of each operand. Floating point results are f64 whatever type the line
    gives. There are statements only for random numbers; they define names that are not in `taken`.
    """
    results = (replace(r, dtype="f64") if r.dtype is not None and r.floating else r for r in bound.results)
    bound = replace(bound, results=tuple(results))
    if any(_draws(r.expr) for r in bound.results):
        return torch_body(bound, operand_names, {}, Names(taken))
    return [], torch_expression(bound, operand_names)


def _draws(expr: Expr) -> bool:
    return (isinstance(expr, Call) and expr.function == "philox") or any(map(_draws, children(expr)))


class _Lines(TorchWriter):
    """The writer of a line, which matches results and expressions against the forms."""

    # -- results

    def result(self, result: Result) -> Text:
        """Write a result of the line."""
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
        """Write a result that only flattens or unflattens dims as a reshape; None for any other."""
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

    def folded(self, indices: Sequence[object], value: TensorText, into: str | None = None) -> Text:
        """
        Expand a value to all variables of the indices, and flatten composite dims; `into` is the element type if it is
        not that of the floating point operands.
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

    # -- values

    def value(self, expr: Expr) -> TensorText:
        """Write an expression in the first form that matches it."""
        sharing = self.sharing
        if sharing is None or not is_worth_keeping(expr):
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

    def _value(self, expr: Expr) -> TensorText:
        match expr:
            case Const(value) if isinf(value):
                return TensorText(Text(f'float("{value}")'), (), True)
            case Const(value):
                whole = value.is_integer() and abs(value) < 2**31
                text = Text(repr(int(value) if whole else value), ATOM if value >= 0 else UNARY)
                return TensorText(text, (), True, "int" if whole else "float")
            case Name(name):
                start, size = self.starts.get(name), self.extents[name]
                limits = f"{size}" if start is None else f"{start}, {start} + {size}"
                return TensorText(Text(f"torch.arange({limits}, device={self.device})"), (name,), kind="int")
            case Access():
                return read(self, expr)
            case Binary("/") if (found := softmax(expr, self.extents, self.starts)) is not None:
                scores, axis = found
                value = self.floating(self.value(scores))
                return TensorText(Text(f"torch.softmax({value.text.text}, {value.dims.index(axis)})"), value.dims)
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
                return binary_call(self, BINARY[function], self.value(left), self.value(right))
            case Call("where", _) if (product_of_one := routed_product(self, expr)) is not None:
                return product_of_one
            case Call("where", (condition, yes, no)):
                return chosen(self, self.value(condition), self.value(yes), self.value(no))
            case Call(function, (argument,)) if function in FUNCTIONS:
                value = self.floating(self.value(argument))
                return TensorText(Text(f"{FUNCTIONS[function]}({value.text.text})"), value.dims)
            case Call(function, _):
                raise self.fail(f"no PyTorch text for function {function}; add it to kernels/pytorch/functions.py")
            case Reduce():
                known = convolved(self, expr) or pooled(self, expr) or routed_product(self, expr)
                known = known or gathered(self, expr) or scattered(self, expr)
                return known or product(self, expr) or reduced(self, masked_body(expr, self.extents))
            case Opaque(function, (Var(made),), (Var(taken),), body):
                return opaque(self, function, made, taken, self.value(body))
            case _:
                raise TypeError(f"{expr} cannot stand inside an expression")
