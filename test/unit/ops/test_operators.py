"""
Every operator equals PyTorch, forward and backward, whole and under every configuration its line allows; every other
way to divide its operands is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from random import Random

import numpy as np
import pytest
import torch
from extent import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lowered import WITHOUT_GRADIENT
from operator_cases import CASES, DTYPES
from operator_graphs import arrays, plain, serial, with_backward
from operator_twins import TORCH
from parallelization import configurations, parallelize
from torch import Tensor

from unity_ir.errors import UnityError
from unity_ir.ops import operator, operators
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import Node, Value, apply, divide, leaf, parallel
from unity_ir.pcg.parallel import type_steps
from unity_ir.pcg.types import TensorType, divided_type, tensor_type
from unity_ir.tdl.parallel import Configuration, Degrees, operand_degrees


def parts(name: str, type: TensorType) -> Value:
    """A value of a type, made of an input; of addends, each is an input of its own."""
    shape = (type.sum, *type.shape) if type.sum > 1 else type.shape
    value = leaf("input", tensor_type(shape, type.dtype), name=name).result
    if type.sum > 1:
        wanted = tensor_type(shape, type.dtype, (type.sum, *type.degrees), 1, type.copy)
        for op, attributes in type_steps(wanted.serial, wanted):
            value = parallel(op, value, **attributes).result
        value = apply("reduce_sum", [value], {"dim": 0}).result
    for op, attributes in type_steps(value.type, type):
        value = parallel(op, value, **attributes).result
    return value


def graph(outputs: Sequence[Value]) -> Graph:
    leaves = dict.fromkeys(n for n in Graph("f", (), tuple(outputs)).nodes() if n.op == "input")
    return Graph("f", tuple(leaves), tuple(outputs))


def pair(a: Configuration, b: Configuration) -> Configuration:
    degrees = {v: a.degree(v) * b.degree(v) for v in (*a.degrees, *b.degrees)}
    sums = {s: a.sums.get(s, 1) * b.sums.get(s, 1) for s in (*a.sums, *b.sums)}
    return Configuration(degrees, a.copy * b.copy, sums)


def fits(node: Node, by: Configuration) -> bool:
    return all(node.analysis.bound.extents[v] % d == 0 for v, d in by.degrees.items())


def test_every_operator_is_tested():
    assert set(CASES) == set(TORCH) == set(operators())


def tried(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=examples(number), suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@pytest.mark.parametrize("name", operators())
@tried(30)
@given(st.data())
def test_equals_torch(name: str, data: st.DataObject):
    case = data.draw(CASES[name])
    node = serial(name, case)
    whole = graph(with_backward(node, plain))
    inputs = arrays([n.result for n in whole.inputs], case, data.draw(st.integers(0, 99)))
    values = interpret(whole, inputs, {})
    operands = [torch.tensor(inputs[v.node.name], requires_grad=v.type.is_floating) for v in node.operands]
    expected = TORCH[name](*operands, **dict(node.attributes))
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    assert [tuple(t.shape) for t in expected] == [t.shape for t in node.types]
    for type, want in zip(node.types, expected, strict=True):
        assert DTYPES[type.dtype] == want.dtype
    differentiable = [(i, t) for i, t in enumerate(expected) if t.requires_grad]
    if node.operator.gradient is not None and differentiable:
        given = {f"g{i}": t.detach() for i, t in differentiable} | inputs
        cotangents = [torch.as_tensor(given[f"g{i}"]).to(t.dtype) for i, t in differentiable]
        floating = [t for t in operands if t.requires_grad]
        found = torch.autograd.grad([t for _, t in differentiable], floating, cotangents, materialize_grads=True)
        kept = WITHOUT_GRADIENT.get(name, ())
        assert not any(found[i].any() for i in kept)
        expected += [g for i, g in enumerate(found) if i not in kept]
    for got, want in zip(whole.outputs, expected, strict=True):
        np.testing.assert_allclose(values[got], want.detach().double().numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", operators())
@tried(15)
@given(st.data())
def test_every_configuration_equals_the_whole(name: str, data: st.DataObject):
    case = data.draw(CASES[name])
    node = serial(name, case)
    single = [*configurations(node, 2), *configurations(node, 3)]
    two = pair(data.draw(st.sampled_from(single)), data.draw(st.sampled_from(single)))
    for by in (*single, *([two] if fits(node, two) else [])):
        needs = operand_degrees(node.analysis, by)
        types = [divided_type(v.shape, v.type.dtype, d) for v, d in zip(node.operands, needs, strict=True)]
        divided = divide(node, [parts(f"x{i}", t) for i, t in enumerate(types)], by)
        whole = graph(with_backward(divided, parts))
        inputs = arrays([n.result for n in whole.inputs], case, 5)
        values, pieces = interpret(whole, inputs, {}), interpret_pieces(whole, inputs, {})
        for value in whole.outputs:
            np.testing.assert_allclose(join(pieces[value], value.type), values[value], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", operators())
@tried(18)
@given(st.data())
def test_rule_keeps_types_and_meaning(name: str, data: st.DataObject):
    node = serial(name, data.draw(CASES[name]))
    before = graph(node.results)
    for by in (*configurations(node, 2), *configurations(node, 3)):
        after = Graph("f", before.inputs, parallelize(node, by))
        assert [v.type for v in after.outputs] == [v.type for v in before.outputs]
        assert erase(after) == before


def axis_degrees(type: TensorType) -> list[Degrees]:
    """Every way one axis of 2 devices may divide a value, with some halos."""
    rank = len(type.shape)
    even = [d for d, size in enumerate(type.shape) if size % 2 == 0]
    dims = [tuple(2 if i == d else 1 for i in range(rank)) for d in even]
    whole = (1,) * rank
    sums = [Degrees(whole, 2)] if type.is_floating else []
    borders = [tuple(b if i == d else (0, 0) for i in range(rank)) for d in even for b in ((1, 1), (0, 1), (2, 2))]
    halos = [Degrees(divided, 1, 1, b) for divided in dims for b in borders if fits_halo(type, divided, b)]
    halo_sums = [replace(d, halo=(), halo_sum=d.halo) for d in halos[:1]] if type.is_floating else []
    return [Degrees(whole), *map(Degrees, dims), Degrees(whole, 1, 2), *sums, *halos, *halo_sums]


def fits_halo(type: TensorType, degrees: Sequence[int], borders: Sequence[tuple[int, int]]) -> bool:
    return all(not any(b) or (d > 1 and max(b) <= s) for s, d, b in zip(type.shape, degrees, borders, strict=True))


MOST = 300
"""Ways to divide the operands of one case that are tried."""


@pytest.mark.slow
@pytest.mark.parametrize("name", operators())
@tried(18)
@given(st.data())
def test_only_what_the_line_allows_is_accepted(name: str, data: st.DataObject):
    node = serial(name, data.draw(CASES[name]))
    allowed = {operand_degrees(node.analysis, by) for by in (Configuration(), *configurations(node, 2))}
    ways = [axis_degrees(v.type) for v in node.operands]
    if prod(map(len, ways)) <= MOST:
        choices = list(product(*ways))
    else:
        # Of too many, some; and with all that is allowed those that differ from it in one operand.
        random = Random(data.draw(st.integers(0, 99)))
        choices = [tuple(map(random.choice, ways)) for _ in range(MOST // 2)]
        near = [(*a[:i], d, *a[i + 1 :]) for a in sorted(allowed, key=repr) for i, own in enumerate(ways) for d in own]
        choices += [*allowed, *random.sample(near, min(len(near), MOST // 2))]
    for choice in choices:
        operands = [
            plain(f"x{i}", divided_type(v.shape, v.type.dtype, d))
            for i, (v, d) in enumerate(zip(node.operands, choice, strict=True))
        ]
        if choice in allowed:
            apply(name, operands, dict(node.attributes))
            continue
        advice = r"(insert pcg\.|partition or combine|replicate or pick|before pcg\.halo)"
        with pytest.raises(UnityError, match=rf"^pcg\.{name}: .*{advice}"):
            apply(name, operands, dict(node.attributes))


def test_unknown_operator_names_the_nearest():
    with pytest.raises(UnityError, match=r"^pcg\.matmull: unknown operator; did you mean matmul"):
        operator("matmull")


def test_integers_and_floats_do_not_mix():
    x = plain("x", tensor_type((2, 2), "f32"))
    with pytest.raises(UnityError, match=r"^pcg\.cross_entropy: t is f32, expected integers"):
        apply("cross_entropy", [x, plain("t", tensor_type((2,), "f32"))])
    with pytest.raises(UnityError, match=r"^pcg\.add: y is i64, expected floating point"):
        apply("add", [x, plain("t", tensor_type((2,), "i64"))])
    with pytest.raises(UnityError, match=r"^pcg\.add: element types differ: x is f32, y is f64; cast one"):
        apply("add", [x, plain("t", tensor_type((2,), "f64"))])
