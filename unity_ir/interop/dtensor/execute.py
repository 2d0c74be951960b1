"""
Run a rank's program on local tensors: its forward, and its backward from what the forward kept.

Operators are the PyTorch functions that programs with `kernels=torch` have, moves are `DTensor.redistribute` (`moves`).
The backward is the plan's, not autograd's, so what is moved and when is what was priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh

from unity_ir.interop.dtensor.moves import Groups, move
from unity_ir.interop.dtensor.pieces import torch_dtype
from unity_ir.interop.mesh import MeshDims
from unity_ir.interop.names import forward_and_backward, gradients
from unity_ir.kernels.launchers import torch_launcher
from unity_ir.pcg.sharding import SUM
from unity_ir.plan.instructions import Compute, Instruction, Leaf, Register, ReshardMove, makes, reads
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.program import Program

Tensors = dict[Register, torch.Tensor]
"""This rank's pieces by register."""


@dataclass(frozen=True)
class _Line:
    """An instruction as a function of pieces, and the registers that are not read after it."""

    call: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    reads: tuple[Register, ...]
    makes: tuple[Register, ...]
    dies: tuple[Register, ...]


class Execution:
    """
    Runs the forward and the backward of one rank's program of a training step, in PyTorch. Values are passed as this
    rank's pieces (local tensors) by register, the program's number for a value.

    `mesh` holds all ranks of the program, in the order of its devices; `dims` says which mesh axes of the program each
    dim of `mesh` is made of. All ranks must make one, and call its methods in the same order.
    """

    def __init__(self, program: Program, mesh: DeviceMesh, dims: MeshDims):
        self.program = program
        self._device = torch.device(mesh.device_type, torch.cuda.current_device()) if _is_cuda(mesh) else "cpu"
        self._groups = Groups(mesh, dims)
        number = int((mesh.mesh.flatten() == mesh.get_rank()).nonzero())
        self._at = program.mesh.coordinates(number)
        forward, backward = forward_and_backward(program)
        given = {leaf.result for op in ("input", "weight") for leaf in program.leaves(op)}
        made = {r for i in backward for r in makes(i)} - given
        self.kept: tuple[Register, ...] = tuple(sorted({r for i in backward for r in reads(i)} - made))
        """The registers that the backward reads of the forward, inputs and weights among them."""
        self._forward = self._lines(forward, {*self.kept, *program.outputs})
        self._backward = self._lines(backward, {*gradients(program).values()})

    def forward(self, leaves: Tensors) -> Tensors:
        """
        Run the forward on `leaves`, this rank's pieces of all inputs and weights by register. Return, by register, the
        pieces of the program's outputs and those that the backward reads (the registers `self.kept`); pieces of other
        registers may be among them.
        """
        return _run(self._forward, leaves)

    def backward(self, kept: Tensors) -> Tensors:
        """
        Run the backward on `kept`, this rank's pieces of the registers `self.kept`, as the forward returned them.
        Return, by register, the pieces of the weights' gradients (`names.gradients` says which registers those are);
        pieces of other registers may be among them.
        """
        return _run(self._backward, kept)

    def _lines(self, body: Sequence[Instruction], wanted: set[Register]) -> list[_Line]:
        last = {r: i for i, instruction in enumerate(body) for r in (*reads(instruction), *makes(instruction))}
        found: list[_Line] = []
        for i, instruction in enumerate(body):
            call = self._call(instruction)
            if call is None:
                continue
            ends = dict.fromkeys((*reads(instruction), *makes(instruction)))
            dies = tuple(r for r in ends if last[r] == i and r not in wanted)
            found.append(_Line(call, reads(instruction), makes(instruction), dies))
        return found

    def _call(self, instruction: Instruction) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]] | None:
        """Return an instruction as a function of the pieces it reads; None of inputs and weights, which are given."""
        match instruction:
            case Leaf("constant", result, _, value):
                return self._constant(result, value)
            case Compute():
                return self._operator(instruction)
            case ReshardMove():
                return move(instruction, self._groups) or _same
            case _:
                return None

    def _constant(self, register: Register, value: float) -> Callable[[], torch.Tensor]:
        tensor, mesh = self.program.tensors[register], self.program.mesh
        is_first = all(at == 0 for at, role in zip(self._at, tensor.layout, strict=True) if role == SUM)
        shape, dtype, number = tensor.local(mesh), torch_dtype(tensor.dtype), value if is_first else 0.0
        return lambda: torch.full(shape, number, dtype=dtype, device=self._device)

    def _operator(self, compute: Compute) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
        operator = local_operator(self.program, compute)
        made = torch_launcher(operator.line, operator.dtypes, operator.divided)
        function = _function(made.name, made.source)
        starts = [self._index(compute, v) * operator.line.extents[v] for v in operator.divided]
        return function if not starts else lambda *operands: function(*operands, *starts)

    def _index(self, compute: Compute, variable: str) -> int:
        """Return which piece of an index variable this rank has."""
        found = 0
        for what, at, size in zip(compute.assignment, self._at, self.program.mesh.sizes, strict=True):
            found = found * size + at if what == variable else found
        return found


def _is_cuda(mesh: DeviceMesh) -> bool:
    return mesh.device_type == "cuda"


def _same(piece: torch.Tensor) -> torch.Tensor:
    return piece


def _run(lines: Iterable[_Line], given: Tensors) -> Tensors:
    tensors = dict(given)
    for line in lines:
        made = line.call(*[tensors[r] for r in line.reads])
        tensors.update(zip(line.makes, made if isinstance(made, tuple) else (made,), strict=True))
        for register in line.dies:
            del tensors[register]
    return tensors


@lru_cache(maxsize=4096)
def _function(name: str, source: str) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """Return the function `name` that `kernels.launchers` has written."""
    scope: dict[str, Callable[..., torch.Tensor]] = {}
    exec(f"import torch\n\n{source}", scope)
    return scope[name]
