"""The parts of recurrent cells."""

from __future__ import annotations

from unity_ir.ops.operator import Operator

GATE_MATMUL = Operator(
    "gate_matmul(x, w)  out[m.., q, n] = sum[k](x[m.., k] * w[k, q, n])",
    gradient=lambda of: (
        GATE_MATMUL_DATA_GRAD.one(of.grad, of.operands[1]),
        GATE_MATMUL_WEIGHT_GRAD.one(of.operands[0], of.grad),
    ),
)
"""A product for each of a cell's gates; the gates stay a dim of their own, so that `n` alone can be divided."""

GATE_MATMUL_DATA_GRAD = Operator("gate_matmul_data_grad(g, w)  out[m.., k] = sum[q, n](g[m.., q, n] * w[k, q, n])")

GATE_MATMUL_WEIGHT_GRAD = Operator("gate_matmul_weight_grad(x, g)  out[k, q, n] = sum[m..](x[m.., k] * g[m.., q, n])")


_GATES = (
    "let i[b.., n] = sigmoid(z[b.., 0, n]);  let f[b.., n] = sigmoid(z[b.., 1, n]);"
    "  let u[b.., n] = tanh(z[b.., 2, n]);  let o[b.., n] = sigmoid(z[b.., 3, n]);"
    "  let next[b.., n] = f[b.., n] * c[b.., n] + i[b.., n] * u[b.., n];"
)
"""The gates in PyTorch's order, input, forget, cell, output, and the next state."""

LSTM_CELL = Operator(
    f"lstm_cell(z, c)  {_GATES}  h[b.., n] = o[b.., n] * tanh(next[b.., n]);  s[b.., n] = next[b.., n]",
    gradient=lambda of: LSTM_CELL_GRAD(*of.grads, *of.operands),
)
"""The next hidden and cell state from the gates before their activations, `z` [.., 4, n], and the cell state `c`."""

LSTM_CELL_GRAD = Operator(
    f"lstm_cell_grad(y, w, z, c)  {_GATES}"
    "  let t[b.., n] = tanh(next[b.., n]);"
    "  let d[b.., n] = w[b.., n] + y[b.., n] * o[b.., n] * (1 - t[b.., n] * t[b.., n]);"
    "  dz[b.., q, n] = where(eq(q, 0), d[b.., n] * u[b.., n] * i[b.., n] * (1 - i[b.., n]),"
    " where(eq(q, 1), d[b.., n] * c[b.., n] * f[b.., n] * (1 - f[b.., n]),"
    " where(eq(q, 2), d[b.., n] * i[b.., n] * (1 - u[b.., n] * u[b.., n]),"
    " y[b.., n] * t[b.., n] * o[b.., n] * (1 - o[b.., n]))));"
    "  dc[b.., n] = d[b.., n] * f[b.., n]  where size(q) = 4"
)
"""The gradients of both operands from those of the hidden state, `y`, and of the cell state, `w`."""

OPERATORS = (GATE_MATMUL, GATE_MATMUL_DATA_GRAD, GATE_MATMUL_WEIGHT_GRAD, LSTM_CELL, LSTM_CELL_GRAD)
