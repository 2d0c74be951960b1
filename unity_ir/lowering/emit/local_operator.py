"""
Describe an operator at one rank's local shapes, and its key in a tuning table (`machine.tuned`).

The key is made of operator, line, local shapes and element types, so that a table serves every program in which they
occur.
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
    """An operator, or a fused group of operators, at one rank's local shapes."""

    line: Bound
    """The operator's line, bound to the local shapes."""
    dtypes: tuple[str, ...]
    """Element types of the operands."""
    divided: tuple[str, ...]
    """Index variables whose piece may not start at 0, where the line depends on the global index."""
    fused: bool = False
    """Whether it is a group; only single operators are measured."""

    @property
    def key(self) -> str:
        """The key in tuning tables: equal for equal lines over equal shapes and element types."""
        name = launcher(self.line, self.dtypes, "torch", self.divided).name.removesuffix("_torch")
        return f"{name} {' '.join(self.dtypes)}"


def local_operator(program: Program, instruction: Compute) -> LocalOperator:
    """Return the operator that a rank computes for an instruction of its program."""
    local = program.local_line(instruction)
    dtypes = tuple(program.tensors[r].dtype for r in instruction.operands)
    divided = tuple(v for v in dict.fromkeys(instruction.assignment) if isinstance(v, str) and needs_start(local, v))
    return LocalOperator(local, dtypes, divided, isinstance(instruction, Fused))


def priced(program: Program, instruction: Compute) -> Sized:
    """Return the kernel of an instruction as the cost model knows it: name, then sizes (see `cost.work.kernel_of`)."""
    tensors = [program.tensors[r] for r in instruction.operands]
    operator = kernel_operator(instruction.operator, instruction.attributes, tuple(t.dtype for t in tensors))
    shapes = (size for t in tensors for size in t.local(program.mesh))
    return operator, (*shapes, *program.local_line(instruction).extents.values())
