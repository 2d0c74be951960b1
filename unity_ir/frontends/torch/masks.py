"""Masks of attention that are known at import."""

from __future__ import annotations

import torch


def visible(mask: torch.Tensor) -> torch.Tensor | None:
    """Which positions a mask lets through, if it is a boolean one, or adds but 0 and next to minus infinity."""
    if mask.dtype == torch.bool:
        return mask
    none, far = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return none if bool((none | far).all()) else None


def is_lower(seen: torch.Tensor, queries: int, keys: int) -> bool:
    """Whether every matrix is lower triangular and square: each position sees itself and what is before it."""
    return queries == keys and bool((seen == torch.ones(queries, keys, dtype=torch.bool).tril()).all())
