"""
Describe a plan as DTensor placements: of every parameter, input, operator and module, and every redistribute, in order.

The schema is in docs/pytorch.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from json import dumps
from typing import Any, cast

from unity_ir.interop.mesh import MeshDims, mesh_dims
from unity_ir.interop.names import forward_and_backward, gradients, value_names
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.machine.model import Machine
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.plan.instructions import Compute, Instruction, Register, ReshardMove
from unity_ir.plan.program import Program

VERSION = 1
"""The version of the schema, which changes with the meaning of its fields."""

Record = dict[str, Any]
"""An object of JSON."""


def described(program: Program, machine: Machine) -> Record:
    """
    Return a plan as DTensor placements, as data that JSON can hold; `program` is one rank's program of its step on
    `machine`.

    The data has the mesh, the placements of parameters (at rest, as used, and of their gradients), of inputs, of
    operands and results of every operator of the forward, and of modules, and each redistribute of the forward and the
    backward, in order. The fields are those of docs/pytorch.md. Raises `UnityError` if the program is for another
    number of devices.
    """
    return _Description(program, mesh_dims(program, machine)).whole(machine)


class _Description:
    def __init__(self, program: Program, mesh: MeshDims):
        self.program, self.mesh = program, mesh
        self.names = value_names(program)
        self.forward, self.backward = forward_and_backward(program)
        self.gradients = gradients(program)
        self.sources: dict[Register, Register] = {}
        """The register that each moved one, or cast weight, holds the value of."""
        for instruction in program.body:
            if isinstance(instruction, ReshardMove):
                self.sources[instruction.result] = self.source(instruction.operand)
            elif isinstance(instruction, Compute) and self.names[instruction.results[0]] == self._leaf(instruction):
                self.sources[instruction.results[0]] = self.source(instruction.operands[0])

    def _leaf(self, compute: Compute) -> str | None:
        """Return the name of the weight that an operator casts; None of others."""
        return self.names[compute.operands[0]] if compute.operator == "cast" else None

    def source(self, register: Register) -> Register:
        """Return the register in which the value of a register was made."""
        return self.sources.get(register, register)

    def placements(self, register: Register) -> list[str]:
        return list(self.mesh.placements(self.program.tensors[register].layout))

    def whole(self, machine: Machine) -> Record:
        inputs = {leaf.name: self.tensor(leaf.result) for leaf in self.program.leaves("input")}
        operators = [self.operator(i) for i in self.computes(self.forward)]
        phases = (("forward", self.forward), ("backward", self.backward))
        return {
            "version": VERSION,
            "model": self.program.name,
            "machine": machine.name,
            "mesh": {"names": list(self.mesh.names), "sizes": list(self.mesh.sizes)},
            "parameters": {leaf.name: self.parameter(leaf.result) for leaf in self.program.leaves("weight")},
            "inputs": inputs,
            "operators": operators,
            "modules": self.modules(operators),
            "redistributes": [record for phase, body in phases for record in self.redistributes(phase, body)],
            "loss": self.tensor(self.program.outputs[0]) if self.program.outputs else None,
        }

    def computes(self, body: Sequence[Instruction]) -> list[Compute]:
        """Return the operators of a phase, without casts of weights as they rest."""
        return [i for i in body if isinstance(i, Compute) and i.results[0] not in self.sources]

    def tensor(self, register: Register) -> Record:
        """Return the global shape, element type, and placements of a register."""
        tensor = self.program.tensors[register]
        dtype = TORCH_DTYPES[tensor.dtype].removeprefix("torch.")
        return {"shape": list(tensor.shape), "dtype": dtype, "placements": self.placements(register)}

    @cached_property
    def used(self) -> Mapping[Register, Mapping[tuple[str, ...], Mapping[str, None]]]:
        """By the register a value is made in, and its placements: the operators of the forward that read it so."""
        found: dict[Register, dict[tuple[str, ...], dict[str, None]]] = {}
        for compute in self.computes(self.forward):
            for operand in compute.operands:
                users = found.setdefault(self.source(operand), {}).setdefault(tuple(self.placements(operand)), {})
                users[self.names[compute.results[0]]] = None
        return found

    def parameter(self, register: Register) -> Record:
        """
        Return the placements of a parameter: at rest, as each operator of the forward reads it, of its gradient (None
        if it is frozen).
        """
        found = self.tensor(register)
        gradient = self.gradients.get(self.names[register])
        return {
            **{key: found[key] for key in ("shape", "dtype")},
            "at_rest": found["placements"],
            "used": [{"placements": list(at), "by": [*by]} for at, by in self.used.get(register, {}).items()],
            "gradient": None if gradient is None else self.placements(self.source(gradient)),
        }

    def operator(self, compute: Compute) -> Record:
        """Return an operator of the forward, and the placements of its operands, as it reads them, and results."""
        operands = [{"value": self.names[r], **self.tensor(r)} for r in compute.operands]
        return {
            "name": self.names[compute.results[0]],
            "operator": compute.operator,
            "operands": operands,
            "results": [self.tensor(r) for r in compute.results],
        }

    def modules(self, operators: Sequence[Record]) -> Record:
        """
        Return, by the name of each module that has parameters of its own, the operators that read these, the placements
        in which the first of them reads what is no parameter, and those of the last one's results.
        """
        weights = {leaf.name for leaf in self.program.leaves("weight")}
        found: dict[str, list[Record]] = {}
        for operator in operators:
            for name in dict.fromkeys(
                o["value"].rpartition(".")[0] for o in operator["operands"] if o["value"] in weights
            ):
                found.setdefault(name, []).append(operator)
        return {
            name: {
                "operators": [each["name"] for each in own],
                "inputs": [o["placements"] for o in own[0]["operands"] if o["value"] not in weights],
                "outputs": [r["placements"] for r in own[-1]["results"]],
            }
            for name, own in found.items()
        }

    def redistributes(self, phase: str, body: Sequence[Instruction]) -> Iterator[Record]:
        """Yield the moves of a phase that change placements, in order."""
        readers: dict[Register, list[str]] = {}
        for compute in self.computes(body):
            for operand in compute.operands:
                readers.setdefault(operand, []).append(self.names[compute.results[0]])
        weights = {register: name for name, register in self.gradients.items()}
        for move in body:
            if not isinstance(move, ReshardMove) or COLLECTIVES[move.kind].is_free:
                continue
            read_by = dict.fromkeys(self.reached(move.result, body, readers))
            record: Record = {"phase": phase, "value": self.names[move.operand]}
            if move.result in weights or any(weights.get(r) for r in self.later(move.result, body)):
                final = next(r for r in (move.result, *self.later(move.result, body)) if r in weights)
                record["gradient_of"] = weights[final]
            yield {
                **record,
                "from": self.placements(move.operand),
                "to": self.placements(move.result),
                "collective": move.kind if COLLECTIVES[move.kind].crosses_links else None,
                "mesh": list(self.mesh.dims_of(move.axes)),
                "readers": list(read_by),
            }

    def later(self, register: Register, body: Sequence[Instruction]) -> list[Register]:
        """Return the registers that moves make of a register, directly or of each other."""
        found = [register]
        for move in body:
            if isinstance(move, ReshardMove) and move.operand in found:
                found.append(move.result)
        return found[1:]

    def reached(
        self, register: Register, body: Sequence[Instruction], readers: Mapping[Register, Sequence[str]]
    ) -> Iterator[str]:
        """Yield the names of the operators that read a register, or what moves make of it."""
        for each in (register, *self.later(register, body)):
            yield from readers.get(each, ())


def text(record: Record) -> str:
    """
    Return a description that `described` made as JSON text, with one line for each parameter, input, operator, module
    and redistribute.
    """
    return "{\n" + ",\n".join(f"  {dumps(key)}: {_lines(value)}" for key, value in record.items()) + "\n}\n"


def _lines(value: Any) -> str:
    """Return JSON of a field: a line for each item of a list, and for each of an object that holds objects."""
    if value and isinstance(value, list):
        return "[\n" + ",\n".join(f"    {dumps(item)}" for item in cast("list[Any]", value)) + "\n  ]"
    if isinstance(value, dict):
        items = cast(Record, value)
        if any(isinstance(item, dict) for item in items.values()):
            return "{\n" + ",\n".join(f"    {dumps(key)}: {dumps(item)}" for key, item in items.items()) + "\n  }"
    return dumps(value)


def collectives_of(record: Record) -> Mapping[str, int]:
    """
    Count the calls of each collective in a plan's DTensor description, as `described` returns it: given one with two
    gathers, returns `{"all_gather": 2}`. Redistributes without communication do not count.
    """
    found: dict[str, int] = {}
    for each in record["redistributes"]:
        if each["collective"] is not None:
            found[each["collective"]] = found.get(each["collective"], 0) + 1
    return found
