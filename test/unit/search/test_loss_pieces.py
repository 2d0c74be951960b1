"""The number of pieces in which a loss is made, as the search chooses it: where memory is short, and as few as help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.models import build
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.pcg.types import tensor_type
from unity_ir.search import run
from unity_ir.search.memory.lagrangian import Refused, needed
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.recompute.fit import recomputed
from unity_ir.search.run import DoesNotFit
from unity_ir.simulate.report import as_emitted

SGD = Optimizer("sgd", 0.1)


def model(vocabulary: int = 2048) -> Graph:
    """A language model whose logits are most of what it holds."""
    return build("gpt2", batch=16, sequence=16, layers=2, hidden=16, heads=2, vocabulary=vocabulary)


def of_memory(memory: int) -> Machine:
    machine = load("box:2")
    return replace(machine, device=replace(machine.device, memory=memory, reserve=0))


def need(graph: Graph, machine: Machine) -> int:
    return needed(graph, cost(graph, machine, SGD), SGD)


def at(pieces: int) -> int:
    """The bytes of the model's plan with so many pieces; on a small device, so that peaks are simulated."""
    plan = run(model(), load("box:2"), "data-parallel", SGD).graph
    return need(replace(plan, loss_pieces=pieces), of_memory(1))


@pytest.mark.slow
def test_memory_that_suffices_takes_one_piece():
    for strategy in ("data-parallel", "joint"):
        assert run(model(), load("box:2"), strategy, SGD, loss_pieces="auto").graph.loss_pieces == 1


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "given"), [("data-parallel", "auto"), ("sequential", None)])
def test_a_pipeline_whose_last_stage_has_no_room_makes_its_loss_in_pieces(strategy: str, given: str | None):
    def found(machine: Machine, pieces: str | None) -> Graph:
        return run(model(), machine, strategy, SGD, micro_batches=2, loss_pieces=pieces, stages=Stages(2)).graph

    whole, pieces = (need(found(load("box:2"), count), of_memory(1)) for count in ("1", "4"))
    assert pieces < 0.9 * whole
    assert found(load("box:2"), given).loss_pieces == 1
    assert found(of_memory((pieces + whole) // 2), given).loss_pieces > 1


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_auto_takes_the_fewest_pieces_that_fit(pieces: int):
    assert at(pieces) < at(pieces // 2)
    plan = run(model(), of_memory(at(pieces)), "data-parallel", SGD, loss_pieces="auto").graph
    assert plan.loss_pieces == pieces
    assert not not_kept(plan)


@pytest.mark.slow
def test_recompute_and_pieces_are_compared_as_emitted():
    """Activations of the layers are small beside the logits: pieces are faster, and recompute alone does not fit."""
    on = of_memory(at(4))
    plan = run(model(), on, "data-parallel", SGD, recompute="auto", loss_pieces="auto").graph
    assert (plan.loss_pieces, not_kept(plan)) == (4, set())
    # With few classes it is the other way round.
    few = run(model(16), load("box:2"), "data-parallel", SGD).graph
    least = need(recomputed(few, "attention", of_memory(1), SGD), of_memory(1))
    found = run(model(16), of_memory(least), "data-parallel", SGD, recompute="auto", loss_pieces="auto").graph
    assert not_kept(found)
    both = [replace(found, loss_pieces=count) for count in (1, 2)]
    assert found.loss_pieces == 1
    assert as_emitted(both[0], of_memory(least), SGD)[0] < as_emitted(both[1], of_memory(least), SGD)[0]


@pytest.mark.slow
def test_joint_makes_a_plan_fit_that_does_not_with_recompute_alone(monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise Refused("search: no plan fits: it is said")

    on = of_memory(at(8))
    monkeypatch.setattr("unity_ir.search.strategies.joint.joint_within", refuses)
    found = run(model(), on, "joint", SGD)
    assert found.graph.loss_pieces > 1
    assert need(found.graph, on) <= on.device.memory


def test_sums_count_each_piece():
    """Kernels of all pieces, with their launches, and additions; and of what the loop makes nothing after it."""
    on = load("box:2")
    plan = run(model(), on, "data-parallel", SGD).graph
    whole, pieces = cost(plan, on, SGD), cost(replace(plan, loss_pieces=4), on, SGD)
    assert whole.additions == 0
    table = 2048 * 16 * 4
    assert pieces.additions == pytest.approx(on.memory_seconds(3, 9 * table))
    launches = (pieces.compute_time - pieces.additions - whole.compute_time) / on.device.launch
    assert launches >= 3 * 4
    logits = 8 * 16 * 2048 * 4
    assert whole.memory["activations"] - pieces.memory["activations"] == logits + 4  # and the loss


@pytest.mark.slow
def test_micro_batches_make_their_losses_in_pieces():
    found = run(model(), load("box:2"), "fsdp", SGD, micro_batches=2, loss_pieces="4").graph
    assert found.loss_pieces == 4
    less = at(2) // 2
    found = run(model(), of_memory(less), "data-parallel", SGD, micro_batches=2, loss_pieces="auto").graph
    assert found.loss_pieces > 1


def without_product() -> Graph:
    x = leaf("input", tensor_type((8, 4), "f32"), name="x")
    out = apply("mul", [x.result, leaf("weight", tensor_type((4,), "f32"), name="w").result]).result
    return Graph("scaled", (x,), (apply("reduce_sum", [out], {"dim": 0, "count": 2}).result,))


def squared() -> Graph:
    """A loss whose gradient needs its sum over all samples."""
    x, y = (leaf("input", tensor_type((8, 4), "f32"), name=name) for name in "xy")
    out = apply("matmul", [x.result, leaf("weight", tensor_type((4, 4), "f32"), name="w").result]).result
    return Graph("root", (x, y), (apply("sqrt", [apply("mse", [out, y.result]).result]).result,))


@pytest.mark.parametrize(
    ("graph", "pieces", "said"),
    [
        (model(16), "some", "search: loss_pieces is 'some'; it is a number of pieces, 1 or more, or auto"),
        (model(16), "0", "search: loss_pieces is '0'; it is a number"),
        (model(16), "3", "in 3 pieces: a rank has 8 x 16 tokens of matmul_nt; give loss_pieces a divisor of these"),
        (without_product(), "2", "in 2 pieces: no matrix product leads to it; leave loss_pieces out"),
        (squared(), "2", "in 2 pieces: its mse_grad reads a piece, and what is known only after all of them"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(graph: Graph, pieces: str, said: str):
    with pytest.raises(UnityError, match=re.escape(said)) as error:
        run(graph, load("box:2"), "data-parallel", SGD, loss_pieces=pieces)
    assert "\n" not in str(error.value)


def test_auto_leaves_a_loss_in_one_piece_that_cannot_be_in_more():
    with pytest.raises(DoesNotFit):
        run(squared(), of_memory(100), "data-parallel", SGD, loss_pieces="auto")
