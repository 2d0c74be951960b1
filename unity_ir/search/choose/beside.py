"""Start a process that simulates plans, and finds plans of the graph without rewrites, while the search goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.choose.candidates import Candidate, candidate, that_fit
from unity_ir.search.choose.hidden_moves import Shares, plans_with_hidden_moves
from unity_ir.search.choose.parallel_branches import place_branches
from unity_ir.search.exact.plan_graph import placed, realise
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.joint.best_first import JointPlan
from unity_ir.search.worker import ForkedWorker
from unity_ir.simulate.report import EmittedStep, emitted_step, simulated_beside


class Beside:
    """
    A process that simulates plans as emitted, and finds plans of the graph without rewrites, while the search goes on.

    One process does both: kernels that its plans have in common are written once. It ends with `stack`. Before it is
    begun, and where no processor is free, plans are simulated when `emitted_step` is asked for them, and found when
    asked for.
    """

    def __init__(self, serial: Graph, machine: Machine, optimizer: Optimizer, stack: ExitStack):
        self.serial, self.machine, self.optimizer = serial, machine, optimizer
        self._stack = stack
        self._expect = stack.enter_context(simulated_beside(machine, optimizer))
        self.source: Graph | None = None
        """The plan of the graph without rewrites, if there is a process, which simulates it."""
        self._asked = set[Graph]()
        self._worker: ForkedWorker[Graph | Shares, EmittedStep | list[Candidate]] | None = None

    @property
    def begun(self) -> bool:
        """Whether the process was begun."""
        return self._worker is not None

    def begin(self, plan: ExactPlan, solver: Solver, graph: Graph) -> None:
        """
        Start the process; `plan`, and the parallel `graph` it gives, is the one that `solver` found for the graph
        without rewrites.
        """
        self._worker = self._stack.enter_context(ForkedWorker(partial(self._answer, plan, solver)))
        if self._worker.is_forked:
            self.source = graph

    def simulate(self, plan: Graph) -> None:
        """Have the process simulate a plan once, if there is a process; `emitted_step` then waits for it."""
        if self._worker is not None and self._worker.is_forked and plan not in self._asked:
            self._asked.add(plan)
            answer = self._worker.ask(plan)

            def simulated() -> EmittedStep:
                found = answer()
                assert isinstance(found, EmittedStep)
                return found

            self._expect(plan, simulated)

    def unrewritten(self, plan: ExactPlan, solver: Solver, shares: Shares) -> Callable[[], list[Candidate]]:
        """
        Begin to find plans of the graph without rewrites, and return a function that waits for those that fit: without
        `shares` that of the least sum of seconds, and that with branches on parts of the machine, since rewrites may
        have joined branches; otherwise those that are optimal if one of these shares of the seconds of weights' moves
        is free. `plan` and `solver` are those that `begin` was given.
        """
        if self._worker is None:
            return lambda: self._unrewritten(plan, solver, shares)
        answer = self._worker.ask(shares)

        def found() -> list[Candidate]:
            plans = answer()
            assert isinstance(plans, list)
            return plans

        return found

    def _answer(self, plan: ExactPlan, solver: Solver, question: Graph | Shares) -> EmittedStep | list[Candidate]:
        if isinstance(question, Graph):
            return emitted_step(question, self.machine, self.optimizer)
        return self._unrewritten(plan, solver, question)

    def _unrewritten(self, plan: ExactPlan, solver: Solver, shares: Shares) -> list[Candidate]:
        graph = realise(self.serial, plan, solver)
        if shares:
            source = JointPlan(graph, None, (), 0, self.serial, plan, solver)
            hidden = plans_with_hidden_moves(source, self.machine, self.optimizer, shares)
            return that_fit(candidate("overlapped", each, self.optimizer) for _, each in hidden)
        first = candidate("source", (graph, cost(graph, self.machine, self.optimizer)), self.optimizer)
        if not first.fits:
            return []
        _, rests, relays = placed(self.serial, plan, solver)
        on_parts = place_branches(self.serial, self.machine, self.optimizer, graph, (rests, relays))
        return [first, *that_fit([] if on_parts is None else [candidate("branches", on_parts, self.optimizer)])]
