"""
Canonicalize parallel operators (partition, combine, replicate, reduce, ...: they change into what pieces a value is
divided, never the value): remove chains without effect, and merge two steps of a kind into one.

Operators with a view are left alone, since their placement has been decided. No fold adds communication:
`replicate(pick x)` and `zero_pad(reduce x)` move their value, and are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import SSAValue
from xdsl.pattern_rewriter import PatternRewriter, RewritePattern, op_type_rewrite_pattern

from unity_ir.dialects.pcg.operators import ParallelOp

INVERSES = {"combine": "partition", "partition": "combine", "reduce": "zero_pad", "pick": "replicate"}
"""`{"combine": "partition"}`: a combine undoes the partition before it."""

MERGEABLE = ("partition", "combine", "replicate", "reduce", "pick", "zero_pad")
"""Operators of which two in sequence, along the same dim, equal one with the product of their degrees."""


def _producer(op: ParallelOp) -> ParallelOp | None:
    """Return the parallel operator that makes the operand, if neither it nor `op` has a view; else None."""
    inner = op.operand.owner
    return inner if isinstance(inner, ParallelOp) and inner.view is None and op.view is None else None


def _replace(op: ParallelOp, new: Sequence[ParallelOp], value: SSAValue, rewriter: PatternRewriter) -> None:
    """Put `value` in the place of the result, and drop the operator before `op` if nothing else used it."""
    inner = op.operand.owner
    rewriter.replace(op, new, [value])
    if isinstance(inner, ParallelOp) and not inner.result.uses:
        rewriter.erase(inner)


class FoldIdentity(RewritePattern):
    """
    Remove a parallel operator of degree 1, which leaves one piece as one piece.

    rewrite: partition(x, dim i by 1) -> x, and so for every parallel operator
    """

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: ParallelOp, rewriter: PatternRewriter) -> None:
        """
        Replace `op` by its operand, and remove it, if its degree is 1 and it has no machine view; else do nothing.
        """
        # An all_to_all by 1 is an identity, too; the types say so.
        if op.view is not None or op.degrees.get("by") != 1 or op.operand.type != op.result.type:
            return
        rewriter.replace(op, [], [op.operand])


class FoldInverse(RewritePattern):
    """
    Remove a parallel operator and the inverse one before it, such as a combine after a partition.

    rewrite: combine(partition(x, dim i by d), dim i by d) -> x
             partition(combine(x, dim i by d), dim i by d) -> x
             reduce(zero_pad(x, by d), by d)               -> x
             pick(replicate(x, by d), by d)                -> x
    """

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: ParallelOp, rewriter: PatternRewriter) -> None:
        """
        Replace `op` by the operand of the operator before it, if that one is its inverse, of the same degree and dim,
        and neither has a machine view; else do nothing.
        """
        inner = _producer(op)
        if inner is None or INVERSES.get(op.operator_name()) != inner.operator_name() or op.degrees != inner.degrees:
            return
        _replace(op, [], inner.operand, rewriter)


class MergeChain(RewritePattern):
    """
    Merge two parallel operators of the same kind, one after the other, into one.

    rewrite: partition(partition(x, dim i by a), dim i by b) -> partition(x, dim i by a * b)
             replicate(replicate(x, by a), by b)             -> replicate(x, by a * b)
             and so for combine, reduce, pick and zero_pad
    """

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: ParallelOp, rewriter: PatternRewriter) -> None:
        """
        Replace `op` and the operator of the same kind and dim before it by one, of the product of their degrees, if
        neither has a machine view; else do nothing.
        """
        inner = _producer(op)
        name = op.operator_name()
        if inner is None or name not in MERGEABLE or inner.operator_name() != name:
            return
        merged = {**op.degrees, "by": op.degrees["by"] * inner.degrees["by"]}
        if op.degrees.get("dim") != inner.degrees.get("dim") or merged["by"] >= 2**63:
            return
        new = type(op).make([inner.operand], {**merged})
        assert isinstance(new, ParallelOp)
        _replace(op, [new], new.result, rewriter)


PATTERNS: tuple[RewritePattern, ...] = (FoldIdentity(), FoldInverse(), MergeChain())
