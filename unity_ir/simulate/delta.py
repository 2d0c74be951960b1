"""
Delta simulation (FlexFlow, section 5.3): update the makespan of a plan after one operator's assignment changes.

The task graph is cut into a sequence of blocks: one for the forward of every operator, with the reshards issued around
it, then one for the backward of each in reverse. The *state* between two blocks says how far each port and each arrival
is ahead of the compute stream's clock (with several classes of devices, of the first class's). Nothing later can start
before that clock, so whatever lies before it counts as being at it. A block maps a state to the next state and advances
the clock, independently of the absolute time. So a changed block is simulated anew, and those after it only until a
state equals the one before the change; later blocks are merely shifted. Times are integer ticks, so the result equals
that of a full simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unity_ir.budget import spend
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise, resting
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Assignment, Layout, dual, pins_of, role_name
from unity_ir.simulate.chains import Key, Task, arrivals
from unity_ir.simulate.choices import fits
from unity_ir.simulate.costs import Choice, Costs
from unity_ir.simulate.streams import Classes, Streams

PROPOSED = 30_000
"""Work charged to the budget for a proposal, in addition to `LENGTH` per operator."""

LENGTH = 1_000
"""Work charged to the budget for a proposal, per operator of the plan."""

BEGUN = 100_000
"""Work charged for every operator of a new simulation."""

Use = tuple[int, int]
"""The position of an operator among the compute nodes, and the index of an operand."""

Group = tuple[Layout, Layout, Use, Use | None]
"""
A reshard that its users share: source, target, first use, and the use whose backward comes
last (None without gradient).
"""

Pending = dict[Key, int]

Block = list[Task]


class Simulation:
    """
    Simulates one iteration of a serial forward graph, whose assignments can be changed one at a time. An assignment is
    the role of each mesh axis in an operator: an index variable that it divides, replicas, .. Only the mesh axes `axes`
    may be pinned (the operator is at one coordinate). With `overlap`, communication runs beside kernels; without, every
    move is waited for at once.

    `assignments` has every compute node. Inputs and weights are stored in the layout in which their first use reads
    them; operators that read a value in one layout share its reshard; costs are those of `cost.plan` for the graph
    `realised()`. Devices are simulated separately along `axes`.

    `like` is another simulation of the same graph, whose machine, axes, optimizer and memo of costs are taken over:
    `machine`, `axes` and `optimizer` are then ignored. Making a simulation, and each proposal, are charged to the
    budget (`unity_ir.budget`).

    In methods, `p` is an operator's index in `nodes`, and `v` a value's index in `values`.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        assignments: Mapping[Node, Assignment],
        optimizer: Optimizer | None = None,
        overlap: bool = True,
        axes: Sequence[int] = (),
        like: Simulation | None = None,
    ):
        self.graph = graph
        self.overlap = overlap
        self.streams = like.streams if like else Streams(machine, tuple(axes))
        self.costs = like.costs if like else Costs(self.streams, optimizer or Optimizer())
        self.nodes = [n for n in graph.nodes() if n.is_compute]
        spend(BEGUN * len(self.nodes))
        self._index(graph, like)
        count = len(self.nodes)
        self.choices: list[Choice] = [self.choice(p, assignments[n]) for p, n in enumerate(self.nodes)]
        self.groups: list[list[Group]] = [[] for _ in self.values]
        self.updates: list[tuple[int, Classes]] = [(0, ())] * len(self.values)
        self.blocks: list[Block] = [[] for _ in range(2 * count)]
        self.advance: list[int] = [0] * (2 * count)
        self.lags: list[tuple[int, ...]] = [()] * (2 * count)
        self.pending: list[Pending] = [{}] * (2 * count)
        self.sums: list[int] = [0] * (1 + self.streams.classes)
        """The clock's advance over all blocks, in ticks; then the ticks of updates on each device class."""
        self._undo: list[tuple[list[Any], int, Any]] = []
        self._open = False
        self._rebuild()

    def _index(self, graph: Graph, like: Simulation | None) -> None:
        """Number values and operators, in graph order."""
        with_gradient = nodes_with_gradient(graph)
        self.position = {n: p for p, n in enumerate(self.nodes)}
        nodes = graph.nodes()
        self.values = [v for n in nodes for v in n.results]
        number = {v: i for i, v in enumerate(self.values)}
        self.types = [v.type for v in self.values]
        self.producer = [self.position.get(v.node, -1) for v in self.values]
        self.operands = [[number[v] for v in n.operands] for n in self.nodes]
        self.results = [[number[v] for v in n.results] for n in self.nodes]
        self.leaves = [list(dict.fromkeys(v for v in vs if self.producer[v] < 0)) for vs in self.operands]
        self.backward = [n in with_gradient for n in self.nodes]
        self.has_gradient = [v.node in with_gradient for v in self.values]
        self.updated = [v.node in with_gradient and v.node.op == "weight" for v in self.values]
        self.needs = [tuple(n in with_gradient and v.node in with_gradient for v in n.operands) for n in self.nodes]
        self.uses: list[list[Use]] = [[] for _ in self.values]
        for p, operands in enumerate(self.operands):
            for i, v in enumerate(operands):
                self.uses[v].append((p, i))
        self._numbers: dict[tuple[int, Layout], int] = like._numbers if like else {}
        self._kept_choices: dict[tuple[int, Assignment], Choice] = like._kept_choices if like else {}
        self._sends: dict[tuple[int, Layout, Layout, bool], tuple[Task, ...]] = like._sends if like else {}

    # -- what a plan is

    @property
    def makespan(self) -> int:
        """The ticks (picoseconds) that an iteration takes with the current assignments."""
        if len(self.sums) == 2:
            return self.sums[0] + max(self._end) + self.sums[1]
        return self.sums[0] + self._last(self._end, self.sums[1:])

    @property
    def _end(self) -> tuple[int, ...]:
        """The ticks that each stream is ahead of the clock after the last block; 0 for a graph without operators."""
        return self.lags[-1] if self.lags else (0,) * (self.streams.classes * self.streams.width)

    @property
    def assignments(self) -> dict[Node, Assignment]:
        """The current assignment of every compute node: the role of each mesh axis in it."""
        return {n: c.assignment for n, c in zip(self.nodes, self.choices, strict=True)}

    def assignment(self, node: Node) -> Assignment:
        """Return the current assignment of an operator."""
        return self.choices[self.position[node]].assignment

    def realised(self) -> Graph:
        """Return the parallel graph, with machine views, that the current assignments describe."""
        return materialise(self.graph, self.assignments, self.streams.machine.mesh)

    def ticks(self, node: Node) -> int:
        """
        Return the ticks (picoseconds) of an operator's kernels, forward and backward together, with its current
        assignment.
        """
        choice = self.choices[self.position[node]]
        return choice.forward + choice.backward

    def propose(self, node: Node, assignment: Assignment) -> int:
        """
        Change the assignment of one operator, on trial; return the new makespan in ticks (picoseconds). Call `accept`
        or `reject` before the next proposal.

        Raises `UnityError` if the assignment does not fit the operator, or pins an axis that is not among `axes`; all
        assignments are then as before.
        """
        assert not self._open, "accept or reject the last proposal first"
        spend(PROPOSED + LENGTH * len(self.nodes))
        p = self.position[node]
        choice = self.choice(p, assignment)
        self._open = True
        try:
            self._change(p, choice)
        except BaseException:
            self.reject()
            raise
        return self.makespan

    def accept(self) -> None:
        """Keep the assignment that `propose` has set."""
        self._undo.clear()
        self._open = False

    def reject(self) -> None:
        """Undo the last `propose`: all assignments are as before it."""
        for kept, i, old in reversed(self._undo):
            kept[i] = old
        self.accept()

    def _last(self, clocks: Sequence[int], updates: Sequence[int]) -> int:
        """Return the ticks at which the last device class ends its updates, given the clock of every stream."""
        width = self.streams.width
        return max(max(clocks[k * width : (k + 1) * width]) + update for k, update in enumerate(updates))

    # -- costs

    def choice(self, p: int, assignment: Assignment) -> Choice:
        """
        Return how operator number `p` of `nodes` runs under an assignment: the layouts of its operands and results, the
        ticks (picoseconds) of its kernels, its halo exchanges and device classes. The current assignment is not
        changed.

        Raises `UnityError` if the assignment does not fit the operator, or pins an axis that is not among `axes`.
        """
        found = self._kept_choices.get((p, assignment))
        if found is None:
            node = self.nodes[p]
            if not fits(node, assignment, self.streams.machine.mesh):
                said = ", ".join(map(role_name, assignment))
                raise UnityError(
                    f"pcg.{node.op}: the assignment {said} does not fit it on {self.streams.machine.devices} devices"
                )
            apart = [axis for axis, _ in pins_of(assignment) if axis not in self.streams.axes]
            if apart:
                raise UnityError(
                    f"pcg.{node.op}: it is pinned on mesh axis {apart[0]}; simulate with axes that have it"
                )
            found = self.costs.choice(node, self.needs[p], assignment)
            self._kept_choices[p, assignment] = found
        return found

    def reshard_number(self, v: int, layout: Layout) -> int:
        """
        Return the number of the reshard of value number `v` of `values` to `layout`: tasks wait for its result by this
        number. The reshard of the value's gradient, the other way, has the number after it.
        """
        return self._numbers.setdefault((v, layout), 2 * len(self._numbers))

    def _send(self, v: int, group: Group, back: bool = False) -> tuple[Task, ...]:
        """Return the tasks of a value's reshard; if `back`, of its gradient's."""
        source, target, _, _ = group
        key = (v, source, target, back)
        found = self._sends.get(key)
        if found is None:
            number = self.reshard_number(v, target) + back
            ends = (dual(target), dual(source)) if back else (source, target)
            found = self._sends[key] = self.costs.reshard_tasks(self.types[v], ends, number, self.overlap, back)
        return found

    # -- building

    def groups_of(self, v: int) -> list[Group]:
        """
        Return the reshards of value number `v` of `values` under the current assignments, in order of first use. There
        is one for each layout that users read the value in, other than the one it is made in; all users of that layout
        share it.

        A reshard is (source layout, target layout, first use, last use), and a use is (the user's index in `nodes`,
        index of the operand). The last use is the one whose backward comes last; it is None if there is no gradient.
        """
        uses = self.uses[v]
        if not uses:
            return []
        choices = self.choices
        producer = self.producer[v]
        if producer < 0:
            p, i = uses[0]
            source = resting(choices[p].needs[i])
        else:
            source = choices[producer].makes[self.values[v].index]
        first: dict[Layout, Use] = {}
        last: dict[Layout, Use] = {}
        has_gradient = self.has_gradient[v]
        for use in uses:
            p, i = use
            need = choices[p].needs[i]
            if need not in first:
                first[need] = use
            if has_gradient and need not in last and self.backward[p]:
                last[need] = use
        return [(source, need, use, last.get(need)) for need, use in first.items() if need != source]

    def forward_tasks(self, p: int) -> Block:
        """
        Return the tasks of the forward of operator number `p` of `nodes`, with its halo exchanges and the reshards that
        are issued around it. A reshard with several readers is issued for the first of them. With overlap, the reshards
        are those of inputs, weights and constants for which the next operator is the first reader (for operator 0 also
        those that it reads itself), and those of this operator's results. Without, they are those of its operands for
        which it is the first reader.
        """
        out: Block = []
        if self.overlap:
            for q in (0, 1) if p == 0 else (p + 1,):
                if q < len(self.nodes):
                    self._ahead(q, self.leaves[q], out)
        else:
            self._ahead(p, dict.fromkeys(self.operands[p]), out)
        choice = self.choices[p]
        numbers = [self.reshard_number(v, need) for v, need in zip(self.operands[p], choice.needs, strict=True)]
        for k in choice.classes:
            stream = (self.streams.compute(k),)
            waits = arrivals(numbers, self.streams, k)
            if choice.halos:
                out.append((0, stream, stream, waits, ()))
        out.extend(task for _, task in choice.halos)
        for k in choice.classes:
            stream = (self.streams.compute(k),)
            out.append((choice.forward, stream, stream, arrivals(numbers, self.streams, k), ()))
        if self.overlap:
            for v in self.results[p]:
                for group in self.groups[v]:
                    out += self._send(v, group)
        return out

    def _ahead(self, p: int, values: Iterable[int], out: Block) -> None:
        """Issue the reshards of some values whose first use is by operator `p`."""
        found = [(g[2], v, g) for v in values for g in self.groups[v] if g[2][0] == p]
        for _, v, group in sorted(found):
            out += self._send(v, group)

    def _backward(self, p: int) -> Block:
        return [*self.backward_kernel(p), *self.backward_reshards(p)]

    def backward_kernel(self, p: int) -> Block:
        """
        Return the tasks of the backward kernels of operator number `p` of `nodes`, with its halo exchanges. Without
        overlap, the reshards of its results' gradients, which it waits for, are among them. Empty if it has no
        backward.
        """
        out: Block = []
        if not self.backward[p]:
            return out
        choice = self.choices[p]
        numbers: list[int] = []
        for v in self.results[p]:
            for group in self.groups[v]:
                if group[3] is not None:
                    numbers.append(self.reshard_number(v, group[1]) + 1)
                if not self.overlap and group[3] is not None:
                    out += self._send(v, group, back=True)
        for k in choice.classes:
            stream = (self.streams.compute(k),)
            out.append((choice.backward, stream, stream, arrivals(numbers, self.streams, k), ()))
        out.extend(task for _, task in choice.halos_back)
        return out

    def backward_reshards(self, p: int) -> Block:
        """
        Return the tasks of the reshards that are issued after the backward of operator number `p` of `nodes`: those of
        its operands' gradients that are complete then. Without overlap, only those of gradients of inputs and weights;
        `backward_kernel` has the others.
        """
        out: Block = []
        if not self.backward[p]:
            return out
        found = [
            (g[3], v, g)
            for v in dict.fromkeys(self.operands[p])
            for g in self.groups[v]
            if g[3] is not None and g[3][0] == p and (self.overlap or self.producer[v] < 0)
        ]
        for _, v, group in sorted(found):
            out += self._send(v, group, back=True)
        return out

    def _block(self, b: int) -> Block:
        count = len(self.nodes)
        return self.forward_tasks(b) if b < count else self._backward(2 * count - 1 - b)

    def _places(self, v: int, group: Group) -> Iterable[int]:
        """Yield the blocks in which a reshard and that of its gradient are issued or waited for."""
        _, _, (first, _), last = group
        producer = self.producer[v]
        if not self.overlap:
            yield first
        else:
            yield producer if producer >= 0 else max(0, first - 1)
        end = 2 * len(self.nodes) - 1
        if producer >= 0:
            yield end - producer
        if last is not None:
            yield end - last[0]

    def update_of(self, v: int) -> tuple[int, Classes]:
        """
        Return (ticks, classes) of the optimizer's update of value number `v` of `values`, a weight, in the layout in
        which it is stored now: its picoseconds, and the numbers of the device classes that run it. (0, ()) if the value
        is no weight, or has no gradient.
        """
        if not self.updated[v]:
            return 0, ()
        if self.uses[v]:
            p, i = self.uses[v][0]
            rest = resting(self.choices[p].needs[i])
        else:
            # A weight that is only an output is replicated (`materialise`).
            rest = (REPEAT,) * len(self.streams.machine.mesh.sizes)
        return self.costs.update(self.values[v], rest), self.streams.where(rest)

    def _set_update(self, v: int) -> None:
        new, old = self.update_of(v), self.updates[v]
        if new != old:
            self._set(self.updates, v, new)
            for (ticks, classes), sign in ((old, -1), (new, 1)):
                for k in classes:
                    self._set(self.sums, 1 + k, self.sums[1 + k] + sign * ticks)

    def _rebuild(self) -> None:
        for v in range(len(self.values)):
            self.groups[v] = self.groups_of(v)
            self._set_update(v)
        for b in range(len(self.blocks)):
            self.blocks[b] = self._block(b)
        self._run(range(len(self.blocks)))
        self.accept()

    def full_makespan(self) -> int:
        """
        Return the makespan, in ticks, with all tasks built and simulated anew. It equals `makespan`, of which it is a
        check.
        """
        for v in range(len(self.values)):
            self.groups[v] = self.groups_of(v)
        clocks = [0] * self.streams.count
        pending: Pending = {}
        for b in range(len(self.blocks)):
            run_tasks(self._block(b), clocks, pending)
        updates = [0] * self.streams.classes
        for v in range(len(self.values)):
            ticks, classes = self.update_of(v)
            for k in classes:
                updates[k] += ticks
        return self._last(clocks, updates)

    # -- changing

    def _set(self, kept: list[Any], i: int, new: Any) -> None:
        self._undo.append((kept, i, kept[i]))
        kept[i] = new

    def _change(self, p: int, choice: Choice) -> None:
        old = self.choices[p]
        self._set(self.choices, p, choice)
        touched = {v for v, a, b in zip(self.operands[p], old.needs, choice.needs, strict=True) if a != b}
        touched.update(v for v, a, b in zip(self.results[p], old.makes, choice.makes, strict=True) if a != b)
        dirty = {p, 2 * len(self.nodes) - 1 - p}
        for v in touched:
            before, after = self.groups[v], self.groups_of(v)
            if before != after:
                self._set(self.groups, v, after)
                for group in {*before} ^ {*after}:
                    dirty.update(self._places(v, group))
            self._set_update(v)
        changed: list[int] = []
        for b in sorted(dirty):
            block = self._block(b)
            if block != self.blocks[b]:
                self._set(self.blocks, b, block)
                changed.append(b)
        self._run(changed)

    def _run(self, changed: Sequence[int]) -> None:
        """Simulate the changed blocks, and after each the following ones until a state is the same as before."""
        count = len(self.blocks)
        total = self.sums[0]
        at = 0
        for b in changed:
            if b < at:
                continue
            lags = self.lags[b - 1] if b else (0,) * self.streams.count
            pending = self.pending[b - 1] if b else {}
            for at in range(b, count):
                clocks, pending = list(lags), dict(pending)
                run_tasks(self.blocks[at], clocks, pending)
                onwards = clocks[0]
                lags, pending = self._state(clocks, pending)
                if onwards != self.advance[at]:
                    total += onwards - self.advance[at]
                    self._set(self.advance, at, onwards)
                if lags == self.lags[at] and pending == self.pending[at]:
                    break
                self._set(self.lags, at, lags)
                self._set(self.pending, at, pending)
            at += 1
        if total != self.sums[0]:
            self._set(self.sums, 0, total)

    def _state(self, clocks: list[int], pending: Pending) -> tuple[tuple[int, ...], Pending]:
        """
        Return the state after a block: clocks and arrivals, relative to the clock of the first compute stream.

        A port that is free before its compute stream, or an arrival before all of them, delays
        nothing, as one at the clock.
        """
        now = clocks[0]
        if self.streams.classes == 1:
            lags = tuple([at - now if at > now else 0 for at in clocks])
            first = now
        else:
            width = self.streams.width
            computes = clocks[::width]
            lags = tuple([max(at, computes[s // width]) - now for s, at in enumerate(clocks)])
            first = min(computes)
        return lags, {key: at - now for key, at in pending.items() if at > first} if pending else pending


def run_tasks(block: Block, clocks: list[int], pending: Pending) -> None:
    """
    Simulate the tasks of a block (those of one operator's forward or backward) in order, as `simulate.full` does, and
    update the state in place.

    The state is `clocks` [stream], the tick (picosecond) from which each stream is free, and `pending`, the tick at
    which each reshard's result is complete on a device class, by the key of this arrival (`chains.Key`).
    """
    for ticks, after, held, waits, sets in block:
        end = clocks[after[0]]
        for stream in after:
            if clocks[stream] > end:
                end = clocks[stream]
        if pending:
            for key in waits:
                at = pending.get(key)
                if at is not None and at > end:
                    end = at
        end += ticks
        for stream in held:
            clocks[stream] = end
        for key in sets:
            pending[key] = end
