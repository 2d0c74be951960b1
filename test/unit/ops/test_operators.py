"""
Every operator equals PyTorch, forward and backward, whole and under every configuration its line allows; every other way to
divide its operands is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from unity_ir.errors import UnityError
from unity_ir.ops import operator, operators
from unity_ir.pcg.differentiate import operand_gradients
from unity_ir.pcg.graph import Graph, Node, Value, apply, divide, erase, leaf, parallel
from unity_ir.pcg.interpret import Array, interpret, interpret_pieces, join
from unity_ir.pcg.types import TensorType, tensor_type
from unity_ir.rules.parallelization import configurations, parallelize, type_steps_up
from unity_ir.tdl.parallel import Configuration, Degrees, operand_degrees
from unity_ir.tdl.syntax import AttrValue

Shape = tuple[int, ...]
SIZES = st.sampled_from([1, 2, 3, 4, 6])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


@dataclass(frozen=True)
class Case:
    """An operator at some shapes, with attributes; `classes` is what its integer operand holds less than."""

    shapes: tuple[Shape, ...]
    attributes: Mapping[str, AttrValue]
    classes: int = 1


@st.composite
def same(draw: st.DrawFn, count: int) -> Case:
    shape = draw(SHAPES)
    return Case((shape,) * count, {})


@st.composite
def broadcast(draw: st.DrawFn) -> Case:
    shape = draw(SHAPES)
    return Case((shape, shape[draw(st.integers(0, len(shape))) :]), {})


@st.composite
def matmul(draw: st.DrawFn, transposed: bool) -> Case:
    lead, k, n = draw(st.lists(SIZES, max_size=2)), draw(SIZES), draw(SIZES)
    act: dict[str, AttrValue] = {} if transposed else {"act": draw(st.sampled_from(["identity", "relu", "gelu"]))}
    return Case(((*lead, k), (n, k) if transposed else (k, n)), act)


@st.composite
def matmul_tn(draw: st.DrawFn) -> Case:
    lead = draw(st.lists(SIZES, max_size=2))
    return Case(((*lead, draw(SIZES)), (*lead, draw(SIZES))), {})


@st.composite
def loss(draw: st.DrawFn, with_grad: bool) -> Case:
    b, c = draw(SIZES), draw(SIZES)
    return Case((((),) if with_grad else ()) + ((b, c), (b,)), {}, c)


@st.composite
def mse_grad(draw: st.DrawFn) -> Case:
    shape = draw(SHAPES)
    return Case(((), shape, shape), {})


@st.composite
def concat(draw: st.DrawFn) -> Case:
    before, after = draw(st.lists(SIZES, max_size=1)), draw(st.lists(SIZES, max_size=1))
    sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
    return Case(tuple((*before, s, *after) for s in sizes), {"dim": len(before)})


@st.composite
def split(draw: st.DrawFn) -> Case:
    joined = draw(concat())
    dim = joined.attributes["dim"]
    assert isinstance(dim, int)
    sizes = tuple(s[dim] for s in joined.shapes)
    shape = (*joined.shapes[0][:dim], sum(sizes), *joined.shapes[0][dim + 1 :])
    return Case((shape,), {"dim": dim, "sizes": sizes})


@st.composite
def transpose(draw: st.DrawFn) -> Case:
    shape = draw(SHAPES)
    return Case((shape,), {"perm": tuple(draw(st.permutations(range(len(shape)))))})


@st.composite
def split_heads(draw: st.DrawFn) -> Case:
    b, h, s, d = (draw(SIZES) for _ in range(4))
    return Case(((b, s, h * d),), {"heads": h})


@st.composite
def merge_heads(draw: st.DrawFn) -> Case:
    return Case((tuple(draw(SIZES) for _ in range(4)),), {})


@st.composite
def reshape(draw: st.DrawFn) -> Case:
    """Two ways to put neighbouring factors together."""
    factors = draw(SHAPES)

    def grouped() -> Shape:
        out: list[int] = []
        for factor in factors:
            if out and draw(st.booleans()):
                out[-1] *= factor
            else:
                out.append(factor)
            if draw(st.booleans()):
                out.append(1)
        return tuple(out)

    return Case((grouped(),), {"shape": grouped()})


@st.composite
def reduce_sum(draw: st.DrawFn) -> Case:
    shape = draw(SHAPES)
    dim = draw(st.integers(0, len(shape)))
    return Case((shape,), {"dim": dim, "count": draw(st.integers(0, len(shape) - dim))})


@st.composite
def expand(draw: st.DrawFn) -> Case:
    shape, sizes = draw(SHAPES), draw(st.lists(SIZES, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    return Case((shape,), {"dim": dim, "sizes": tuple(sizes), "degrees": (1,) * len(sizes)})


CASES: Mapping[str, st.SearchStrategy[Case]] = {
    "add": broadcast(),
    "concat": concat(),
    "cross_entropy": loss(False),
    "cross_entropy_grad": loss(True),
    "expand": expand(),
    "gelu": same(1),
    "gelu_grad": same(2),
    "matmul": matmul(False),
    "matmul_nt": matmul(True),
    "matmul_tn": matmul_tn(),
    "merge_heads": merge_heads(),
    "mse": same(2),
    "mse_grad": mse_grad(),
    "mul": broadcast(),
    "reduce_sum": reduce_sum(),
    "relu": same(1),
    "relu_grad": same(2),
    "reshape": reshape(),
    "split": split(),
    "split_heads": split_heads(),
    "transpose": transpose(),
}

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "relu": F.relu, "gelu": F.gelu}


def derivative(function: Callable[[Tensor], Tensor], g: Tensor, x: Tensor) -> Tensor:
    """g times the derivative of `function` at x."""
    at = x.clone().requires_grad_()
    return torch.autograd.grad(function(at), at, g)[0]


def torch_expand(x: Tensor, dim: int, sizes: Sequence[int], degrees: Sequence[int]) -> Tensor:
    del degrees
    for _ in sizes:
        x = x.unsqueeze(dim)
    return x.expand((*x.shape[:dim], *sizes, *x.shape[dim + len(sizes) :]))


TORCH: Mapping[str, Callable[..., Any]] = {
    "add": torch.add,
    "concat": lambda *x, dim: torch.cat(x, dim),
    "cross_entropy": F.cross_entropy,
    "cross_entropy_grad": lambda g, x, t: derivative(lambda y: F.cross_entropy(y, t), g, x),
    "expand": torch_expand,
    "gelu": F.gelu,
    "gelu_grad": lambda g, x: derivative(F.gelu, g, x),
    "matmul": lambda x, w, act: ACTIVATIONS[act](x @ w),
    "matmul_nt": lambda x, w: x @ w.T,
    "matmul_tn": lambda x, y: x.reshape(-1, x.shape[-1]).T @ y.reshape(-1, y.shape[-1]),
    "merge_heads": lambda x: x.transpose(1, 2).flatten(2),
    "mse": F.mse_loss,
    "mse_grad": lambda g, x, y: derivative(lambda z: F.mse_loss(z, y), g, x),
    "mul": torch.mul,
    "reduce_sum": lambda x, dim, count: x.flatten(dim, dim + count - 1).sum(dim) if count else x,
    "relu": F.relu,
    "relu_grad": lambda g, y: derivative(F.relu, g, y),
    "reshape": lambda x, shape: x.reshape(shape),
    "split": lambda x, dim, sizes: torch.split(x, sizes, dim),
    "split_heads": lambda x, heads: x.unflatten(2, (heads, -1)).transpose(1, 2),
    "transpose": lambda x, perm: x.permute(perm),
}


def serial(name: str, case: Case) -> Node:
    """The operator on inputs x0, x1, ..."""
    integer = [p.integer for p in operator(name).line.parameters]
    operands = [
        leaf("input", tensor_type(shape, "i64" if any(integer) and integer[i] else "f64"), name=f"x{i}").result
        for i, shape in enumerate(case.shapes)
    ]
    return apply(name, operands, case.attributes)


def arrays(leaves: Sequence[Value], classes: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        v.node.name: random.integers(0, classes, v.shape) if v.type.is_integer else random.standard_normal(v.shape)
        for v in leaves
    }


def with_backward(node: Node, leaf_of: Callable[[str, TensorType], Value]) -> tuple[Value, ...]:
    """The results of a node and, if it has any, the gradients of its operands from those of its results, g0, g1, ..."""
    if node.operator.gradient is None:
        return node.results
    grads = [leaf_of(f"g{i}", type.dual) for i, type in enumerate(node.types)]
    found = operand_gradients(node, grads)
    for value, operand in zip(found, node.operands, strict=True):
        assert (value is None) == operand.type.is_integer
        assert value is None or value.type == operand.type.dual
    return (*node.results, *(v for v in found if v is not None))


def plain(name: str, type: TensorType) -> Value:
    return leaf("input", type, name=name).result


def parts(name: str, type: TensorType) -> Value:
    """A value of a type, made of an input; of addends, each is an input of its own."""
    shape = (type.sum, *type.shape) if type.sum > 1 else type.shape
    value = leaf("input", tensor_type(shape, type.dtype), name=name).result
    if type.sum > 1:
        wanted = tensor_type(shape, type.dtype, (type.sum, *type.degrees), 1, type.copy)
    else:
        wanted = type
    for op, attributes in type_steps_up(wanted):
        value = parallel(op, value, **attributes).result
    return apply("reduce_sum", [value], {"dim": 0}).result if type.sum > 1 else value


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


def tried(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", operators())
@tried(60)
@given(st.data())
def test_equals_torch(name: str, data: st.DataObject):
    case = data.draw(CASES[name])
    node = serial(name, case)
    whole = graph(with_backward(node, plain))
    inputs = arrays([n.result for n in whole.inputs], case.classes, data.draw(st.integers(0, 99)))
    values = interpret(whole, inputs, {})
    operands = [torch.tensor(inputs[v.node.name], requires_grad=not v.type.is_integer) for v in node.operands]
    expected = TORCH[name](*operands, **dict(node.attributes))
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    assert [tuple(t.shape) for t in expected] == [t.shape for t in node.types]
    if node.operator.gradient is not None:
        cotangents = [torch.tensor(inputs[f"g{i}"]) for i in range(len(expected))]
        floating = [t for t in operands if t.requires_grad]
        expected += torch.autograd.grad(expected, floating, cotangents)
    for got, want in zip(whole.outputs, expected, strict=True):
        np.testing.assert_allclose(values[got], want.detach().numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", operators())
@tried(30)
@given(st.data())
def test_every_configuration_equals_the_whole(name: str, data: st.DataObject):
    case = data.draw(CASES[name])
    node = serial(name, case)
    single = [*configurations(node, 2), *configurations(node, 3)]
    two = pair(data.draw(st.sampled_from(single)), data.draw(st.sampled_from(single)))
    for by in (*single, *([two] if fits(node, two) else [])):
        needs = operand_degrees(node.analysis, by)
        types = [
            tensor_type(v.shape, v.type.dtype, d.dims, d.sum, d.copy) for v, d in zip(node.operands, needs, strict=True)
        ]
        divided = divide(node, [parts(f"x{i}", t) for i, t in enumerate(types)], by)
        whole = graph(with_backward(divided, parts))
        inputs = arrays([n.result for n in whole.inputs], case.classes, 5)
        values, pieces = interpret(whole, inputs, {}), interpret_pieces(whole, inputs, {})
        for value in whole.outputs:
            np.testing.assert_allclose(join(pieces[value], value.type), values[value], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", operators())
@tried(25)
@given(st.data())
def test_rule_keeps_types_and_meaning(name: str, data: st.DataObject):
    node = serial(name, data.draw(CASES[name]))
    before = graph(node.results)
    for by in (*configurations(node, 2), *configurations(node, 3)):
        after = Graph("f", before.inputs, parallelize(node, by))
        assert [v.type for v in after.outputs] == [v.type for v in before.outputs]
        assert erase(after) == before


def axis_degrees(type: TensorType) -> list[Degrees]:
    """Every way one axis of 2 devices may divide a value."""
    rank = len(type.shape)
    dims = [tuple(2 if i == d else 1 for i in range(rank)) for d, size in enumerate(type.shape) if size % 2 == 0]
    whole = (1,) * rank
    sums = [] if type.is_integer else [Degrees(whole, 2)]
    return [Degrees(whole), *map(Degrees, dims), Degrees(whole, 1, 2), *sums]


@pytest.mark.parametrize("name", operators())
@tried(25)
@given(st.data())
def test_only_what_the_line_allows_is_accepted(name: str, data: st.DataObject):
    node = serial(name, data.draw(CASES[name]))
    allowed = {operand_degrees(node.analysis, by) for by in (Configuration(), *configurations(node, 2))}
    for choice in product(*(axis_degrees(v.type) for v in node.operands)):
        operands = [
            plain(f"x{i}", tensor_type(v.shape, v.type.dtype, d.dims, d.sum, d.copy))
            for i, (v, d) in enumerate(zip(node.operands, choice, strict=True))
        ]
        if choice in allowed:
            apply(name, operands, dict(node.attributes))
            continue
        with pytest.raises(UnityError, match=rf"^pcg\.{name}: .*(insert pcg\.|partition or combine|replicate or pick)"):
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
