"""
Recognise plain attention, which libraries compute: softmax of scaled products of queries and keys, perhaps under a
causal mask, times values; and its gradients from what the forward saved.

    out[b, (h g), i, d] = softmax[j](scale * sum[e](q[b, (h g), i, e] * k[b, h, j, e])) @ v[b, h, j, d]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unity_ir.forms.addresses import address, flat_address, operand_shapes
from unity_ir.forms.attention import Attention, AttentionSum, attention, split_constant
from unity_ir.forms.rewrite import simplified
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Access, Binary, Bound, Expr, Reduce, WrittenIndex, accesses


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """
    A line that is plain attention (`y` is None), or its gradients by queries, keys and values. Text fields are the
    names of the line's operands.

    All are contiguous [batch, heads, positions, features]; a key's head serves a group of neighbouring heads.
    """

    q: str
    k: str
    v: str
    scale: float
    causal: bool
    length: int
    """Positions of queries."""
    keys: int
    """Positions of keys; equal to `length` if `causal`."""
    saves: bool
    """Whether a forward also returns the logarithms of the rows' sums, [batch, heads, positions]."""
    y: str | None = None
    """The gradient of the result, which a backward reads; None in a forward."""
    out: str | None = None
    """The forward's result, which a backward reads."""
    logsum: str | None = None
    """The logarithms, which a backward reads."""
    order: tuple[int, ...] = ()
    """For each of a backward's results, which gradient it is: 0 of queries, 1 of keys, 2 of values. () in a forward."""


def plain_attention(bound: Bound, starts: Mapping[str, str]) -> PlainAttention | None:
    """
    Match a bound TDL line (simplified or not) as plain attention or its gradients. None for any other line, such as one
    with dropout, a bias or ranges of keys, a backward that reads no saved logarithms, or a causal sequence that is in
    pieces or in striped order.

    `starts` maps each index variable of which a task computes only a part to the name of the kernel argument with the
    global index at which the part begins; the others begin at 0.
    """
    of = attention(simplified(bound, starts), starts)
    if of is None or of.scores.ranges is not None or of.scores.stripes() is not None:
        return None
    return _Matching(bound, of, starts).line()


class _Matching:
    def __init__(self, bound: Bound, of: Attention, starts: Mapping[str, str]):
        self.extents = bound.extents
        self.of = of
        self.scores = of.scores
        self.starts = starts
        self.shapes = operand_shapes(bound)
        self.by_rows = (*of.scores.batch, *of.scores.rows)
        self.by_columns = (*of.scores.batch, of.scores.column)

    def line(self) -> PlainAttention | None:
        of, scores = self.of, self.scores
        causal = scores.causal_row() is not None
        length = self.extents[scores.rows[-1]]
        keys = self.extents[scores.column]
        divided = any(n in self.starts for n in free_variables(scores.weights))
        scale = scores.scale
        if scale is None or (causal and (length != keys or scores.causal_row() != scores.rows[-1] or divided)):
            return None
        q, k = self.named(scores.q, self.by_rows, scores.inner), self.named(scores.k, self.by_columns, scores.inner)
        found = self.forward() if of.is_forward else self.backward(scale)
        if q is None or k is None or found is None or self.shapes[q][2] != length:
            return None
        v, y, out, logsum, order = found
        return PlainAttention(q, k, v, scale, causal, length, keys, of.logsum is not None, y, out, logsum, order)

    def named(self, access: Access, outer: Sequence[str], features: Sequence[str]) -> str | None:
        """Return the operand that an access reads whole, in the order of these variables; None if it does not."""
        four = len(self.shapes[access.tensor]) == 4
        return access.tensor if four and self.lies(access.indices, (*outer, *features)) else None

    def lies(self, indices: Sequence[WrittenIndex], names: Sequence[str]) -> bool:
        return address(indices, self.extents) == flat_address(names, self.extents)

    def forward(self) -> tuple[str, None, None, None, tuple[int, ...]] | None:
        one = self.of.sums[0]
        v = self.named(one.other, self.by_columns, one.free)
        fits = one.factor == self.scores.weights and self.lies(one.result.indices, (*self.by_rows, *one.free))
        if self.of.logsum is not None:
            fits = fits and self.lies(self.of.logsum.indices, self.by_rows)
        return (v, None, None, None, ()) if v is not None and fits else None

    def backward(self, scale: float) -> tuple[str, str, str, str, tuple[int, ...]] | None:
        of, scores = self.of, self.scores
        second, mean = of.second, of.mean_product
        if scores.saved is None or second is None or mean is None or len(of.sums) != 3:
            return None
        one, other = accesses(second)
        y, v = (other, one) if scores.column in free_variables(one) else (one, other)
        features = tuple(n for n in second.names if self.extents[n] > 1)
        names = self.named(y, self.by_rows, features), self.named(v, self.by_columns, features)
        out = next((a for a in accesses(mean) if a.tensor != y.tensor), None)
        of_mean = tuple(n for n in mean.names if self.extents[n] > 1)
        fits = out is not None and all(self.named(a, self.by_rows, of_mean) for a in accesses(mean))
        fits = fits and {a.tensor for a in accesses(mean)} == {y.tensor, out.tensor if out else ""}
        fits = fits and self.lies(scores.saved.indices, self.by_rows)
        order = [self.gradient(each, scale, y, second, of.mean) for each in of.sums]
        if not fits or None in names or None in order or {*order} != {0, 1, 2} or out is None:
            return None
        return v.tensor, y.tensor, out.tensor, scores.saved.tensor, tuple(n for n in order if n is not None)

    def gradient(self, of: AttentionSum, scale: float, y: Access, second: Reduce, mean: Expr | None) -> int | None:
        """Return whether a sum is the gradient of queries (0), keys (1) or values (2); None if it is none of them."""
        weights = self.scores.weights
        kept = self.by_rows if of.over_columns else self.by_columns
        other = self.named(of.other, self.by_columns if of.over_columns else self.by_rows, of.free)
        if other is None or not self.lies(of.result.indices, (*kept, *of.free)):
            return None
        constant, factor = split_constant(of.factor)
        of_scores = mean is not None and factor == Binary("*", weights, Binary("-", second, mean)) and constant == scale
        if of.over_columns:
            return 0 if of_scores and other == self.scores.k.tensor else None
        if of_scores and other == self.scores.q.tensor:
            return 1
        return 2 if of.factor == weights and other == y.tensor else None
