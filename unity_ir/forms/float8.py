"""
Write products of operands that are rounded to 8 bits (float8, e4m3) as lines that round, and a line that multiplies.

    out[m, n] = f(sum[k](float8(x[m, k]) * float8(w[k, n])), ..)  ->

    scale[m] = maximum(max[k](abs(x[m, k])), tiny) / 448;  rounded[m, k] = x[m, k] / scale[m]
    scale_2[n] = maximum(max[k](abs(w[k, n])), tiny) / 448;  rounded_2[n, k] = w[k, n] / scale_2[n]
    out[m, n] = f(sum[k](rounded[m, k] * rounded_2[n, k]) * (scale[m] * scale_2[n]), ..)

Each row of either operand (what is multiplied with one row or column of the other) has a scale of its own, as of
torchao's row-wise recipe, so that its largest element is the largest of float8. Elements that are summed are
consecutive in memory, as Hopper's instructions want them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from unity_ir.forms.addresses import Names
from unity_ir.forms.contraction import contraction
from unity_ir.forms.rewrite import map_children, reductions
from unity_ir.tdl.counts import argument_in_float8, free_variables
from unity_ir.tdl.element_types import FLOAT8
from unity_ir.tdl.syntax import Access, Binary, Bound, Call, Const, Expr, Reduce, Result, Var, accesses, index_names

LARGEST = 448.0
"""The largest number in 8 bits, of `FLOAT8`."""
TINY = 1e-12
"""The least a row's largest element counts as: rows of zeros have a scale, too."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """A line that rounds an operand: its results are the scale of every row (f32), and rows in 8 bits (`FLOAT8`)."""

    operand: str
    line: Bound
    is_transposed: bool
    """Whether elements that are summed are not the innermost of the operand in memory, as they are of the rounded."""


@dataclass(frozen=True, slots=True)
class Float8Lines:
    """A line in lines that round its product's operands, and one of the rounded operands and their scales."""

    rounded: tuple[Rounding, Rounding]
    product: Bound
    """Its results are those of the line; it reads the others' results by their names."""


def float8_lines(line: Bound) -> Float8Lines | None:
    """
    Return a simplified line, whose results are functions of one product of rounded operands, as lines that round these
    and a line that multiplies them; None for any other line.
    """
    found = [contraction(r, line.extents) for r in line.results]
    of = found[0]
    if of is None or not of.rounded or any(each is None or each.product != of.product for each in found):
        return None
    names = Names(p.name for p in line.operands)
    for result in line.results:
        names.new(result.name)
    assert isinstance(of.product.body, Binary)
    factors: list[Access] = []
    scales: list[Access] = []
    rounded: list[Rounding] = []
    for call, dims in ((of.product.body.left, "bm"), (of.product.body.right, "bn")):
        assert isinstance(call, Call)
        # What is the same in every product of a batch is rounded once.
        own = free_variables(call)
        rows = tuple(Var(n) for d in dims for n in of.names[d] if n in own)
        columns = tuple(Var(n) for n in of.names["k"])
        most = Call("maximum", (Reduce("max", columns, Call("abs", call.args)), Const(TINY)))
        scale = Binary("/", most, Const(LARGEST))
        results = (
            Result(names.new("scale"), rows, scale, "f32"),
            Result(names.new("rounded"), (*rows, *columns), Binary("/", call.args[0], scale), FLOAT8),
        )
        (read,) = accesses(call)
        rounded.append(Rounding(read.tensor, replace(line, results=results), _is_transposed(read, of.product)))
        scales.append(Access(results[0].name, rows))
        factors.append(Access(results[1].name, results[1].indices))
    product = Reduce("sum", of.product.indices, Binary("*", *factors))
    scaled = Binary("*", product, Binary("*", *scales))

    def changed(expr: Expr) -> Expr:
        return scaled if expr == of.product else map_children(expr, changed)

    results = tuple(replace(r, expr=changed(r.expr)) for r in line.results)
    return Float8Lines((rounded[0], rounded[1]), replace(line, results=results))


@lru_cache(maxsize=4096)
def rounding_reads(results: tuple[Result, ...]) -> tuple[int, int]:
    """
    Return how often kernels that round read each of both operands of a line's product, given the line's results: once
    where summed elements are the innermost in memory, so that a program holds whole rows; else twice, for the scales
    and to round.
    """
    (product,) = dict.fromkeys(r for result in results for r in reductions(result.expr))
    left, right = (2 if _is_transposed(read, product) else 1 for read in accesses(product.body))
    return left, right


def _is_transposed(read: Access, product: Reduce) -> bool:
    return index_names(read.indices[-1])[-1] not in product.names


def without_rounding(bound: Bound) -> Bound:
    """Return a line whose numbers are read as they are, not rounded to 8 bits."""
    return replace(bound, results=tuple(replace(r, expr=_plain(r.expr)) for r in bound.results))


def _plain(expr: Expr) -> Expr:
    inner = argument_in_float8(expr)
    return map_children(expr, _plain) if inner is None else _plain(inner)
