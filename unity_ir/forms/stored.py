"""Say in a bound line how tensors are stored: with padded rows, or images with the channels last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from unity_ir.forms.rewrite import map_children
from unity_ir.tdl.syntax import Access, Bound, Expr, PaddedVar, Var, accesses

T = TypeVar("T")

IMAGE_RANK = 4
"""Dims of an image, which may be stored with the channels last: samples, channels, rows and columns."""


def with_channels_last(line: Bound, operands: Collection[str], results: Sequence[bool]) -> Bound:
    """
    Return a bound line whose tensors have their dims in the order in which they are stored, which for some is that of
    `channels_last`: the `operands` with these names, and the results for which `results` is true, in their order.
    """

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, Access):
            is_last = expr.tensor in operands
            return Access(expr.tensor, channels_last(expr.indices) if is_last else expr.indices, expr.starred)
        return map_children(expr, visit)

    made = zip(line.results, results, strict=True)
    return replace(
        line,
        results=tuple(
            replace(r, indices=channels_last(r.indices) if is_last else r.indices, expr=visit(r.expr))
            for r, is_last in made
        ),
    )


def channels_last(dims: tuple[T, ...]) -> tuple[T, ...]:
    """
    Return what `dims` has for each dim of an image in the order in which it is stored with the channels last: given
    (samples, channels, rows, columns), returns (samples, rows, columns, channels).
    """
    first, channels, *others = dims
    return (first, *others, channels)


def with_rows(line: Bound, operands: Mapping[str, int], results: Sequence[int]) -> Bound:
    """
    Return a bound line that says of its tensors how their rows (the last dim) are stored: `operands` maps the name of
    an operand, and `results` has for each result in order, the number of elements from one row to the next. A number
    above the dim's size is padding, which is never read; 0 (and an operand left out) stands for none.

    Each padded tensor must be one that `can_be_padded`.
    """

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, Access):
            return Access(expr.tensor, _padded(expr.indices, operands.get(expr.tensor, 0)), expr.starred)
        return map_children(expr, visit)

    made = zip(line.results, results, strict=True)
    return replace(
        line, results=tuple(replace(r, indices=_padded(r.indices, row), expr=visit(r.expr)) for r, row in made)
    )


def _padded(indices: tuple[Any, ...], row: int) -> tuple[Any, ...]:
    if not row:
        return indices
    *before, last = indices
    assert isinstance(last, Var), f"{last} is no single variable"
    return (*before, PaddedVar(last.name, row))


def padded_rows(line: Bound) -> dict[str, int]:
    """
    Return, by name, the number of elements from one row to the next, padding included, of each operand and result of a
    bound line whose rows (the last dim) are stored padded.
    """
    found = [(r.name, r.indices) for r in line.results]
    found += [(a.tensor, a.indices) for r in line.results for a in accesses(r.expr)]
    return {tensor: i[-1].row for tensor, i in found if i and isinstance(i[-1], PaddedVar)}


def has_padded_results(line: Bound) -> bool:
    """Return whether any result of a bound line has rows (the last dim) that are stored padded."""
    return any(r.indices and isinstance(r.indices[-1], PaddedVar) for r in line.results)


def can_be_padded(line: Bound, tensor: str, size: int) -> bool:
    """
    Return whether the operand or result called `tensor` of a bound line can be stored with padding after each row:
    whether every read or write of it has a single index variable for its last dim, which runs over all its `size`
    elements.
    """
    found = [r.indices for r in line.results if r.name == tensor]
    found += [a.indices for r in line.results for a in accesses(r.expr) if a.tensor == tensor]
    return all(i and isinstance(i[-1], Var) and line.extents[i[-1].name] == size for i in found)
