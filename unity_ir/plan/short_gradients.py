"""
Have updates read gradients in the type in which they were made, where a kernel would only cast them.

    g = conv2d_weight_grad(..): bf16;  h = cast(g) to f32;  update(w, h)  ->  update(w, g)

A convolution's gradient by cuDNN is stored in 16 bits. Each of its numbers is one of the longer type, too, so the
update computes the same, and reads 2 bytes an element, where cast and update together move 10. (Products make float32
at once: `plan.additions`.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from unity_ir.pcg.sharding import pins_of
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute, Register, UpdateWeight, reads
from unity_ir.plan.program import Program


def with_short_gradients(program: Program) -> Program:
    """
    Return the program in which updates of weights read gradients in the shorter type in which they were made: a cast to
    a longer type goes away if only an update reads its result, and the update reads the cast's operand.

    Casts stay for weights that are pinned (on some of the ranks only), since all ranks exchange gradients in one
    element type when a program runs with `--check`, and for operands that are stored with padded rows or channels last,
    which updates cannot read.
    """
    readers = Counter(r for instruction in program.body for r in reads(instruction))
    updated = {i.grad for i in program.body if isinstance(i, UpdateWeight)}
    short: dict[Register, Register] = {}
    for instruction in program.body:
        match instruction:
            case Compute("cast", (operand,), (result,)) if (
                result in updated
                and readers[result] == 1
                and result not in program.outputs
                and _is_longer(program, result, operand)
                and not pins_of(program.tensors[result].layout)
                and not program.tensors[operand].row
                and not program.tensors[operand].is_channels_last
            ):
                short[result] = operand
            case _:
                pass
    body = (
        replace(i, grad=short.get(i.grad, i.grad)) if isinstance(i, UpdateWeight) else i
        for i in program.body
        if not (isinstance(i, Compute) and i.results[0] in short)
    )
    return replace(program, body=tuple(body))


def _is_longer(program: Program, result: Register, operand: Register) -> bool:
    return ELEMENT_BYTES[program.tensors[result].dtype] > ELEMENT_BYTES[program.tensors[operand].dtype]
