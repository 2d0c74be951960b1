"""Define a search strategy: a name, options with defaults, and a search. Modules of `search/strategies/` hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, get_args, get_type_hints

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.joint.best_first import Progress
from unity_ir.search.result import SearchResult

OptionValue = str | int | float | bool


@dataclass(frozen=True)
class SearchContext:
    """Inputs of every strategy besides its own options."""

    optimizer: Optimizer
    """Optimizer the plan will be trained with: its state takes memory."""
    progress: Progress | None = None
    """Called with the number of graphs explored and the seconds of the best plan so far."""
    micro_batches: int = 1
    """
    Number of micro-batches in a step, of which the graph is one: seconds that a step spends once (updates, moves of
    weights) count 1 / `micro_batches`.
    """
    known: float = inf
    """Seconds of the best plan known as emitted: a slower one, found where memory is short, needs no bound."""


@dataclass(frozen=True)
class NoOptions:
    """Options class of a strategy that has no options."""


class Strategy(Protocol):
    """Interface of a search algorithm. Each module of `search/strategies/` lists its own in a tuple `STRATEGIES`."""

    @property
    def name(self) -> str:
        """The name by which users select the strategy: `--search=name`."""
        ...

    @property
    def options(self) -> type[Any]:
        """
        The class of the strategy's options: a frozen dataclass of numbers, strings and flags, all with defaults.

        Users set them by `--search=name,key=value`.
        """
        ...

    def search(self, graph: Graph, machine: Machine, options: Any, context: SearchContext) -> SearchResult:
        """
        Return the plan found for a serial graph on a machine, with its cost.

        `options` is an object of the class `options`, `context` has the optimizer and the progress callback. Raises
        `UnityError` if there is no plan, and `KeyboardInterrupt` if Ctrl-C or the budget ends the search before there
        is one.
        """
        ...


@cache
def all_strategies() -> dict[str, Strategy]:
    """Return every strategy by name, `joint` (the default) first, the others in the order of their modules."""
    folder = Path(__file__).with_name("strategies")
    modules = [import_module(f"unity_ir.search.strategies.{m.name}") for m in iter_modules([str(folder)])]
    found = [strategy for module in modules for strategy in module.STRATEGIES]
    return {s.name: s for s in sorted(found, key=lambda s: s.name != "joint")}


def strategy_named(name: str) -> Strategy:
    """Return the strategy called `name`. Raises `UnityError`, listing the known names, if there is none."""
    found = all_strategies().get(name)
    if found is None:
        raise UnityError(f"search: unknown strategy {name!r}; known are {', '.join(all_strategies())}")
    return found


def option_types(strategy: Strategy) -> dict[str, type]:
    """
    Return the type of each option of a strategy, by name; of an optional one (`int | None`) the type without None.
    """
    hints = get_type_hints(strategy.options)
    return {
        f.name: next(t for t in (*get_args(hints[f.name]), hints[f.name]) if t is not type(None))
        for f in fields(strategy.options)
    }


def make_options(strategy: Strategy, given: Mapping[str, OptionValue]) -> Any:
    """
    Return the strategy's options object with the values `given` by name, and defaults for the others.

    Raises `UnityError` for an option that the strategy does not have, naming the strategies that have it, and for
    values that contradict each other. Their types are not checked.
    """
    known = option_types(strategy)
    for name in given:
        if name not in known:
            having = [s.name for s in all_strategies().values() if name in option_types(s)]
            of = f"an option of {', '.join(having)}, not of" if having else "no option of"
            raise UnityError(f"search: {name} is {of} {strategy.name}; leave it out")
    return strategy.options(**given)
