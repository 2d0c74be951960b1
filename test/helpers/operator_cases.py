"""Random uses of every operator, and the same operator written by hand in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import window_cases
from case import Case, Shape
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from unity_ir.tdl.syntax import AttrValue

SIZES = st.sampled_from([1, 2, 3, 4, 6])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


@st.composite
def same(draw: st.DrawFn, count: int) -> Case:
    shape = draw(SHAPES)
    return Case((shape,) * count, {})


@st.composite
def broadcast(draw: st.DrawFn, count: int = 2, with_grad: bool = False) -> Case:
    """Operands that broadcast to one shape: without some leading dims, and with sizes of 1; or the gradient first."""
    full = draw(SHAPES)
    shapes: list[Shape] = []
    for _ in range(count):
        own = full[draw(st.integers(0, len(full))) :]
        shapes.append(tuple(draw(st.sampled_from([size, size, 1])) for size in own))
    if with_grad:
        return Case((full, *shapes), {})
    if not draw(st.booleans()):
        shapes[draw(st.integers(0, count - 1))] = full
    return Case(tuple(shapes), {})


@st.composite
def broadcast_grad(draw: st.DrawFn) -> Case:
    full, shape = draw(broadcast(1, with_grad=True)).shapes
    return Case((full,), {"shape": shape})


@st.composite
def compared(draw: st.DrawFn) -> Case:
    """Of numbers that are often equal."""
    return replace(draw(broadcast()), classes=3, dtypes=draw(st.sampled_from([("i64", "i64"), ("f64", "f64")])))


@st.composite
def select_grad(draw: st.DrawFn) -> Case:
    case = draw(broadcast(1, with_grad=True))
    return replace(case, attributes={"chosen": draw(st.integers(0, 1))})


@st.composite
def cast(draw: st.DrawFn) -> Case:
    given = draw(st.sampled_from(["f64", "f64", "i64", "bool"]))
    wanted = draw(st.sampled_from(["f64", "f32", "f16", "bf16", "i64", "i32", "bool"]))
    # What the narrowest holds exactly, so that it does not matter which addends are converted.
    return Case((draw(SHAPES),), {"to": wanted}, classes=5, dtypes=(given,), grain=0.25)


def bounded(cases: st.SearchStrategy[Case], low: float = 0.5, high: float = 2.0) -> st.SearchStrategy[Case]:
    return cases.map(lambda case: replace(case, bounds=(low, high)))


positive = bounded


@st.composite
def with_numbers(draw: st.DrawFn, count: int, **ranges: tuple[float, float]) -> Case:
    """Operands of one shape, and attributes that are numbers."""
    return Case((draw(SHAPES),) * count, {name: draw(st.floats(*limits)) for name, limits in ranges.items()})


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


@st.composite
def batch_matmul(draw: st.DrawFn, x: str, y: str) -> Case:
    """Shapes over `m`, `n`, `k`, as the two letters of each operand say, with leading dims."""
    lead = draw(st.lists(SIZES, max_size=2))
    sizes = {letter: draw(SIZES) for letter in "mnk"}
    return Case(tuple((*lead, *(sizes[letter] for letter in operand)) for operand in (x, y)), {})


@st.composite
def scale(draw: st.DrawFn) -> Case:
    return Case((draw(SHAPES),), {"by": draw(st.floats(-4, 4))})


@st.composite
def rows(draw: st.DrawFn, operands: str, eps: bool = False) -> Case:
    """Operands of a matrix's shape (`x`), of a row's (`w`)."""
    lead, size = draw(st.lists(SIZES, max_size=2)), draw(SIZES)
    shapes = {"x": (*lead, size), "w": (size,)}
    return Case(tuple(shapes[o] for o in operands), {"eps": 1e-5} if eps else {})


@st.composite
def attention(draw: st.DrawFn, operands: str) -> Case:
    sizes = st.sampled_from([1, 2, 3, 4])
    b, h, g, i, j, e, d = (draw(sizes) for _ in range(7))
    causal = draw(st.integers(0, 1))
    shapes = {"q": (b, h * g, i, e), "k": (b, h, j, e), "v": (b, h, j, d), "y": (b, h * g, i, d)}
    return Case(tuple(shapes[o] for o in operands), {"scale": draw(st.floats(0.1, 2)), "causal": causal})


@st.composite
def rotary(draw: st.DrawFn) -> Case:
    lead, s, half = draw(st.lists(SIZES, max_size=2)), draw(SIZES), draw(SIZES)
    return Case(((*lead, s, 2 * half),), {"base": 100.0, "direction": draw(st.sampled_from([1.0, -1.0]))})


@st.composite
def embedding(draw: st.DrawFn, with_grad: bool) -> Case:
    lead, size, e = tuple(draw(st.lists(SIZES, max_size=2))), draw(SIZES), draw(SIZES)
    if with_grad:
        return Case(((*lead, e), lead), {"size": size, "degrees": (1,)}, size)
    return Case((lead, (size, e)), {}, size)


CASES: Mapping[str, st.SearchStrategy[Case]] = {
    "broadcast_grad": broadcast_grad(),
    "cast": cast(),
    "clamp": with_numbers(1, low=(-1, 0), high=(0, 1)),
    "clamp_grad": with_numbers(2, low=(-1, 0), high=(0, 1)),
    "detach": same(1),
    "elu": with_numbers(1, alpha=(0.1, 2)),
    "elu_grad": with_numbers(2, alpha=(0.1, 2)),
    "eq": compared(),
    "erf": same(1),
    "erf_grad": same(2),
    "floor": same(1),
    "ge": compared(),
    "gelu_tanh": same(1),
    "gelu_tanh_grad": same(2),
    "gt": compared(),
    "hardsigmoid": bounded(same(1), -5, 5),
    "hardswish": bounded(same(1), -5, 5),
    "hardswish_grad": bounded(same(2), -5, 5),
    "hardtanh": same(1),
    "inside_grad": with_numbers(2, low=(-1, 0), high=(0, 1), slope=(0.1, 2)),
    "le": compared(),
    "leaky_relu": with_numbers(1, slope=(0, 1)),
    "leaky_relu_grad": with_numbers(2, slope=(0, 1)),
    "logical_and": broadcast(),
    "logical_not": same(1),
    "logical_or": broadcast(),
    "lt": compared(),
    "maximum": broadcast(),
    "maximum_grad": broadcast(2, with_grad=True),
    "minimum": broadcast(),
    "ne": compared(),
    "pow": positive(broadcast()),
    "pow_exponent_grad": positive(broadcast(2, with_grad=True)),
    "pow_grad": positive(broadcast(2, with_grad=True)),
    "pow_scalar": positive(with_numbers(1, exponent=(-3, 3))),
    "pow_scalar_grad": positive(with_numbers(2, exponent=(-3, 3))),
    "reciprocal": positive(same(1)),
    "reciprocal_grad": same(2),
    "relu6": bounded(same(1), -2, 8),
    "select": broadcast(3),
    "select_grad": select_grad(),
    "shift": with_numbers(1, by=(-4, 4)),
    "sign": same(1),
    "softplus": bounded(same(1), -30, 30),
    "softplus_grad": bounded(same(2), -30, 30),
    "square": same(1),
    "square_grad": same(2),
    "abs": same(1),
    "abs_grad": same(2),
    "add": broadcast(),
    "attention": attention("qkv"),
    "attention_grad": attention("yqkv"),
    "batch_matmul": batch_matmul("mk", "kn"),
    "batch_matmul_nt": batch_matmul("mk", "nk"),
    "batch_matmul_tn": batch_matmul("km", "kn"),
    "concat": concat(),
    "cos": same(1),
    "cross_entropy": loss(False),
    "cross_entropy_grad": loss(True),
    "div": positive(broadcast()),
    "div_grad": positive(broadcast(2, with_grad=True)),
    "embedding": embedding(False),
    "embedding_grad": embedding(True),
    "exp": same(1),
    "expand": expand(),
    "gelu": same(1),
    "gelu_grad": same(2),
    "layer_norm": rows("xww", eps=True),
    "layer_norm_grad": rows("xxw", eps=True),
    "layer_norm_weight_grad": rows("xx", eps=True),
    "log": positive(same(1)),
    "log_softmax": rows("x"),
    "log_softmax_grad": rows("xx"),
    "matmul": matmul(False),
    "matmul_nt": matmul(True),
    "matmul_tn": matmul_tn(),
    "merge_heads": merge_heads(),
    "mse": same(2),
    "mse_grad": mse_grad(),
    "mul": broadcast(),
    "neg": same(1),
    "reduce_sum": reduce_sum(),
    "relu": same(1),
    "relu_grad": same(2),
    "reshape": reshape(),
    "rms_norm": rows("xw", eps=True),
    "rms_norm_grad": rows("xxw", eps=True),
    "rms_norm_weight_grad": rows("xx", eps=True),
    "rotary": rotary(),
    "rsqrt": positive(same(1)),
    "rsqrt_grad": positive(same(2)),
    "scale": scale(),
    "sigmoid": same(1),
    "sigmoid_grad": same(2),
    "silu": same(1),
    "silu_grad": same(2),
    "sin": same(1),
    "softmax": rows("x"),
    "softmax_grad": rows("xx"),
    "split": split(),
    "split_heads": split_heads(),
    "sqrt": positive(same(1)),
    "sqrt_grad": positive(same(2)),
    "sub": broadcast(),
    "tanh": same(1),
    "tanh_grad": same(2),
    "transpose": transpose(),
    **window_cases.CASES,
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


def torch_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * q @ k.transpose(-1, -2)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -1e30)
    return scores.softmax(-1) @ v


def torch_attention_grad(y: Tensor, q: Tensor, k: Tensor, v: Tensor, **attributes: Any) -> tuple[Tensor, ...]:
    operands = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(torch_attention(*operands, **attributes), operands, y.detach())


def torch_embedding_grad(g: Tensor, ids: Tensor, size: int, degrees: Sequence[int]) -> Tensor:
    del degrees
    return torch.zeros(size, g.shape[-1], dtype=g.dtype).index_add(0, ids.reshape(-1), g.reshape(-1, g.shape[-1]))


def torch_rotary(x: Tensor, base: float, direction: float) -> Tensor:
    """As transformers' Llama applies it."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), frequencies).repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + direction * turned * angles.sin()


