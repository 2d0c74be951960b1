"""What --explain says is what forcing a choice costs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.errors import UnityError
from unity_ir.search import run
from unity_ir.search.explain import alternatives, explain, named, operators
from unity_ir.search.memory.seconds_and_bytes import CostModel

MACHINE = boxes(2, 2, overhead=1e-6)


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=15)
def test_every_alternative_is_the_best_plan_with_it(seed: int):
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 5), dims=(2, 4, 6, 12))
    result = run(graph, MACHINE)
    found = result.joint
    assert found is not None
    node = random.choice(list(operators(found.rewritten).values()))
    ways = alternatives(found, node)
    assert [w.priced for w in ways] == sorted(w.priced for w in ways)
    assert ways[0].seconds == pytest.approx(found.plan.seconds, abs=1e-9)
    assert len({w.divided for w in ways}) == len(ways)
    # No choice at all is below the alternative it takes.
    model = CostModel(found.solver, found.rewritten)
    best = {w.divided: w.seconds for w in ways}
    choice = tuple(random.choice(np.flatnonzero(np.isfinite(s)).tolist()) for s in model.seconds)
    assert model.costs(choice)[0] >= min(best.values()) - 1e-9
    text = explain(found, result.cost, next(n for n, o in operators(found.rewritten).items() if o is node))
    if "on a part of the machine" in text:
        return  # emitted faster so; every alternative is on all of it
    assert f"* {ways[0].divided} " in text or ways[0].priced == pytest.approx(ways[1].priced, abs=1e-9)


def test_where_memory_is_short_bytes_count():
    graph = random_graph(Random(3), 6, dims=(4, 8, 12))
    free = run(graph, MACHINE)
    for part in (0.9, 0.8, 0.7, 0.6):
        memory = int(part * free.cost.memory_bytes)
        short = run(graph, replace(MACHINE, device=replace(MACHINE.device, memory=memory, reserve=0)))
        if short.joint is not None and short.joint.price:
            text = explain(short.joint, short.cost, "1")
            assert "memory is short" in text
            return
    raise AssertionError("memory was never short")


def test_operators_are_found_by_name_and_number():
    graph = random_graph(Random(5), 8)
    known = operators(graph)
    for i, (name, node) in enumerate(known.items()):
        assert named(graph, name) == named(graph, f"%{name}") == named(graph, str(i + 1)) == (name, node)
    for wrong in ("", "0", str(len(known) + 1), "matmull", "9" * 30, "\x1b"):
        with pytest.raises(UnityError, match=r"^--explain: "):
            named(graph, wrong)
