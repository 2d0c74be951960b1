"""
Map matrix products from ATen operators to the compiler's. A product with a transposed operand is one operator, so
weights keep PyTorch's layout. Each mapping gets the call's `site` (what PyTorch recorded of its result: shape, element
type) and the ATen arguments, and returns the result as a value of the compiler's graph, or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import add, scale
from unity_ir.frontends.torch.recognise.attention import attention as written_attention
from unity_ir.frontends.torch.recognise.match import uncast
from unity_ir.frontends.torch.site import CallSite, cast, maps
from unity_ir.frontends.torch.values import Operand, broadcast, expand, op, permute, reshape, shape_of
from unity_ir.pcg.node import Value


def product(x: Value, y: Value) -> Value:
    """
    Return the matrix product `x @ y` of [m.., k] and [k, n], or of batches [b.., m, k] and [b.., k, n] with the same
    leading dims. If `y` is made of what was transposed, one operator computes transpose and product.
    """
    name = "batch_matmul" if len(y.shape) > 2 else "matmul"
    swapped = _swapped(y)
    return op(name, x, y) if swapped is None else op(f"{name}_nt", x, swapped)


def _swapped(y: Value) -> Value | None:
    """
    Return `y` with its last two dims exchanged if it is made of a value with its last dim elsewhere, by a permutation
    and then reshapes and expansions of the dims before the last two; None otherwise.
    """
    node = y.node
    if node.op == "transpose":
        *perm, row, column = node.attribute("perm")
        (before,) = node.operands
        return permute(before, (*perm, column, row)) if row == len(y.shape) - 1 else None
    if node.op not in ("expand", "reshape") or node.operands[0].shape[-2:] != y.shape[-2:]:
        return None
    before = _swapped(node.operands[0])
    if before is None or node.op == "reshape":
        return None if before is None else reshape(before, (*y.shape[:-2], y.shape[-1], y.shape[-2]))
    leads = node.attribute("dim") + len(node.attribute("sizes")) <= len(y.shape) - 2
    return op("expand", before, **dict(node.attributes)) if leads else None


@maps("linear")
def linear(site: CallSite, x: Operand, weight: Operand, bias: Operand | None = None) -> Value:
    """Map PyTorch's `x @ weight^T + bias`, of `x` [.., k], `weight` [n, k] and `bias` [n]."""
    out = op("matmul_nt", site.value(x, site.dtype), site.value(weight, site.dtype))
    return out if bias is None else add(site, out, bias)


