"""
Recognise those results of a bound line (an operator's definition in the tensor description language TDL at given
shapes) that are matrix products followed by a function of each element (the epilogue).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.forms.addresses import Address, address, runs
from unity_ir.forms.rewrite import map_children, outermost_reductions
from unity_ir.tdl.functions import ROUNDED
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Call,
    Cases,
    Composite,
    Expr,
    Opaque,
    Reduce,
    Result,
    Var,
    WrittenIndex,
    accesses,
    children,
    index_names,
)

SMALLEST = 16
"""Fewest rows and columns of a product in a batch: the tile of one matrix instruction."""
MOST_BATCHES = 65535
"""Most programs along the second axis of a CUDA grid."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """
    `out[b, m, n] = f(sum[k](x[b, m, k] * w[b, k, n]), ..)`: a batch of matrix products, and a function of each element.

    `f` is the epilogue: any function of the product's element and of other tensors' elements at `b`, `m` and `n`.
    """

    product: Reduce
    """The reduction `sum[k](x * w)` in the result's expression."""
    names: Mapping[str, tuple[str, ...]]
    """The line's variables that are flattened into each of `b`, `m`, `n` and `k`, outermost first."""
    sizes: Mapping[str, int]
    """Size of each of `b`, `m`, `n` and `k`."""
    x_strides: Mapping[str, int]
    """Stride in `x`, in elements, of each of `b`, `m` and `k`."""
    w_strides: Mapping[str, int]
    """Stride in `w`, in elements, of each of `b`, `k` and `n`."""
    repeated: bool = False
    """Whether one of the operands is the same in every product of the batch."""
    rounded: bool = False
    """Whether both operands are read in 8 bits, if they have 16 (`forms.float8`)."""

    @property
    def x(self) -> str:
        """Name of the tensor that is the first factor of the matrix product."""
        return accesses(self.product.body)[0].tensor

    @property
    def w(self) -> str:
        """Name of the tensor that is the second factor of the matrix product."""
        return accesses(self.product.body)[1].tensor


def contraction(result: Result, extents: Mapping[str, int]) -> Contraction | None:
    """
    Match a result of a bound TDL line as a matrix product, or a batch of them, with any function applied to each
    element of it; return its factors, sizes and strides, or None for any other result.

    `extents` maps each index variable to its number of positions. Each of `m` (variables of the first factor and the
    result), `n` (of the second and the result), `k` (reduced) and `b` (of all three) may be several variables if one
    stride steps over them in each of the product's factors. If not, the outermost variables of `m` or `n` may become a
    batch of products with the same other factor (images times the weight of a 1 x 1 convolution). If only the result
    has several strides, its addresses are computed per element.
    """
    product = _product_in(result.expr)
    if product is None or not _is_epilogue(result.expr, product) or not all(map(_is_plain, result.indices)):
        return None
    match product.body:
        case Binary("*", Access() as left, Access() as right):
            rounded = False
        case Binary("*", Call(function, (Access() as left,)), Call(other, (Access() as right,))) if (
            function == other == ROUNDED
        ):
            rounded = True
        case _:
            return None
    if not all(map(_is_plain, (*left.indices, *right.indices))):
        return None
    x, w, out = (address(i, extents) for i in (left.indices, right.indices, result.indices))
    results = [n for i in result.indices for n in index_names(i) if extents[n] > 1]
    reduced = [n for n in product.names if extents[n] > 1]
    groups: dict[str, list[str]] = {"b": [], "m": [], "n": [], "k": sorted(reduced, key=lambda n: -x.strides.get(n, 0))}
    for name in results:
        if name not in x.strides and name not in w.strides:
            return None
        groups["n" if name not in x.strides else "m" if name not in w.strides else "b"].append(name)
    if not groups["m"] or not groups["n"] or not reduced:
        return None
    if any(n not in x.strides or n not in w.strides for n in reduced):
        return None
    for dim, where in (("b", x), ("m", x), ("n", w)):
        groups[dim].sort(key=lambda n, where=where: -where.strides[n])
    for way, made in (*((way, out) for way in _ways(groups, extents)), (groups, None)):
        strides = _strides(way, extents, x, w, made)
        if strides is not None:
            sizes = {d: prod(extents[n] for n in names) for d, names in way.items()}
            names = {d: tuple(names) for d, names in way.items()}
            return Contraction(product, names, sizes, *strides, repeated=way is not groups, rounded=rounded)
    return None


