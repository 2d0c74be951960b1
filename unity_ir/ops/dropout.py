"""Dropout, and random numbers."""

from __future__ import annotations

from unity_ir.ops.operator import Operator

DROPOUT = Operator(
    "dropout(x; p: float, seed: int)  out[a..] = where(lt(philox(seed, position(a..)), p), 0, x[a..] / (1 - p))",
    gradient=lambda of: (DROPOUT.one(of.grad, p=of.float("p"), seed=of.int("seed")),),
)
"""
Every element is 0 with probability `p` (below 1), and scaled so that the mean stays.

Which ones is drawn by the seed and the element's position in the whole tensor, so it is the same however the tensor is
divided, and the same in the backward.
"""

UNIFORM = Operator(
    "uniform(x; seed: int)  out[a..] = x[a..] + philox(seed, position(a..))", gradient=lambda of: (of.grad,)
)
"""Random numbers in [0, 1), drawn as those of dropout, added to `x`."""

OPERATORS = (DROPOUT, UNIFORM)
