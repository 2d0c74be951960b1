"""Run a user's module by a plan: its parameters become DTensors, its forward and backward are the plan's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from unity_ir.errors import UnityError
from unity_ir.interop.dtensor.execute import Execution, Tensors
from unity_ir.interop.dtensor.pieces import as_dtensor, divided, local, local_piece, placements, torch_dtype
from unity_ir.interop.mesh import MeshDims, mesh_dims
from unity_ir.interop.names import gradients
from unity_ir.machine.model import Machine
from unity_ir.pcg.origin import Origin
from unity_ir.plan.forward import forward_of
from unity_ir.plan.instructions import Leaf, Tensor
from unity_ir.plan.program import Program


@dataclass(frozen=True)
class PlannedStep:
    """
    The parts of a plan that `parallelize` reads: one rank's program of a whole step, its machine, and for an imported
    model the names of its tables (inputs whose values come with the model) and tied weights in the module's state dict.
    """

    program: Program
    machine: Machine
    origin: Origin
    constants: Mapping[str, torch.Tensor]
    """Tables that came with the model, whole, by name: those that the module has by itself are taken from it."""

    def named(self, name: str) -> Leaf:
        """Return the instruction of the program that reads the weight or input called `name`; there must be one."""
        return next(i for op in ("weight", "input") for i in self.program.leaves(op) if i.name == name)


def parallelize(module: nn.Module, step: PlannedStep, mesh: DeviceMesh | None) -> nn.Module:
    """
    Change `module` in place so that it runs by a plan, and return it. Its parameters, and the buffers that the plan
    reads, become DTensors. Its `forward` takes a whole batch and returns the loss, and the loss's `backward` gives
    gradients that are DTensors.

    `mesh` is the mesh to use, None for a new one, as in `device_mesh`. All ranks must call this with equal weights.
    Raises `UnityError` where the mesh does not fit the plan, the plan has no loss, or the module is not the one that
    was planned.
    """
    if step.program.optimizer is None or step.program.tensors[step.program.outputs[0]].shape:
        raise UnityError(f"parallelize: @{step.program.name} is a part of a model; plan it with its loss")
    on, dims = device_mesh(mesh_dims(step.program, step.machine), step.program.devices, mesh)
    _check(module, step)
    _distribute(module, step, on, dims)
    _Planned(module, step, on, dims).install()
    return module


def device_mesh(wanted: MeshDims, devices: int, mesh: DeviceMesh | None) -> tuple[DeviceMesh, MeshDims]:
    """
    Return (the mesh to place a plan's tensors on, how its dims are made of the plan's mesh axes).

    `wanted` has the dims that the plan needs, and `devices` is the number of devices of the plan. With `mesh` None, a
    new mesh of all ranks with the dims `wanted` is made. Else `mesh` is used: its dims must divide those of `wanted`,
    or it has one dim of all devices, which is then divided into `wanted`. Raises `UnityError` where `mesh` has other
    dims, or there are not `devices` ranks.
    """
    if mesh is None:
        if dist.get_world_size() != devices:
            raise UnityError(
                f"parallelize: the plan is for {devices} devices, and there are {dist.get_world_size()} ranks; "
                "start as many, or plan for another machine"
            )
        kind = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
        return init_device_mesh(kind, wanted.sizes, mesh_dim_names=wanted.names), wanted
    dims = wanted.like(tuple(mesh.shape), mesh.mesh_dim_names)
    if dims is None and mesh.ndim == 1 and mesh.size() == devices:
        dims = wanted
    if dims is None:
        need = ", ".join(f"{name} {size}" for name, size in zip(wanted.names, wanted.sizes, strict=True))
        raise UnityError(
            f"parallelize: the mesh has dims {' x '.join(map(str, mesh.shape))}; the plan needs {need}, outermost first"
        )
    if mesh.mesh_dim_names is None or tuple(mesh.shape) != dims.sizes:
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.reshape(dims.sizes), mesh_dim_names=dims.names)
    return mesh, dims


# --- the module's tensors


def _check(module: nn.Module, step: PlannedStep) -> None:
    """Raise `UnityError` unless the module has the plan's weights, whole, and the tables that no plan holds."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for leaf in step.program.leaves("weight"):
        found, tensor = parameters.get(leaf.name), step.program.tensors[leaf.result]
        if found is None:
            raise UnityError(
                f"parallelize: the module has no parameter {leaf.name!a}; give the module that was planned"
            )
        if isinstance(found, DTensor):
            raise UnityError(
                f"parallelize: parameter {leaf.name} is a DTensor already; give the module as it was planned"
            )
        if tuple(found.shape) != tensor.shape or found.dtype != torch_dtype(tensor.dtype):
            raise UnityError(
                f"parallelize: parameter {leaf.name} is {list(found.shape)} {found.dtype}; the plan has "
                f"{list(tensor.shape)} {torch_dtype(tensor.dtype)}"
            )
    known = {**dict(module.named_buffers(remove_duplicate=False)), **parameters, **step.constants}
    for name in step.origin.tables:
        if name not in known:
            raise UnityError(
                f"parallelize: the plan has a constant {name!a} that the module has not; plan the module here"
            )


