"""
Search the fastest step at points whose machines differ in figures alone, sharing all that does not depend on these: the
graph, the plans of recipes, and what is known of each program from the points where it was replayed.

At each point, known programs are replayed in the order of what they take at least there, until that is no less than
the best. Then its neighbours in the family of recipes are tried (hill climbing), as long as one is faster. Points go
from slow to fast machines; a second round compares programs that were found later with the points before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Literal

from unity_ir.cost.least import work_bound
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.with_stages import run_with_stages
from unity_ir.sweep.grid import graph_of, samples
from unity_ir.sweep.programs import Program, figures, has_program
from unity_ir.sweep.recipes import AUTO, Family, Recipe

Joint = Literal["none", "corners", "all"]
"""Where the joint search runs, too: nowhere, at the slowest and the fastest point of each mesh, or at every point."""

JOINT = "joint"
"""What a program of the joint search was made by."""

FASTER = 0.9995
"""A neighbour must be faster by this factor to be climbed to: less is not worth its own neighbours' plans."""


@dataclass(frozen=True, slots=True)
class Best:
    """
    The fastest step found at a point: its seconds, the bytes on a device, and the recipe (degrees of parallelism) that
    it was made by.
    """

    seconds: float
    memory: int
    recipe: Recipe | None
    """None of the joint search's plan."""
    bound: float
    """Seconds that no plan of the graph is below."""


class PointSearch:
    """
    Searches the fastest step of one model on each of `machines`, which differ only in bandwidths and size of memory.
    Each plan (recipe) that was made for one machine is also tried on the others.

    `text` is the model's, `mixed` the type of mixed precision (None: none); with `has_stages` pipelines are searched,
    too. `joint` says on which machines the joint search runs: `none`, `corners` (the slowest and the fastest), or
    `all`.
    """

    def __init__(
        self,
        text: str,
        mixed: str | None,
        machines: Sequence[Machine],
        optimizer: Optimizer,
        has_stages: bool = False,
        joint: Joint = "none",
    ):
        self.graph: Graph = erase(graph_of(text, mixed))
        self.machines = machines
        self.optimizer = optimizer
        self.family = Family(machines[0], samples(text), has_stages)
        self.most = max(machine.device.usable for machine in machines)
        self.programs: dict[tuple[object, int], Program | None] = {}
        """By recipe, or `JOINT`, and the usable bytes that it was made for; 0 where it does not depend on them."""
        self.held: dict[Recipe, int] = {}
        """Bytes at the end of the forward under each recipe that was planned, those that fit nowhere among them."""
        order = sorted(machines, key=lambda m: (figures(m), m.device.usable))
        ends = {"none": [], "corners": [order[0], order[-1]], "all": order}[joint]
        self.joint_at = {id(machine) for machine in ends}
        self._bounds: dict[float, float] = {}

    def plan_recipe(self, recipe: Recipe, machine: Machine) -> None:
        """
        Make the plan of a recipe (degrees of parallelism, micro-batches, recompute) on `machine`, and remember it:
        `best` and `best_known` then also consider it, on every machine. Does nothing if the plan cannot be made, or
        fits none of the machines.
        """
        self._program(recipe, machine)

    def best(self, machine: Machine) -> Best | None:
        """
        Search the fastest step on `machine`, one of `machines`, by hill climbing over recipes; return it. On the
        machines that the class's argument `joint` selects (none, the slowest and the fastest, or all), the joint search
        runs first. None if no plan was found that fits.
        """
        found = self.best_known(machine)
        if id(machine) in self.joint_at and self._joint(machine):
            found = self.best_known(machine)
        if found is None or found.recipe is None:
            for recipe in self.family.starts():
                self._program(recipe, machine)
        if self.best_known(machine) is None:
            self._shrink(machine)
        while (found := self.best_known(machine)) is not None and found.recipe is not None:
            least = found.seconds * FASTER
            if not any(self._is_faster(recipe, machine, least) for recipe in self.family.neighbours(found.recipe)):
                break
        return found

    def _shrink(self, machine: Machine) -> None:
        """Go from the smallest recipe known to smaller neighbours, until a program fits or there are none."""
        done: set[Recipe] = set()
        while self.best_known(machine) is None:
            smallest = min((r for r in self.held if r not in done), key=lambda r: self.held[r], default=None)
            if smallest is None or self.held[smallest] > min(map(self.held.__getitem__, self.held)):
                break
            done.add(smallest)
            for recipe in self.family.neighbours(smallest):
                self._program(recipe, machine)

    def best_known(self, machine: Machine) -> Best | None:
        """
        Return the fastest on `machine` of the plans made so far, for whichever machine, that fit it; no more plans are
        made. None if none fits.
        """
        at, best, winner = figures(machine), inf, None
        known = [p for p in self.programs.values() if p is not None and p.rests <= machine.device.usable]
        for program in sorted(known, key=lambda p: p.least(at)):
            if program.least(at) >= best:
                break
            if program.fits(machine) and program.play(machine).seconds < best:
                best, winner = program.play(machine).seconds, program
        if winner is None:
            return None
        recipe = winner.recipe if isinstance(winner.recipe, Recipe) else None
        return Best(best, winner.play(machine).memory, recipe, min(self.bound(machine), self._own_bound(winner)))

    def bound(self, machine: Machine) -> float:
        """
        Return a lower bound, in seconds, of any plan of the model's graph, as it is before rewrites, on a machine
        (`cost.least.work_bound`). It does not depend on the links, and is memoised by the bandwidth of a device's
        memory.
        """
        rate = machine.device.memory_bandwidth
        if rate not in self._bounds:
            self._bounds[rate] = work_bound(self.graph, machine, self.optimizer)
        return self._bounds[rate]

    def _own_bound(self, program: Program) -> float:
        """Return the bound of a program's own graph, if the joint search rewrote it."""
        return inf if isinstance(program.recipe, Recipe) else work_bound(program.graph, program.machine, self.optimizer)

    def _is_faster(self, recipe: Recipe, machine: Machine, than: float) -> bool:
        """Return whether a recipe fits a machine and takes less than some seconds there."""
        program = self._program(recipe, machine)
        if program is None or program.least(figures(machine)) >= than:
            return False
        return program.fits(machine) and program.play(machine).seconds < than

    def _program(self, recipe: Recipe, machine: Machine) -> Program | None:
        """Return the program of a recipe, memoised; None if there is none, or none of the machines has the memory."""
        key = (recipe, machine.device.usable if recipe.recompute == AUTO else 0)
        if key not in self.programs:
            self.programs[key] = None
            with suppress(UnityError):
                graph = recipe.plan(self.graph, machine, self.optimizer)
                program = Program(graph, machine, self.optimizer, recipe)
                self.held[recipe] = program.rests
                if program.rests <= self.most and has_program(program, machine):
                    self.programs[key] = program
        return self.programs[key]

    def _joint(self, machine: Machine) -> bool:
        """Run the joint search on a machine; return whether it found a plan."""
        self.joint_at.discard(id(machine))
        stages = None if self.family.has_stages else "none"
        with suppress(UnityError):
            found = run_with_stages(self.graph, machine, "joint", self.optimizer, stages=stages)
            program = Program(found.graph, machine, self.optimizer, JOINT)
            if has_program(program, machine):
                self.programs[JOINT, len(self.programs)] = program
                return True
        return False
