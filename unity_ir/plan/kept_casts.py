"""
Keep the casts of weights from step to step: the optimizer's update writes them with the weights.

    c = cast(w: f32) to bf16;  ..;  update(w, g)  ->  c = cast of w, kept;  ..;  update(w, g, c)

In mixed precision a weight rests in f32, and a step computes with its cast. An update has the new weight in registers:
to write its cast there takes 2 bytes an element, where a kernel at the beginning of the next step takes 6 and a launch.
The cast rests in the weight's pieces, so what a step gathers, and in which type, does not change. It is held throughout
(`cost.memory` always counts it so), and made from the weight wherever that is set in another way: initially, and from
files. No file holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import replace

from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute, Instruction, Leaf, Register, UpdateWeight
from unity_ir.plan.own_casts import gathered_casts
from unity_ir.plan.program import Program


def with_kept_casts(program: Program, gathers_cast: bool) -> Program:
    """
    Return the program that keeps casts of weights to shorter types from step to step: the cast becomes a leaf
    (`Leaf.op` is `cast`), and the weight's `UpdateWeight` writes it. It is done for each weight that has exactly one
    cast, in the same layout as the weight, if the cast is no output of the program.

    With `gathers_cast`, a cast that only gathers (embedding look-ups) read is not kept, since the gathers' kernels then
    cast the rows that they read (`plan.own_casts`).
    """
    casts = _casts(program, gathered_casts(program) if gathers_cast else frozenset())
    names = {leaf.result: leaf.name for leaf in program.leaves("weight")}
    body: list[Instruction] = []
    for instruction in program.body:
        match instruction:
            case Compute("cast", (weight,), (result,)) if casts.get(weight) == result:
                body.append(Leaf("cast", result, names[weight]))
            case UpdateWeight(weight):
                body.append(replace(instruction, cast=casts.get(weight)))
            case _:
                body.append(instruction)
    return replace(program, body=tuple(body))


def _casts(program: Program, others: AbstractSet[Register]) -> dict[Register, Register]:
    """Return the only cast of each weight that has one, to a shorter type and not among `others`, by the weight."""
    weights = {leaf.result for leaf in program.leaves("weight")}
    made = [
        (i.operands[0], i.results[0])
        for i in program.body
        if isinstance(i, Compute) and i.operator == "cast" and i.operands[0] in weights
    ]
    count = Counter(weight for weight, _ in made)
    return {
        weight: cast
        for weight, cast in made
        if count[weight] == 1 and cast not in (*others, *program.outputs) and _is_shorter(program, cast, weight)
    }


def _is_shorter(program: Program, cast: Register, weight: Register) -> bool:
    """Return whether a cast has fewer bytes an element than the weight, and the same pieces."""
    after, before = program.tensors[cast], program.tensors[weight]
    return after.layout == before.layout and ELEMENT_BYTES[after.dtype] < ELEMENT_BYTES[before.dtype]
