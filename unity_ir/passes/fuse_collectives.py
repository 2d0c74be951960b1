"""`pcg-fuse-collectives`: chains of parallel operators to the collective that performs them."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from unity_ir.dialects.convert import pcg_functions, replace_function, to_graph
from unity_ir.pcg.fuse_collectives import fuse_collectives


@dataclass(frozen=True)
class FuseCollectives(ModulePass):
    """
    Replace chains of parallel operators by the collective that performs them.

    rewrite: replicate(reduce(x)) -> all_reduce(x)
             replicate(combine(x)) -> all_gather(x)
             partition(reduce(x)) -> reduce_scatter(x)
             partition(combine(x)) on another dim -> all_to_all(x)
    """

    name = "pcg-fuse-collectives"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for func in pcg_functions(op):
            replace_function(func, fuse_collectives(to_graph(func)))
