"""Upstream MLIR reads modules in the generic form, and verifies them by the dialects in IRDL."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from extent import examples
from hypothesis import given, settings
from mlir_tools import SPLIT, mlir_opt, needs_mlir_opt
from placed_graphs import CONTEXT, graphs
from xdsl.dialects.builtin import ModuleOp
from xdsl.irdl import IRDLOperation
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError

from unity_ir.api.read_text import read_module
from unity_ir.dialects.convert import from_graph, name_values, pcg_functions, to_graph, write_names
from unity_ir.dialects.irdl_names import IRDL_DIALECTS, counts, irdl_name
from unity_ir.dialects.irdl_text import irdl_text
from unity_ir.dialects.names import own_name
from unity_ir.passes.irdl import IrdlTarget
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
    **{f.name: (str(f),) for f in sorted((ROOT / "examples").glob("*.pcg"))},
}
"""Arguments of `unity-opt` that print a module of each kind."""


def unity_opt(*arguments: str) -> str:
    with redirect_stdout(StringIO()) as out:
        assert main(list(arguments)) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [unity_opt(*arguments) for arguments in MODULES.values()]


@pytest.fixture(scope="module")
def irdl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of the dialects in IRDL."""
    file = tmp_path_factory.mktemp("irdl") / "dialects.irdl.mlir"
    file.write_text(irdl_text())
    return str(file)


def generic(module: ModuleOp) -> str:
    text = StringIO()
    Printer(stream=text, print_generic_format=True).print_op(module)
    return text.getvalue()


@settings(max_examples=examples(25))
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


def same(one: str, two: str, name: str) -> None:
    """Check that two texts are the same module, but for the order in dictionaries and names of values."""
    expected, found = (read_module(CONTEXT, text.encode(), name) for text in (one, two))
    found.verify()
    for func in (*pcg_functions(expected), *pcg_functions(found)):
        name_values(func)
    assert found.is_structurally_equivalent(expected), name
    assert [to_graph(f) for f in pcg_functions(found)] == [to_graph(f) for f in pcg_functions(expected)], name


SAMPLE = ("program in micro-batches", "program in stages", "halos", "rules")
FORMS = {"generic": ("--print-op-generic",), "irdl": ("-t", "irdl")}
SPLIT_INPUT = "--split-input-file"


@needs_mlir_opt
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_modules_survive_mlir_opt(form: str, texts: list[str], irdl: str, tmp_path: Path) -> None:
    file = tmp_path / "before.pcg"
    file.write_text(SPLIT.join(texts))
    written = unity_opt(str(file), SPLIT_INPUT, *FORMS[form])
    definitions = [f"--irdl-file={irdl}"] if form == "irdl" else []
    run = mlir_opt(written, "--allow-unregistered-dialect", "--mlir-print-op-generic", SPLIT_INPUT, *definitions)
    assert run.returncode == 0, run.stderr[:500]
    for name, one, two in zip(MODULES, texts, run.stdout.split(SPLIT), strict=True):
        same(one, two, name)


@settings(max_examples=examples(25))
@given(graphs())
def test_graphs_survive_the_spelling_for_irdl(graph: Graph) -> None:
    module = ModuleOp([from_graph(graph)])
    text = StringIO()
    IrdlTarget().emit(CONTEXT, module, text)
    same(str(module), text.getvalue(), "text")


@pytest.mark.slow
def test_other_modules_survive_the_spelling_for_irdl(texts: list[str], tmp_path: Path) -> None:
    sample = {name: text for name, text in zip(MODULES, texts, strict=True) if name in SAMPLE}
    file = tmp_path / "before.pcg"
    file.write_text(SPLIT.join(sample.values()))
    found = unity_opt(str(file), SPLIT_INPUT, "-t", "irdl").split(SPLIT)
    for (name, one), two in zip(sample.items(), found, strict=True):
        same(one, two, name)


