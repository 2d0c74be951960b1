"""
The least time of a rank's step by trying everything: every way to join operators to kernels, in every order.

A step is what `lower` makes of a plan. Its kernels, local moves and updates run on the compute stream, one after the
other; a collective holds the ports of the levels that it crosses, from when the compute stream has come to it until it
is done, and whoever reads its result waits. That is what `simulate.replay` assumes, too; but which operators are one
kernel, and in what order everything is issued, is chosen here by trying it all, with nothing of `plan.groups` but the
question whether a kernel is generated for a few operators, and nothing of `plan.schedule`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unity_ir.cost.kernels import kernel_seconds, seconds_of_update
from unity_ir.machine import Machine
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.groups import with_fusions
from unity_ir.plan.instructions import (
    Compute,
    Fused,
    HaloExchange,
    Leaf,
    Register,
    ReshardMove,
    UpdateWeight,
    communicates,
    makes,
    reads,
)
from unity_ir.plan.plan import PlanOptions
from unity_ir.plan.program import Program
from unity_ir.plan.saved_softmax import with_savings
from unity_ir.simulate.streams import Streams, ticks

OPTIONS = PlanOptions()


@dataclass(frozen=True)
class Task:
    """A kernel or move: its ticks, the ports it holds (none: it runs on the compute stream), and what it reads."""

    ticks: int
    ports: tuple[int, ...]
    after: tuple[int, ...]
    """The tasks that make what it reads."""


class Step:
    """A rank's step, as `lower` makes it, of which everything can be tried."""

    def __init__(self, program: Program, machine: Machine):
        self.program = with_savings(program)
        self.machine = machine
        self.streams = Streams(machine)
        body = self.program.body
        needed = set(self.program.returned) | {i.grad for i in body if isinstance(i, UpdateWeight)}
        alive: list[Compute | ReshardMove | HaloExchange] = []
        for i in reversed(body):
            if isinstance(i, Leaf | UpdateWeight):
                continue
            # Moves that nobody reads are not emitted; operators are, since a kernel may store what it has to.
            if isinstance(i, Compute) or not needed.isdisjoint(makes(i)):
                needed.update(reads(i))
                alive.append(i)
        self.actions = alive[::-1]
        self.computes = [i for i in self.actions if isinstance(i, Compute)]
        optimizer = program.optimizer or Optimizer()
        updates = [i for i in body if isinstance(i, UpdateWeight)]
        self.updates = sum(ticks(seconds_of_update(self.program, u, optimizer, machine.device)) for u in updates)

    # -- kernels

    def groups(self) -> list[tuple[tuple[Compute, ...], Compute]]:
        """Every (operators, the one kernel that computes them); a single operator is one, too."""
        out: list[tuple[tuple[Compute, ...], Compute]] = [((c,), c) for c in self.computes]
        for i, first in enumerate(self.computes):
            stack: list[tuple[int, tuple[Compute, ...]]] = [(i, (first,))]
            while stack:
                last, members = stack.pop()
                made = {r for m in members for r in m.results}
                for place in range(last + 1, len(self.computes)):
                    more = (*members, self.computes[place])
                    if not made.isdisjoint(more[-1].operands) and (one := self._one(more)) is not None:
                        out.append((more, one))
                        stack.append((place, more))
        return out

    def _one(self, members: Sequence[Compute]) -> Fused | None:
        """The kernel generated for some operators; found by planning them as a program of their own."""
        inside = {r for m in members for r in m.results}
        outside = dict.fromkeys(r for m in members for r in m.operands if r not in inside)
        read = {r for i in self.actions if i not in members for r in reads(i)}
        read.update(self.program.returned, *(reads(i) for i in self.program.body if isinstance(i, UpdateWeight)))
        program = replace(
            self.program,
            body=(*(Leaf("input", r, str(r)) for r in outside), *members),
            outputs=tuple(r for m in members for r in m.results if r in read),
        )
        found = with_fusions(program, OPTIONS.implementation, OPTIONS.memo).body[len(outside) :]
        return found[0] if len(found) == 1 and isinstance(found[0], Fused) else None

    def partitions(self) -> Iterator[tuple[Compute, ...]]:
        """Every way to compute all operators by kernels, each operator by one."""
        groups = self.groups()

        def rest(done: frozenset[Compute], kernels: tuple[Compute, ...]) -> Iterator[tuple[Compute, ...]]:
            first = next((c for c in self.computes if c not in done), None)
            if first is None:
                yield kernels
                return
            for members, kernel in groups:
                if members[0] is first and done.isdisjoint(members):
                    yield from rest(done.union(members), (*kernels, kernel))

        return rest(frozenset(), ())

    # -- time

    def tasks(self, kernels: Sequence[Compute]) -> list[Task]:
        """The tasks of a step with these kernels; reads may be of later ones."""
        actions = [*kernels, *(i for i in self.actions if not isinstance(i, Compute))]
        maker: dict[Register, int] = {r: n for n, i in enumerate(actions) for r in makes(i)}
        out: list[Task] = []
        for action in actions:
            after = tuple(sorted({maker[r] for r in reads(action) if r in maker}))
            if isinstance(action, Compute):
                out.append(Task(ticks(kernel_seconds(self.program, action, self.machine.device)), (), after))
                continue
            layout = self.program.tensors[action.operand].layout
            move = move_of(self.program, action)
            _, length, levels, _ = self.streams.step(move, layout, self.program.tensors[action.result].dtype)
            out.append(Task(length, levels if communicates(action) else (), after))
        return out

    def least(self, most: int) -> int:
        """The least ticks of all kernels in all orders, or `most` if none takes less."""
        for kernels in self.partitions():
            most = min(most, self.updates + least(self.tasks(kernels), most - self.updates))
        return most


