"""
Builds the backward of a graph from the operators' gradients, with dual types: partial sums and copies change places.

A value's gradient has the value's dims with `sum` and `copy` swapped, and each parallel operator has another as its
backward. All gradient synchronisation follows from that: that of data parallelism, Megatron's f/g pairs and every
other strategy's (docs/concepts.md: Duality).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

from unity_ir.errors import UnityError
from unity_ir.ops import operators
from unity_ir.ops.operator import Application, Attributes, Operator
from unity_ir.pcg.anchors import Anchors
from unity_ir.pcg.graph import Graph, Update, topological
from unity_ir.pcg.node import Node, Value, apply, leaf, node_of, parallel, rebuild
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.recompute import Recomputation
from unity_ir.pcg.sharding import (
    Layout,
    Mesh,
    Placement,
    assignment_for,
    dual,
    grid_order,
    layout_view,
    place,
    view_of,
)
from unity_ir.pcg.types import TensorType
from unity_ir.pcg.view import View


def needs_gradient(nodes: Iterable[Node], frozen: bool = False) -> set[Node]:
    """
    Return the nodes that depend on a trained weight through floating point values, these weights included; only these
    can have a gradient. With `frozen`, those that depend on any weight. `nodes` must have operands before users.
    """
    found: set[Node] = set()
    for node in nodes:
        is_source = node.is_trained or (frozen and node.op == "weight")
        if is_source or any(v.node in found and v.type.is_floating for v in node.operands):
            found.add(node)
    return found


@lru_cache(maxsize=64)
def nodes_with_gradient(graph: Graph, frozen: bool = False) -> frozenset[Node]:
    """
    Return the nodes whose values have a gradient: those on a path from a trained weight to the loss, which is the first
    output. With `frozen`, those on a path from any weight, as if none were frozen. Memoised.

    If the first output is not a scalar, the graph is a part of a model, and paths to any output count.
    """
    is_whole = bool(graph.outputs) and graph.outputs[0].shape == ()
    return frozenset(needs_gradient(topological(graph.outputs[:1] if is_whole else graph.outputs), frozen))


def has_gradient(value: Value, with_gradient: frozenset[Node], users: Iterable[Node] | None = None) -> bool:
    """
    Return whether a value has a gradient, in a graph whose nodes `with_gradient` have one; with `users`, whether any of
    these operators, which read it, returns one. Integers have none, such as the ids that `topk` makes beside values.
    """
    is_used = users is None or not with_gradient.isdisjoint(users)
    return value.type.is_floating and value.node in with_gradient and is_used


def operand_gradients(
    node: Node, grads: Sequence[Value], view: View | None = None, again: Recomputation | None = None
) -> tuple[Value | None, ...]:
    """
    Build the gradients of a node's operands as new nodes; return them in order, None for operands without one
    (integers, say). `grads` are the gradients of the node's floating point results, in order.

    A gradient has the dual type of its operand (partial sums and copies change places). One that a compute node's rule
    makes has the operand's element type; the caller must cast it to `TensorType.grad_dtype`.

    `view` is the machine view of the gradient of a parallel operator's operand; it has no effect for a compute node.
    `again` replaces values of the forward that are not kept for the backward by recomputed ones (None: all are kept).
    Raises `UnityError` if the operator has no gradient.
    """
    if node.is_parallel:
        value = grads[0]
        steps = PARALLEL_OPERATORS[node.op].backward({k: v for k, v in node.attributes if isinstance(v, int)})
        for i, (op, attributes) in enumerate(steps):
            value = parallel(op, value, view if i == len(steps) - 1 else None, **dict(attributes)).result
        return (value,)
    facts, key = node.form.facts, (operand_gradients, *[g.type for g in grads])
    recorded: _Recorded | None = facts.get(key)
    if recorded is None:
        recorded = facts[key] = _recorded(node, grads)
    operands, results = node.operands, node.results
    if again is not None:
        operands, results = map(again.read, operands), map(again.read, results)
    values = [*grads, *operands, *results]
    for op, read, attributes, types in recorded.steps:
        values += node_of(op, tuple([values[i] for i in read]), attributes, types).results
    found = [None if i is None else values[i] for i in recorded.gradients]
    return tuple(found if again is None else [value and again.in_backward(value) for value in found])


@dataclass(frozen=True, slots=True)
class _Recorded:
    """
    How the gradients of a node's operands are built: which nodes on which of the values given, those of the gradients
    of its results, of its operands and of its results, in this order, and of the values that earlier steps make.
    """

    steps: tuple[tuple[str, tuple[int, ...], Attributes, tuple[TensorType, ...]], ...]
    gradients: tuple[int | None, ...]


def _recorded(node: Node, grads: Sequence[Value]) -> _Recorded:
    """Return how the gradients of a compute node's operands are built, by building them once, of inputs."""
    gradient = node.operator.gradient
    if gradient is None:
        raise UnityError(f"pcg.{node.op}: has no gradient; it is itself part of a backward")
    given = tuple(leaf("input", g.type, name=f"gradient {i}").result for i, g in enumerate(grads))
    same = node.form.repeats
    operands = tuple(
        leaf("input", v.type, name=f"operand {i}").result for i, v in zip(same, node.operands, strict=True)
    )
    results = tuple(leaf("input", v.type, name=f"result {i}").result for i, v in enumerate(node.results))
    found = gradient(Application(given, operands, results, dict(node.attributes)))
    out: list[Value | None] = []
    for operand, value in zip(operands, found, strict=True):
        assert value is None or isinstance(value, Value)
        value = value if operand.type.is_floating else None
        if value is not None:
            value = _in_time_as(value, operand)
        if value is not None and not _is_dual(value.type, operand.type):
            raise AssertionError(f"{node.op}: gradient is {value.type}, the dual of its operand {operand.type.dual}")
        out.append(value)
    numbers: dict[Value, int] = {}
    for number, value in enumerate((*given, *operands, *results)):
        numbers.setdefault(value, number)
    inputs, count = {value.node for value in numbers}, len(given) + len(operands) + len(results)
    steps: list[tuple[str, tuple[int, ...], Attributes, tuple[TensorType, ...]]] = []
    for step in topological(v for v in out if v is not None):
        if step not in inputs:
            steps.append((step.op, tuple(numbers[v] for v in step.operands), step.attributes, step.types))
            numbers.update({value: count + i for i, value in enumerate(step.results)})
            count += len(step.results)
    return _Recorded(tuple(steps), tuple(None if v is None else numbers[v] for v in out))