def _distribute(module: nn.Module, step: PlannedStep, mesh: DeviceMesh, dims: MeshDims) -> None:
    """
    Make DTensors of the module's parameters, and of the buffers that the plan reads, in their resting placements. What
    the plan does not read is replicated, so that optimizers see parameters of one kind.
    """
    resting: dict[str, tuple[Placement, ...]] = {
        leaf.name: placements(dims, step.program.tensors[leaf.result].layout)
        for op in ("weight", "input")
        for leaf in step.program.leaves(op)
        if op == "weight" or leaf.name in step.origin.tables
    }
    replicated = (Replicate(),) * mesh.ndim
    made: dict[int, nn.Parameter] = {}
    # A tied parameter has several names, of which the plan has one.
    everywhere = list(module.named_parameters(remove_duplicate=False))
    at = {id(p): resting[name] for name, p in everywhere if name in resting}
    for name, parameter in everywhere:
        if id(parameter) not in made:
            whole = divided(parameter, mesh, at.get(id(parameter), replicated))
            made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner).register_parameter(attribute, made[id(parameter)])
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if name in resting:
            owner, _, attribute = name.rpartition(".")
            of = module.get_submodule(owner)
            persistent = attribute not in of._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            of.register_buffer(attribute, divided(buffer, mesh, resting[name]), persistent)


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the module's parameter or buffer with a full name; None if it has none."""
    owner, _, attribute = name.rpartition(".")
    try:
        found: object = getattr(module.get_submodule(owner), attribute)
    except AttributeError:
        return None
    return found if isinstance(found, torch.Tensor) else None


# --- the step


