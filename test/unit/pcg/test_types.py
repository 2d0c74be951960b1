"""Parallel tensor types and the parallel operators: what they accept, and that they are identities on meaning."""

from typing import Any

import numpy as np
import pytest
from extent import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unity_ir.errors import UnityError
from unity_ir.pcg.differentiate import operand_gradients
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret_pieces, join, split
from unity_ir.pcg.node import Value, apply, leaf, parallel
from unity_ir.pcg.parallel import PARALLEL_OPERATORS, type_steps
from unity_ir.pcg.types import MAX_PIECES, TensorType, tensor_type

SHAPE = (4, 6)


@st.composite
def tensor_types(draw: st.DrawFn) -> TensorType:
    degrees = tuple(draw(st.sampled_from([d for d in (1, 2, 3) if size % d == 0])) for size in SHAPE)
    halo = tuple(draw(st.sampled_from([(0, 0), (0, 0), (1, 2)])) if d > 1 else (0, 0) for d in degrees)
    halos = [(), halo] if draw(st.booleans()) else [halo, ()]
    return tensor_type(SHAPE, "f64", degrees, draw(st.integers(1, 3)), draw(st.integers(1, 3)), *halos)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4,), "f8"), "unknown element type f8"),
        (((4,), "f32", (1, 1)), "1 sizes but 2 degrees"),
        (((0,), "f32"), "size 0 is not allowed"),
        (((-4,), "f32", (-1,)), "size -4 is not allowed"),
        (((4,), "f32", (3,)), "degree 3 does not divide size 4"),
        (((4,), "f32", (0,)), "degree 0 does not divide size 4"),
        (((4,), "f32", (-2,)), "degree -2 does not divide size 4"),
        (((2**31, 2**31), "f32"), "too many to address"),
        (((4,), "f32", (1,), 0), "degrees start at 1"),
        (((4,), "f32", (1,), 1, -1), "degrees start at 1"),
        (((4,), "i64", (1,), 2), "i64 values cannot be in partial sums"),
        (((4,), "f32", (2,), MAX_PIECES // 2 + 1), "pieces are too many"),
        (((2**30,), "f32", (2**30,)), "pieces are too many"),
        (((4,), "f32", (1,), 1, 1, ((1, 0),)), "a dim of degree 1 has no halo"),
        (((4,), "f32", (2,), 1, 1, ((1, 5),)), "a halo of 1 and 5 does not fit a dim of 4"),
        (((4,), "f32", (2,), 1, 1, ((-1, 1),)), "a halo of -1 and 1 does not fit a dim of 4"),
        (((4,), "f32", (2,), 1, 1, ((1, 1),), ((1, 1),)), "a halo holds copies or addends, not both"),
        (((4,), "i64", (2,), 1, 1, (), ((1, 1),)), "i64 values cannot have addends in a halo"),
    ],
)
def test_impossible_type_is_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(UnityError, match=rf"^pcg\.tensor: .*{message}"):
        tensor_type(*arguments)


@given(tensor_types())
def test_type_counts_its_pieces(type: TensorType):
    pieces = type.all_pieces()
    assert len(pieces) == len(set(pieces)) == type.pieces == np.prod(type.degrees) * type.sum * type.copy
    assert type.dual.dual is type
    assert type.serial.pieces == 1
    assert tensor_type(type.shape, type.dtype, type.degrees, type.sum, type.copy, type.halo, type.halo_sum) is type


@given(tensor_types())
def test_split_then_join_is_the_value(type: TensorType):
    array = np.random.default_rng(0).standard_normal(SHAPE)
    pieces = split(array, type)
    assert {p.shape for p in pieces.values()} == {type.piece_shape}
    np.testing.assert_array_equal(join(pieces, type), array)


