"""The rules the joint search rewrites by, each of the library's family `algebraic`."""

from __future__ import annotations

from functools import cache

from unity_ir.rules.library import family, group
from unity_ir.rules.rule import Rule

SEARCHED = ("fuse-activation", "unfuse-activation", "merge-matmuls", "split-of-concat", "concat-of-split")
"""In the order they are tried."""


@cache
def algebraic() -> tuple[Rule, ...]:
    """The rules named in `SEARCHED`."""
    known = group(family("algebraic"))
    return tuple(known[name] for name in SEARCHED)
