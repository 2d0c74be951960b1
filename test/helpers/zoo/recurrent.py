"""Recurrent networks by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.common import Keys, Weights, linear

SMALL: dict[str, dict[str, int]] = {
    "lstm_stack": {"batch": 2, "steps": 3, "layers": 2, "hidden": 4, "features": 3, "classes": 5},
    "nmt": {"batch": 2, "steps": 3, "layers": 2, "hidden": 4, "vocabulary": 11},
    "rnnlm": {"batch": 2, "steps": 2, "layers": 2, "hidden": 4, "vocabulary": 11},
    "rnntc": {"batch": 2, "steps": 3, "layers": 2, "hidden": 4, "vocabulary": 11, "classes": 5},
}

State = tuple[Tensor, Tensor]


def layer(w: Weights, name: str, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """The hidden states [batch, steps, hidden] of one layer, and its last state."""
    bias = (w[f"{name}.bias_ih"] + w[f"{name}.bias_hh"]).flatten()
    w_x, w_h = w[f"{name}.weight_ih"].flatten(1), w[f"{name}.weight_hh"].flatten(1)
    found: list[Tensor] = []
    h, c = state or (None, x.new_zeros(len(x), w_h.shape[0]))
    for step in x.unbind(1):
        z = step @ w_x + bias
        i, f, g, o = (z if h is None else z + h @ w_h).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        found.append(h)
    assert h is not None
    return torch.stack(found, 1), (h, c)


def stack(w: Weights, keys: Keys, x: Tensor) -> Tensor:
    for i in range(keys["layers"]):
        x, _ = layer(w, f"lstm.{i}", x)
    return x


def rnntc(w: Weights, keys: Keys, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(linear(w, "softmax", stack(w, keys, w["embedding.weight"][tokens])[:, -1]), labels)


def rnnlm(w: Weights, keys: Keys, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = linear(w, "softmax", stack(w, keys, w["embedding.weight"][tokens]))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm_stack(w: Weights, keys: Keys, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(linear(w, "softmax", stack(w, keys, x)).flatten(0, 1), labels.flatten())


def nmt(w: Weights, keys: Keys, tokens: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    source, target = w["encoder.embedding.weight"][tokens], w["decoder.embedding.weight"][words]
    states: list[State] = []
    for i in range(keys["layers"]):
        source, state = layer(w, f"encoder.lstm.{i}", source)
        states.append(state)
    for i, state in enumerate(states):
        target, _ = layer(w, f"decoder.lstm.{i}", target, state)
    query, key = linear(w, "attention.query", target), linear(w, "attention.key", source)
    scores = linear(w, "attention.score", (query.unsqueeze(2) + key.unsqueeze(1)).tanh()).squeeze(3)
    context = scores.softmax(-1) @ source
    x = linear(w, "attention.output", torch.cat([context, target], -1)).tanh()
    return F.cross_entropy(linear(w, "softmax", x).flatten(0, 1), labels.flatten())


BY_HAND: dict[str, Callable[..., Tensor]] = {"lstm_stack": lstm_stack, "nmt": nmt, "rnnlm": rnnlm, "rnntc": rnntc}
