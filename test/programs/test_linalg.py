"""Steps of plans in MLIR's `linalg` and `shard`: `mlir-opt` takes them, and on a CPU they compute what NumPy does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from case import Case
from extent import ALL, examples, sample
from hypothesis import Phase, given, seed, settings
from mlir_runs import Run, line_module, run
from mlir_tools import SPLIT, mlir_opt, needs_mlir_opt
from operator_cases import CASES
from operator_graphs import arrays, plain, serial, with_backward
from zoo import SMALL, small

from unity_ir.api.modules import new_context
from unity_ir.api.read_text import read_module
from unity_ir.dialects.convert import from_graph, pcg_functions, to_graph
from unity_ir.interop.expressible import LINALG, step_program
from unity_ir.interop.linalg.step import step_module, step_results
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph, Node, Value, topological
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.optimizer import Optimizer
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


def test_every_operator_is_its_reference():
    """Of all operators (in `make test` of every seventh) in one module, so that MLIR is called once."""
    found: list[tuple[Node, Sequence[Array], Sequence[Array]]] = []
    for name in sample(list(CASES), 7):

        @seed(0)
        @settings(max_examples=examples(10), phases=[Phase.generate], database=None)
        @given(CASES[name])
        def collect(case: Case, name: str = name):
            found.extend(evaluated(name, case))

        collect()
    lines: dict[str, Any] = {}
    runs: list[Run] = []
    for number, (node, operands, _) in enumerate(found):
        types, shapes = [v.type.dtype for v in node.operands], [v.shape for v in node.operands]
        lines[f"f{number}"] = (node.analysis.bound, types, shapes)
        runs.append(Run(f"f{number}", operands, types, of_values(node.results)))
    for (node, _, wanted), got in zip(found, run(line_module(lines), runs), strict=True):
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


MODELS = [name for name in SMALL if name != "inception_v3"] if ALL else ["gpt2", "llama3_8b", "moe", "lenet"]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_interpreter(name: str):
    """The loss, and the gradient of every weight by name."""
    graph = in_double(name)
    program = step_program(graph, load("box:1"), LINALG)
    step, random = training_step(graph, Optimizer()), np.random.default_rng(0)
    held = {n.name: random_array(n.result, random) for n in step.nodes() if n.op in ("input", "weight")}
    values = interpret(step, held, held)
    gradients = {str(u.weight.node.name): values[u.grad] for u in step.updates}
    leaves = [*program.leaves("input"), *program.leaves("weight")]
    results = [(what, program.tensors[register]) for what, register in step_results(program)]
    wanted = [values[v] for v in step.outputs]
    wanted += [gradients[weight] for (attribute, weight), _ in results if attribute == "pcg.gradient"]
    types = [program.tensors[leaf.result].dtype for leaf in leaves]
    of = Run(program.name, [held[leaf.name] for leaf in leaves], types, [(t.dtype, t.shape) for _, t in results])
    (got,) = run(str(step_module(program, load("box:1"))), [of])
    assert len(gradients) == len(program.leaves("weight"))
    for (what, _), one, other in zip(results, got, wanted, strict=True):
        largest = max(1e-3, float(np.abs(other).max()))
        assert np.abs(one - other).max() <= CLOSE * largest, what


def test_mlir_opt_takes_the_zoo():
    texts = [
        str(step_module(step_program(in_double(n), load("box:1"), LINALG), load("box:1"))) for n in sample([*SMALL], 3)
    ]
    checked = mlir_opt(SPLIT.join(f"{text}\n" for text in texts), "--split-input-file")
    assert checked.returncode == 0, checked.stderr[:1000]
    assert checked.stdout.count("func.func @") == len(texts)