class _Step(torch.autograd.Function):
    """The plan's forward, which returns the loss, and its backward, which returns the gradients of weights."""

    @staticmethod
    def forward(ctx: Any, planned: _Planned, inputs: Tensors, made: Tensors, *weights: torch.Tensor) -> torch.Tensor:
        execution = planned.training
        made.update(execution.forward({**inputs, **planned.pieces(weights)}))
        ctx.planned = planned
        ctx.save_for_backward(*[made[r] for r in execution.kept])
        return planned.loss(execution.program, made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        planned: _Planned = ctx.planned
        (scale,) = grads
        scale = scale.full_tensor() if isinstance(scale, DTensor) else scale
        made = planned.training.backward(dict(zip(planned.training.kept, ctx.saved_tensors, strict=True)))
        return (None, None, None, *planned.gradients(made, scale))


class Unfinished:
    """
    What a module made by `parallelize` returns if it is called without the loss's targets: call it with these, and it
    returns the loss.
    """

    def __init__(self, finish: Callable[..., torch.Tensor], targets: Sequence[str]):
        self._finish, self._targets = finish, targets

    def __call__(self, *targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of the batch with these targets, in the order of the loss's arguments."""
        if len(targets) != len(self._targets):
            raise UnityError(f"parallelize: the loss takes {', '.join(self._targets)}")
        return self._finish(**dict(zip(self._targets, targets, strict=True)))


class _Planned:
    """A module whose forward is a plan's."""

    def __init__(self, module: nn.Module, step: PlannedStep, mesh: DeviceMesh, dims: MeshDims):
        self._module, self._step, self._mesh, self._dims = module, step, mesh, dims
        self._program = step.program
        self._weights = step.program.leaves("weight")
        self._called = inspect.signature(module.forward).parameters.keys()
        inputs = step.program.leaves("input")
        self._names = [leaf.name for leaf in inputs if leaf.name not in step.origin.tables]
        self._targets = [name for name in self._names if name not in self._called]
        self.training = Execution(step.program, mesh, dims)
        of_module = {name for name in step.origin.tables if _tensor(module, name) is not None}
        self._constants = {
            leaf.name: local(divided(step.constants[leaf.name].to(mesh.device_type), mesh, self._at(leaf)))
            for leaf in inputs
            if leaf.name in step.origin.tables and leaf.name not in of_module
        }

    @cached_property
    def _evaluation(self) -> Execution:
        return Execution(forward_of(self._program, self._step.machine), self._mesh, self._dims)

    def install(self) -> None:
        """Make the plan the module's forward."""
        self._module.forward = self._forward

    def _forward(self, *arguments: Any, **by_name: Any) -> torch.Tensor | Unfinished:
        """
        Return the loss of a batch, a DTensor: in training mode by the plan's step, else by its forward alone. Without
        the loss's targets, return what then takes them.
        """
        given = self._given(arguments, by_name)
        if missing := [name for name in self._names if name not in given]:
            if given and set(missing) == set(self._targets):
                return Unfinished(partial(self._loss_of, given), missing)
            raise UnityError(f"parallelize: the batch has no {missing[0]!a}; the plan reads {', '.join(self._names)}")
        return self._loss_of(given)

    def _given(self, arguments: Sequence[Any], by_name: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a call gives, by name."""
        counts = {len(self._names), len(self._names) - len(self._targets)}
        if arguments and (by_name or len(arguments) not in counts):
            raise UnityError(f"parallelize: the module takes {', '.join(self._names)}, in this order or by name")
        given = dict(zip(self._names, arguments, strict=False)) if arguments else dict(by_name)
        if unknown := [name for name in given if name not in self._names and name not in self._called]:
            raise UnityError(f"parallelize: the plan reads no input {unknown[0]!a}; it reads {', '.join(self._names)}")
        return given

    def _loss_of(self, given: Mapping[str, Any], **targets: Any) -> torch.Tensor:
        inputs = self._inputs({**given, **targets})
        weights = [self._stored(leaf) for leaf in self._weights]
        if not self._module.training:
            with torch.no_grad():
                execution = self._evaluation
                found = execution.forward({**inputs, **self.pieces(weights)})
                return self.loss(execution.program, found)
        made: Tensors = {}
        loss = cast(torch.Tensor, _Step.apply(self, inputs, made, *weights))  # pyright: ignore[reportUnknownMemberType]
        self._replace_statistics(made)
        return loss

    def _inputs(self, given: Mapping[str, Any]) -> Tensors:
        """Return this rank's pieces of the inputs and tables that the plan reads."""
        found: Tensors = {}
        for leaf in self._program.leaves("input"):
            if leaf.name in self._constants:
                found[leaf.result] = self._constants[leaf.name]
            elif leaf.name in self._step.origin.tables:
                found[leaf.result] = local(self._stored(leaf))
            else:
                _check_input(leaf.name, given[leaf.name], self._program.tensors[leaf.result])
                found[leaf.result] = local_piece(leaf.name, given[leaf.name], self._mesh, self._at(leaf))
        return found

    def _at(self, leaf: Leaf) -> tuple[Placement, ...]:
        return placements(self._dims, self._program.tensors[leaf.result].layout)

    def _stored(self, leaf: Leaf) -> DTensor:
        """Return the module's own weight or table."""
        found = _tensor(self._module, leaf.name)
        if not isinstance(found, DTensor):
            raise UnityError(
                f"parallelize: {leaf.name} of the module is no longer a DTensor; leave what parallelize made"
            )
        return found

    def pieces(self, weights: Sequence[torch.Tensor]) -> Tensors:
        """Return this rank's pieces of the weights, by register."""
        return {
            leaf.result: local(weight)
            for leaf, weight in zip(self._weights, weights, strict=True)
            if isinstance(weight, DTensor)
        }

    def loss(self, program: Program, made: Tensors) -> DTensor:
        """Return the loss that a program has made."""
        register = program.outputs[0]
        return as_dtensor(made[register], (), self._mesh, placements(self._dims, program.tensors[register].layout))

    def gradients(self, made: Tensors, scale: torch.Tensor) -> list[DTensor | None]:
        """
        Return the gradients of the weights, in order, times `scale`, the loss's own gradient; None for frozen ones.
        """
        registers = gradients(self._program)

        def gradient(leaf: Leaf) -> DTensor | None:
            if leaf.name not in registers:
                return None
            shape = self._program.tensors[leaf.result].shape
            return as_dtensor(made[registers[leaf.name]] * scale, shape, self._mesh, self._at(leaf))

        return [gradient(leaf) for leaf in self._weights]

    @torch.no_grad()
    def _replace_statistics(self, made: Tensors) -> None:
        """Set the module's running statistics to what a step makes of them, and count its batches."""
        for name, register in self._program.replaced.items():
            local(self._stored(self._step.named(name))).copy_(made[register])
        for name, by in self._step.origin.counters.items():
            if (counter := _tensor(self._module, name)) is not None:
                counter.add_(by)


def _check_input(name: str, given: object, tensor: Tensor) -> None:
    if not isinstance(given, torch.Tensor):
        raise UnityError(f"parallelize: input {name} is {type(given).__name__}; it must be a tensor")
    if tuple(given.shape) != tensor.shape or given.dtype != torch_dtype(tensor.dtype):
        raise UnityError(
            f"parallelize: input {name} is {list(given.shape)} {given.dtype}; the plan is of a whole batch, "
            f"{list(tensor.shape)} {torch_dtype(tensor.dtype)}"
        )
