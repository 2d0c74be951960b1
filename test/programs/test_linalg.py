"""Steps of plans in MLIR's `linalg` and `shard`: `mlir-opt` takes them, and on a CPU they compute what NumPy does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case import Case
from extent import ALL, examples, sample
from hypothesis import Phase, given, seed, settings
from mlir_devices import cut, module_of_devices, starts
from mlir_runs import Run, line_module, run
from mlir_tools import SPLIT, mlir_opt, needs_mlir_opt
from operator_cases import CASES
from operator_graphs import arrays, plain, serial, with_backward
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.shard import GridOp, ShardingOp, ShardOp
from zoo import SMALL, small

import unity_ir as ui
from unity_ir.api.modules import new_context
from unity_ir.api.read_text import read_module
from unity_ir.dialects.convert import from_graph, pcg_functions, to_graph
from unity_ir.interop.expressible import LINALG, step_program
from unity_ir.interop.linalg.scalars import TYPES
from unity_ir.interop.linalg.step import step_module, step_results
from unity_ir.interop.mesh import mesh_dims
from unity_ir.machine import Machine, load
from unity_ir.models import build
from unity_ir.pcg.collectives import BETWEEN_DEVICES
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph, topological
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import SUM
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.instructions import ReshardMove
from unity_ir.plan.program import Program
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.functions import Array

pytestmark = [needs_mlir_opt, pytest.mark.slow]

CLOSE = 1e-12
SHORT = ("f32", "f16", "bf16")


def evaluated(name: str, case: Case) -> list[tuple[Node, Sequence[Array], Sequence[Array]]]:
    """Every operator of an operator's forward and backward, with arrays for its operands, and its results in NumPy."""
    nodes = topological(with_backward(serial(name, case), plain))
    held = arrays([n.result for n in nodes if n.op == "input"], case, 0)
    found: dict[Value, Array] = {}
    made: list[tuple[Node, Sequence[Array], Sequence[Array]]] = []
    for node in nodes:
        if node.is_leaf:
            is_input = node.op == "input"
            found[node.result] = held[node.name] if is_input else np.full(node.result.shape, node.attribute("value"))
        elif node.is_parallel:
            found[node.result] = found[node.operands[0]]
        else:
            given = [found[v] for v in node.operands]
            with np.errstate(all="ignore"):
                results = evaluate(node.analysis.bound, given)
            found.update(zip(node.results, results, strict=True))
            made.append((node, given, results))
    return made


def of_values(values: Sequence[Value]) -> list[tuple[str, Sequence[int]]]:
    return [(v.type.dtype, v.shape) for v in values]


def drawn(name: str) -> list[tuple[Node, Sequence[Array], Sequence[Array]]]:
    """Some uses of an operator and of its gradient."""
    found: list[tuple[Node, Sequence[Array], Sequence[Array]]] = []

    @seed(0)
    @settings(max_examples=examples(10), phases=[Phase.generate], database=None)
    @given(CASES[name])
    def collect(case: Case):
        found.extend(evaluated(name, case))

    collect()
    return found


@pytest.mark.parametrize("form", ["whole", "divided"])
def test_every_operator_is_its_reference(form: str):
    """
    Of all operators, in modules of 20, so that MLIR is called seldom; in `make test` every seventh, and fewer in the
    form for several devices.
    """
    names = list(dict.fromkeys(["conv2d", "embedding", *sample([*CASES], 7 if form == "whole" else 11)]))
    for first in range(0, len(names), 20):
        found = [use for name in names[first : first + 20] for use in drawn(name)]
        lines: dict[str, Any] = {}
        runs: list[Run] = []
        for number, (node, operands, _) in enumerate(found):
            types, shapes = [v.type.dtype for v in node.operands], [v.shape for v in node.operands]
            lines[f"f{number}"] = (node.analysis.bound, types, shapes)
            runs.append(Run(f"f{number}", operands, types, of_values(node.results)))
        module = line_module(lines, None if form == "whole" else lambda value: value)
        assert form == "whole" or "tensor.extract %arg" not in module
        for (node, _, wanted), got in zip(found, run(module, runs), strict=True):
            for value, one, other in zip(node.results, got, wanted, strict=True):
                close = 1e-2 if value.type.dtype in SHORT else CLOSE
                np.testing.assert_allclose(one, np.asarray(other, one.dtype), close, close, err_msg=str(node))


