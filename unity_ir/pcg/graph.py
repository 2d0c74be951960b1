"""The compact graph, of immutable nodes (`pcg.node`), that search, rules and costs work on; its rewrite and erasure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from unity_ir.ops.operator import Attributes
from unity_ir.pcg.node import Node, Value, divide, leaf, node_of
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import TensorType
from unity_ir.pcg.view import View
from unity_ir.tdl.parallel import (
    Configuration,
)


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's step on one weight: `weight` is the result of the weight's leaf, `grad` the weight's gradient."""

    weight: Value
    grad: Value


@dataclass(frozen=True, slots=True)
class Pipeline:
    """
    How a step whose operators are in stages is run: `order` names the pipeline schedule (`plan.pipeline.catalogue`),
    `ranks` is the number of equal parts of the machine, each of which has `chunks` stages.
    """

    order: str
    ranks: int
    chunks: int = 1


OFFLOADS = ("none", "state", "activations", "all")
"""
What of a step may rest in the memory of the host: nothing, the optimizer's state, what the forward saves for the
backward, or both.
"""


def optimizer_of_step(graph: Graph, optimizer: Optimizer | None = None) -> Optimizer:
    """
    Return the optimizer that a graph names, or else `optimizer` (None: the default one), with its state at the host if
    that is what the graph says. Raises `UnityError` if it keeps none then.
    """
    found = graph.optimizer or optimizer or Optimizer()
    return found.offloaded if graph.offloads_state else found


