"""Check that a program is a training step of a graph."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.plan.instructions import (
    StateMove,
    UpdateWeight,
)
from unity_ir.plan.program import Program


def check_step(program: Program, reference: Graph) -> None:
    """
    Raise `UnityError` unless a program is a training step of the serial forward graph `reference`.

    It must have a backward, inputs and weights of the same names, global shapes and stored types as `reference`, one
    update of every weight that is trained there and of nothing else, and return a scalar loss first.
    """
    if program.optimizer is None or not any(isinstance(i, UpdateWeight) for i in program.body):
        raise UnityError(f"func.func @{program.name}: has no backward yet; run pcg-differentiate before lowering it")
    where = f"spmd.program @{program.name}"
    if reference.updates or any(node.is_parallel for node in reference.nodes()):
        raise UnityError(f"{where}: @{reference.name} is not its serial forward; leave it as lower-pcg-to-spmd made it")
    for op, nodes in (("input", reference.inputs), ("weight", reference.weights())):
        found = sorted(
            (i.name, program.tensors[i.result].shape, program.tensors[i.result].dtype) for i in program.leaves(op)
        )
        if found != sorted((n.name, n.types[0].shape, n.master) for n in nodes):
            raise UnityError(f"{where}: its {op}s are not those of @{reference.name}")
    updated = [i.weight for i in program.body if isinstance(i, UpdateWeight)]
    _check_state_moves(program, where)
    trained = {node.name for node in reference.weights() if node.is_trained}
    for leaf in program.leaves("weight"):
        if leaf.result not in updated and leaf.name in trained:
            raise UnityError(f"{where}: weight {leaf.name!a} has no spmd.update; it must reach the loss")
        if leaf.result in updated and leaf.name not in trained:
            raise UnityError(f"{where}: weight {leaf.name!a} is frozen, and has an spmd.update")
    if len(updated) != len(trained):
        raise UnityError(f"{where}: it must have one spmd.update of every trained weight, and none of other values")
    if not program.outputs or program.tensors[program.outputs[0]].shape:
        raise UnityError(f"{where}: what it returns first must be a scalar loss")


def _check_state_moves(program: Program, where: str) -> None:
    """Raise `UnityError` unless state is copied from the host right before its update, and back after it, or never."""
    moved = {(i.weight, i.kind): at for at, i in enumerate(program.body) if isinstance(i, StateMove)}
    if not moved:
        return
    names = {leaf.result: leaf.name for leaf in program.leaves("weight")}
    updates = {i.weight: at for at, i in enumerate(program.body) if isinstance(i, UpdateWeight)}
    for weight, at in updates.items():
        before, after = (moved.get((weight, kind)) for kind in ("from_host", "to_host"))
        if before is None or after is None or not before < at < after:
            raise UnityError(
                f"{where}: the state of weight {names[weight]!a} rests at the host; it needs spmd.from_host before its "
                "spmd.update, and spmd.to_host after it"
            )
    if len(moved) != 2 * len(updates) or sum(isinstance(i, StateMove) for i in program.body) != len(moved):
        raise UnityError(f"{where}: it must copy the state of updated weights alone, once each way")
