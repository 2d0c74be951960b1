"""
Runs launchers as an emitted program would, under Triton's interpreter.

Operands lie in larger buffers full of NaN and results in larger buffers that must come back untouched, since the
interpreter checks no bounds.
"""

import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from unity_ir.lowering.kernels.launcher import Launcher
from unity_ir.ops import Operator
from unity_ir.tdl.functions import ACTIVATIONS
from unity_ir.tdl.syntax import (
    Bound,
    Composite,
    Pack,
    Segments,
    Starred,
    StarredSegments,
    Var,
    WrittenIndex,
    accesses,
)

# Kernels are interpreted if this is set when they are defined. Ahead-of-time compilation has a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
GUARD = 512


class GuardedTorch:
    """The module `torch`, but what it allocates lies in a larger buffer that `check` looks at."""

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape)
        buffer = torch.full((size + 2 * GUARD,), float("nan"), dtype=dtype, device=device)
        self.buffers.append((buffer, size))
        return buffer[GUARD : GUARD + size].view(tuple(shape))

    def check(self) -> None:
        for buffer, size in self.buffers:
            assert buffer[:GUARD].isnan().all(), "written before the result"
            assert buffer[GUARD + size :].isnan().all(), "written after the result"


def guarded(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor amid NaN (or ids beyond every range)."""
    poison = float("nan") if dtype.is_floating_point else 1 << 30
    buffer = torch.full((array.size + 2 * GUARD,), poison, dtype=dtype)
    tensor = buffer[GUARD : GUARD + array.size].view(array.shape)
    tensor.copy_(torch.from_numpy(array))
    return tensor


@dataclass
class Runner:
    directory: Path
    count: "itertools.count[int]" = field(default_factory=itertools.count)

    def load(self, *launchers: Launcher) -> ModuleType:
        """A module with the launchers and all their kernels."""
        kernels = {k: text for one in launchers for k, text in one.kernels.items()}
        path = self.directory / f"program{next(self.count)}.py"
        path.write_text(HEADER + "\n\n".join([*kernels.values(), *(one.source for one in launchers)]))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def run(self, launcher: Launcher, operands: Sequence[torch.Tensor], *more: object) -> tuple[torch.Tensor, ...]:
        module = self.load(launcher)
        module.torch = GuardedTorch()
        results = getattr(module, launcher.name)(*operands, *more)
        module.torch.check()
        return results if isinstance(results, tuple) else (results,)


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("programs"))


def operands_of(bound: Bound, shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Random operands: normal numbers, and ids of any index."""
    rng = np.random.default_rng(seed)
    most = max(bound.extents.values(), default=1)
    return [
        rng.integers(0, most, shape) if p.integer else rng.standard_normal(shape)
        for p, shape in zip(bound.operands, shapes, strict=True)
    ]


# --- random uses of an operator, from its line alone -----------------------------------------------------------------

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 33, 64, 70)
Case = tuple[tuple[tuple[int, ...], ...], dict[str, Any]]


def random_case(operator: Operator, integer: Callable[[int, int], int]) -> Case:
    """Operand shapes and attributes that fit the operator's line; `integer(a, b)` draws from a to b."""
    if not isinstance(operator.tdl, str):
        return _random_reshape(integer)
    line = operator.line
    sizes: dict[str, int] = {}
    ranks: dict[str, int] = {}
    room = [6000]
    copies = integer(1, 3)

    def size(name: str) -> int:
        if name not in sizes:
            fitting = [s for s in SIZES if s <= room[0]]
            sizes[name] = fitting[integer(0, len(fitting) - 1)]
            room[0] //= sizes[name]
        return sizes[name]

    def spelled(index: WrittenIndex, copy: int) -> list[tuple[str, ...]]:
        match index:
            case Pack(name):
                rank = ranks.setdefault(name, integer(0, 2))
                return [(f"{name}{i}",) for i in range(rank)]
            case Starred(name):
                return [(f"{name}{copy}",)]
            case Var(name):
                return [(name,)]
            case Composite(names):
                return [names]
            case _:
                raise TypeError(index)

    def dims(index: WrittenIndex, copy: int) -> list[int]:
        if isinstance(index, StarredSegments):
            return [sum(size(f"{index.name}{i}") for i in range(copies))]
        assert not isinstance(index, Segments)
        return [math.prod(size(n) for n in names) for names in spelled(index, copy)]

    shapes: list[tuple[int, ...]] = []
    for parameter in line.parameters:
        access = next(a for r in line.results for a in accesses(r.expr) if a.tensor == parameter.name)
        for copy in range(copies if parameter.variadic else 1):
            shapes.append(tuple(d for i in access.indices for d in dims(i, copy)))
    attributes: dict[str, Any] = {}
    for clause in line.clauses:
        if not isinstance(clause.value, str):
            continue
        spread = range(copies) if isinstance(clause.index, Starred) else range(1)
        names = [n for c in spread for group in spelled(clause.index, c) for n in group]
        match clause.kind, clause.index:
            case "rank", Pack(name):
                attributes[clause.value] = ranks[name]
            case "size", Pack() | Starred():
                attributes[clause.value] = tuple(size(n) for n in names)
            case "size", _:
                attributes[clause.value] = size(names[0])
            case _:
                attributes[clause.value] = tuple(1 for _ in names)
    for attribute in line.attributes:
        packs = [
            i
            for r in line.results
            for i in (*r.indices, *(j for a in accesses(r.expr) for j in a.indices))
            if isinstance(i, Pack) and i.permuted_by == attribute.name
        ]
        if packs:
            order = list(range(ranks[packs[0].name]))
            attributes[attribute.name] = tuple(order.pop(integer(0, len(order) - 1)) for _ in range(len(order)))
        elif attribute.kind == "name":
            attributes[attribute.name] = ACTIVATIONS[integer(0, len(ACTIVATIONS) - 1)]
    return tuple(shapes), attributes


def _random_reshape(integer: Callable[[int, int], int]) -> Case:
    factors = [SIZES[integer(0, 7)] for _ in range(integer(1, 4))]

    def grouped() -> tuple[int, ...]:
        dims: list[int] = [factors[0]]
        for factor in factors[1:]:
            if integer(0, 1):
                dims.append(factor)
            else:
                dims[-1] *= factor
        return tuple(dims)

    return (grouped(),), {"shape": grouped()}


@pytest.fixture(scope="session")
def make_case() -> Callable[[Operator, Callable[[int, int], int]], Case]:
    return random_case


@pytest.fixture(scope="session")
def make_operands() -> Callable[..., list[np.ndarray[Any, Any]]]:
    return operands_of


@pytest.fixture(scope="session")
def guard() -> Callable[[np.ndarray[Any, Any], torch.dtype], torch.Tensor]:
    return guarded