@maps("matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul(site: CallSite, x: Operand, y: Operand) -> Value:
    """
    Map PyTorch's matrix product of vectors, matrices or batches, which are broadcast. A product that is the last step
    of written-out attention (softmax of scaled scores, times the values) becomes the attention operator instead.
    """
    a, b = site.value(x, site.dtype), site.value(y, site.dtype)
    if len(b.shape) == 1:
        b = reshape(b, (*b.shape, 1))
    if len(a.shape) == 1 and len(b.shape) > 2:
        a = reshape(a, (1, *a.shape))
    if len(b.shape) > 2:
        # Unlike matmul, batch_matmul wants the same leading dims on both sides.
        lead = site.shape[: len(site.shape) - (len(shape_of(y)) > 1) - (len(shape_of(x)) > 1)]
        a, b = (expand(v, (*lead, *v.shape[-2:])) for v in (a, b))
    return written_attention(a, b, site.tables) or reshape(product(*_unflattened(a, b)), site.shape)


def _unflattened(a: Value, b: Value) -> tuple[Value, Value]:
    """
    Return operands for the product `a @ b` that give the same elements: if `b` is a matrix and a reshape merged the
    leading dims of `a`, that reshape's operand in place of `a`; else both as they are.
    """
    before = a.node.operands[0] if a.node.op == "reshape" else a
    return (before if len(b.shape) == 2 and before.shape[-1:] == a.shape[-1:] else a), b


@maps("addmm", "baddbmm", "addmv")
def addmm(site: CallSite, bias: Operand, x: Operand, y: Operand, beta: float = 1, alpha: float = 1) -> Value:
    """
    Map PyTorch's `beta * bias + alpha * x @ y`, of matrices, of batches (baddbmm), or of a matrix and a vector (addmv);
    with `beta` 0, `bias` is not read.
    """
    a, b = site.value(x, site.dtype), site.value(y, site.dtype)
    if beta == alpha == 1 and len(shape_of(bias)) == 1 and len(a.shape) == len(b.shape) == 2:
        out = product(*_unflattened(a, b))
        return reshape(add(site.of(out), out, bias), site.shape)
    out = scale(matmul(site, a, b), alpha)
    return out if beta == 0 else add(site, out, bias, alpha=beta)


@maps("_grouped_mm", "grouped_mm_fallback")
def grouped_mm(
    site: CallSite, x: Value, weights: Operand, ends: Operand | None = None, bias: object = None, dtype: object = None
) -> Value:
    """
    Map PyTorch's (and transformers') grouped matrix product: the rows of `x` [rows, k] are divided into consecutive
    groups, and each group is multiplied by its own matrix of `weights` [groups, k, n]; return [rows, n]. `ends`
    [groups] are the positions at which the groups end; rows after the last group give 0.

    Raises `UnityError` for groups of columns, without `ends`, and for a `bias`. `dtype` has no effect.
    """
    del dtype
    w = site.value(weights, site.dtype)
    if ends is None or bias is not None or (len(x.shape), len(w.shape)) != (2, 3):
        raise UnityError("only groups of rows, without a bias, have an operator")
    expert = _groups(site, site.value(ends, "i64"), x.shape[0])
    for untransposed in w.node.operands if w.node.op == "transpose" else ():
        if w.node.attribute("perm") == (0, 2, 1):
            return op("routed_matmul_nt", cast(x, site.dtype), untransposed, expert)
    return op("routed_matmul", cast(x, site.dtype), w, expert)


def _groups(site: CallSite, ends: Value, count: int) -> Value:
    """Return the group of each of `count` rows, given the positions [groups] at which the groups end."""
    known = site.tables.orders.counts.get(uncast(ends))
    if known is not None and known.shape == (count,):
        # What was sorted and counted is the group of each row.
        return cast(known, "i64")
    rows = site.value(torch.arange(count)[:, None])
    before = op("cast", op("le", expand(reshape(ends, (1, *ends.shape)), (count, *ends.shape)), rows), to="i64")
    return op("reduce_sum", before, dim=1)


@maps("_trilinear")
def trilinear(
    site: CallSite,
    x: Operand,
    y: Operand,
    z: Operand,
    new_x: Sequence[int],
    new_y: Sequence[int],
    new_z: Sequence[int],
    summed: Sequence[int],
    *_: object,
) -> Value:
    """
    Map PyTorch's `_trilinear`, which `nn.Bilinear` uses: insert dims of size 1 into the operands `x`, `y` and `z`, at
    the positions `new_x`, `new_y` and `new_z`; return their elementwise product, broadcast, summed over the dims
    `summed`.
    """
    values: list[Value] = []
    for operand, new in ((x, new_x), (y, new_y), (z, new_z)):
        value = site.value(operand, site.dtype)
        sizes = iter(value.shape)
        rank = len(value.shape) + len(new)
        values.append(reshape(value, [1 if d in new else next(sizes) for d in range(rank)]))
    shape = broadcast(*values)
    a, b, c = (expand(v, shape) for v in values)
    out = op("mul", op("mul", a, b), c)
    for dim in sorted(summed, reverse=True):
        out = op("reduce_sum", out, dim=dim)
    return out


@maps("einsum")
def einsum(site: CallSite, equation: str, operands: list[Operand], path: object = None) -> Value:
    """
    Map PyTorch's einsum of two operands, such as `bik,bkj->bij`, to one batched matrix product, or to attention whose
    last step it is as `matmul` does, with permutations and reshapes before and after it; `path`, an order of
    contraction, has no effect.

    Raises `UnityError` for other numbers of operands, equations without `->`, letters repeated within one operand,
    ellipses, and letters summed over in one operand alone.
    """
    del path
    values = [site.value(v, site.dtype) for v in operands]
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(values) != 2 or not arrow or "." in equation or any(len(set(t)) != len(t) for t in (*terms, out)):
        raise UnityError(f"einsum {equation!r} has no mapping; of two operands with distinct letters there is one")
    (a, b), (x, y) = terms, values
    sizes = {c: s for t, v in ((a, x), (b, y)) for c, s in zip(t, v.shape, strict=True)}
    batch = [c for c in out if c in a and c in b]
    summed = [c for c in a if c in b and c not in out]
    rows, columns = ([c for c in out if c in t and c not in batch] for t in (a, b))
    if {*batch, *summed, *rows} != set(a) or {*batch, *summed, *columns} != set(b):
        raise UnityError(f"einsum {equation!r} sums over a letter of one operand; sum it before")

    def arranged(v: Value, term: str, *groups: list[str]) -> Value:
        v = permute(v, [term.index(c) for g in groups for c in g])
        return reshape(v, [*(sizes[c] for c in groups[0]), *(prod(sizes[c] for c in g) for g in groups[1:])])

    left, right = arranged(x, a, batch, rows, summed), arranged(y, b, batch, summed, columns)
    z = written_attention(left, right, site.tables) or product(left, right)
    order = [*batch, *rows, *columns]
    return permute(reshape(z, [sizes[c] for c in order]), [order.index(c) for c in out])
