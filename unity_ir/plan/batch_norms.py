"""
Have batch norms' backwards read each sample twice, once for the sums over the batch and once for the gradient.

    g = relu_grad(y, relu(batch_norm(x, ..)))                     # three passes over tensors of samples
    dx, dshift, dsquare, dw, db = batch_norm_grad(g, x, ..)       # five, or four if a channel's samples fit a program
    d = add(dx, batch_stats_grad(dshift, dsquare, x, ..))         # three

    ->  dw, db = relu_grad + batch_norm_weight_grad(y, x, ..)     # two
        d = relu_grad + batch_norm_data_grad(y, x, .., dw, db)    # three

relu's mask is computed from `x` again, in both kernels. Where a channel's samples fit a program, both are one kernel,
which makes three passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from unity_ir.plan.instructions import Compute, Instruction, Register, Tensor, makes, reads
from unity_ir.plan.program import Program
from unity_ir.plan.saved_softmax import attributes_of_variant

AreKernels = Callable[[Sequence[Compute]], bool]
"""Returns whether consecutive operators are one kernel, which stores what others read alone."""


@dataclass(frozen=True, slots=True)
class _Backward:
    """The operators of a batch norm's backward, with their places in the program."""

    grad: Compute
    stats_grad: Compute
    total: Compute
    """The sum of the two gradients of the samples, or of `partial` and that of their statistics."""
    partial: Compute | None
    """The sum of another gradient of the samples and that of the batch norm, if the total is of three."""
    masked: tuple[Compute, Compute, Compute] | None
    """
    The batch norm, the relu of its result and the gradient of that, whose result only `grad` reads; None if another
    operator makes what it reads.
    """


def with_batch_norms(
    program: Program, kernels_of: Callable[[Program], AreKernels]
) -> tuple[Program, dict[Register, int]]:
    """
    Return the program in which backwards of batch norms over one group of samples are two operators, the gradients of
    weight and bias and that of the samples, after copies of relu and its gradient where these join their kernels; and
    the groups that are known to be one kernel, each as the first operator's result and its number of operators, which
    are consecutive.

    It is done where the statistics' gradients need no move, as of a batch on one device, and are read by nothing else.
    `kernels_of(program)` is called with candidates, and returns a function of operators in it (`AreKernels`).
    """
    if not (found := _backwards(program)):
        return program, {}
    known: dict[Register, int] = {}
    for is_one in (True, False):
        # What does not fit the first form may fit the next; all can be two operators without copies.
        tried = [b for b in found if is_one or b.masked is not None]
        candidate, groups = _replaced(program, tried, is_one, masks=True)
        are_kernels = kernels_of(candidate)
        fits = [b for b in tried if all(map(are_kernels, groups[b.total.results[0]]))]
        program, groups = _replaced(program, fits, is_one, masks=True)
        those = (group for b in fits if is_one or b.masked for group in groups[b.total.results[0]])
        known |= {group[0].results[0]: len(group) for group in those}
        found = [b for b in found if b not in fits]
    return _replaced(program, found, is_one=False, masks=False)[0], known


def _backwards(program: Program) -> list[_Backward]:
    """Return the backwards of batch norms over one group, the gradients of whose statistics need no move."""
    makers = {r: i for i in program.body for r in makes(i)}
    readers: dict[Register, list[Instruction]] = {}
    for instruction in program.body:
        for register in reads(instruction):
            readers.setdefault(register, []).append(instruction)
    outputs = {*program.outputs}

    def only_reader(registers: Sequence[Register], operator: str) -> Compute | None:
        """Return the only instruction that reads each of the registers, if that is an operator of this name."""
        reader = readers.get(registers[0], [None])[0]
        if not isinstance(reader, Compute) or reader.operator != operator or not outputs.isdisjoint(registers):
            return None
        return reader if all(readers.get(r) == [reader] for r in registers) else None

    found: list[_Backward] = []
    for grad in program.body:
        if not isinstance(grad, Compute) or grad.operator != "batch_norm_grad":
            continue
        dx, *of_stats, _, _ = grad.results
        _, x, shift, _, center, _ = grad.operands
        stats_grad = only_reader(of_stats, "batch_stats_grad")
        if stats_grad is None or stats_grad.operands != (*of_stats, x, center):
            continue
        total, partial = only_reader(stats_grad.results, "add"), only_reader([dx], "add")
        if total is None or partial is None or program.tensors[shift].shape[0] != 1:
            continue
        if total is not partial and only_reader(partial.results, "add") is not total:
            continue
        if _are_alike(program, [*partial.operands, *total.operands, *total.results]):
            other = partial if total is not partial else None
            found.append(_Backward(grad, stats_grad, total, other, _masked(grad, makers, readers)))
    return found


