"""What is recomputed: what is cheapest for its bytes, priced as it is done, and no more than makes a plan fit."""

from __future__ import annotations

from itertools import chain, combinations
from math import inf

import pytest
from extent import sample
from graphs import with_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import SMALL

from unity_ir.cost.keeps import Keeps
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept, with_recompute
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.instructions import ReshardMove
from unity_ir.plan.plan import plan_graph
from unity_ir.search import run
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.recompute.chosen import groups
from unity_ir.search.recompute.fit import _least, recomputed
from unity_ir.search.recompute.min_cut import SavedValues, recomputed_at_price
from unity_ir.search.run import DoesNotFit
from unity_ir.simulate.report import as_emitted

SGD = Optimizer()
PLANS = {
    "data-parallel": Degrees(),
    "fsdp": Degrees(zero=2),
    "zero3": Degrees(zero=3),
    "tp": Degrees(tp=2),
    "sp": Degrees(tp=2, sp=True),
}


def gpt2(batch: int = 8) -> Graph:
    return build("gpt2", batch=batch, sequence=32, layers=4, hidden=32, heads=4, vocabulary=64)


def need(plan: Graph, machine: Machine) -> int:
    return needed(plan, cost(plan, machine, SGD), SGD)


# --- the minimum cut


@st.composite
def some_layers(draw: st.DrawFn) -> SavedValues:
    count = draw(st.integers(1, 6))
    small = st.integers(1, 9).map(float)
    return SavedValues(
        tuple(draw(st.one_of(small, st.just(inf))) for _ in range(count)),
        tuple(draw(small) for _ in range(count)),
        tuple(draw(st.booleans()) for _ in range(count)),
        tuple(tuple(sorted(draw(st.sets(st.integers(0, i - 1))))) if i else () for i in range(count)),
    )


def price_of(layer: SavedValues, again: frozenset[int], price: float) -> float:
    kept, made = layer.saved(again)
    return sum(price * layer.bytes[i] for i in kept) + sum(layer.seconds[i] for i in made)


@pytest.mark.slow
@given(some_layers(), st.sampled_from([0.1, 0.5, 1.0, 2.0, 100.0]))
@settings(max_examples=200)
def test_a_cut_is_the_cheapest_of_all_sets(layer: SavedValues, price: float):
    every = range(len(layer.read))
    subsets = chain.from_iterable(combinations(every, n) for n in range(len(layer.read) + 1))
    least = min(price_of(layer, frozenset(each), price) for each in subsets)
    assert price_of(layer, recomputed_at_price(layer, price), price) == pytest.approx(least)


# --- kinds


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["attention", "block", "all"])
def test_what_is_priced_is_what_the_backward_does(kind: str, plan: str):
    """The kernels and moves that a step has more, collectives in what is recomputed included."""
    machine = load("box:4")
    placed = recipe(gpt2(), machine, PLANS[plan])
    marked = recomputed(placed, kind, machine, SGD)
    assert erase(marked) == erase(placed)
    said, saved = cost(marked, machine, SGD), cost(placed, machine, SGD)
    steps = (fuse_collectives(differentiate(graph, SGD, machine.mesh)) for graph in (marked, placed))
    done, done_saved = (cost(step, machine, SGD) for step in steps)
    assert said.bytes - saved.bytes == done.bytes - done_saved.bytes
    more = said.communication_time - saved.communication_time
    assert more == pytest.approx(done.communication_time - done_saved.communication_time)
    more = said.compute_time - saved.compute_time
    assert more == pytest.approx(done.compute_time - done_saved.compute_time)
    assert more > 0
    # What gathers weights gathers those of norms, too; tensor parallelism sums what a layer has left off.
    moves = {"data-parallel": (), "fsdp": (), "zero3": ("attention", "block", "all"), "tp": ("block", "all")}
    assert (said.bytes > saved.bytes) == (kind in moves.get(plan, (kind,)))
    assert said.memory_bytes < saved.memory_bytes


def test_what_no_backward_reads_is_priced_once():
    """The product before a residual sum is marked, but not done again."""
    graph = gpt2()
    marked = with_recompute(graph, {n for n in graph.nodes() if n.op in ("matmul", "add")})
    machine = load("box:1")
    said, saved = cost(marked, machine, SGD).compute_time, cost(graph, machine, SGD).compute_time
    done, done_saved = (cost(differentiate(g, SGD), machine, SGD).compute_time for g in (marked, graph))
    assert said - saved == pytest.approx(done - done_saved)


