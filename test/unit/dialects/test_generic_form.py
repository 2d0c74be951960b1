"""MLIR's generic form holds all that a module says, also after tools that number values and sort attributes."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from extent import examples
from hypothesis import given, settings
from mlir_tools import SPLIT, mlir_opt, needs_mlir_opt
from placed_graphs import CONTEXT, graphs
from xdsl.dialects.builtin import ModuleOp
from xdsl.printer import Printer

from unity_ir.api.read_text import read_module
from unity_ir.dialects.convert import from_graph, name_values, pcg_functions, to_graph, write_names
from unity_ir.pcg.graph import Graph
from unity_ir.tools.unity_opt import main

ROOT = Path(__file__).parents[3]
GPT = "--model=gpt2,layers=1,batch=4,sequence=8,hidden=16,heads=2,vocabulary=32"
MNIST = str(ROOT / "examples" / "mnist_mlp.pcg")
STEP = "pcg-differentiate{optimizer=adam}"
SPMD = "pcg-differentiate,lower-pcg-to-spmd"
PLAN = ("--search=data-parallel", "--machine=2gpu")
CHECKED = ROOT / "test" / "filecheck"
MODULES: dict[str, tuple[str, ...]] = {
    "training step": (GPT, "-p", STEP),
    "machine": (MNIST, *PLAN, "-p", "machine-expand"),
    "micro-batches": (MNIST, *PLAN, "--micro-batches=2", "-p", STEP),
    "program in micro-batches": (MNIST, *PLAN, "--micro-batches=2", "-p", SPMD),
    "loss in pieces": (MNIST, *PLAN, "--loss-pieces=4", "-p", SPMD),
    "program": (str(ROOT / "examples" / "digits_2x2.pcg"), "-p", SPMD),
    "stages": (str(CHECKED / "tools" / "stages.pcg"),),
    "program in stages": (str(CHECKED / "tools" / "stages.pcg"), "-p", SPMD),
    "halos": (str(CHECKED / "dialects" / "pcg" / "halo.pcg"),),
    "rules": (str(CHECKED / "dialects" / "subst" / "ops.pcg"),),
    "library": (str(ROOT / "unity_ir" / "rules" / "library" / "conv.pcg"),),
    **{f.name: (str(f),) for f in sorted((ROOT / "examples").glob("*.pcg"))},
}
"""Arguments of `unity-opt` that print a module of each kind."""


def unity_opt(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def generic(module: ModuleOp) -> str:
    text = StringIO()
    Printer(stream=text, print_generic_format=True).print_op(module)
    return text.getvalue()


@settings(max_examples=examples(40))
@given(graphs())
def test_names_of_inputs_survive_numbered_values(graph: Graph) -> None:
    func = from_graph(graph)
    expected = str(func)
    write_names(func)
    for value in (*func.args, *(result for op in func.body.block.ops for result in op.results)):
        value.name_hint = None
    back = read_module(CONTEXT, generic(ModuleOp([func])).encode(), "text")
    back.verify()
    # A function of nothing is no graph.
    for found in pcg_functions(back):
        name_values(found)
        assert to_graph(found) == graph
        assert str(found) == expected


@needs_mlir_opt
@pytest.mark.slow
def test_modules_survive_mlir_opt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [unity_opt(capsys, *arguments) for arguments in MODULES.values()]
    before = tmp_path / "before.pcg"
    before.write_text(SPLIT.join(texts))
    split = "--split-input-file"
    written = unity_opt(capsys, str(before), split, "--print-op-generic")
    options = ("--allow-unregistered-dialect", "--mlir-print-op-generic", split)
    run = mlir_opt(written, *options)
    assert run.returncode == 0, run.stderr[:500]
    for name, one, two in zip(MODULES, texts, run.stdout.split(SPLIT), strict=True):
        expected, found = (read_module(CONTEXT, text.encode(), name) for text in (one, two))
        found.verify()
        for func in pcg_functions(found):
            name_values(func)
        for func in pcg_functions(expected):
            name_values(func)
        assert found.is_structurally_equivalent(expected), name
        graphs = [[to_graph(func) for func in pcg_functions(module)] for module in (expected, found)]
        assert graphs[0] == graphs[1], name
