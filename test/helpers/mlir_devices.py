"""
Run the form `manual` of a plan's step on all devices in one function: their parts side by side, and each collective
replaced by what MLIR says it does, read off the printed operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import IndexType, IntegerAttr, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint

from unity_ir.interop.linalg.local import LocalStep
from unity_ir.interop.linalg.nests import LoopNest
from unity_ir.interop.linalg.reads import PreparedRead
from unity_ir.interop.linalg.step import step_results
from unity_ir.interop.linalg.tensors import concatenated, element_of, emit, shape_of
from unity_ir.interop.mesh import MeshDims, mesh_dims
from unity_ir.machine.model import Machine
from unity_ir.plan.instructions import Compute, HaloExchange, Leaf, Register, ReshardMove, TimeStep
from unity_ir.plan.program import Program
from unity_ir.tdl.functions import Array
from unity_ir.tdl.syntax import Var

Place = tuple[int, ...]
"""The position of a device along each axis of the grid."""


class OnDevice(LocalStep):
    """The step of one device, whose position is known."""

    def __init__(self, program: Program, dims: MeshDims, builder: Builder, place: Place):
        super().__init__(program, dims, builder)
        self.place = place

    def device_index(self, axis: int) -> SSAValue:
        return emit(self.builder, arith.ConstantOp(IntegerAttr(self.place[axis], IndexType())))


def module_of_devices(program: Program, machine: Machine) -> ModuleOp:
    """A function from the whole inputs and weights to each result of the step, of one device after the other."""
    dims = mesh_dims(program, machine)
    leaves = [*program.leaves("input"), *program.leaves("weight")]
    block = Block()
    builder = Builder(InsertPoint.at_end(block))
    devices = [OnDevice(program, dims, builder, place) for place in product(*map(range, dims.sizes))]
    values: dict[Place, dict[Register, SSAValue]] = {d.place: {} for d in devices}
    for leaf in leaves:
        local = devices[0].type_of(leaf.result)
        whole = block.insert_arg(TensorType(local.element_type, program.tensors[leaf.result].shape), len(block.args))
        for device in devices:
            first = starts(program, dims, leaf.result, device.place)
            values[device.place][leaf.result] = part(builder, whole, first, list(local.get_shape()))
    for instruction in program.body:
        match instruction:
            case Leaf("constant", result, _, value):
                for d in devices:
                    values[d.place][result] = d.constant(result, value)
            case Compute():
                for d in devices:
                    own = values[d.place]
                    made = d.compute(instruction, [own[r] for r in instruction.operands])
                    own.update(zip(instruction.results, made, strict=True))
            case ReshardMove() | HaloExchange() | TimeStep():
                given = {d.place: values[d.place][instruction.operand] for d in devices}
                found = {d.place: d.moved(instruction, given[d.place]) for d in devices}
                for place, value in performed(builder, dims, given, found).items():
                    values[place][instruction.result] = value
            case _:
                pass
    returned: list[SSAValue] = []
    for _, register in step_results(program):
        given = {d.place: values[d.place][register] for d in devices}
        found = performed(builder, dims, given, {d.place: d.total(register, given[d.place]) for d in devices})
        returned += [found[d.place] for d in devices]
    block.add_op(ReturnOp(*returned))
    types = [a.type for a in block.args], [v.type for v in returned]
    return ModuleOp([FuncOp(program.name, types, Region(block))])


def starts(program: Program, dims: MeshDims, register: Register, place: Place) -> list[int]:
    """The first element of a device's piece, along each dim."""
    held = program.tensors[register]
    found: list[int] = []
    for dim, size in enumerate(held.local(program.mesh)):
        axes = [n for n, role in enumerate(dims.roles(held.layout)) if role == dim]
        found.append(joined(axes, dims.sizes, place) * size)
    return found


def joined(axes: Sequence[int], sizes: Sequence[int], place: Place) -> int:
    number = 0
    for axis in axes:
        number = number * sizes[axis] + place[axis]
    return number


def part(builder: Builder, value: SSAValue, first: Sequence[int], sizes: Sequence[int]) -> SSAValue:
    made = TensorType(element_of(value), sizes)
    return emit(builder, tensor.ExtractSliceOp(value, list(first), list(sizes), [1] * len(sizes), made))


def cut(array: Array, first: Sequence[int], sizes: Sequence[int]) -> Array:
    return array[tuple(slice(f, f + s) for f, s in zip(first, sizes, strict=True))]


def performed(
    builder: Builder, dims: MeshDims, given: Mapping[Place, SSAValue], found: Mapping[Place, SSAValue]
) -> dict[Place, SSAValue]:
    """What devices have after an operation of `shard`, whose results are `found`, of what they give; or `found`."""
    ops = {place: value.owner for place, value in found.items()}
    done = dict(found)
    for place, op in ops.items():
        if isinstance(op, Operation) and op.name.startswith("shard."):
            done[place] = of_group(builder, op, group(op, dims, place), given, place)
    for place, op in ops.items():
        if isinstance(op, Operation) and done[place] is not found[place]:
            op.detach()
            op.erase()
    return done


def group(op: Operation, dims: MeshDims, place: Place) -> list[Place]:
    """The devices with which one exchanges, in order: those elsewhere along the operation's axes."""
    axes = list(op.properties["grid_axes"].get_values())  # pyright: ignore
    found: list[Place] = []
    for at in product(*(range(dims.sizes[a]) for a in axes)):
        new = list(place)
        for axis, position in zip(axes, at, strict=True):
            new[axis] = position
        found.append(tuple(new))
    return found


def of_group(
    builder: Builder, op: Operation, places: Sequence[Place], given: Mapping[Place, SSAValue], own: Place
) -> SSAValue:
    """What one device has after a collective of a group."""
    values, number, ways = [given[p] for p in places], places.index(own), len(places)
    named = {n: v.value.data for n, v in op.properties.items() if isinstance(v, IntegerAttr)}
    kind = op.name.removeprefix("shard.")
    if kind == "all_gather":
        return concatenated(builder, values, named["gather_axis"])
    if kind == "all_slice":
        return nth(builder, given[own], named["slice_axis"], number, ways)
    if kind == "all_to_all":
        parts = [nth(builder, v, named["split_axis"], number, ways) for v in values]
        return concatenated(builder, parts, named["concat_axis"])
    assert kind in ("all_reduce", "reduce_scatter")
    total = values[0]
    for other in values[1:]:
        total = added(builder, total, other)
    return total if kind == "all_reduce" else nth(builder, total, named["scatter_axis"], number, ways)


def nth(builder: Builder, value: SSAValue, dim: int, number: int, ways: int) -> SSAValue:
    sizes = [s // ways if d == dim else s for d, s in enumerate(shape_of(value))]
    return part(builder, value, [number * s if d == dim else 0 for d, s in enumerate(sizes)], sizes)


def added(builder: Builder, one: SSAValue, other: SSAValue) -> SSAValue:
    names = [f"d{d}" for d in range(len(shape_of(one)))]
    nest = LoopNest(builder, dict(zip(names, shape_of(one), strict=True)), names, ())
    values = [nest.element(PreparedRead(v, tuple(map(Var, names)))) for v in (one, other)]
    return nest.finish(emit(nest.inside, arith.AddfOp(*values)))
