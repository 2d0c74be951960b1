"""Compare the part of its scores that the busiest device computes under a causal mask with a count of all pairs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from unity_ir.cost.masks import CausalMask, causal_mask, seen_part, striped_part
from unity_ir.cost.work import mask_of_operator, work
from unity_ir.forms.attention import Stripes
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


def test_ranges_are_causal_where_their_operator_says_so():
    """Then as many scores are left as under a causal mask, at most; of part of a ring, what it says."""
    shapes, dtypes = (QUERIES, KEYS, KEYS, (2, 16), (2, 16)), ("f32", "f32", "f32", "i64", "i64")

    def mask(name: str, **given: float) -> CausalMask | None:
        return mask_of_operator(name, shapes, operator(name).attributes({"scale": 0.5, **given}), dtypes)

    assert mask("attention_ranges") is None
    found, part = mask("attention_ranges", causal=1), mask("attention_part", seen=0.25)
    assert found is not None
    assert part is not None
    for rows in (1, 4, 16):
        local = {found.row: rows, found.column: 16}
        assert found.seen(local) == float(seen_part(16, rows, 16))
        assert part.seen(local) == 0.25
    assert part.part(np.array([1, 4]), np.array([16, 16])).tolist() == [0.25, 0.25]


@pytest.mark.parametrize("order", [(4, 2, 3), (2, 4, 2), (4, 4, 1), (1, 4, 2)])
def test_the_busiest_device_of_a_sequence_in_striped_order(order: tuple[int, int, int]):
    """In pieces of whole stripes, and of rounds of one, of queries and of keys."""
    stripes, rounds, block = order
    length, seen = rounds * block, set[tuple[int, int]]()
    positions = np.arange(stripes * length).reshape(rounds, stripes, block).swapaxes(0, 1).ravel()
    sees = (positions[None, :] <= positions[:, None]).astype(float)
    sizes = [n * length for n in (1, 2, 4) if stripes % n == 0] + [n * block for n in (1, 2) if rounds % n == 0]
    for own, keys in product(sizes, repeat=2):
        pieces = sees.reshape(len(sees) // own, own, len(sees) // keys, keys).sum(axis=(1, 3))
        found = float(striped_part(Stripes("i", stripes, length, block), own, keys))
        assert found == pytest.approx(pieces.max() / (own * keys))
        seen.add((own, keys))
    rows, columns = (np.array(each) for each in zip(*seen, strict=True))
    of = Stripes("i", stripes, length, block)
    assert striped_part(of, rows, columns).tolist() == [float(striped_part(of, r, c)) for r, c in seen]


def test_pieces_in_striped_order_have_little_more_than_the_average():
    """Divided in 8, causal attention and its gradients give the last piece of natural order 1.88 times the average."""
    shapes, dtypes = ((1, 2, 4096, 8),) * 3, ("f32",) * 3
    order = {"scale": 0.5, "stripes": 8, "rounds": 8, "block": 64}
    natural, striped = (
        causal_mask(operator(name).bind(shapes, operator(name).attributes(given), dtypes))
        for name, given in (("attention", {"scale": 0.5, "causal": 1}), ("attention_striped", order))
    )
    assert natural is not None
    assert striped is not None
    for mask, least, most in ((natural, 0.937, 0.938), (striped, 0.5, 0.56)):
        assert least < mask.seen({mask.row: 512, mask.column: 4096}) < most
        assert 0.5 < mask.seen({mask.row: 4096, mask.column: 4096}) < 0.501
