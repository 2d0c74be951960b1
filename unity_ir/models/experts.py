"""Experts of a mixture, as several models of the zoo have them: gated MLPs of which each token goes to a few."""

from __future__ import annotations

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Value


def chosen_shares(b: Builder, gates: Value, chosen: int) -> tuple[Value, Value]:
    """
    Return the `chosen` experts of largest gate for each token, and their gates scaled to sum to 1, [tokens, chosen]
    both, from gates [tokens, experts].
    """
    values, indices = b.results("topk", gates, k=chosen)
    return indices, scaled_to_one(b, values)


def scaled_to_one(b: Builder, shares: Value) -> Value:
    """Return shares [tokens, chosen] divided by their sum for each token."""
    total = b.op("reshape", b.op("reduce_sum", shares, dim=1), shape=(shares.shape[0], 1))
    return b.op("div", shares, total)


def chosen_experts(
    b: Builder,
    x: Value,
    indices: Value,
    shares: Value,
    name: str,
    experts: int,
    intermediate: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Value:
    """
    Return the sum of experts' results, each times its share, [tokens, hidden], for tokens `x` [tokens, hidden]: of the
    experts `indices` [tokens, chosen] with `shares` [tokens, chosen]. Each token is computed by its experts only, and
    none is dropped.

    The weights of all `experts` are stacked, `{name}.{part}.weight`, for the names of the gate's, the other input's and
    the output's product, `parts`; `intermediate` is the width of an expert.
    """
    tokens, hidden = x.shape
    chosen = indices.shape[1]
    each = b.op("expand", x, dim=1, sizes=(chosen,), degrees=(1,))

    def product(x: Value, part: str, size: int) -> Value:
        weight = b.weight(f"{name}.{part}.weight", experts, x.shape[-1], size)
        return b.op("routed_matmul", x, weight, indices)

    gate, up, down = parts
    h = b.op("mul", b.op("silu", product(each, gate, intermediate)), product(each, up, intermediate))
    h = b.op("mul", product(h, down, hidden), b.op("reshape", shares, shape=(tokens, chosen, 1)))
    return b.op("reduce_sum", h, dim=1)
