"""Name the values of a rank's program as the text of its graph does, and tell its forward from its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    TimeStep,
    UpdateWeight,
    ValueMove,
    makes,
    reads,
)
from unity_ir.plan.program import Program


def value_names(program: Program) -> Mapping[Register, str]:
    """
    Return the name of the value in each register of a program, as the graph's text names it: for a weight or input its
    own name, for a result of an operator the operator's kind and number (`matmul0`, `relu0`, `matmul1`).

    The result of a move has the name of the value that is moved. If a weight's only reader is a cast (mixed precision),
    the cast weight has the weight's name.
    """
    counts: Counter[str] = Counter()
    found: dict[Register, str] = {}
    masters: set[Register] = set()
    readers = Counter(r for i in program.body if not isinstance(i, UpdateWeight) for r in reads(i))
    for instruction in program.body:
        match instruction:
            case Leaf():
                found[instruction.result] = instruction.name or f"constant {instruction.value:g}"
                if instruction.op == "weight":
                    masters.add(instruction.result)
            case Compute("cast", (operand,), (result,)) if operand in masters and readers[operand] == 1:
                found[result] = found[operand]
            case Compute(operator):
                name = f"{operator}{counts[operator]}"
                counts[operator] += 1
                found.update(dict.fromkeys(instruction.results, name))
            case ReshardMove(operand, result) | HaloExchange(operand, result) | TimeStep(operand, result):
                found[result] = found[operand]
            case ValueMove(operand, result):
                found[result] = found[operand]
            case UpdateWeight() | StateMove():
                pass
    return found


def forward_and_backward(program: Program) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """
    Divide a program's instructions into (forward, backward), both in order. The forward is what the program's outputs
    (the loss, next values of running statistics) depend on; the backward is all the rest, without the updates.
    """
    wanted = {*program.outputs}
    forward: list[Instruction] = []
    backward: list[Instruction] = []
    for instruction in reversed(program.body):
        if not wanted.isdisjoint(makes(instruction)):
            wanted.update(reads(instruction))
            forward.append(instruction)
        elif not isinstance(instruction, UpdateWeight | StateMove):
            backward.append(instruction)
    return tuple(reversed(forward)), tuple(reversed(backward))


def gradients(program: Program) -> Mapping[str, Register]:
    """
    Return, by the name of each weight that the program updates, the register of its gradient, which has the weight's
    layout.
    """
    weights = {leaf.result: leaf.name for leaf in program.leaves("weight")}
    return {weights[i.weight]: i.grad for i in program.body if isinstance(i, UpdateWeight)}