def _in_time_as(gradient: Value, of: Value) -> Value:
    """
    Return a gradient of `of` that is in time as it must be: where the operator that spreads it along new dims left open
    whether devices or micro-batches divide these.
    """
    node, time = gradient.node, of.type.dual.time
    if gradient.type.time == time or not node.is_compute or not node.analysis.bound.free_degrees:
        return gradient
    return apply(node.op, node.operands, dict(node.attributes), node.view, time).results[gradient.index]


def _is_dual(gradient: TensorType, of: TensorType) -> bool:
    """Return whether a gradient that a compute node made is divided as it must be, and in the value's element type."""
    dual = of.dual
    return (gradient.parts, gradient.time, gradient.dtype) == (dual.parts, dual.time, of.dtype)


def differentiate(graph: Graph, optimizer: Optimizer, mesh: Mesh | None = None) -> Graph:
    """
    Return the training step of a forward graph whose first output is its loss: forward, backward, one update per
    trained weight. Frozen ones have no gradient, and the backward ends at the lowest trained ones.

    With a `mesh`, gradients are also brought to the devices on which their values are; without, they only get the dual
    type. Raises `UnityError` if the graph has a backward already, if the first output is not a scalar, or if no trained
    weight reaches it.
    """
    if graph.updates:
        raise UnityError(f"func.func @{graph.name}: already has a backward")
    if not graph.outputs or graph.outputs[0].shape != ():
        raise UnityError(f"func.func @{graph.name}: its first output must be a scalar loss to differentiate")
    if graph.outputs[0].node not in nodes_with_gradient(graph):
        weights = graph.weights()
        is_frozen = bool(weights) and not any(node.is_trained for node in weights)
        why = "every weight is frozen" if is_frozen else "no weight reaches its loss"
        raise UnityError(f"func.func @{graph.name}: {why}")
    return training_step(graph, optimizer, mesh)


