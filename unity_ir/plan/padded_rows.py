"""
Pad the rows of tensors that matrix products read or make, and whose rows would not begin at aligned addresses.

A vocabulary of 30,522 words makes rows of logits of 61,044 bytes. Copies to shared memory need addresses that are
multiples of 16 bytes; without, the weight's gradient of BERT-Large's head takes cuBLAS 3.8 ms instead of 2.1 ms on an
H100 (bench/results/gpu.json). So such rows are stored with up to 63 elements more, that nobody reads. What is padded
is a tensor of 16-bit numbers within one rank's step, made and read by kernels that take any stride. Weights, and what
moves make, have no padding; large products read a padded copy of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unity_ir.errors import UnityError
from unity_ir.forms.classify import is_product_or_convolution
from unity_ir.forms.contraction import contraction
from unity_ir.forms.rewrite import simplified
from unity_ir.forms.stored import can_be_padded
from unity_ir.kernels.launchers import launcher
from unity_ir.pcg.sharding import assignment_for
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute, Instruction, Register, ReshardMove, makes, reading, reads
from unity_ir.plan.local_operator import LocalOperator, local_operator
from unity_ir.plan.program import Program, global_line
from unity_ir.tdl.element_types import HALVES

ALIGNED = 16
"""Bytes of an asynchronous copy to shared memory, and of what a tensor descriptor's strides are multiples."""
ROW = 64
"""A padded row has a multiple of so many elements: a cache line of 16-bit numbers."""
FEWEST = 256
"""Fewest elements of a row that is worth it."""
WORTH_A_COPY = 1024
"""
Least rows, columns and summed elements of a product for which an operand is copied to padded rows. To copy an element
takes an H100 some 1.3 ps; without, each product that reads it takes 9 ps more for 1,024 operations.
"""
KINDS = ("elements", "rows", "columns", "product")
"""Kinds of kernels (`LaunchWork.kind`) that compute every address from the line's strides."""

Choice = Callable[[LocalOperator], str]
"""Returns the implementation of an operator: `triton` or `torch`."""


def with_padded_rows(program: Program, choice: Choice) -> Program:
    """
    Return the program in which matrices whose rows would not begin at multiples of 16 bytes are stored with longer
    rows, whose last elements nobody reads: `Tensor.row` is set to the elements of a row as stored, a multiple of `ROW`.
    It is set on 16-bit tensors that a matrix product reads or makes. It is not set on an output, nor where a kernel
    that makes or reads the tensor cannot take padded rows.

    `choice` returns the implementation, `triton` or `torch`, of an operator.
    """
    wanted = [r for r, t in program.tensors.items() if t.dtype in HALVES and not t.row and _is_unaligned(program, r)]
    if not wanted:
        return program
    uses: dict[Register, list[Compute | None]] = {r: [] for r in wanted}
    for instruction in program.body:
        for register in uses.keys() & {*makes(instruction), *reads(instruction)}:
            uses[register].append(instruction if isinstance(instruction, Compute) else None)
    tensors = dict(program.tensors)
    for register, those in uses.items():
        if register in program.outputs or not all(u and _takes(program, u, register, choice) for u in those):
            continue
        if any(u and _is_matrix(program, u, register) for u in those):
            tensors[register] = replace(tensors[register], row=_padded(program, register))
    return replace(program, tensors=tensors)


