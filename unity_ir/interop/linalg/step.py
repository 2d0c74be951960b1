"""Print a plan's training step as a module of upstream MLIR."""

from __future__ import annotations

import re
from collections.abc import Mapping

from xdsl.builder import Builder
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from unity_ir.errors import UnityError
from unity_ir.interop.linalg.local import LocalStep
from unity_ir.interop.linalg.shardings import WholeStep, grid
from unity_ir.interop.mesh import mesh_dims
from unity_ir.interop.names import gradients, value_names
from unity_ir.machine.model import Machine
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    TimeStep,
    UpdateWeight,
    ValueMove,
)
from unity_ir.plan.program import Program

FORMS = ("annotated", "manual")
"""The forms in which MLIR is given a plan."""


def step_module(program: Program, machine: Machine, form: str = "annotated") -> ModuleOp:
    """
    Return a plan's step, given one rank's program of it on `machine`: a module with one function, from the inputs and
    the weights to the outputs (the loss first) and the gradient of each weight. `pcg.name` says which is which.

    In the form `annotated` it is on whole tensors, each annotated with its layout if there are several devices; in the
    form `manual` it is on one device's pieces, with the plan's collectives. The program has no stages, halos or loops
    in time. Raises `UnityError` for another form.
    """
    if form not in FORMS:
        raise UnityError(f"linalg: form={form}: must be {' or '.join(FORMS)}")
    block = Block()
    builder = Builder(InsertPoint.at_end(block))
    dims = mesh_dims(program, machine) if program.devices > 1 else None
    if dims is None or form == "annotated":
        step = WholeStep(program, dims, builder)
    else:
        step = LocalStep(program, dims, builder)
    leaves = [*program.leaves("input"), *program.leaves("weight")]
    given: dict[Register, SSAValue] = {}
    for leaf in leaves:
        given[leaf.result] = block.insert_arg(step.type_of(leaf.result), len(block.args))
        given[leaf.result].name_hint = hint(leaf.name)
    values = step_values(step, given)
    returned = step_results(program)
    block.add_op(ReturnOp(*(step.total(register, values[register]) for _, register in returned)))
    function = FuncOp(
        program.name,
        ([step.type_of(leaf.result) for leaf in leaves], [step.type_of(register) for _, register in returned]),
        Region(block),
        arg_attrs=ArrayAttr([_named("pcg.name", leaf.name) for leaf in leaves]),
        res_attrs=ArrayAttr([_named(*name) for name, _ in returned]),
    )
    return ModuleOp([function] if dims is None else [grid(dims), function])


def step_values(step: LocalStep | WholeStep, given: Mapping[Register, SSAValue]) -> Mapping[Register, SSAValue]:
    """Insert the operations of a step; return the value in each register, given those of inputs and weights."""
    values: dict[Register, SSAValue] = {}
    names = value_names(step.program)

    def keep(register: Register, value: SSAValue) -> None:
        if value.name_hint is None:
            value.name_hint = hint(names[register])
        values[register] = step.made(value, register)

    for instruction in step.program.body:
        match instruction:
            case Leaf("constant", result, _, value):
                keep(result, step.constant(result, value))
            case Leaf(_, result):
                keep(result, given[result])
            case Compute(_, operands, results):
                made = step.compute(instruction, [values[r] for r in operands])
                for register, value in zip(results, made, strict=True):
                    keep(register, value)
            case ReshardMove(operand, result) | HaloExchange(operand, result) | TimeStep(operand, result):
                values[result] = step.moved(instruction, values[operand])
            case UpdateWeight() | StateMove() | ValueMove():
                pass
    return values


def step_results(program: Program) -> list[tuple[tuple[str, str], Register]]:
    """Return an attribute that names each result of a step, and its register: outputs, then gradients of weights."""
    next_values = {register: name for name, register in program.replaced.items()}
    found: list[tuple[tuple[str, str], Register]] = []
    for number, register in enumerate(program.outputs):
        if register in next_values:
            found.append((("pcg.next", next_values[register]), register))
        else:
            is_loss = number == 0 and not program.tensors[register].shape
            found.append((("pcg.name", "loss" if is_loss else f"output {number}"), register))
    return [*found, *((("pcg.gradient", name), register) for name, register in gradients(program).items())]


def _named(attribute: str, name: str) -> DictionaryAttr:
    return DictionaryAttr({attribute: StringAttr(name)})


def hint(name: str) -> str:
    """Return a name as a hint for an SSA value's: given `fc1.weight` returns `fc1_weight`."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if plain and not plain[0].isdigit() else f"_{plain}"
