"""Take the forward out of a training step, for evaluation: the same tensors and layouts, without dropout."""

from __future__ import annotations

import re
from dataclasses import replace

from unity_ir.errors import UnityError
from unity_ir.ops import operator
from unity_ir.plan.program import Compute, Instruction, Program, made_twice, makes, reads

_DRAWN = re.compile(r"\blt\(philox\([^;]*?\), (\w+)\)")
"""How the line of an operator drops elements with a probability, an attribute."""


def forward_of(program: Program) -> Program:
    """
    Return the instructions of a step, before operators are fused, that its loss depends on, in order; dropout is off.

    What a step makes twice, since it does not keep it for the backward (ZeRO-3), is made anew in every micro-batch
    here, too. Raises `UnityError` for an operator that draws numbers in another way than dropout does.
    """
    wanted = {*program.outputs[:1]}
    kept: list[Instruction] = []
    for instruction in reversed(program.body):
        if not wanted.isdisjoint(makes(instruction)):
            wanted.update(reads(instruction))
            kept.append(_without_dropout(instruction) if isinstance(instruction, Compute) else instruction)
    anew = frozenset(made_twice(program.body) & wanted)
    return replace(program, body=tuple(reversed(kept)), outputs=program.outputs[:1], optimizer=None, anew=anew)


def _without_dropout(compute: Compute) -> Compute:
    """Return an operator with the probability 0 of dropping an element; one that drops none as it is."""
    line = operator(compute.operator).line
    if "philox" not in line.text:
        return compute
    found = _DRAWN.findall(line.text)
    if len(found) != 1 or found[0] not in dict(compute.attributes):
        raise UnityError(
            f"triton: evaluate: pcg.{compute.operator} draws random numbers, which evaluation must not; "
            "leave evaluate out"
        )
    attributes = ((n, 0.0 if n == found[0] else v) for n, v in compute.attributes)
    return replace(compute, attributes=tuple(attributes))