def in_double(name: str) -> Graph:
    """A small model of the zoo, in float64."""
    model, keys = small(name)
    text = str(from_graph(build(model, **keys))).replace("f32", "f64")
    return to_graph(pcg_functions(read_module(new_context(), text.encode(), name))[0])


def random_array(value: Value, random: np.random.Generator) -> Array:
    if value.type.is_floating:
        # Of inputs, some are variances or probabilities.
        low, high = (-0.5, 0.5) if value.node.op == "weight" else (0.1, 0.9)
        return random.uniform(low, high, value.shape)
    return random.integers(0, 2 if value.type.dtype == "bool" else 3, value.shape)


# Inception takes a minute, and in its 94 batch norms rounding grows to 3e-11 in a gradient.
MODELS = [name for name in SMALL if name != "inception_v3"] if ALL else ["gpt2", "moe", "alexnet"]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_interpreter(name: str):
    check_step(in_double(name), load("box:1"))


def with_results(
    graph: Graph, machine: Machine, program: Program
) -> tuple[Graph, Mapping[str, Array], Sequence[Array]]:
    """A graph's training step, random arrays by the name of its leaves, and the results of its program in NumPy."""
    step, random = graph if graph.updates else training_step(graph, Optimizer(), machine.mesh), np.random.default_rng(0)
    held = {n.name: random_array(n.result, random) for n in step.nodes() if n.op in ("input", "weight")}
    values = interpret(step, held, held)
    gradients = {str(u.weight.node.name): values[u.grad] for u in step.updates}
    assert len(gradients) == len(program.leaves("weight"))
    of_weights = [name for (attribute, name), _ in step_results(program) if attribute == "pcg.gradient"]
    return step, held, [*(values[v] for v in step.outputs), *(gradients[name] for name in of_weights)]


def check_step(graph: Graph, machine: Machine) -> None:
    """Compare the loss, and the gradient of every weight by name, with those in NumPy; annotations are deleted."""
    program = step_program(graph, machine, LINALG)
    _, held, wanted = with_results(graph, machine, program)
    leaves = [*program.leaves("input"), *program.leaves("weight")]
    results = [(what, program.tensors[register]) for what, register in step_results(program)]
    types = [program.tensors[leaf.result].dtype for leaf in leaves]
    of = Run(program.name, [held[leaf.name] for leaf in leaves], types, [(t.dtype, t.shape) for _, t in results])
    module = step_module(program, machine)
    without_annotations(module)
    (got,) = run(str(module), [of])
    for (what, _), one, other in zip(results, got, wanted, strict=True):
        largest = max(1e-3, float(np.abs(other).max()))
        assert np.abs(one - other).max() <= CLOSE * largest, what


def without_annotations(module: ModuleOp) -> None:
    for op in [*module.walk()]:
        if isinstance(op, ShardOp):
            op.result.replace_all_uses_with(op.src)
            op.detach()
            op.erase()
    for op in [*module.walk()]:
        if isinstance(op, ShardingOp | GridOp):
            op.detach()
            op.erase()


def test_mlir_opt_takes_the_zoo():
    texts = [
        str(step_module(step_program(in_double(n), load("box:1"), LINALG), load("box:1"))) for n in sample([*SMALL], 3)
    ]
    checked = mlir_opt(SPLIT.join(f"{text}\n" for text in texts), "--split-input-file")
    assert checked.returncode == 0, checked.stderr[:1000]
    assert checked.stdout.count("func.func @") == len(texts)


MLP = {"batch": 8, "hidden": 16, "layers": 2, "classes": 4}
EXAMPLES = Path(__file__).parents[2] / "examples"
PERCEPTRONS: dict[str, Callable[[], ui.Plan]] = {
    "data parallel": lambda: ui.plan("mlp", machine="box:4", search="data-parallel", **MLP),
    "megatron": lambda: ui.plan("mlp", machine="box:4", search="megatron", **MLP),
    "fsdp": lambda: ui.plan("mlp", machine="box:4", search="fsdp", **MLP),
    "both": lambda: ui.plan(EXAMPLES / "digits_2x2.pcg", search=None),
}
PARTITION = "-pass-pipeline=builtin.module(func.func(sharding-propagation,shard-partition))"
"""MLIR's own partitioner: local shapes and collectives, from annotations."""
GPT2 = {"batch": 4, "sequence": 8, "hidden": 16, "layers": 2, "heads": 4, "vocabulary": 32}
LLAMA = {"batch": 8, "sequence": 4, "hidden": 16, "layers": 1, "vocabulary": 16, "heads": 4, "kv_heads": 2}
SEQUENCES: dict[str, dict[str, int]] = {"gpt2": GPT2, "llama3_8b": {**LLAMA, "intermediate": 16}}