def training_step(graph: Graph, optimizer: Optimizer, mesh: Mesh | None = None) -> Graph:
    """
    Return the training step of a forward graph, as `differentiate` does, but also for a part of a model, whose first
    output is no scalar loss. The graph is not checked.

    For a part, the gradients of its outputs are inputs of the step, leaves named `gradient of output 0`, .., which
    `Graph.inputs` does not list. A graph without weights on the way to its outputs is returned as it is.
    """
    is_whole = bool(graph.outputs) and graph.outputs[0].shape == ()
    roots = graph.outputs[:1] if is_whole else graph.outputs
    order = topological(roots)
    with_gradient = nodes_with_gradient(graph)
    if all(root.node not in with_gradient for root in roots):
        return graph

    placement = None if mesh is None else place(graph, mesh)

    def dual_view(value: Value) -> View | None:
        """Return the view of the dual of a value's layout."""
        return placement and layout_view(dual(placement.layouts[value]), len(value.shape), placement.mesh)

    def gradient_view(value: Value) -> View | None:
        """Return the view of the gradient of a value that exists on the devices; None for a step of a reshard."""
        return None if value.node.is_parallel and value.node.view is None else dual_view(value)

    def constant(value: Value, number: float) -> Value:
        """Return a number as the gradient of a value. Nothing but a view says on which axes it is copied."""
        return leaf("constant", value.type.dual, dual_view(value), value=number).result

    anchors = Anchors(graph)
    again = Recomputation(graph, placement)
    grads: dict[Value, list[Value]] = {}
    for i, root in enumerate(roots):
        if is_whole:
            grads[root] = [constant(root, 1.0)]
        elif root.node in with_gradient and root.type.is_floating:
            grads.setdefault(root, []).append(
                leaf("input", root.type.dual, dual_view(root), name=f"gradient of output {i}").result
            )
    add = operators()["add"]

    def total(value: Value) -> Value:
        """Return the gradient of a value: the sum of what its users make of theirs."""
        return reduce(lambda a, b: _sum(add, a, b), grads[value]) if value in grads else constant(value, 0.0)

    def gradients(node: Node, of_results: Sequence[Value]) -> tuple[Value | None, ...]:
        if node.is_parallel or placement is None:
            # A gradient that is sent back arrives where the value was sent from, whatever it is a step of.
            seen = dual_view if node.op == "send" else gradient_view
            view = seen(node.operands[0]) if node.is_parallel else None
            found = operand_gradients(node, of_results, view, again)
            return tuple(g and _in_dtype(g, v.type.grad_dtype) for g, v in zip(found, node.operands, strict=True))
        found = operand_gradients(node, of_results, again=again)
        if not placement.mesh.sizes or not any(g is not None and _is_spread(g) for g in found):
            return tuple(g and _in_dtype(g, v.type.grad_dtype) for g, v in zip(found, node.operands, strict=True))
        known = {again.read(v): placement.needs(node, i) for i, v in enumerate(node.operands)}
        known |= {again.read(v): placement.layouts[v] for v in node.results}
        floating = [v for v in node.results if v.type.is_floating]
        known |= {g: dual(placement.layouts[v]) for g, v in zip(of_results, floating, strict=True)}
        return tuple(
            g and _in_dtype(_spread_alike(g, known, dual(placement.needs(node, i)), placement), v.type.grad_dtype)
            for i, (g, v) in enumerate(zip(found, node.operands, strict=True))
        )

    for node in reversed(order):
        if node not in with_gradient or not node.operands or not any(v in grads for v in node.results):
            continue
        # What is only on the way somewhere is not brought together there: each gradient goes the whole way back.
        passing = node.is_parallel and (node.op == "halo" or not anchors.materialised(node.result))
        whole = () if passing else [total(v) for v in node.results if v.type.is_floating]
        for of_results in [[g] for g in grads[node.result]] if passing else [whole]:
            for operand, grad in zip(node.operands, gradients(node, of_results), strict=True):
                if grad is not None and operand.node in with_gradient:
                    grads.setdefault(operand, []).append(grad)

    # The last operators' weights first: their gradients are computed, sent, and let go of what they read, before the
    # backward goes on; and nothing is computed again before the backward has come there.
    updates = tuple(
        Update(n.result, _in_dtype(_as_weight(n.result, total(n.result), placement), n.master))
        for n in order[::-1]
        if n.is_trained
    )
    return replace(graph, updates=updates, optimizer=optimizer)


def _in_dtype(grad: Value, dtype: str) -> Value:
    """Return a gradient cast to an element type, or itself if it has it. A cast is linear: partial sums may be cast."""
    return grad if grad.dtype == dtype else apply("cast", (grad,), {"to": dtype}).result


def _spread_alike(grad: Value, known: Mapping[Value, Layout], layout: Layout, placement: Placement) -> Value:
    """
    Return a gradient spread over new dims, with a view.

    The axes that divide these dims do not follow from its operands alone, but also from where the gradient is wanted.
    """
    node = grad.node
    if not _is_spread(grad) or not all(v in known for v in node.operands):
        return grad
    assignment = assignment_for(node.analysis, [known[v] for v in node.operands], layout)
    if assignment is None:
        return grad
    return rebuild(node, node.operands, view_of(assignment, grid_order(node), placement.mesh)).result


def _is_spread(grad: Value) -> bool:
    """Return whether an operator spreads a gradient over new dims, of which no operand tells how they are divided."""
    return grad.node.is_compute and bool(grad.node.analysis.bound.free_degrees)


def _sum(add: Operator, a: Value, b: Value) -> Value:
    total = add.one(a, b)
    assert isinstance(total, Value)
    return total


def _as_weight(weight: Value, grad: Value, placement: Placement | None) -> Value:
    """Return the gradient in the weight's own type and place, so that each copy of the weight is updated alike."""
    if weight.type.sum > 1:
        raise UnityError(
            f"pcg.weight: {weight.node.name} rests in {weight.type.sum} partial sums, which cannot be updated; "
            "keep it whole and insert pcg.zero_pad"
        )
    if grad.type.sum > 1:
        view = None if placement is None else layout_view(placement.layouts[weight], len(weight.shape), placement.mesh)
        grad = parallel("reduce", grad, by=grad.type.sum).result
        grad = parallel("replicate", grad, view, by=weight.type.copy).result
    return grad
