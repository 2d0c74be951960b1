"""`pcg-search`: the best graph for a machine in the place of each function's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, make_dataclass
from math import inf

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import PassFailedException

from unity_ir import interrupts
from unity_ir.budget import WORK, Budget
from unity_ir.dialects.certificate import Certificate, add_unproved, certificate_of
from unity_ir.dialects.convert import pcg_functions, replace_function, to_graph
from unity_ir.dialects.machine import module_machine, set_machine
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.messages import tell
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer, optimizer_of
from unity_ir.rules.algebraic import reservations, selected
from unity_ir.rules.rule import Rule
from unity_ir.search import Progress, SearchResult, all_strategies
from unity_ir.search.explain import explain
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.strategy import OptionValue, option_types
from unity_ir.search.with_stages import Asked, run_with_stages

UNIT = 1e9
"""Units of work per unit of the option `work` and of messages."""


Shown = Callable[[str], AbstractContextManager[Progress | None]]
"""The context in which the function of a name is searched: it gives the search a callback for its progress."""


def _option_kinds() -> dict[str, type]:
    """
    Return the type of every option of any search strategy, by name; these are fields of the pass `pcg-search`, beside
    its own.
    """
    return {name: kind for strategy in all_strategies().values() for name, kind in option_types(strategy).items()}


@dataclass(frozen=True)
class _Search(ModulePass):
    """
    Search algebraic rewrites and parallelizations, and record the machine the result is for.

    rewrite: matmul(x, w) -> reduce(matmul(partition(x), partition(w))), or whatever costs least
    """

    name = "pcg-search"

    strategy: str = "joint"
    """The search strategy: see `unity_ir.search.strategies`."""

    machine: str | None = None
    """A preset or a file: see `unity_ir.machine`. By default, the module's `machine.machine`."""

    optimizer: str | None = None
    """The optimizer the plan is trained with, whose state takes memory; by default the function's, or sgd."""

    ema: int | float | None = None
    """
    The part of a moving average of the weights that stays in each step; it takes memory. By default the function's, or
    none is kept.
    """

    work: int | float | None = None
    """The work budget of the search, in units of 10^9 (about a second of a processor each); by default 100."""

    seconds: int | float | None = None
    """The time budget of the search, in seconds, in addition to that of work; by default unlimited."""

    micro_batches: str | int = 1
    """In how many micro-batches a step runs its batch, one after the other, adding up gradients; auto: the fastest."""

    recompute: str | None = None
    """What the backward computes again: none, attention, block, all, auto; by default none, of joint searches auto."""

    offload: str | None = None
    """What rests in the memory of the host: none, state, activations, all, auto; none by default, auto in joint."""

    loss_pieces: str | int | None = None
    """In how many pieces of the tokens a step makes its loss, or auto; by default 1, of joint searches auto."""

    stages: str | int | None = None
    """
    How many stages of a pipeline the plan has, each on a part of the machine; auto: as many as are fastest, if any. By
    default joint searches of large models on several nodes decide, and others make none.
    """

    schedule: str | None = None
    """The order in which stages run micro-batches: see `plan.pipeline.catalogue`; by default 1f1b, or the fastest of a
    joint search."""

    explain: str | None = None
    """An operator whose choice in the joint search, with the costs of alternatives, is printed to stderr."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for name, result in self.results(op, _shown):
            said = end_message(result, name)
            if said is not None:
                tell(said)
            if self.explain is not None:
                try:
                    print(explained(result, name, self.explain), file=sys.stderr)
                except UnityError as error:
                    raise PassFailedException(str(error)) from error

    def results(self, op: ModuleOp, shown: Shown) -> Iterator[tuple[str, SearchResult]]:
        """
        Search for each pcg function of the module in turn; replace it, in place, and yield its name with what was
        found. At the end record the machine. `shown(name)` is the context of a search, which gives it a callback for
        progress, or None.

        Raises `PassFailedException` without a machine or a plan, and for wrong options.
        """
        from unity_ir.machine import load

        try:
            self._check_explain()
            options = self._options()
            # Read before the search: afterwards their file may be another.
            rules = selected(str(options["rules"])) if "rules" in options else ()
            machine = module_machine(op) if self.machine is None else load(self.machine)
            if machine is None:
                raise PassFailedException(
                    "pcg-search: the machine is missing; add --machine=M, or machine.machine to the module"
                )
            for func in pcg_functions(op):
                graph, name = to_graph(func), func.sym_name.data
                with shown(name) as progress:
                    result = self._run(graph, machine, self._optimizer(graph), options, progress)
                new = replace_function(func, result.graph)
                new.attributes.update(_certificate(result, rules).attributes)
                add_unproved(new, certificate_of(func).unproved)
                yield name, result
        except UnityError as error:
            raise PassFailedException(str(error)) from error
        if self.machine is not None:
            set_machine(op, self.machine)

    def _run(
        self,
        graph: Graph,
        machine: Machine,
        optimizer: Optimizer | None,
        options: dict[str, OptionValue],
        progress: Progress | None,
    ) -> SearchResult:
        given = self.strategy, optimizer, options, progress, self._budget()
        more = self.recompute, None if self.loss_pieces is None else str(self.loss_pieces), self._stages(), self.offload
        if self.micro_batches == "auto":
            return run_with_stages(graph, machine, *given, "auto", *more)
        try:
            count = int(self.micro_batches)
        except ValueError:
            count = 0
        if count < 1:
            raise UnityError(
                f"pcg-search: micro_batches is {self.micro_batches!a}; it is a number of them, 1 or more, or auto"
            )
        return run_with_stages(graph, machine, *given, count, *more)

    def _stages(self) -> Asked:
        if self.stages is None and self.schedule is not None:
            raise UnityError(f"pcg-search: schedule={self.schedule} orders the stages of a pipeline; add stages")
        text = str(self.stages)
        if self.stages is None or text in ("auto", "1"):
            if self.schedule is not None:
                raise UnityError(f"pcg-search: schedule={self.schedule} is of as many stages as are given, not {text}")
            return None if self.stages is None else "auto" if text == "auto" else "none"
        if not text.isdecimal():
            raise UnityError(f"pcg-search: stages is {text!a}; it is a number of them, 1 or more, or auto")
        if self.explain is not None:
            raise UnityError(f"pcg-search: explain does not know pipelines, as of stages={text}; use stages=1")
        return Stages.of(int(text), self.schedule)

    def _check_explain(self) -> None:
        if self.explain is not None and self.strategy != "joint":
            raise UnityError(f"pcg-search: explain is for the joint search, not for {self.strategy}; leave it out")

    def _optimizer(self, graph: Graph) -> Optimizer | None:
        """Return the optimizer that the options ask for; None if that is the graph's own, or sgd."""
        if self.optimizer is None and self.ema is None:
            return None
        if self.optimizer is not None:
            settings = {} if self.ema is None else {"ema": self.ema}
            return optimizer_of("pcg-search", self.optimizer, settings)
        own = graph.optimizer or Optimizer()
        return optimizer_of("pcg-search", own.name, {**own.given, "ema": self.ema})

    def _budget(self) -> Budget:
        for name, value in (("work", self.work), ("seconds", self.seconds)):
            if value is not None and not 0 < value < inf:
                raise UnityError(f"pcg-search: {name} is {value}; a budget is a number above 0")
        return Budget.of(self.seconds, WORK if self.work is None else self.work * UNIT)

    def _options(self) -> dict[str, OptionValue]:
        """Return the options of the strategy that were given."""
        given = {name: getattr(self, name) for name in _option_kinds()}
        return {name: value for name, value in given.items() if value is not None}