STEP_TEXT = """
func.func @f(%x: !pcg.tensor<[8:2, 4], f32>) -> !pcg.tensor<[8:2, 6], f32> {
  %w = pcg.weight "w" on #machine.view<0, [2 @ 1]> : !pcg.tensor<[4, 6], f32, copy = 2>
  %y = pcg.matmul %x, %w : !pcg.tensor<[8:2, 4], f32>, !pcg.tensor<[4, 6], f32, copy = 2>
  %z = pcg.concat %y, %y {dim = 1} : !pcg.tensor<[8:2, 6], f32>, !pcg.tensor<[8:2, 6], f32>
  func.return %y : !pcg.tensor<[8:2, 6], f32>
}
"""
X = "!pcg.tensor<[8, 4], [2, 1], f32, 1, 1, {}>"
Y = X.replace("4", "6")
MUTANTS = {
    "an operand less": (f"(%y, %y) {{dim = 1 : i64}} : ({Y}, {Y})", f"(%y) {{dim = 1 : i64}} : ({Y})", "expects"),
    "operand of another type": (X, "i32", "expected base type 'pcg.tensor'"),
    "attribute left out": ('{name = "w", ', "{", 'attribute "name" is expected'),
    "attribute of another kind": ('{name = "w", ', "{name = 1, ", "expected base attribute 'builtin.string'"),
    "a parameter less": ("1, 1, {}>", "1, {}>", "expected 6 type arguments, but had 5"),
    "unknown operation": ("pcg.matmul", "pcg.matmull", "unregistered operation 'pcg.matmull'"),
}
"""Part of the text, what replaces it, and what `mlir-opt` says then."""


@needs_mlir_opt
@pytest.mark.parametrize("name", MUTANTS)
def test_mlir_opt_refuses(name: str, irdl: str, tmp_path: Path) -> None:
    file = tmp_path / "step.pcg"
    file.write_text(STEP_TEXT)
    text = unity_opt(str(file), "-t", "irdl")
    old, new, message = MUTANTS[name]
    assert old in text
    run = mlir_opt(text.replace(old, new), "--allow-unregistered-dialect", f"--irdl-file={irdl}")
    assert run.returncode == 1
    assert message in run.stderr


PIECE = "!spmd.piece<[64], [64], f32, "
WRONG = {
    "!pcg.tensor<[64], [2], f32>": "pcg.tensor: 3 parameters; there must be 6: shape, degrees, dtype, sum, copy, more",
    "!pcg.tensor<[64], [2], i8, 1, 1, {}>": "the parameter i8 must be an element type",
    "!pcg.tensor<[64], [2], f32, 1.0, 1, {}>": "must be an integer",
    "!pcg.tensor<[64], [2], f32, 1, 1, {x = 1}>": "must be a dictionary of grad, halo, halo_sum, time",
    "!pcg.tensor<[64], [2], f32, 1, 1, {halo = [[1, 0], [1, 0]]}>": "a halo has two numbers for each dim of [64]",
    "!pcg.tensor<[64], [2], f32, 1, 1, {time = [5, 2]}>": "there is no dim 5",
    PIECE + '["dim 5"], {}>': "is not a piece of [64]",
    PIECE + '["on"], {}>': '"on" is no role',
    PIECE + "1, {}>": "must be a list of roles",
    PIECE + '["at 0"], {halo = [[-1, 0]]}>': "a halo has two numbers for each dim of [64], from 0",
    "#machine.view<[[[4]]], 0, []>": "must be lists of pairs, factor and stride",
    "#machine.view<[[[0, 1]]], 0, []>": "a factor below 1",
    "#machine.view<[], 0>": "2 parameters; there must be 3",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_parameters(text: str) -> None:
    with pytest.raises(ParseError) as error:
        read_module(CONTEXT, f"func.func private @f() attributes {{a.b = {text}}}".encode(), "text")
    assert WRONG[text] in str(error.value)


def test_more_operands_than_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, type = tmp_path / "f.pcg", "!pcg.tensor<[1], f32>"
    uses, types = ", ".join(["%x"] * 33), ", ".join([type] * 33)
    file.write_text(f"func.func @f(%x: {type}) {{\n  %y = pcg.concat {uses} {{dim = 0}} : {types}\n  func.return\n}}")
    assert main([str(file), "-t", "irdl"]) == 1
    assert capsys.readouterr().err.startswith("-t irdl: pcg.concat with 33 operands and 1 results")


def test_names_for_irdl_are_of_one_operation() -> None:
    kinds = [op for d in IRDL_DIALECTS for op in d.operations if issubclass(op, IRDLOperation)]
    names = [(irdl_name(kind, *n), kind.name) for kind in kinds for n in counts(kind)]
    assert len(dict(names)) == len(names)
    assert all(own_name(name) == of for name, of in names)
    assert all(own_name(kind.name) == kind.name for kind in kinds)


@pytest.mark.slow
def test_the_option_prints_the_dialects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--irdl"])
    assert not exit.value.code
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if "irdl.dialect" in line] == [
        "@machine",
        "@pcg",
        "@spmd",
        "@subst",
    ]
