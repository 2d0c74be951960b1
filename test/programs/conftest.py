"""Fixtures of multi-rank tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Eight CPU ranks."""
    pool = Ranks(8)
    yield pool
    pool.close()
