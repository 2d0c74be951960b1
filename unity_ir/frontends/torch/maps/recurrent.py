"""
Map recurrent networks (LSTM, GRU, RNN) from ATen operators to the compiler's, unrolled step by step. Each mapping gets
the call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns the
result as a value of the compiler's graph, or several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.attention import dropout
from unity_ir.frontends.torch.site import CallSite, maps
from unity_ir.frontends.torch.values import Operand, cut, op, reshape, results, swap
from unity_ir.pcg.node import Value

States: TypeAlias = tuple[Value, ...]
"""The states of a cell, each [batch, n]: of an LSTM (h, c), of others (h,)."""
Cell: TypeAlias = Callable[[Value, Value, States], States]
"""From what the input and what the state give to the gates, [batch, gates * n] each, and the states, to the next."""


def _lstm_cell(of_x: Value, of_h: Value, states: States) -> States:
    """Gates are in PyTorch's order: input, forget, cell, output."""
    batch, size = states[0].shape
    return results("lstm_cell", reshape(op("add", of_x, of_h), (batch, 4, size)), states[1])


def _gru_cell(of_x: Value, of_h: Value, states: States) -> States:
    """Return n + z (h - n), with gates in PyTorch's order: reset, update, new (Cho et al., 2014)."""
    size = states[0].shape[1]
    (reset, update, new), (reset_h, update_h, new_h) = (
        [cut(v, 1, at * size, size) for at in range(3)] for v in (of_x, of_h)
    )
    n = op("tanh", op("add", new, op("mul", op("sigmoid", op("add", reset, reset_h)), new_h)))
    z = op("sigmoid", op("add", update, update_h))
    return (op("add", n, op("mul", z, op("sub", states[0], n))),)


def _plain_cell(activation: str) -> Cell:
    return lambda of_x, of_h, states: (op(activation, op("add", of_x, of_h)),)


@maps("lstm")
def lstm(
    site: CallSite, x: Value, start: Sequence[Operand], parameters: Sequence[Operand], *options: Any
) -> tuple[Value, ...]:
    """
    Map PyTorch's LSTM on `x` [sequence, batch, k], unrolled over the sequence; return (outputs, last h, last c).
    `start` are the initial (h, c), each [layers * directions, batch, n].

    `parameters` are, per layer and direction, the weights of the input [4 * n, k] and of the state [4 * n, n], and
    their biases. `options` are ATen's, in order: has_biases, layers, dropout, train, bidirectional, batch_first (`x`
    and outputs are [batch, sequence, ..]). Raises `UnityError` without a batch dim, and for packed sequences and
    projections.
    """
    return _unrolled(site, x, start, parameters, _lstm_cell, *options)


def _of_one_state(name: str, cell: Cell) -> None:
    """Register the mapping of the ATen operator `name`, whose cell has one state; it returns (outputs, last h)."""

    @maps(name)
    def network(
        site: CallSite, x: Value, start: Operand, parameters: Sequence[Operand], *options: Any
    ) -> tuple[Value, ...]:
        return _unrolled(site, x, [start], parameters, cell, *options)

    del network


_of_one_state("gru", _gru_cell)
_of_one_state("rnn_tanh", _plain_cell("tanh"))
_of_one_state("rnn_relu", _plain_cell("relu"))


def _unrolled(
    site: CallSite,
    x: Value,
    start: Sequence[Operand],
    parameters: Sequence[Operand],
    cell: Cell,
    has_biases: bool = True,
    layers: float = 1,
    p: float = 0,
    train: bool = True,
    bidirectional: bool = False,
    batch_first: bool = False,
) -> tuple[Value, ...]:
    """
    Return (outputs, each of the last states) of a recurrent network on [sequence, batch, k] (with `batch_first`,
    [batch, sequence, k]), unrolled; states are [layers * directions, batch, n].

    `parameters` are, per layer and direction, the weights of the input [gates * n, k] and of the state [gates * n, n],
    and, if `has_biases`, their biases; `p` is the probability of dropout between layers. The inputs of all steps are
    multiplied in one product. Raises `UnityError` without a batch dim, and for packed sequences and projections.
    """
    count = int(layers)
    if len(x.shape) != 3 or len(parameters) != count * (2 + 2 * has_biases) * (1 + bidirectional):
        raise UnityError("a recurrent network without a batch, of packed sequences or with projections has no mapping")
    x = swap(x, 0, 1) if batch_first else x
    initial = [site.value(v, site.dtype) for v in start]
    values = [site.value(v, site.dtype) for v in parameters]
    width = len(values) // (count * (1 + bidirectional))
    last: list[States] = []
    for layer in range(count):
        ways: list[Value] = []
        for way in range(1 + bidirectional):
            at = len(last)
            states = tuple(reshape(cut(v, 0, at, 1), v.shape[1:]) for v in initial)
            outputs, states = _one_direction(x, states, values[at * width : (at + 1) * width], cell, way == 1)
            ways.append(outputs)
            last.append(states)
        x = ways[0] if len(ways) == 1 else op("concat", *ways, dim=2)
        if layer < count - 1:
            x = site.value(dropout(site, x, p, train))
    x = swap(x, 0, 1) if batch_first else x
    return x, *(_stacked([states[i] for states in last]) for i in range(len(initial)))


def _one_direction(
    x: Value, states: States, parameters: Sequence[Value], cell: Cell, backwards: bool
) -> tuple[Value, States]:
    """
    Return (outputs [sequence, batch, n], last states) of one layer on `x` [sequence, batch, k], in one direction, from
    the initial states. `parameters` are as in `_unrolled`. With `backwards`, the sequence is read from its end, and
    outputs keep its order.
    """
    of_x, of_h, *biases = parameters
    steps = x.shape[0]
    fed = op("matmul_nt", x, of_x)
    fed = op("add", fed, biases[0]) if biases else fed
    outputs: list[Value] = []
    for step in reversed(range(steps)) if backwards else range(steps):
        now = reshape(cut(fed, 0, step, 1), fed.shape[1:])
        back = op("matmul_nt", states[0], of_h)
        states = cell(now, op("add", back, biases[1]) if biases else back, states)
        outputs.append(states[0])
    return _stacked(outputs[::-1] if backwards else outputs), states


def _stacked(values: Sequence[Value]) -> Value:
    """Return values of equal shape stacked along a new first dim; at least one."""
    parts = [reshape(v, (1, *v.shape)) for v in values]
    return parts[0] if len(parts) == 1 else op("concat", *parts, dim=0)
