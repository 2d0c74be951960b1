"""`pcg-name-values`: values named after weights and operators, for text of tools that number them."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import PassFailedException

from unity_ir.dialects.convert import name_values, pcg_functions
from unity_ir.errors import UnityError


@dataclass(frozen=True)
class NameValues(ModulePass):
    """
    Name every SSA value as `unity-opt` prints it; the graph stays the same.

    rewrite: f(%arg0 {pcg.name = "x"}) { %0 = pcg.relu %arg0 } -> f(%x) { %relu0 = pcg.relu %x }
    """

    name = "pcg-name-values"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """Name the SSA values of each pcg function of the module, in place."""
        for func in pcg_functions(op):
            try:
                name_values(func)
            except UnityError as error:
                raise PassFailedException(str(error)) from error
