"""
Recognise grouped products (mixture of experts), of rows with the one weight that integers pick for each, and the
weights' gradient.

    out[t, n] = sum[v](where(eq(v, at[t]), sum[k](x[t, k] * w[v, k, n]), 0))
    out[v, k, n] = sum[t](where(eq(v, at[t]), x[t, k] * y[t, n], 0))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.forms.addresses import Address, address
from unity_ir.forms.contraction import one_stride
from unity_ir.tdl.gather import Pick, gather, pick, scatter
from unity_ir.tdl.syntax import Access, Binary, Expr, Reduce, Result, Segments, Window, index_names


@dataclass(frozen=True, slots=True)
class Routed:
    """
    A product of rows with gathered weights (mixture of experts), or its gradient by the weights, taken apart.

    Names are those of the module's docstring: `x` is [t, k], and `w` the weights [v, k, n]. In the gradient of the
    weights `w` is the second factor, [t, n], which is called `y` there.
    """

    variable: str
    """The variable `v` of the weights."""
    at: Access
    """The integers that pick a weight for each row."""
    x: Access
    w: Access
    rows: tuple[str, ...]
    """The variables `t`, in order of the integers' dims."""
    left: tuple[str, ...]
    """The variables `k`."""
    right: tuple[str, ...]
    """The variables `n`."""
    of_weights: bool
    """Whether it is the gradient of the weights, summed over the rows."""


def routed(expr: Expr, extents: Mapping[str, int]) -> Routed | None:
    """
    Match an expression as the matrix product of a mixture of experts, or as its gradient by the weights; return its
    parts, or None for anything else. In that product an integer operand gives for each row of `x` (a token) the number
    of the weight that the row is multiplied by.

    `extents` maps each index variable to its number of positions.
    """
    found = gather(expr)
    if found is None and (single := pick(expr)) is not None and extents[single.variable] == 1:
        # On a piece of one weight the sum over weights has been simplified to its body.
        found = single
    if found is not None:
        match found.body:
            case Reduce("sum", _, Binary("*", Access() as a, Access() as b)):
                x, w = (a, b) if found.variable in _names(b) else (b, a)
                return _of_rows(found, x, w, found.body.names)
            case _:
                return None
    found = scatter(expr)
    match expr, found:
        case Reduce(), Pick(_, _, Binary("*", Access() as x, Access() as w)):
            return _of_weights(found, x, w, expr.names)
        case _:
            return None


def _of_rows(of: Pick, x: Access, w: Access, over: tuple[str, ...]) -> Routed | None:
    rows, a, b = _names(of.at), _names(x), _names(w)
    right = tuple(n for n in b if n != of.variable and n not in over)
    alike = a and set(a) <= {*rows, *over} and {*over, of.variable} <= set(b) and set(over) <= set(a)
    if not alike or not right or set(right) & {*rows, *a} or of.variable in (*a, *rows) or set(rows) & set(over):
        return None
    return Routed(of.variable, of.at, x, w, rows, over, right, False)


def _of_weights(of: Pick, x: Access, w: Access, over: tuple[str, ...]) -> Routed | None:
    rows, a, b = _names(of.at), _names(x), _names(w)
    left, right = (tuple(n for n in names if n not in rows) for names in (a, b))
    if sorted(rows) != sorted(over) or not set(rows) <= set(a) & set(b):
        return None
    if not left or not right or set(left) & set(right) or of.variable in (*a, *b, *rows):
        return None
    return Routed(of.variable, of.at, x, w, rows, left, right, True)


def _names(access: Access) -> tuple[str, ...]:
    """Return the variables of a read; none if it has segments or windows, or reads a diagonal."""
    if any(isinstance(i, Segments | Window) for i in access.indices):
        return ()
    names = tuple(n for i in access.indices for n in index_names(i))
    return names if len(set(names)) == len(names) else ()


@dataclass(frozen=True, slots=True)
class Grouped:
    """
    A grouped matrix product: one product for each weight `b`, of the rows `m` that use it; for the weights' gradient,
    summed over those rows `k`.
    """

    of: Routed
    sizes: Mapping[str, int]
    """Size of each of `b`, `m`, `n` and `k`; the rows are those of all weights together."""
    strides: Mapping[str, Mapping[str, int]]
    """For each of `x`, `w` and `out`, its stride in elements by dim, for those of `b`, `m`, `n` and `k` that it has."""


def grouped(result: Result, extents: Mapping[str, int]) -> Grouped | None:
    """
    Match a result as a grouped matrix product (mixture of experts): for each weight, the product with the rows that
    integers assign to it, or the gradient of that weight. Return its sizes and strides; None for any other result, or
    if some dim cannot be addressed by one stride.

    `extents` maps each index variable to its number of positions.
    """
    of = routed(result.expr, extents)
    if of is None:
        return None
    weights = (of.variable,)
    groups = {"b": weights, "m": of.rows, "n": of.right, "k": of.left}
    dims = ("mk", "bkn", "mn")
    if of.of_weights:
        groups, dims = {"b": weights, "m": of.left, "n": of.right, "k": of.rows}, ("mk", "kn", "bmn")
    places = [address(i, extents) for i in (of.x.indices, of.w.indices, result.indices)]
    strides = [_strides({d: groups[d] for d in own}, extents, at) for own, at in zip(dims, places, strict=True)]
    order = _strides({"rows": of.rows}, extents, address(of.at.indices, extents))
    whole = prod(extents[n] for n in of.rows)
    if any(s is None for s in strides) or order is None or order["rows"] != (1 if whole > 1 else 0):
        return None
    sizes = {d: prod(extents[n] for n in names) for d, names in groups.items()}
    return Grouped(of, sizes, {name: own or {} for name, own in zip(("x", "w", "out"), strides, strict=True)})


def _strides(groups: Mapping[str, Sequence[str]], extents: Mapping[str, int], where: Address) -> dict[str, int] | None:
    """Return the stride of every group of variables; None if one has several, or a variable is not in the address."""
    found: dict[str, int] = {}
    for dim, names in groups.items():
        long = [n for n in names if extents[n] > 1]
        stride = one_stride(long, extents, where) if all(n in where.strides for n in long) else None
        if stride is None:
            return None
        found[dim] = stride
    return found
