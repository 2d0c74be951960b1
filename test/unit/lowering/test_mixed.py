"""Programs with several floating element types."""

from __future__ import annotations

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search.baselines.data_parallel import data_parallel


def test_one_shape_in_two_element_types_are_two_functions():
    x, y = (leaf("input", tensor_type((8, 8), "f32"), name=n) for n in "xy")
    w, v = (leaf("weight", tensor_type((8, 8), "f32"), name=n).result for n in "wv")
    h = apply("matmul", [x.result, w]).result
    half = [apply("cast", [value], {"to": "bf16"}).result for value in (h, v)]
    out = apply("cast", [apply("matmul", half).result], {"to": "f32"}).result
    graph = Graph("f", (x, y), (apply("mse", [out, y.result]).result,))
    machine = load("box:2")
    program = lower(differentiate(data_parallel(graph, machine), Optimizer(), machine.mesh), machine)
    text = emit(plan_step(program, PlanOptions("triton", fuse=False)), graph).text
    assert "def matmul_4x8_8x8(" in text
    assert "def matmul_4x8_8x8_bf16(" in text
    # What is checked against PyTorch is as rough as the roughest of it.
    assert "\nCOARSEST = torch.bfloat16 " in text
    one = load("box:1")
    serial = emit(plan_step(lower(differentiate(graph_of_f32(), Optimizer(), one.mesh), one)), graph_of_f32())
    assert "\nCOARSEST = torch.float32 " in serial.text


def test_what_a_function_returns_keeps_its_type():
    x, y = (leaf("input", tensor_type((8, 8), "f32"), name=n) for n in "xy")
    w = leaf("weight", tensor_type((8, 8), "f32"), name="w").result
    two = leaf("constant", tensor_type((8,), "f32"), value=2.0).result
    h = apply("mul", [apply("matmul", [x.result, w]).result, two]).result
    half = apply("cast", [h], {"to": "f16"}).result
    tall, loss = apply("gt", [h, two]).result, apply("mse", [apply("tanh", [h]).result, y.result]).result
    graph = Graph("f", (x, y), (loss, x.result, w, two, h, half, tall))
    mixed = mixed_precision(graph, "bf16")
    assert [v.type for v in mixed.outputs] == [v.type for v in graph.outputs]
    assert {v.type.dtype for n in mixed.nodes() if n.op in ("matmul", "tanh") for v in n.results} == {"bf16"}


def graph_of_f32() -> Graph:
    x, y = (leaf("input", tensor_type((8, 8), "f32"), name=n) for n in "xy")
    h = apply("matmul", [x.result, leaf("weight", tensor_type((8, 8), "f32"), name="w").result]).result
    return Graph("g", (x, y), (apply("mse", [h, y.result]).result,))
