"""
Experts divided over 2, 4 and 8 ranks: losses, gradients by name and three steps equal PyTorch's, in double precision,
however tokens are routed: evenly or not, all to one expert, none to another; with a capacity, with and without drops,
and without one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import TOLERANCES, differences
from extent import ALL
from given import become, told_on, trained_on
from mutants import Mutant, sites
from ranks import Ranks, refused
from zoo import by_hand
from zoo_plans import program, sized

from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer

ADAM = Optimizer("adam", 1e-2)
EXPERTS, CHOSEN, FAVOURITE, IGNORED = 8, 2, 2, 5
MOE, QWEN, DEEPSEEK = "moe,dispatch=sparse", "qwen3_moe", "deepseek_v3"
GATES = {MOE: "block_sparse_moe.gate.weight", QWEN: "mlp.gate.weight", DEEPSEEK: "mlp.gate.weight"}
SIZES = f"sequence=8,balance=500,chosen={CHOSEN}"
CAPACITIES = {"dropless": 0, "drops": 75, "room": 100 * EXPERTS // CHOSEN}
"""Per cent of an even share; with the last an expert has room for all tokens of a group."""


@dataclass(frozen=True)
class Case:
    model: str
    capacity: str
    plan: str
    world: int
    routing: str
    """`even`, as initial weights route, or `one`: all tokens to one expert, none to another."""

    @property
    def sizes(self) -> str:
        return f"{self.model},{SIZES},capacity={CAPACITIES[self.capacity]}"

    def __str__(self) -> str:
        return f"{self.model}-{self.capacity}-{self.plan}-{self.world}-{self.routing}"


def _plans(capacity: str, world: int) -> list[str]:
    found = [f"degrees,ep={world}", f"degrees,ep={world // 2},zero=3"]
    rows = [f"{plan},exchange=true" for plan in found if "ep=1," not in plan]
    return ["experts", *rows] if capacity == "dropless" else found


SAMPLE = [
    Case(MOE, "drops", "degrees,ep=8", 8, "one"),
    Case(MOE, "drops", "degrees,ep=2", 2, "even"),
    Case(MOE, "room", "degrees,ep=4,zero=2", 4, "one"),
    Case(MOE, "dropless", "experts", 4, "one"),
    Case(MOE, "dropless", "experts", 8, "even"),
    Case(QWEN, "drops", "degrees,ep=4,zero=3/2i", 4, "one"),
    Case(QWEN, "dropless", "experts", 2, "one"),
    Case(DEEPSEEK, "drops", "degrees,tp=2,ep=2", 4, "one"),
    Case(DEEPSEEK, "room", "degrees,ep=8", 8, "one"),
    Case(DEEPSEEK, "dropless", "experts", 8, "one"),
    Case(MOE, "dropless", "degrees,ep=4", 4, "one"),
    Case(MOE, "dropless", "degrees,ep=2,exchange=true", 2, "even"),
    Case(MOE, "dropless", "degrees,ep=8,exchange=true", 8, "one"),
    Case(QWEN, "dropless", "degrees,ep=2,exchange=true,zero=3/2i", 4, "one"),
    Case(DEEPSEEK, "dropless", "degrees,ep=4,exchange=true", 4, "one"),
    Case(DEEPSEEK, "dropless", "degrees,ep=2,exchange=true", 4, "even"),
    Case(DEEPSEEK, "dropless", "degrees,tp=2,ep=2", 4, "even"),
    Case(QWEN, "dropless", "again+degrees,ep=4,exchange=true", 4, "even"),
    Case(DEEPSEEK, "dropless", "again+degrees,ep=2,exchange=true/2", 4, "one"),
    Case(MOE, "dropless", "1f1b,2:degrees,ep=2,exchange=true/4", 4, "even"),
    Case(QWEN, "dropless", "zb-h1,2:degrees,ep=2,exchange=true/4", 4, "one"),
]
EVERY = [
    Case(model, capacity, plan, world, routing)
    for model in GATES
    for capacity in CAPACITIES
    for world in (2, 4, 8)
    for plan in _plans(capacity, world)
    for routing in ("even", "one")
]
CASES = [*{str(case): case for case in (*EVERY, *SAMPLE)}.values()] if ALL else SAMPLE


def routed(case: Case, keys: dict[str, Any]) -> dict[str, Any]:
    """
    Return the weights that route all tokens to `FAVOURITE`, and none to `IGNORED`: all embeddings have a feature that
    the router reads as such.
    """
    if case.routing == "even":
        return {}
    random = np.random.default_rng(0)
    words = random.normal(size=(keys["vocabulary"], keys["hidden"]))
    words[:, 0] = 8
    given = {"model.embed_tokens.weight": words}
    for layer in range(keys.get("dense_layers", 0), keys["layers"]):
        gate = random.normal(size=(keys["hidden"], EXPERTS)) / 8
        gate[0, FAVOURITE], gate[0, IGNORED] = 2, -2
        given[f"model.layers.{layer}.{GATES[case.model]}"] = gate
    return given


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_equal_pytorch(ranks: Ranks, case: Case):
    torch.set_num_threads(1)
    name, keys = sized(case.sizes)
    graph, weights, batch = build(name, **keys), routed(case, keys), batch_of(keys)
    text = program(graph, case.plan, case.world, ADAM, double=True)
    assert ("= send_rows(ctx" in text) == ("exchange" in case.plan)
    found = ranks.run(text, case.world, trained_on, 3, weights, batch)[0]
    assert differences(found, lambda w, inputs: by_hand(name, keys, w, inputs), ADAM, "f64") == []
    if case.routing == "one":
        stacks = {n: g for n, g in found["gradients"][0].items() if ".experts." in n}
        assert stacks
        for gradient in stacks.values():
            assert np.abs(gradient[FAVOURITE]).max() > 0
            assert np.abs(gradient[IGNORED]).max() == 0


def batch_of(keys: dict[str, Any]) -> dict[str, Any]:
    random = np.random.default_rng(1)
    shape = keys["batch"], keys["sequence"]
    return {n: random.integers(0, keys["vocabulary"], shape) for n in ("tokens", "labels")}


MUTANTS = [{"to_slots": "sent twice"}, {"queue": "one slot"}, {"in_slots": "one too many"}]


@pytest.mark.slow
@pytest.mark.parametrize("model", [MOE, DEEPSEEK])
def test_tokens_sent_wrongly_are_told(ranks: Ranks, model: str):
    """Send a token twice, two to one slot, or one that should be dropped: loss or gradients differ from PyTorch's."""
    torch.set_num_threads(1)
    case = Case(model, "drops", "degrees,ep=4", 4, "one")
    name, keys = sized(case.sizes)
    assert ceil(CAPACITIES["drops"] * keys["sequence"] * CHOSEN / (100 * EXPERTS)) < keys["sequence"]
    text = program(build(name, **keys), case.plan, case.world, ADAM, double=True)
    given = routed(case, keys), batch_of(keys)
    (right, grads), *others = ranks.run(text, case.world, become, [{"queue": "right"}, *MUTANTS], *given)[0]
    for loss, gradients in others:
        assert abs(loss - right) > 1e-5 * abs(right)
        assert any(
            np.linalg.norm(gradients[n] - grads[n]) > 1e3 * TOLERANCES["f64"] * np.linalg.norm(grads[n]) for n in grads
        )


