"""
Runs launchers as an emitted program would, under Triton's interpreter, which here checks bounds.

Every load and store has to be within an operand or a result; results start full of NaN, or 77.
"""

import os

# Kernels, Triton's own among them, are interpreted if this is set when they are defined, so before triton is imported.
# Ahead-of-time compilation has a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, seed, settings
from operator_cases import CASES, Case
from quick_interpreter import quicken
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from unity_ir.kernels.launchers import Launcher

assert isinstance(tl.sum, InterpretedFunction), "something imported triton before TRITON_INTERPRET was set"

HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n\n"


class Memory:
    """The module `torch` as a launcher sees it; what is allocated, and the operands, are all a kernel may touch."""

    current: "Memory | None" = None

    def __init__(self, operands: Sequence[torch.Tensor]):
        self.ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in operands]

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if not isinstance(found, BuiltinFunctionType):
            return found

        def wrapper(*arguments: Any, **options: Any) -> Any:
            made = found(*arguments, **options)
            for each in made if isinstance(made, tuple) else (made,):
                if isinstance(each, torch.Tensor):
                    self.own(each)
            return made

        return wrapper

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        wrong = float("nan") if dtype.is_floating_point else 77
        return self.own(torch.full(tuple(shape), wrong, dtype=dtype, device=device))

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """A context in which tensors like others, `x.new_empty(..)`, are of this memory, too."""

        def new(name: str, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            method = getattr(torch.Tensor, name)

            def made(x: torch.Tensor, *shape: Any, dtype: Any = None, **others: Any) -> torch.Tensor:
                # Those of the interpreter say on which device, and those of PyTorch's functions have sizes one by one.
                if others or len(shape) != 1 or not isinstance(shape[0], tuple):
                    return method(x, *shape, dtype=dtype, **others)
                return make(shape[0], dtype=dtype or x.dtype, device=x.device)

            return made

        with (
            patch.object(torch.Tensor, "new_empty", new("new_empty", self.empty)),
            patch.object(torch.Tensor, "new_zeros", new("new_zeros", self.zeros)),
        ):
            yield

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        self.ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def check(self, pointers: Any, mask: Any) -> None:
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        if self.is_inside(pointers.data, width):
            return
        addresses = np.atleast_1d(pointers.data)[
            # With conditions on Python's numbers, such as the interpreter's loops have, masks are integers.
            np.broadcast_to(np.atleast_1d(mask.data).astype(bool), np.shape(pointers.data) or 1)
        ]
        if not addresses.size or self.is_inside(addresses, width):
            return
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in self.ranges:
            inside |= (addresses >= low) & (addresses + width <= high)
        assert inside.all(), "out of bounds"

    def is_inside(self, addresses: Any, width: int) -> bool:
        """Whether all, with the bytes of an element each, are in one of the tensors."""
        first, last = int(addresses.min()), int(addresses.max()) + width
        return any(low <= first and last <= high for low, high in self.ranges)


def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
    """A method of the interpreter that checks the addresses it is given while a launcher runs."""

    def wrapper(self: Any, pointers: Any, *rest: Any, **options: Any) -> Any:
        if Memory.current is not None:
            Memory.current.check(pointers, rest[mask_at])
        return access(self, pointers, *rest, **options)

    return wrapper


quicken()
InterpreterBuilder.create_masked_load = checked(InterpreterBuilder.create_masked_load, 0)
InterpreterBuilder.create_masked_store = checked(InterpreterBuilder.create_masked_store, 1)


@dataclass
class Runner:
    directory: Path
    count: "itertools.count[int]" = field(default_factory=itertools.count)

    def load(self, *launchers: Launcher) -> ModuleType:
        """A module with the launchers and all their kernels."""
        kernels = {k: text for one in launchers for k, text in one.kernels.items()}
        path = self.directory / f"program{next(self.count)}.py"
        text = HEADER + "\n\n".join([*kernels.values(), *(one.source for one in launchers)])
        # Triton reads the file, but nobody its bytecode.
        path.write_text(text)
        module = ModuleType(path.stem)
        exec(compile(text, path, "exec"), vars(module))
        return module

    def run(
        self,
        launcher: Launcher,
        operands: Sequence[torch.Tensor],
        *more: object,
        within: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        """The results of a launcher, given operands, which may be parts of the tensors `within`."""
        module = self.load(launcher)
        module.torch = memory = Memory([*operands, *within])
        Memory.current = memory
        try:
            # Numpy warns of what the interpreter computes beside the masks, such as 0 / 0, which is stored nowhere.
            with np.errstate(all="ignore"), memory.allocating():
                results = getattr(module, launcher.name)(*operands, *more)
        finally:
            Memory.current = None
        return results if isinstance(results, tuple) else () if results is None else (results,)

    @contextmanager
    def within(self, operands: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which kernels may touch these tensors and no others."""
        Memory.current = Memory(operands)
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            Memory.current = None


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def drawn() -> Callable[[str, int], list[Case]]:
    return drawn_cases


def drawn_cases(name: str, count: int) -> list[Case]:
    """Cases of an operator, the same ones every time."""
    found: list[Case] = []

    @seed(0)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(CASES[name])
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found
