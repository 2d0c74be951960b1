"""Variables in order of use, packed into words."""

from __future__ import annotations

import numpy as np

from unity_ir.rules.research.generate.order import canonical, merged


def word(*variables: int) -> int:
    return sum(v << 4 * i for i, v in enumerate(variables))


def words(*of: tuple[int, ...]) -> np.ndarray:
    return np.array([word(*w) for w in of], dtype=np.uint64)


def test_merging_keeps_the_first_use():
    found = merged(words((1, 2), (3,), (), (2, 1)), words((2, 3), (3,), (4, 1), (1, 5)))
    np.testing.assert_array_equal(found, words((1, 2, 3), (3,), (4, 1), (2, 1, 5)))


def test_canonical_variables_begin_with_the_first_of_their_type():
    groups = [0, 0, 1, 1]  # variables 1 and 2 are of one type, 3 and 4 of another
    found = canonical(words((1, 2), (2, 1), (3, 1), (3, 4, 1, 2), (4,), (), (2,)), groups)
    assert found.tolist() == [True, False, True, True, False, True, False]