def _are_alike(program: Program, registers: Sequence[Register]) -> bool:
    """Return whether tensors have the same type and layout."""
    return len({program.tensors[r] for r in registers}) == 1


def _masked(
    grad: Compute, makers: Mapping[Register, Instruction], readers: Mapping[Register, Sequence[Instruction]]
) -> tuple[Compute, Compute, Compute] | None:
    """Return the batch norm, its relu and the gradient of that, if a batch norm's backward alone reads the last."""
    mask = makers[grad.operands[0]]
    if not isinstance(mask, Compute) or mask.operator != "relu_grad" or readers[mask.results[0]] != [grad]:
        return None
    relu = makers[mask.operands[1]]
    if not isinstance(relu, Compute) or relu.operator != "relu":
        return None
    norm = makers[relu.operands[0]]
    if not isinstance(norm, Compute) or norm.operator != "batch_norm" or norm.operands[:5] != grad.operands[1:]:
        return None
    return norm, relu, mask


def _replaced(
    program: Program, those: Sequence[_Backward], is_one: bool, masks: bool
) -> tuple[Program, dict[Register, list[list[Compute]]]]:
    """
    Return the program with backwards of batch norms replaced by two operators, and, by the register of each whole
    gradient, the groups of operators that are to be kernels: one with `is_one`, else two. With `masks` each group has
    copies of the batch norm, its relu and the gradient of that.
    """
    tensors = dict(program.tensors)
    gone = [
        *(b.stats_grad for b in those),
        *(b.partial for b in those if b.partial is not None),
        *(b.masked[2] for b in those if b.masked is not None and masks),
    ]
    removed = {r for each in gone for r in each.results}
    by_grad = {b.grad.results: b for b in those}
    late: dict[tuple[Register, ...], list[Compute]] = {}
    groups: dict[Register, list[list[Compute]]] = {}
    body: list[Instruction] = []
    for instruction in program.body:
        if not removed.isdisjoint(makes(instruction)):
            continue
        backward = by_grad.get(instruction.results) if isinstance(instruction, Compute) else None
        if backward is not None:
            weight, data = _operators(backward)
            before = [*(backward.masked or ())] if masks else []
            first, y = _copies(before, tensors, weight.operands[0])
            second, y_again = (first, y) if is_one else _copies(before, tensors, weight.operands[0])
            weight = replace(weight, operands=(y, *weight.operands[1:]))
            data = replace(data, operands=(y_again, *data.operands[1:]))
            whole = [[*first, weight, data]] if is_one else [[*first, weight], [*second, data]]
            groups[backward.total.results[0]] = whole
            body += whole[0]
            late[backward.total.results] = [*([] if is_one else whole[1]), *_last(backward)]
        elif isinstance(instruction, Compute) and instruction.results in late:
            body += late[instruction.results]
        else:
            body.append(instruction)
    return replace(program, body=tuple(body), tensors=tensors), groups


def _operators(backward: _Backward) -> tuple[Compute, Compute]:
    """Return the gradient of weight and bias, and the whole gradient of the samples."""
    grad = backward.grad
    y, x, *statistics, _ = grad.operands
    weights = grad.results[3:]
    name, attributes = "batch_norm_weight_grad", grad.attributes
    weight = Compute(*(name, (y, x, *statistics), weights, attributes_of_variant(name, attributes), grad.assignment))
    name = "batch_norm_data_grad"
    operands = (*grad.operands, *weights)
    results = backward.total.results if backward.partial is None else grad.results[:1]
    data = Compute(*(name, operands, results, attributes_of_variant(name, attributes), grad.assignment))
    return weight, data


def _last(backward: _Backward) -> list[Compute]:
    """Return the operator that adds another gradient of the samples, if there is one."""
    if backward.partial is None:
        return []
    dx = backward.grad.results[0]
    (other,) = (r for r in backward.partial.operands if r != dx)
    return [replace(backward.total, operands=(other, dx))]


def _copies(
    those: Sequence[Compute], tensors: dict[Register, Tensor], last: Register
) -> tuple[list[Compute], Register]:
    """
    Return copies of operators, each of which reads the one before, with results of their own, which are added to
    `tensors`; and the register of the last result: `last` if there are none.
    """
    new: dict[Register, Register] = {}
    copies: list[Compute] = []
    for each in those:
        result = each.results[0]
        new[result] = max(tensors) + 1
        tensors[new[result]] = tensors[result]
        operands = tuple(new.get(r, r) for r in each.operands)
        copies.append(replace(each, operands=operands, results=(new[result],)))
    return copies, new.get(those[-1].results[0], last) if those else last
