"""Find the casts of small stored weights that one launch makes at the start of a step, instead of one launch each."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from unity_ir.pcg.sharding import pins
from unity_ir.plan.program import Compute, Leaf, Program, Register

FEWEST = 2
"""Fewest casts to one type that share a launch."""
LARGEST = 2**16
"""
Most elements of a weight whose cast shares a launch. Results are parts of one tensor, which is there until the last is
read; of large ones a step would hold more than by itself.
"""


def shared_casts(program: Program, implementations: Mapping[Compute, str]) -> dict[str, dict[Register, str]]:
    """
    Return, for each element type that weights are cast to by one launch, the names of these weights by the results of
    their casts. `implementations` has `triton` or `torch` of each operator.

    None of a step in micro-batches or stages, whose weights may be cast in some of them only, nor of weights that
    only some ranks have.
    """
    if program.micro_batches > 1 or program.pipeline is not None:
        return {}
    weights = {i.result: i for i in program.body if isinstance(i, Leaf) and i.op == "weight"}
    found: dict[str, dict[Register, str]] = {}
    for each in program.body:
        if not isinstance(each, Compute) or each.operator != "cast" or each.operands[0] not in weights:
            continue
        weight, (result,) = weights[each.operands[0]], each.results
        tensor = program.tensors[result]
        is_small = prod(tensor.local(program.mesh)) <= LARGEST and not tensor.row
        is_plain = not pins(program.tensors[weight.result].layout) and result not in program.in_pieces
        if is_small and is_plain and implementations[each] == "triton":
            key = f"{program.tensors[weight.result].dtype} {tensor.dtype}"
            found.setdefault(key, {})[result] = weight.name
    return {key.split()[1]: those for key, those in found.items() if key.startswith("f32 ") and len(those) >= FEWEST}
