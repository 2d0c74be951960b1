"""
What of a program a table of `machine.tuned` has measured: a key says the operator, its line, the local shapes and the
element types, so a table serves every program that has the same pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.cost.work import kernel_operator
from unity_ir.forms.windows import needs_start
from unity_ir.lowering.launchers import launcher
from unity_ir.lowering.rank.program import Compute, Fused, Program
from unity_ir.machine.tuned import Sized
from unity_ir.tdl.syntax import Bound


@dataclass(frozen=True)
class LocalOperator:
    """A compute instruction on one rank."""

    line: Bound
    dtypes: tuple[str, ...]
    divided: tuple[str, ...]
    """Variables whose piece may start elsewhere than at 0, and whose line must know where."""
    fused: bool = False
    """Of several operators, which are measured each by itself."""

    @property
    def key(self) -> str:
        """The same for equal lines over pieces of equal shapes and element types."""
        name = launcher(self.line, self.dtypes, "torch", self.divided).name.removesuffix("_torch")
        return f"{name} {' '.join(self.dtypes)}"


def local_operator(program: Program, instruction: Compute) -> LocalOperator:
    """What a rank computes for an instruction."""
    local = program.local_line(instruction)
    dtypes = tuple(program.tensors[r].dtype for r in instruction.operands)
    divided = tuple(v for v in dict.fromkeys(instruction.assignment) if isinstance(v, str) and needs_start(local, v))
    return LocalOperator(local, dtypes, divided, isinstance(instruction, Fused))


def priced(program: Program, instruction: Compute) -> Sized:
    """The kernel of an instruction as the cost model knows it (`cost.work.kernel_of`)."""
    tensors = [program.tensors[r] for r in instruction.operands]
    operator = kernel_operator(instruction.operator, instruction.attributes, tuple(t.dtype for t in tensors))
    shapes = (size for t in tensors for size in t.local(program.mesh))
    return operator, (*shapes, *program.local_line(instruction).extents.values())
