"""
Recognise cross-entropies that are written out, as means over samples of log-probabilities at their class ids.
"""

from __future__ import annotations

import torch

from unity_ir.frontends.torch.recognise.match import factor_of, made_by, reduced_last, unshaped
from unity_ir.frontends.torch.site import Tables
from unity_ir.frontends.torch.values import op, reshape
from unity_ir.pcg.node import Value

INTEGERS = ("i32", "i64")


def mean_of(each: Value) -> Value | None:
    """
    Return the mean of all elements of `each`, if they are losses of samples, or the negative ones: of class ids t, -
    log_softmax(x)[t] or logsumexp(x) - x[t], written in any way. Else None.
    """
    each, by = factor_of(unshaped(each) if each.node.op == "reshape" else each)
    found = _picked(each)
    if found is not None:
        logs, ids = found
        for x in made_by(logs, "log_softmax"):
            return _scaled(op("cross_entropy", x, ids), -by)
        return None
    for minuend, subtrahend in [each.node.operands] if each.node.op == "sub" else []:
        found = _picked(subtrahend)
        if found is not None and found[0] in _log_sums_of(minuend):
            return _scaled(op("cross_entropy", *found), by)
    return None


def _scaled(loss: Value, by: float) -> Value:
    return loss if by == 1 else op("neg", loss) if by == -1 else op("scale", loss, by=by)


def _picked(value: Value) -> tuple[Value, Value] | None:
    """
    Return (x [b.., c], class ids [b..]) such that a value, of the elements of [b..], is x at the class ids; None if it
    is none.
    """
    inner = value
    while inner.node.op == "reshape":
        (inner,) = inner.node.operands
    if inner.node.op == "class_score" and inner.shape == value.shape:
        x, ids = inner.node.operands
        return x, ids
    if inner.node.op != "gather":
        return None
    x, ids = inner.node.operands
    if inner.node.attribute("dim") != len(x.shape) - 1 or ids.shape != (*x.shape[:-1], 1):
        return None
    if value.shape not in (inner.shape, x.shape[:-1]):
        return None
    while ids.node.op == "cast" and ids.node.operands[0].type.dtype in INTEGERS:
        (ids,) = ids.node.operands
    return x, reshape(ids, x.shape[:-1])


def _log_sums_of(value: Value) -> list[Value]:
    """
    Return the values x of which a value is `log(sum(exp(x)))` over the last dim; also as `log(sum(exp(x - m))) + m`.
    """
    found: list[Value] = []
    inner = unshaped(value) if value.node.op == "reshape" else value
    if inner.node.op == "add":
        for logs, shift in (inner.node.operands, inner.node.operands[::-1]):
            for shifted in _log_sums_of(logs):
                for x, most in [shifted.node.operands] if shifted.node.op == "sub" else []:
                    if _same(most, shift) and most.shape == (*x.shape[:-1], 1):
                        found.append(x)
        return found
    for total in made_by(inner, "log"):
        for positive in made_by(total, "abs"):
            total = positive
        summed = reduced_last(total, "reduce_sum")
        if summed is not None:
            found += made_by(summed, "exp")
    return found


def _same(one: Value, other: Value) -> bool:
    """Return whether two values have the same elements in order, as one is the other but for reshapes."""

    def root(value: Value) -> Value:
        while value.node.op == "reshape":
            (value,) = value.node.operands
        return value

    return root(one) == root(other)


def one_hot_sum(product: Value, tables: Tables) -> Value | None:
    """
    Return x [b.., c] at class ids [b..], where `product` [b.., c], which is about to be summed over the last dim, is x
    times a one-hot vector of each id, or `c == id`, cast. Else None. `tables` has the class numbers.
    """
    factors = made_by(product, "mul")
    for x, hot in (factors, factors[::-1]) if factors else ():
        for chosen in made_by(hot, "cast"):
            for ids in _compared(chosen, x.shape, tables):
                return op("class_score", x, ids)
    return None


def _compared(chosen: Value, shape: tuple[int, ...], tables: Tables) -> list[Value]:
    """Return the class ids [b..] whose one-hot vectors a value [b.., c] holds, as numbers or comparisons; else []."""
    if chosen.shape == shape and chosen.node.op == "one_hot":
        return [*chosen.node.operands]
    operands = made_by(chosen, "eq")
    for ids, numbers in (operands, operands[::-1]) if operands and chosen.shape == shape else ():
        table = tables.values.get(numbers.node.name) if numbers.node.op == "input" else None
        counts = table is not None and table.numel() == shape[-1] == table.shape[-1]
        if not counts or table is None or not bool((table.flatten() == torch.arange(shape[-1])).all()):
            continue
        inner = ids.node.operands[0] if ids.node.op == "expand" else ids
        if inner.shape == (*shape[:-1], 1):
            return [reshape(inner, shape[:-1])]
        if ids.node.op == "expand" and inner.shape == shape[:-1]:
            return [inner]
    return []
