"""`pcg-fold`: parallel operators that undo each other, do nothing, or repeat each other."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.pattern_rewriter import GreedyRewritePatternApplier, PatternRewriteWalker

from unity_ir.dialects.pcg.fold import PATTERNS


@dataclass(frozen=True)
class Fold(ModulePass):
    """
    Remove parallel operators that undo each other, do nothing, or repeat each other. The patterns are those of
    `dialects.pcg.fold`, which `canonicalize` applies, too.

    rewrite: combine(partition(x, dim i by d), dim i by d)   -> x
             partition(combine(x, dim i by d), dim i by d)   -> x
             reduce(zero_pad(x, by d), by d)                 -> x
             pick(replicate(x, by d), by d)                  -> x
             partition(x, dim i by 1)                        -> x
             partition(partition(x, dim i by a), dim i by b) -> partition(x, dim i by a * b)
    """

    name = "pcg-fold"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """
        Remove from the module, in place, parallel operators that undo each other, do nothing or repeat each other, by
        the patterns of `dialects.pcg.fold`, until none matches.
        """
        PatternRewriteWalker(GreedyRewritePatternApplier(list(PATTERNS))).rewrite_module(op)