@dataclass(frozen=True)
class Graph:
    """
    A computation graph (forward, or a whole training step): inputs in order, outputs in order, and the updates of
    weights. A forward graph has no updates.

    Its weights are the leaves `weight` that its outputs and updates depend on. With `loss_pieces` above 1, a step makes
    its loss in so many pieces of the tokens, one after the other (`pcg.loss_part`). With a `pipeline`, its operators
    are in stages (`pcg.stages`). With `ring_attention`, the keys and values that attention gathers along a sequence go
    around a ring instead, wherever they can (`plan.rings`). `offload` says what rests in the memory of the host:
    nothing (`none`), the optimizer's state (`state`), what the forward saves for the backward (`activations`), or both
    (`all`). Of what is saved, `staying` bytes stay on each device beside a window (`plan.host_values`). With
    `exchange_rows` above 0, devices that divide experts without a capacity exchange the rows that go to these, wherever
    they can, instead of gathering all (`plan.routes`): at most so many times an even share to a device, as many as may
    come with `inf`. Gathers of weights, and sums of their gradients, of fewer than `bucket` bytes share calls
    (`plan.schedule`; 0: `BUCKET_BYTES`).
    """

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[Value, ...]
    updates: tuple[Update, ...] = ()
    optimizer: Optimizer | None = None
    loss_pieces: int = 1
    pipeline: Pipeline | None = None
    ring_attention: bool = False
    offload: str = "none"
    staying: int = 0
    exchange_rows: float = 0.0
    bucket: int = 0

    @property
    def offloads_state(self) -> bool:
        """Whether the optimizer's state rests in the memory of the host."""
        return self.offload in ("state", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether values that the forward saves for the backward are in the memory of the host meanwhile."""
        return self.offload in ("activations", "all")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.inputs, self.outputs, self.updates, *self._how))

    @property
    def _how(self) -> tuple[object, ...]:
        """The fields that say how the step is run, in order: all from `optimizer` on."""
        return tuple(getattr(self, field.name) for field in fields(self)[4:])

    @property
    def roots(self) -> tuple[Value, ...]:
        """The values that the graph computes: its outputs, then the weight and the gradient of each update."""
        return (*self.outputs, *(v for u in self.updates for v in (u.weight, u.grad)))

    def nodes(self) -> list[Node]:
        """Return every node in an order that has operands before users, and begins with the inputs."""
        return [*self._nodes]

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(topological(self.roots, first=self.inputs))

    def weights(self) -> list[Node]:
        """Return the weight leaves, frozen ones as well, ordered as in `nodes`."""
        return [n for n in self.nodes() if n.op == "weight"]

    def __reduce__(self) -> tuple[Callable[..., Graph], tuple[object, ...]]:
        """
        Pickle node by node, operands first, so that deep graphs do not recurse, and equal nodes are one object again.
        """
        number = {node: i for i, node in enumerate(self.nodes())}

        def place(value: Value) -> tuple[int, int]:
            return number[value.node], value.index

        nodes = [(n.op, [place(v) for v in n.operands], n.attributes, n.types, n.view) for n in number]
        updates = [(place(u.weight), place(u.grad)) for u in self.updates]
        ends = [number[n] for n in self.inputs], [place(v) for v in self.outputs], updates
        return _unpickled, (self.name, nodes, *ends, self._how)

    def users(self) -> Mapping[Value, Sequence[tuple[Node, int]]]:
        """
        Return the uses of each value: the (node, operand index) pairs that read it, in graph order. Outputs and updates
        are no uses; a value without uses is not a key.
        """
        return self._users

    @cached_property
    def _users(self) -> Mapping[Value, Sequence[tuple[Node, int]]]:
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self._nodes:
            for i, operand in enumerate(node.operands):
                found.setdefault(operand, []).append((node, i))
        return found


_Place = tuple[int, int]
"""A value: the number of its node, and which of its results."""


def _unpickled(
    name: str,
    nodes: Iterable[tuple[str, list[_Place], Attributes, tuple[TensorType, ...], View | None]],
    inputs: Iterable[int],
    outputs: Iterable[_Place],
    updates: Iterable[tuple[_Place, _Place]],
    how: tuple[Any, ...],
) -> Graph:
    made: list[Node] = []
    for op, operands, attributes, types, view in nodes:
        made.append(node_of(op, tuple([made[n].value(i) for n, i in operands]), attributes, types, view))

    def at(place: _Place) -> Value:
        return made[place[0]].value(place[1])

    steps = tuple(Update(at(weight), at(grad)) for weight, grad in updates)
    leaves = tuple(made[n] for n in inputs)
    return Graph(name, leaves, tuple(map(at, outputs)), steps, *how)


def topological(roots: Iterable[Value], first: Iterable[Node] = ()) -> list[Node]:
    """
    Return every node that the values `roots` depend on, operands before users. The order is deterministic, and begins
    with the nodes `first` (a graph's inputs, say), whether `roots` depend on them or not.
    """
    order: dict[Node, None] = dict.fromkeys(first)
    for root in roots:
        stack: list[tuple[Node, Iterator[Value]]] = []
        if root.node not in order:
            stack.append((root.node, iter(root.node.operands)))
        while stack:
            node, pending = stack[-1]
            for value in pending:
                if value.node not in order:
                    stack.append((value.node, iter(value.node.operands)))
                    break
            else:
                order[node] = None
                stack.pop()
    return list(order)


def rewrite(graph: Graph, replace_node: Callable[[Node, tuple[Value, ...]], Sequence[Value]]) -> Graph:
    """
    Return a graph rebuilt node by node, operands first. `replace_node(node, new operands)` is called for each node,
    leaves included, and returns the values that replace the node's results, one for each. Name, optimizer, pipeline,
    loss pieces, ring attention, offload and the exchange of rows stay.
    """
    new: dict[Value, Value] = {}
    for node in graph.nodes():
        results = replace_node(node, tuple(new[v] for v in node.operands))
        new.update(zip(node.results, results, strict=True))
    updates = tuple(Update(new[u.weight], new[u.grad]) for u in graph.updates)
    inputs = tuple(new[n.result].node for n in graph.inputs)
    return replace(graph, inputs=inputs, outputs=tuple(new[v] for v in graph.outputs), updates=updates)


def erase(graph: Graph) -> Graph:
    """
    Return the serial graph of a parallel one: without parallel operators and machine views, every value in one piece,
    the loss in one piece, no stages, nothing at the host, nothing exchanged.

    Two well-typed graphs of the same inputs and outputs compute the same values if their erasures are equal.
    """
    return erase_with(graph)[0]


def _undivided(node: Node, operands: tuple[Value, ...]) -> Node:
    """Return a compute node on serial operands."""
    key = _undivided, *[v.type for v in operands]
    facts = node.form.facts
    if key not in facts:
        made = divide(node, operands, Configuration())
        facts[key] = made.attributes, made.types
        return made
    attributes, types = facts[key]
    return node_of(node.op, operands, attributes, types)


def erase_with(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """
    Return (serial graph, nodes): the graph as `erase` makes it, and a mapping from each leaf and compute node of the
    parallel graph to its node in the serial one.
    """
    found: dict[Node, Node] = {}

    def serial(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.is_parallel:
            return operands
        if node.is_leaf:
            found[node] = leaf(node.op, node.types[0].serial, None, **dict(node.attributes))
        else:
            found[node] = _undivided(node, operands)
        return found[node].results

    made = rewrite(graph, serial)
    made = replace(
        made, loss_pieces=1, pipeline=None, ring_attention=False, offload="none", staying=0, exchange_rows=0.0, bucket=0
    )
    return made, found
