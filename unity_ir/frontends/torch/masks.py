"""Recognise attention masks that are known at import."""

from __future__ import annotations

from math import prod

import torch

FARTHEST = -1e9
"""Scores of masked keys in models: from here down, a softmax gives them no weight, unless it gives none any."""


def visible(mask: torch.Tensor) -> torch.Tensor | None:
    """
    Return an attention mask as booleans of the same shape, True where a query may attend to a key.

    A boolean mask is returned as it is. A mask that is added to the scores must hold only 0 (may attend) and numbers
    far below any score, at most `FARTHEST` or half of the least finite number (may not); for any other, returns None.
    """
    if mask.dtype == torch.bool:
        return mask
    none, far = mask == 0, mask <= max(torch.finfo(mask.dtype).min / 2, FARTHEST)
    return none if bool((none | far).all()) else None


def is_causal_mask(seen: torch.Tensor, queries: int, keys: int) -> bool:
    """
    Return whether a boolean mask `seen`, True where a query may attend to a key, is causal: `queries` equals `keys`,
    and every matrix of the mask, broadcast to [.., queries, keys], is lower triangular.
    """
    return queries == keys and bool((seen == torch.ones(queries, keys, dtype=torch.bool).tril()).all())


def ranges_of_mask(seen: torch.Tensor, batch: int, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """
    Return (first, end), the first key that each query sees and the one after the last, [batch, queries] or [1, queries]
    both, of a boolean mask `seen` that broadcasts to [.., heads, queries, keys], all before the heads of `batch`
    elements. Return None if a query sees keys with others between them, or not the same ones in every head.
    """
    seen = seen.reshape((1,) * (4 - seen.dim()) + tuple(seen.shape))
    *lead, heads, _, _ = seen.shape
    if prod(lead) not in (1, batch):
        return None
    rows = seen.reshape(prod(lead), heads, *seen.shape[-2:])
    if not bool((rows == rows[:, :1]).all()):
        return None
    rows = rows[:, 0].expand(-1, queries, keys)
    first = rows.int().argmax(-1)
    end = first + rows.sum(-1)
    at = torch.arange(keys)
    return (first, end) if torch.equal(rows, (at >= first[..., None]) & (at < end[..., None])) else None
