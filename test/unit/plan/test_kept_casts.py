"""Updates write the casts of weights that the next step reads; plans price and hold them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unity_ir.cost.kernels import bytes_of_update, kernel_of_line, seconds_of_update, step_bytes
from unity_ir.cost.plan import update_bytes, update_kernel
from unity_ir.machine import Machine, load
from unity_ir.machine.profile import Profile
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.forward import forward_of
from unity_ir.plan.instructions import Compute, UpdateWeight
from unity_ir.plan.listing import listing
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.search import run
from unity_ir.simulate.full import simulate
from unity_ir.simulate.replay import replay

ADAMW = Optimizer("adamw")
TORCH = PlanOptions(kernels="torch")
GPT2 = {"batch": 2, "sequence": 4, "layers": 1, "hidden": 16, "heads": 2, "vocabulary": 32}
LLAMA = {**GPT2, "kv_heads": 2, "intermediate": 16}


def on(count: int) -> Machine:
    return load(f"dgx-h100:1x{count}")


def lowered(graph: Graph, count: int = 1, strategy: str = "data-parallel") -> Program:
    machine = on(count)
    return lower(
        fuse_collectives(differentiate(run(graph, machine, strategy, ADAMW).graph, ADAMW, machine.mesh)), machine
    )


def mixed_gpt2() -> Graph:
    return mixed_precision(build("gpt2", **GPT2), "bf16")


def updates(plan: Plan) -> list[UpdateWeight]:
    return [i for i in plan.program.body if isinstance(i, UpdateWeight)]


def weights(plan: Plan) -> set[str]:
    return {leaf.name for leaf in plan.program.leaves("weight")}


def kept(plan: Plan) -> set[str]:
    """The names of the weights whose casts are kept; the update of each writes it, and no other does."""
    casts = {leaf.name: leaf.result for leaf in plan.program.leaves("cast")}
    names = {leaf.result: leaf.name for leaf in plan.program.leaves("weight")}
    assert {names[i.weight]: i.cast for i in updates(plan) if i.cast is not None} == casts or not updates(plan)
    return set(casts)


def cast_weights(plan: Plan) -> list[Compute]:
    """The kernels that only cast a weight."""
    leaves = {leaf.result for leaf in plan.program.leaves("weight")}
    computes = (i for i in plan.program.body if isinstance(i, Compute))
    return [i for i in computes if i.operator == "cast" and not leaves.isdisjoint(i.operands)]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "in_the_kernel"), [(1, {"model.embed_tokens.weight"}), (2, set[str]())])
def test_no_kernel_casts_a_weight(count: int, in_the_kernel: set[str]):
    """A kernel that gathers from a table casts the rows it reads; FSDP gathers the kept cast between devices."""
    step = lowered(mixed_precision(build("llama3_8b", **LLAMA), "bf16"), count, "fsdp")
    for options, others in ((PlanOptions(), in_the_kernel), (TORCH, set[str]())):
        plan, forward = plan_step(step, options), plan_step(forward_of(step, on(count)), options)
        assert weights(plan) - kept(plan) == others
        assert cast_weights(plan) == cast_weights(forward) == []
        assert kept(forward) == kept(plan)


def test_f32_has_no_casts():
    plan = plan_step(lowered(build("gpt2", **GPT2)))
    assert kept(plan) == set()


def test_an_update_is_priced_and_its_cast_held():
    plan = plan_step(lowered(mixed_gpt2(), 2), TORCH)
    program, device = plan.program, on(1).device
    elements = 0
    for each in updates(plan):
        count = program.bytes[each.weight] // 4
        elements += count
        assert bytes_of_update(program, each, ADAMW) == 30 * count
        assert seconds_of_update(program, each, ADAMW, device) > seconds_of_update(
            program, replace(each, cast=None), ADAMW, device
        )
    kernels = sum(kernel_of_line(program, i).bytes for i in program.body if isinstance(i, Compute))
    assert step_bytes(plan) == kernels + 30 * elements
    leaves = (leaf.result for op in ("input", "constant") for leaf in program.leaves(op))
    # Weight, two moments, and the cast.
    assert simulate(replay(plan, on(2))).tasks.always == (14 * elements + sum(program.bytes[r] for r in leaves),)


def test_the_cast_is_beside_a_measured_update():
    plan = plan_step(lowered(mixed_gpt2(), 2), TORCH)
    update = updates(plan)[0]
    count = plan.program.bytes[update.weight] // 4
    kernel = update_kernel(count, update_bytes(4 * count, ADAMW), "f32", ADAMW)
    device = replace(on(1).device, profile=Profile("it", {kernel.operator: {kernel.sizes: 7.0}}))
    written = 2 * count / (device.memory_bandwidth * device.efficiency)
    assert seconds_of_update(plan.program, update, ADAMW, device) == pytest.approx(7.0 + written, rel=1e-12)
    assert seconds_of_update(plan.program, replace(update, cast=None), ADAMW, device) == 7.0


def by_casts(*types: str) -> Graph:
    """A loss in which a weight is cast to these types."""
    x = leaf("input", tensor_type((4, 4), "f32"), name="x").result
    w = leaf("weight", tensor_type((4, 4), "bf16" if types == ("f32",) else "f32"), name="w").result

    def product(to: str) -> Value:
        short = [apply("cast", (v,), {"to": to}).result if v.dtype != to else v for v in (x, w)]
        return apply("cast", (apply("matmul", short).result,), {"to": "f32"}).result

    total = product(types[0])
    for other in types[1:]:
        total = apply("add", (total, product(other))).result
    rows = apply("reduce_mean", (total,), {"dim": 0}).result
    return Graph("casts", (x.node,), (apply("reduce_mean", (rows,), {"dim": 0}).result,))


@pytest.mark.parametrize(("types", "is_kept"), [(("bf16",), True), (("f32",), False), (("bf16", "f16"), False)])
def test_only_one_cast_to_a_shorter_type_is_kept(types: tuple[str, ...], is_kept: bool):
    plan = plan_step(lowered(by_casts(*types)), TORCH)
    assert kept(plan) == ({"w"} if is_kept else set())
    assert len(cast_weights(plan)) == (0 if is_kept else len(types))


def test_the_listing_says_what_updates_write():
    plan = plan_step(lowered(mixed_gpt2()))
    lines = listing(plan).splitlines()
    assert sum(line.startswith("  leaf    cast ") for line in lines) == len(kept(plan))
    assert sum(line.startswith("  update") and " -> %" in line for line in lines) == len(kept(plan))
