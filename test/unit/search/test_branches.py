"""Branches go on parts of the machine where an iteration as emitted is faster then."""

from __future__ import annotations

import pytest
from extent import ALL
from graphs import boxes
from small import given, op, weight, whole

from unity_ir import models
from unity_ir.cost.stats import head
from unity_ir.machine import Machine, load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins_of, place
from unity_ir.rules.derivation import replay
from unity_ir.search import SearchResult, run
from unity_ir.search.choose import winner
from unity_ir.search.choose.parallel_branches import place_branches
from unity_ir.search.exact.plan_graph import placed
from unity_ir.search.explain import explain
from unity_ir.search.joint.best_first import joint
from unity_ir.simulate.report import as_emitted as emitted
from unity_ir.simulate.report import simulated

SGD = Optimizer()
TWO, FOUR = (boxes(*sizes, overhead=1e-6, bandwidth=1e12) for sizes in ((2,), (2, 2)))


def towers(count: int, deep: int = 3, size: int = 511) -> Graph:
    """Towers of products whose sizes two devices do not divide, side by side in the end."""
    tops: list[Value] = []
    for i in range(count):
        x = given(f"x{i}", size, size)
        for j in range(deep):
            x = op("matmul", x, weight(f"w{i}.{j}", size, size), act="relu")
        tops.append(x)
    return whole(op("reduce_sum", op("concat", *tops, dim=0), dim=0, count=2))


def as_emitted(found: SearchResult, machine: Machine) -> float:
    return simulated(found.graph, machine).overlapped


def parts(found: SearchResult, machine: Machine, operator: str) -> set[tuple[tuple[int, int], ...]]:
    """Where the operators of a name are pinned."""
    placement = place(found.graph, machine.mesh)
    return {pins_of(a) for node, a in placement.assignments.items() if node.op == operator}


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "count"), [(TWO, 2), (FOUR, 4)], ids=["2", "2x2"])
def test_towers_that_nothing_divides_are_side_by_side(machine: Machine, count: int):
    graph = towers(count)
    found = run(graph, machine)
    assert found.proved is not None
    assert len(parts(found, machine, "matmul")) == count
    # The towers at once, and what it takes to bring their tops together.
    assert as_emitted(found, machine) < found.proved.time * (0.75 if count == 2 else 0.5)
    assert erase(found.graph).outputs == replay(graph, found.derivation).outputs
    assert differentiate(found.graph, SGD, machine.mesh).updates
    assert found.bound is not None
    assert found.bound <= found.proved.time
    assert found.gap == pytest.approx(0, abs=1e-4)
    said = head("towers", found.cost, [], found.bound)
    assert "branches on parts of the machine added up" in said
    assert "for any placement with everything on all devices; here branches are on parts, at once" in said
    assert found.joint is not None
    assert "on a part of the machine, beside other branches" in explain(found.joint, found.cost, "matmul0")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "where"), [("xdl", "summit:1"), ("dlrm", "pcie:8")])
def test_embeddings_have_devices_of_their_own(model: str, where: str):
    machine = load(where)
    found = run(models.build(model), machine)
    assert found.proved is not None
    assert len(parts(found, machine, "embedding_bag")) > 1
    assert as_emitted(found, machine) < found.proved.time


def test_what_has_no_branches_stays_on_all_devices():
    found = run(models.build("mlp", layers=3), TWO)
    assert not any(map(pins_of, place(found.graph, TWO.mesh).assignments.values()))


@pytest.mark.slow
def test_the_axis_that_divides_columns_is_cut():
    """Which of a level's axes that is, is a matter of chance: none of them is inner to the others."""
    graph, machine = models.from_text("candle_uno,batch=24576,layers=1,tower=3"), load("summit:16")
    found = joint(graph, machine, (), SGD)
    _, rests, relays = placed(graph, found.plan, found.solver)
    made = place_branches(graph, machine, SGD, found.graph, (rests, relays))
    assert made is not None
    assert emitted(made[0], machine, SGD)[0] < 0.9 * emitted(found.graph, machine, SGD)[0]


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="nine seconds of search: make zoo")
def test_branches_that_rewrites_join_are_side_by_side_all_the_same():
    graph, machine = models.from_text("candle_uno,batch=24576"), load("summit:16")
    found = run(graph, machine, optimizer=SGD)
    assert len(parts(found, machine, "matmul")) > 2
    assert as_emitted(found, machine) < 0.25
    assert found.bound is not None
    assert found.proved is not None
    assert found.bound <= found.proved.time


def test_branches_are_put_on_parts_from_baselines_too(monkeypatch: pytest.MonkeyPatch):
    """Within a part tables are best divided as in the expert's plan, which is twice as slow on all devices."""
    graph, machine, optimizer = models.from_text("xdl,batch=6144"), load("summit:1"), Optimizer()
    found = run(graph, machine, "joint", optimizer)
    monkeypatch.setattr(winner, "STARTS", ())
    alone = run(graph, machine, "joint", optimizer)
    times = [emitted(result.graph, machine, optimizer)[0] for result in (found, alone)]
    assert times[0] < 0.98 * times[1]
