"""Launches of emitted programs hand CUDA what Triton's own would, and find the compiled kernel by themselves."""

from __future__ import annotations

import os

# Others in this process interpret kernels, for which this has to be set before triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

import re
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from no_gpu import without_gpu
from zoo import SMALL

from unity_ir.lowering import runtime
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step

program = runtime.load(("watchdog", *runtime.BEFORE_KERNELS), triton=triton, NAME="train")
launched = program.launched


def add_kernel(x_ptr, y_ptr, out_ptr, start, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # pyright: ignore
    """No body: it is not compiled."""
    tl.store(out_ptr, tl.load(x_ptr))


Seen = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    program.Launches.said = False
    monkeypatch.setattr("sys.argv", ["train.py", "--quick-launches"])


def test_they_are_tritons_without_the_option(monkeypatch: pytest.MonkeyPatch):
    kernel = triton.JITFunction(add_kernel)
    assert launched(kernel) is not kernel
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert launched(kernel) is kernel


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Collect what is given to the function in C that launches."""
    found: Seen = []

    def launch(*given: Any) -> None:
        numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given[-1]]
        # Without what is for hooks. Triton 3.6 has fewer of its own.
        others = (given[5:8], given[11:-1]) if len(given) == 16 else ()
        found.append((given[:5], numbers, others))

    # Triton 3.6 passes arguments one by one, 3.7 as one tuple.
    with without_gpu(lambda *given: launch(*given) if isinstance(given[-1], tuple) else launch(*given, given[-7:])):
        yield found


def tensors(dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
    return [torch.zeros(64, dtype=dtype)[offset:] for _ in range(3)]


def test_they_are_those_of_triton(seen: Seen):
    """Kernels, grids and arguments, for types, places in memory, numbers and options, each three times."""
    kernel = triton.JITFunction(add_kernel)
    ours = launched(kernel)
    types = (torch.float32, torch.bfloat16, torch.int64)
    cases = list(product(types, (0, 1, 16), ((0, 1), (16, 1), (1, 16), (3, 5)), (4, 8), (False, True), ((2,), (2, 3))))
    compiled: set[Any] = set()
    for case in [*cases, *reversed(cases), *cases]:
        dtype, offset, numbers, num_warps, even, grid = case
        given = [*tensors(dtype, offset), *numbers]
        ours[grid](*given, BLOCK=32, EVEN=even, num_warps=num_warps)
        kernel[grid](*given, BLOCK=32, EVEN=even, num_warps=num_warps)
        one, wanted = seen[-2:]
        assert one == wanted, case
        compiled.add(one[0][4])
    assert len(seen) == 6 * len(cases)
    assert len(compiled) == 3 * 2 * 3 * 2 * 2  # 0 and 16 are alike
    # Types of single tensors, and one that is elsewhere.
    for changed, dtype, offset in product(range(3), types, (0, 1)):
        given: list[Any] = tensors(torch.float32, 0)
        given[changed] = tensors(dtype, offset)[0]
        for way in (ours, ours, ours, kernel):
            way[2,](*given, 3, 5, BLOCK=32, EVEN=False, num_warps=4)
        assert seen[-4] == seen[-3] == seen[-2] == seen[-1]
    assert not program.Launches.said


def test_triton_is_asked_twice(seen: Seen):
    kernel = launched(triton.JITFunction(add_kernel))
    given = tensors(torch.float32, 0)

    def launch() -> None:
        kernel[(2,)](*given, 3, 5, BLOCK=32, EVEN=False, num_warps=4)

    launch()
    launch()
    with patch.object(triton.JITFunction, "run", side_effect=AssertionError("asked again")):
        launch()
        assert len(seen) == 3
        assert seen[0] == seen[1] == seen[2]
        # What a profiler is to see is Triton's.
        hooks, hook = triton.knobs.runtime, lambda metadata: None
        for chain in (hooks.launch_enter_hook, hooks.launch_exit_hook):
            chain.add(hook)
            with pytest.raises(AssertionError, match="asked again"):
                launch()
            chain.remove(hook)
        launch()


def other_metadata(compiled: Any, rest: Any) -> Any:
    """Return what `directly` returns, without the kernel's metadata."""
    *found, fixed, as_one, rest = directly(compiled, rest)
    return *found, tuple("other" if x == () else x for x in fixed), as_one, rest


def no_attribute(compiled: Any, rest: Any) -> Any:
    return directly(compiled.not_there, rest)


def shorter(compiled: Any, rest: Any) -> Any:
    return directly(compiled, rest[1:])


directly = program.directly


@pytest.mark.parametrize(
    ("changed", "why"),
    [(other_metadata, "is handed to the driver, not"), (no_attribute, "not_there"), (shorter, "is handed to the")],
)
def test_what_would_be_handed_over_otherwise_is_left_to_triton(
    seen: Seen, changed: Any, why: str, capsys: pytest.CaptureFixture[str]
):
    kernels = [launched(triton.JITFunction(add_kernel)) for _ in range(2)]
    given = tensors(torch.float32, 0)
    with patch.dict(launched.__globals__, directly=changed):
        for kernel, _ in product(kernels, range(4)):
            kernel[(2,)](*given, 3, 5, BLOCK=32, EVEN=False, num_warps=4)
    assert len(seen) == 8
    assert [each[1:] for each in seen] == [seen[0][1:]] * 8
    said = capsys.readouterr().err
    assert said.startswith("train: --quick-launches: kernels are launched by Triton: add_kernel: ")
    assert why in said
    assert said.count("\n") == 1


def test_a_launch_that_fails_is_done_once_more_and_fails(seen: Seen):
    kernel = launched(triton.JITFunction(add_kernel))
    given = tensors(torch.float32, 0)
    kernel[(2,)](*given, 3, 5, BLOCK=32, EVEN=False, num_warps=4)
    with (
        patch.object(triton.JITFunction, "run", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        kernel[(2,)](*given, 3, 5, BLOCK=32, EVEN=False, num_warps=4)
    assert len(seen) == 1


def test_others_are_left_to_triton(capsys: pytest.CaptureFixture[str]):
    kernel = triton.JITFunction(add_kernel)
    with patch.object(triton, "__version__", "3.8.0"):
        assert launched(kernel) is launched(kernel) is kernel
    said = "train: --quick-launches: kernels are launched by Triton: it is not known how, in 3.8.0\n"
    assert capsys.readouterr().err == said
    with patch.object(torch.version, "hip", "7.0"):
        assert launched(kernel) is kernel
    interpreted = object()
    assert launched(interpreted) is interpreted
    assert launched(kernel) is not kernel


@pytest.mark.slow
def test_kernels_of_programs_are_launched_so_and_what_they_call_is_not():
    machine, graph = load("box:1"), mixed_precision(build("gpt2", **SMALL["gpt2"]), "bf16")
    step = lower(differentiate(graph, Optimizer("adamw"), machine.mesh), machine)
    made = emit(plan_step(step, PlanOptions(kernels="triton")), graph)
    found = re.findall(r"@launched\n@triton\.jit\ndef (\w+)\(", made.text)
    assert sorted(found) == sorted(made.kernels)
    assert made.text.count("@triton.jit") > len(found) == made.text.count("@launched")
    called = set(re.findall(r"(\w+)\[.*\]\(", made.text.partition("# --- operators")[2])) & set(made.kernels)
    assert called == set(made.kernels)
