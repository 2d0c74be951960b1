"""
Fuse into matrix products what follows them alone: the addition of a weight's gradient to that of earlier micro-batches,
or pieces of the loss, in the memory of the total; and, in PyTorch's BLAS, the cast of 16-bit results to float32.

    t = matmul_tn(x, g) bf16;  c = cast(t) f32;  total = accumulate(c)  ->  total += x.T @ g, one kernel

On a GPU a product of a weight's gradient is bound by its arithmetic, so that the total is read meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from unity_ir.forms.compose import AND
from unity_ir.kernels.launchers import can_add, can_store_float32
from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.instructions import Compute, Fused, Instruction, Register, TimeStep, makers_of, makes, reads
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.program import Program
from unity_ir.tdl.element_types import HALVES
from unity_ir.tdl.syntax import Bound

Choice = Callable[[Program, Compute], str]
"""Returns the implementation of an operator or group of a program: `triton`, `torch` or `cudnn`."""


def with_longer_products(program: Program, choice: Choice) -> Program:
    """
    Return the program in which matrix products of 16-bit operands (those that make weights' gradients) store float32
    results themselves: a product and the cast to float32 of its result become one `Fused` instruction, computed by BLAS
    (implementation `torch`).

    It is done for each product whose result only that cast reads and whose implementation is `torch`; `choice` is
    called with the program and an operator of it, and returns the operator's implementation. A product stays as it is
    if its result is stored with padded rows (`padded_rows`), or if the cast runs on other ranks, in other micro-batches
    or in other pieces of the loss. If there is none, returns `program` itself.
    """
    readers = _readers(program)
    made = makers_of(program.body)
    groups: dict[Register, Fused] = {}
    lines: dict[int, Bound | None] = {}
    """The line of a product that stores float32, by the product's number; None for those that do not."""

    def longer(product: Compute) -> Bound | None:
        operator = local_operator(program, product)
        if not can_store_float32(operator.line, operator.dtypes) or choice(program, product) != "torch":
            return None
        (result,) = operator.line.results
        name = AND.join((product.operator, "cast"))
        return replace(operator.line, operator=name, results=(replace(result, dtype="f32"),))

    for cast in program.body:
        product = made.get(cast.operands[0]) if isinstance(cast, Compute) and cast.operator == "cast" else None
        if not isinstance(cast, Compute) or not isinstance(product, Compute) or len(product.results) != 1:
            continue
        before, after = product.results[0], cast.results[0]
        if program.tensors[after].dtype != "f32" or program.tensors[before].row or readers[before] > 1:
            continue
        if isinstance(product, Fused) or not _run_together(program, product, cast):
            continue
        number = program.number(product)
        if number not in lines:
            lines[number] = longer(product)
        line = lines[number]
        if line is None:
            continue
        operands, members = product.operands, (product, cast)
        groups[before] = Fused(
            line.operator, operands, cast.results, (), product.assignment, members, line, implementation="torch"
        )
    if not groups:
        return program
    casts = {group.results[0] for group in groups.values()}
    body: list[Instruction] = []
    for instruction in program.body:
        if isinstance(instruction, Compute) and instruction.results[0] in groups:
            body.append(groups[instruction.results[0]])
        elif not isinstance(instruction, Compute) or instruction.results[0] not in casts:
            body.append(instruction)
    return replace(program, body=tuple(body))


def with_additions(program: Program, choice: Choice) -> Program:
    """
    Return the program in which matrix products add their results to running totals in memory, such as a weight's
    gradient to the sum over earlier micro-batches. An instruction `accumulate` (a `TimeStep`) adds an addend to a
    total. If a product makes the addend, nothing else reads it, and the product's kernel can add to memory, the
    instruction's `is_added` is set: the product's kernel then does the addition.

    `choice` is called with the program and an operator of it, and returns the operator's implementation, which decides
    on the kernel. Addend and total must have the same element type, float32 or longer. An `accumulate` stays as it is
    if it runs in the loop before the main one over micro-batches (`early`), or only in the first or last micro-batch
    (`Program.when`).
    """
    if not any(isinstance(i, TimeStep) for i in program.body):
        return program
    readers = _readers(program)
    made = makers_of(program.body)

    def is_added(step: TimeStep) -> bool:
        product = made.get(step.operand)
        if not isinstance(product, Compute) or len(product.results) != 1 or readers[step.operand] > 1:
            return False
        before, after = program.tensors[step.operand], program.tensors[step.result]
        if before.dtype != after.dtype or before.dtype in HALVES or before.row or before.borders != after.borders:
            return False
        if program.when[step.result] != "every" or not _run_together(program, product, step):
            return False
        operator = local_operator(program, product)
        return can_add(operator.line, operator.dtypes, choice(program, product), operator.divided)

    body = tuple(
        replace(i, is_added=True) if isinstance(i, TimeStep) and i.kind == "accumulate" and is_added(i) else i
        for i in program.body
    )
    return replace(program, body=body)


def _run_together(program: Program, one: Instruction, other: Instruction) -> bool:
    """Return whether two instructions are done by the same ranks, in the same micro-batches and pieces of the loss."""
    (a, *_), (b, *_) = makes(one), makes(other)
    return (
        program.when[a] == program.when[b]
        and program.is_in_pieces(one) == program.is_in_pieces(other)
        and pins_of(program.tensors[a].layout) == pins_of(program.tensors[b].layout)
    )


def _readers(program: Program) -> Counter[Register]:
    """Return how often the program reads each register; twice if it returns it."""
    readers = Counter(r for instruction in program.body for r in reads(instruction))
    for register in program.outputs:
        readers[register] += 2
    return readers
