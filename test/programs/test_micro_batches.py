"""Steps in micro-batches on real ranks: equal to PyTorch on the undivided batch; a check that tells what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from models import MODELS, data, machine, masked, weight
from ranks import Ranks, check, gradients

from unity_ir.dialects.convert_program import from_op, to_op
from unity_ir.errors import UnityError
from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.micro_batches import in_micro_batches, micro_batch
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.instructions import Compute
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.scheduled import Action, Schedule
from unity_ir.search import run
from unity_ir.search.baselines.batch_dims import sample_dims


def program(model: str, count: int, inside: bool = False, plan: str = "data-parallel", where: str = "ideal:2") -> str:
    """The text of a model's program whose step has `count` micro-batches."""
    graph, on = MODELS[model][0](), machine(where)
    dims = sample_dims(graph)
    placed = run(micro_batch(graph, dims, count), on, plan).graph
    step = differentiate(in_micro_batches(placed, dims, count, lambda weight: inside), Optimizer("sgd", 0.1), on.mesh)
    return emit(plan_step(lower(fuse_collectives(step), on), PlanOptions(kernels="torch")), graph).text


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixed", "mlp", "attention", "shapes"])
def test_masks_and_losses_do_not_depend_on_micro_batches(ranks: Ranks, model: str):
    """Dropout is drawn by the position in the whole batch."""
    alone = ranks.run(program(model, 1), 2, gradients)[0]
    for count, inside in ((2, False), (2, True)) if model != "attention" else ((2, True),):
        text = program(model, count, inside)
        assert ranks.run(text, 2, check, 2) == [[]] * 2
        found = ranks.run(text, 2, gradients)[0]
        assert found[2] == pytest.approx(alone[2], rel=1e-5)


def penalised() -> Graph:
    """A loss with a term of the weights alone, of which a micro-batch knows nothing; and a further output."""
    x, y = data("x", 8, 24), data("y", 8, 24)
    w = weight("w", 24, 24)
    out = apply("matmul", [x.result, w]).result
    total = apply("reduce_sum", [apply("mul", [w, w]).result], {"dim": 0, "count": 2}).result
    return Graph("penalised", (x, y), (apply("add", [apply("mse", [out, y.result]).result, total]).result, out))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "inside"), [(2, False), (4, True)])
def test_what_depends_on_no_sample_is_done_once(ranks: Ranks, count: int, inside: bool):
    graph, on = penalised(), machine("ideal:2")
    dims = {"x": 0, "y": 0}
    placed = run(micro_batch(graph, dims, count), on, "data-parallel").graph
    plan = in_micro_batches(placed, dims, count, lambda weight: inside)
    step = fuse_collectives(differentiate(plan, Optimizer("sgd", 0.1), on.mesh))
    program = lower(step, on)
    made = plan_step(program, PlanOptions(kernels="torch"))
    when = {line.when for line in made.schedule.lines if isinstance(line.action, Compute)}
    assert when == {"first", "every", "last"}
    assert ranks.run(emit(made, graph).text, 2, check, 2) == [[]] * 2


def read_twice() -> Graph:
    """A weight that an operator reads once, and one of the loop before it in every micro-batch."""
    x, y = data("x", 8, 24), data("y", 8, 24)
    w, u = weight("w", 24, 24), weight("u", 24, 24)
    out = apply("matmul", [apply("matmul", [x.result, w]).result, apply("add", [w, u]).result]).result
    return Graph("read_twice", (x, y), (apply("mse", [out, y.result]).result,))


def zeros() -> Graph:
    """A number for each sample, which an operator reads before it meets the samples, as an initial state is."""
    x, y = data("x", 8, 24), data("y", 8, 24)
    start = leaf("constant", tensor_type((8, 24), "f32"), value=0.5).result
    before = apply("matmul", [start, weight("u", 24, 24)]).result
    out = apply("add", [before, apply("matmul", [x.result, weight("w", 24, 24)]).result]).result
    return Graph("zeros", (x, y), (apply("mse", [out, y.result]).result,))


