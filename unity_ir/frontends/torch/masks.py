"""Recognise attention masks that are known at import."""

from __future__ import annotations

import torch


def visible(mask: torch.Tensor) -> torch.Tensor | None:
    """
    Return an attention mask as booleans, True where a query may attend to a key.

    The mask is boolean already, or is added to scores and holds only 0 and numbers near minus infinity; for others,
    returns None.
    """
    if mask.dtype == torch.bool:
        return mask
    none, far = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return none if bool((none | far).all()) else None


def is_lower(seen: torch.Tensor, queries: int, keys: int) -> bool:
    """
    Return whether every matrix of a boolean mask `seen` [.., queries, keys] is square and lower triangular (causal),
    given the sizes of its last two dims.
    """
    return queries == keys and bool((seen == torch.ones(queries, keys, dtype=torch.bool).tril()).all())