def scattered(type: TensorType) -> Value:
    """A value of a type; of addends, each is different and none zero."""
    whole = leaf("input", tensor_type((type.sum, *SHAPE), "f64", (type.sum, *type.degrees), 1, type.copy), name="x")
    value = apply("reduce_sum", [whole.result], {"dim": 0}).result
    for op, attributes in type_steps(value.type, type):
        value = parallel(op, value, **attributes).result
    return value


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A parallel operator and attributes it may not fit with."""
    op = draw(st.sampled_from(sorted(PARALLEL_OPERATORS)))
    ranges = {"by": st.integers(0, 3), "dim": st.integers(-1, 2), "to": st.integers(-1, 2)}
    ranges |= {"low": st.integers(-1, 3), "high": st.integers(-1, 3)}
    ranges |= {"source": st.integers(-1, 2), "target": st.integers(-1, 2)}
    return op, {name: draw(ranges[name]) for name in PARALLEL_OPERATORS[op].attributes}


@pytest.mark.slow
@given(tensor_types(), st.lists(steps(), max_size=12))
@settings(max_examples=examples(400))
def test_any_chain_keeps_the_value_and_its_gradient_is_dual(type: TensorType, chain: list[tuple[str, dict[str, int]]]):
    assume(not type.halo_sum)
    start = value = scattered(type)
    for op, attributes in chain:
        try:
            after = parallel(op, value, **attributes)
        except UnityError:
            continue
        (back,) = operand_gradients(after, [leaf("input", after.types[0].dual, name="g").result])
        assert back is not None
        assert back.type == value.type.dual
        value = after.result
        if value.type.pieces > 400:
            break
    inputs = {"x": np.random.default_rng(1).standard_normal((type.sum, *SHAPE))}
    pieces = interpret_pieces(Graph("f", (), (value,)), inputs, {})
    assert set(pieces[value]) == set(value.type.all_pieces())
    np.testing.assert_allclose(join(pieces[value], value.type), inputs["x"].sum(0), atol=1e-12)
    np.testing.assert_allclose(join(pieces[start], start.type), inputs["x"].sum(0), atol=1e-12)


@given(tensor_types(), steps())
@settings(max_examples=examples(400))
def test_gradient_of_a_step_is_its_transpose(type: TensorType, step: tuple[str, dict[str, int]]):
    """<g, A x> = <A* g, x> over all pieces, each piece a vector of its own."""
    op, attributes = step
    x = leaf("input", type, name="x").result
    try:
        after = parallel(op, x, **attributes)
    except UnityError:
        return
    g = leaf("input", after.types[0].dual, name="g").result
    (back,) = operand_gradients(after, [g])
    assert back is not None
    assert back.type == type.dual
    arrays = {n: np.random.default_rng(2).standard_normal(SHAPE) for n in "xg"}
    values = interpret_pieces(Graph("f", (), (after.result, back)), arrays, {})
    left = np.sum(join(values[g], g.type) * join(values[after.result], after.types[0]))
    right = np.sum(join(values[back], back.type) * join(values[x], type))
    np.testing.assert_allclose(left, right)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("partition", {"dim": 0, "by": 3}, "degree 3 does not divide size 4 of dim 0; choose a divisor"),
        ("partition", {"dim": 2, "by": 2}, "dim 2 is out of range"),
        ("partition", {"dim": -1, "by": 2}, "dim -1 is out of range"),
        ("combine", {"dim": 0, "by": 2}, "dim 0 has degree 1, which cannot be combined by 2"),
        ("replicate", {"by": 0}, "by 0 is not a degree"),
        ("reduce", {"by": 2}, "the value is in 1 partial sums, which cannot be reduced by 2"),
        ("pick", {"by": 2}, "the value has 1 copies, of which one of 2 cannot be picked"),
        ("zero_pad", {"by": -1}, "by -1 is not a degree"),
        ("halo", {"dim": 0, "low": 1, "high": 1}, "dim 0 of .* is not divided, so its piece has no neighbours"),
        ("halo", {"dim": 0, "low": 0, "high": 0}, "low 0 and high 0 are no halo"),
        ("halo_reduce", {"dim": 0, "low": 1, "high": 1}, r"dim 0 of .* has no halo_sum\(1, 1\)"),
    ],
)
def test_step_that_does_not_fit_is_refused(op: str, attributes: dict[str, int], message: str):
    with pytest.raises(UnityError, match=rf"^pcg\.{op}: {message}"):
        parallel(op, leaf("input", tensor_type(SHAPE, "f64"), name="x").result, **attributes)


@pytest.mark.parametrize("op", ["input", "weight"])
@pytest.mark.parametrize("attributes", [{}, {"name": ""}, {"name": 3}])
def test_leaf_without_a_name_is_refused(op: str, attributes: dict[str, int | str]):
    with pytest.raises(UnityError, match=rf"^pcg\.{op}: its name is .*; give it one"):
        leaf(op, tensor_type((), "f32"), **attributes)


def test_constant_is_a_number_and_equal_ones_are_one():
    type = tensor_type((), "f32")
    assert leaf("constant", type, value=1) is leaf("constant", type, value=1.0)
    assert repr(leaf("constant", type, value=1).attribute("value")) == "1.0"
    with pytest.raises(UnityError, match=r"^pcg\.constant: its value is 'a'; it must be a number"):
        leaf("constant", type, value="a")
