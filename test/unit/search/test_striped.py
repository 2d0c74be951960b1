"""The joint search tries striped order where its plan divides the sequence of causal attention."""

from __future__ import annotations

import pytest
from graphs import boxes

from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.graph import erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.striped import causal_degree
from unity_ir.rules.derivation import STRIPE, replay
from unity_ir.search import run

SMALL = {"batch": 1, "sequence": 4096, "layers": 1, "hidden": 128, "heads": 1, "vocabulary": 64}
"""One sample, and one head: only the sequence is left to be divided."""


@pytest.mark.slow
def test_a_divided_sequence_is_balanced():
    graph, machine = build("gpt2", **SMALL), load("box:4")
    found = run(graph, machine, "joint", Optimizer())
    natural = run(graph, machine, "joint", Optimizer(), {"stripes": False})
    assert [str(step) for step in found.derivation][:1] == ["stripe-sequence with stripes=4,block=128"]
    assert erase(found.graph).outputs == replay(graph, found.derivation).outputs
    assert causal_degree(natural.graph) == (4, 4096)
    assert found.cost.time < natural.cost.time
    assert found.bound is not None
    assert found.bound <= found.cost.time
    (attention,) = (o for o in found.cost.operators if o.node.op == "attention_striped")
    (before,) = (o for o in natural.cost.operators if o.node.op == "attention")
    assert 0.5 < attention.forward / before.forward < 0.7


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("length", "steps"), [(256, []), (512, ["stripe-sequence with stripes=4,block=64"])])
def test_blocks_smaller_than_a_tile_are_not_looked_for(length: int, steps: list[str]):
    graph, machine = build("gpt2", **{**SMALL, "sequence": length}), boxes(2, 2, bandwidth=1e12)
    found = run(graph, machine, "joint", Optimizer())
    assert [str(step) for step in found.derivation if step.rule == STRIPE] == steps
    assert erase(found.graph).outputs == replay(graph, found.derivation).outputs
    natural = run(graph, machine, "joint", Optimizer(), {"stripes": False})
    assert causal_degree(natural.graph) == (4, length)


def test_what_depends_on_the_order_stays_as_it_is():
    """Samples packed of documents have no causal mask; and with a queue of experts there is no striped order."""
    keys = {**SMALL, "kv_heads": 1, "intermediate": 128, "experts": 2, "dispatch": "sparse", "capacity": 100}
    found = run(build("moe", **keys), load("box:4"), "joint", Optimizer())
    assert causal_degree(found.graph)[0] > 1
    assert STRIPE not in {step.rule for step in found.derivation}
