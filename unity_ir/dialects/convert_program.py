"""
Convert one rank's program (`Program`: the instructions that every device runs on its local pieces, with collectives) to
operations of the spmd dialect, and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, DictionaryAttr, FloatAttr, StringAttr, UnitAttr, f64, i64
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from unity_ir.dialects.convert import exchange_of, from_pipeline, to_pipeline
from unity_ir.dialects.pcg.attributes import to_attribute, to_value
from unity_ir.dialects.pcg.ops import optimizer_attributes, to_optimizer
from unity_ir.dialects.spmd import (
    EXCHANGES,
    HOST_COPIES,
    MOVES,
    TIME_STEPS,
    ComputeOp,
    ConstantOp,
    ExchangeOp,
    HostOp,
    InputOp,
    LocalTensorType,
    MoveOp,
    PieceType,
    ProgramOp,
    ReturnOp,
    TimeOp,
    UpdateOp,
    WeightOp,
)
from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.reshard import group_role
from unity_ir.pcg.sharding import COPY, REPEAT, Mesh, operand_layout, pinned_at, pins_of, result_layout, role_name
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    Tensor,
    TimeStep,
    UpdateWeight,
    ValueMove,
)
from unity_ir.plan.program import Program
from unity_ir.tdl.parallel import Configuration, operand_degrees, result_degrees

ANEW = "anew"
"""The attribute of an operation that every micro-batch does, though all of them read the same (`Program.anew`)."""


def to_op(program: Program) -> ProgramOp:
    """
    Return one rank's program as an `spmd.program` operation, which `from_op` reads. Raises `UnityError` for a program
    that updates weights but names no optimizer.
    """
    block = Block()
    values: dict[Register, SSAValue] = {}

    def type_of(register: Register) -> PieceType:
        t = program.tensors[register]
        return PieceType(LocalTensorType(t.local(program.mesh), t.shape, t.dtype, t.layout, t.halo, t.halo_sum))

    for instruction in program.body:
        results: tuple[Register, ...] = ()
        match instruction:
            case Leaf(op, result, name, value):
                results = (result,)
                cls = {"input": InputOp, "weight": WeightOp, "constant": ConstantOp}[op]
                own = {"value": FloatAttr(value, f64)} if op == "constant" else {"name": StringAttr(name)}
                made: Operation = cls.create(properties=dict(own), result_types=[type_of(result)])
                hint = op
            case Compute(name, operands, results, attributes, assignment):
                kinds = {a.name: a.kind for a in find_operator(name).line.attributes}
                made = ComputeOp.create(
                    operands=[values[r] for r in operands],
                    properties={
                        "operator": StringAttr(name),
                        "operator_attributes": DictionaryAttr({k: to_attribute(kinds[k], v) for k, v in attributes}),
                        "over": ArrayAttr(StringAttr(role_name(what)) for what in assignment),
                    },
                    result_types=[type_of(r) for r in results],
                )
                hint = name
            case ReshardMove(operand, result, kind, axes) | HaloExchange(operand, result, kind, axes):
                results = (result,)
                along: dict[str, Attribute] = {"axes": DenseArrayBase.from_list(i64, axes)}
                if isinstance(instruction, ReshardMove) and instruction.stages is not None:
                    along["stages"] = DenseArrayBase.from_list(i64, instruction.stages)
                made = {**MOVES, **EXCHANGES}[kind].create(
                    operands=[values[operand]], properties=along, result_types=[type_of(result)]
                )
                hint = kind
            case TimeStep(operand, result, kind):
                results = (result,)
                made = TIME_STEPS[kind].create(operands=[values[operand]], result_types=[type_of(result)])
                hint = kind
            case UpdateWeight(weight, grad):
                if program.optimizer is None:
                    raise UnityError('spmd: pcg.update leaves the optimizer open; name it: {optimizer = "sgd"}')
                optimizer = DictionaryAttr(optimizer_attributes(program.optimizer))
                made = UpdateOp.create(operands=[values[weight], values[grad]], properties={"optimizer": optimizer})
                hint = ""
            case StateMove(weight, kind):
                made = HOST_COPIES[kind].create(operands=[values[weight]])
                hint = ""
            case ValueMove(operand, result, kind):
                results = (result,)
                made = HOST_COPIES[kind].create(operands=[values[operand]], result_types=[type_of(result)])
                hint = kind
        if not program.anew.isdisjoint(results):
            made.attributes[ANEW] = UnitAttr()
        for register, value in zip(results, made.results, strict=True):
            value.name_hint = f"{hint}{register}"
            values[register] = value
        block.add_op(made)
    block.add_op(ReturnOp.create(operands=[values[r] for r in program.outputs]))
    pipeline = None if program.pipeline is None else from_pipeline(program.pipeline)
    time = program.micro_batches, program.loss_pieces
    how = program.ring_attention, program.exchange_rows, program.bucket
    return ProgramOp(program.name, program.mesh.sizes, Region(block), *time, pipeline, *how)


def from_op(op: ProgramOp) -> Program:
    """
    Return the program that an `spmd.program` operation holds.

    Raises `UnityError` for operations of other dialects, and where the layouts or halos of an operator's operands and
    results do not follow from how the mesh axes divide its work. (A layout has a role for each mesh axis: a shard of
    dim i, sum, copy, ..)
    """
    tensors: dict[Register, Tensor] = {}
    registers: dict[SSAValue, Register] = {}
    body: list[Instruction] = []
    outputs: tuple[Register, ...] = ()
    anew: list[Register] = []
    optimizer: Optimizer | None = None
    mesh = Mesh(tuple(int(s) for s in op.mesh.get_values()))
    for each in op.body.block.ops:
        for value in each.results:
            if not isinstance(value.type, PieceType):
                raise UnityError(f"@{op.sym_name.data}: {each.name} is not an operation of spmd")
            piece = value.type.data
            registers[value] = len(tensors)
            tensors[registers[value]] = Tensor(piece.shape, piece.dtype, piece.layout, piece.halo, piece.halo_sum)
        operands = tuple(registers[v] for v in each.operands)
        results = tuple(registers[v] for v in each.results)
        anew += results if ANEW in each.attributes else ()
        match each:
            case InputOp():
                body.append(Leaf("input", results[0], each.input_name.data))
            case WeightOp():
                body.append(Leaf("weight", results[0], each.weight_name.data))
            case ConstantOp():
                body.append(Leaf("constant", results[0], value=each.value.value.data))
            case ComputeOp():
                body.append(_compute(each, operands, results, tensors, mesh))
            case MoveOp():
                ends = (tensors[r].layout for r in (*operands, *results))
                source, target = (group_role(end, each.along, mesh) if each.along else REPEAT for end in ends)
                body.append(ReshardMove(operands[0], results[0], each.kind, each.along, source, target, each.between))
            case ExchangeOp():
                body.append(HaloExchange(operands[0], results[0], each.kind, each.along, *each.border))
            case TimeOp():
                body.append(TimeStep(operands[0], results[0], each.kind, each.is_of_pieces))
            case UpdateOp():
                body.append(UpdateWeight(*operands))
                optimizer = to_optimizer("spmd.update", each.optimizer.data)
            case HostOp(result=None):
                body.append(StateMove(operands[0], each.kind))
            case HostOp():
                body.append(ValueMove(operands[0], results[0], each.kind))
            case ReturnOp():
                outputs = operands
            case _:
                raise UnityError(f"@{op.sym_name.data}: {each.name} is not an operation of spmd")
    name = op.sym_name.data
    pipeline = to_pipeline(f"spmd.program @{name}: pipeline", op.pipeline)
    program = Program(name, mesh, tensors, tuple(body), outputs, optimizer, op.micro_batch_count, op.pieces)
    is_ring = op.ring_attention is not None
    rows = exchange_of(f"spmd.program @{name}: imbalance", op.exchange_rows is not None, op.imbalance)
    bucket = 0 if op.bucket is None else op.bucket.value.data
    if bucket < 0:
        raise UnityError(f"spmd.program @{name}: bucket is {bucket}; it must be a number of bytes, 1 or more")
    program = replace(program, anew=frozenset(anew), pipeline=pipeline, bucket=bucket)
    return replace(program, ring_attention=is_ring, exchange_rows=rows)


def _compute(
    op: ComputeOp,
    operands: tuple[Register, ...],
    results: tuple[Register, ...],
    tensors: Mapping[Register, Tensor],
    mesh: Mesh,
) -> Compute:
    name = op.operator.data
    operator = find_operator(name)
    given = {k: to_value(f"spmd.compute {name}", k, v) for k, v in op.operator_attributes.data.items()}
    attributes = operator.attributes(given)
    shapes, dtypes = tuple(tensors[r].shape for r in operands), tuple(tensors[r].dtype for r in operands)
    analysis = operator.bind(shapes, attributes, dtypes)
    pinned = {pinned_at(coordinate): None for r in results for _, coordinate in pins_of(tensors[r].layout)}
    may = (*analysis.splittable, COPY, REPEAT, *analysis.carriers, *pinned)
    by_name = {role_name(what): what for what in may}
    for word in op.over:
        if word.data not in by_name:
            raise UnityError(f"spmd.compute {name}: {word.data!a} is not one of {', '.join(by_name)}")
    assignment = tuple(by_name[word.data] for word in op.over)
    degrees: dict[str, int] = {}
    for what, size in zip(assignment, mesh.sizes, strict=True):
        if isinstance(what, str):
            degrees[what] = degrees.get(what, 1) * size
    configuration = Configuration(degrees)
    for i, (register, need) in enumerate(zip(operands, operand_degrees(analysis, configuration), strict=True)):
        if tensors[register].halo != need.halo or tensors[register].halo_sum:
            wanted = ", ".join(map(str, need.halo)) or "none"
            raise UnityError(f"spmd.compute {name}: operand {i} has not the halo it needs: {wanted}")
        needed = operand_layout(analysis, i, assignment)
        if needed != tensors[register].layout:
            raise UnityError(f"spmd.compute {name}: operand {i} is not where it is needed: {_words(needed)}")
    for i, (register, make) in enumerate(zip(results, result_degrees(analysis, configuration), strict=True)):
        if tensors[register].halo_sum != make.halo_sum or tensors[register].halo:
            wanted = ", ".join(map(str, make.halo_sum)) or "none"
            raise UnityError(f"spmd.compute {name}: result {i} has addends in its halo: {wanted}")
        made = result_layout(analysis, i, assignment)
        if made != tensors[register].layout or analysis.bound.result_shapes[i] != tensors[register].shape:
            raise UnityError(f"spmd.compute {name}: result {i} is made elsewhere: {_words(made)}")
    return Compute(name, operands, results, attributes, assignment)


def _words(layout: tuple[int, ...]) -> str:
    return ", ".join(map(role_name, layout))
