"""`-t irdl`: the module as MLIR reads it with the dialects that `--irdl` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from unity_ir.dialects.convert import pcg_functions, write_names
from unity_ir.dialects.irdl_names import rename_for_irdl
from unity_ir.dialects.parameters import ParameterPrinter


@dataclass(frozen=True)
class IrdlTarget(Target):
    """
    Print the module in MLIR's generic form, as MLIR reads it with the IRDL definitions of this project's dialects
    (`unity-opt --irdl`): types and attributes are lists of parameters (`dialects.parameters`), and operations have
    their names in IRDL (`dialects.irdl_names`). `unity-opt` reads it as it reads any other text.
    """

    name = "irdl"

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        """
        Write the module's text to `output`. Raises `UnityError` for an operation with more operands or results than the
        dialects' IRDL declares.
        """
        copy = module.clone()
        for func in pcg_functions(copy):
            write_names(func)
        rename_for_irdl(copy)
        # Dialects in IRDL have no properties.
        printer = ParameterPrinter(stream=output, print_generic_format=True, print_properties_as_attributes=True)
        printer.print_op(copy)
        output.write("\n")
