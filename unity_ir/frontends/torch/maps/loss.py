"""
Map losses, means or sums over all samples, from ATen operators to the compiler's. Each mapping gets the call's `site`
(what PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns the result as a value of
the compiler's graph, or several.
"""

from __future__ import annotations

from math import prod

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import scale
from unity_ir.frontends.torch.maps.reduction import reduced
from unity_ir.frontends.torch.padded import Padded
from unity_ir.frontends.torch.site import CallSite, maps
from unity_ir.frontends.torch.values import Operand, constant, cut, op, permute, reshape
from unity_ir.pcg.graph import Value

MEAN, SUM = 1, 2
"""PyTorch's numbers for reductions."""


def _reduce_mean_loss(mean: Value, reduction: int, count: int) -> Value:
    """
    Return a loss with PyTorch's `reduction`, by its code (1: mean, 2: sum), given its mean `mean` over `count`
    elements.

    Raises `UnityError` for reduction "none" (0).
    """
    if reduction not in (MEAN, SUM):
        raise UnityError("reduction 'none' has no operator; use 'mean' or 'sum'")
    return mean if reduction == MEAN else scale(mean, count)


@maps("cross_entropy_loss")
def cross_entropy(
    site: CallSite,
    x: Value,
    target: Operand | Padded,
    weight: Operand | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    smoothing: float = 0,
) -> Value:
    """
    Map PyTorch's cross-entropy of logits `x` [n, c, ..] or [c] with class ids `target` [n, ..] or []; `reduction` is
    PyTorch's code (1: mean, 2: sum), `smoothing` the probability spread evenly over all classes.

    If the example's ids have some that are `ignore_index`, these do not count in any batch; if it has none, every id
    counts, whatever later batches hold. Raises `UnityError` for class weights, class probabilities, reduction "none",
    and `smoothing` together with ignored ids.
    """
    if weight is not None:
        raise UnityError("class weights have no operator")
    if isinstance(target, Value) and not target.type.is_integer:
        raise UnityError("targets that are probabilities have no operator; give class ids")
    if len(x.shape) > 2:
        x = permute(x, [0, *range(2, len(x.shape)), 1])
    x, ids = aligned(site, x, target if isinstance(target, Padded) else site.value(target), ignore_index)
    if _has_ignored(site, ids, ignore_index):
        if smoothing or reduction not in (MEAN, SUM):
            raise UnityError("ignore_index together with label_smoothing or reduction 'none' has no mapping")
        return _cross_entropy_of_kept(site, x, ids, ignore_index, reduction)
    count = prod(ids.shape)
    loss = op("cross_entropy", x, ids)
    if smoothing:
        mean = reduced("reduce_mean", op("log_softmax", x), range(len(x.shape)))
        loss = op("sub", scale(loss, 1 - smoothing), scale(mean, smoothing))
    return _reduce_mean_loss(loss, reduction, count)


def aligned(site: CallSite, x: Value, ids: Value | Padded, ignore_index: int) -> tuple[Value, Value]:
    """
    Return (logits [b.., c], class ids [b..]) of a loss, given logits `x` with the classes last: a reshape that merged
    the ids' dims is undone in both, and positions where the ids are only padding are left out of both.

    Language models shift their labels by one position and pad them with `ignore_index` (`Padded`). Raises `UnityError`
    if the padding is another id.
    """
    if isinstance(ids, Padded):
        if ids.fill != ignore_index:
            raise UnityError(f"its targets are padded with {ids.fill}, but it ignores {ignore_index}")
        x = cut(reshape(x, (*ids.own, x.shape[-1])), ids.dim, ids.before, ids.value.shape[ids.dim])
        ids = ids.value
    elif ids.node.op == "reshape":
        (ids,) = ids.node.operands
        x = reshape(x, (*ids.shape, x.shape[-1]))
    return x, ids


def _has_ignored(site: CallSite, ids: Value, ignore_index: int) -> bool:
    """
    Return whether the class ids of the example, in the input or table that `ids` is a view of, contain the id
    `ignore_index`: True if they are not known, False if the example has no data (meta device).
    """
    root = ids.node
    while root.op in ("slice", "reshape", "transpose"):
        root = root.operands[0].node
    if root.op == "constant":
        return root.attribute("value") == ignore_index
    example = None
    if root.op == "input":
        example = site.examples.get(root.name, site.tables.values.get(root.name))
    return example is None or (not example.is_meta and bool((example == ignore_index).any()))


