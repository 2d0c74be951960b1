"""
Sizes of dims as polynomials, from an operator's TDL line (its definition in the tensor description language) and
attributes.
"""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.rules.pattern import AttrExpr
from unity_ir.rules.poly import Poly, number
from unity_ir.rules.proof.equal import Undecided
from unity_ir.tdl.bind import Spelled
from unity_ir.tdl.syntax import Affine, Entry, WrittenIndex, joined_extent


def number_of(of: Entry | int, attributes: Mapping[str, AttrExpr]) -> Poly:
    """
    Return, as a polynomial, a number as a TDL line writes it. `of` is an integer, or an `Entry`, which names an
    attribute or one entry of an attribute (`stride.0`); `attributes` has the attributes' values by name.

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
    Return the size, as a polynomial, of a dim of a TDL line's result. `index` is the index that the line has for the
    dim, such as `h`, `(h d)`, or a window (an affine index) `2*y + i`.

    The size follows from `extents`, which has the number of positions of each index variable, by name. Only the size of
    a dim with a window does not: the line's where clause says it, as a number or an attribute. `spelled` is the line
    with packs expanded, which has these clauses (`windows`), and `attributes` has the attributes' values by name.
    Raises `Undecided` where that attribute is no number.
    """
    if isinstance(index, Affine):
        return number_of(spelled.windows[index], attributes)
    return joined_extent(index, extents)