def with_padded_copies(program: Program, choice: Choice) -> Program:
    """
    Return the program in which weights, and matrices that moves make, whose rows do not begin at multiples of 16 bytes
    are copied to padded rows for large products (`WORTH_A_COPY`), by a cast to the type that they have. The other
    operators that can read padded rows read the copy, too, so that what a move made can be freed.

        y = move(x);  a = matmul(y, w);  b = sum(y)  ->  y = move(x);  z = cast(y);  a = matmul(z, w);  b = sum(z)

    `choice` is as of `with_padded_rows`.
    """
    given = [i.result for i in program.body if isinstance(i, ReshardMove)]
    given += [i.result for op in ("weight", "cast") for i in program.leaves(op)]
    wanted = {r for r in given if program.tensors[r].dtype in HALVES and _is_unaligned(program, r)}
    tensors = dict(program.tensors)
    copies: dict[Register, Compute] = {}
    takers: dict[Register, list[Compute]] = {}
    for register in sorted(wanted):
        uses = [i for i in program.body if isinstance(i, Compute) and register in i.operands]
        takers[register] = [i for i in uses if _takes(program, i, register, choice)]
        copy = copy_of(program, register, max(tensors) + 1)
        if copy is None or not any(_is_matrix(program, i, register, WORTH_A_COPY) for i in takers[register]):
            continue
        (made,) = copy.results
        tensors[made] = replace(tensors[register], row=_padded(program, register))
        if _takes(replace(program, tensors=tensors), copy, made, choice):
            copies[register] = copy
    if not copies:
        return program
    body: list[Instruction] = []
    copied: dict[Register, Register] = {}
    for instruction in program.body:
        those = [r for r in copies if instruction in takers[r]]
        body += [copies[r] for r in those if r not in copied]
        copied |= {r: copies[r].results[0] for r in those}
        body.append(reading(instruction, {r: copied[r] for r in those}))
    return replace(program, tensors=tensors, body=tuple(body))


def copy_of(program: Program, register: Register, result: Register) -> Compute | None:
    """
    Return an instruction that copies a tensor to the register `result`, which may be stored in another way: a cast to
    the type that it has. None if no layout's rule allows one.
    """
    tensor = program.tensors[register]
    to = (("to", tensor.dtype),)
    assignment = assignment_for(global_line("cast", [tensor], to), [tensor.layout], tensor.layout)
    return None if assignment is None else Compute("cast", (register,), (result,), to, assignment)


def _padded(program: Program, register: Register) -> int:
    """Return the elements of a padded row."""
    return -(-program.tensors[register].local(program.mesh)[-1] // ROW) * ROW


def _is_unaligned(program: Program, register: Register) -> bool:
    """Return whether rows of a tensor begin at addresses of which asynchronous copies take none."""
    tensor = program.tensors[register]
    if tensor.is_channels_last:
        return False  # its rows are of channels
    shape, size = tensor.local(program.mesh), ELEMENT_BYTES[tensor.dtype]
    return len(shape) > 1 and shape[-1] >= FEWEST and shape[-1] * size % ALIGNED != 0


def _takes(program: Program, use: Compute, register: Register, choice: Choice) -> bool:
    """Return whether the kernels of an operator can make and read a tensor with padded rows."""
    operator = local_operator(program, use)
    line = operator.line
    size = program.tensors[register].local(program.mesh)[-1]
    named = zip((*line.operands, *line.results), (*use.operands, *use.results), strict=True)
    if not all(can_be_padded(line, p.name, size) for p, r in named if r == register):
        return False
    if choice(operator) == "torch":
        # PyTorch's products read any stride; others may make results like their operands.
        return register in use.operands and all(is_product_or_convolution(r, line.extents) for r in line.results)
    try:
        made = launcher(line, operator.dtypes, "triton", operator.divided)
    except UnityError:
        return False
    return bool(made.work) and all(each.kind in KINDS for each in made.work)


def _is_matrix(program: Program, use: Compute, register: Register, least: int = 1) -> bool:
    """
    Return whether a tensor is a factor or the result of an operator's matrix product that has at least `least` rows,
    columns and summed elements.
    """
    operator = local_operator(program, use)
    line = simplified(operator.line, {})
    found = [(r, c) for r in line.results if (c := contraction(r, line.extents)) is not None]
    named = zip((*line.operands, *line.results), (*use.operands, *use.results), strict=True)
    names = {p.name for p, r in named if r == register}
    large = ((made, of) for made, of in found if min(of.sizes[d] for d in "mnk") >= least)
    return any(not names.isdisjoint((of.x, of.w, made.name)) for made, of in large)
