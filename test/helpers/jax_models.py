"""Losses as people write them in JAX, without libraries, each with its arguments: weights, then a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Case = tuple[Callable[..., Any], tuple[Any, ...]]

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape) * 0.3


def tokens(*shape: int, below: int = 16) -> np.ndarray:
    return RANDOM.integers(0, below, shape)


def perceptron() -> Case:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        for layer in weights[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ weights[-1]["w"] + weights[-1]["b"]
        return -jnp.mean(jnp.sum(jax.nn.one_hot(y, 4) * jax.nn.log_softmax(logits), axis=-1))

    sizes = [8, 16, 16, 4]
    weights = [{"w": normal(a, b), "b": normal(b)} for a, b in pairwise(sizes)]
    return loss, (weights, normal(8, 8), tokens(8, below=4))


def layer_norm(x: Any, p: Any) -> Any:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.var(x, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def gpt() -> Case:
    """GPT-2 as in nanoGPT-like code: stacked layers under a scan, tied embeddings."""
    width, heads, layers, length, vocab = 16, 4, 2, 8, 16

    def block(x: Any, p: Any) -> tuple[Any, None]:
        b, s, _ = x.shape
        h = layer_norm(x, p["ln_1"])
        q, k, v = jnp.split(h @ p["qkv"], 3, axis=-1)
        q, k, v = (t.reshape(b, s, heads, -1).transpose(0, 2, 1, 3) for t in (q, k, v))
        scores = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(width // heads)
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf)
        y = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(b, s, -1)
        x = x + y @ p["out"]
        h = jax.nn.gelu(layer_norm(x, p["ln_2"]) @ p["up"])
        return x + h @ p["down"], None

    def loss(weights: Any, batch: Any) -> Any:
        x = weights["wte"][batch["tokens"]] + weights["wpe"]
        x, _ = lax.scan(jax.checkpoint(block), x, weights["blocks"])
        logits = layer_norm(x, weights["ln_f"]) @ weights["wte"].T
        logs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logs, batch["labels"][..., None], axis=-1).mean()

    def norm(*lead: int) -> Any:
        return {"scale": 1 + normal(*lead, width), "bias": normal(*lead, width)}

    blocks = {
        "ln_1": norm(layers),
        "qkv": normal(layers, width, 3 * width),
        "out": normal(layers, width, width),
        "ln_2": norm(layers),
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width),
    }
    weights = {"wte": normal(vocab, width), "wpe": normal(length, width), "blocks": blocks, "ln_f": norm()}
    return loss, (weights, {"tokens": tokens(8, length), "labels": tokens(8, length)})


def llama() -> Case:
    """Llama as in MaxText or Equinox code: einsums, rotary positions, grouped queries, logsumexp."""
    width, heads, groups, layers, length, vocab = 16, 4, 2, 2, 8, 16
    size = width // heads

    def rms(x: Any, scale: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale

    def rotate(x: Any) -> Any:
        angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(0, size, 2) / size)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def layer(x: Any, p: Any) -> Any:
        h = rms(x, p["attention_norm"])
        q = jnp.einsum("bse,ehd->bshd", h, p["q"])
        k, v = (jnp.einsum("bse,ehd->bshd", h, p[n]) for n in ("k", "v"))
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + jnp.einsum("bshd,hde->bse", y, p["o"])
        h = rms(x, p["mlp_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(weights: Any, ids: Any, labels: Any) -> Any:
        x = jnp.take(weights["embedding"], ids, axis=0)
        for p in weights["layers"]:
            x = layer(x, p)
        logits = rms(x, weights["norm"]) @ weights["head"]
        log_sums = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.mean(log_sums - picked)

    def weights_of_layer() -> Any:
        return {
            "attention_norm": 1 + normal(width),
            "q": normal(width, heads, size),
            "k": normal(width, groups, size),
            "v": normal(width, groups, size),
            "o": normal(heads, size, width),
            "mlp_norm": 1 + normal(width),
            "gate": normal(width, 2 * width),
            "up": normal(width, 2 * width),
            "down": normal(2 * width, width),
        }

    weights = {
        "embedding": normal(vocab, width),
        "layers": [weights_of_layer() for _ in range(layers)],
        "norm": 1 + normal(width),
        "head": normal(width, vocab),
    }
    return loss, (weights, tokens(4, length), tokens(4, length))


def flax_attention() -> Case:
    """Attention of several heads by einsums, as in Flax, with a mask of the batch and dropout turned off."""

    def loss(weights: Any, batch: Any) -> Any:
        x = batch["x"]
        q, k, v = (jnp.einsum("...e,ehd->...hd", x, weights[n]["kernel"]) + weights[n]["bias"] for n in "qkv")
        scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(q.shape[-1]).astype(x.dtype), k)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        if "mask" in batch:
            causal = causal & batch["mask"][:, None, None, :]
        scores = jnp.where(causal, scores, jnp.finfo(x.dtype).min)
        y = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        return jnp.mean(jnp.einsum("...hd,hde->...e", y, weights["out"]) ** 2)

    weights: dict[str, Any] = {n: {"kernel": normal(8, 2, 4), "bias": normal(2, 4)} for n in "qkv"}
    weights["out"] = normal(2, 4, 8)
    return loss, (weights, {"x": normal(4, 6, 8)})


def masked_attention() -> Case:
    """The same, with a mask in the batch."""
    loss, (weights, batch) = flax_attention()
    return loss, (weights, batch | {"mask": np.arange(6) < np.array([[6], [4], [3], [5]])})


def convolutional() -> Case:
    """A small residual network in NHWC, with batch norm over the batch, as Flax has it."""

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x: Any, p: Any) -> Any:
        mean, square = jnp.mean(x, (0, 1, 2)), jnp.mean(jnp.square(x), (0, 1, 2))
        return (x - mean) * (lax.rsqrt(square - jnp.square(mean) + 1e-5) * p["scale"]) + p["bias"]

    def loss(weights: Any, batch: Any) -> Any:
        x = jax.nn.relu(norm(conv(batch["image"], weights["stem"], 2), weights["bn0"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        y = jax.nn.relu(norm(conv(x, weights["conv1"]), weights["bn1"]))
        x = jax.nn.relu(x + norm(conv(y, weights["conv2"]), weights["bn2"]))
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        logits = jnp.mean(x, (1, 2)) @ weights["head"]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * batch["label"], -1))

    def bn(width: int) -> Any:
        return {"scale": 1 + normal(width), "bias": normal(width)}

    weights = {"stem": normal(3, 3, 3, 4), "conv1": normal(3, 3, 4, 4), "conv2": normal(3, 3, 4, 4)}
    weights |= {"bn0": bn(4), "bn1": bn(4), "bn2": bn(4), "head": normal(4, 4)}
    label = np.eye(4)[tokens(4, below=4)]
    return loss, (weights, {"image": normal(4, 16, 16, 3), "label": label})


def mixture() -> Case:
    """A mixture of experts by einsums with a mask of the chosen ones, in the manner of GShard's dense form."""

    def loss(weights: Any, batch: Any) -> Any:
        x, y = batch
        scores = jax.nn.softmax(x @ weights["router"])
        chances, chosen = lax.top_k(scores, 2)
        share = jnp.sum(jax.nn.one_hot(chosen, 4) * chances[..., None], axis=1)
        h = jax.nn.relu(jnp.einsum("te,xef->txf", x, weights["up"]))
        out = jnp.einsum("txf,xfe,tx->te", h, weights["down"], share)
        fraction = jnp.mean(lax.stop_gradient(share > 0).astype(x.dtype), 0)
        return jnp.mean((out - y) ** 2) + 0.01 * 4 * jnp.sum(fraction * jnp.mean(scores, 0))

    weights = {"router": normal(8, 4), "up": normal(4, 8, 16), "down": normal(4, 16, 8)}
    return loss, (weights, (normal(12, 8), normal(12, 8)))


