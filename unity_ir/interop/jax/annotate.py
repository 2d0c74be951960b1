# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Say a plan in annotations for XLA's partitioner: whole arrays, and the sharding of each value."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from unity_ir.interop.jax.lines import DTYPES, compute
from unity_ir.pcg.sharding import SUM
from unity_ir.plan.instructions import Compute, HaloExchange, Leaf, Register, ReshardMove, TimeStep
from unity_ir.plan.program import Program


def annotated(
    program: Program, leaves: dict[Register, Array], sharding: Callable[[Register], NamedSharding]
) -> dict[Register, Array]:
    """
    Compute a training step on whole arrays, and annotate each value with its `sharding`; return the arrays by register,
    given those of inputs and weights. XLA adds the collectives, and decides how.

    A value in partial sums has no annotation: for its sum XLA chooses the place. The program has no micro-batches.
    """
    arrays = dict(leaves)
    for instruction in program.body:
        match instruction:
            case Leaf("constant", result, _, value):
                tensor = program.tensors[result]
                arrays[result] = jnp.full(tensor.shape, value, DTYPES[tensor.dtype])
            case Compute(_, operands, results):
                line = program.analysis(instruction).bound
                made = compute(line, [arrays[r] for r in operands], {})
                for register, array in zip(results, made, strict=True):
                    arrays[register] = _at(program, register, array, sharding)
            case ReshardMove(operand, result) | HaloExchange(operand, result) | TimeStep(operand, result):
                arrays[result] = _at(program, result, arrays[operand], sharding)
            case _:
                pass
    return arrays


def _at(program: Program, register: Register, array: Array, sharding: Callable[[Register], NamedSharding]) -> Array:
    if SUM in program.tensors[register].layout:
        return array
    return jax.lax.with_sharding_constraint(array, sharding(register))
