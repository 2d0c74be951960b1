"""Lines of attention, and operands for its operators."""

from __future__ import annotations

from typing import Any

import numpy as np
from case import Case
from kernel_checks import random_operands

from unity_ir.ops import operator
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.syntax import Bound

SOFTMAX = (
    "let u[b, h, i, j] = exp(s[b, h, i, j] - max[m](s[b, h, i, m]));"
    "  let p[b, h, i, j] = u[b, h, i, j] / sum[n](u[b, h, i, n]);"
)
SUM = "out[b, h, i, d] = sum[t](p[b, h, i, t] * v[b, h, t, d])"
PRODUCT = "sum[e](q[b, h, i, e] * k[b, h, j, e])"
HEADS = ((2, 3, 70, 20), (2, 3, 75, 20), (2, 3, 75, 24))

FOUND: list[tuple[str, Any, dict[str, Any]]] = [
    (f"plain(q, k, v)  let s[b, h, i, j] = {PRODUCT}; {SOFTMAX} {SUM}", HEADS, {}),
    (
        f"biased(q, k, v, c)  let s[b, h, i, j] = 0.3 * {PRODUCT} + c[h, i, j]; {SOFTMAX} {SUM}",
        (*HEADS, (3, 70, 75)),
        {},
    ),
    (
        f"masked(q, k, v, c: bool)  let s[b, h, i, j] = where(c[b, j], {PRODUCT}, -30); {SOFTMAX} {SUM}",
        (*HEADS, (2, 75)),
        {},
    ),
    (
        f"sloped(q, k, v)  let s[b, h, i, j] = tanh({PRODUCT}) - 0.1 * (i - j); {SOFTMAX} {SUM}",
        HEADS,
        {},
    ),
    (
        "unshifted(q, k, v)  let u[b, h, i, j] = exp(0.2 * sum[e](k[b, h, j, e] * q[b, h, i, e]));"
        " out[b, h, i, d] = sum[t](v[b, h, t, d] * (u[b, h, i, t] / sum[n](u[b, h, i, n])))",
        HEADS,
        {},
    ),
    (
        "one_head(q, k, v)  let s[i, j] = sum[e](q[i, e] * k[j, e]);"
        " out[i, d] = sum[t](exp(s[i, t]) / sum[n](exp(s[i, n])) * v[t, d])",
        ((33, 8), (40, 8), (40, 17)),
        {},
    ),
]
# Dropout between softmax and values, drawn at the position in the whole matrix of weights, and its backward.
DROPPED = "where(lt(philox(7, position(b, h, i, t)), 0.3), 0, p[b, h, i, t] / 0.7)"
FOUND += [
    (
        f"dropped(q, k, v)  let s[b, h, i, j] = 0.3 * {PRODUCT}; {SOFTMAX}"
        f" out[b, h, i, d] = sum[t]({DROPPED} * v[b, h, t, d])",
        HEADS,
        {},
    ),
    (
        f"scaled(q, k, v, c)  let s[b, h, i, j] = 0.3 * {PRODUCT}; {SOFTMAX}"
        " out[b, h, i, d] = sum[t](c[i, t] * p[b, h, i, t] * v[b, h, t, d])",
        (*HEADS, (70, 75)),
        {},
    ),
]

CAP = {"cap": 0.7}
DROP = {"drop": 0.4, "seed": 2**33 + 5}


def case(name: str, sizes: tuple[int, ...], attributes: dict[str, Any]) -> tuple[Bound, list[Any]]:
    """
    Return an operator bound to these sizes (batch, heads, those of keys, rows, columns, features and those of values),
    and its operands, of which those that a forward saves are what it does.
    """
    b, h, g, i, j, e, d = sizes
    shapes = {"q": (b, h, i, e), "k": (b, g, j, e), "v": (b, g, j, d), "y": (b, h, i, d), "a": (b, h, i, d)}
    shapes |= {"logsum": (b, h, i), "first": (b, i), "end": (b, i)}
    one = operator(name)
    used = tuple(shapes[p.name] for p in one.line.parameters)
    bound = one.bind(used, one.attributes({"scale": e**-0.5, **attributes})).bound
    operands = random_operands(bound, Case(used, {}))
    names = [p.name for p in bound.operands]
    if "first" in names:
        operands[names.index("first")], operands[names.index("end")] = ranges(b, i, j)
    if "logsum" in names:
        forward = operator(name.replace("saved_grad", "saving"))
        values = dict(zip(names, operands, strict=True))
        read = [p.name for p in forward.line.parameters]
        whole = forward.bind(tuple(shapes[n] for n in read), forward.attributes({"scale": e**-0.5, **attributes})).bound
        operands[-2:] = map(np.ascontiguousarray, evaluate(whole, [values[n] for n in read]))
    return bound, operands


def ranges(batch: int, rows: int, columns: int) -> tuple[Any, Any]:
    """
    Return which columns each row sees, two arrays [batch, row], the first and the one after the last: of documents one
    after the other, each row up to itself; some rows see all, and some none.
    """
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, columns, (batch, 3)), axis=1)
    at = np.arange(rows)[None] * columns // rows
    first = np.max(np.where(cuts[:, None] <= at[..., None], cuts[:, None], 0), axis=2)
    end = np.minimum(at + 1, columns) + np.zeros_like(first)
    first[:, rows // 5 :: 17], end[:, rows // 5 :: 17] = 0, columns
    first[:, rows // 3 :: 11], end[:, rows // 3 :: 11] = columns // 2, columns // 2 - np.arange(batch)[:, None]
    return first, end
