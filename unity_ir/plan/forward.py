"""
Take the forward out of a training step, for evaluation: the same tensors and layouts, without dropout, and with batch
norms by their running statistics.
"""

from __future__ import annotations

import re
from dataclasses import replace

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.ops import operator
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.node import leaf
from unity_ir.pcg.sharding import REPEAT, Layout, assignment_for
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.host_values import without_values_at_host
from unity_ir.plan.instructions import (
    Compute,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    Tensor,
    TimeStep,
    equal_registers,
    makers_of,
    makes,
    reads,
)
from unity_ir.plan.moves import plan_moves
from unity_ir.plan.program import Program, global_line, running_statistic

_DRAWN = re.compile(r"\blt\(philox\([^;]*?\), (\w+)\)")
"""How the line of an operator drops elements with a probability, an attribute."""


def forward_of(program: Program, machine: Machine) -> Program:
    """
    Return the program that evaluates the loss of a training step: the instructions that the loss depends on, in order,
    without an optimizer. `program` is the step, before operators are fused.

    Dropout gets probability 0. A batch norm whose running statistics the step updates normalises by these
    (`running_batch_norm`); they are resharded by the cheapest moves on `machine`. If the loss is a mean over a number
    of labels that differs from batch to batch (`ignore_index`), that number is a second output. Values that the step
    computes twice, rather than keep them for the backward (ZeRO-3), are made anew in every micro-batch here, too.

    Raises `UnityError` for an operator other than dropout that draws random numbers, and for running statistics that no
    batch norm of the step reads.
    """
    program, _ = without_values_at_host(program)
    program = _ByRunningStatistics(program, machine).program()
    count = _count(program)
    outputs = program.outputs[:1] if count is None else (program.outputs[0], count)
    wanted = {*outputs}
    kept: list[Instruction] = []
    for instruction in reversed(program.body):
        if not wanted.isdisjoint(makes(instruction)):
            wanted.update(reads(instruction))
            kept.append(_without_dropout(instruction) if isinstance(instruction, Compute) else instruction)
    anew = frozenset(equal_registers(program.body) & wanted)
    body, casts_alone = tuple(reversed(kept)), bool(program.state_at_host)
    return replace(program, body=body, outputs=outputs, optimizer=None, anew=anew, casts_alone=casts_alone)


def _count(program: Program) -> Register | None:
    """
    Return the number of labels that the loss of a step is the mean over, in a register of the whole batch, where that
    differs from batch to batch: the divisor of the loss, if it counts conditions, as `ignore_index` makes it; None of
    another loss.
    """
    made = makers_of(program.body)

    def source(register: Register) -> Instruction | None:
        """Return what makes a register, but for moves, casts from numbers, and steps in time."""
        while True:
            match made.get(register):
                case ReshardMove(operand) | TimeStep(operand) | Compute("cast", (operand,)):
                    if program.tensors[operand].dtype == "bool":
                        return made[register]
                    register = operand
                case other:
                    return other

    match source(program.outputs[0]):
        case Compute("div", (_, divisor)) if not program.tensors[divisor].shape:
            summed = source(divisor)
        case _:
            return None
    while isinstance(summed, Compute) and summed.operator == "reduce_sum":
        summed = source(summed.operands[0])
    if not isinstance(summed, Compute) or program.tensors[summed.operands[0]].dtype != "bool":
        return None
    # Out of the loop over micro-batches, where it is that of all of them.
    while isinstance(step := made[divisor], TimeStep | ReshardMove) and not _is_whole(program, divisor):
        divisor = step.operand
    return divisor


def _is_whole(program: Program, register: Register) -> bool:
    """Return whether a register is made once in a step, not in every micro-batch."""
    return program.micro_batches == 1 or program.tensors[register].layout[-1] == REPEAT


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


