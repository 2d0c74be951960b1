"""Small models as compact graphs, and the same written by hand in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from operator_twins import torch_dropout
from torch import Tensor
from torch.nn import functional as F

from unity_ir.machine import Level, Machine, load
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.types import tensor_type

Reference = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]


def data(name: str, *shape: int, dtype: str = "f32") -> Node:
    return leaf("input", tensor_type(shape, dtype), name=name)


def weight(name: str, *shape: int) -> Value:
    return leaf("weight", tensor_type(shape, "f32"), name=name).result


def mlp() -> Graph:
    """Biases, a fused and an unfused activation, cross-entropy."""
    x, labels = data("x", 24, 16), data("labels", 24, dtype="i64")
    h = apply("matmul", [x.result, weight("fc1.weight", 16, 48)]).result
    h = apply("gelu", [apply("add", [h, weight("fc1.bias", 48)]).result]).result
    h = apply("matmul", [h, weight("fc2.weight", 48, 24)], {"act": "relu"}).result
    logits = apply("add", [apply("matmul", [h, weight("fc3.weight", 24, 12)]).result, weight("fc3.bias", 12)]).result
    return Graph("mlp", (x, labels), (apply("cross_entropy", [logits, labels.result]).result,))


def mlp_torch(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    h = F.gelu(batch["x"] @ w["fc1.weight"] + w["fc1.bias"])
    h = F.relu(h @ w["fc2.weight"])
    return F.cross_entropy(h @ w["fc3.weight"] + w["fc3.bias"], batch["labels"])


def stopped() -> Graph:
    """A gate that gets no gradient, a residual beside it that does, and a weight that only decides."""
    x, y = data("x", 12, 24), data("y", 12, 24)
    h = apply("matmul", [x.result, weight("in", 24, 24)]).result
    h = apply("select", [apply("gt", [h, weight("least", 24)]).result, h, y.result]).result
    gate = apply("detach", [apply("tanh", [h]).result]).result
    out = apply("matmul", [apply("mul", [gate, h]).result, weight("out", 24, 24)]).result
    return Graph("stopped", (x, y), (apply("mse", [out, y.result]).result,))


def stopped_torch(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    h = batch["x"] @ w["in"]
    h = torch.where(h > w["least"], h, batch["y"])
    return F.mse_loss((torch.tanh(h).detach() * h) @ w["out"], batch["y"])


def residual() -> Graph:
    """A value with three users, a gate, a sum of branches, mean squared error."""
    x, y = data("x", 12, 24), data("y", 12, 24)
    h = apply("matmul", [x.result, weight("in", 24, 24)]).result
    gate = apply("matmul", [h, weight("gate", 24, 24)], {"act": "gelu"}).result
    branch = apply("mul", [gate, h]).result
    out = apply("matmul", [apply("add", [branch, h]).result, weight("out", 24, 24)]).result
    return Graph("residual", (x, y), (apply("mse", [out, y.result]).result,))


def residual_torch(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    h = batch["x"] @ w["in"]
    h = h + F.gelu(h @ w["gate"]) * h
    return F.mse_loss(h @ w["out"], batch["y"])


def mixed() -> Graph:
    """Conditions, integers, broadcasts on both sides, dropout, element types, reductions."""
    x, y, m, t = data("x", 12, 24), data("y", 12, 1), data("m", 12, 24, dtype="bool"), data("t", 12, 8, dtype="i64")
    h = apply("matmul", [x.result, weight("in", 24, 24)]).result
    h = apply("mul", [apply("add", [y.result, h]).result, weight("scale", 1, 24)]).result
    h = apply("dropout", [h], {"p": 0.25, "seed": 5}).result
    some = apply("logical_or", [apply("lt", [x.result, y.result]).result, m.result]).result
    h = apply("select", [some, h, weight("else", 24)]).result
    far = apply("cast", [apply("ge", [x.result, y.result]).result], {"to": "f32"}).result
    h = apply("maximum", [h, apply("mul", [far, weight("floor", 1, 24)]).result]).result
    rows = apply("gather", [h, t.result], {"dim": 1}).result
    rows = apply("softplus", [apply("reduce_mean", [rows], {"dim": 1}).result]).result
    return Graph("mixed", (x, y, m, t), (apply("reduce_mean", [rows], {"dim": 0}).result,))


def mixed_torch(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    x, y, m = batch["x"], batch["y"], batch["m"]
    h = torch_dropout((y + x @ w["in"]) * w["scale"], 0.25, 5)
    h = torch.where((x < y) | m, h, w["else"])
    h = torch.maximum(h, (x >= y) * w["floor"])
    return F.softplus(h.gather(1, batch["t"]).mean(1)).mean()


def shapes() -> Graph:
    """Everything that only moves elements: heads, transposition, reshape, concat, split, and a reduction."""
    x, y = data("x", 4, 6, 24), data("y", 4, 24)
    h = apply("matmul", [x.result, weight("w", 24, 48)]).result
    a, b = apply("split", [h], {"dim": 2, "sizes": (24, 24)}).results
    heads = apply("split_heads", [a], {"heads": 4}).result
    turned = apply("transpose", [heads], {"perm": (0, 1, 3, 2)}).result
    back = apply("merge_heads", [apply("transpose", [turned], {"perm": (0, 1, 3, 2)}).result]).result
    joined = apply("concat", [apply("relu", [back]).result, b], {"dim": 2}).result
    flat = apply("reshape", [joined], {"shape": (24, 48)}).result
    mixed = apply("reshape", [apply("matmul", [flat, weight("v", 48, 24)]).result], {"shape": (4, 6, 24)}).result
    total = apply("reduce_sum", [mixed], {"dim": 1}).result
    return Graph("shapes", (x, y), (apply("mse", [total, y.result]).result,))


def shapes_torch(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    a, b = (batch["x"] @ w["w"]).split(24, 2)
    joined = torch.cat([F.relu(a), b], 2)
    return F.mse_loss((joined @ w["v"]).sum(1), batch["y"])


def convolved(h: Value, name: str, out: int, kernel: int, stride: int = 1, groups: int = 1) -> Value:
    w = weight(name, out, h.type.shape[1] // groups, kernel, kernel)
    attributes = {"stride": (stride, stride), "padding": (kernel // 2,) * 2, "dilation": (1, 1), "groups": groups}
    return apply("conv2d", [h, w], attributes).result


def cnn() -> Graph:
    """Convolutions of several strides and groups, pooling of both kinds."""
    x, labels = data("x", 4, 4, 16, 8), data("labels", 4, dtype="i64")
    h = apply("relu", [convolved(x.result, "conv1", 8, 5)]).result
    pool = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    h = apply("max_pool2d", [h], {**pool, "dilation": (1, 1)}).result
    h = apply("add", [h, apply("relu", [convolved(h, "conv2", 8, 5, groups=2)]).result]).result
    h = apply("avg_pool2d", [h], {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1)}).result
    h = convolved(h, "conv3", 4, 1, 2)
    h = apply("reshape", [h], {"shape": (4, 32)}).result
    logits = apply("matmul", [h, weight("fc", 32, 6)]).result
    return Graph("cnn", (x, labels), (apply("cross_entropy", [logits, labels.result]).result,))


def cnn_torch(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    h = F.relu(F.conv2d(batch["x"], w["conv1"], padding=2))
    h = F.max_pool2d(h, 3, 2, 1)
    h = h + F.relu(F.conv2d(h, w["conv2"], padding=2, groups=2))
    h = F.conv2d(F.avg_pool2d(h, 3, 1, 1), w["conv3"], stride=2)
    return F.cross_entropy(h.flatten(1) @ w["fc"], batch["labels"])


def normed() -> Graph:
    """A bias before a batch norm, which takes it off again: its gradient is 0, but for rounding."""
    x, labels = data("x", 8, 4, 6, 6), data("labels", 8, dtype="i64")
    h = convolved(x.result, "conv", 8, 3)
    h = apply("add", [h, apply("reshape", [weight("conv.bias", 8)], {"shape": (8, 1, 1)}).result]).result
    center = apply("batch_mean", [h]).result
    stats = apply("batch_stats", [h, center]).results
    h = apply("batch_norm", [h, *stats, center, weight("bn.weight", 8), weight("bn.bias", 8)], {"eps": 1e-5}).result
    h = apply("reshape", [apply("relu", [h]).result], {"shape": (8, 288)}).result
    logits = apply("matmul", [h, weight("fc", 288, 6)]).result
    return Graph("normed", (x, labels), (apply("cross_entropy", [logits, labels.result]).result,))


def deep(layers: int = 20) -> Graph:
    """
    Convolutions and batch norms over four values, one after the other, of which each multiplies what those before it
    rounded: with 20 layers, gradients in float32 are off by more than a check allows without float64.
    """
    x, labels = data("x", 4, 16, 1, 1), data("labels", 4, dtype="i64")
    h = x.result
    for i in range(layers):
        h = convolved(h, f"conv{i}", 16, 1)
        center = apply("batch_mean", [h]).result
        stats = apply("batch_stats", [h, center]).results
        scale, shift = (weight(f"bn{i}.{n}", 16) for n in ("weight", "bias"))
        h = apply("relu", [apply("batch_norm", [h, *stats, center, scale, shift], {"eps": 1e-5}).result]).result
    h = apply("reshape", [h], {"shape": (4, 16)}).result
    logits = apply("matmul", [h, weight("fc", 16, 6)]).result
    return Graph("deep", (x, labels), (apply("cross_entropy", [logits, labels.result]).result,))


def attention() -> Graph:
    """Attention over heads of which two share their keys, causal, and what saves of it the backward reads."""
    x, y = data("x", 4, 6, 16), data("y", 4, 6, 16)
    q, k, v = (apply("matmul", [x.result, weight(n, 16, s)]).result for n, s in (("q", 16), ("k", 8), ("v", 8)))
    q, k, v = (apply("split_heads", [h], {"heads": n}).result for h, n in ((q, 4), (k, 2), (v, 2)))
    h = apply("attention", [q, k, v], {"scale": 0.5, "causal": 1}).result
    out = apply("matmul", [apply("merge_heads", [h]).result, weight("out", 16, 16)]).result
    return Graph("attention", (x, y), (apply("mse", [out, y.result]).result,))


def attention_torch(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    q, k, v = ((batch["x"] @ w[n]).unflatten(-1, (h, 4)).transpose(1, 2) for n, h in (("q", 4), ("k", 2), ("v", 2)))
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    return F.mse_loss(h.transpose(1, 2).flatten(2) @ w["out"], batch["y"])


def masked() -> Graph:
    """Return a mean over the labels that are not 0; how many those are depends on the batch."""
    x, labels = data("x", 8, 3, 24), leaf("input", tensor_type((8, 3), "i64"), name="labels")
    h = apply("tanh", [apply("matmul", [x.result, weight("w", 24, 24)]).result]).result
    scores = apply("log_softmax", [apply("matmul", [h, weight("u", 24, 12)]).result]).result
    zero = leaf("constant", tensor_type((), "i64"), value=0.0).result
    counts = apply("ne", [labels.result, zero]).result
    found = apply("class_score", [scores, labels.result]).result
    kept = apply("select", [counts, found, leaf("constant", tensor_type((), "f32"), value=0.0).result]).result
    total = apply("reduce_sum", [kept], {"dim": 0, "count": 2}).result
    number = apply("reduce_sum", [apply("cast", [counts], {"to": "f32"}).result], {"dim": 0, "count": 2}).result
    return Graph("masked", (x, labels), (apply("div", [apply("neg", [total]).result, number]).result,))


def machine(name: str) -> Machine:
    """
    A preset, or `ideal:2x2`: levels of those sizes on which starting a kernel or a message costs nothing, so that even
    a small model is worth dividing.
    """
    if not name.startswith("ideal:"):
        return load(name)
    sizes = [int(s) for s in name.removeprefix("ideal:").split("x")]
    box = load("box:2")
    levels = tuple(Level(f"level{i}", size, 1e11 * 4**i, 0.0) for i, size in enumerate(sizes))
    half = box.device.flops["f16"]
    device = replace(box.device, launch=0.0, flops={**box.device.flops, "bf16": half, "f8e4m3": 2 * half})
    return replace(box, name=name, device=device, levels=levels, overhead=0.0, protocols=())


MODELS: dict[str, tuple[Callable[[], Graph], Reference]] = {
    "attention": (attention, attention_torch),
    "cnn": (cnn, cnn_torch),
    "mixed": (mixed, mixed_torch),
    "mlp": (mlp, mlp_torch),
    "residual": (residual, residual_torch),
    "stopped": (stopped, stopped_torch),
    "shapes": (shapes, shapes_torch),
}


def by_hand(reference: Reference, weights: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by name of the hand-written model, in double precision."""
    w = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in weights.items()}
    inputs = {
        n: torch.tensor(a) if a.dtype.kind in "ib" else torch.tensor(a, dtype=torch.float64) for n, a in batch.items()
    }
    loss = reference(w, inputs)
    found = torch.autograd.grad(loss, list(w.values()), allow_unused=True, materialize_grads=True)
    return loss.item(), {n: grad.numpy() for n, grad in zip(w, found, strict=True)}
