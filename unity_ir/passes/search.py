"""`pcg-search`: the best graph for a machine in the place of each function's."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, ModuleOp, StringAttr, f64
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import PassFailedException

from unity_ir.dialects.convert import pcg_functions, replace_function, to_graph
from unity_ir.dialects.machine import module_machine, set_machine
from unity_ir.errors import UnityError
from unity_ir.search import Progress, SearchResult, Settings, run

DERIVATION = "pcg.derivation"
"""The function attribute that holds the rule applications from the source graph to the plan."""

BOUND = "pcg.bound"
"""The function attribute that holds the seconds below which no placement of the plan's graph can be."""


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

    seed: int = 0
    """Of the random strategy and of mcmc."""

    beta: float | None = None
    """Of mcmc: see `unity_ir.search.mcmc.Settings`."""

    budget: int | None = None
    """Proposals of mcmc."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        from unity_ir.machine import load

        try:
            settings = self._settings()
            machine = module_machine(op) if self.machine is None else load(self.machine)
            if machine is None:
                raise PassFailedException(
                    "pcg-search: the machine is missing; add --machine=M, or machine.machine to the module"
                )
            for func in pcg_functions(op):
                graph = to_graph(func)
                with _shown(func.sym_name.data) as progress:
                    result = run(graph, machine, self.strategy, None, progress, self.seed, settings)
                new = replace_function(func, result.graph)
                new.attributes.update(_certificate(result))
        except UnityError as error:
            raise PassFailedException(str(error)) from error
        if self.machine is not None:
            set_machine(op, self.machine)

    def _settings(self) -> Settings:
        """What mcmc is told; what is not given is its own choice."""
        if self.strategy != "mcmc" and (self.beta is not None or self.budget is not None):
            raise UnityError(f"pcg-search: beta and budget are options of mcmc, not of {self.strategy}; leave them out")
        settings = Settings(seed=self.seed)
        if self.beta is not None:
            settings = replace(settings, beta=self.beta)
        return settings if self.budget is None else replace(settings, budget=self.budget)


def _certificate(result: SearchResult) -> dict[str, ArrayAttr[StringAttr] | FloatAttr]:
    """What says how the plan came about and how good it is."""
    found: dict[str, ArrayAttr[StringAttr] | FloatAttr] = {}
    if result.bound is not None:
        found[DERIVATION] = ArrayAttr(StringAttr(str(step)) for step in result.derivation)
        found[BOUND] = FloatAttr(result.bound, f64)
    return found


@contextmanager
def _shown(name: str) -> Generator[Progress | None]:
    """Progress on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    with console.status(f"searching @{name}") as status:

        def progress(explored: int, best: float) -> None:
            status.update(f"searching @{name}: {explored} graphs, best {best * 1e6:.1f} us")

        yield progress
