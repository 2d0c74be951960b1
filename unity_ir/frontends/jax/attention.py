# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Keep `jax.nn.dot_product_attention` one equation of a jaxpr, which JAX writes out otherwise, in ways that depend on the
numbers of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional as nn

from unity_ir.frontends.jax.values import Operand, to_torch

PREFIX = "unity_ir_attention"

KEPT = ("scale", "is_causal")
"""Options that may be given; with others JAX writes the attention out."""

FAR = -1e30
"""The score of keys that are not seen."""


@contextmanager
def kept_whole() -> Generator[None]:
    """Have calls of `jax.nn.dot_product_attention`, in the `with` statement, traced as calls of one function."""
    plain: Any = jax.nn.dot_product_attention

    def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Any:
        given = {name: option for name, option in options.items() if option is not None and option is not False}
        others = set(given) - {*KEPT, "implementation"}
        if others or bias is not None or query.ndim != 4 or query.shape[1] != key.shape[1]:
            return plain(query, key, value, bias, mask, **options)

        def called(query: Any, key: Any, value: Any, mask: Any) -> Any:
            # As JAX's own kernels differ in what they take, the one that takes all.
            return plain(query, key, value, None, mask, **{**given, "implementation": "xla"})

        scale = float(given.get("scale", query.shape[-1] ** -0.5))
        called.__name__ = f"{PREFIX}:{scale!r}:{int(bool(given.get('is_causal')))}"
        return jax.jit(called)(query, key, value, mask)

    jax.nn.dot_product_attention = attention
    try:
        yield
    finally:
        jax.nn.dot_product_attention = plain


def attention_of(name: str) -> Callable[..., torch.Tensor] | None:
    """
    Return the function of PyTorch that a jaxpr called `name` is, an attention kept whole, else None. It takes queries
    [b, s, heads, d], keys and values [b, s, kv heads, d], and perhaps a boolean mask [.., s, s].
    """
    prefix, *rest = name.split(":")
    if prefix != PREFIX or len(rest) != 2:
        return None
    scale, causal = float(rest[0]), rest[1] == "1"

    def attention(q: Operand, k: Operand, v: Operand, mask: Operand | None = None) -> torch.Tensor:
        a, b, c = (to_torch(x).transpose(1, 2) for x in (q, k, v))
        if causal and isinstance(mask, np.ndarray):
            mask = mask & np.tri(a.shape[2], dtype=bool)
        elif causal and mask is not None:
            mask = to_torch(mask) & torch.ones(a.shape[2], a.shape[2], dtype=torch.bool).tril()
        seen = None if mask is None else to_torch(mask)
        if seen is not None and not (isinstance(mask, np.ndarray) and bool(mask.any(-1).all())):
            return _masked(a, b, c, seen, scale).transpose(1, 2)
        out = nn.scaled_dot_product_attention(
            a, b, c, seen, is_causal=causal and mask is None, scale=scale, enable_gqa=a.shape[1] != b.shape[1]
        )
        return out.transpose(1, 2)

    return attention


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """
    Return attention [b, heads, s, d] in which a query that sees no key sees all alike, as JAX has it; PyTorch's has
    zeros then.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.where(seen, q @ k.transpose(-1, -2) * scale, max(FAR, 0.7 * torch.finfo(q.dtype).min))
    return torch.softmax(scores, -1) @ v
