"""Recognise attention masks that are known at import."""

from __future__ import annotations

import torch


def visible(mask: torch.Tensor) -> torch.Tensor | None:
    """
    Return an attention mask as booleans of the same shape, True where a query may attend to a key.

    The mask is boolean already, or is added to scores and holds only 0 and numbers near minus infinity (at most half of
    the least finite one); for others, returns None.
    """
    if mask.dtype == torch.bool:
        return mask
    none, far = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return none if bool((none | far).all()) else None


def is_causal_mask(seen: torch.Tensor, queries: int, keys: int) -> bool:
    """
    Return whether a boolean mask `seen` that broadcasts to [.., queries, keys] is causal: `queries` equals `keys`, and
    every matrix is lower triangular.
    """
    return queries == keys and bool((seen == torch.ones(queries, keys, dtype=torch.bool).tril()).all())
