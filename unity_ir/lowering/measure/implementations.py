# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""
Time the implementations, Triton's and PyTorch's, of a program's operators on a GPU.

Triton's is timed only if its results agree with PyTorch's. Times are those of `triton.testing.do_bench`, which empties
the caches between runs.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from unity_ir.cost.work import kernel_operator
from unity_ir.errors import UnityError
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.triton.launch import Launcher
from unity_ir.lowering.emit.plan_text import compared
from unity_ir.lowering.measure.operators import DTYPES, Operand
from unity_ir.machine.tuned import Sized
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute
from unity_ir.plan.local_operator import LocalOperator, local_operator
from unity_ir.plan.program import Program
from unity_ir.plan.saved_softmax import with_savings
from unity_ir.tdl.syntax import Bound

MOST_BYTES = 16 * 2**30
"""An operator is not measured if its operands take more bytes than this."""
TOLERANCES = {"f32": 1e-3, "bf16": 3e-2, "f16": 5e-3}
"""Largest difference from PyTorch's result, relative to its largest element; sums may be in another order."""


@dataclass(frozen=True)
class TuningTask:
    """An operator at one rank's shapes, to be timed in Triton and in PyTorch."""

    key: str
    """The operator's key in tuning tables."""
    operator: LocalOperator
    operands: tuple[Operand, ...]
    """The random tensors to call it with."""
    priced: Sized
    """The operator's kernel as the cost model knows it."""

    def launcher(self, implementation: str) -> Launcher:
        """
        Return the launcher (the text of a Python function, and of its Triton kernels) that computes the operator in
        `implementation`, `triton` or `torch`. It has no kernels for `torch`.
        """
        return launcher(self.operator.line, self.operator.dtypes, implementation, self.operator.divided)


Measure = Callable[[TuningTask, Sequence[str]], Mapping[str, float | str]]
"""Returns the seconds of each implementation named, or why it could not be measured."""


def tuning_tasks(programs: Iterable[Program]) -> Iterator[TuningTask]:
    """
    Yield what is to be timed, in Triton and in PyTorch, for the programs' tuning table: each distinct operator that has
    a Triton kernel, at the shapes of one rank's pieces.
    """
    seen: set[str] = set()
    for before in programs:
        program = with_savings(before)
        for written, instruction in zip(before.body, program.body, strict=True):
            if not isinstance(instruction, Compute) or not isinstance(written, Compute):
                continue
            operator = local_operator(program, instruction)
            key = operator.key
            if key in seen:
                continue
            seen.add(key)
            shapes = [program.tensors[r].local(program.mesh) for r in instruction.operands]
            described = zip(operator.line.operands, shapes, operator.dtypes, strict=True)
            operands = tuple(Operand(shape, dtype, _below(operator.line, p.name)) for p, shape, dtype in described)
            # The cost model prices the operator that saves nothing for its backward.
            found = TuningTask(key, operator, operands, _priced(before, written))
            if found.launcher("triton").kernels:
                yield found


def _priced(program: Program, instruction: Compute) -> Sized:
    """Return the kernel of an instruction as the cost model knows it: name, then sizes (see `cost.work.kernel_of`)."""
    tensors = [program.tensors[r] for r in instruction.operands]
    operator = kernel_operator(instruction.operator, instruction.attributes, tuple(t.dtype for t in tensors))
    shapes = (size for t in tensors for size in t.local(program.mesh))
    return operator, (*shapes, *program.local_line(instruction).extents.values())


def _below(line: Bound, operand: str) -> int:
    """Return the bound of an operand's integers: the smallest number of classes they are compared with, else 2."""
    return min((size for r in line.results for size in compared(r.expr, operand, line)), default=2)


class OnGPU:
    """
    Times a task's implementations on the current CUDA device when called as a `Measure`. It is a context manager, which
    keeps the kernels' text in a temporary folder until it exits.

    PyTorch's runs first; if both are asked for, Triton's is timed only if its results agree. An implementation that
    fails, or whose operands are too large (`MOST_BYTES`), has the reason, as text, in place of its seconds.
    """

    def __enter__(self) -> Self:
        self.folder = tempfile.TemporaryDirectory()
        self.count = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()

    def __call__(self, task: TuningTask, implementations: Sequence[str]) -> Mapping[str, float | str]:
        if sum(prod(o.shape) * ELEMENT_BYTES[o.dtype] for o in task.operands) > MOST_BYTES:
            return dict.fromkeys(implementations, "its operands are too large to be measured")
        operands = [_random(o, number) for number, o in enumerate(task.operands)]
        starts = (0,) * len(task.operator.divided)
        found: dict[str, float | str] = {}
        expected = None
        for name in sorted(implementations, key=("torch", "triton").index):
            try:
                run = self._function(task.launcher(name))
                got = run(*operands, *starts)
                wrong = None if expected is None else _differs(got, expected)
                expected = got if expected is None else expected
                found[name] = wrong or _seconds(lambda run=run: run(*operands, *starts))
            except (RuntimeError, UnityError, ValueError) as error:
                found[name] = " ".join(str(error).split())[:200]
            torch.cuda.empty_cache()
        return found

    def _function(self, made: Launcher) -> Callable[..., Any]:
        path = Path(self.folder.name, f"tuned{self.count}.py")
        self.count += 1
        head = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
        path.write_text(head + "\n\n".join([*made.kernels.values(), made.source]))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, made.name)


def _random(operand: Operand, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = DTYPES[operand.dtype]
    if dtype.is_floating_point:
        # Between 0.5 and 1.5, where every function is defined.
        return (torch.rand(operand.shape, generator=generator, device="cuda") + 0.5).to(dtype)
    return torch.randint(0, operand.below, operand.shape, generator=generator, device="cuda").to(dtype)


def _differs(got: Any, expected: Any) -> str | None:
    """Return how results differ from the expected ones, as text; None if they agree."""
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (got, expected)), strict=True)
    for number, (one, other) in enumerate(pairs):
        kind = next((n for n, d in DTYPES.items() if d == other.dtype), "f32")
        largest = other.double().abs().max().item() if other.numel() else 0.0
        off = (one.double() - other.double()).abs().max().item() if other.numel() else 0.0
        if not off <= TOLERANCES.get(kind, 0.0) * largest:
            return f"result {number} differs from PyTorch's by {off:.3g}, of {largest:.3g}"
    return None


def _seconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    milliseconds: Any = do_bench(run, warmup=10, rep=50, return_mode="median")
    return milliseconds / 1e3