@pytest.mark.slow
def test_kinds_save_less_the_more_they_recompute():
    machine = load("box:4")
    placed = recipe(gpt2(), machine, Degrees())
    found = [recomputed(placed, kind, machine, SGD) for kind in ("none", "attention", "block", "all")]
    assert found[0] is placed
    saved = [cost(plan, machine, SGD).memory["activations"] for plan in found]
    assert saved[0] > saved[1] > saved[2]
    assert as_emitted(found[3], machine, SGD)[1] <= as_emitted(found[2], machine, SGD)[1]
    ops = [{n.op for n in not_kept(plan) if n.is_compute} for plan in found]
    assert ops[0] == set()
    assert "matmul" not in ops[1]
    assert "gelu" in ops[1]
    assert {"matmul", "attention"} <= ops[2]


def test_attention_recomputes_the_scores_of_an_attention_of_several_operators():
    """Megatron-LM's selective recompute: nothing is saved that has an entry per query and key."""
    x, y = (leaf("input", tensor_type((2, 64, 16), "f32"), name=name).result for name in "xy")
    h = x
    for i in range(2):
        names = (f"{part}{i}" for part in "qkvo")
        q, k, v, o = (leaf("weight", tensor_type((16, 16), "f32"), name=name).result for name in names)
        q, k, v = (apply("matmul", [h, w]).result for w in (q, k, v))
        scores = apply("batch_matmul_nt", [q, k]).result
        out = apply("batch_matmul", [apply("softmax", [scores]).result, v]).result
        h = apply("add", [h, apply("matmul", [out, o]).result]).result
    graph = Graph("written", (x.node, y.node), (apply("mse", [h, y]).result,))
    marked = recomputed(graph, "attention", load("box:1"), SGD)
    saved = {v.node for v in Keeps(marked).values if v.node.is_compute} - not_kept(marked)
    assert all(v.shape[-2:] != (64, 64) for n in saved for v in n.results)
    assert {n.op for n in not_kept(marked) if n.is_compute} == {"batch_matmul_nt", "softmax"}


def test_groups_and_their_checkpoints_hold_the_least():
    """Of a deep chain of equal values, about the square root of all (Chen et al., 2016)."""
    x, y = (leaf("input", tensor_type((4, 16), "f32"), name=name).result for name in "xy")
    h = x
    for i in range(36):
        h = apply("matmul", [h, leaf("weight", tensor_type((16, 16), "f32"), name=f"w{i}").result]).result
    found = groups(Graph("chain", (x.node, y.node), (apply("mse", [h, y]).result,)))
    assert len(found) in (5, 6, 7)
    assert sum(len(part.nodes) for part in found) == 37


def test_a_graph_without_layers_is_told():
    graph = build("rnnlm", **SMALL["rnnlm"])
    with pytest.raises(UnityError, match=r"^recompute: block keeps each layer's input, .* use all$"):
        run(graph, load("box:1"), "data-parallel", recompute="block")
    assert erase(run(graph, load("box:1"), "data-parallel", recompute="all").graph) == graph


# --- as little as fits


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_auto_is_nothing_if_the_plan_fits_and_as_little_as_makes_it_fit(plan: str):
    machine = load("box:4")
    placed = recipe(gpt2(), machine, PLANS[plan])
    assert recomputed(placed, "auto", machine, SGD) is placed
    whole, least = need(placed, machine), need(recomputed(placed, "block", machine, SGD), machine)
    times = [as_emitted(placed, machine, SGD)[0]]
    for share in (0.8, 0.5, 0.2):
        limit = with_memory(machine, int(least + share * (whole - least)))
        found = recomputed(placed, "auto", limit, SGD)
        assert need(found, limit) <= limit.device.usable
        times.append(cost(found, machine, SGD).compute_time)
    assert times[1:] == sorted(times[1:])
    assert times[-1] <= cost(recomputed(placed, "block", machine, SGD), machine, SGD).compute_time


