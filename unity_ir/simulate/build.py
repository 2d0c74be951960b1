"""
Build the task graph of one iteration of a plan.

Program order is forward operators in graph order, backward in reverse, then the optimizer's step. With overlap, a
reshard is issued as soon as its source is made, a leaf's reshard one operator ahead of its first use, and a gradient's
synchronization as soon as the gradient is complete. Without overlap, every move is issued right before its first use
and waited for at once. Halo exchanges are always waited for at once, although the emitted program overlaps them
(`plan.schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unity_ir.cost.keeps import Keeps
from unity_ir.cost.memory import cast_bytes, is_master_at_host
from unity_ir.cost.plan import PlanCost, update_time
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph, optimizer_of_step, topological
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Layout, dual, shard_count
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.simulate.chains import Key, Task, arrivals, chain, stall
from unity_ir.simulate.hops import Hop, Use, hops
from unity_ir.simulate.streams import Streams, pinned_axes, ticks
from unity_ir.simulate.tasks import (
    BACKWARD,
    BACKWARD_MOVE,
    FORWARD,
    FORWARD_MOVE,
    SYNC,
    UPDATE,
    Label,
    TaskGraph,
    flat,
)


def task_graph(
    graph: Graph,
    plan: PlanCost,
    optimizer: Optimizer | None = None,
    overlap: bool = True,
    axes: Sequence[int] | None = None,
) -> TaskGraph:
    """
    Return the task graph of one iteration of a placed graph (one whose operators have machine views): forward, backward
    and update, one task per kernel and move. It is quick to build, as operators are not fused; `replay` has the tasks
    of the program as emitted. `plan` is the graph's cost (`cost.plan.cost`).

    `optimizer` is used if the graph names none (None: the default one). With `overlap`, communication runs beside
    kernels; without, every move is waited for at once. `axes` are the mesh axes along which devices are simulated
    separately: None for those on which some layout is pinned, so that devices differ. With all axes, every device is
    simulated.
    """
    placement = plan.placement
    if axes is None:
        axes = pinned_axes([*placement.layouts.values(), *placement.assignments.values()])
    builder = _Builder(graph, plan, optimizer_of_step(graph, optimizer), Streams(plan.machine, tuple(axes)))
    return builder.build(overlap)


class _Builder:
    def __init__(self, graph: Graph, plan: PlanCost, optimizer: Optimizer, streams: Streams):
        self.graph = graph
        self.plan = plan
        self.optimizer = optimizer
        self.streams = streams
        self.overlap = True
        self.explicit = bool(graph.updates)
        self.with_gradient = nodes_with_gradient(graph)
        self.keeps = Keeps(graph)
        self.order = [n for n in graph.nodes() if n.is_compute]
        # In a whole step only the forward reaches the outputs.
        self.is_forward = set(topological(graph.outputs))
        self.costs = {o.node: o for o in plan.operators}
        self.hops = hops(graph, plan, streams, frozenset() if self.explicit else self.with_gradient)
        self.back = len(self.hops.all)
        """The gradient of reshard n is number `back` + n."""
        self.to_send: dict[int, list[Hop]] = {}
        self.to_send_back: dict[int, list[Hop]] = {}
        self.to_sync: dict[int, list[int]] = {}
        self.to_sync_first: list[int] = []
        """
        Weights that no operator reads, such as those returned: their gradients are complete before the backward begins.
        """
        self._schedule()
        self.tasks: list[Task] = []
        self.labels: list[Label] = []
        self.before: list[list[int]] = []
        self.last = [-1] * streams.count
        self.arrived: dict[Key, int] = {}
        self.sent: set[int] = set()
        self.sizes: dict[object, int] = {}
        self.uses: dict[object, list[int]] = {}

    def _schedule(self) -> None:
        """Find the operator before which each reshard is issued that is not issued when its source is made."""
        for hop in self.hops.all:
            if hop.first is not None:
                self.to_send.setdefault(hop.first[0], []).append(hop)
            if hop.last is not None:
                self.to_send_back.setdefault(hop.last[0], []).append(hop)
        for group in self.to_send.values():
            group.sort(key=lambda h: (h.first, h.depth))
        for group in self.to_send_back.values():
            group.sort(key=lambda h: (-h.depth, h.last))
        if not self.explicit:
            ends: list[tuple[Use, int]] = []
            for i, r in enumerate(self.plan.weight_reshards):
                uses = [h.last for h in self.hops.starting.get(r.value, ()) if h.last is not None]
                if uses:
                    ends.append((min(uses), i))
                else:
                    self.to_sync_first.append(i)
            for (p, _), i in sorted(ends):
                self.to_sync.setdefault(p, []).append(i)

    def build(self, overlap: bool) -> TaskGraph:
        self.overlap = overlap
        for p in range(len(self.order)):
            self._forward(p)
        for hop in self.hops.all:
            self._send(hop)
        if not self.explicit:
            for hop in reversed(self.hops.all):
                if hop.last is None:
                    self._send_back(hop)
            for i in self.to_sync_first:
                self._sync(i)
            for p in reversed(range(len(self.order))):
                self._backward(p)
        else:
            self._weight_gradients()
        self._update()
        return self._arrays()

    # -- forward

    def _forward(self, p: int) -> None:
        node = self.order[p]
        layouts = self.plan.placement.layouts
        if self.overlap:
            ahead = [h for q in ((0, 1) if p == 0 else (p + 1,)) for h in self.to_send.get(q, ())]
            for hop in ahead:
                if hop.root.node.is_leaf:
                    self._send_on(hop)
        else:
            for hop in self.to_send.get(p, ()):
                self._send(hop)
        reading = self.hops.reading.get(node, [])
        sources = list(dict.fromkeys(n for hop in reading for n in hop.awaited))
        kind, moving = (FORWARD, FORWARD_MOVE) if node in self.is_forward else (BACKWARD, BACKWARD_MOVE)
        for r in self.hops.exchanges.get(p, ()):
            steps = self.streams.steps(r.forward, r.source, r.value.type.dtype)
            self._add(stall(self.streams, steps, sources), moving, r.value)
        done = self._compute(node, node.op, self.costs[node].forward, sources, kind)
        for value in node.results:
            self._hold(value, self._bytes(value, layouts[value]), done)
        for hop in reading:
            self._read(hop, done)
        if self.overlap:
            for value in node.results:
                for hop in self.hops.starting.get(value, ()):
                    self._send_on(hop)

    def _send_on(self, hop: Hop) -> None:
        self._send(hop)
        for child in hop.children:
            self._send_on(child)

    def _send(self, hop: Hop) -> None:
        """Issue a reshard, unless it was issued already."""
        if hop.number in self.sent:
            return
        if hop.parent is not None:
            self._send(hop.parent)
        self.sent.add(hop.number)
        if not hop.forward:
            return
        value = hop.reshard.value
        sources, levels = (hop.parent.awaited, hop.parent.levels) if hop.parent else ((), ())
        late = hop.first is None or self.order[hop.first[0]] not in self.is_forward
        kind = FORWARD_MOVE if not late or not self.explicit else SYNC if hop.first is None else BACKWARD_MOVE
        done = self._add(chain(self.streams, hop.forward, hop.number, sources, self.overlap, levels), kind, value)
        if hop.parent is not None:
            self._read(hop.parent, done)
        else:
            self._hold(value, None, done)
        self._hold(("copy", hop.number), self._bytes(value, hop.reshard.target), done)

    # -- backward

    def _backward(self, p: int) -> None:
        node = self.order[p]
        if node not in self.with_gradient:
            return
        layouts = self.plan.placement.layouts
        starting = [hop for value in node.results for hop in self.hops.starting.get(value, ())]
        if not self.overlap:
            for hop in starting:
                self._send_all_back(hop)
        sources = list(dict.fromkeys(n for hop in starting for n in hop.awaited_at_source(self.back)))
        done = self._compute(node, f"{node.op} backward", self.costs[node].backward, sources, BACKWARD)
        for r in self.hops.exchanges.get(p, ()):
            steps = self.streams.steps(r.backward, dual(r.source), r.value.type.dtype)
            self._add(stall(self.streams, steps, ()), BACKWARD_MOVE, r.value)
        for value in node.results:
            if value in self.keeps.values:
                self._hold(value, None, done)
            if value.type.is_floating:
                self._hold(("gradient", value), self._gradient_bytes(value, layouts[value]), done)
        for hop, read in zip(self.hops.reading.get(node, []), self.keeps.operands(node), strict=False):
            if read:
                self._read(hop, done)
            if hop.reshard.value.node in self.with_gradient:
                self._read_gradient(hop, done)
        for hop in self.to_send_back.get(p, ()):
            if self.overlap or hop.root.node.is_leaf:
                self._send_back(hop)
        for i in self.to_sync.get(p, ()):
            self._sync(i)

    def _send_all_back(self, hop: Hop) -> None:
        for child in hop.children:
            self._send_all_back(child)
        self._send_back(hop)

    def _send_back(self, hop: Hop) -> None:
        """Issue the reshard of the gradient, from a reshard's target back to its source."""
        if not hop.backward:
            return
        value = hop.reshard.value
        kind = SYNC if hop.root.node.op == "weight" else BACKWARD_MOVE
        moving = chain(
            self.streams,
            hop.backward,
            self.back + hop.number,
            hop.awaited_at_target(self.back),
            self.overlap,
            hop.levels_at_target,
        )
        done = self._add(moving, kind, value)
        self._hold(("gradient copy", hop.number), self._gradient_bytes(value, hop.reshard.target), done)
        if hop.parent is not None:
            self._read_gradient(hop.parent, done)
        else:
            self._hold(("gradient", value), self._gradient_bytes(value, hop.reshard.source), done)

    def _sync(self, i: int) -> None:
        """Issue the reshard of a weight's gradient to the layout in which the weight rests."""
        found = self.plan.weight_reshards[i]
        value = found.value
        starting = self.hops.starting.get(value, ())
        sources = [n for hop in starting for n in hop.awaited_at_source(self.back)]
        levels = next((hop.levels_at_source for hop in starting if hop.levels_at_source), ())
        steps = self.streams.steps(found.backward, found.source, value.type.grad_dtype)
        done = self._add(chain(self.streams, steps, 2 * self.back + i, sources, self.overlap, levels), SYNC, value)
        self._hold(("gradient", value), self._gradient_bytes(value, found.target), done)

    def _weight_gradients(self) -> None:
        """Issue the gradients' reshards of a graph that has its backward and updates."""
        for i, r in enumerate(self.plan.weight_reshards):
            steps = self.streams.steps(r.forward, r.source, r.value.type.dtype)
            hop = self.hops.leading.get(r.value)
            sources, levels = (hop.awaited, hop.levels) if hop else ((), ())
            self._add(chain(self.streams, steps, 2 * self.back + i, sources, self.overlap, levels), SYNC, r.value)

    # -- update

    def _update(self) -> None:
        """Add the optimizer's step, once all gradients have arrived."""
        weights = [u.weight for u in self.graph.updates] or [r.value for r in self.plan.weight_reshards]
        for value in weights:
            seconds = update_time(value.node, self.optimizer, self.plan.machine)
            layout = self.plan.placement.layouts[value]
            found: list[tuple[str, Task]] = []
            for k in self.streams.where(layout):
                compute = self.streams.compute(k)
                every = tuple(range(compute, compute + self.streams.width))
                found.append((self.optimizer.name, (ticks(seconds), every, (compute,), (), ())))
            self._hold(("gradient", value), self._gradient_bytes(value, layout), self._add(found, UPDATE, value))

    # -- tasks and buffers

    def _compute(self, node: Node, what: str, seconds: float, sources: Sequence[int], kind: int) -> range:
        found: list[tuple[str, Task]] = []
        for k in self.streams.where(self.plan.placement.assignments[node]):
            stream = (self.streams.compute(k),)
            found.append((what, (ticks(seconds), stream, stream, arrivals(sources, self.streams, k), ())))
        return self._add(found, kind, node.results[0])

    def _add(self, found: Sequence[tuple[str, Task]], kind: int, value: Value) -> range:
        begin = len(self.tasks)
        for what, task in found:
            _, after, held, waits, sets = task
            number = len(self.tasks)
            before = {self.last[s] for s in after} | {self.arrived.get(key, -1) for key in waits}
            self.before.append(sorted(before - {-1}))
            self.tasks.append(task)
            self.labels.append(
                Label(kind, what, "" if kind in (FORWARD, BACKWARD) else _source_name(value), value.type)
            )
            for s in held:
                self.last[s] = number
            for key in sets:
                self.arrived[key] = number
        return range(begin, len(self.tasks))

    def _hold(self, buffer: object, size: int | None, tasks: range) -> None:
        """Record that tasks use a buffer; with `size` in bytes, that they allocate it."""
        if size is not None:
            self.sizes[buffer] = size
        self.uses.setdefault(buffer, []).extend(tasks)

    def _read(self, hop: Hop, tasks: range) -> None:
        """Record that tasks read a reshard's result."""
        at = hop
        while at is not None and not at.forward:
            at = at.parent
        self._hold(hop.root if at is None else ("copy", at.number), None, tasks)

    def _read_gradient(self, hop: Hop, tasks: range) -> None:
        """Record that tasks write a part of the gradient of a reshard's result."""
        at = hop
        while at is not None and not at.backward:
            at = at.parent
        self._hold(("gradient", hop.root) if at is None else ("gradient copy", at.number), None, tasks)

    def _bytes(self, value: Value, layout: Layout) -> int:
        return _piece_elements(value, layout, self.plan.placement.mesh.sizes) * ELEMENT_BYTES[value.type.dtype]

    def _gradient_bytes(self, value: Value, layout: Layout) -> int:
        return _piece_elements(value, layout, self.plan.placement.mesh.sizes) * ELEMENT_BYTES[value.type.grad_dtype]

    def _arrays(self) -> TaskGraph:
        layouts = self.plan.placement.layouts
        updated = {u.weight for u in self.graph.updates} or {r.value for r in self.plan.weight_reshards}
        always = [0] * self.streams.classes
        for value, layout in layouts.items():
            if value.node.is_leaf:
                master = ELEMENT_BYTES[value.node.master]
                tensors = 1
                if value in updated:
                    tensors += self.optimizer.held_states - is_master_at_host(value.node, self.optimizer)
                each = cast_bytes(value.node) + master * tensors
                for k in self.streams.where(layout):
                    always[k] += each * _piece_elements(value, layout, self.plan.placement.mesh.sizes)
        kept = [(size, self.uses[b]) for b, size in self.sizes.items() if self.uses.get(b)]
        return TaskGraph(
            self.streams,
            np.array([task[0] for task in self.tasks], dtype=np.int64),
            flat(self.before),
            flat([task[2] for task in self.tasks]),
            tuple(self.labels),
            np.array([size for size, _ in kept], dtype=np.int64),
            flat(uses for _, uses in kept),
            tuple(always),
        )


def _source_name(value: Value) -> str:
    """
    Return what to call a value in traces: the name of an input or weight, else the kind of the operator that makes it
    (`matmul`).
    """
    node = value.node
    return node.name if node.op in ("input", "weight") else node.op


def _piece_elements(value: Value, layout: Layout, sizes: Sequence[int]) -> int:
    """Return the elements of a value's shard on each device."""
    return value.type.elements // shard_count(layout, sizes)
