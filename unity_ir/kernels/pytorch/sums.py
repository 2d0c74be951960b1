"""Write sums of products as matrix products or `einsum`, and every other reduction by PyTorch's reduction of dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from unity_ir.kernels.pytorch.tensor_text import TensorText, letters
from unity_ir.kernels.pytorch.writer import TorchWriter
from unity_ir.kernels.text import ATOM, PRODUCT, UNARY, Text
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Access, Binary, Reduce

_REDUCERS: Mapping[str, str] = {"sum": "sum", "max": "amax", "min": "amin"}


def factors(writer: TorchWriter, expr: Reduce) -> tuple[Text, Text, tuple[str, ...]] | None:
    """
    Return (a, b, dims) for a sum of a product of two tensors over the first dims of both, as in a weight's gradient:
    code for two matrices such that the sum is `a @ b`, and the index variables of its dims. None for other expressions.
    """
    match expr:
        case Reduce("sum", _, Binary("*", Access() as left, Access() as right)):
            x, y = (writer.floating(writer.value(each)) for each in (left, right))
            return _with_leading_sums(writer, x, y, set(expr.names))
        case _:
            return None


def _with_leading_sums(
    writer: TorchWriter, x: TensorText, y: TensorText, summed: set[str]
) -> tuple[Text, Text, tuple[str, ...]] | None:
    """Return what `factors` does of a sum over the dims `summed` of a product of `x` and `y`."""
    k, rest = [n for n in x.dims if n in summed], [n for of in (x, y) for n in of.dims if n not in summed]
    if set(k) != summed or not x.dims[: len(k)] == y.dims[: len(k)] == tuple(k):
        return None
    if len(x.dims) != len(k) + 1 or len(y.dims) != len(k) + 1 or len(set(rest)) < 2:
        return None
    flat = f"flatten(0, {len(k) - 1})"
    a, b = (writer.method(t, flat) if len(k) > 1 else t for t in (x.text, y.text))
    return writer.method(a, "T"), b, tuple(rest)


def product(writer: TorchWriter, expr: Reduce) -> TensorText | None:
    """Return code, by `@` or `torch.einsum`, for a sum of a product of two tensors; None for other expressions."""
    match expr:
        case Reduce("sum", _, Binary("*", left, right)):
            pass
        case _:
            return None
    bound = set(expr.names)
    reads = isinstance(left, Access) and isinstance(right, Access)
    own, other = free_variables(left), free_variables(right)
    if not reads and not (own - other and other - own and own & other & bound):
        return None
    x, y = writer.value(left), writer.value(right)
    if not bound <= {*x.dims, *y.dims} or "int" in (x.kind, y.kind) or x.number or y.number:
        return None
    x, y = writer.floating(x), writer.floating(y)
    order = tuple(n for n in writer.extents if n in {*x.dims, *y.dims} - bound)
    k = [n for n in x.dims if n in bound]
    if set(k) == bound and [n for n in y.dims if n in bound] == k and k:
        rest_x, rest_y = [n for n in x.dims if n not in bound], [n for n in y.dims if n not in bound]
        if not set(rest_x) & set(rest_y) and len(rest_y) == 1:
            if len(k) == 1 and order == (*rest_x, *rest_y) and x.dims[-1] == k[0] and rest_x:
                w = y.text if y.dims[0] == k[0] else writer.method(y.text, "T")
                return TensorText(Text(f"{x.text.at(PRODUCT)} @ {w.at(UNARY)}", PRODUCT), order)
            leading = _with_leading_sums(writer, x, y, bound)
            if leading is not None and order == leading[-1]:
                a, b, _ = leading
                return TensorText(Text(f"{a.text} @ {b.at(UNARY)}", PRODUCT), order)
    writer.strided = True
    of = letters([*x.dims, *y.dims])
    spec = f"{_spell(x.dims, of)},{_spell(y.dims, of)}->{_spell(order, of)}"
    return TensorText(Text(f'torch.einsum("{spec}", {x.text.text}, {y.text.text})'), order)


def reduced(writer: TorchWriter, expr: Reduce) -> TensorText:
    """Return code for a reduction: `sum`, `prod`, `amax` or `amin` over the dims of the index variables reduced."""
    value = writer.value(expr.body)
    dims = [d for d, n in enumerate(value.dims) if n in expr.names]
    rest = tuple(n for n in value.dims if n not in expr.names)
    text = value.text
    # Variables that the body does not depend on repeat it.
    times = prod(writer.extents[n] for n in expr.names if n not in free_variables(expr.body))
    if dims:
        if expr.reducer == "prod":
            for d in reversed(dims):
                text = writer.method(text, f"prod({d})")
        else:
            where = "" if not rest else str(dims[0]) if len(dims) == 1 else str(tuple(dims))
            text = writer.method(text, f"{_REDUCERS[expr.reducer]}({where})")
    if times > 1 and expr.reducer == "sum":
        text = Text(f"{text.at(PRODUCT)} * {times}", PRODUCT)
    elif times > 1 and expr.reducer == "prod":
        text = Text(f"{text.at(ATOM)} ** {times}", UNARY)
    return TensorText(text, rest, value.number, "int" if value.kind == "bool" else value.kind)


def _spell(names: Sequence[str], of: Mapping[str, str]) -> str:
    return "".join(of[n] for n in names)
