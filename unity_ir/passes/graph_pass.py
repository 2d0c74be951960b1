"""
Base class of passes that convert a module's functions to graphs, rewrite each graph, and convert back; and the graph of
a module's plan, for targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import PassFailedException

from unity_ir.dialects.certificate import add_unproved
from unity_ir.dialects.convert import pcg_functions, replace_function, to_graph
from unity_ir.dialects.machine import module_machine
from unity_ir.dialects.spmd import ProgramOp
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.sharding import devices_of

Switch = bool | None
"""`no-split` as well as `no-split=true`: xDSL reads a name without a value as None."""

ModuleMachine = Callable[[], Machine | None]


@dataclass(frozen=True)
class GraphPass(ModulePass, ABC):
    """Base of passes that rewrite each pcg function of a module by itself, as a graph; subclasses define `rewrite`."""

    @abstractmethod
    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the graph that replaces `graph`, or `graph` itself if nothing changes.

        `machine` is a function without arguments: it returns the module's machine, or None if it has none. Raises
        `UnityError` where the pass does not apply.
        """

    def unproved_rules(self) -> tuple[str, ...]:
        """
        Return the names of rules that the pass applies although they are not proved, () by default. `apply` records
        them in the attribute `pcg.unproved` of each function that it changes.
        """
        return ()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """
        Rewrite each pcg function of the module, in place. Raises `PassFailedException` where `rewrite` raises
        `UnityError`.
        """
        for func in pcg_functions(op):
            try:
                graph = to_graph(func)
                new = self.rewrite(graph, lambda: module_machine(op))
                if new is not graph:
                    made = replace_function(func, new)
                    add_unproved(made, self.unproved_rules())
            except UnityError as error:
                raise PassFailedException(str(error)) from error


def placed_graph(module: ModuleOp, target: str) -> tuple[Graph, Machine]:
    """
    Return the graph of a module's one plan, and its machine: that of the module, or, if it has none, one of a single
    level (`box`) with as many devices as the plan uses.

    Raises `UnityError`, in the name of `target`, for several plans or none, and for a module that is lowered.
    """
    if any(isinstance(op, ProgramOp) for op in module.ops):
        raise UnityError(f"{target}: the module is lowered already; leave lower-pcg-to-spmd out")
    functions = pcg_functions(module)
    if len(functions) != 1:
        raise UnityError(f"{target}: a plan is one function of pcg operations, and the module has {len(functions)}")
    graph = to_graph(functions[0])
    return graph, module_machine(module) or load(f"box:{devices_of(graph)}")