@pytest.mark.slow
def test_auto_makes_a_step_of_micro_batches_fit():
    machine = load("box:4")
    whole = run(gpt2(32), machine, "fsdp", micro_batches=2)
    needs = need(whole.graph, machine)
    limit = with_memory(machine, int(0.7 * needs))
    with pytest.raises(DoesNotFit):
        run(gpt2(32), limit, "fsdp", micro_batches=2)
    found = run(gpt2(32), limit, "fsdp", micro_batches=2, recompute="auto")
    assert need(found.graph, limit) <= limit.device.usable


@pytest.mark.slow
@pytest.mark.parametrize("share", sample([0.9, 0.6, 0.4], 3, 2))
def test_joint_fits_where_a_baseline_with_recompute_does(share: float):
    graph, machine = gpt2(32), load("box:4")
    baselines = [recipe(graph, machine, Degrees(zero=zero)) for zero in (2, 3)]
    limit = with_memory(machine, int(share * need(baselines[0], machine)))
    fitting = [recomputed(plan, "auto", limit, SGD) for plan in baselines]
    seconds = [as_emitted(plan, limit, SGD)[0] for plan in fitting if need(plan, limit) <= limit.device.usable]
    assert seconds
    found = run(graph, limit)
    assert need(found.graph, limit) <= limit.device.usable
    assert as_emitted(found.graph, limit, SGD)[0] <= min(seconds) * (1 + 1e-6)


@pytest.mark.slow
def test_the_message_names_what_recompute_would_need():
    graph, machine = gpt2(32), load("box:4")
    whole = need(recipe(graph, machine, Degrees(zero=2)), machine)
    with pytest.raises(DoesNotFit, match=r"with recompute=auto it fits into [0-9.]+ MB; or use more micro-batches"):
        run(graph, with_memory(machine, int(0.8 * whole)), "fsdp")
    said = r"with recompute=auto,loss_pieces=auto it still needs [0-9.]+ [Mk]B; or use more micro"
    with pytest.raises(DoesNotFit, match=said):
        run(graph, with_memory(machine, int(0.1 * whole)), "fsdp")
    with pytest.raises(DoesNotFit, match=r"in reserve\); use more micro-batches, more devices or a smaller batch$"):
        run(graph, with_memory(machine, int(0.1 * whole)), "fsdp", recompute="auto")


@pytest.mark.slow
def test_stages_gather_weights_in_every_micro_batch_where_recompute_is_not_enough():
    """Large ones, in the forward and again in the backward of each part; others still once per step."""
    keys = {"layers": 4, "hidden": 512, "intermediate": 1024, "heads": 8, "kv_heads": 4, "vocabulary": 512}
    graph, on = build("llama3_8b", batch=32, sequence=64, **keys), load("box:4")

    def planned(on: Machine, recompute: str) -> Graph:
        given = {"micro_batches": 8, "recompute": recompute, "stages": Stages(2)}
        return run(graph, on, "fsdp", Optimizer("adamw"), **given).graph

    def gathers(memory: float) -> list[int]:
        """Of what is done before all micro-batches, and of each forward and backward."""
        found = plan_graph(planned(with_memory(on, memory), "auto"), on)
        parts = [part for part, _ in found.parts if part.kind != "after"]
        moves = [[i for i in part.program.body if isinstance(i, ReshardMove)] for part in parts]
        return [sum(move.kind == "all_gather" for move in each) for each in moves]

    _, least = as_emitted(planned(on, "all"), on, Optimizer("adamw"))
    once, again = gathers(least), gathers(0.92 * least)
    assert once[1:] == [0] * 4
    # 7 products in each of the 2 layers of a stage.
    assert again[1:] == [14] * 4
    assert again[0] == once[0] - 28 > 0


def test_auto_goes_on_to_plans_that_save_less_where_saved_bytes_come_in_steps():
    """All plans with more than two of five steps saved are over the limit by a byte."""
    steps = 10**6

    class InSteps:
        layers = (None,)

        def bytes(self, again: tuple[frozenset[int]]) -> float:
            return float(steps * (5 - len(again[0])))

        def at(self, price: float) -> tuple[frozenset[int]]:
            return (frozenset(range(5)),)

        def with_least_time(self, most: float) -> tuple[frozenset[int]]:
            return (frozenset(range(5 - int(most // steps))),)

        def marked(self, again: tuple[frozenset[int]]) -> frozenset[int]:
            return again[0]

    def need(plan: frozenset[int]) -> int:
        return 1001 if len(plan) < 3 else 999

    assert len(_least(InSteps(), 1, need, 1000)) == 3
