"""
Recognise mixtures whose experts compute every token, as in Llama 4: a token times its score for an expert, 0 for those
that it does not choose. Each token is computed by the experts that it chooses.

    scores[t, e] = sigmoid(top k of gates[t, e], else far below 0)       share = sigmoid(topk(gates))
    h[e, t, :] = f(scores[t, e] * x[t, :] @ w[e])                   ->   h'[t, k, :] = f(share[t, k] * x[t, :] @ w[ids])
    out[t, :] = sum[e](h[e, t, :] @ v[e])                                out[t, :] = sum[k](h'[t, k, :] @ v[ids])

Where f(0) = 0, both have the same gradients, too: the score of an expert not chosen is 0, and so is its derivative.
"""

from __future__ import annotations

from unity_ir.frontends.torch.recognise.match import made_by, uncast
from unity_ir.frontends.torch.values import op, reshape
from unity_ir.pcg.node import Value, apply

ZERO_AT_ZERO = {"mul", "silu", "gelu", "gelu_tanh", "relu", "tanh", "scale", "neg", "cast", "split"}
"""Operators by elements whose result is 0 where all operands are."""
ROUTED = {"batch_matmul": "routed_matmul", "batch_matmul_nt": "routed_matmul_nt"}
FAR_BELOW = -1e4
"""From here down, sigmoids are 0, in any element type."""


def chosen_experts(each: Value) -> Value | None:
    """
    Return the sum over experts of `each` [e, t, n], what each expert makes of each token, as the sum of what those make
    that a token chooses, [t, n]. None if `each` is no product of a mixture as above.
    """
    if each.node.op not in ROUTED or len(each.shape) != 3:
        return None
    inner, _ = each.node.operands
    first = _product(inner)
    if first is None or first.node.operands[0].shape[:2] != each.shape[:2]:
        return None
    found = _rows(first.node.operands[0])
    if found is None:
        return None
    rows, ids = found

    def routed(product: Value, of: Value) -> Value:
        return op(ROUTED[product.node.op], of, product.node.operands[1], ids)

    def rebuilt(value: Value) -> Value:
        if value == first:
            return routed(value, rows)
        return apply(value.node.op, list(map(rebuilt, value.node.operands)), dict(value.node.attributes)).results[
            value.index
        ]

    return op("reduce_sum", routed(each, rebuilt(inner)), dim=1)


def _product(value: Value) -> Value | None:
    """Return the one product over experts from which operators that keep zeros make a value; None if there is none."""
    if value.node.op in ROUTED:
        return value
    if value.node.op not in ZERO_AT_ZERO or (value.node.op == "split" and value.node.attribute("dim") != 2):
        return None
    found = {_product(operand) for operand in value.node.operands}
    return found.pop() if len(found) == 1 else None


def _rows(tokens: Value) -> tuple[Value, Value] | None:
    """
    Return (rows [t, k, n], the expert of each [t, k]) of tokens [e, t, n] that are multiplied by their scores for all
    experts, for the k experts that each token chooses.
    """
    experts, count, width = tokens.shape
    product = _unshaped(tokens)
    if product.node.op != "mul":
        return None
    x, scores = product.node.operands
    repeat, transposed = _unshaped(x), _unshaped(scores)
    if repeat.node.op != "expand" or transposed.node.op != "transpose" or scores.shape != (*x.shape[:-1], 1):
        return None
    (repeated,), (gates,) = repeat.node.operands, transposed.node.operands
    is_whole = repeat.node.attribute("dim") == 0 and repeat.node.attribute("sizes") == (experts,)
    found = _chosen(uncast(gates)) if gates.shape == (count, experts) else None
    if found is None or not is_whole or repeated.shape not in ((count, width), (count, 1, width)):
        return None
    values, ids = found
    shares = op("sigmoid", _cast(values, uncast(gates).type.dtype))
    shares = reshape(_cast(shares, scores.type.dtype), (*ids.shape, 1))
    wide = op("expand", reshape(repeated, (count, width)), dim=1, sizes=ids.shape[1:], degrees=(1,))
    return op("mul", wide, shares), ids


def _chosen(gates: Value) -> tuple[Value, Value] | None:
    """
    Return (numbers, their places) [t, k] of gates [t, e] that are the sigmoids of these numbers at these places, of
    which no two in a row are the same, and 0 elsewhere.
    """
    for scores in made_by(gates, "sigmoid"):
        chosen = uncast(scores)
        if chosen.node.op != "select":
            return None
        is_chosen, placed, far = chosen.node.operands
        (count, *_) = made_by(is_chosen, "gt") or (None,)
        if far.node.op != "constant" or far.node.attribute("value") > FAR_BELOW or count is None:
            return None
        if any(v.node.op != "scatter_add" or v.node.attribute("dim") != 1 for v in (count, placed)):
            return None
        (zeros, ids, values), (_, counted, _) = placed.node.operands, count.node.operands
        distinct = ids.node.op == "topk" and ids == ids.node.results[1] == counted
        if distinct and zeros.node.op == "constant" and not zeros.node.attribute("value"):
            return values, ids
    return None


def _unshaped(value: Value) -> Value:
    return value.node.operands[0] if value.node.op == "reshape" else value


def _cast(x: Value, dtype: str) -> Value:
    return x if x.type.dtype == dtype else op("cast", x, to=dtype)
