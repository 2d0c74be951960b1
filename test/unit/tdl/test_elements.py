"""Element types, random numbers, and the functions TDL cannot say, against PyTorch and published answers."""

import numpy as np
import pytest
import torch
from operator_cases import DTYPES
from operator_twins import philox as by_hand

from unity_ir.ops import operator
from unity_ir.tdl.bind import bind
from unity_ir.tdl.elements import converted
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.functions import DTYPES as NAMES
from unity_ir.tdl.functions import philox as drawn
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import NOT_FLOATING


@pytest.mark.parametrize("dtype", NAMES)
def test_conversions_equal_pytorch(dtype: str):
    random = np.random.default_rng(0)
    values = np.concatenate(
        [random.standard_normal(1000) * 10.0 ** random.integers(-3, 4, 1000), [0.0, -0.0, 1.5, -2.5]]
    )
    if dtype not in NOT_FLOATING:
        values = np.concatenate([values, [np.inf, -np.inf, np.nan, 1.00390625, 1.01171875]])
    with np.errstate(over="ignore"):
        got = converted(values, dtype)
        one = converted(values[:1].reshape(()), dtype)
    expected = (
        torch.from_numpy(values).float().to(DTYPES[dtype])
        if dtype == "bf16"
        else torch.from_numpy(values).to(DTYPES[dtype])
    )
    np.testing.assert_array_equal(got.astype(np.float64), expected.double().numpy())
    assert one == got[0]
    assert one.shape == ()


def test_a_picked_position_may_be_part_of_a_window():
    """Which is read as a view of all positions, where others are read at the one that is picked."""
    line = parse_line("f(t: int, k, x) out[i] = sum[e](where(eq(e, t[i]), sum[j](k[j+e-1, e] * x[e, j]), 0))")
    random = np.random.default_rng(0)
    t, k, x = np.array([0, 2, 1, 7]), random.random((4, 3)), random.random((3, 4))
    padded = np.pad(k, ((1, 2), (0, 0)))
    want = [sum(padded[j + e, e] * x[e, j] for j in range(4)) if e < 3 else 0 for e in t]
    np.testing.assert_allclose(evaluate(bind(line, [t.shape, k.shape, x.shape], {}), [t, k, x])[0], want)


def test_philox_has_its_published_answers():
    """The known answers of the authors' library Random123."""
    assert by_hand((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert by_hand((ones, ones), (ones,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert by_hand(key, counter) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_draws_equal_philox_by_hand(seed: int):
    positions = np.array([0, 1, 5, 2**31, 2**32 - 1, 2**32, 2**40 + 7])
    key = (seed % 2**32, seed >> 32)
    expected = [by_hand(key, (int(p) % 2**32, int(p) >> 32, 0, 0))[0] // 2**8 / 2**24 for p in positions]
    np.testing.assert_array_equal(drawn(np.asarray(seed), positions), expected)


def test_dropout_drops_the_share_it_says_and_keeps_the_mean():
    of = operator("dropout")
    masks: list[np.ndarray] = []
    for seed in (0, 1):
        bound = of.bind(((200, 500),), of.attributes({"p": 0.3, "seed": seed})).bound
        (out,) = evaluate(bound, [np.ones((200, 500))])
        assert set(np.unique(out)) == {0.0, 1 / 0.7}
        masks.append(out == 0)
        # Five standard deviations of 100000 draws.
        assert abs(masks[-1].mean() - 0.3) < 5 * (0.3 * 0.7 / 1e5) ** 0.5
    # Seeds draw independently of each other, and neighbours of each other.
    assert abs((masks[0] & masks[1]).mean() - 0.09) < 0.005
    assert abs((masks[0][:, 1:] & masks[0][:, :-1]).mean() - 0.09) < 0.005


def test_a_piece_drops_what_the_whole_drops_there():
    of = operator("dropout")
    attributes = of.attributes({"p": 0.5, "seed": 7})
    x = np.arange(1.0, 25.0).reshape(4, 6)
    (whole,) = evaluate(of.bind(((4, 6),), attributes).bound, [x])
    analysis = of.bind(((4, 6),), attributes)
    assert analysis.splittable == ("a0", "a1")
    # The position counts in the whole tensor, whose rows have 6.
    half = bind(parse_line("f(x)  out[i, j] = where(lt(philox(7, i * 6 + j), 0.5), 0, x[i, j] / 0.5)"), ((4, 3),), {})
    (right,) = evaluate(half, [x[:, 3:]], {"j": 3})
    np.testing.assert_array_equal(right, whole[:, 3:])


def test_topk_takes_the_first_of_equal_ones():
    of = operator("topk")
    bound = of.bind(((2, 5),), of.attributes({"k": 3})).bound
    values, indices = evaluate(bound, [np.array([[1.0, 3.0, 3.0, 0.0, 2.0], [5.0, 5.0, 5.0, 5.0, 5.0]])])
    np.testing.assert_array_equal(values, [[3, 3, 2], [5, 5, 5]])
    np.testing.assert_array_equal(indices, [[1, 2, 4], [0, 1, 2]])
    assert indices.dtype == np.int64
