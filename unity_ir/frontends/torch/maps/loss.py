"""
Map losses, means or sums over all samples, from ATen operators to the compiler's. Each mapping gets the call's `site`
(what PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns the result as a value of
the compiler's graph, or several.
"""

from __future__ import annotations

from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import scale, shift
from unity_ir.frontends.torch.maps.reduction import reduced
from unity_ir.frontends.torch.padded import Padded
from unity_ir.frontends.torch.site import CallSite, maps
from unity_ir.frontends.torch.values import Operand, broadcast, constant, cut, expand, op, permute, reshape
from unity_ir.pcg.node import Value

MEAN, SUM = 1, 2
"""PyTorch's numbers for reductions."""


def _reduced(site: CallSite, each: Value, reduction: int) -> Value:
    """Return the losses of elements with PyTorch's `reduction`, by its code (0: none, 1: mean, 2: sum)."""
    if reduction not in (MEAN, SUM):
        return expand(each, site.shape)
    return reduced("reduce_mean" if reduction == MEAN else "reduce_sum", each, range(len(each.shape)))


def _reduce_mean_loss(mean: Value, reduction: int, count: int) -> Value:
    """
    Return a loss with PyTorch's `reduction`, by its code (1: mean, 2: sum), given its mean `mean` over `count`
    elements.

    """
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
    Map PyTorch's cross-entropy of logits `x` [n, c, ..] or [c] with class ids `target` [n, ..] or []; or with
    probabilities of the classes, in the shape of `x`. `weight` [c] has a factor for each class, `reduction` is
    PyTorch's code (0: none, 1: mean, 2: sum), and `smoothing` is the probability spread evenly over all classes.

    Samples whose class id is `ignore_index` do not count. Without `weight`, and with a mean or sum, the example batch
    decides this for good: if it has no such id, or no data, every sample counts, in later batches, too. Ids that the
    model shifted and padded (`Padded`) must in this case be padded with `ignore_index`; else raises `UnityError`.
    """
    order = [0, *range(2, len(x.shape)), 1] if len(x.shape) > 2 else range(len(x.shape))
    x = permute(x, order)
    if not isinstance(target, Padded) and _holds_floats(target):
        chances = permute(site.value(target, site.dtype), order)
        return _of_probabilities(site, op("log_softmax", x), chances, weight, reduction, smoothing)
    if weight is not None or reduction not in (MEAN, SUM):
        ids = target.filled() if isinstance(target, Padded) else site.value(target)
        return _written_out(site, op("log_softmax", x), ids, weight, reduction, ignore_index, smoothing)
    x, ids = aligned(site, x, target if isinstance(target, Padded) else site.value(target), ignore_index)
    if _has_ignored(site, ids, ignore_index):
        if smoothing:
            return _written_out(site, op("log_softmax", x), ids, weight, reduction, ignore_index, smoothing)
        return _cross_entropy_of_kept(site, x, ids, ignore_index, reduction)
    count = prod(ids.shape)
    loss = op("cross_entropy", x, ids)
    if smoothing:
        mean = reduced("reduce_mean", op("log_softmax", x), range(len(x.shape)))
        loss = op("sub", scale(loss, 1 - smoothing), scale(mean, smoothing))
    return _reduce_mean_loss(loss, reduction, count)


def _holds_floats(x: Operand) -> bool:
    return x.type.is_floating if isinstance(x, Value) else isinstance(x, torch.Tensor) and x.is_floating_point()


def _of_probabilities(
    site: CallSite, logs: Value, chances: Value, weight: Operand | None, reduction: int, smoothing: float
) -> Value:
    """Return the cross-entropy of log-probabilities [b.., c] with probabilities of the same shape."""
    if smoothing:
        chances = shift(scale(chances, 1 - smoothing), smoothing / logs.shape[-1])
    terms = op("mul", logs, chances)
    if weight is not None:
        terms = op("mul", terms, site.value(weight, site.dtype))
    return _reduced(site, op("neg", reduced("reduce_sum", terms, [len(logs.shape) - 1])), reduction)


def _written_out(
    site: CallSite,
    logs: Value,
    ids: Value,
    weight: Operand | None,
    reduction: int,
    ignore_index: int,
    smoothing: float = 0,
) -> Value:
    """
    Return the negative log-likelihood of class ids [b..], given logarithms [b.., c], as PyTorch's documentation writes
    it out: each sample weighted by its class, none of those that are `ignore_index`, the mean over weights.
    """
    counts = op("ne", ids, constant(ignore_index, (), ids.type.dtype))
    known = op("select", counts, ids, constant(0, (), ids.type.dtype))
    share = op("cast", counts, to=site.dtype)
    each = scale(op("class_score", logs, known), smoothing - 1)
    rest = logs
    if weight is not None:
        factors = site.value(weight, site.dtype)
        own = reshape(op("index_select", factors, reshape(known, (prod(ids.shape),)), dim=0), ids.shape)
        share, each, rest = op("mul", share, own), op("mul", each, own), op("mul", logs, factors)
    if smoothing:
        spread = reduced("reduce_sum", rest, [len(logs.shape) - 1])
        each = op("sub", each, scale(spread, smoothing / logs.shape[-1]))
    each = op("select", counts, each, constant(0, (), site.dtype))
    if reduction != MEAN:
        return _reduced(site, each, reduction)
    every = range(len(ids.shape))
    return op("div", reduced("reduce_sum", each, every), reduced("reduce_sum", share, every))


def aligned(site: CallSite, x: Value, ids: Value | Padded, ignore_index: int) -> tuple[Value, Value]:
    """
    Return the operands of a cross-entropy with the same leading dims, (logits [b.., c], class ids [b..]). `x` has the
    logits, with the classes last, and `ids` the class ids of each sample.

    If `ids` are the result of a reshape, such as one that flattens batch and sequence, the ids before it are returned,
    and the logits reshaped alike. If they are `Padded` (shifted by one position and padded, as language models do), the
    padded positions are left out of both. Raises `UnityError` if the padding is not `ignore_index`.
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
    Map PyTorch's negative log-likelihood of log-probabilities `x` [n, c, ..]. If `x` is the log-softmax of logits over
    the classes, returns the cross-entropy of these logits instead (`cross_entropy`).

    `target` has class ids, `weight` [c] a factor for each class; samples whose id is `ignore_index` do not count.
    `reduction` is PyTorch's code (0: none, 1: mean, 2: sum).
    """
    # Classes are dim 1, or the only one; our log_softmax is over the last.
    perm = tuple(range(len(x.shape)))
    before = x
    if x.node.op == "transpose":
        perm, before = x.node.attribute("perm"), x.node.operands[0]
    shape = before.shape
    if before.node.op == "reshape" and before.node.operands[0].shape[-1:] == shape[-1:]:
        before = before.node.operands[0]
    if before.node.op == "log_softmax" and perm[:2][-1] == len(perm) - 1:
        logits = permute(reshape(before.node.operands[0], shape), perm)
        return cross_entropy(site, logits, target, weight, reduction, ignore_index)
    order = [0, *range(2, len(perm)), 1] if len(perm) > 2 else perm
    ids = target.filled() if isinstance(target, Padded) else site.value(target)
    return _written_out(site, permute(x, order), ids, weight, reduction, ignore_index)


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
    Map PyTorch's mean squared error of `x` and `y`, which are broadcast; `reduction` is PyTorch's code (0: none, 1:
    mean, 2: sum).
    """
    a, b = _broadcast(site, x, y)
    if reduction not in (MEAN, SUM):
        return op("square", op("sub", a, b))
    return _reduce_mean_loss(op("mse", a, b), reduction, prod(a.shape))