def _cross_entropy_of_kept(site: CallSite, x: Value, ids: Value, ignore_index: int, reduction: int) -> Value:
    """
    Return the cross-entropy of logits `x` [b.., c] over those samples whose class id in `ids` [b..] is not
    `ignore_index`: their sum if `reduction`, PyTorch's code, is 2, else their mean.
    """
    counts = op("ne", ids, constant(ignore_index, (), ids.type.dtype))
    known = op("select", counts, ids, constant(0, (), ids.type.dtype))
    score = op("class_score", op("log_softmax", x), known)
    score = op("select", counts, score, constant(0, (), site.dtype))
    loss = op("neg", reduced("reduce_sum", score, range(len(ids.shape))))
    if reduction == SUM:
        return loss
    return op("div", loss, reduced("reduce_sum", op("cast", counts, to=site.dtype), range(len(ids.shape))))


@maps("nll_loss", "nll_loss_nd")
def nll(
    site: CallSite,
    x: Value,
    target: Operand | Padded,
    weight: Operand | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Value:
    """
    Map PyTorch's negative log-likelihood of a log-softmax `x` [n, c, ..] over the classes, to the cross-entropy of the
    logits it was taken of.

    `target`, `weight`, `reduction` (1: mean, 2: sum) and `ignore_index`, a class id that does not count, are as in
    `cross_entropy`. Raises `UnityError` as that does, and if `x` is no log-softmax over the classes.
    """
    # Classes are dim 1, or the only one; our log_softmax is over the last.
    perm = tuple(range(len(x.shape)))
    if x.node.op == "transpose":
        perm, x = x.node.attribute("perm"), x.node.operands[0]
    if x.node.op != "log_softmax" or perm[:2][-1] != len(perm) - 1:
        raise UnityError("its operand is not a log_softmax over the classes, which is the only one with an operator")
    return cross_entropy(site, permute(x.node.operands[0], perm), target, weight, reduction, ignore_index)


@maps("nll_loss_forward", "nll_loss2d_forward")
def nll_forward(
    site: CallSite, x: Value, target: Operand | Padded, weight: Operand | None, reduction: int, ignore_index: int
) -> tuple[Value | None, ...]:
    """
    Map PyTorch's negative log-likelihood as `nll` does; return (loss, None): the total weight, PyTorch's second result,
    has no mapping.
    """
    return nll(site, x, target, weight, reduction, ignore_index), None


@maps("mse_loss")
def mse(site: CallSite, x: Operand, y: Operand, reduction: int = MEAN) -> Value:
    """
    Map PyTorch's mean squared error of `x` and `y`; `reduction` is PyTorch's code (1: mean, 2: sum). Raises
    `UnityError` if their shapes differ, and for reduction "none" (0).
    """
    a, b = site.value(x, site.dtype), site.value(y, site.dtype)
    if a.shape != b.shape:
        raise UnityError(f"operands are {list(a.shape)} and {list(b.shape)}; they must be of one shape")
    return _reduce_mean_loss(op("mse", a, b), reduction, prod(a.shape))


@maps("l1_loss")
def l1(site: CallSite, x: Operand, y: Operand, reduction: int = MEAN) -> Value:
    """
    Map PyTorch's mean absolute error of `x` and `y`, of one shape; `reduction` is PyTorch's code (1: mean, 2: sum).
    Raises `UnityError` for reduction "none" (0).
    """
    a = op("abs", op("sub", site.value(x, site.dtype), site.value(y, site.dtype)))
    return _reduce_mean_loss(reduced("reduce_mean", a, range(len(a.shape))), reduction, prod(a.shape))


@maps("binary_cross_entropy")
def bce(site: CallSite, x: Value, y: Operand, weight: Operand | None = None, reduction: int = MEAN) -> Value:
    """
    Map PyTorch's binary cross-entropy of probabilities `x` with targets `y` of the same shape; `reduction` is PyTorch's
    code (1: mean, 2: sum). Raises `UnityError` for a `weight`, and for reduction "none" (0).
    """
    if weight is not None:
        raise UnityError("weights have no operator")
    return _reduce_mean_loss(op("bce", x, site.value(y, site.dtype)), reduction, prod(x.shape))


@maps("binary_cross_entropy_with_logits")
def bce_with_logits(
    site: CallSite,
    x: Value,
    y: Operand,
    weight: Operand | None = None,
    pos_weight: Operand | None = None,
    reduction: int = MEAN,
) -> Value:
    """
    Map PyTorch's binary cross-entropy of logits `x` with targets `y` of the same shape; `reduction` is PyTorch's code
    (1: mean, 2: sum). Raises `UnityError` for a `weight` or `pos_weight`, and for reduction "none" (0).
    """
    if weight is not None or pos_weight is not None:
        raise UnityError("weights have no operator")
    return _reduce_mean_loss(op("bce_with_logits", x, site.value(y, site.dtype)), reduction, prod(x.shape))
