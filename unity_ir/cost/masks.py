"""
Count the part of attention's scores that a causal mask leaves, as kernels leave out the tiles that it hides.

Query i sees keys 0 to i. Where devices divide queries or keys in contiguous pieces, some device has the queries that
see most, and the keys that are seen most; a step takes as long as that device. So the part counts for it: of 8 pieces
of the queries the last sees 15/16 of its scores, while on average it is half. Of a sequence in striped order a piece
has blocks from all over it (`forms.attention.Stripes`), and the busiest sees little more than the average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from unity_ir.forms.attention import Stripes, scores_of
from unity_ir.forms.kinds import kind
from unity_ir.forms.rewrite import simplified
from unity_ir.tdl.divisibility import Analysis

NO_ATTRIBUTES: Mapping[str, object] = MappingProxyType({})

Counts: TypeAlias = int | npt.NDArray[np.int64]
Part: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CausalMask:
    """
    The index variables of queries and of keys in a causal mask, how many queries there are, and their order, if that of
    keys, too, is striped. Where queries see ranges of keys, of which a line says nothing, the part that these leave.
    """

    row: str
    column: str
    rows: int
    stripes: Stripes | None = None
    given: float | None = None
    """The part that ranges leave to the busiest device, where an operator's attribute `seen` says it (`ops.rings`)."""

    def seen(self, local: Mapping[str, int]) -> float:
        """
        Return the part of its scores, up to 1, that the busiest device computes, if each device has pieces of these
        extents (by index variable).
        """
        return float(self.part(local[self.row], local[self.column]))

    def part(self, own_rows: Counts, own_columns: Counts) -> npt.NDArray[np.float64]:
        """
        Return `seen` for pieces of this many queries and keys. The two may be numbers or arrays [configuration]; the
        result is such, too.
        """
        if self.given is not None:
            return np.full(np.broadcast(own_rows, own_columns).shape, self.given)
        if self.stripes is None:
            return seen_part(self.rows, own_rows, own_columns)
        return striped_part(self.stripes, own_rows, own_columns)


def causal_mask(analysis: Analysis, attributes: Mapping[str, object] = NO_ATTRIBUTES) -> CausalMask | None:
    """
    Return the causal mask of the attention of an operator's line at global shapes, forward or backward; None for other
    operators, and without a mask. `attributes` are the operator's: `seen` is the part of the scores that ranges leave,
    and with `causal` 1 ranges leave no more than a causal mask does (`ops.attention`).
    """
    if kind(analysis) != "attention":
        return None
    scores = scores_of(simplified(analysis.bound, {}))
    if scores is None:
        return None
    stripes = scores.stripes()
    row = scores.causal_row() if stripes is None else stripes.row
    given = attributes.get("seen")
    part = given if isinstance(given, float) else None
    if row is None and (part is not None or attributes.get("causal")):
        row = scores.rows[-1]
    return None if row is None else CausalMask(row, scores.column, analysis.bound.extents[row], stripes, part)


def seen_part(rows: float, own_rows: Counts | Part, own_columns: Counts | Part) -> npt.NDArray[np.float64]:
    """
    Return the part of its scores that a device computes under a causal mask, if it has the last `own_rows` of `rows`
    queries and the first `own_columns` keys. The two may be numbers or arrays [configuration]; the result is such, too.
    """
    mine, keys = np.asarray(own_rows, dtype=np.float64), np.asarray(own_columns, dtype=np.float64)
    # Query i sees the first i + 1 keys, at most all; from query `keys` - 1 on it is all.
    first = rows - mine
    rising = np.maximum(np.minimum(rows, keys) - first, 0.0)
    seen = rising * (2 * first + rising + 1) / 2 + (mine - rising) * keys
    return seen / (mine * keys)


def striped_part(of: Stripes, own_rows: Counts, own_columns: Counts) -> npt.NDArray[np.float64]:
    """
    Return the part of its scores that a device computes under the causal mask of a sequence in striped order, if it has
    the last `own_rows` queries and the first `own_columns` keys: whole stripes, or the last rounds and the first of
    one. The two may be numbers or arrays [configuration]; the result is such, too.

    A query's block sees those of earlier rounds, and those of its own round in stripes up to its own.
    """
    rows, columns = np.asarray(own_rows, dtype=np.float64), np.asarray(own_columns, dtype=np.float64)
    rounds = of.length / of.block

    def up_to(count: float, mine: npt.NDArray[np.float64], keys: npt.NDArray[np.float64]) -> tuple[Part, Part]:
        """
        Return the part of all pairs of one of the last `mine` of `count` and one of the first `keys` in which the
        second is not the later, and that in which they are the same.
        """
        return seen_part(count, mine, keys), np.maximum(mine + keys - count, 0.0) / (mine * keys)

    not_later, same = up_to(rounds, *(np.minimum(n / of.block, rounds) for n in (rows, columns)))
    before, own = up_to(of.stripes, *(np.maximum(n / of.length, 1.0) for n in (rows, columns)))
    # Within its own block a query sees half, and itself.
    in_round = before - own * (1 - (of.block + 1) / (2 * of.block))
    return not_later - same * (1 - in_round)
