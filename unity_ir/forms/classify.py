"""
Classify a bound line (an operator's definition in the tensor description language TDL at given shapes, such as `out[m,
n] = sum[k](x[m, k] * w[k, n])`) by its form alone, not by its operator: fusion, Triton and PyTorch all ask here.

| form | line | recognised by |
|---|---|---|
| `Contraction` | a function of one matrix product, or of a batch of them | `contraction` |
| `Convolution` | a convolution, or its gradient by either operand | `convolution` |
| `Attention` | attention, or its gradients | `attention` |
| `ColumnSums` | sums over all rows, and matrices computed row by row from the same tensors | `column_sums` |
| `Moments` | the mean of rows, and their mean distances to it, plain and squared | `moments` |
| `RowSums` | sums of rows, and matrices computed from the same elements | `row_sums` |
| `Grouped` | products of rows with the weight that integers pick, or these weights' gradient | `grouped` |
| `Scatter` | a sum of elements into the places that integers pick | `scatter` |
| `WindowWrites` | any other result that is written through windows | `window_writes` |
| `Reduction` | any other line with reductions | |
| `Pointwise` | a line without reductions | |
| `OpaqueLine` | a line that has no formula | |

`form_of` classifies one result by itself; `Convolution`, `Attention`, `ColumnSums`, `Moments`, `RowSums` and `Grouped`
are forms of whole lines only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.forms.attention import Attention, attention
from unity_ir.forms.column_sums import ColumnSums, column_sums
from unity_ir.forms.contraction import Contraction, contraction
from unity_ir.forms.convolution import Convolution, convolution, pointwise_convolution
from unity_ir.forms.grouped import Grouped, grouped
from unity_ir.forms.moments import Moments, moments
from unity_ir.forms.rewrite import reductions
from unity_ir.forms.row_sums import RowSums, row_sums
from unity_ir.forms.scatter import Scatter, scattered
from unity_ir.forms.window_writes import WindowWrites, window_writes, writes_windows
from unity_ir.tdl.functions import FUSED
from unity_ir.tdl.syntax import Bound, Call, Expr, Opaque, Reduce, Result, children


@dataclass(frozen=True, slots=True)
class Reduction:
    """The form of a result with reductions that no other form describes."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """
    The form of a result without reductions: each element is computed by itself, and may gather from other tensors.
    """


@dataclass(frozen=True, slots=True)
class OpaqueLine:
    """
    The form of a line without a formula for its elements: with an opaque function (`topk`), or with writes through
    windows that cannot be turned into reads.
    """


Form = (
    Contraction
    | Convolution
    | Attention
    | ColumnSums
    | Moments
    | RowSums
    | Grouped
    | Scatter
    | WindowWrites
    | Reduction
    | Pointwise
    | OpaqueLine
)

_LEADING = (OpaqueLine, WindowWrites, Contraction, Scatter, Reduction, Pointwise)
"""Forms of single results by precedence: a line has the first of its results' forms."""


def classify(bound: Bound, starts: Mapping[str, str]) -> Form:
    """
    Return what a bound TDL line computes, by which kernels are chosen: `Contraction` (matrix product), `Convolution`,
    `Attention`, `ColumnSums`, `Moments`, `RowSums`, `Grouped` (mixture of experts), `Scatter`, `WindowWrites`,
    `Reduction`, `Pointwise` or `OpaqueLine` (no formula). If its results differ, returns the first that occurs in the
    order `OpaqueLine`, `WindowWrites`, `Contraction`, `Scatter`, `Reduction`, `Pointwise`.

    The line must be simplified (`rewrite.simplified`). `starts` maps each index variable of which a task computes only
    a part to the name of the kernel argument with the global index at which the part begins; the others begin at 0.
    """
    if any(is_opaque(r.expr) for r in bound.results):
        return OpaqueLine()
    (first, *more) = bound.results
    whole: Form | None = None
    if bound.has_windows:
        whole = None if more else convolution(first.indices, first.expr, bound.extents)
    else:
        of_rows = column_sums(bound) or moments(bound) or row_sums(bound)
        whole = attention(bound, starts) or (None if more else grouped(first, bound.extents)) or of_rows
    return whole or min((form_of(r, bound.extents) for r in bound.results), key=lambda form: _LEADING.index(type(form)))


def form_of(result: Result, extents: Mapping[str, int]) -> Form:
    """
    Return what one result of a bound TDL line computes, whatever the others do: `WindowWrites` (written through
    windows), `OpaqueLine` (no formula), `Pointwise`, `Contraction` (matrix product), `Scatter` or `Reduction`.
    Convolutions, attention, sums of columns, moments and grouped products are found by `classify` alone.

    `extents` maps each index variable to its number of positions.
    """
    if writes_windows(result):
        return window_writes(result, extents) or OpaqueLine()
    if not reductions(result.expr):
        return Pointwise()
    return contraction(result, extents) or scattered(result, extents) or Reduction()


def is_opaque(expr: Expr) -> bool:
    """Return whether an expression calls a function that TDL has no formula for, such as `topk`."""
    return isinstance(expr, Opaque) or any(map(is_opaque, children(expr)))


def is_product_or_convolution(result: Result, extents: Mapping[str, int]) -> bool:
    """
    Return whether a result of a bound TDL line is a matrix product, or a convolution or one of its gradients. A matrix
    product may have an activation (relu, gelu) applied to it.

    `extents` maps each index variable to its number of positions.
    """
    bare = isinstance(without_activation(result.expr), Reduce)
    return (bare and contraction(result, extents) is not None) or is_convolution(result, extents)


def without_activation(expr: Expr) -> Expr:
    """
    Return the reduction to which an expression applies an activation (relu or gelu): given `relu(sum[k](..))`,
    `sum[k](..)`. Returns any other expression as it is.
    """
    match expr:
        case Call(activation, (Reduce() as inner,)) if activation in FUSED:
            return inner
        case _:
            return expr


def is_convolution(result: Result, extents: Mapping[str, int]) -> bool:
    """
    Return whether a result of a bound TDL line is a convolution or one of its gradients. A 1 x 1 convolution, which has
    no windows, counts unless it is a single matrix product (one image).

    `extents` maps each index variable to its number of positions.
    """
    if convolution(result.indices, result.expr, extents) is not None:
        return True
    product = contraction(result, extents)
    return (product is None or product.repeated) and pointwise_convolution(result.expr, extents) is not None
