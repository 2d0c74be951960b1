"""Print a plan's training step as a module of upstream MLIR."""

from __future__ import annotations

import re
from collections.abc import Mapping

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.dialects.linalg.ops import FillOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint

from unity_ir.interop.linalg.lines import compute
from unity_ir.interop.linalg.reads import emit
from unity_ir.interop.linalg.scalars import TYPES, constant
from unity_ir.interop.linalg.shardings import Annotations, grid
from unity_ir.interop.mesh import mesh_dims
from unity_ir.interop.names import gradients, value_names
from unity_ir.machine.model import Machine
from unity_ir.plan.program import Compute, HaloExchange, Leaf, Program, Register, ReshardMove, TimeStep, UpdateWeight


def step_module(program: Program, machine: Machine) -> ModuleOp:
    """
    Return a plan's step on whole tensors, given one rank's program of it on `machine`: a module with one function, from
    the inputs and the weights to the outputs (the loss first) and the gradient of each weight. `pcg.name` says which is
    which.

    On several devices, each value is annotated with its layout. The program has no stages and no loops in time.
    """
    leaves = [*program.leaves("input"), *program.leaves("weight")]
    types = [_type(program, leaf.result) for leaf in leaves]
    block = Block(arg_types=types)
    builder = Builder(InsertPoint.at_end(block))
    annotations, around = None, list[Operation]()
    if program.devices > 1:
        dims = mesh_dims(program, machine)
        annotations, around = Annotations(program, dims, builder), [grid(dims)]
    names = value_names(program)
    given: dict[Register, SSAValue] = {}
    for leaf, argument in zip(leaves, block.args, strict=True):
        argument.name_hint = hint(leaf.name)
        given[leaf.result] = argument
    values = _values(program, names, given, builder, annotations)
    returned = step_results(program)
    block.add_op(ReturnOp(*(values[register] for _, register in returned)))
    made = [_type(program, register) for _, register in returned]
    function = FuncOp(
        program.name,
        (types, made),
        Region(block),
        arg_attrs=ArrayAttr([_named("pcg.name", leaf.name) for leaf in leaves]),
        res_attrs=ArrayAttr([_named(*name) for name, _ in returned]),
    )
    return ModuleOp([*around, function])


def _values(
    program: Program,
    names: Mapping[Register, str],
    given: Mapping[Register, SSAValue],
    builder: Builder,
    annotations: Annotations | None,
) -> Mapping[Register, SSAValue]:
    """Insert the operations of a step; return the value in each register, given those of inputs and weights."""
    values: dict[Register, SSAValue] = {}

    def keep(register: Register, value: SSAValue) -> None:
        if value.name_hint is None:
            value.name_hint = hint(names[register])
        values[register] = value if annotations is None else annotations.made(value, register)

    for instruction in program.body:
        match instruction:
            case Leaf("constant", result, _, value):
                held = _type(program, result)
                number = emit(builder, constant(value, held.element_type))
                empty = emit(builder, tensor.EmptyOp([], held))
                keep(result, emit(builder, FillOp([number], [empty], [held])))
            case Leaf(_, result):
                keep(result, given[result])
            case Compute(_, operands, results):
                line, given_to = program.analysis(instruction).bound, [values[r] for r in operands]
                made = compute(line, given_to, builder, annotations and annotations.replicated)
                for register, value in zip(results, made, strict=True):
                    keep(register, value)
            case ReshardMove(operand, result) | HaloExchange(operand, result) | TimeStep(operand, result):
                values[result] = values[operand]
                if annotations is not None:
                    values[result] = annotations.moved(values[operand], result)
            case UpdateWeight():
                pass
    return values


def step_results(program: Program) -> list[tuple[tuple[str, str], Register]]:
    """Return an attribute that names each result of a step, and its register: outputs, then gradients of weights."""
    replaced = {register: name for name, register in program.replaced.items()}
    found = [
        (("pcg.next", replaced[r]) if r in replaced else ("pcg.name", names_of_output), r)
        for names_of_output, r in ((f"output{i}" if i else "loss", r) for i, r in enumerate(program.outputs))
    ]
    return [*found, *((("pcg.gradient", name), r) for name, r in gradients(program).items())]


def _named(attribute: str, name: str) -> DictionaryAttr:
    return DictionaryAttr({attribute: StringAttr(name)})


def _type(program: Program, register: Register) -> TensorType:
    held = program.tensors[register]
    return TensorType(TYPES[held.dtype], held.shape)


def hint(name: str) -> str:
    """Return a name as a hint for an SSA value's: given `fc1.weight` returns `fc1_weight`."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if plain and not plain[0].isdigit() else f"_{plain}"