@pytest.mark.slow
@pytest.mark.parametrize("made", [read_twice, zeros])
@pytest.mark.parametrize("plan", ["data-parallel", "fsdp", "zero3"])
def test_what_is_made_once_lasts_to_its_last_reader_in_the_last_micro_batch(
    ranks: Ranks, made: Callable[[], Graph], plan: str
):
    graph, on = made(), machine("ideal:2")
    placed = run(graph, on, plan, micro_batches=4).graph
    step = fuse_collectives(differentiate(placed, Optimizer("sgd", 0.1), on.mesh))
    text = emit(plan_step(lower(step, on), PlanOptions(kernels="torch")), graph).text
    assert ranks.run(text, 2, check, 2) == [[]] * 2


MASKED = [("data-parallel", 2, "ideal:2"), ("fsdp", 4, "ideal:2"), ("zero3", 2, "ideal:2"), ("joint", 4, "ideal:2x2")]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("plan", "count", "where"), MASKED)
def test_a_mean_over_some_labels_is_of_those_of_all_micro_batches(ranks: Ranks, plan: str, count: int, where: str):
    graph, on = masked(), machine(where)
    step = fuse_collectives(differentiate(run(graph, on, plan, micro_batches=count).graph, Optimizer("sgd", 0.1)))
    program = lower(step, on)
    made = plan_step(program, PlanOptions(kernels="torch"))
    early = [line for line in made.schedule.lines if line.when == "early"]
    assert 5 <= len(early) <= 8
    # Nothing of the loop before is read in the other, but what it adds up.
    others = {r for line in made.schedule.lines if line.when != "early" for r in read_by(made.schedule, line.action)}
    shared = {r for line in early for r in made.schedule.reads_and_makes(line.action)[1]} & others
    assert len(shared) == 1
    text = emit(made, graph).text
    assert ranks.run(text, on.devices, check, 2) == [[]] * on.devices
    one, every = "in micro_batches(ctx, {}):", text.index("# a loop before")
    wrong = text[:every].replace(one.format(count), one.format(1)) + text[every:]
    assert wrong != text
    assert ranks.run(wrong, on.devices, check, 2)[0]
    assert from_op(to_op(program)) == program


def read_by(schedule: Schedule, action: Action) -> tuple[int, ...]:
    return schedule.reads_and_makes(action)[0]


def test_a_loss_that_is_no_sum_over_samples_is_refused():
    x, y = data("x", 8, 24), data("y", 8, 24)
    out = apply("matmul", [x.result, weight("w", 24, 24)]).result
    root = apply("sqrt", [apply("mse", [out, y.result]).result]).result
    for strategy in ("joint", "fsdp"):
        with pytest.raises(UnityError, match=r"pcg.sqrt: each of the 2 micro-batches needs its gradient"):
            run(Graph("root", (x, y), (root,)), machine("ideal:2"), strategy, micro_batches=2)


MUTANTS = {
    "the same piece in every micro-batch": (r"x\.chunk\(count, dim\)\[ctx\.micro_batch\]", "x.chunk(count, dim)[0]"),
    "a piece dropped": (r"total\.add_\(x\)", "total"),
    "a piece added twice": (r"total\.add_\(x\)", "total.add_(x).add_(x)"),
    "summed over devices in every micro-batch": (
        r"(def accumulated\(total, x, last, dtype=None\):)",
        r"\1\n    dist.all_reduce(x)",
    ),
    "a gradient of the mean of each micro-batch": (
        r"(def accumulated\(total, x, last, dtype=None\):)",
        r"\1\n    x = x * 2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_wrong_in_the_loop_is_told(ranks: Ranks, mutant: str):
    text = program("mixed", 2)
    wrong = re.sub(*MUTANTS[mutant], text)
    assert wrong != text
    assert ranks.run(text, 2, check, 1) == [[]] * 2
    assert any(ranks.run(wrong, 2, check, 1))


@pytest.mark.slow
def test_masks_drawn_alike_in_every_micro_batch_are_told(ranks: Ranks):
    text = program("mixed", 2)
    wrong = text.replace(", ctx.micro_batch)", ")")
    assert wrong != text
    assert any(ranks.run(wrong, 2, check, 1))
