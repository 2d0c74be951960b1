"""
Rows of experts go to the devices that own these, and back, in the lines of a step: what is counted, sent and computed
where, how large buffers are, what it costs, and what stays gathered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from graphs import boxes

from unity_ir.cost.kernels import kernel_of_line
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.models.builder import Builder
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan import host_values
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.instructions import Compute, ReshardMove, RowMove
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import plan_graph
from unity_ir.plan.program import Program
from unity_ir.plan.routes import with_routes
from unity_ir.search import run, with_stages
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.choose.winner import Chooser
from unity_ir.search.exchange import exchanging_rows
from unity_ir.search.layouts.exchanged import exchange_rows
from unity_ir.search.memory.lagrangian import Refused
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.result import SearchResult
from unity_ir.search.strategies import joint
from unity_ir.search.strategies.joint import JointOptions
from unity_ir.simulate.report import as_emitted

ADAMW = Optimizer("adamw")
EIGHT = load("dgx-h100:1")
MOE = {"layers": 2, "batch": 8, "sequence": 16, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 16}
MODELS: dict[str, dict[str, int | str]] = {
    "moe": {**MOE, "dispatch": "sparse", "vocabulary": 64},
    "qwen3_moe": {**MOE, "head": 8, "experts": 16, "chosen": 4, "vocabulary": 64},
}


@cache
def graph(model: str = "moe") -> Graph:
    return build(model, **MODELS[model])


def placed(degrees: Degrees, model: str = "moe") -> Graph:
    return recipe(graph(model), EIGHT, degrees)


def lowered(plan: Graph) -> Program:
    return lower(fuse_collectives(differentiate(plan, ADAMW, EIGHT.mesh)), EIGHT)


def rows(program: Program, kind: str) -> list[RowMove]:
    return [i for i in program.body if isinstance(i, RowMove) and i.kind == kind]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("degrees", [Degrees(ep=8, exchange=True), Degrees(ep=4, zero=3, exchange=True)], ids=str)
def test_each_layer_counts_once_and_sends_tokens_and_gradients(model: str, degrees: Degrees):
    program = lowered(placed(degrees, model))
    made = with_routes(program)
    kinds = Counter(i.kind for i in made.body if isinstance(i, RowMove))
    # The experts, the tokens and the gradients of results; results and the gradients of tokens.
    layers = int(MODELS[model]["layers"])
    assert kinds == {"count_rows": layers, "send_rows": 3 * layers, "return_rows": 2 * layers}
    names = Counter(i.operator for i in made.body if isinstance(i, Compute))
    before = Counter(i.operator for i in program.body if isinstance(i, Compute))
    for name in ("matmul", "matmul_nt", "matmul_tn"):
        assert names[f"routed_{name}"] == 0
        assert names[f"rows_{name}"] == before[f"routed_{name}"]
    # What products make of rows is made where these are, once: nothing of it is made at home.
    assert names["silu"] == names["silu_grad"] == layers
    gathered = [i for i in made.body if isinstance(i, ReshardMove) and i.kind == "all_gather"]
    weights = {leaf.result for leaf in made.leaves("weight")}
    assert all(i.operand in weights for i in gathered)


def test_a_plan_that_gathers_stays_as_it_is():
    program = replace(lowered(placed(Degrees(cp=2))), exchange_rows=inf)
    assert with_routes(program) is program
    assert placed(Degrees(ep=8)).exchange_rows == 0
    assert placed(Degrees(ep=8, exchange=True)).exchange_rows == inf
    assert placed(Degrees(ep=8, exchange=True, imbalance=1.5)).exchange_rows == 1.5
    assert erase(placed(Degrees(ep=8, exchange=True))).exchange_rows == 0


@pytest.mark.parametrize(
    ("model", "degrees", "room", "live"),
    [
        # 16 tokens of a device with 2 choices of 8 experts, of which each of 8 devices has one: all tokens may come.
        ("moe", Degrees(ep=8, exchange=True), 128, 32),
        # Each of 4 devices has two: both choices of all 64 tokens of its group may.
        ("moe", Degrees(ep=4, exchange=True), 128, 32),
        ("moe", Degrees(ep=8, exchange=True, imbalance=1.3), 42, 42),
        # No more than may come.
        ("moe", Degrees(ep=8, exchange=True, imbalance=100.0), 128, 128),
        # Of 4 choices of 16 experts a device has two, at most.
        ("qwen3_moe", Degrees(ep=8, exchange=True), 256, 64),
    ],
    ids=str,
)
def test_a_buffer_has_room_for_what_may_come(model: str, degrees: Degrees, room: int, live: int):
    program = with_routes(lowered(placed(degrees, model)))
    for move in rows(program, "send_rows"):
        assert (move.rows, move.live) == (room, live)
        assert program.tensors[move.result].local(program.mesh)[1] == room
    for move in rows(program, "return_rows"):
        assert program.tensors[move.result].local(program.mesh)[1] == 16 * int(MODELS[model].get("chosen", 2))


def test_rows_that_other_experts_make_are_gathered():
    """The second product's rows are where the experts of the first are, which other tokens have chosen."""
    b, tokens, hidden = Builder("two"), 64, 16
    x, labels = b.input("x", tokens, hidden), b.input("labels", tokens, dtype="i64")
    x = b.op("expand", x, dim=1, sizes=(2,), degrees=(1,))
    for name in ("first", "second"):
        chosen = b.input(f"{name}.chosen", tokens, 2, dtype="i64")
        x = b.op("routed_matmul", x, b.weight(name, 8, hidden, hidden), chosen)
    logits = b.linear(b.op("reduce_sum", x, dim=1), "head", 32, bias=False)
    serial = b.graph(b.op("cross_entropy", logits, labels))
    made = with_routes(lowered(recipe(serial, EIGHT, Degrees(ep=8, exchange=True))))
    names = Counter(i.operator for i in made.body if isinstance(i, Compute))
    assert names["rows_matmul"] == names["routed_matmul"] == 1
    (gathered,) = (i for i in made.body if isinstance(i, Compute) and i.operator == "routed_matmul")
    # Its rows are those that have come home.
    sources = {i.result: i.operand for i in made.body if isinstance(i, ReshardMove)}
    sources |= {i.results[0]: i.operands[0] for i in made.body if isinstance(i, Compute) and i.operator == "reshape"}
    home = gathered.operands[0]
    while home in sources:
        home = sources[home]
    assert home in {r for i in made.body if isinstance(i, Compute) and i.operator == "take_rows" for r in i.results}