def torch_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def of_result(inverse: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The gradient of a function given its result instead of its argument."""
    return lambda g, y: derivative(function, g, inverse(y.detach()))


DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}


def torch_cast(x: Tensor, to: str) -> Tensor:
    return x.to(DTYPES[to])


def torch_inside_grad(g: Tensor, x: Tensor, low: float, high: float, slope: float) -> Tensor:
    return slope * derivative(lambda y: F.hardtanh(y, low, high), g, x)


TORCH: Mapping[str, Callable[..., Any]] = {
    "broadcast_grad": lambda g, shape: g.sum_to_size(shape),
    "cast": torch_cast,
    "clamp": lambda x, low, high: x.clamp(low, high),
    "clamp_grad": lambda g, x, low, high: derivative(lambda y: y.clamp(low, high), g, x),
    "detach": lambda x: x.detach() + 0 * x,
    "elu": F.elu,
    "elu_grad": lambda g, x, alpha: derivative(lambda y: F.elu(y, alpha), g, x),
    "eq": torch.eq,
    "erf": torch.erf,
    "erf_grad": lambda g, x: derivative(torch.erf, g, x),
    "floor": torch.floor,
    "ge": torch.ge,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_tanh_grad": lambda g, x: derivative(lambda y: F.gelu(y, approximate="tanh"), g, x),
    "gt": torch.gt,
    # The backward of PyTorch's own takes 1/6 in single precision.
    "hardsigmoid": lambda x: F.relu6(x + 3) / 6,
    "hardswish": F.hardswish,
    "hardswish_grad": lambda g, x: derivative(F.hardswish, g, x),
    "hardtanh": F.hardtanh,
    "inside_grad": torch_inside_grad,
    "le": torch.le,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "leaky_relu_grad": lambda g, x, slope: derivative(lambda y: F.leaky_relu(y, slope), g, x),
    "logical_and": torch.logical_and,
    "logical_not": torch.logical_not,
    "logical_or": torch.logical_or,
    "lt": torch.lt,
    "maximum": torch.maximum,
    "maximum_grad": lambda g, x, y: derivative(lambda z: torch.maximum(z, y.detach()), g, x.broadcast_to(g.shape)),
    "minimum": torch.minimum,
    "ne": torch.ne,
    "pow": torch.pow,
    "pow_exponent_grad": lambda g, x, y: derivative(lambda z: x.detach() ** z, g, y.broadcast_to(g.shape)),
    "pow_grad": lambda g, x, y: derivative(lambda z: z ** y.detach(), g, x.broadcast_to(g.shape)),
    "pow_scalar": torch.pow,
    "pow_scalar_grad": lambda g, x, exponent: derivative(lambda z: z**exponent, g, x),
    "reciprocal": torch.reciprocal,
    "reciprocal_grad": lambda g, y: -g * y * y,
    "relu6": F.relu6,
    "select": torch.where,
    "select_grad": lambda g, c, chosen: torch.where(c == bool(chosen), g, 0.0),
    "shift": lambda x, by: x + by,
    "sign": torch.sign,
    "softplus": F.softplus,
    "softplus_grad": lambda g, x: derivative(F.softplus, g, x),
    "square": torch.square,
    "square_grad": lambda g, x: derivative(torch.square, g, x),
    "abs": torch.abs,
    "abs_grad": lambda g, x: derivative(torch.abs, g, x),
    "add": torch.add,
    "attention": torch_attention,
    "attention_grad": torch_attention_grad,
    "batch_matmul": torch.matmul,
    "batch_matmul_nt": lambda x, y: x @ y.transpose(-1, -2),
    "batch_matmul_tn": lambda x, y: x.transpose(-1, -2) @ y,
    "cos": torch.cos,
    "div": torch.div,
    "div_grad": lambda g, x, y: -g * x / y.square(),
    "embedding": F.embedding,
    "embedding_grad": torch_embedding_grad,
    "exp": torch.exp,
    "layer_norm": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
    "layer_norm_grad": lambda g, x, w, eps: derivative(lambda z: F.layer_norm(z, w.shape, w.detach(), eps=eps), g, x),
    "layer_norm_weight_grad": lambda g, x, eps: g * F.layer_norm(x, x.shape[-1:], eps=eps),
    "log": torch.log,
    "log_softmax": lambda x: x.log_softmax(-1),
    "log_softmax_grad": lambda g, y: g - y.exp() * g.sum(-1, keepdim=True),
    "neg": torch.neg,
    "rms_norm": torch_rms_norm,
    "rms_norm_grad": lambda g, x, w, eps: derivative(lambda z: torch_rms_norm(z, w.detach(), eps), g, x),
    "rms_norm_weight_grad": lambda g, x, eps: g * torch_rms_norm(x, torch.ones(()), eps),
    "rotary": torch_rotary,
    "rsqrt": torch.rsqrt,
    "rsqrt_grad": of_result(lambda y: y**-2, torch.rsqrt),
    "scale": lambda x, by: by * x,
    "sigmoid": torch.sigmoid,
    "sigmoid_grad": lambda g, y: g * y * (1 - y),
    "silu": F.silu,
    "silu_grad": lambda g, x: derivative(F.silu, g, x),
    "sin": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "softmax_grad": lambda g, y: y * (g - (g * y).sum(-1, keepdim=True)),
    "sqrt": torch.sqrt,
    "sqrt_grad": of_result(torch.square, torch.sqrt),
    "sub": torch.sub,
    "tanh": torch.tanh,
    "tanh_grad": lambda g, y: g * (1 - y * y),
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
    **window_cases.TORCH,
}