@pytest.mark.slow
def test_an_exchange_done_wrong_is_told(ranks: Ranks):
    """Tokens and results that stay where they are, or go twice, forward and backward, one exchange at a time."""
    torch.set_num_threads(1)
    case = Case(MOE, "drops", "degrees,ep=4", 4, "even")
    name, keys = sized(case.sizes)
    text, batch = program(build(name, **keys), case.plan, case.world, ADAM, double=True), batch_of(keys)
    found = ranks.run(text, case.world, trained_on, 1, {}, batch)[0]
    exchanges = [site for site in sites(text) if site.kind == "all_to_all"]
    assert len(exchanges) == 4 * keys["layers"]
    wrong = [Mutant(site, change) for site in exchanges for change in ("dropped", "doubled")]
    became = ranks.run(text, case.world, told_on, batch, wrong, float(found["losses"][0]), found["gradients"][0])[0]
    assert became == ["wrong"] * len(wrong)


ROW_MOVES = ("count_rows", "send_rows", "return_rows")


@pytest.mark.slow
def test_rows_exchanged_wrong_are_told(ranks: Ranks):
    """
    Counts of even shares, and rows that stay where they are or count double: losses or gradients differ. Experts that
    are doubled stay what they are, as all integers do.
    """
    torch.set_num_threads(1)
    case = Case(MOE, "dropless", "degrees,ep=4,exchange=true", 4, "even")
    name, keys = sized(case.sizes)
    text, batch = program(build(name, **keys), case.plan, case.world, ADAM, double=True), batch_of(keys)
    found = ranks.run(text, case.world, trained_on, 1, {}, batch)[0]
    moves = [site for site in sites(text) if site.kind in ROW_MOVES]
    assert [site.kind for site in moves].count("count_rows") == keys["layers"]
    assert len(moves) == 6 * keys["layers"]
    wrong = [Mutant(site, "dropped") for site in moves]
    wrong += [Mutant(site, "doubled") for site in moves if site.kind != "count_rows"]
    became = ranks.run(text, case.world, told_on, batch, wrong, float(found["losses"][0]), found["gradients"][0])[0]
    assert {(str(m), what) for m, what in zip(wrong, became, strict=True) if what != "wrong"} == {
        (str(m), "same") for m in wrong if m.change == "doubled" and "take_numbers" in m.site.operands
    }


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["even", "one"])
def test_rows_in_a_wrong_order_are_told(ranks: Ranks, routing: str):
    """A row sent twice, or to others, and rows that stay in the order in which they come home."""
    torch.set_num_threads(1)
    case = Case(MOE, "dropless", "degrees,ep=4,exchange=true", 4, routing)
    name, keys = sized(case.sizes)
    text = program(build(name, **keys), case.plan, case.world, ADAM, double=True)
    changes = [
        {"send_rows": "right"},
        {"send_rows": "row twice"},
        {"return_rows": "row twice"},
        {"send_rows": "to others"},
        {"take_rows": "in order of arrival"},
    ]
    given = routed(case, keys), batch_of(keys)
    (_, right), *others = ranks.run(text, case.world, become, changes, *given)[0]
    for _, grads in others:
        assert any(
            np.linalg.norm(grads[n] - right[n]) > 1e3 * TOLERANCES["f64"] * np.linalg.norm(right[n]) for n in right
        )


