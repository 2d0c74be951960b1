"""A covering has every pair of choices that any case has, in few cases (`covering.py`)."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import covering

CASES = [c for c in product("abcd", range(5), "xyz", (2, 4, 8)) if (c[0] == "a") <= (c[3] != 8)]


@pytest.mark.parametrize(("together", "most"), [([], 24), ([(0, 1, 3)], 60)])
def test_everything_that_any_case_has_together_occurs(together: list[tuple[int, ...]], most: int):
    found = covering(CASES, together)
    assert found == [case for case in CASES if case in found]
    for places in [*combinations(range(4), 2), *together]:
        chosen, possible = ({tuple(case[i] for i in places) for case in cases} for cases in (found, CASES))
        assert chosen == possible
    assert len(found) <= most
