"""The simulator replays the plan that is emitted."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
from graphs import boxes
from lowered import kernel_name
from zoo_plans import SIZES

from unity_ir import models
from unity_ir.forms.compose import AND
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import apply, leaf, parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.instructions import Compute, Fused
from unity_ir.plan.listing import listing
from unity_ir.plan.plan import plan_graph
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.run import run
from unity_ir.simulate.full import simulate
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.replay import replay
from unity_ir.simulate.report import as_emitted, simulated, step_seconds
from unity_ir.simulate.tasks import UPDATE

MODELS = {
    "mlp": {"batch": 32, "hidden": 64, "layers": 3, "classes": 16},
    "gpt2": {"layers": 1, "batch": 8, "sequence": 16, "hidden": 32, "heads": 4, "vocabulary": 64},
}


def planned(model: str, strategy: str, dtype: str) -> tuple[Graph, Graph]:
    """A model, and its plan on 8 GPUs."""
    graph = models.build(model, **(MODELS.get(model) or SIZES[model]))
    graph = mixed_precision(graph, "bf16") if dtype == "bf16" else graph
    if strategy == "ring":
        return graph, recipe(graph, load("dgx-h100:1"), Degrees(cp=4, tp=2, sp=True, ring=True))
    return graph, run(graph, load("dgx-h100:1"), strategy).graph


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "expert", "joint"])
@pytest.mark.parametrize("model", [*MODELS, *(sorted(SIZES.keys() - MODELS) if os.environ.get("ZOO") == "all" else ())])
def test_tasks_are_the_lines_of_the_program(model: str, strategy: str, dtype: str):
    """
    Kernels, starts of collectives and waits of the emitted step are those simulated, one by one and in order, and
    launches are as many as its statistics say.
    """
    machine = load("dgx-h100:1")
    _, graph = planned(model, strategy, dtype)
    plan = plan_graph(graph, machine, Optimizer("adamw"))
    tasks = replay(plan, machine)
    functions = [n for n in ast.parse(emit(plan, erase(graph)).text).body if isinstance(n, ast.FunctionDef)]
    launches = {f.name: sum(map(is_launch, ast.walk(f))) for f in functions}
    (step,) = (f for f in functions if f.name == "forward_backward")
    done = [each for statement in step.body for each in executed(statement) if each == "wait" or each in launches]
    # Where devices do different work, a line has a task for each class of them, all with its label.
    labels = [a for a, b in zip(tasks.labels, [None, *tasks.labels], strict=False) if a is not b]
    expected = [label for label in labels if label.kind != UPDATE and label.what not in (*LOCAL, "copy")]
    kernels = {kernel_name(plan, i) for i in plan.program.body if isinstance(i, Compute)}
    assert (
        max(
            sum(launches[name] or 1 for name in ran if name in kernels)
            for ran in on_each_rank(step, plan.program.mesh.sizes)
        )
        == plan.launches
    )
    assert plan.launches == simulated(graph, machine, Optimizer("adamw")).launches
    done = [name for name in done if name.removesuffix("_many") not in (*LOCAL, "constant")]
    assert len(done) == len(expected) > 0
    for name, label in zip(done, expected, strict=True):
        # A launcher is named after its operators, then their shapes.
        assert name.startswith(label.what.replace(AND, "_")), (name, label)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_ring_is_replayed_as_it_runs(dtype: str):
    test_tasks_are_the_lines_of_the_program("gpt2", "ring", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), [("mlp", "fsdp"), ("gpt2", "joint"), ("gpt2", "zero3")])
def test_the_loop_over_micro_batches_is_played_as_it_runs(model: str, strategy: str):
    """Line by line, those of the first and of the last micro-batch included; of many, a few are played."""
    machine = load("dgx-h100:1x2")
    count = 4
    graph = mixed_precision(models.build(model, **MODELS[model]), "bf16")
    placed = run(graph, machine, strategy, Optimizer("adamw"), micro_batches=count).graph
    plan = plan_graph(placed, machine, Optimizer("adamw"))
    (step,) = (
        f
        for f in ast.parse(emit(plan, erase(placed)).text).body
        if isinstance(f, ast.FunctionDef) and f.name == "forward_backward"
    )
    (loop,) = (s for s in step.body if isinstance(s, ast.For))
    kernels = {kernel_name(plan, i) for i in plan.program.body if isinstance(i, Compute)}
    done: list[str] = []
    for number in range(count):
        for statement in loop.body:
            inner = [statement]
            if isinstance(statement, ast.If):
                runs = {"first": number == 0, "last": number == count - 1}[ast.unparse(statement.test)]
                inner = statement.body if runs else []
            done += [each for s in inner for each in executed(s)]
    done = [n for n in done if n.removesuffix("_many") not in (*LOCAL, "constant", "take_micro_batch", "float")]
    tasks = replay(plan, machine)
    expected = [label for label in tasks.labels if label.kind != UPDATE and label.what not in (*LOCAL, "copy")]
    assert len(done) == len(expected) > 0
    for name, label in zip(done, expected, strict=True):
        assert name.startswith(label.what.replace(AND, "_")), (name, label)
    # Launches are those of all micro-batches together.
    assert plan.launches >= count * (len(kernels) // 2)
    assert step_seconds(plan, machine)[0] == pytest.approx(simulate(tasks).seconds, rel=1e-6)
    assert held_over_time(simulate(tasks)).bytes[-1] == tasks.always[0]


def on_each_rank(step: ast.FunctionDef, sizes: Sequence[int]) -> Iterator[list[str]]:
    """The functions that a rank calls, for every place along axes that tell ranks apart (`x if at_0_1 else None`)."""
    here = {
        target.id: dict(ast.literal_eval(call.args[0]))
        for statement in step.body
        if isinstance(statement, ast.Assign)
        and isinstance(target := statement.targets[0], ast.Name)
        and isinstance(call := statement.value, ast.Call)
        and ast.unparse(call.func) == "ctx.at"
    }
    axes = sorted({axis for pinned in here.values() for axis in pinned})
    for place in product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        true = {name for name, pinned in here.items() if pinned.items() <= at.items()}
        yield [each for statement in step.body for each in executed(statement, {n: n in true for n in here})]


def is_launch(node: ast.AST) -> bool:
    """Whether an expression launches a kernel: `kernel[(grid,)](..)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)


def executed(statement: ast.AST, here: Mapping[str, bool] | None = None) -> Iterator[str]:
    """
    The functions that a statement calls, in the order of execution; a wait for each collective waited for. `here` says
    which conditions hold on a rank; without it all do.
    """
    if isinstance(statement, ast.IfExp) and here is not None and isinstance(name := statement.test, ast.Name):
        yield from executed(statement.body if here[name.id] else statement.orelse, here)
        return
    if isinstance(statement, ast.Call):
        for argument in statement.args:
            yield from executed(argument, here)
        match statement.func:
            case ast.Attribute(value, "wait"):
                yield from executed(value, here)
                yield "wait"
            case ast.Name("wait"):
                yield from ["wait"] * len(statement.args)
            case ast.Name(name):
                yield name
            case ast.Attribute(value):
                yield from executed(value, here)
            case _:
                pass
        return
    for child in ast.iter_child_nodes(statement):
        yield from executed(child, here)


LOCAL = ("slice", "zero_pad", "retype", "pick", "keep", "keep_part")


def test_a_group_is_one_kernel():
    """Fusing operators lowers the simulated time by their launches and by what they no longer read and write."""
    machine = boxes(1)
    x = leaf("input", tensor_type((512, 256), "f32"), name="x")
    w = leaf("weight", tensor_type((256, 256), "f32"), name="w").result
    h = apply("gelu", [apply("matmul", [x.result, w]).result]).result
    graph = Graph("f", (x,), (apply("reduce_sum", [h], {"dim": 0, "count": 2}).result,))
    plan = plan_graph(graph, machine)
    assert any(isinstance(i, Fused) for i in plan.program.body)
    kernels = [label for label in replay(plan, machine).labels if label.kind != UPDATE]
    assert len(kernels) == len([i for i in plan.schedule.lines if type(i.action).__name__ in ("Compute", "Fused")])


def test_overlap_never_takes_longer_and_memory_ends_as_it_began():
    machine = load("dgx-h100:1")
    for strategy in ("data-parallel", "fsdp"):
        graph = planned("mlp", strategy, "f32")[1]
        found = simulated(graph, machine)
        assert found.overlapped <= found.waiting
        assert as_emitted(graph, machine) == (found.overlapped, found.peak)
        timeline = simulate(replay(plan_graph(graph, machine), machine))
        assert held_over_time(timeline).bytes[-1] == timeline.tasks.always[0]


def test_the_listing_has_a_line_per_line_of_the_plan():
    machine = load("2gpu")
    plan = plan_graph(run(models.build("mlp", **MODELS["mlp"]), machine, "data-parallel").graph, machine)
    head, *lines = listing(plan).splitlines()
    assert head.startswith("@mlp on 2 devices: ")
    updates = [line for line in lines if line.startswith("  update ")]
    assert len(lines) - len(updates) == len(plan.schedule.lines)
    assert len(updates) == len(plan.program.leaves("weight"))
    assert any(line.startswith("  start   all_reduce along 0 of") for line in lines)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_parts_without_a_loss_make_all_their_outputs(count: int):
    """A part of a model returns any number of values; each is made, and moved to where it is wanted."""
    x = leaf("input", tensor_type((8, 4), "f32"), name="x")
    results = tuple(apply(name, [x.result]).result for name in ("relu", "tanh", "exp")[:count])
    graph = run(Graph("f", (x,), results), boxes(2), "joint").graph
    gathered = tuple(parallel("combine", r, dim=0, by=2).result for r in graph.outputs)
    for outputs in (graph.outputs, gathered):
        plan = plan_graph(replace(graph, outputs=outputs), boxes(2))
        made = {r for line in plan.schedule.lines for r in plan.schedule.reads_and_makes(line.action)[1]}
        assert len(plan.program.outputs) == count
        assert {plan.schedule.held(r) for r in plan.program.outputs} <= made
        simulated(replace(graph, outputs=outputs), boxes(2))
