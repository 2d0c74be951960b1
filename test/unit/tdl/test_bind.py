"""Shapes and attributes: what fits gives the extents, what does not is refused by name."""

from collections.abc import Mapping
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity_ir.errors import UnityError
from unity_ir.ops import operator
from unity_ir.ops.operator import Shapes
from unity_ir.tdl.bind import bind
from unity_ir.tdl.counts import contraction_flops, flops
from unity_ir.tdl.functions import FUNCTIONS
from unity_ir.tdl.parallel import Configuration, line_of_task
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import AttrValue, Bound

Attributes = Mapping[str, AttrValue]


def bound(name: str, shapes: Shapes, **attributes: AttrValue) -> Bound:
    of = operator(name)
    return of.bind(shapes, of.attributes(attributes)).bound


GOOD: list[tuple[str, Shapes, Attributes, Shapes]] = [
    ("matmul", ((5, 2, 3), (3, 4)), {}, ((5, 2, 4),)),
    ("matmul", ((3,), (3, 4)), {}, ((4,),)),
    ("matmul_tn", ((5, 2, 3), (5, 2, 4)), {}, ((3, 4),)),
    ("add", ((2, 3), ()), {}, ((2, 3),)),
    ("add", ((2, 3), (3,)), {}, ((2, 3),)),
    ("add", ((3,), (2, 3)), {}, ((2, 3),)),
    ("add", ((2, 1, 4), (3, 1)), {}, ((2, 3, 4),)),
    ("select", ((2, 1), (), (1, 1, 3)), {}, ((1, 2, 3),)),
    ("concat", ((2, 1), (2, 3), (2, 2)), {"dim": 1}, ((2, 6),)),
    ("concat", ((2,),), {"dim": 0}, ((2,),)),
    ("split", ((2, 6),), {"dim": 1, "sizes": (1, 5)}, ((2, 1), (2, 5))),
    ("transpose", ((2, 3, 4),), {"perm": (2, 0, 1)}, ((4, 2, 3),)),
    ("transpose", ((),), {"perm": ()}, ((),)),
    ("split_heads", ((2, 3, 8),), {"heads": 4}, ((2, 4, 3, 2),)),
    ("reshape", ((),), {"shape": ()}, ((),)),
    ("reshape", ((),), {"shape": (1, 1)}, ((1, 1),)),
    ("reshape", ((1, 1),), {"shape": ()}, ((),)),
    ("reshape", ((1, 6, 1),), {"shape": (2, 1, 3)}, ((2, 1, 3),)),
    ("reshape", ((4, 1, 6),), {"shape": (4, 6, 1)}, ((4, 6, 1),)),
    ("reshape", ((64, 784),), {"shape": (64, 28, 28)}, ((64, 28, 28),)),
    ("expand", ((3,),), {"dim": 1, "sizes": (2, 4), "degrees": (1, 2)}, ((3, 2, 4),)),
    ("reduce_sum", ((3, 2, 4),), {"dim": 1, "count": 2}, ((3,),)),
    ("reduce_sum", ((3, 2),), {"dim": 1, "count": 0}, ((3, 2),)),
]


@pytest.mark.parametrize(("name", "shapes", "attributes", "results"), GOOD)
def test_result_shapes(name: str, shapes: Shapes, attributes: Attributes, results: Shapes):
    assert bound(name, shapes, **attributes).result_shapes == results


