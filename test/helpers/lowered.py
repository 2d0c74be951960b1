"""Which operators have kernels, what these are called, and which operands have no gradient."""

from unity_ir.kernels.launchers import launcher
from unity_ir.ops import operators
from unity_ir.plan.instructions import Compute
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.plan import Plan

WITHOUT_GRADIENT = {
    **dict.fromkeys(("detach", "floor", "sign", "batch_mean"), (0,)),
    "batch_stats": (1,),
    "batch_norm": (3,),
}
"""Floating point operands whose gradient is zero everywhere, or is kept back."""

LOWERED = list(operators())


def kernel_name(plan: Plan, compute: Compute) -> str:
    """The name of the function that launches an operator of a plan, in the program's text."""
    operator = local_operator(plan.program, compute)
    adds = compute.results[0] in plan.program.added
    return launcher(operator.line, operator.dtypes, plan.implementations[compute], operator.divided, adds).name