Search: type[ModulePass] = make_dataclass(
    "Search",
    [(name, kind | None, field(default=None)) for name, kind in _option_kinds().items()],
    bases=(_Search,),
    frozen=True,
    namespace={"__doc__": _Search.__doc__},
)
"""The pass, with a field for each option of each strategy."""


def _certificate(result: SearchResult, rules: Sequence[Rule]) -> Certificate:
    """
    Return how the plan was derived, by which rules that are not proved in all, and its lower bound. `rules` are those
    that the search was given; others are the library's.
    """
    is_derived = result.joint is not None or result.bound is not None or result.derivation
    derivation = tuple(map(str, result.derivation)) if is_derived else None
    unproved, ties = reservations([step.rule for step in result.derivation], rules)
    pipelines = None if result.waited is None else (result.waited, result.family)
    return Certificate(derivation, unproved, ties, result.bound, pipelines)


def end_message(result: SearchResult, name: str) -> str | None:
    """
    Return a message for the user if the search of the function called `name` ended early: by its budget, or an
    interrupt. None if it did not.
    """
    if result.budget is not None and result.budget.ended:
        which = "time" if result.budget.is_late else "work"
        more = "seconds" if result.budget.is_late else "work"
        return (
            f"pcg-search: the budget of {which} ended the search of @{name} after {result.explored} graphs and "
            f"{result.budget.done / UNIT:.4g} of {result.budget.work / UNIT:.4g} units of work; its best plan so "
            f"far stands; give it more {more} to go on"
        )
    return f"pcg-search: interrupted; the best plan so far stands for @{name}" if result.interrupted else None


def explained(result: SearchResult, name: str, operator: str) -> str:
    """
    Return the text that the option `explain` prints: the sharding that the joint search has chosen for one operator of
    the function called `name`, its cost, and that of the alternatives. `operator` is its name in the printed graph
    (`matmul1`), or its number from 1; `result` is what the search found.

    Raises `UnityError` for a pipeline, for a plan that the search did not find itself (one made by hand), and for an
    unknown operator.
    """
    if result.waited is not None:
        raise UnityError(f"pcg-search: @{name}'s plan is a pipeline, which explain does not know; use stages=1")
    if result.joint is None:
        raise UnityError(f"pcg-search: the plan of @{name} is not the search's but one by hand; leave out explain")
    return explain(result.joint, result.of_micro_batch or result.cost, operator)


@contextmanager
def _shown(name: str) -> Generator[Progress | None]:
    """
    Let signals end the search that the `with` statement runs; show its progress on stderr, if that is a terminal.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        with interrupts.searching():
            yield None
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    with console.status(f"searching @{name}") as status, interrupts.searching():

        def progress(explored: int, best: float) -> None:
            status.update(f"searching @{name}: {explored} graphs, best {best * 1e6:.1f} us")

        yield progress
