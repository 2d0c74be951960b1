"""Base class of builders of recurrent networks: LSTM layers, unrolled."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.models.builder import Builder
from unity_ir.pcg.node import Value

State = tuple[Value, Value]
"""Hidden state and cell of one layer, [batch, hidden] each."""


class Recurrent(Builder):
    """Base class of builders of recurrent networks. A sequence is a list of values [batch, size], one per step."""

    def steps(self, x: Value) -> list[Value]:
        """Split a value [batch, steps, size] into a sequence: a list of values [batch, size], one per step."""
        batch, steps, size = x.shape
        return [self.op("reshape", part, shape=(batch, size)) for part in self.split(x, 1, (1,) * steps)]

    def joined(self, sequence: Sequence[Value]) -> Value:
        """Join a sequence (values [batch, size], one per step) to one value [batch, steps, size]."""
        batch, size = sequence[0].shape
        return self.op("concat", *(self.op("reshape", x, shape=(batch, 1, size)) for x in sequence), dim=1)

    def embedded(self, tokens: Value, name: str, vocabulary: int, size: int) -> list[Value]:
        """
        Look up the embeddings of tokens [batch, steps]; return them as a sequence (values [batch, size], one per step).
        The table is called `{name}.weight` [vocabulary, size].
        """
        return self.steps(self.op("embedding", tokens, self.weight(f"{name}.weight", vocabulary, size)))

    def lstm_layer(
        self, sequence: Sequence[Value], name: str, hidden: int, state: State | None = None
    ) -> tuple[list[Value], State]:
        """
        Apply an LSTM layer of `hidden` units to a sequence; return its hidden states as a sequence, and its last state
        (h, c). It starts from `state`; None starts from zeros.

        Weights have PyTorch's names: `name.weight_ih` [size, 4, hidden], `name.weight_hh` [hidden, 4, hidden],
        `name.bias_ih` and `name.bias_hh` [4, hidden]; gates are in the order input, forget, cell, output.
        """
        batch, size = sequence[0].shape
        w_x, w_h = (self.weight(f"{name}.weight_{k}h", n, 4, hidden) for k, n in (("i", size), ("h", hidden)))
        bias = self.op("add", *(self.weight(f"{name}.{part}", 4, hidden) for part in ("bias_ih", "bias_hh")))
        h, c = state or (None, self.full(0.0, batch, hidden))
        found: list[Value] = []
        for x in sequence:
            z = self.op("gate_matmul", x, w_x)
            if h is not None:
                z = self.op("add", z, self.op("gate_matmul", h, w_h))
            h, c = self.results("lstm_cell", self.op("add", z, bias), c)
            found.append(h)
        assert h is not None
        return found, (h, c)

    def lstm(self, sequence: Sequence[Value], name: str, hidden: int, layers: int) -> list[Value]:
        """
        Apply LSTM layers of `hidden` units to a sequence, called `{name}.0`, `{name}.1`, .., that start from zeros;
        return the hidden states of the last layer. `layers` is their number.
        """
        for i in range(layers):
            sequence, _ = self.lstm_layer(sequence, f"{name}.{i}", hidden)
        return list(sequence)
