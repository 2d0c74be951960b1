"""
Have backwards read results that their forwards compute anyway, where both are in one program.

    out = attention(q, k, v) .. dq, dk, dv = attention_grad(y, q, k, v)
    ->  out, sums = attention_saving(q, k, v) .. dq, dk, dv = attention_saved_grad(y, q, k, v, out, sums)

`ops.operator.Saving` names these operators. Both must be divided in the same way, so that nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unity_ir.ops import operator, savings
from unity_ir.ops.operator import Attributes, Saving
from unity_ir.pcg.sharding import operand_layout, result_layout
from unity_ir.plan.instructions import Compute, Instruction, Register, ReshardMove, Tensor, makes, reads
from unity_ir.plan.program import Program


def with_savings(program: Program, only_results: bool = False) -> Program:
    """
    Return the program in which some forward operators also return intermediate values, such as the row sums of
    attention's softmax, and their backwards read these instead of computing them again.

    It is done for operators with such variants (`ops.savings`), where the backward reads the same operands as the
    forward, or recomputed copies of them, and both are sharded in the same way. With `only_results` it is done only for
    backwards that also read the forward's result: attention's does, the loss's does not.
    """
    body: list[Instruction] = list(program.body)
    tensors = dict(program.tensors)
    known = {saving.backward: saving for saving in savings() if saving.reads_result or not only_results}
    firsts = first_with_values(program)
    forwards = {name for saving in known.values() for name in (saving.forward, saving.saving)}
    places: dict[tuple[Register, ...], list[int]] = {}
    """The places of forwards in the body, by the registers that first held the values which they read."""
    for place, instruction in enumerate(body):
        if not isinstance(instruction, Compute):
            continue
        if instruction.operator in forwards:
            read = tuple(firsts.get(r, r) for r in instruction.operands)
            places.setdefault(read, []).append(place)
        if instruction.operator not in known:
            continue
        saving = known[instruction.operator]
        wanted = tuple(firsts.get(r, r) for r in instruction.operands[1:])
        at = _forward(body, places.get(wanted, ()), instruction, saving)
        if at is None:
            continue
        forward = body[at]
        assert isinstance(forward, Compute)
        made = _saved(replace(program, tensors=tensors), forward, saving)
        if made is None:
            continue
        results = [*forward.results]
        if forward.operator == saving.forward:
            for tensor in made:
                results.append(len(tensors))
                tensors[len(tensors)] = tensor
            attributes = attributes_of_variant(saving.saving, forward.attributes)
            body[at] = replace(forward, operator=saving.saving, results=tuple(results), attributes=attributes)
        operands = (*instruction.operands, *results[not saving.reads_result :])
        attributes = attributes_of_variant(saving.saved, instruction.attributes)
        body[place] = replace(instruction, operator=saving.saved, operands=operands, attributes=attributes)
    return replace(program, body=tuple(body), tensors=tensors)


def first_with_values(program: Program) -> dict[Register, Register]:
    """
    Return, for each register that recompute has made, the one that first held its values: what the same operators and
    moves have made of the same registers.
    """
    made: dict[object, list[Compute | ReshardMove]] = {}
    first: dict[Register, Register] = {}
    for instruction in program.body:
        if isinstance(instruction, Compute):
            read, results, what = instruction.operands, instruction.results, instruction.operator
        elif isinstance(instruction, ReshardMove):
            read, results, what = reads(instruction), (instruction.result,), instruction.kind
        else:
            continue
        # How it is done is slow to hash, and few instructions apply one operator to the same registers: it is compared.
        key = what, *[first.get(r, r) for r in read]
        alike = made.get(key)
        if alike is None:
            made[key] = [instruction]
            for register in results:
                first[register] = register
            continue
        same = next((other for other in alike if _is_done_alike(other, instruction)), None)
        if same is None:
            alike.append(instruction)
            same = instruction
        first.update(zip(results, makes(same), strict=True))
    return first


def _is_done_alike(one: Compute | ReshardMove, other: Compute | ReshardMove) -> bool:
    """Return whether two operators, or moves, of one name do the same with what they read."""
    if isinstance(one, Compute) and isinstance(other, Compute):
        return one.attributes == other.attributes and one.assignment == other.assignment
    if isinstance(one, Compute) or isinstance(other, Compute):
        return False
    return (one.axes, one.source, one.target) == (other.axes, other.source, other.target)


def _forward(body: Sequence[Instruction], places: Sequence[int], backward: Compute, saving: Saving) -> int | None:
    """
    Return the last of these places in `body`, of operators that read what the backward's forward reads, that has this
    forward, divided in the same way; None if none has.
    """
    for place in reversed(places):
        found = body[place]
        if (
            isinstance(found, Compute)
            and found.operator in (saving.forward, saving.saving)
            and found.assignment == backward.assignment
            and attributes_of_variant(saving.saved, found.attributes)
            == attributes_of_variant(saving.saved, backward.attributes)
        ):
            return place
    return None


def _saved(program: Program, forward: Compute, saving: Saving) -> list[Tensor] | None:
    """Return the tensors a forward saves for its backward; None if the backward needs them in other layouts."""
    attributes = attributes_of_variant(saving.saving, forward.attributes)
    operands = [program.tensors[r] for r in forward.operands]
    analysis = operator(saving.saving).bind(
        tuple(t.shape for t in operands), attributes, tuple(t.dtype for t in operands)
    )
    results = analysis.bound.results
    # A mesh axis that divides a tensor that the backward reads would make it an addend of a sum.
    if any(
        isinstance(what, str) and what not in analysis.result_dims[number]
        for what in forward.assignment
        for number in range(not saving.reads_result, len(results))
    ):
        return None
    made: list[Tensor] = []
    for number, result in enumerate(results[1:], 1):
        layout = result_layout(analysis, number, forward.assignment)
        made.append(Tensor(analysis.bound.result_shape(result), result.dtype or operands[0].dtype, layout))
    result = program.tensors[forward.results[0]]
    read = [*([result] if saving.reads_result else []), *made]
    shapes = (result.shape, *(t.shape for t in operands), *(t.shape for t in read))
    backward = operator(saving.saved).bind(shapes, attributes_of_variant(saving.saved, forward.attributes))
    first = 1 + len(operands)
    wanted = [operand_layout(backward, first + i, forward.assignment) for i in range(len(read))]
    return made if wanted == [t.layout for t in read] else None


def attributes_of_variant(name: str, given: Attributes) -> Attributes:
    """
    Return the attributes of the operator called `name`, made from `given`, the attributes of an operator of which it is
    a variant (one that also returns intermediate values, or a backward that reads these): values of the same names are
    taken over, other attributes get their defaults.
    """
    own = operator(name)
    known = {a.name for a in own.line.attributes}
    return own.attributes({k: v for k, v in given if k in known})
