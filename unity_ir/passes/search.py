"""`pcg-search`: the best graph for a machine in the place of each function's."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, ModuleOp, StringAttr, f64
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import PassFailedException

from unity_ir import interrupts
from unity_ir.budget import WORK, Budget
from unity_ir.dialects.convert import pcg_functions, replace_function, to_graph
from unity_ir.dialects.machine import module_machine, set_machine
from unity_ir.errors import UnityError
from unity_ir.messages import tell
from unity_ir.passes.graph_pass import Switch
from unity_ir.pcg.graph import Optimizer, optimizer_of
from unity_ir.search import Options, Progress, SearchResult, Settings, run
from unity_ir.search.explain import explain

DERIVATION = "pcg.derivation"
"""The function attribute that holds the rule applications from the source graph to the plan."""

REWRITE = ("joint", "sequential", "unity")
"""Strategies that rewrite."""

BOUND = "pcg.bound"
"""The function attribute that holds the seconds below which no placement of the plan's graph can be."""


UNIT = 1e9
"""Units of work in one unit of the option `work` and of messages."""


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
    """Of mcmc: see `unity_ir.search.flexflow.mcmc.Settings`."""

    budget: int | None = None
    """Proposals of mcmc; candidates for every operator of unity."""

    alpha: float | None = None
    """Of unity: how much worse than the best a candidate may be and still be rewritten."""

    no_split: Switch = False
    no_cache: Switch = False
    """Of unity: not to split the graph, and to keep nothing from one candidate to the next (the paper's Table 2)."""

    rules: str | None = None
    """What joint, sequential and unity rewrite by: `library`, `common+~merge-matmuls`, ..: see `rules.algebraic`."""

    optimizer: str | None = None
    """What the plan will be trained with, whose state takes memory; by default what the function says, or sgd."""

    work: int | float | None = None
    """What the search may do, in units of 10^9 (about a second of a processor each); by default 100."""

    seconds: int | float | None = None
    """What it may take as well; by default as long as its work does."""

    explain: str | None = None
    """Of the joint search: an operator whose choice, and what others would cost, is printed to stderr."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        from unity_ir.machine import load

        try:
            settings, options, optimizer = self._settings(), self._options(), self._optimizer()
            machine = module_machine(op) if self.machine is None else load(self.machine)
            if machine is None:
                raise PassFailedException(
                    "pcg-search: the machine is missing; add --machine=M, or machine.machine to the module"
                )
            for func in pcg_functions(op):
                graph = to_graph(func)
                with _shown(func.sym_name.data) as progress, interrupts.searching():
                    result = run(
                        graph,
                        machine,
                        self.strategy,
                        optimizer,
                        progress,
                        self.seed,
                        settings,
                        options,
                        self._rules(),
                        self._budget(),
                    )
                new = replace_function(func, result.graph)
                new.attributes.update(_certificate(result))
                self._tell(result, func.sym_name.data)
        except UnityError as error:
            raise PassFailedException(str(error)) from error
        if self.machine is not None:
            set_machine(op, self.machine)

    def _optimizer(self) -> Optimizer | None:
        if self.explain is not None and self.strategy != "joint":
            raise UnityError(f"pcg-search: explain is for the joint search, not for {self.strategy}; leave it out")
        return None if self.optimizer is None else optimizer_of("pcg-search", self.optimizer, {})

    def _budget(self) -> Budget:
        for name, value in (("work", self.work), ("seconds", self.seconds)):
            if value is not None and not 0 < value < inf:
                raise UnityError(f"pcg-search: {name} is {value}; a budget is a number above 0")
        return Budget.of(self.seconds, WORK if self.work is None else self.work * UNIT)

    def _tell(self, result: SearchResult, name: str) -> None:
        if result.budget is not None and result.budget.ended:
            which = "time" if result.budget.is_late else "work"
            more = "seconds" if result.budget.is_late else "work"
            tell(
                f"pcg-search: the budget of {which} ended the search of @{name} after {result.explored} graphs and "
                f"{result.budget.done / UNIT:.4g} of {result.budget.work / UNIT:.4g} units of work; its best plan so "
                f"far stands; give it more {more} to go on"
            )
        elif result.interrupted:
            tell(f"pcg-search: interrupted; the best plan so far stands for @{name}")
        if self.explain is not None and result.joint is None:
            raise UnityError(f"pcg-search: the plan of @{name} is not the search's but one by hand; leave out explain")
        if self.explain is not None and result.joint is not None:
            print(explain(result.joint, result.cost, self.explain), file=sys.stderr)

    def _settings(self) -> Settings:
        """What mcmc is told; what is not given is its own choice."""
        mine = self.strategy == "mcmc"
        if not mine and (self.beta is not None or (self.budget is not None and self.strategy != "unity")):
            raise UnityError(f"pcg-search: beta and budget are options of mcmc, not of {self.strategy}; leave them out")
        settings = Settings(seed=self.seed)
        if self.beta is not None:
            settings = replace(settings, beta=self.beta)
        return replace(settings, budget=self.budget) if mine and self.budget is not None else settings

    def _rules(self) -> str:
        if self.rules is not None and self.strategy not in REWRITE:
            raise UnityError(
                f"pcg-search: rules is an option of {', '.join(REWRITE)}, not of {self.strategy}; leave it out"
            )
        return self.rules or "common"

    def _options(self) -> Options:
        """What unity is told; what is not given is its own choice."""
        split, cache = self.no_split is False, self.no_cache is False
        if self.strategy != "unity" and not (split and cache and self.alpha is None):
            raise UnityError(
                f"pcg-search: alpha, no-split and no-cache are options of unity, not of {self.strategy}; leave them out"
            )
        options = Options(split=split, cache=cache)
        if self.alpha is not None:
            options = replace(options, alpha=self.alpha)
        if self.strategy == "unity" and self.budget is not None:
            options = replace(options, budget=self.budget)
        return options


def _certificate(result: SearchResult) -> dict[str, ArrayAttr[StringAttr] | FloatAttr]:
    """What says how the plan came about and how good it is."""
    found: dict[str, ArrayAttr[StringAttr] | FloatAttr] = {}
    if result.joint is not None or result.bound is not None or result.derivation:
        found[DERIVATION] = ArrayAttr(StringAttr(str(step)) for step in result.derivation)
    if result.bound is not None:
        found[BOUND] = FloatAttr(result.bound, f64)
    return found


@contextmanager
def _shown(name: str) -> Generator[Progress | None]:
    """Progress on stderr, if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    with console.status(f"searching @{name}") as status:

        def progress(explored: int, best: float) -> None:
            status.update(f"searching @{name}: {explored} graphs, best {best * 1e6:.1f} us")

        yield progress
