"""Sizes of dims as polynomials, from an operator's line and attributes."""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.rules.pattern import AttrExpr
from unity_ir.rules.poly import Poly, number
from unity_ir.rules.proof.equal import Undecided
from unity_ir.tdl.bind import Spelled
from unity_ir.tdl.syntax import Affine, Entry, WrittenIndex, joined_extent


def given_number(of: Entry | int, attributes: Mapping[str, AttrExpr]) -> Poly:
    """
    Return a number `of` a TDL line as a polynomial: a constant for an integer, or the value of the attribute (or of its
    entry) that gives it, from `attributes`, by name.

    Raises `Undecided` where the attribute is no number.
    """
    if isinstance(of, int):
        return number(of)
    value = attributes[of.attribute]
    if isinstance(value, tuple) and of.at is not None:
        value = value[of.at]
    if not isinstance(value, Poly):
        raise Undecided(f"attribute {of.attribute} is no number")
    return value


def dim_size(
    index: WrittenIndex, extents: Mapping[str, Poly], spelled: Spelled, attributes: Mapping[str, AttrExpr]
) -> Poly:
    """
    Return the size of a result's dim that is written at `index`; `extents` has the number of positions of each index
    variable.

    The size of a dim written through a window (an affine index) is the one that the line's clause in `spelled` gives
    it, from `attributes`, by name. Raises `Undecided` where that is no number.
    """
    if isinstance(index, Affine):
        return given_number(spelled.windows[index], attributes)
    return joined_extent(index, extents)
