"""
Slots: an expert of a mixture takes a fixed number of tokens of each group, and those beyond it are dropped (GShard,
Lepikhin 2020; Switch, Fedus 2021).

Tokens [g, t] come in groups; each of a token's k choices [g, k, t] is an expert. `queue` numbers the choices of an
expert within a group, all first ones before the second ones, and `slot` and `in_slots` give the first of them, up to
the capacity, a slot each. `to_slots` copies tokens into slots [v, g], those of an expert one after the other. The
experts compute these by `expert_matmul`, and `from_slots` returns them to their tokens.

Groups can be divided, and so can slots: a value that goes from the one to the other is exchanged among devices
(all-to-all), which is expert parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Application, Operator, Shapes, Tensor
from unity_ir.tdl.syntax import AttrValue, Bound


def _to_slots_gradient(of: Application) -> Sequence[Tensor | None]:
    x, at, s = of.operands
    return FROM_SLOTS.one(of.grad, at, s), None, SLOT_SHARES.one(x, of.grad, at)


def _from_slots_gradient(of: Application) -> Sequence[Tensor | None]:
    y, at, s = of.operands
    return (
        TO_SLOTS.one(of.grad, at, s, size=y.shape[0], degrees=(y.degrees[0],)),
        None,
        SLOT_SHARES.one(of.grad, y, at),
    )


def _queue_line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    """
    Return the line for one size of the last dim, which it must state, as operand and result have different indices
    there.
    """
    del attributes
    size = shapes[0][-1] if shapes[0] else 1
    return f"queue(e: int)  out: int[a.., i] = opaque equals_before[i; j](e[a.., j])  where size(i) = {size}"


QUEUE = Operator(_queue_line, signature="queue(e: int)", gradient=lambda of: (None,))
"""For each element, how many before it along the last dim equal it: its number among the choices of one expert."""


def _check_capacity(bound: Bound, attributes: Mapping[str, AttrValue]) -> None:
    capacity = attributes["capacity"]
    assert isinstance(capacity, int)
    if capacity < 1:
        raise UnityError(
            f"pcg.{bound.operator}: capacity is {capacity}, which drops every token; use 1 slot or more for each expert"
        )


SLOT = Operator(
    "slot(e: int, n: int; capacity: int)  out: int[a..] = e[a..] * capacity + minimum(n[a..], capacity - 1)",
    gradient=lambda of: (None, None),
    check=_check_capacity,
)
"""
The slot of each choice of an expert `e` that is the `n`-th of that expert. Those beyond the capacity get the last slot
of the expert, in which they must count 0 (`in_slots`).
"""

IN_SLOTS = Operator(
    "in_slots(s, n: int; capacity: int)  out[a..] = where(lt(n[a..], capacity), s[a..], 0)",
    gradient=lambda of: (IN_SLOTS.one(of.grad, of.operands[1], capacity=of.int("capacity")), None),
    check=_check_capacity,
)
"""The shares `s` of choices, 0 for those whose number `n` with their expert is beyond the capacity."""

TO_SLOTS = Operator(
    "to_slots(x, at: int, s; size: int, degrees: ints)"
    "  out[v, g, h] = sum[k, t](where(eq(v, at[g, k, t]), s[g, k, t] * x[g, t, h], 0))"
    "  where size(v) = size, degree(v) = degrees",
    gradient=_to_slots_gradient,
)
"""Tokens `x` [g, t, h] in the slots [v, g, h] that `at` [g, k, t] names, each times its share `s` [g, k, t]."""

FROM_SLOTS = Operator(
    "from_slots(y, at: int, s)  out[g, t, h] = sum[k](s[g, k, t] * sum[v](where(eq(v, at[g, k, t]), y[v, g, h], 0)))",
    gradient=_from_slots_gradient,
)
"""For each token the sum of the slots of `y` [v, g, h] that `at` names for it, each times its share `s`."""

SLOT_SHARES = Operator(
    "slot_shares(x, y, at: int)  out[g, k, t] = sum[h](x[g, t, h] * sum[v](where(eq(v, at[g, k, t]), y[v, g, h], 0)))"
)
"""The gradient of the shares: the product of each token and the slot that `at` names."""

EXPERT_MATMUL = Operator(
    "expert_matmul(x, w)  out[e, r.., n] = sum[k](x[e, r.., k] * w[e, k, n])",
    gradient=lambda of: (
        EXPERT_MATMUL_NT.one(of.grad, of.operands[1]),
        EXPERT_MATMUL_TN.one(of.operands[0], of.grad),
    ),
)
"""The rows of each expert, `x` [e, r.., k], times its weight `w` [e, k, n]."""

EXPERT_MATMUL_NT = Operator(
    "expert_matmul_nt(x, w)  out[e, r.., n] = sum[k](x[e, r.., k] * w[e, n, k])",
    gradient=lambda of: (EXPERT_MATMUL.one(of.grad, of.operands[1]), EXPERT_MATMUL_TN.one(of.grad, of.operands[0])),
)
"""The weights transposed: the gradient of the rows."""

EXPERT_MATMUL_TN = Operator("expert_matmul_tn(x, y)  out[e, k, n] = sum[r..](x[e, r.., k] * y[e, r.., n])")
"""The gradient of the weights."""

OPERATORS = (
    *(QUEUE, SLOT, IN_SLOTS, TO_SLOTS, FROM_SLOTS, SLOT_SHARES),
    *(EXPERT_MATMUL, EXPERT_MATMUL_NT, EXPERT_MATMUL_TN),
)
