"""
Operators against PyTorch's own samples of its operators (OpInfo): shapes, values, gradients through `differentiate`.

`TABLE` says what each of PyTorch's samples is in ours; a sample that ours cannot express converts to None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from opinfo import MOST, Convert, Use, check, infos, one, use
from torch import Tensor

from unity_ir.ops import operator
from unity_ir.pcg.node import Value
from unity_ir.tdl.syntax import AttrValue

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import SampleInput


def plain(sample: SampleInput, arguments: int = 0) -> bool:
    """The sample has so many more tensors and nothing else."""
    tensors = all(isinstance(a, Tensor) for a in sample.args)
    return len(sample.args) == arguments and tensors and not sample.kwargs


def unary(name: str, **attributes: AttrValue) -> Convert:
    return lambda s: use(name, s.input, **attributes) if plain(s) else None


def binary(name: str) -> Convert:
    return lambda s: use(name, s.input, s.args[0]) if plain(s, 1) else None


def cast(to: str) -> Convert:
    return lambda s: use("cast", s.input, to=to)


def dims_of(sample: SampleInput) -> tuple[int, ...] | None:
    """The dims a reduction takes; None where it keeps them, or they are not neighbours."""
    rank = sample.input.dim()
    given = dict(sample.kwargs)
    if given.pop("keepdim", False):
        return None
    dim = given.pop("dim", sample.args[0] if sample.args else list(range(rank)))
    if given or len(sample.args) > 1:
        return None
    dims = sorted(d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim or range(rank)))
    return tuple(dims) if dims == list(range(dims[0], dims[0] + len(dims)) if dims else ()) else None


def reduction(name: str) -> Convert:
    def convert(sample: SampleInput) -> Use | None:
        dims = dims_of(sample)
        if dims is None:
            return None
        count = min(len(dims), sample.input.dim())
        return use(name, sample.input, dim=dims[0] if count else 0, count=count)

    return convert


def last_dim(name: str) -> Convert:
    def convert(s: SampleInput) -> Use | None:
        rank = s.input.dim()
        return use(name, s.input) if rank and len(s.args) == 1 and s.args[0] % rank == rank - 1 else None

    return convert


def along(name: str, *rest: int) -> Convert:
    """With a dim as the first argument, and the tensors of these arguments."""

    def convert(s: SampleInput) -> Use | None:
        rank = s.input.dim()
        others = [s.args[i] for i in rest]
        if not rank or s.kwargs or len(s.args) != 1 + len(rest) or not all(isinstance(t, Tensor) for t in others):
            return None
        dim = s.args[0] % rank
        if name in ("gather", "scatter_add"):
            sizes = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in (s.input, *others)}
            if len(sizes) > 1 or any(t.dim() != rank for t in others):
                return None
        return use(name, s.input, *others, dim=dim)

    return convert


def where(s: SampleInput) -> Use | None:
    return use("select", s.args[0], s.input, s.args[1]) if plain(s, 2) else None


def topk(s: SampleInput) -> Use | None:
    k, dim, largest = (*s.args, *(-1, True)[len(s.args) - 1 :])[:3]
    if s.kwargs or not largest or not s.input.dim() or dim % s.input.dim() != s.input.dim() - 1:
        return None
    return use("topk", s.input, k=k)


def clamp(s: SampleInput) -> Use | None:
    if len(s.args) != 2 or not all(isinstance(a, Tensor) and a.dtype == s.input.dtype for a in s.args):
        return None
    return Use((s.input, *s.args), lambda x, low, high: (one("minimum", one("maximum", x, low), high),))


def hardtanh(s: SampleInput) -> Use | None:
    return None if s.kwargs else use("hardtanh", s.input)


def gelu(s: SampleInput) -> Use:
    return use("gelu_tanh" if s.kwargs["approximate"] == "tanh" else "gelu", s.input)


def dropout(s: SampleInput) -> Use | None:
    """Without chance."""
    return (
        use("dropout", s.input, p=0.0, seed=3) if s.kwargs.get("p") == 0 or not s.kwargs.get("training", True) else None
    )


def loss(name: str) -> Convert:
    def convert(s: SampleInput) -> Use | None:
        given = {k: v for k, v in s.kwargs.items() if k != "reduction"}
        return use(name, s.input, s.args[0]) if not given and s.kwargs.get("reduction", "mean") == "mean" else None

    return convert


def cross_entropy(s: SampleInput) -> Use | None:
    target = s.args[0]
    if s.input.dim() != 2 or s.kwargs or target.is_floating_point():
        return None
    return use("cross_entropy", s.input, target)


def embedding(s: SampleInput) -> Use | None:
    return None if s.kwargs else use("embedding", s.args[0], s.input)


def embedding_bag(s: SampleInput) -> Use | None:
    if set(s.kwargs) - {"mode", "per_sample_weights"} or s.kwargs["mode"] != "sum" or s.args[0].dim() != 2:
        return None
    return None if s.kwargs.get("per_sample_weights") is not None else use("embedding_bag", s.args[0], s.input)


def batch_norm(s: SampleInput) -> Use | None:
    mean, variance, w, b = s.args
    if w is None or b is None or s.input.dim() < 2:
        return None
    eps = s.kwargs.get("eps", 1e-5)
    if s.kwargs.get("training"):

        def build(x: Value, w: Value, b: Value) -> tuple[Value, ...]:
            center = one("batch_mean", x)
            shift, square = operator("batch_stats")(x, center)
            assert isinstance(shift, Value)
            assert isinstance(square, Value)
            return (one("batch_norm", x, shift, square, center, w, b, eps=eps),)

        return Use((s.input, w, b), build)
    mean, variance = mean.detach(), variance.detach()
    return use("batch_norm", s.input, torch.zeros_like(mean)[None], variance[None], mean[None], w, b, eps=eps)


def layer_norm(s: SampleInput) -> Use | None:
    sizes, w, b = (*s.args, None, None)[:3]
    if len(sizes) != 1 or w is None or b is None:
        return None
    return use("layer_norm", s.input, w, b, eps=s.kwargs.get("eps", 1e-5))


def linear(s: SampleInput) -> Use | None:
    if len(s.args) != 2 or s.args[0].dim() != 2 or s.args[1] is None:
        return None
    return Use((s.input, *s.args), lambda x, w, b: (one("add", one("matmul_nt", x, w), b),))


def matmul(s: SampleInput) -> Use | None:
    x, y = s.input, s.args[0]
    if y.dim() == 2:
        return use("matmul", x, y)
    return use("batch_matmul", x, y) if y.dim() == x.dim() >= 3 and x.shape[:-2] == y.shape[:-2] else None


def attention(s: SampleInput) -> Use | None:
    if s.input.dim() != 4 or s.kwargs.get("dropout_p", 0) or set(s.kwargs) - {"dropout_p", "is_causal"}:
        return None
    if len({t.shape[1] for t in (s.input, *s.args)}) > 1:
        return None
    scale, causal = s.input.shape[-1] ** -0.5, int(s.kwargs.get("is_causal", False))
    return use("attention", s.input, *s.args, scale=scale, causal=causal)


def one_hot(s: SampleInput) -> Use | None:
    return use("one_hot", s.input, classes=s.kwargs["num_classes"]) if s.kwargs["num_classes"] > 0 else None


def cat(s: SampleInput) -> Use | None:
    dim = s.kwargs.get("dim", 0)
    return use("concat", *s.input, dim=dim % s.input[0].dim()) if s.input[0].dim() else None


def split(s: SampleInput) -> Use | None:
    dim = s.args[1] if len(s.args) > 1 else 0
    return use("split", s.input, dim=dim % s.input.dim(), sizes=tuple(s.args[0])) if min(s.args[0]) else None


def permute(s: SampleInput) -> Use:
    return use("transpose", s.input, perm=tuple(d % s.input.dim() for d in s.args[0]))


def transpose(s: SampleInput) -> Use | None:
    rank = s.input.dim()
    if not rank:
        return None
    order = list(range(rank))
    a, b = (d % rank for d in s.args)
    order[a], order[b] = order[b], order[a]
    return use("transpose", s.input, perm=tuple(order))


def reshape(s: SampleInput) -> Use:
    return use("reshape", s.input, shape=tuple(s.input.reshape(s.args[0]).shape))


def flatten(s: SampleInput) -> Use:
    return use("reshape", s.input, shape=tuple(torch.flatten(s.input, **s.kwargs).shape))


def expand(s: SampleInput) -> Use | None:
    """As a sum with zeros, which broadcasts."""
    shape = tuple(s.input.expand(s.args[0]).shape)
    return use("add", s.input, torch.zeros(shape, dtype=s.input.dtype))


FLOAT, WHOLE, CONDITION = torch.float64, torch.int64, torch.bool

TABLE: Mapping[tuple[str, torch.dtype], tuple[Convert, int]] = {
    **{
        (name, FLOAT): (unary(ours, **attributes), least)
        for name, ours, attributes, least in (
            *((n, n, {}, 2) for n in ("exp", "log", "rsqrt", "sigmoid", "cos", "square", "reciprocal")),
            *((n, n, {}, 1) for n in ("sqrt", "tanh", "abs", "sin", "neg", "erf", "floor", "sign")),
            *((f"nn.functional.{n}", n, {}, 2) for n in ("relu", "relu6", "silu", "hardsigmoid", "hardswish")),
            ("nn.functional.leaky_relu", "leaky_relu", {"slope": 0.01}, 9),
            ("nn.functional.elu", "elu", {"alpha": 1.0}, 2),
        )
    },
    **{(name, FLOAT): (binary(name), 8) for name in ("add", "sub", "mul", "div", "maximum", "minimum", "pow")},
    **{(name, kind): (binary(name), 8) for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in (FLOAT, WHOLE)},
    **{(name, CONDITION): (binary(name), 8) for name in ("logical_and", "logical_or")},
    ("logical_not", CONDITION): (unary("logical_not"), 2),
    ("where", FLOAT): (where, 6),
    ("where", WHOLE): (where, 6),
    **{(torch_name, FLOAT): (cast(to), 5) for torch_name, to in (("float", "f32"), ("long", "i64"), ("bool", "bool"))},
    ("double", WHOLE): (cast("f64"), 5),
    ("sum", FLOAT): (reduction("reduce_sum"), 12),
    ("mean", FLOAT): (reduction("reduce_mean"), 12),
    ("amax", FLOAT): (reduction("reduce_max"), 12),
    ("amin", FLOAT): (reduction("reduce_min"), 12),
    ("prod", FLOAT): (reduction("reduce_prod"), 12),
    ("cumsum", FLOAT): (along("cumsum"), 2),
    ("gather", FLOAT): (along("gather", 1), 3),
    ("index_select", FLOAT): (along("index_select", 1), 2),
    ("scatter_add", FLOAT): (along("scatter_add", 1, 2), 3),
    ("topk", FLOAT): (topk, 1),
    ("clamp", FLOAT): (clamp, 2),
    ("nn.functional.hardtanh", FLOAT): (hardtanh, 2),
    ("nn.functional.gelu", FLOAT): (gelu, 8),
    ("nn.functional.dropout", FLOAT): (dropout, 12),
    ("nn.functional.mse_loss", FLOAT): (loss("mse"), 4),
    ("nn.functional.binary_cross_entropy", FLOAT): (loss("bce"), 6),
    ("nn.functional.binary_cross_entropy_with_logits", FLOAT): (loss("bce_with_logits"), 6),
    ("nn.functional.cross_entropy", FLOAT): (cross_entropy, 1),
    ("nn.functional.embedding", FLOAT): (embedding, 3),
    ("nn.functional.embedding_bag", FLOAT): (embedding_bag, 2),
    ("nn.functional.one_hot", WHOLE): (one_hot, 3),
    ("nn.functional.batch_norm", FLOAT): (batch_norm, 9),
    ("nn.functional.layer_norm", FLOAT): (layer_norm, 2),
    ("nn.functional.linear", FLOAT): (linear, 7),
    ("nn.functional.scaled_dot_product_attention", FLOAT): (attention, 4),
    ("softmax", FLOAT): (last_dim("softmax"), 4),
    ("log_softmax", FLOAT): (last_dim("log_softmax"), 4),
    ("matmul", FLOAT): (matmul, 4),
    ("mm", FLOAT): (matmul, 1),
    ("bmm", FLOAT): (matmul, 1),
    ("cat", FLOAT): (cat, 6),
    ("split_with_sizes", FLOAT): (split, 3),
    ("permute", FLOAT): (permute, 4),
    ("transpose", FLOAT): (transpose, 7),
    ("reshape", FLOAT): (reshape, 7),
    ("flatten", FLOAT): (flatten, 6),
    ("expand", FLOAT): (expand, 9),
}
"""Of each of PyTorch's operators and an element type: what its samples are in ours, and how many have to be."""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), TABLE, ids=lambda part: str(part).removeprefix("torch."))
def test_equals_pytorch_on_its_own_samples(name: str, dtype: torch.dtype):
    convert, least = TABLE[name, dtype]
    info = infos()[name]
    samples: Sequence[SampleInput] = list(info.sample_inputs("cpu", dtype, requires_grad=dtype == FLOAT))
    converted = 0
    for sample in samples:
        with torch.no_grad() if dtype != FLOAT else torch.enable_grad():
            converted += check(info, sample, convert)
        if converted == MOST:
            break
    assert converted >= least, f"{converted} of {len(samples)} samples were converted"


def test_the_table_converts_something():
    assert sum(least for _, least in TABLE.values()) >= 350