class _ByRunningStatistics:
    """
    Replaces the batch norms of a step by `running_batch_norm` where the step keeps running statistics.

    rewrite: batch_norm(x, *batch_stats(x, c), c, w, b) -> running_batch_norm(x, mean, var, w, b),
             where the step has running_stats(mean, var, *batch_stats(x, c), c)
    """

    def __init__(self, step: Program, machine: Machine):
        self.step = step
        self.machine = machine
        self.made = makers_of(step.body)
        self.tensors = dict(step.tensors)
        self.body: list[Instruction] = []

    def program(self) -> Program:
        kept: dict[Register, tuple[Leaf, ...]] = {}
        for instruction in self.step.body:
            if isinstance(instruction, Compute) and instruction.operator == "running_stats":
                found = (running_statistic(self.made, r) for r in instruction.results)
                kept[self._source(instruction.operands[2])] = tuple(each.leaf for each in found if each is not None)
        unused = dict.fromkeys(kept)
        # The step may not read them before it has normalised.
        first = dict.fromkeys(each for leaves in kept.values() for each in leaves)
        self.body += first
        for instruction in self.step.body:
            if instruction in first:
                continue
            source = None
            if isinstance(instruction, Compute) and instruction.operator == "batch_norm":
                source = self._source(instruction.operands[1])
            if isinstance(instruction, Compute) and source in kept:
                unused.pop(source, None)
                self._evaluated(instruction, kept[source])
            else:
                self.body.append(instruction)
        if unused:
            name = next(each.name for leaves in kept.values() for each in leaves)
            raise UnityError(f"triton: evaluate: no batch norm has the running statistic {name!a}; leave evaluate out")
        return replace(self.step, tensors=self.tensors, body=tuple(self.body))

    def _source(self, register: Register) -> Register:
        """Return the register of which moves and casts make this one."""
        while True:
            match self.made.get(register):
                case ReshardMove(operand) | Compute("cast", (operand,)):
                    register = operand
                case _:
                    return register

    def _evaluated(self, norm: Compute, statistics: tuple[Leaf, ...]) -> None:
        """Append a batch norm by running statistics, in place of one by those of the batch."""
        x, _, square, center, w, b = norm.operands
        dtype = self.tensors[x].dtype
        read: list[Register] = []
        for each, of_batch in zip(statistics, (center, square), strict=True):
            # Where the batch's is, whose channels are its second dim.
            layout = tuple(0 if role == 1 else role for role in self.tensors[of_batch].layout)
            read.append(self._cast(self._moved(each.result, layout), dtype))
        self._compute("running_batch_norm", (x, *read, w, b), norm.results[0], norm.attributes)

    def _compute(self, operator: str, operands: tuple[Register, ...], result: Register, attributes: Attributes) -> None:
        """Append an operator, divided as the layouts of its operands and of its result say."""
        analysis = global_line(operator, [self.tensors[r] for r in operands], attributes)
        layouts = [self.tensors[r].layout for r in operands]
        assignment = assignment_for(analysis, layouts, self.tensors[result].layout)
        assert assignment is not None, f"{operator} of {layouts}"
        self.body.append(Compute(operator, operands, (result,), attributes, assignment))

    def _moved(self, register: Register, target: Layout) -> Register:
        """Return the register of a statistic in a layout; append the moves to it."""
        tensor = self.tensors[register]
        value = leaf("input", tensor_type(tensor.shape, tensor.dtype), name="statistic").result
        at = tensor.layout
        for move in plan_moves(value, at, target, self.machine):
            at = move.after(at, self.machine.mesh)
            made = self._register(replace(tensor, layout=at))
            self.body.append(ReshardMove(register, made, move.kind, move.axes, move.source, move.target))
            register = made
        return register

    def _cast(self, register: Register, dtype: str) -> Register:
        tensor = self.tensors[register]
        if tensor.dtype == dtype:
            return register
        made = self._register(replace(tensor, dtype=dtype))
        self._compute("cast", (register,), made, (("to", dtype),))
        return made

    def _register(self, tensor: Tensor) -> Register:
        register = len(self.tensors)
        self.tensors[register] = tensor
        return register
