"""
Have readers cast what they read themselves, in their kernels, where that reads and stores fewer bytes.

    y = cast(x: bf16) to f32;  a = f(y);  b = g(y)  ->  a = f(cast(x) to f32);  b = g(cast(x) to f32)

Of a cast to a longer type only the shorter one is stored: in mixed precision the logits of a language model are such an
x, as the loss and its gradient compute in f32. Of a table that is only gathered from, only the rows that are read are
cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unity_ir.forms.kinds import kind
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute, Instruction, Leaf, Register, reads
from unity_ir.plan.program import Program, global_line

IsKernel = Callable[[Compute, Compute], bool]
"""Returns whether a cast and the operator that reads it are one kernel, which stores the operator's results alone."""


def with_own_casts(program: Program, kernels_of: Callable[[Program], IsKernel]) -> tuple[Program, frozenset[Register]]:
    """
    Return the program in which each reader of certain casts has a cast of its own right before it, and the registers
    (numbers of local tensors) that these new casts make.

    Two kinds of casts are split up: a cast to a longer type of a computed value, and a cast of a weight that only
    gathers read. It is done only if every reader can be one kernel with its own cast, and if no reader would get two
    casts. Other casts stay. `kernels_of(program)` is called with the changed program, and returns a function of (cast,
    reader), two operators of it, that says whether they are one kernel (`IsKernel`).
    """
    wanted = _longer(program) | gathered_casts(program)
    if not wanted:
        return program, frozenset()
    candidate, own = _split(program, wanted)
    is_kernel = kernels_of(candidate)
    refused: set[Register] = set()
    for reader in candidate.body:
        if isinstance(reader, Compute):
            casts = [own[register] for register in reader.operands if register in own]
            refused |= {whole for cast, whole in casts if not is_kernel(cast, reader)}
    if refused:
        candidate, own = _split(program, wanted - refused)
    return candidate, frozenset(own)


def _longer(program: Program) -> set[Register]:
    """Return the results of casts to longer types, of what operators make, that only operators read."""
    leaves = {i.result for i in program.body if isinstance(i, Leaf)}
    found = {
        i.results[0]
        for i in program.body
        if isinstance(i, Compute)
        and i.operator == "cast"
        and leaves.isdisjoint(i.operands)
        and _bytes(program, i.results[0]) > _bytes(program, i.operands[0])
    }
    for instruction in program.body:
        those = found.intersection(reads(instruction))
        if not isinstance(instruction, Compute) or len(those) > 1:
            found -= those
    return found.difference(program.outputs)


def gathered_casts(program: Program) -> set[Register]:
    """
    Return the casts of weights that only gathers (such as embedding look-ups) read, each as the register (number of a
    local tensor) of its result. Casts that are outputs of the program are left out.
    """
    weights = {i.result for i in program.body if isinstance(i, Leaf) and i.op == "weight"}
    casts = {
        i.results[0]
        for i in program.body
        if isinstance(i, Compute) and i.operator == "cast" and not weights.isdisjoint(i.operands)
    }
    for instruction in program.body:
        those = casts.intersection(reads(instruction))
        if those and not (isinstance(instruction, Compute) and len(those) == 1 and _gathers(program, instruction)):
            casts -= those
    return casts.difference(program.outputs)


def _gathers(program: Program, instruction: Compute) -> bool:
    read = [program.tensors[r] for r in instruction.operands]
    return kind(global_line(instruction.operator, read, instruction.attributes)) == "gather"


def _bytes(program: Program, register: Register) -> int:
    return ELEMENT_BYTES[program.tensors[register].dtype]


def _split(program: Program, wanted: set[Register]) -> tuple[Program, dict[Register, tuple[Compute, Register]]]:
    """
    Return the program in which every reader of the registers `wanted` has a cast of its own; of the result of each the
    cast, and the register in whose place it is.
    """
    tensors = dict(program.tensors)
    last = max(tensors)
    casts = {i.results[0]: i for i in program.body if isinstance(i, Compute) and i.results[0] in wanted}
    body: list[Instruction] = []
    own: dict[Register, tuple[Compute, Register]] = {}
    for instruction in program.body:
        if not isinstance(instruction, Compute):
            body.append(instruction)
            continue
        if instruction.results[0] in casts:
            continue
        for register in wanted.intersection(instruction.operands):
            mine = last = last + 1
            tensors[mine] = tensors[register]
            cast = replace(casts[register], results=(mine,))
            own[mine] = cast, register
            body.append(cast)
            operands = tuple(mine if r == register else r for r in instruction.operands)
            instruction = replace(instruction, operands=operands)
        body.append(instruction)
    return replace(program, body=tuple(body), tensors=tensors), own
