"""
Which part of a dim each of d tasks reads when an index variable is divided among them, as intervals affine in the
sizes (Tofu, section 4.2).

When a variable is divided among d tasks, task p's interval of a dim that an index runs over is

    [p * step / d - low, (p + 1) * step / d + high)

with `step`, `low` and `high` affine in the extents of the index variables. Where `step` is the whole dim, this is a
bare piece of it (`low` and `high` 0), or a piece with a halo; a dim whose index does not have the variable is read as
a whole; what is no such interval cannot be divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from unity_ir.tdl.syntax import Composite, Index, Segments, Slice, Var, Window, index_names

ExtentProduct = tuple[str, ...]
"""A product of extents; the empty one is 1."""


@dataclass(frozen=True, slots=True)
class ExtentSum:
    """A linear combination of products of extents: `2*|y| + |i| - 3`, where |y| is the extent of y."""

    terms: tuple[tuple[ExtentProduct, int], ...]

    def at(self, extents: Mapping[str, int]) -> int:
        """Return the value of the linear combination, an integer, given the extent of each index variable by name."""
        return sum(factor * prod(extents[v] for v in names) for names, factor in self.terms)

    def __str__(self) -> str:
        text = ""
        for names, factor in self.terms:
            if factor == 0:
                continue
            size = "*".join(f"|{n}|" for n in names)
            amount = size if size and abs(factor) == 1 else "*".join(filter(None, [str(abs(factor)), size]))
            text += (" - " if factor < 0 else " + ") + amount if text else ("-" if factor < 0 else "") + amount
        return text or "0"


@dataclass(frozen=True, slots=True)
class Region:
    """The interval of a dim that task p of d reads; the module's docstring defines `step`, `low` and `high`."""

    step: ExtentSum
    low: ExtentSum
    high: ExtentSum

    def __str__(self) -> str:
        def bound(worker: str, beyond: ExtentSum, sign: str) -> str:
            text = str(beyond)
            return f"{worker}/d*({self.step})" + ("" if text == "0" else f" {sign} ({text})")

        return f"[{bound('p', self.low, '-')}, {bound('(p+1)', self.high, '+')})"


_NOTHING = ExtentSum(())


def region(index: Index, variable: str) -> Region | None:
    """
    Return the interval of a dim that task p of d reads when `variable`, one of those in the dim's `index`, is divided
    among d tasks, as (step, low, high) in terms of the extents: from `step` * p / d - `low` to `step` * (p + 1) / d +
    `high`.

    None if the tasks do not read such intervals. Given `2*y + i - 3` and y: step 2*|y|, low 3 and high |i| - 5, where
    |y| is the extent of y.
    """
    match index:
        case Var():
            return Region(ExtentSum((((variable,), 1),)), _NOTHING, _NOTHING)
        case Composite(names) if names[0] == variable:
            return Region(ExtentSum(((names, 1),)), _NOTHING, _NOTHING)
        case Window(terms, offset):
            ((factor, _),) = (t for t in terms if t[1] == variable)
            others = [t for t in terms if t[1] != variable]
            reach = tuple(((v,), c) for c, v in others)
            constant = offset - sum(c for c, _ in others) - factor + 1
            return Region(
                ExtentSum((((variable,), factor),)), ExtentSum((((), -offset),)), ExtentSum((*reach, ((), constant)))
            )
        case Composite() | Segments() | Slice():
            return None


def sharding_variable(index: Index, extents: Mapping[str, int]) -> str | None:
    """
    Return the index variable by which a dim with this `index` can be sharded, its outermost one; None if the dim cannot
    be sharded.

    `extents` maps each index variable to its number of positions. Given `k` returns k; given `(h d)` returns h; given
    `2*y + i - 3` returns y if the size of the dim is 2*|y| and neither side's halo is wider than the dim, else None;
    given a concatenation (`Segments`) returns None.
    """
    variable = next(iter(index_names(index)), None)
    found = None if variable is None else region(index, variable)
    if found is None:
        return None
    if isinstance(index, Window):
        is_wide = max(found.low.at(extents), found.high.at(extents)) > index.whole
        if is_wide or index.whole != found.step.at(extents):
            return None
    return variable


def halo(index: Index, variable: str, extents: Mapping[str, int]) -> tuple[int, int]:
    """
    Return (before, after): the numbers of elements that each task reads before and after its own shard of a dim with
    this `index`, when the index variable `variable` is divided.

    `extents` maps each index variable to its number of positions. Asserts that the dim can be divided by `variable`
    (`region`).
    """
    found = region(index, variable)
    assert found is not None, f"{variable} cannot be divided in {index}"
    return max(0, found.low.at(extents)), max(0, found.high.at(extents))