@maps("l1_loss")
def l1(site: CallSite, x: Operand, y: Operand, reduction: int = MEAN) -> Value:
    """
    Map PyTorch's mean absolute error of `x` and `y`, which are broadcast; `reduction` is PyTorch's code (0: none, 1:
    mean, 2: sum).
    """
    return _reduced(site, op("abs", op("sub", *_broadcast(site, x, y))), reduction)


def _broadcast(site: CallSite, *operands: Operand) -> list[Value]:
    """Return operands of a loss in one shape."""
    shape = broadcast(*operands)
    return [expand(site.value(v, site.dtype), shape) for v in operands]


@maps("binary_cross_entropy")
def bce(site: CallSite, x: Value, y: Operand, weight: Operand | None = None, reduction: int = MEAN) -> Value:
    """
    Map PyTorch's binary cross-entropy of probabilities `x` with targets `y` of the same shape, times `weight`;
    `reduction` is PyTorch's code (0: none, 1: mean, 2: sum).
    """
    goal = site.value(y, site.dtype)
    if weight is None and reduction in (MEAN, SUM):
        return _reduce_mean_loss(op("bce", x, goal), reduction, prod(x.shape))
    least = constant(-100.0, (), site.dtype)
    yes, no = (op("maximum", op("log", v), least) for v in (x, shift(op("neg", x), 1)))
    each = op("neg", op("add", op("mul", goal, yes), op("mul", shift(op("neg", goal), 1), no)))
    return _reduced(site, _weighted(site, each, weight), reduction)


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
    Map PyTorch's binary cross-entropy of logits `x` with targets `y` of the same shape, times `weight`; `pos_weight` is
    a factor for the term of the positive class, `y * log(sigmoid(x))`. `reduction` is PyTorch's code (0: none, 1: mean,
    2: sum).
    """
    goal = site.value(y, site.dtype)
    if weight is None and pos_weight is None and reduction in (MEAN, SUM):
        return _reduce_mean_loss(op("bce_with_logits", x, goal), reduction, prod(x.shape))
    each = op("softplus", op("neg", x))
    if pos_weight is not None:
        extra = shift(site.value(pos_weight, site.dtype), -1)
        each = op("mul", each, shift(op("mul", goal, extra), 1))
    each = op("add", op("mul", shift(op("neg", goal), 1), x), each)
    return _reduced(site, _weighted(site, each, weight), reduction)


def _weighted(site: CallSite, each: Value, weight: Operand | None) -> Value:
    return each if weight is None else op("mul", each, site.value(weight, site.dtype))
