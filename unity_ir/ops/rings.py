"""
Attention around a ring: the operators of a step whose devices hand their keys and values on, piece by piece.

Each device keeps the queries of its piece of a sequence. In turn number t (from 0) it has the keys and values of the
piece t before its own, and attends to them alone; `merge_parts` combines what two turns make (Liu et al., 2023, "Ring
Attention with Blockwise Transformers", section 3; the merge is FlashAttention's). `plan.rings` writes a step in these.

The keys of a piece that a query sees are a range of it: of a document, under a causal mask in natural order, and in
striped order (`ops.striped`) if each device has one stripe. `causal_part` and `ranges_part` say which.
"""

from __future__ import annotations

from unity_ir.ops.attention import RANGE_SAVED_GRADIENTS, RANGE_SAVING
from unity_ir.ops.operator import Operator

_PART = "scale: float, seen: float = 1.0"

ATTENTION_PART = Operator(f"attention_part(q, k, v, first: int, end: int; {_PART}, sums: dtype = f32)  {RANGE_SAVING}")
"""
Queries [b, heads, i, e], keys [b, kv heads, j, e] and values [b, kv heads, j, d] of one piece: what they make, and the
logarithm of what every row's exponentials sum to, as `attention_ranges_saving` does. `seen` is the part of the scores
that the ranges leave to the device with the most, for prices.
"""

ATTENTION_PART_GRAD = Operator(
    f"attention_part_grad(y, q, k, v, first: int, end: int, a, logsum; {_PART})  {RANGE_SAVED_GRADIENTS}"
)
"""
The gradients of queries, and of one piece's keys and values, from the result `a` of all pieces and the logarithms of
all of its sums; those of queries are addends.
"""

_SUM = "maximum(p[b, h, i], q[b, h, i]) + log(1 + exp(-abs(p[b, h, i] - q[b, h, i])))"

MERGE_PARTS = Operator(
    f"merge_parts(x, p, y, q)  let both[b, h, i] = {_SUM};"
    "  out[b, h, i, d] = x[b, h, i, d] * exp(p[b, h, i] - both[b, h, i])"
    " + y[b, h, i, d] * exp(q[b, h, i] - both[b, h, i]);"
    "  logsum[b, h, i] = both[b, h, i]"
)
"""
What attention makes of two sets of keys, from what it makes of each (`x`, `y`) and the logarithms of their sums (`p`,
`q`), and the logarithms of both sums together.
"""


def _of_piece(turn: str, of: str) -> str:
    """
    Return the text of definitions: `own[i]`, the number of the piece of query i, and `other[i]`, that of the piece
    whose keys its device has in turn `turn`. A half is added to what is divided, as in `ops.striped`.
    """
    return (
        f"let own[i] = floor((i + 0.5) / {of});  let other[i] = own[i] - {turn} + where(lt(own[i], {turn}), pieces, 0);"
    )


_TURN = "turn: int, pieces: int, length: int"

CAUSAL_PART = Operator(
    f"causal_part(zeros: int; {_TURN}, block: int)  {_of_piece('turn', 'length')}"
    "  let place[i] = i - own[i] * length;"
    "  let round[i] = floor((place[i] + 0.5) / block);"
    "  end: int[b, i] = zeros[b, i] + round[i] * block + where(lt(other[i], own[i]), block,"
    " where(eq(other[i], own[i]), place[i] - round[i] * block + 1, 0))"
)
"""
How many keys of the piece of turn `turn` each query [b, i] sees under a causal mask, from the first on, if there are
`pieces` pieces of `length` tokens, of blocks of `block`: those of natural order have one block each, those of striped
order one of each round. `zeros` only say how many there are.
"""

RANGES_PART = Operator(
    f"ranges_part(first: int, end: int; {_TURN})  {_of_piece('turn', 'length')}"
    "  first: int[b, i] = minimum(maximum(first[b, i] - other[i] * length, 0), length);"
    "  end: int[b, i] = minimum(maximum(end[b, i] - other[i] * length, 0), length)"
)
"""The ranges of keys that queries see (`attention_ranges`), within the piece of turn `turn`."""

OPERATORS = (ATTENTION_PART, ATTENTION_PART_GRAD, MERGE_PARTS, CAUSAL_PART, RANGES_PART)
