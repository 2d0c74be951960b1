"""
Runs launchers as an emitted program would, under Triton's interpreter, which here checks bounds.

Every load and store has to be within an operand or a result; results start full of NaN.
"""

import os

# Kernels, Triton's own among them, are interpreted if this is set when they are defined, so before triton is imported.
# Ahead-of-time compilation has a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

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

assert isinstance(tl.sum, InterpretedFunction), "something imported triton before TRITON_INTERPRET was set"

HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n\n"


class Memory:
    """The module `torch` as a launcher sees it; what is allocated, and the operands, are all a kernel may touch."""

    current: "Memory | None" = None

    def __init__(self, operands: Sequence[torch.Tensor]):
        self.ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in operands]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
        self.ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def check(self, pointers: Any, mask: Any) -> None:
        addresses = np.atleast_1d(pointers.data)[
            np.broadcast_to(np.atleast_1d(mask.data), np.shape(pointers.data) or 1)
        ]
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in self.ranges:
            inside |= (addresses >= low) & (addresses + width <= high)
        assert inside.all(), "out of bounds"


def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
    """A method of the interpreter that checks the addresses it is given while a launcher runs."""

    def wrapper(self: Any, pointers: Any, *rest: Any) -> Any:
        if Memory.current is not None:
            Memory.current.check(pointers, rest[mask_at])
        return access(self, pointers, *rest)

    return wrapper


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
        path.write_text(HEADER + "\n\n".join([*kernels.values(), *(one.source for one in launchers)]))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def run(self, launcher: Launcher, operands: Sequence[torch.Tensor], *more: object) -> tuple[torch.Tensor, ...]:
        module = self.load(launcher)
        module.torch = memory = Memory(operands)
        Memory.current = memory
        try:
            results = getattr(module, launcher.name)(*operands, *more)
        finally:
            Memory.current = None
        return results if isinstance(results, tuple) else () if results is None else (results,)


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
