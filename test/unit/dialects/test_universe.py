"""Any xDSL driver finds what this package adds, and no one imports what it does not ask for."""

import subprocess
import sys
from pathlib import Path

import pytest
from xdsl.passes import ModulePass
from xdsl.universe import Universe

from unity_ir.dialects import DIALECTS
from unity_ir.passes import PASSES, TARGETS

TEXT = """
func.func @f(%x: !pcg.tensor<[4], f32>) -> !pcg.tensor<[4], f32> {
  %a = pcg.partition %x, dim 0 by 2 on #machine.view<0, [2 @ 1]> : !pcg.tensor<[4], f32>
  %b = pcg.combine %a, dim 0 by 2 : !pcg.tensor<[4:2], f32>
  func.return %b : !pcg.tensor<[4], f32>
}
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_tables() -> None:
    universe = Universe.get_multiverse()
    assert universe.all_dialects.keys() >= DIALECTS.keys()
    assert universe.all_passes.keys() >= PASSES.keys()
    assert universe.all_targets.keys() >= TARGETS.keys()


@pytest.mark.parametrize("name", PASSES)
def test_passes(name: str) -> None:
    found = Universe.get_multiverse().all_passes[name]()
    assert issubclass(found, ModulePass)
    assert found.name == name
    assert found.__doc__ is not None


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects(name: str) -> None:
    assert Universe.get_multiverse().all_dialects[name]().name == name


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str) -> None:
    assert Universe.get_multiverse().all_targets[name]().name == name


@pytest.mark.slow
def test_xdsl_opt() -> None:
    """The plain driver, which knows of this package by its entry point only."""
    tool = Path(sys.executable).parent / "xdsl-opt"
    result = subprocess.run(
        [tool, "-f", "mlir", "-p", "pcg-erase,pcg-fold"], input=TEXT, capture_output=True, text=True, check=True
    )
    assert "func.return %x : !pcg.tensor<[4], f32>" in result.stdout


HEAVY = ("lark", "numpy", "torch", "triton", "z3")


@pytest.mark.slow
def test_start_up_imports_nothing_heavy() -> None:
    """`unity-opt --help` is asked for more often than anything else."""
    loaded = python(
        "import sys; from unity_ir.tools.unity_opt import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: print('loaded', [m for m in {HEAVY} + ('unity_ir.ops',) if m in sys.modules])"
    )
    assert loaded.splitlines()[-1] == "loaded []"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["unity_ir.pcg.graph", "unity_ir.pcg.view", "unity_ir.ops", "unity_ir.tdl.parse", "unity_ir.rules.derivation"],
)
def test_core_does_not_import_xdsl(module: str) -> None:
    assert python(f"import sys, {module}; print('xdsl' in sys.modules)") == "False\n"


@pytest.mark.slow
def test_a_broken_pipe_is_quiet() -> None:
    tool = Path(sys.executable).parent / "unity-opt"
    process = subprocess.Popen([tool], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(TEXT)
    process.stdin.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()
