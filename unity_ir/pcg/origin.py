"""Record where an imported graph comes from: the file of its weights, and the names and tables in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Origin:
    """
    Of an imported model: `tables` are inputs whose values came with the weights and are the same in every step; `names`
    are further keys of the model's state, each with the weight or table it is, so that tied weights have them all.
    """

    tables: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict[str, str])
