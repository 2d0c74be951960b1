"""Plain attention is found by form and given to cuDNN, here to stand-ins with the signatures of its operators."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DROP, FOUND, case

from unity_ir.errors import UnityError
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.pytorch.attention import cudnn_attention
from unity_ir.ops.attention import ATTENTION_SAVED_GRAD
from unity_ir.plan.local_operator import LocalOperator
from unity_ir.plan.plan import PlanOptions
from unity_ir.tdl.bind import bind
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.parallel import Configuration, line_of_task
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Bound

NAME = "_scaled_dot_product_cudnn_attention"


def dtypes(bound: Bound, dtype: str = "bf16") -> tuple[str, ...]:
    return tuple("f32" if p.name == "logsum" else dtype for p in bound.operands)


def bound_arguments(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> SimpleNamespace:
    """Return the arguments of a call by the names that PyTorch's operator has for them."""
    schema = getattr(torch.ops.aten, name).default._schema
    names = [a.name for a in schema.arguments]
    assert len(given) + len(named) == len(names)
    return SimpleNamespace(**dict(zip(names, given, strict=False)), **named)


def weights(of: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = of.query.shape[1] // of.key.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (of.key, of.value))
    scores = of.scale * of.query @ k.mT
    if of.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return k, v, scores, torch.logsumexp(scores, -1, keepdim=True)


def forward(*given: Any, **named: Any) -> tuple[Any, ...]:
    of = bound_arguments(NAME, (*given, False), named)
    assert of.attn_bias is None
    assert of.dropout_p == 0
    _, v, scores, sums = weights(of)
    return torch.softmax(scores, -1) @ v, sums if of.compute_log_sumexp else None, None, None, 1, 1, None, None, None


def backward(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    of = bound_arguments(f"{NAME}_backward", given, named)
    assert of.dropout_p == 0
    assert (of.max_q, of.max_k) == (of.query.shape[2], of.key.shape[2])
    k, v, scores, _ = weights(of)
    p, y = torch.exp(scores - of.logsumexp), of.grad_out
    ds = of.scale * p * (y @ v.mT - (y * of.out).sum(-1, keepdim=True))
    sums = (x.unflatten(1, (of.key.shape[1], -1)).sum(2) for x in (ds.mT @ of.query, p.mT @ y))
    return (ds @ k, *sums)


def run(bound: Bound, operands: list[Any], instead: bool) -> list[torch.Tensor]:
    """Run the function in float64, by the stand-ins or without a GPU."""
    made = launcher(bound, dtypes(bound), "torch")
    assert made.source.count(NAME) == made.source.count("if has_cudnn(q):") == 1
    source = made.source.replace("if has_cudnn(q):", "if True:") if instead else made.source
    source = source.replace(f"torch.ops.aten.{NAME}_backward", "backward").replace(f"torch.ops.aten.{NAME}", "forward")
    space: dict[str, Any] = {"torch": torch, "forward": forward, "backward": backward}
    exec(source.replace(".float()", ".double()").replace("torch.float32", "torch.float64"), space)
    found = space[made.name](*(torch.from_numpy(o).double() for o in operands))
    return [*found] if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("instead", [True, False])
@pytest.mark.parametrize(
    ("name", "sizes", "attributes"),
    [
        ("attention", (2, 4, 2, 24, 24, 16, 16), {"causal": 1}),
        ("attention", (2, 3, 3, 20, 33, 8, 8), {}),
        ("attention_saving", (1, 6, 2, 24, 24, 16, 16), {"causal": 1}),
        ("attention_saving", (3, 1, 1, 24, 9, 16, 16), {}),
        ("attention_saved_grad", (2, 4, 2, 24, 24, 16, 16), {"causal": 1}),
        ("attention_saved_grad", (1, 3, 3, 20, 33, 16, 16), {}),
    ],
)
def test_results(name: str, sizes: tuple[int, ...], attributes: dict[str, Any], instead: bool) -> None:
    bound, operands = case(name, sizes, attributes)
    for got, want in zip(run(bound, operands, instead), evaluate(bound, operands), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-8)


def test_what_is_not_given_to_it() -> None:
    plain = (1, 4, 2, 24, 24, 16, 16)
    others: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("attention_grad", plain, {}),
        ("attention_dropout_saving", plain, DROP),
        ("attention_dropout_saved_grad", plain, DROP),
        # Of other widths, too wide, of no multiple of 8, or with more keys than queries.
        ("attention", (1, 4, 2, 24, 24, 16, 8), {}),
        ("attention", (1, 4, 2, 24, 24, 136, 136), {}),
        ("attention", (1, 4, 2, 24, 24, 12, 12), {}),
        ("attention_saving", (1, 4, 2, 24, 30, 16, 16), {"causal": 1}),
    ]
    for name, sizes, attributes in others:
        bound, _ = case(name, sizes, attributes)
        assert cudnn_attention(bound, dtypes(bound), {}) is None, (name, sizes)
    for line, shapes, attributes in FOUND:
        bound = bind(parse_line(line), shapes, attributes)
        assert cudnn_attention(bound, ["bf16"] * len(shapes), {}) is None, line
    for name in ("attention_ranges", "attention_ranges_saving", "attention_ranges_saved_grad"):
        bound, _ = case(name, (1, 2, 2, 64, 64, 64, 64), {})
        kinds = tuple("i64" if p.kind == "int" else d for p, d in zip(bound.operands, dtypes(bound), strict=True))
        assert cudnn_attention(bound, kinds, {}) is None, name
    bound, _ = case("attention_saving", plain, {"causal": 1})
    assert cudnn_attention(bound, dtypes(bound), {}) is not None
    assert cudnn_attention(bound, dtypes(bound, "f32"), {}) is None
    divided = line_of_task(bound, Configuration({"i": 2}))
    assert cudnn_attention(divided, dtypes(bound), {"i": "i_start"}) is None
    assert cudnn_attention(line_of_task(bound, Configuration({"h": 2})), dtypes(bound), {}) is not None


@pytest.mark.parametrize("change", ["y[b, (h g), i, d] * v", "scale * p", "sum[x](y", "* k[b, h, t, c]", "* q["])
def test_gradients_that_are_none(change: str) -> None:
    """Lines that differ from the gradients of attention in one place are none, whatever they are called."""
    other = {
        "y[b, (h g), i, d] * v": "a[b, (h g), i, d] * v",
        "scale * p": "2 * scale * p",
        "sum[x](y": "sum[x](a",
        "* k[b, h, t, c]": "* v[b, h, t, c]",
        "* q[": "* y[",
    }[change]
    text = ATTENTION_SAVED_GRAD.text
    assert change in text
    shapes = [(1, 4, 24, 16), (1, 4, 24, 16), (1, 2, 24, 16), (1, 2, 24, 16), (1, 4, 24, 16), (1, 4, 24)]
    for line, found in ((text, True), (text.replace(change, other, 1), False)):
        bound = bind(parse_line(line), shapes, {"scale": 0.25, "causal": 0})
        assert (cudnn_attention(bound, dtypes(bound), {}) is not None) == found, line


def test_triton_elsewhere() -> None:
    """The same lines come before the launches, of which none changes."""
    for name in ("attention_saving", "attention_saved_grad"):
        bound, _ = case(name, (1, 4, 2, 24, 24, 16, 16), {"causal": 1})
        both, triton, by_torch = (launcher(bound, dtypes(bound), impl) for impl in ("cudnn", "triton", "torch"))
        assert (both.compiled, both.kernels) == (triton.compiled, triton.kernels)
        first = both.source.index("    if has_cudnn(q):")
        last = both.source.index("\n", both.source.index("        return", first)) + 1
        assert both.source[first:last] in by_torch.source
        rest = both.source[both.source.index("def attention") : first] + both.source[last:]
        assert rest.replace("_cudnn(", "(") == triton.source


def test_the_option() -> None:
    def chosen(width: int, name: str = "attention_saving", **options: Any) -> str:
        bound, _ = case(name, (1, 4, 2, 24, 24, width, width), DROP if "dropout" in name else {"causal": 1})
        return PlanOptions(**options).implementation(LocalOperator(bound, dtypes(bound), ()))

    assert [chosen(64), chosen(128)] == ["triton", "cudnn"]
    assert [chosen(64, attention="torch"), chosen(128, attention="triton")] == ["cudnn", "triton"]
    assert chosen(128, "attention_dropout_saving", attention="torch") == "triton"
    assert chosen(128, kernels="torch") == "torch"
    with pytest.raises(UnityError, match="attention is 'flash'; it must be triton or torch or auto"):
        PlanOptions(attention="flash")
