"""Name the values of a rank's program as the text of its graph does, and tell its forward from its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unity_ir.plan.program import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    Program,
    Register,
    ReshardMove,
    TimeStep,
    UpdateWeight,
    makes,
    reads,
)


def value_names(program: Program) -> Mapping[Register, str]:
    """
    Return the name of the value in each register: that of a weight or input, or of an operator with its number among
    those of its kind (`matmul0`, `relu0`, `matmul1`), as the graph's text has them. What a move makes is named as what
    it moves, and the cast of a weight that is stored in a longer type as the weight.
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
            case UpdateWeight():
                pass
    return found


def forward_and_backward(program: Program) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """
    Return (forward, backward): the instructions that the program's outputs (the loss, next values of running
    statistics) depend on, and all others but the updates, both in order.
    """
    wanted = {*program.outputs}
    forward: list[Instruction] = []
    backward: list[Instruction] = []
    for instruction in reversed(program.body):
        if not wanted.isdisjoint(makes(instruction)):
            wanted.update(reads(instruction))
            forward.append(instruction)
        elif not isinstance(instruction, UpdateWeight):
            backward.append(instruction)
    return tuple(reversed(forward)), tuple(reversed(backward))


def gradients(program: Program) -> Mapping[str, Register]:
    """
    Return the register of each weight's gradient, in the weight's own layout, by the weight's name; only of weights
    that the program updates.
    """
    weights = {leaf.result: leaf.name for leaf in program.leaves("weight")}
    return {weights[i.weight]: i.grad for i in program.body if isinstance(i, UpdateWeight)}