def least(tasks: Sequence[Task], most: int) -> int:
    """
    The least ticks of tasks in any order in which each comes after those it reads, or `most` if none takes less (or
    there is no order: kernels that read each other's results).

    A state is what is done, when the compute stream and each port are free, and when collectives under way end. Of two
    states with the same done, one that is nowhere later leaves out the other.
    """
    everything = (1 << len(tasks)) - 1
    needs = [sum(1 << t for t in task.after) for task in tasks]
    ports = sorted({p for t in tasks for p in t.ports})
    work = [sum(t.ticks for t in tasks if not t.ports), *(sum(t.ticks for t in tasks if p in t.ports) for p in ports)]
    if max(work, default=0) >= most:
        return most
    seen: dict[int, list[tuple[int, ...]]] = {}

    def go(done: int, free: tuple[int, ...], left: tuple[int, ...], ends: tuple[int, ...]) -> None:
        """`free` and `left` (work) have the compute stream, then each port; `ends` is 0 for what is waited for."""
        nonlocal most
        if done == everything:
            most = min(most, max((*free, *ends), default=0))
            return
        if max(now + work for now, work in zip(free, left, strict=True)) >= most:
            return
        state = (*free, *ends)
        known = seen.setdefault(done, [])
        if any(all(a <= b for a, b in zip(other, state, strict=True)) for other in known):
            return
        known.append(state)
        for n, task in enumerate(tasks):
            if done >> n & 1 or needs[n] & ~done:
                continue
            start = max((free[0], *(ends[t] for t in task.after)))
            now = [0 if t in task.after else end for t, end in enumerate(ends)]
            times, rest = list(free), list(left)
            times[0] = start
            if task.ports:
                held = [1 + ports.index(p) for p in task.ports]
                now[n] = max(start, *(free[h] for h in held)) + task.ticks
                for h in held:
                    times[h], rest[h] = now[n], rest[h] - task.ticks
            else:
                times[0], rest[0] = start + task.ticks, rest[0] - task.ticks
            go(done | 1 << n, tuple(times), tuple(rest), tuple(now))

    go(0, (0,) * (1 + len(ports)), tuple(work), (0,) * len(tasks))
    return most
