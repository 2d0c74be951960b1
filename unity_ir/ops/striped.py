"""
Striped order of a sequence, in blocks, and the operators that depend on the order of tokens, for sequences in it.

A causal mask leaves the last of p contiguous pieces of a sequence nearly twice the average of scores. In striped order
each piece has every p-th block of tokens, so that all have about as many (Brandon et al., 2023, "Striped Attention",
with blocks in the place of single tokens, so that kernels find hidden tiles). The tokens of natural order are rounds of
a block for each stripe, those of striped order are the stripes, one after the other:

    natural order  (round stripe place)
    striped order  (stripe round place)    divided in contiguous pieces along the stripes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.errors import UnityError
from unity_ir.ops.attention import BACKWARD, LOGSUM, OUT, PRODUCT, SAVED_BACKWARD, SOFTMAX
from unity_ir.ops.operator import Application, Operator, Saving, Tensor
from unity_ir.tdl.syntax import AttrValue, Bound

_MOVED = "dim: int, stripes: int, block: int"
_SIZES = "where rank(a..) = dim, size(stripe) = stripes, size(place) = block"

STRIPE = Operator(
    f"stripe(x: any; {_MOVED})  out[a.., (stripe round place), b..] = x[a.., (round stripe place), b..]  {_SIZES}",
    gradient=lambda of: (UNSTRIPE.one(of.grad, **of.attributes),),
)
"""The tokens along dim `dim`, of natural order, in striped order."""

UNSTRIPE = Operator(
    f"unstripe(x: any; {_MOVED})  out[a.., (round stripe place), b..] = x[a.., (stripe round place), b..]  {_SIZES}",
    gradient=lambda of: (STRIPE.one(of.grad, **of.attributes),),
)
"""The tokens along dim `dim`, of striped order, in natural order."""


_STRIPES = "stripes: int, rounds: int, block: int"


def _natural(token: str) -> str:
    """
    Return the text of definitions by which `at[token]` is the position in natural order of a token of striped order:
    from its stripe and round, the block's number is round * stripes + stripe in the place of stripe * rounds + round.
    A half is added to what is divided, so that quotients are rounded down to the same number where a GPU divides in
    float32, by not quite the nearest: of sequences of up to 2^20 tokens.
    """
    return (
        f"let stripe[{token}] = floor(({token} + 0.5) / (rounds * block));"
        f"  let round[{token}] = floor(({token} - stripe[{token}] * (rounds * block) + 0.5) / block);"
        f"  let at[{token}] = {token} + round[{token}] * (block * (stripes - 1))"
        f" - stripe[{token}] * ((rounds - 1) * block);"
    )


def _check_attention(bound: Bound, attributes: Mapping[str, AttrValue]) -> None:
    queries, keys = bound.extents["i"], bound.extents["j" if "j" in bound.extents else "t"]
    if queries != keys:
        raise UnityError(
            f"pcg.{bound.operator}: {queries} queries and {keys} keys are not of one sequence; use as many"
        )
    _check_length(bound, queries, attributes)


def _check_rotary(bound: Bound, attributes: Mapping[str, AttrValue]) -> None:
    _check_length(bound, bound.extents["s"], attributes)


def _check_length(bound: Bound, length: int, attributes: Mapping[str, AttrValue]) -> None:
    stripes, rounds, block = (int(str(attributes[name])) for name in ("stripes", "rounds", "block"))
    if min(stripes, rounds, block) < 1 or stripes * rounds * block != length:
        raise UnityError(
            f"pcg.{bound.operator}: {stripes} stripes of {rounds} blocks of {block} tokens are not {length} tokens"
        )


_SCORES = f"{_natural('i')}  let s[b, h, g, i, j] = where(gt(at[j] - at[i], 0), -1e30, {PRODUCT});"


def _attention_gradient(of: Application) -> Sequence[Tensor | None]:
    return ATTENTION_STRIPED_GRAD(of.grad, *of.operands, **of.attributes)


ATTENTION_STRIPED = Operator(
    f"attention_striped(q, k, v; scale: float, {_STRIPES})  {_SCORES}{SOFTMAX}{OUT}",
    gradient=_attention_gradient,
    check=_check_attention,
)
"""Causal `attention` of queries, keys and values whose sequence is in striped order, as is the result's."""

ATTENTION_STRIPED_GRAD = Operator(
    f"attention_striped_grad(y, q, k, v; scale: float, {_STRIPES})  {_SCORES}{SOFTMAX}{BACKWARD}",
    check=_check_attention,
)
"""The gradients of queries, keys and values from that of the result, `y`; the probabilities are computed again."""

ATTENTION_STRIPED_SAVING = Operator(
    f"attention_striped_saving(q, k, v; scale: float, {_STRIPES}, sums: dtype = f32)  {_SCORES}{SOFTMAX}{OUT};{LOGSUM}",
    check=_check_attention,
)
"""`attention_striped`, and the logarithm of what every row's exponentials sum to, which a backward can read."""

ATTENTION_STRIPED_SAVED_GRAD = Operator(
    f"attention_striped_saved_grad(y, q, k, v, a, logsum; scale: float, {_STRIPES})  {_SCORES}{SAVED_BACKWARD}",
    check=_check_attention,
)
"""`attention_striped_grad` from the result of the forward, `a`, and the logarithms it has saved."""

SAVINGS = (
    Saving(
        ATTENTION_STRIPED.name,
        ATTENTION_STRIPED_GRAD.name,
        ATTENTION_STRIPED_SAVING.name,
        ATTENTION_STRIPED_SAVED_GRAD.name,
    ),
)


def _rotary_gradient(of: Application) -> Sequence[Tensor | None]:
    return (ROTARY_STRIPED.one(of.grad, **{**of.attributes, "direction": -of.float("direction")}),)


ROTARY_STRIPED = Operator(
    f"rotary_striped(x; base: float = 10000.0, direction: float = 1.0, {_STRIPES})"
    f"  {_natural('s')}  let angle[s, i] = at[s] * exp(-i * log(base) / size(i));"
    "  out[b.., s, (p i)] = x[b.., s, (p i)] * cos(angle[s, i])"
    " + direction * sin(angle[s, i]) * sum[q](where(eq(p + q, 1), (2 * p - 1) * x[b.., s, (q i)], 0))"
    "  where size(p) = 2, size(q) = 2",
    gradient=_rotary_gradient,
    check=_check_rotary,
)
"""`rotary` of a sequence in striped order."""

OPERATORS = (
    *(STRIPE, UNSTRIPE, ROTARY_STRIPED),
    *(ATTENTION_STRIPED, ATTENTION_STRIPED_GRAD, ATTENTION_STRIPED_SAVING, ATTENTION_STRIPED_SAVED_GRAD),
)