@pytest.mark.slow
def test_more_rows_than_there_is_room_for_end_the_run(ranks: Ranks):
    """All ranks end, and say which experts had too many rows, how many, and what to do."""
    name, keys = sized(Case(MOE, "dropless", "", 2, "even").sizes)
    text = program(build(name, **keys), "degrees,ep=2,exchange=true,imbalance=1", 2, ADAM)
    found = ranks.run(text, 2, refused, ["--steps", "1"], {})
    for code, said in found:
        assert code == 1
        assert re.fullmatch(
            r"moe: model\.layers\.0\.block_sparse_moe\.experts: \d+ rows go to the experts of one rank, which has room "
            r"for 64; make the plan with a larger imbalance, and resume from the last checkpoint\n",
            said,
        ), said


@pytest.mark.slow
def test_exchanged_rows_make_what_gathered_ones_do(ranks: Ranks):
    """A row's product is the same wherever it is made, and each expert has its rows in the order of all tokens."""
    torch.set_num_threads(1)
    name, keys = sized(Case(QWEN, "dropless", "", 4, "even").sizes)
    made = [
        ranks.run(program(build(name, **keys), plan, 4, ADAM, double=True), 4, trained_on, 2, {}, batch_of(keys))[0]
        for plan in ("degrees,ep=4", "degrees,ep=4,exchange=true")
    ]
    gathered, exchanged = made
    assert gathered["losses"] == exchanged["losses"]
    for n, gradient in gathered["gradients"][0].items():
        assert np.array_equal(gradient, exchanged["gradients"][0][n]), n