def local_type(program: Program, register: int) -> str:
    tensor = program.tensors[register]
    return f"tensor<{''.join(f'{size}x' for size in tensor.local(program.mesh))}{TYPES[tensor.dtype]}>"


@pytest.mark.parametrize("by", PERCEPTRONS)
def test_mlir_partitions_a_perceptron_as_planned(by: str):
    """
    Its local shapes are the plan's, and its collectives, forward and backward, and one for a loss that is in partial
    sums; but for FSDP, since the partitioner makes no reduce-scatter.
    """
    plan = PERCEPTRONS[by]()
    program = step_program(plan.graph, plan.machine, LINALG)
    found = mlir_opt(plan.linalg(), PARTITION)
    assert found.returncode == 0, found.stderr[:1000]
    kinds = [i.kind for i in program.body if isinstance(i, ReshardMove) and i.kind in BETWEEN_DEVICES]
    if SUM in program.tensors[program.outputs[0]].layout:
        kinds.append("all_reduce")
    made = Counter(re.findall(r" = shard\.(all_\w+|reduce\w*)", found.stdout))
    assert made == Counter(kinds) if by != "fsdp" else made["reduce_scatter"] == 0 < Counter(kinds)["reduce_scatter"]
    (signature,) = re.findall(r"func\.func @\w+\((.*)", found.stdout)
    leaves = [*program.leaves("input"), *program.leaves("weight")]
    registers = [*(leaf.result for leaf in leaves), *(register for _, register in step_results(program))]
    assert re.findall(r"tensor<\w+>", signature) == [local_type(program, r) for r in registers]


@pytest.mark.parametrize("model", SEQUENCES)
@pytest.mark.parametrize(
    "options", [{"search": "data-parallel"}, {"degrees": "tp=2"}], ids=["data parallel", "megatron"]
)
def test_mlir_takes_plans_of_transformers_and_does_not_partition_their_heads(model: str, options: dict[str, str]):
    """What `docs/mlir.md` says of MLIR 22: its partitioner has no rule for reshapes."""
    text = ui.plan(model, machine="box:2", **options, **SEQUENCES[model]).linalg()
    assert mlir_opt(text).returncode == 0
    found = mlir_opt(text, PARTITION)
    assert found.returncode == 1
    missing = set(re.findall(r"error: '([\w.]+)' op sharding interface is not implemented", found.stderr))
    assert missing
    assert missing <= {f"tensor.{name}" for name in ("expand_shape", "collapse_shape", "extract_slice", "insert_slice")}


@pytest.mark.parametrize("model", ["mlp", *SEQUENCES] if ALL else ["mlp"])
@pytest.mark.parametrize(
    "options", [{"search": "fsdp"}, {"degrees": "tp=2,dp=2"}] if ALL else [{"degrees": "tp=2,dp=2"}]
)
def test_annotated_steps_compute_the_same(model: str, options: dict[str, str]):
    """With annotations deleted, and in float64, on whole tensors."""
    plan = ui.plan(model, machine="box:4", **options, **{"mlp": MLP, **SEQUENCES}[model])
    check_step(in_double_as_planned(plan), plan.machine)


def in_double_as_planned(plan: ui.Plan) -> Graph:
    text = plan.text.replace("f32", "f64")
    return to_graph(pcg_functions(read_module(new_context(), text.encode(), plan.name))[0])