def test_prices_count_the_rows_that_are_there():
    even, more = (
        with_routes(lowered(placed(Degrees(ep=8, exchange=True, imbalance=factor)))) for factor in (None, 2.0)
    )
    for kind in ("send_rows", "return_rows"):
        for one, two in zip(rows(even, kind), rows(more, kind), strict=True):
            assert move_of(more, two).elements == 2 * move_of(even, one).elements > 0
    products = [
        [i for i in program.body if isinstance(i, Compute) and i.operator.startswith("rows_")]
        for program in (even, more)
    ]
    for one, two in zip(*products, strict=True):
        assert kernel_of_line(more, two).flops == 2 * kernel_of_line(even, one).flops > 0


@pytest.mark.parametrize("degrees", [Degrees(ep=8, exchange=True), Degrees(ep=4, exchange=True)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_products_of_an_even_share_compute_as_much_as_those_of_gathered_rows(model: str, degrees: Degrees):
    gathered = lowered(placed(degrees, model))
    exchanged = with_routes(gathered)

    def computed(program: Program, names: str) -> int:
        products = (i for i in program.body if isinstance(i, Compute) and i.operator.startswith(names))
        return sum(kernel_of_line(program, i).flops for i in products)

    assert computed(exchanged, "rows_matmul") == computed(gathered, "routed_matmul") > 0


def test_fewer_bytes_cross_links_than_with_gathers():
    gathered, exchanged = (
        cost(placed(degrees), EIGHT, ADAMW) for degrees in (Degrees(ep=8), Degrees(ep=8, exchange=True))
    )
    assert exchanged.bytes < gathered.bytes / 2
    assert exchanged.communication_time < gathered.communication_time


def test_bytes_and_seconds_are_the_same_with_values_at_the_host(monkeypatch: pytest.MonkeyPatch):
    """Rows that the backward reads come back from the host first, and are exchanged as without offload."""
    monkeypatch.setattr(host_values, "VALUE_BYTES", 512)
    monkeypatch.setattr(host_values, "VALUE_WINDOW", 2048)
    plan = placed(Degrees(ep=8, exchange=True))
    on_device, at_host = (cost(replace(plan, offload=kind), EIGHT, ADAMW) for kind in ("none", "activations"))
    assert at_host.activations_at_host > 0
    assert at_host.moves == on_device.moves


def test_no_device_is_counted_to_hold_gathered_rows():
    before, after = (
        cost(placed(degrees, "qwen3_moe"), EIGHT, ADAMW) for degrees in (Degrees(ep=8), Degrees(ep=8, exchange=True))
    )
    assert sum(r.stays_divided for r in before.reshards) == 0
    # The rows and experts of the first products, and the rows of the last, of each layer.
    assert sum(r.stays_divided for r in after.reshards) == 3 * int(MODELS["qwen3_moe"]["layers"])
    assert after.memory["activations"] < before.memory["activations"] / 2


def test_rows_wait_for_their_counts():
    plan = plan_graph(placed(Degrees(ep=8, exchange=True)), EIGHT, ADAMW)
    waited: set[int] = set()
    for line in plan.schedule.lines:
        waited.update(getattr(line.action, "registers", ()))
        if isinstance(line.action, RowMove) and line.action.counts is not None:
            assert line.action.counts in waited
    assert waited


def test_a_step_with_a_smaller_bound_holds_less():
    peaks = [
        as_emitted(placed(Degrees(ep=8, exchange=True, imbalance=factor), "qwen3_moe"), EIGHT, ADAMW)[1]
        for factor in (1.0, 2.0, None)
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


LARGE = {**MOE, "layers": 1, "batch": 4, "sequence": 1024, "hidden": 512, "intermediate": 512, "experts": 32}


@pytest.mark.zoo
@pytest.mark.slow
def test_the_joint_search_takes_it_where_it_is_faster():
    machine = boxes(2, 2, bandwidth=5e9)
    serial = build("moe", **{**LARGE, "dispatch": "sparse", "vocabulary": 64})
    options: tuple[dict[str, bool | float], ...] = ({}, {"imbalance": 1.1}, {"exchange": False})
    found, bounded, without = (run(serial, machine, "joint", ADAMW, given).graph for given in options)
    assert (found.exchange_rows, bounded.exchange_rows, without.exchange_rows) == (inf, 1.1, 0)
    seconds, most, gathered = (as_emitted(each, machine, ADAMW)[0] for each in (found, bounded, without))
    assert max(seconds, most) < gathered
    assert replace(erase(found), optimizer=None) == serial


@pytest.mark.slow
def test_rows_are_exchanged_in_pipelines_that_are_faster_so():
    machine = boxes(2, 2, bandwidth=2e10)
    serial = build("moe", **{**LARGE, "layers": 2, "dispatch": "sparse", "vocabulary": 64})
    gathers = run(serial, machine, "degrees", ADAMW, {"ep": 2}, micro_batches=2, stages=Stages(2))
    found = exchanging_rows(gathers, machine, ADAMW, None)
    assert (found.graph.exchange_rows, found.graph.pipeline) == (inf, gathers.graph.pipeline)
    assert as_emitted(found.graph, machine, ADAMW)[0] < as_emitted(gathers.graph, machine, ADAMW)[0]


def test_a_pipeline_gathers_rows_where_none_that_exchanges_them_fits(monkeypatch: pytest.MonkeyPatch):
    """Searches of pipelines are faked: what is looked for after what is all that counts here."""
    plan = recipe(graph(), EIGHT, Degrees(ep=8))
    found = SearchResult("joint", plan, cost(plan, EIGHT, ADAMW), bound=1.0, family="any")

    def fastest(*_: object) -> SearchResult:
        return replace(found, graph=replace(plan, exchange_rows=exchange_rows()))

    def needed(plan: Graph, *_: object) -> float:
        return inf if plan.exchange_rows else 0

    monkeypatch.setattr(with_stages._Pipelines, "_fastest", fastest)
    monkeypatch.setattr(with_stages, "needed", needed)
    pipelines = with_stages._Pipelines(graph(), EIGHT, JointOptions(), ADAMW, 2)
    chosen = pipelines.faster_than(None)
    assert chosen is not None
    assert (chosen.graph.exchange_rows, chosen.family) == (0, "any, rows of experts gathered")


def test_the_joint_search_takes_it_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch):
    """A whole search in so little memory takes half a minute; what it ends with is all that counts here."""
    machine = boxes(2, 2, bandwidth=2e10)
    machine = replace(machine, device=replace(machine.device, memory=235 * 10**6, reserve=0))
    serial = build("moe", **{**LARGE, "batch": 8, "dispatch": "sparse", "vocabulary": 64})

    def refused(*_: object) -> None:
        raise Refused("search: no plan fits")

    monkeypatch.setattr(joint, "joint_within", refused)
    monkeypatch.setattr(Chooser, "_recomputed", lambda *_: [])
    found = run(serial, machine, "joint", ADAMW, {"imbalance": 1.5}, offload="none")
    assert found.graph.exchange_rows == 1.5
    assert as_emitted(found.graph, machine, ADAMW)[1] <= machine.device.usable
    with pytest.raises(Refused, match=r"^search: no plan fits"):
        run(serial, machine, "joint", ADAMW, {"exchange": False}, offload="none")


def test_the_joint_search_gathers_where_that_is_faster():
    """Each move has a start of its own, which takes longer than the little that is moved."""
    machine = boxes(2, overhead=1e-3, bandwidth=1e12)
    assert run(graph(), machine, "joint", ADAMW).graph.exchange_rows == 0
    with pytest.raises(UnityError, match=r"^search: imbalance is 0\.5; it is a number of 1 or more$"):
        run(graph(), machine, "joint", ADAMW, {"imbalance": 0.5})


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"exchange": True}, "degrees: exchange=true exchanges rows among the devices of ep; add ep=2 or more"),
        (
            {"ep": 2, "tp": 2, "exchange": True},
            "degrees: exchange=true exchanges rows that dp and ep alone divide; leave tp and cp out",
        ),
        ({"ep": 2, "imbalance": 2.0}, "degrees: imbalance=2.0 bounds the rows that are exchanged; add exchange=true"),
        ({"ep": 2, "exchange": True, "imbalance": 0.5}, "degrees: imbalance is 0.5; it is a number of 1 or more"),
        ({"ep": 2, "exchange": True, "imbalance": inf}, "degrees: imbalance is inf; it is a number of 1 or more"),
    ],
)
def test_degrees_that_contradict_each_other(degrees: dict[str, float], said: str):
    with pytest.raises(UnityError, match=f"^{said}$"):
        Degrees(**degrees)  # pyright: ignore[reportArgumentType]