def recurrent() -> Case:
    """An LSTM under a scan over time."""

    def loss(weights: Any, x: Any, y: Any) -> Any:
        def step(carry: Any, at: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(at @ weights["x"] + h @ weights["h"] + weights["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], 8), x.dtype)
        _, hidden = lax.scan(step, (start, start), jnp.swapaxes(x, 0, 1))
        return jnp.mean((hidden[-1] @ weights["out"] - y) ** 2) + 1e-3 * jnp.mean(jnp.abs(hidden))

    weights = {"x": normal(4, 32), "h": normal(8, 32), "b": normal(32), "out": normal(8, 2)}
    return loss, (weights, normal(4, 5, 4), normal(4, 2))


def decoder() -> Case:
    """Transposed convolutions, dilated and grouped ones, and padding inside."""

    def loss(weights: Any, x: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_transpose(x, weights["up"], (2, 2), "SAME", dimension_numbers=dims)
        y = lax.conv_general_dilated(
            y, weights["wide"], (1, 1), [(2, 1), (0, 3)], rhs_dilation=(2, 2), dimension_numbers=dims
        )
        y = lax.conv_general_dilated(y, weights["deep"], (1, 1), "SAME", feature_group_count=4, dimension_numbers=dims)
        y = lax.pad(y, jnp.zeros((), y.dtype), ((0, 0, 0), (1, -1, 1), (0, 2, 0), (0, 0, 0)))
        z = lax.reduce_window(y[..., 0], -jnp.inf, lax.max, (1, 3, 2), (1, 2, 1), ((0, 0), (2, 2), (0, 1)))
        z = (
            z
            + lax.reduce_window(y[:, 0], 0.0, lax.add, (1, 2, 1), (1, 1, 1), ((0, 0), (1, 0), (0, 0)))[
                :, : z.shape[1], :1
            ]
        )
        return jnp.mean(jnp.square(jax.nn.elu(y))) + jnp.mean(jnp.flip(y, 1)[:, ::2]) + jnp.mean(z)

    weights = {"up": normal(3, 3, 2, 4), "wide": normal(3, 3, 4, 4), "deep": normal(3, 3, 1, 8)}
    return loss, (weights, normal(2, 4, 4, 2))


def indexed() -> Case:
    """Segments, scatters, sorted and cumulated values, and choices by integers."""

    def loss(weights: Any, batch: Any) -> Any:
        x = weights["table"][batch["ids"]] * batch["x"][:, None]
        sums = jax.ops.segment_sum(x, batch["segment"], num_segments=4)
        y = sums.at[1].add(weights["b"]).at[:, 2].set(0.5)
        z = jnp.cumsum(jnp.sort(y, axis=-1), axis=0)[:, ::-1]
        best = jnp.argmax(z, axis=-1)
        picked = jnp.take_along_axis(z, best[:, None], axis=1)[:, 0] + z[jnp.arange(4), batch["column"]]
        capped = jnp.clip(picked, -1.0, 1.0) + jnp.where(picked > 0, jnp.log1p(jnp.abs(picked)), picked**3)
        rolled = jnp.roll(z, 1, axis=0) * lax.dynamic_slice(weights["table"], (2, 0), (4, 8))
        return jnp.sum(capped) + jnp.mean(rolled) + jnp.max(z) + jnp.sum(jnp.tril(z[:, :4]))

    batch = {"ids": tokens(10), "x": normal(10), "segment": tokens(10, below=4), "column": tokens(4, below=8)}
    return loss, ({"table": normal(16, 8), "b": normal(8)}, batch)


MODELS: Mapping[str, Callable[[], Case]] = {
    "perceptron": perceptron,
    "gpt": gpt,
    "llama": llama,
    "flax_attention": flax_attention,
    "masked_attention": masked_attention,
    "convolutional": convolutional,
    "mixture": mixture,
    "recurrent": recurrent,
    "decoder": decoder,
    "indexed": indexed,
}
