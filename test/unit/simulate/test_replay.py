"""The simulator replays the plan that is emitted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest
from graphs import boxes

from unity_ir import models
from unity_ir.forms.compose import AND
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.pcg.graph import Graph, Optimizer, apply, erase, leaf, parallel
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.listing import listing
from unity_ir.plan.plan import plan_graph
from unity_ir.plan.program import Fused
from unity_ir.search.run import run
from unity_ir.simulate.full import simulate
from unity_ir.simulate.memory import memory
from unity_ir.simulate.replay import replay
from unity_ir.simulate.report import as_emitted, simulated
from unity_ir.simulate.tasks import UPDATE

MODELS = {
    "mlp": {"batch": 32, "hidden": 64, "layers": 3, "classes": 16},
    "gpt2": {"layers": 1, "batch": 8, "sequence": 16, "hidden": 32, "heads": 4, "vocabulary": 64},
}


def planned(model: str, strategy: str, dtype: str) -> tuple[Graph, Graph]:
    """A model, and its plan on 8 GPUs."""
    graph = models.build(model, **MODELS[model])
    graph = mixed_precision(graph, "bf16") if dtype == "bf16" else graph
    return graph, run(graph, load("dgx-h100:1"), strategy).graph


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "expert", "joint"])
@pytest.mark.parametrize("model", MODELS)
def test_tasks_are_the_lines_of_the_program(model: str, strategy: str, dtype: str):
    """Kernels, starts of collectives and waits of the emitted step are those simulated, one by one and in order."""
    machine = load("dgx-h100:1")
    _, graph = planned(model, strategy, dtype)
    plan = plan_graph(graph, machine, Optimizer("adamw"))
    tasks = replay(plan, machine)
    # Every device does the same here, so each line is one task.
    assert tasks.streams.classes == 1
    text = emit(plan, erase(graph)).text
    body = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "forward_backward")
    launchers = {emitted.name for emitted in ast.parse(text).body if isinstance(emitted, ast.FunctionDef)}
    done = [each for statement in body.body for each in executed(statement) if each == "wait" or each in launchers]
    expected = [label for label in tasks.labels if label.kind != UPDATE and label.what not in LOCAL]
    done = [name for name in done if name.removesuffix("_many") not in (*LOCAL, "constant")]
    assert len(done) == len(expected) > 0
    for name, label in zip(done, expected, strict=True):
        # A launcher is named after its operators, then their shapes.
        assert name.startswith(label.what.replace(AND, "_")), (name, label)


def executed(statement: ast.AST) -> Iterator[str]:
    """The functions that a statement calls, in the order of execution; a wait for each collective waited for."""
    if isinstance(statement, ast.Call):
        for argument in statement.args:
            yield from executed(argument)
        match statement.func:
            case ast.Attribute(value, "wait"):
                yield from executed(value)
                yield "wait"
            case ast.Name("wait"):
                yield from ["wait"] * len(statement.args)
            case ast.Name(name):
                yield name
            case _:
                pass
        return
    for child in ast.iter_child_nodes(statement):
        yield from executed(child)


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
        assert memory(timeline).bytes[-1] == timeline.tasks.always[0]


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
