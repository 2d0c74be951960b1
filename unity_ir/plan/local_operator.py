"""
Describe an operator at one rank's local shapes, and its key in a tuning table (`machine.tuned`).

The key is made of operator, line, local shapes and element types, so that a table serves every program in which they
occur.
"""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.forms.windows import needs_start
from unity_ir.kernels.launchers import launcher
from unity_ir.plan.instructions import Compute, Fused
from unity_ir.plan.program import Program
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
        """
        The operator's key in tables of tuned kernels (`machine.tuned`): equal for equal TDL lines over equal local
        shapes and element types.
        """
        name = launcher(self.line, self.dtypes, "torch", self.divided).name.removesuffix("_torch")
        return f"{name} {' '.join(self.dtypes)}"


def local_operator(program: Program, instruction: Compute) -> LocalOperator:
    """
    Return the operator, or fused group of operators, of an instruction: its TDL line at the shapes of one rank's
    pieces, and its operands' element types.
    """
    local = program.local_line(instruction)
    dtypes = tuple(program.tensors[r].dtype for r in instruction.operands)
    divided = tuple(v for v in dict.fromkeys(instruction.assignment) if isinstance(v, str) and needs_start(local, v))
    return LocalOperator(local, dtypes, divided, isinstance(instruction, Fused))
