"""`pcg-search`: the best graph for a machine in the place of each function's."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import PassFailedException

from unity_ir.dialects.convert import pcg_functions, replace_function, to_graph
from unity_ir.dialects.machine import machine_name, set_machine
from unity_ir.errors import UnityError


@dataclass(frozen=True)
class Search(ModulePass):
    """
    Search algebraic rewrites and parallelizations, and record the machine the result is for.

    rewrite: matmul(x, w) -> reduce(matmul(partition(x), partition(w))), or whatever costs least
    """

    name = "pcg-search"

    strategy: str = "joint"
    """How to search: see `unity_ir.search`."""

    machine: str | None = None
    """A preset or a file: see `unity_ir.machine`. By default, the module's `machine.machine`."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        text = self.machine if self.machine is not None else machine_name(op)
        if text is None:
            raise PassFailedException(
                "pcg-search: the machine is missing; add --machine=M, or machine.machine to the module"
            )
        from unity_ir import machine as machines
        from unity_ir import search

        try:
            machine = machines.load(text)
            for func in pcg_functions(op):
                replace_function(func, search.run(to_graph(func), machine, self.strategy).graph)
        except UnityError as error:
            raise PassFailedException(str(error)) from error
        set_machine(op, text)
