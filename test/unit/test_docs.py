"""What the README and the docs show is what happens."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unity_ir.dialects.machine import MACHINE
from unity_ir.dialects.pcg import COMPUTE_OPS, PCG
from unity_ir.dialects.spmd import SPMD
from unity_ir.dialects.subst import SUBST
from unity_ir.machine.load import load, presets
from unity_ir.models import from_text, names
from unity_ir.ops import operators
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.rules import library
from unity_ir.search import run, strategy
from unity_ir.tools.unity_opt import main

ROOT = Path(__file__).parents[2]
UNITY_OPT = str(Path(sys.executable).parent / "unity-opt")


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [block for of, block in found if of == language]


def unity_opt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([UNITY_OPT, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_readme_shows_real_output():
    readme = (ROOT / "README.md").read_text()
    shown = next(b for b in blocks(readme, "") if b.startswith("$ unity-opt examples/mnist_mlp.pcg --search --machine"))
    command, _, output = shown.partition("\n")
    done = unity_opt(*command.split()[2:])
    lines = [line.rstrip() for line in (done.stdout.rstrip() + "\n\n" + done.stderr.rstrip()).splitlines()]
    assert output.rstrip().splitlines() == lines


def test_the_readme_counts_what_there_is():
    readme = (ROOT / "README.md").read_text()
    counted = dict(re.findall(r"\[(\d+) (operators|models|substitutions)\]", readme)[::-1])
    assert {what: int(number) for number, what in counted.items()} == {
        "operators": len(operators()),
        "models": len(names()),
        "substitutions": len(library.all_substitutions()),
    }


@pytest.mark.slow
def test_the_readme_shows_the_example_and_the_real_step():
    readme = (ROOT / "README.md").read_text()
    assert blocks(readme, "mlir")[0] in (ROOT / "examples" / "mnist_mlp.pcg").read_text()
    program = unity_opt("examples/mnist_mlp.pcg", "--search", "--machine=2gpu", "-t", "triton").stdout
    assert blocks(readme, "python")[0].rstrip() in "\n".join(line.rstrip() for line in program.splitlines())


NEW_OPERATOR = """
import sys, unity_ir.ops
unity_ir.ops.__path__.append({folder!r})
from unity_ir.tools.unity_opt import main
sys.exit(main(sys.argv[1:]))
"""

MODEL = """
func.func @f(%x: !pcg.tensor<[8, 4], f32>, %y: !pcg.tensor<[8, 4], f32>) -> !pcg.tensor<[], f32> {
  %w = pcg.weight "w" : !pcg.tensor<[4, 4], f32>
  %h = pcg.matmul %x, %w : !pcg.tensor<[8, 4], f32>, !pcg.tensor<[4, 4], f32>
  %s = pcg.cube %h : !pcg.tensor<[8, 4], f32>
  %loss = pcg.mse %s, %y : !pcg.tensor<[8, 4], f32>, !pcg.tensor<[8, 4], f32>
  func.return %loss : !pcg.tensor<[], f32>
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/operators.md"])
def test_an_operator_is_added_in_one_file(tmp_path: Path, document: str):
    """The documented operator goes all the way to a program that passes its own check."""
    code = next(b for b in blocks((ROOT / document).read_text(), "python") if "CUBE" in b)
    folder = tmp_path / "ops"
    folder.mkdir()
    (folder / "cube.py").write_text("from unity_ir.ops.operator import Operator\n\n" + code)
    (tmp_path / "model.pcg").write_text(MODEL)
    program = tmp_path / "train.py"
    script = NEW_OPERATOR.format(folder=str(folder))
    arguments = [str(tmp_path / "model.pcg"), "--search", "--machine=2gpu", "-t", "triton{matmul=torch}"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "def cube_" in program.read_text()


def test_docs_name_files_that_exist():
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!http)([\w/.-]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"
        floors = "tdl|forms|ops|pcg|simulate|models|machine|rules|cost|search|frontends|dialects|passes|lowering"
        for path in re.findall(rf"(?<![\w/.])((?:{floors})/[\w/.-]+\w)(?!\w*/)", document.read_text()):
            assert (ROOT / "unity_ir" / path).exists(), f"{document.name} names {path}"


def test_papers_name_paths_that_exist():
    """Every path in papers.md exists, in `unity_ir` or in the repository."""
    named = re.findall(r"`([^`]+)`", (ROOT / "docs" / "papers.md").read_text())
    paths = [name for name in named if "/" in name or name.islower()]
    assert len(paths) > 50
    for path in paths:
        places = (ROOT / path, ROOT / "unity_ir" / path)
        assert path in ("sum", "copy") or any(place.exists() for place in places), f"papers.md names {path}"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["update_dialects", "update_models", "update_operators", "update_torch_operators"])
def test_made_documents_are_what_their_scripts_make(script: str):
    module = script_of(script)
    assert module.PATH.read_text() == module.table()


@pytest.mark.slow
def test_the_page_on_accuracy_its_picture_and_bands_are_what_their_script_makes():
    """Rows of the data without a prediction are counted on the page, and nothing was edited by hand."""
    module = script_of("update_accuracy")
    for path, text in module.MADE.items():
        assert path.read_text() == text(), path.name


def script_of(name: str) -> Any:
    """Return a script of `docs/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown_commands() -> list[tuple[str, str]]:
    """
    Every block of the docs that begins `$ unity-opt`, with the document it is in; but for those that go on from each
    other (`test_getting_started.py`).
    """
    documents = sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "getting_started.md"})
    return [(d.name, b) for d in documents for b in blocks(d.read_text(), "") if b.startswith("$ unity-opt")]


@pytest.mark.slow
@pytest.mark.parametrize(("document", "block"), shown_commands())
def test_the_docs_show_real_output(document: str, block: str, tmp_path: Path):
    """`mlir` blocks that begin with `// name.pcg` are files; a line `...` of a block stands for any lines."""
    for text in blocks((ROOT / "docs" / document).read_text(), "mlir"):
        if name := re.match(r"// (\w+\.pcg)\n", text):
            (tmp_path / name[1]).write_text(text)
    command, _, shown = block.partition("\n")
    arguments = [str(ROOT / a) if (ROOT / a).is_file() else a for a in shlex.split(command)[2:]]
    done = subprocess.run([UNITY_OPT, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
    found = (done.stdout + done.stderr).replace(f"{ROOT}/", "")
    parts = ("\n" + shown).split("\n...\n")
    assert re.fullmatch("\n.*".join(map(re.escape, parts)) + r"\s*", "\n" + found, re.S), found


def test_the_ways_to_divide_a_product_are_as_shown():
    """The rows of the table in concepts.md: types follow from the operator, and gradients are dual."""
    text = (ROOT / "docs" / "concepts.md").read_text()
    rows = re.findall(r"^([mkn])  +(\[.*)$", next(b for b in blocks(text, "") if b.startswith("divided")), re.M)
    assert [name for name, _ in rows] == ["m", "k", "n"]
    for _, row in rows:
        cells = re.findall(r"\[(\d+)(?::(\d+))?, (\d+)(?::(\d+))?\](?: (sum|copy) = (\d+))?", row)
        x, w, y, dy, dx, dw = (
            tensor_type((int(a), int(b)), "f32", (int(i or 1), int(j or 1)), **({kind: int(by)} if kind else {}))
            for a, i, b, j, kind, by in cells
        )
        assert (dy, dx, dw) == (y.dual, x.dual, w.dual)
        operands = tuple(leaf("input", t, None, name=n).result for n, t in (("x", x), ("w", w)))
        assert apply("matmul", operands).types == (y,)


@pytest.mark.slow
def test_every_term_of_the_glossary_is_used():
    terms = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    terms = [t for t in terms if t != "our word"]
    assert len(terms) > 50
    files = [*(ROOT / "unity_ir").rglob("*.py"), *(d for d in (ROOT / "docs").glob("*.md") if d.stem != "glossary")]
    text = "\n".join(file.read_text() for file in files)
    unused = [t for t in terms if not re.search(rf"\b{re.sub(' ', r'[ _-]', t)}", text, re.IGNORECASE)]
    assert not unused


def test_the_dialects_page_has_every_operation_and_its_examples_are_read_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = (ROOT / "docs" / "dialect.md").read_text()
    for dialect in (PCG, MACHINE, SUBST, SPMD):
        for operation in dialect.operations:
            if operation not in COMPUTE_OPS.values():
                assert re.search(rf"`{operation.name}[ `]", text), operation.name
        for attribute in dialect.attributes:
            assert f"`{attribute.name}`" in text, attribute.name
    examples = blocks(text, "mlir")
    assert len(examples) == 4
    for example in examples:
        (tmp_path / "example.pcg").write_text(example)
        assert main([str(tmp_path / "example.pcg")]) == 0
        printed = capsys.readouterr().out.splitlines()[1:-2]
        assert [line.removeprefix("  ") for line in printed] == example.splitlines()


def test_the_machines_page_says_what_n_counts():
    text = (ROOT / "docs" / "machines.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| ([\w-]+) \| .* \| (\d+) \| (.*) \|$", text, re.M)
    assert sorted(name for name, *_ in rows) == presets()
    for name, counted, devices, one in rows:
        assert load(name).devices == int(devices)
        if counted != "-":
            assert load(f"{name}:3").devices == 3 * load(f"{name}:1").devices
            assert load(f"{name}:3").levels[0].name == counted.lower()
        if one != "-":
            single = load(one.strip("`"))
            assert (single.devices, single.device.name) == (1, load(name).device.name)


def test_a_strategy_is_added_in_one_file(monkeypatch: pytest.MonkeyPatch):
    code = next(b for b in blocks((ROOT / "docs" / "search.md").read_text(), "python") if "STRATEGIES" in b)
    made: dict[str, Any] = {"__name__": "whole"}
    exec(compile(code, "whole.py", "exec", dont_inherit=True), made)
    known = {**strategy.all_strategies(), **{s.name: s for s in made["STRATEGIES"]}}
    monkeypatch.setattr(strategy, "all_strategies", lambda: known)
    graph = from_text("mlp,batch=8,hidden=16,layers=2,classes=4")
    whole, divided = (run(graph, load("2gpu"), "whole", options={"divided": d}) for d in (False, True))
    assert (whole.strategy, whole.graph) == ("whole", graph)
    assert divided.cost.communication_time > whole.cost.communication_time == 0