BAD: list[tuple[str, Shapes, Attributes, str]] = [
    ("topk", ((2, 4),), {"k": 5}, "5 of 4 elements are too many; take fewer"),
    ("matmul", ((2, 3), (4, 5)), {}, "contracted sizes differ: x has 3, w has 4"),
    ("matmul", ((2, 3),), {}, r"takes 2 operands \(x, w\), got 1"),
    ("matmul", ((), (4, 5)), {}, "x has rank 0; it needs at least 1"),
    ("matmul", ((3,), (3,)), {}, "w has rank 1, expected 2"),
    ("matmul", ((2, 3), (3, 4)), {"act": "exp"}, "attribute act is 'exp'; it must be identity or relu or gelu"),
    ("matmul", ((2, 3), (3, 4)), {"bias": 1}, "unknown attribute bias; it takes act"),
    ("embedding", ((3,), (2, 3, 4)), {}, "t has rank 3, expected 2"),
    ("div_grad", ((3,), (2, 3), (3,)), {}, "x has rank 2; it needs 0 to 1"),
    ("div_grad", ((1, 3), (2, 3), (3,)), {}, "sizes do not broadcast: g has 1, x has 2"),
    ("add", ((2, 3), (2,)), {}, "sizes do not broadcast: x has 3, y has 2; make them the same, or one of them 1"),
    ("concat", ((2, 3), (2, 3, 4)), {"dim": 0}, "x1 has rank 3, expected 2"),
    ("concat", ((2, 3), (3, 3)), {"dim": 1}, "sizes differ: x0 has 2, x1 has 3"),
    ("concat", (), {"dim": 0}, "takes at least 1 operands, got 0"),
    ("concat", ((2,),), {}, "attribute dim is missing; add {dim = ...}"),
    ("concat", ((2,),), {"dim": -1}, "attribute dim is -1; it must not be negative"),
    ("concat", ((2,),), {"dim": 1}, "x has rank 1; it needs at least 2"),
    ("concat", ((2,),), {"dim": 10**12}, "x has rank 1; it needs at least"),
    ("concat", ((2,),), {"dim": True}, "attribute dim is True; it must be int"),
    ("split", ((6,),), {"dim": 0, "sizes": (1, 4)}, r"x has a dim of 6, but the sizes are 1 \+ 4 = 5"),
    ("split", ((6,),), {"dim": 0, "sizes": (6, 0)}, "attribute sizes has 0; sizes start at 1"),
    ("split", ((6,),), {"dim": 0, "sizes": ()}, "attribute sizes is empty; give a size for each result"),
    ("split", ((6,),), {"dim": 0, "sizes": 6}, "attribute sizes is 6; it must be ints"),
    ("split", ((6,),), {"dim": 0, "sizes": (3.0, 3.0)}, "attribute sizes is .*; it must be ints"),
    ("transpose", ((2, 3),), {"perm": (0, 0)}, r"perm is \(0, 0\); it must be a permutation of 0..1"),
    ("transpose", ((2, 3),), {"perm": (0, 1, 2)}, r"perm is \(0, 1, 2\); it must be a permutation of 0..1"),
    ("split_heads", ((2, 3, 8),), {"heads": 3}, "x has a dim of 8, which 3 does not divide"),
    ("split_heads", ((2, 3, 8),), {"heads": 0}, "attribute heads has 0; sizes start at 1"),
    ("reshape", ((6, 4),), {"shape": (4, 6)}, "has no common factors; reshape to .24. in between"),
    ("reshape", ((6,),), {"shape": (5,)}, "hold different numbers of elements"),
    ("reshape", ((6,),), {"shape": (-1, -6)}, "hold different numbers of elements"),
    ("reshape", ((6,), (6,)), {"shape": (6,)}, "takes 1 operands, got 2"),
    ("expand", ((3,),), {"dim": 0, "sizes": (2,), "degrees": (1, 1)}, "attribute degrees has 2 entries, expected 1"),
    ("expand", ((3,),), {"dim": 0, "sizes": (2,), "degrees": (3,)}, "degree 3 does not divide size 2"),
    ("expand", ((3,),), {"dim": 0, "sizes": (2,), "degrees": (0,)}, "degree 0 does not divide size 2"),
    ("reduce_sum", ((3,),), {"dim": 0, "count": -1}, "attribute count is -1; it must not be negative"),
    ("reduce_sum", ((3,),), {"dim": 0, "count": 2}, "x has rank 1; it needs at least 2"),
    ("cross_entropy", ((4, 3), (5,)), {}, "sizes differ"),
]


@pytest.mark.parametrize(("name", "shapes", "attributes", "message"), BAD)
def test_what_does_not_fit_is_refused(name: str, shapes: Shapes, attributes: Attributes, message: str):
    with pytest.raises(UnityError, match=rf"^pcg\.{name}: .*{message}"):
        bound(name, shapes, **attributes)


def test_size_that_nothing_gives_is_refused():
    with pytest.raises(UnityError, match=r"^pcg\.f: the size of index k is not given by any operand"):
        bind(parse_line("f(x) out[k] = x[]"), [()], {})


@given(st.lists(st.integers(1, 6), max_size=4), st.lists(st.integers(1, 6), max_size=4))
def test_reshape_binds_or_says_why(old: list[int], new: list[int]):
    if prod(old) != prod(new):
        with pytest.raises(UnityError, match="hold different numbers of elements"):
            bound("reshape", (tuple(old),), shape=tuple(new))
        return
    try:
        shapes = bound("reshape", (tuple(old),), shape=tuple(new)).result_shapes
    except UnityError as error:
        shapes = (tuple(new),) if "no common factors" in str(error) else ()
    assert shapes == (tuple(new),)


