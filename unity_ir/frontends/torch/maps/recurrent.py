"""
Map LSTMs from ATen operators to the compiler's, unrolled step by step. Each mapping gets the call's `site` (what
PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns the result as a value of the
compiler's graph, or several.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.attention import dropout
from unity_ir.frontends.torch.site import CallSite, maps
from unity_ir.frontends.torch.values import Operand, cut, op, reshape, swap
from unity_ir.pcg.graph import Value, apply


@maps("lstm")
def lstm(
    site: CallSite,
    x: Value,
    start: Sequence[Operand],
    parameters: Sequence[Operand],
    has_biases: bool,
    layers: int,
    p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, Value, Value]:
    """
    Map PyTorch's LSTM on [sequence, batch, k] (with `batch_first`, [batch, sequence, k]), unrolled; return (outputs,
    last h, last c), with h and c [layers * directions, batch, n].

    `start` are the initial (h, c), of the same shapes; `parameters` are, per layer and direction, the weights of the
    input [4 n, k] and of the state [4 n, n], and, if `has_biases`, their biases; `p` is the probability of dropout
    between layers. Gates keep PyTorch's layout: input, forget, cell, output. The inputs of all steps are multiplied in
    one product. Raises `UnityError` without a batch dim, and for packed sequences and projections.
    """
    if len(x.shape) != 3 or len(parameters) != layers * (2 + 2 * has_biases) * (1 + bidirectional):
        raise UnityError("an LSTM without a batch, of packed sequences or with projections has no mapping")
    x = swap(x, 0, 1) if batch_first else x
    states = [site.value(v, site.dtype) for v in start]
    values = [site.value(v, site.dtype) for v in parameters]
    width = len(values) // (layers * (1 + bidirectional))
    last: list[tuple[Value, Value]] = []
    for layer in range(layers):
        ways: list[Value] = []
        for way in range(1 + bidirectional):
            at = len(last)
            h, c = (reshape(cut(v, 0, at, 1), v.shape[1:]) for v in states)
            outputs, h, c = _one_direction(x, h, c, values[at * width : (at + 1) * width], backwards=way == 1)
            ways.append(outputs)
            last.append((h, c))
        x = ways[0] if len(ways) == 1 else op("concat", *ways, dim=2)
        if layer < layers - 1:
            x = dropout(site, x, p, train)
    x = swap(x, 0, 1) if batch_first else x
    return x, *(_stacked([state[i] for state in last]) for i in range(2))  # pyright: ignore[reportReturnType]


def _one_direction(
    x: Value, h: Value, c: Value, parameters: Sequence[Value], backwards: bool
) -> tuple[Value, Value, Value]:
    """
    Return (outputs [sequence, batch, n], last h, last c) of one LSTM layer on `x` [sequence, batch, k], in one
    direction.

    `h` and `c` are the initial states [batch, n]; `parameters` are the weights of the input [4 n, k] and of the state
    [4 n, n], then their biases [4 n], if any. With `backwards`, the sequence is read from its end, and outputs keep its
    order.
    """
    of_x, of_h, *biases = parameters
    steps, batch, _ = x.shape
    size = h.shape[-1]
    fed = op("matmul_nt", x, of_x)
    for bias in biases:
        fed = op("add", fed, bias)
    outputs: list[Value] = []
    for step in reversed(range(steps)) if backwards else range(steps):
        now = reshape(cut(fed, 0, step, 1), fed.shape[1:])
        gates = reshape(op("add", now, op("matmul_nt", h, of_h)), (batch, 4, size))
        h, c = apply("lstm_cell", (gates, c), {}).results
        outputs.append(h)
    return _stacked(outputs[::-1] if backwards else outputs), h, c


def _stacked(values: Sequence[Value]) -> Value:
    """Return values of equal shape stacked along a new first dim; at least one."""
    parts = [reshape(v, (1, *v.shape)) for v in values]
    return parts[0] if len(parts) == 1 else op("concat", *parts, dim=0)
