"""The ranks of the pool sum and gather in one exchange (`quick_collectives.py`): each gets what gloo gives it."""

from __future__ import annotations

import pytest
from gathered import disagreements
from ranks import Ranks


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 8])
def test_each_rank_gets_what_gloo_gives(ranks: Ranks, world: int):
    assert ranks.run("", world, disagreements, quick=False) == [[]] * world