def _is_plain(index: WrittenIndex) -> bool:
    return isinstance(index, Var | Composite)


def _is_epilogue(expr: Expr, product: Reduce) -> bool:
    """Return whether an expression is a function of the product's element, other tensors' elements and constants."""
    match expr:
        case Reduce():
            return expr == product
        case Cases() | Opaque():
            return False
        case Access(_, indices):
            return all(map(_is_plain, indices))
        case _:
            return all(_is_epilogue(child, product) for child in children(expr))


def _ways(groups: Mapping[str, list[str]], extents: Mapping[str, int]) -> Iterator[Mapping[str, list[str]]]:
    """Yield the groups as they are, and then with the outermost variables of rows or columns as a batch."""
    yield groups
    if groups["b"]:
        return
    for dim in "mn":
        names = groups[dim]
        for count in range(1, len(names)):
            way = {**groups, "b": names[:count], dim: names[count:]}
            sizes = {d: prod(extents[n] for n in names) for d, names in way.items()}
            if min(sizes["m"], sizes["n"]) >= SMALLEST and sizes["b"] <= MOST_BATCHES:
                yield way


def _strides(
    groups: Mapping[str, list[str]], extents: Mapping[str, int], x: Address, w: Address, out: Address | None
) -> tuple[dict[str, int], dict[str, int]] | None:
    """Return the strides of the groups in `x` and `w`; None if one has several there, or in `out` if given."""
    if x.offset or w.offset:
        return None
    found = [strides(groups, extents, where, dims) for where, dims in ((x, "bmk"), (w, "bkn"))]
    if out is not None and strides(groups, extents, out, "bmn") is None:
        return None
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def strides(
    groups: Mapping[str, Sequence[str]], extents: Mapping[str, int], where: Address, dims: str
) -> dict[str, int] | None:
    """
    Return, for each letter of `dims` (such as "bmk"), the stride in elements by which the address `where` steps through
    the index variables `groups[letter]`, outermost first, as if they were one dim; 0 if none of them is in it.

    `extents` maps each index variable to its number of positions. Returns None if some group would need several
    strides.
    """
    out: dict[str, int] = {}
    for dim in dims:
        names = groups[dim]
        stride = one_stride(names, extents, where) if any(n in where.strides for n in names) else 0
        if stride is None:
            return None
        out[dim] = stride
    return out


def one_stride(names: Sequence[str], extents: Mapping[str, int], where: Address) -> int | None:
    """
    Return the stride in elements by which the address `where` steps through the index variables `names`, outermost
    first, as if they were one dim; 0 if `names` is empty.

    Returns None if they need several strides, or if one of them is not in the address or has only one position.
    `extents` maps each index variable to its number of positions.
    """
    if not names:
        return 0
    found = runs(names, extents, where)
    return found[0].stride if len(found) == 1 and len(found[0].names) == len(names) else None


# --- what is no product yet


def _product_in(expr: Expr) -> Reduce | None:
    """
    Return the sum of products `sum[..](a * b)` in an expression (a matrix product), if it is the only reduction that is
    not inside another one; else None.
    """
    found = dict.fromkeys(outermost_reductions(expr))
    if len(found) != 1:
        return None
    (one,) = found
    return one if one.reducer == "sum" and isinstance(one.body, Binary) and one.body.op == "*" else None


def product_factors(expr: Expr) -> tuple[Expr, Expr] | None:
    """
    Return the two factors (a, b) of a matrix product, the sum of products `sum[..](a * b)` in an expression. None
    unless it is the only reduction of the expression that is not inside another one.
    """
    product = _product_in(expr)
    if product is None or not isinstance(product.body, Binary):
        return None
    return product.body.left, product.body.right


def with_factors(result: Result, factors: Sequence[Expr]) -> Result:
    """
    Return a result with the factors a and b of its matrix product `sum[..](a * b)` replaced by the two of `factors`.
    The result must have one (`product_factors`).
    """
    product = _product_in(result.expr)
    assert product is not None
    new = Reduce(product.reducer, product.indices, Binary("*", *factors))

    def changed(expr: Expr) -> Expr:
        return new if expr == product else map_children(expr, changed)

    return Result(result.name, result.indices, changed(result.expr), result.dtype)
