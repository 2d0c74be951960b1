"""What is computed again is what would have been kept."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from graphs import boxes, data_for, random_graph
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unity_ir.cost.plan import cost
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase, rewrite, topological
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import Node, Value, apply, leaf, parallel, rebuild
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.random_plan import sample

SGD = Optimizer()


def marked(graph: Graph, random: Random) -> Graph:
    """The graph with recompute after some operators and reshards."""

    def mark(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        new = rebuild(node, operands, node.view)
        may = node.is_compute or (node.is_parallel and node.view is not None)
        again = may and random.random() < 0.5
        return [parallel("recompute", v).result if again else v for v in new.results]

    return rewrite(graph, mark)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=60)
def test_gradients_are_the_same(seed: int, placed: bool):
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 8))
    machine = boxes(2, 2, overhead=1e-6)
    plain = sample(graph, machine, seed) if placed else graph
    mesh = machine.mesh if placed else None
    other = marked(plain, random)
    assert erase(other) == erase(plain)
    steps = [differentiate(g, SGD, mesh) for g in (plain, other)]
    inputs, weights = data_for(graph, seed)
    values = [interpret(step, inputs, weights) for step in steps]
    wanted = {u.weight.node.name: values[0][u.grad] for u in steps[0].updates}
    assert wanted.keys() == {u.weight.node.name for u in steps[1].updates}
    for u in steps[1].updates:
        assert np.array_equal(values[1][u.grad], wanted[u.weight.node.name])
    pieces = interpret_pieces(steps[1], inputs, weights)
    for u in steps[1].updates:
        np.testing.assert_allclose(join(pieces[u.grad], u.grad.type), wanted[u.weight.node.name], rtol=1e-9, atol=1e-9)
    if placed:
        cost(other, machine)
        cost(steps[1], machine)


@given(st.integers(0, 10**6))
@example(2383)  # The gradient of a product with an activation builds the product that the forward has beside it.
@settings(max_examples=60)
def test_the_backward_reads_nothing_that_is_not_kept(seed: int):
    random = Random(seed)
    graph = marked(random_graph(random, random.randint(1, 8)), random)
    step = differentiate(graph, SGD)
    forward = set(topological(graph.outputs))
    for node in step.nodes():
        if node not in forward and node.op != "recompute":
            assert not_kept(graph).isdisjoint(v.node for v in node.operands), node
        if node.op == "recompute" and node not in forward:
            assert node.operands[0].node not in not_kept(graph)


def test_a_chain_is_computed_again_from_the_nearest_value_kept_when_the_backward_gets_there():
    x = leaf("input", tensor_type((4, 4), "f32"), name="x")
    a, b = (leaf("weight", tensor_type((4, 4), "f32"), name=n).result for n in "ab")
    kept = apply("matmul", [x.result, a]).result
    first = parallel("recompute", apply("gelu", [kept]).result).result
    second = parallel("recompute", apply("exp", [first]).result).result
    loss = apply("reduce_sum", [apply("matmul", [second, b]).result], {"dim": 0, "count": 2}).result
    graph = Graph("chain", (x,), (loss,))
    step = differentiate(graph, SGD)
    order = step.nodes()
    gelus, exps = ([n for n in order if n.op == op] for op in ("gelu", "exp"))
    assert (len(gelus), len(exps)) == (2, 2)
    assert gelus[1].operands[0].node.op == "recompute"
    assert gelus[1].operands[0].node.operands == (kept,)
    assert exps[1].operands[0] == gelus[1].result
    assert order.index(gelus[1]) > order.index(loss.node)
    machine = boxes(1)
    held, all_held = cost(graph, machine), cost(erase(graph), machine)
    # What exp makes; no backward reads what gelu does.
    assert all_held.memory_bytes - held.memory_bytes == 4 * 4 * 4
    extra = sum(o.forward for o in held.operators if o.node.op in ("gelu", "exp"))
    assert held.compute_time == pytest.approx(all_held.compute_time + extra)
