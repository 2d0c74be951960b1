"""
Count the part of attention's scores that a causal mask leaves, as kernels leave out the tiles that it hides.

Query i sees keys 0 to i. Where devices divide queries or keys in contiguous pieces, some device has the queries that
see most, and the keys that are seen most; a step takes as long as that device. So the part counts for it: of 8 pieces
of the queries the last sees 15/16 of its scores, while on average it is half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from unity_ir.forms.attention import scores_of
from unity_ir.forms.kinds import kind
from unity_ir.forms.rewrite import simplified
from unity_ir.tdl.divisibility import Analysis

Counts: TypeAlias = int | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CausalMask:
    """The index variables of queries and of keys in a causal mask, and how many queries there are."""

    row: str
    column: str
    rows: int

    def seen(self, local: Mapping[str, int]) -> float:
        """
        Return the part of its scores, up to 1, that the busiest device computes, if each device has pieces of these
        extents (by index variable).
        """
        return float(seen_part(self.rows, local[self.row], local[self.column]))


def causal_mask(analysis: Analysis) -> CausalMask | None:
    """
    Return the causal mask of the attention of an operator's line at global shapes, forward or backward; None for other
    operators, and without a mask.
    """
    if kind(analysis) != "attention":
        return None
    scores = scores_of(simplified(analysis.bound, {}))
    row = None if scores is None else scores.causal_row()
    return None if scores is None or row is None else CausalMask(row, scores.column, analysis.bound.extents[row])


def seen_part(rows: int, own_rows: Counts, own_columns: Counts) -> npt.NDArray[np.float64]:
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
