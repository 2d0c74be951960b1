"""What a causal mask leaves to the busiest device, against counting it pair by pair."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from unity_ir.cost.masks import causal_mask, seen_part
from unity_ir.cost.work import work
from unity_ir.ops import operator

QUERIES, KEYS = (2, 8, 16, 4), (2, 4, 16, 4)
SAVED = (QUERIES, "f32"), ((2, 8, 16), "f32")


def attention_flops(rows: int, causal: int, name: str = "attention") -> int:
    """FLOPs of a device's part of attention whose queries are divided by `rows`."""
    given = [(shape, "f32") for shape in (QUERIES, KEYS, KEYS)]
    operands = [(QUERIES, "f32"), *given, *SAVED] if name == "attention_saved_grad" else given
    attributes = (("causal", causal), ("scale", 0.5))
    needs, same = (False,) * len(operands), tuple(range(len(operands)))
    done = work(name, tuple(operands), attributes, (("i", rows),) if rows > 1 else (), needs, same)
    return done.forward[0].flops


@pytest.mark.parametrize(("rows", "columns"), [*product((1, 4, 8, 12), repeat=2)])
def test_the_busiest_device_is_that_which_sees_most_pairs(rows: int, columns: int):
    for by_rows, by_columns in product((1, 2, 4), repeat=2):
        if rows % by_rows or columns % by_columns:
            continue
        own, keys = rows // by_rows, columns // by_columns
        sees = np.tril(np.ones((rows, columns)))
        pieces = sees.reshape(by_rows, own, by_columns, keys).sum(axis=(1, 3))
        assert float(seen_part(rows, own, keys)) == pytest.approx(pieces.max() / (own * keys))


def test_many_divisions_at_once_are_each_by_itself():
    rows, columns = np.array([12, 6, 3]), np.array([12, 4, 2])
    together = seen_part(12, rows, columns)
    assert together.tolist() == [
        float(seen_part(12, r, c)) for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", ["attention", "attention_saved_grad"])
def test_causal_attention_has_the_flops_that_the_mask_leaves(name: str):
    whole, causal = attention_flops(1, 0, name), attention_flops(1, 1, name)
    # Of 16 x 16 pairs 136 are seen; the mask itself takes an operation or two for each score.
    assert causal / whole == pytest.approx(136 / 256, rel=0.2)
    last = attention_flops(4, 1, name)
    assert last / causal == pytest.approx(1 / 4 * (58 / 64) / (136 / 256), rel=1e-3)


def test_other_lines_have_no_causal_mask():
    shapes, dtypes = (QUERIES, KEYS, KEYS), ("f32",) * 3
    assert causal_mask(operator("attention").bind(shapes, (("causal", 0), ("scale", 0.5)), dtypes)) is None
    assert causal_mask(operator("softmax").bind(((4, 4),), (), ("f32",))) is None
    found = causal_mask(operator("attention").bind(shapes, (("causal", 1), ("scale", 0.5)), dtypes))
    assert found is not None
    assert (found.row, found.rows) == ("i", 16)
