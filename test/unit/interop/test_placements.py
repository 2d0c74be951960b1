"""Test that placements are those of a plan's program, and that what DTensor cannot say is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from extent import sample
from graphs import boxes
from models import cnn
from pinned import pinned

import unity_ir as ui
from unity_ir.interop.dtensor.described import Record, collectives_of, described
from unity_ir.interop.expressible import DTENSOR, step_program
from unity_ir.interop.mesh import MeshDims, mesh_dims
from unity_ir.models import build
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.origin import Origin
from unity_ir.pcg.sharding import REPEAT, piece_index
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.instructions import makes
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.search import run
from unity_ir.search.baselines.random_plan import sample as random_plan
from unity_ir.search.explain import operators
from unity_ir.tools.unity_opt import main

SIZES = {
    "mlp": {"batch": 8, "hidden": 16, "layers": 3, "classes": 8},
    "gpt2": {"batch": 4, "layers": 1, "sequence": 8, "hidden": 16, "heads": 2, "vocabulary": 32},
}
ON = boxes(2, 2, 3)
PLANS = [("mlp", 0), ("mlp", 1), ("mlp", 2), ("gpt2", 0), ("gpt2", 1), ("gpt2", 2)]


def random_program(model: str, seed: int) -> Program:
    sizes = {**SIZES[model], "batch": 12, "hidden": 24, **({"heads": 6} if model == "gpt2" else {})}
    return step_program(random_plan(build(model, **sizes), ON, seed), ON, DTENSOR)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seed"), sample(PLANS, 3))
def test_placements_divide_tensors_as_layouts_do(model: str, seed: int):
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local_shape_and_offset

    from unity_ir.interop.dtensor.pieces import placements

    program = random_program(model, seed)
    mesh = mesh_dims(program, ON)
    assert prod(mesh.sizes) == program.devices == 12
    seen = {(program.tensors[r].shape, program.tensors[r].layout) for i in program.body for r in makes(i)}
    assert len(seen) > 20
    for shape, layout in seen:
        for device in range(program.devices):
            at, rest = list[int](), device
            for size in reversed(mesh.sizes):
                rest, coordinate = divmod(rest, size)
                at.insert(0, coordinate)
            found = local_shape_and_offset(shape, mesh.sizes, at, placements(mesh, layout))
            pieces = [piece_index(layout, program.mesh, device, dim) for dim in range(len(shape))]
            local = tuple(size // count for size, (_, count) in zip(shape, pieces, strict=True))
            offset = tuple(index * size for (index, _), size in zip(pieces, local, strict=True))
            assert tuple(map(tuple, found)) == (local, offset)


@pytest.mark.parametrize(("model", "seed"), sample(PLANS, 3, 1))
def test_every_value_is_redistributed_to_where_it_is_read(model: str, seed: int):
    """Redistributes lead, one after the other, from where a value is made to each place where an operator reads it."""
    program = random_program(model, seed)
    record = described(program, ON)
    places = {n: {tuple(p["at_rest"])} for n, p in record["parameters"].items()}
    places |= {n: {tuple(p["placements"])} for n, p in record["inputs"].items()}
    places |= {o["name"]: {tuple(r["placements"]) for r in o["results"]} for o in record["operators"]}
    moved = [each for each in record["redistributes"] if each["phase"] == "forward"]
    for each in moved:
        assert tuple(each["from"]) in places[each["value"]]
        assert each["from"] != each["to"]
        changed = [n for n, a, b in zip(record["mesh"]["names"], each["from"], each["to"], strict=True) if a != b]
        assert changed == each["mesh"]
        places[each["value"]].add(tuple(each["to"]))
    assert len(moved) > 5
    for operator in record["operators"]:
        for operand in operator["operands"]:
            value = operand["value"]
            assert value.startswith("constant ") or tuple(operand["placements"]) in places[value]
    used = {
        (n, tuple(u["placements"]), by) for n, p in record["parameters"].items() for u in p["used"] for by in u["by"]
    }
    assert used == {
        (operand["value"], tuple(operand["placements"]), operator["name"])
        for operator in record["operators"]
        for operand in operator["operands"]
        if operand["value"] in record["parameters"]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"), [("mlp", "joint"), ("gpt2", "data-parallel"), ("gpt2", "fsdp"), ("gpt2", "random")]
)
def test_collectives_are_those_of_the_plan_before_small_ones_share_calls(model: str, strategy: str):
    on = boxes(2, 2, bandwidth=1e13)
    placed = run(build(model, **SIZES[model]), on, strategy).graph
    program = step_program(placed, on, DTENSOR)
    record = described(program, on)
    plan = plan_step(program, PlanOptions(kernels="torch", bucket=0, eager=True))
    assert sum(collectives_of(record).values()) == plan.collectives > 0
    names = {o["name"] for o in record["operators"]}
    assert names == operators(placed).keys()


def test_fsdp_shards_at_rest_and_megatron_by_columns_then_rows():
    fsdp = ui.plan("mlp", machine="box:4", search="fsdp", **SIZES["mlp"]).placements()
    assert fsdp["mesh"] == {"names": ["gpus"], "sizes": [4]}
    for parameter in fsdp["parameters"].values():
        assert parameter["at_rest"] == ["Shard(0)"]
        assert [u["placements"] for u in parameter["used"]] == [["Replicate()"]]
        assert parameter["gradient"] == ["Partial(sum)"]
    assert collectives_of(fsdp) == {"all_gather": 3, "reduce_scatter": 3}
    assert fsdp["loss"]["placements"] == ["Partial(sum)"]
    tensor = ui.plan("mlp", machine="box:4", degrees="tp=2", **SIZES["mlp"]).placements()
    assert tensor["mesh"] == {"names": ["gpus0", "gpus1"], "sizes": [2, 2]}
    rest = {name: parameter["at_rest"] for name, parameter in tensor["parameters"].items()}
    assert rest["dense0.weight"] == ["Replicate()", "Shard(1)"]
    assert rest["dense1.weight"] == ["Replicate()", "Shard(0)"]
    assert tensor["modules"]["dense0"] == {
        "operators": ["matmul0"],
        "inputs": [["Shard(0)", "Replicate()"]],
        "outputs": [["Shard(0)", "Shard(1)"]],
    }
    (reduced,) = [r for r in tensor["redistributes"] if r["value"] == "matmul1"]
    assert (reduced["collective"], reduced["mesh"], reduced["readers"]) == ("all_reduce", ["gpus1"], ["relu1"])


def test_weights_with_masters_are_described_as_they_are_stored():
    plan = ui.plan("mlp", machine="dgx-h100:1x2", search="fsdp", precision="bf16", **SIZES["mlp"])
    record = plan.placements()
    assert {p["dtype"] for p in record["parameters"].values()} == {"float32"}
    assert {o["operator"] for o in record["operators"]}.isdisjoint({"weight"})
    weight = record["parameters"]["dense0.weight"]
    assert weight["used"] == [{"placements": ["Replicate()"], "by": ["matmul0"]}]
    gathered = [r for r in record["redistributes"] if r["value"] == "dense0.weight"]
    assert [r["collective"] for r in gathered] == ["all_gather"]


def test_the_target_prints_what_a_plan_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = ui.plan("mlp", machine="box:4", degrees="tp=2", **SIZES["mlp"])
    plan.save(tmp_path / "plan.pcg")
    assert main([str(tmp_path / "plan.pcg"), "-t", "dtensor"]) == 0
    found: Record = json.loads(capsys.readouterr().out)
    assert found == plan.placements()
    assert main([str(tmp_path / "plan.pcg"), "-p", "pcg-differentiate,lower-pcg-to-spmd", "-t", "dtensor"]) == 1
    assert "dtensor: the module is lowered already; leave lower-pcg-to-spmd out" in capsys.readouterr().err


def test_a_part_of_a_model_is_not_run():
    from torch import nn

    from unity_ir.interop.dtensor.module import PlannedStep, parallelize

    w = leaf("weight", tensor_type((4, 4), "f32"), name="w").result
    x = leaf("input", tensor_type((8, 4), "f32"), name="x")
    part = Graph("part", (x,), (apply("matmul", (x.result, w)).result,))
    step = PlannedStep(step_program(part, boxes(1), DTENSOR), boxes(1), Origin(), {})
    with pytest.raises(ui.UnityError, match="parallelize: @part is a part of a model; plan it with its loss"):
        parallelize(nn.Linear(4, 4), step, None)


MLP = SIZES["mlp"]
REFUSED = {
    "stages": lambda: step_program(replace(build("mlp", **MLP), pipeline=Pipeline("1f1b", 2)), boxes(2), DTENSOR),
    "micro-batches": lambda: ui.plan("mlp", machine="box:2", search="fsdp", micro_batches=2, **MLP).placements(),
    "loss pieces": lambda: ui.plan("mlp", machine="box:2", search="fsdp", loss_pieces=2, **MLP).placements(),
    "pinned": lambda: step_program(*pinned(build("mlp", **MLP), 3), DTENSOR),
    "halo": lambda: step_program(random_plan(cnn(), boxes(2, 2), 0), boxes(2, 2), DTENSOR),
}


@pytest.mark.parametrize("what", DTENSOR.lacks)
def test_what_dtensor_cannot_say_is_refused_by_name(what: str):
    with pytest.raises(ui.UnityError) as refused:
        REFUSED[what]()
    message = str(refused.value)
    assert message.endswith(DTENSOR.lacks[what])
    assert "\n" not in message
    named = {
        "pinned": r": \w+ is pinned, at \d along mesh axis \d: ",
        "halo": r": \w+ reads \w+ with a halo along dim \d",
    }
    assert re.search(named.get(what, f"^dtensor: @mlp .*{what.removeprefix('loss ')}"), message)


def test_a_mesh_of_other_dims_stands_for_the_same_axes():
    mesh = MeshDims(("node", "gpu"), ((0,), (1, 2, 3)), (2, 2, 2, 3))
    assert mesh.sizes == (2, 12)
    finer = mesh.like((2, 4, 3), ("dp", "tp", "cp"))
    assert finer == MeshDims(("dp", "tp", "cp"), ((0,), (1, 2), (3,)), (2, 2, 2, 3))
    assert finer.placements((0, 1, 1, 1)) == ("Shard(0)", "Shard(1)", "Shard(1)")
    assert mesh.like((2, 1, 12), None) == MeshDims(("dim0", "dim1", "dim2"), ((0,), (), (1, 2, 3)), (2, 2, 2, 3))
    assert mesh.like((2, 1, 12), None).roles((0, REPEAT, REPEAT, REPEAT)) == (0, REPEAT, REPEAT)
    for sizes in ((4, 6), (24,), (2, 6, 2), (2, 2)):
        assert mesh.like(sizes, None) is None, sizes
