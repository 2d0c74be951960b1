"""Recognise attention masks that are known at import."""

from __future__ import annotations

import torch


def visible(mask: torch.Tensor) -> torch.Tensor | None:
    """
    Return an attention mask as booleans of the same shape, True where a query may attend to a key.

    A boolean mask is returned as it is. A mask that is added to the scores must hold only 0 (may attend) and numbers
    near minus infinity, not above half of the least finite number (may not); for any other, returns None.
    """
    if mask.dtype == torch.bool:
        return mask
    none, far = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return none if bool((none | far).all()) else None


def is_causal_mask(seen: torch.Tensor, queries: int, keys: int) -> bool:
    """
    Return whether a boolean mask `seen`, True where a query may attend to a key, is causal: `queries` equals `keys`,
    and every matrix of the mask, broadcast to [.., queries, keys], is lower triangular.
    """
    return queries == keys and bool((seen == torch.ones(queries, keys, dtype=torch.bool).tril()).all())
