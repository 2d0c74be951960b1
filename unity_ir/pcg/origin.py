"""Record where an imported graph comes from: the file of its weights, and the names and tables in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Origin:
    """
    What an imported model's checkpoint has and the model's graph does not.

    `tables` are the names of inputs whose values come with the checkpoint, not with a batch. `names` maps further keys
    of the checkpoint to the weight or table that each is, so that all names of tied weights are kept. `counters` are
    integers of the checkpoint that are no inputs, such as the number of batches that a batch norm has seen: it maps
    their keys to what each step adds to them.
    """

    tables: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
