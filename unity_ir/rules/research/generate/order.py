"""
The variables that terms use, in order of first use, packed sixteen to a word of 64 bits: the first in the lowest four
bits, 0 for none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Uses = npt.NDArray[np.uint64]

_DIGIT, _BITS = np.uint64(15), np.uint64(4)


def merged(first: Uses, second: Uses) -> Uses:
    """
    Return which variables terms use, in order of first use, given those of a first and of a second operand: for each
    pair of entries, the variables of `first`, then those of `second` that are not among them. All are arrays [term].

    An entry is a 64-bit word of up to 16 variable numbers (from 1), four bits each, the first in the lowest bits.
    """
    out, length = first.copy(), np.zeros(len(first), dtype=np.uint64)
    rest = first.copy()
    while rest.any():
        length += (rest != 0).astype(np.uint64)
        rest = rest >> _BITS
    rest = second.copy()
    while rest.any():
        digit = rest & _DIGIT
        new = digit != 0
        seen = out.copy()
        while seen.any():
            new &= (seen & _DIGIT) != digit
            seen = seen >> _BITS
        out[new] |= digit[new] << (length[new] * _BITS)
        length += new.astype(np.uint64)
        rest = rest >> _BITS
    return out


def canonical(uses: Uses, groups: Sequence[int]) -> npt.NDArray[np.bool_]:
    """
    Return, as booleans [term], which of the terms that differ only in the names of variables is to be kept: the one
    that uses the variables of each group in ascending order, beginning with the group's first. Variables of one type
    are a group.

    `uses` has an entry for each term, a 64-bit word of variable numbers (from 1) in order of first use, four bits each,
    the first in the lowest bits; `groups[v - 1]` is the group of variable v.
    """
    kinds = list(dict.fromkeys(groups))
    group = np.array([-1, *(kinds.index(g) for g in groups)])
    rank = np.array([-1, *(list(groups[:i]).count(g) for i, g in enumerate(groups))])
    counts = np.zeros((len(uses), len(kinds)), dtype=np.int64)
    out, rest = np.ones(len(uses), dtype=np.bool_), uses.copy()
    while rest.any():
        digit = (rest & _DIGIT).astype(np.int64)
        there = np.flatnonzero(digit)
        own = group[digit[there]]
        out[there] &= counts[there, own] == rank[digit[there]]
        counts[there, own] += 1
        rest = rest >> _BITS
    return out