LOCAL: list[tuple[str, int, dict[str, Any]]] = [
    ("mlp", 4, {"search": "fsdp"}),
    ("mlp", 4, {"degrees": "tp=2,dp=2"}),
    ("gpt2", 2, {"degrees": "tp=2", "layers": 1}),
    ("gpt2", 4, {"degrees": "tp=2,sp=true,dp=2,zero=3"}),
    ("llama3_8b", 4, {"degrees": "tp=2,dp=2,zero=1"}),
    ("gpt2", 2, {"search": "data-parallel"}),
    ("llama3_8b", 4, {"search": "fsdp"}),
    ("moe", 4, {"search": "expert"}),
    ("moe", 4, {"search": "joint"}),
]
SIZES: dict[str, dict[str, Any]] = {
    "mlp": MLP,
    **SEQUENCES,
    "moe": {**SEQUENCES["llama3_8b"], "experts": 4, "chosen": 2, "dispatch": "sparse"},
}


@pytest.mark.parametrize(("model", "devices", "options"), LOCAL if ALL else LOCAL[1:3])
def test_a_device_has_the_plans_part_and_collectives(model: str, devices: int, options: dict[str, Any]):
    check_devices(ui.plan(model, machine=f"box:{devices}", **{**SIZES[model], **options}))


TABLE = """
func.func @f(%ids: !pcg.tensor<[4], i64>, %y: !pcg.tensor<[4, 3], f32>) -> !pcg.tensor<[], f32> {
  %copies = pcg.replicate %ids by 2 : !pcg.tensor<[4], i64>
  %t = pcg.weight "t" : !pcg.tensor<[4:2, 3], f32>
  %addends = pcg.embedding %copies, %t : !pcg.tensor<[4], i64, copy = 2>, !pcg.tensor<[4:2, 3], f32>
  %x = pcg.reduce %addends by 2 : !pcg.tensor<[4, 3], f32, sum = 2>
  %loss = pcg.mse %x, %y : !pcg.tensor<[4, 3], f32>, !pcg.tensor<[4, 3], f32>
  func.return %loss : !pcg.tensor<[], f32>
}
"""


def test_ids_pick_from_a_piece_of_a_table():
    check_devices(ui.plan(TABLE, search=None))


def check_devices(plan: ui.Plan) -> None:
    """
    Check the form `manual`: collectives are the plan's, and on all devices side by side, every result is this device's
    part of the interpreter's.
    """
    graph, machine = in_double_as_planned(plan), plan.machine
    program = step_program(graph, machine, LINALG)
    text = str(step_module(program, machine, "manual"))
    assert mlir_opt(text).returncode == 0
    moves = [i.kind for i in program.body if isinstance(i, ReshardMove) and i.kind in BETWEEN_DEVICES]
    moves += ["all_reduce" for _, r in step_results(program) if SUM in program.tensors[r].layout]
    assert Counter(re.findall(r" = shard\.(all_reduce|all_gather|all_to_all|reduce_\w*)", text)) == Counter(moves)
    _, held, wanted = with_results(graph, machine, program)
    dims = mesh_dims(program, machine)
    places = [*product(*map(range, dims.sizes))]
    results = [program.tensors[register] for _, register in step_results(program)]
    leaves = [*program.leaves("input"), *program.leaves("weight")]
    of = Run(
        program.name,
        [held[leaf.name] for leaf in leaves],
        [program.tensors[leaf.result].dtype for leaf in leaves],
        [(t.dtype, t.local(program.mesh)) for t in results for _ in places],
    )
    (got,) = run(str(module_of_devices(program, machine)), [of])
    pieces = iter(got)
    for (what, register), whole in zip(step_results(program), wanted, strict=True):
        for place in places:
            local = program.tensors[register].local(program.mesh)
            other = cut(np.asarray(whole), starts(program, dims, register, place), local)
            largest = max(1e-3, float(np.abs(whole).max()))
            assert np.abs(next(pieces) - other).max() <= CLOSE * largest, (what, place)


def test_names_are_text_and_never_code():
    name = 'x" } %y\n'
    x, w = leaf("input", tensor_type((4, 3), "f64"), name=name), leaf("weight", tensor_type((3, 2), "f64"), name="0'\\")
    graph = Graph("f(", (x,), (apply("matmul", [x.result, w.result]).result,))
    found = mlir_opt(str(step_module(step_program(graph, load("box:1"), LINALG), load("box:1"))))
    assert found.returncode == 0, found.stderr
    assert r'pcg.name = "x\22 } %y\0A"' in found.stdout
    assert r'pcg.name = "0' + "'" + r'\\"' in found.stdout
    assert 'func.func @"f("' in found.stdout