def test_flops_count_every_subexpression_once():
    assert flops(bound("matmul", ((3, 5), (5, 7)))) == 2 * 3 * 5 * 7
    assert flops(bound("matmul", ((3, 5), (5, 7)), act="relu")) == 2 * 3 * 5 * 7 + 3 * 7
    assert flops(bound("reshape", ((6,),), shape=(2, 3))) == 0
    # x - y is read twice, computed once: subtraction, product, division, sum.
    assert flops(bound("mse", ((5,), (5,)))) == 4 * 5


def test_a_definition_used_over_two_indices_counts_once():
    # Softmax: maximum, difference, exponential, sum, quotient, over 4 rows of 5.
    assert flops(bound("softmax", ((4, 5),))) == 4 * 5 * (4 + FUNCTIONS["exp"].flops)


def test_contraction_flops_count_contractions_alone():
    assert contraction_flops(bound("matmul", ((3, 5), (5, 7)), act="relu")) == 2 * 3 * 5 * 7
    assert contraction_flops(bound("batch_matmul_nt", ((2, 3, 5), (2, 7, 5)))) == 2 * 2 * 3 * 5 * 7
    windows = {"stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "groups": 2}
    every = 2 * (2 * 6 * 5 * 5) * (2 * 3 * 3)
    assert contraction_flops(bound("conv2d", ((2, 4, 9, 9), (6, 2, 3, 3)), **windows)) == every
    assert contraction_flops(bound("conv2d_data_grad", ((2, 6, 5, 5), (6, 2, 3, 3)), sizes=(9, 9), **windows)) == every
    assert (
        contraction_flops(bound("conv2d_weight_grad", ((2, 6, 5, 5), (2, 4, 9, 9)), sizes=(3, 3), **windows)) == every
    )
    # Scores and values, for 4 heads over 2 of keys and values; the scores are used at three indices.
    q, kv = (2, 4, 6, 8), (2, 2, 6, 8)
    assert contraction_flops(bound("attention", (q, kv, kv), scale=1.0)) == 2 * (2 * 2 * 4 * 6 * 6 * 8)
    # Scores again, and two for each of the forward's.
    assert contraction_flops(bound("attention_grad", (q, q, kv, kv), scale=1.0)) == 5 * (2 * 2 * 4 * 6 * 6 * 8)


ROUTED: list[tuple[str, Shapes, Attributes]] = [
    ("routed_matmul", ((6, 2, 5), (4, 5, 7), (6, 2)), {}),
    ("routed_matmul_nt", ((6, 2, 5), (4, 7, 5), (6, 2)), {}),
    ("routed_matmul_tn", ((6, 2, 5), (6, 2, 7), (6, 2)), {"size": 4, "degrees": (1,)}),
]


@pytest.mark.parametrize(("name", "shapes", "attributes"), ROUTED)
def test_what_integers_pick_counts_once_for_each(name: str, shapes: Shapes, attributes: Attributes):
    """Not once for each of what they pick from; a piece of that has its share of them."""
    line = bound(name, shapes, **attributes)
    assert contraction_flops(line) == flops(line) == 2 * 12 * 5 * 7
    half = line_of_task(line, Configuration({"v": 2}))
    assert flops(half, line.extents) == flops(line) // 2
    rows = line_of_task(line, Configuration({"t0": 3, "v": 2}))
    assert flops(rows, line.extents) == flops(line) // 6


def test_contraction_flops_do_not_count_sums_along_a_row():
    assert contraction_flops(bound("softmax_grad", ((4, 5), (4, 5)))) == 0
    assert contraction_flops(bound("layer_norm_grad", ((4, 5), (4, 5), (5,)))) == 0
    assert contraction_flops(bound("mse", ((5,), (5,)))) == 0
    assert contraction_flops(bound("embedding", ((4,), (5, 6)))) == 0
    # Each factor has an index of its own, but the sum runs over both.
    assert (
        contraction_flops(bind(parse_line("f(x, y) out[c] = sum[m, n](x[m, c] * y[n, c])"), [(2, 3), (4, 3)], {})) == 0
    )


def test_a_dim_read_at_numbers_only_has_just_those():
    line = parse_line("f(z)  out[b.., n] = z[b.., 0, n] + z[b.., 2, n]")
    assert bind(line, ((5, 3, 4),), {}).result_shapes == ((5, 4),)
    with pytest.raises(UnityError, match=r"^pcg\.f: z has 4 positions along dim 1; it needs 3$"):
        bind(line, ((5, 4, 4),), {})
