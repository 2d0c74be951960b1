# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A plan's training step as a function of JAX: weights and a batch to the loss and the gradients of the weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from unity_ir.errors import UnityError
from unity_ir.interop.jax.annotate import annotated
from unity_ir.interop.jax.execute import DeviceStep, by_register, is_in_time
from unity_ir.interop.jax.lines import DTYPES
from unity_ir.interop.mesh import MeshDims, mesh_dims
from unity_ir.interop.names import gradients
from unity_ir.machine.model import Machine
from unity_ir.pcg.sharding import SUM
from unity_ir.plan.instructions import Leaf, Register
from unity_ir.plan.program import Program

Arrays = dict[str, Array]
"""Arrays by the name of the weight, input or table."""


class StepResults(NamedTuple):
    """The loss, the gradients and the next running statistics that a step returns."""

    loss: Array
    """The loss of the whole batch, on every device."""
    gradients: Arrays
    """By the name of each trained weight, in the sharding of the weight."""
    buffers: Arrays
    """The next value of each running statistic (of batch norms), by its name."""


class JaxStep:
    """
    A plan's step: `step(weights, batch)` returns `StepResults`. Weights, batch and buffers are dicts of arrays by name,
    in the shardings of `shardings`; `place` brings whole arrays there.

    The function is one `jax.shard_map` over `mesh`: each device computes on its own pieces, and what moves between them
    is what the plan says, by explicit collectives. `lower` returns it for inspection (`as_text()` is StableHLO, with
    `sdy.manual_computation`) and compilation ahead of time, which needs no devices.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        tables: Mapping[str, Any],
        mesh: Mesh | AbstractMesh | None = None,
        form: str = "manual",
        buffers: Collection[str] = (),
    ):
        _check(program, form)
        self.program, self.form = program, form
        dims = mesh_dims(program, machine)
        self.mesh = _mesh(dims, program, mesh)
        self._dims = dims
        self._device_step = DeviceStep(program, dims)
        self._gradients = gradients(program)
        self.weights: tuple[str, ...] = tuple(leaf.name for leaf in program.leaves("weight"))
        """Names of the weights."""
        inputs = [leaf.name for leaf in program.leaves("input")]
        self.buffers: tuple[str, ...] = tuple(n for n in inputs if n in tables or n in buffers or n in program.replaced)
        """Names of the inputs that come with the model: running statistics, tables, constants."""
        self.inputs: tuple[str, ...] = tuple(n for n in inputs if n not in self.buffers)
        """Names of the inputs that a batch has."""
        self._tables = tables

    @cached_property
    def shapes(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """
        The shape, element type and sharding of each weight, input and buffer, by name. Inputs in micro-batches have
        these as a further dim in front.
        """
        found: dict[str, jax.ShapeDtypeStruct] = {}
        for leaf in self._leaves:
            tensor, spec = self.program.tensors[leaf.result], self._spec(leaf.result)
            shape: Sequence[int] = tensor.shape
            if is_in_time(self.program, leaf.result):
                shape = _in_micro_batches(shape, tensor.layout[-1], self.program.micro_batches)
            at = NamedSharding(self.mesh, spec)
            found[leaf.name] = jax.ShapeDtypeStruct(tuple(shape), DTYPES[tensor.dtype], sharding=at)
        return found

    @property
    def shardings(self) -> Mapping[str, NamedSharding]:
        """The sharding of each weight, input and buffer, by name."""
        return {name: NamedSharding(self.mesh, self._spec(leaf.result)) for name, leaf in self._by_name.items()}

    def place(self, arrays: Mapping[str, Any]) -> Arrays:
        """
        Return weights, inputs or buffers on the devices, in the shardings of the plan, given whole arrays by name:
        NumPy's, JAX's or PyTorch's. An input in micro-batches is divided into them. Names that the plan does not read,
        such as of a parameter that no loss depends on, are left out.

        Raises `UnityError` for an array of another shape or kind.
        """
        with jax.enable_x64(True):
            return {name: self._placed(name, array) for name, array in arrays.items() if name in self._by_name}

    def __call__(
        self, weights: Mapping[str, Any], batch: Mapping[str, Any], buffers: Mapping[str, Any] | None = None
    ) -> StepResults:
        """
        Return the loss, the gradients of the weights, and the next running statistics, of a batch. What is not placed
        yet is (`place`). Buffers that are not given are those of the model that was planned. It may be called in a
        function that JAX traces, such as one with an optimizer in `jax.jit`, but not differentiated: its gradients are
        its results.

        Raises `UnityError` for what is missing, has another shape or kind, or is in the batch and not read.
        """
        if isinstance(self.mesh, AbstractMesh):
            raise UnityError("jax: an abstract mesh has no devices to run on; lower the step, or give a Mesh")
        groups = (("weights", self.weights, weights), ("batch", self.inputs, batch), ("buffers", self.buffers, buffers))
        given: dict[str, Any] = {}
        for kind, names, arrays in groups:
            if not isinstance(arrays, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UnityError(f"jax: {kind} of {type(arrays).__name__}; give a dict of arrays by name")
            there = {**(self._own if kind == "buffers" else {}), **(arrays or {})}
            if missing := [name for name in names if name not in there]:
                has = "has" if kind == "batch" else "have"
                raise UnityError(f"jax: the {kind} {has} no {missing[0]!a}; the plan reads {', '.join(names)}")
            unknown = [name for name in there if name not in names]
            if unknown and kind == "batch":
                raise UnityError(f"jax: the plan reads no input {unknown[0]!a}; it reads {', '.join(names)}")
            given.update({name: there[name] for name in names})
        with jax.enable_x64(True):
            return self._compiled(self.place(given))

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """
        Return the step, lowered to StableHLO and not compiled, for arrays of the plan's shapes and shardings.
        `platform` is what it is for (`PLATFORMS`), which need not be there; None is that of the mesh's devices.
        """
        if platform not in (None, *PLATFORMS):
            raise UnityError(f"jax: platform={platform}: must be {', '.join(PLATFORMS[:-1])} or {PLATFORMS[-1]}")
        if platform is None and isinstance(self.mesh, AbstractMesh):
            raise UnityError(f"jax: an abstract mesh is of no platform; name it: {', '.join(PLATFORMS)}")
        with jax.enable_x64(True):
            traced = self._compiled.trace(dict(self.shapes))
            return traced.lower(lowering_platforms=None if platform is None else (platform,))

    # -- inside

    @cached_property
    def _by_name(self) -> Mapping[str, Leaf]:
        return {leaf.name: leaf for leaf in self._leaves}

    @property
    def _leaves(self) -> list[Leaf]:
        return [*self.program.leaves("weight"), *self.program.leaves("input")]

    def _spec(self, register: Register) -> PartitionSpec:
        """Return which dims of the mesh shard each dim of a tensor."""
        tensor = self.program.tensors[register]
        roles = self._dims.roles(tensor.layout)
        dims: list[tuple[str, ...] | None] = []
        for dim in range(len(tensor.shape)):
            names = tuple(n for n, role in zip(self._dims.names, roles, strict=True) if role == dim)
            dims.append(names or None)
        return PartitionSpec(*((None,) if is_in_time(self.program, register) else ()), *dims)

    @cached_property
    def _own(self) -> Arrays:
        """Return the tables of the model that was planned, placed once, as arrays also where JAX traces the caller."""
        with jax.ensure_compile_time_eval():
            return self.place(self._tables)

    def _placed(self, name: str, given: Any) -> Array:
        wanted, leaf = self.shapes[name], self._by_name[name]
        tensor = self.program.tensors[leaf.result]
        array: Any = given if isinstance(given, Array) else _on_host(name, given)
        if not jnp.can_cast(array.dtype, wanted.dtype, "same_kind"):
            raise UnityError(f"jax: {name} is of {array.dtype}; the plan reads {wanted.dtype}")
        is_traced = isinstance(array, Tracer)
        if array.shape == tensor.shape != wanted.shape:
            dim, count = tensor.layout[-1], self.program.micro_batches
            parts = (*tensor.shape[:dim], count, tensor.shape[dim] // count, *tensor.shape[dim + 1 :])
            by: Any = jnp if is_traced else np
            array = by.moveaxis(by.asarray(array).reshape(parts), dim, 0)
        if array.shape != wanted.shape:
            raise UnityError(f"jax: {name} is {list(array.shape)}; the plan has {list(tensor.shape)}")
        if isinstance(array, Array) and not is_traced and array.dtype == wanted.dtype and wanted.sharding is not None:
            if array.sharding.is_equivalent_to(wanted.sharding, array.ndim):
                return array
        # A copy: JAX may take the caller's own memory, which PyTorch's optimizers change in place.
        own = array if isinstance(array, Array) else array.copy()
        return jax.device_put(jnp.asarray(own, wanted.dtype), wanted.sharding)

    @cached_property
    def _compiled(self) -> Any:
        if self.form == "annotated":
            return jax.jit(_named(self._on_whole, self.program.name))
        given = {name: self._spec(leaf.result) for name, leaf in self._by_name.items()}
        found = StepResults(
            PartitionSpec(),  # pyright: ignore[reportArgumentType]
            {name: self._spec(r) for name, r in self._gradients.items()},  # pyright: ignore[reportArgumentType]
            {name: self._spec(r) for name, r in self.program.replaced.items()},  # pyright: ignore[reportArgumentType]
        )
        step = jax.shard_map(self._on_pieces, mesh=self.mesh, in_specs=(given,), out_specs=found, check_vma=False)
        return jax.jit(_named(step, self.program.name))

    def _on_pieces(self, arrays: Arrays) -> StepResults:
        """Run the step on a device's pieces."""
        pieces = self._device_step.run(by_register(self.program, arrays))
        register = self.program.outputs[0]
        roles = zip(self._dims.names, self._dims.roles(self.program.tensors[register].layout), strict=True)
        summed = tuple(name for name, role in roles if role == SUM)
        loss = jax.lax.psum(pieces[register], summed) if summed else pieces[register]
        return self._results(loss, pieces)

    def _on_whole(self, arrays: Arrays) -> StepResults:
        """Compute the step on whole arrays, with annotations for XLA."""

        def sharding(register: Register) -> NamedSharding:
            return NamedSharding(self.mesh, self._spec(register))

        found = annotated(self.program, by_register(self.program, arrays), sharding)
        return self._results(found[self.program.outputs[0]], found)

    def _results(self, loss: Array, made: Mapping[Register, Array]) -> StepResults:
        grads = {name: made[r] for name, r in self._gradients.items()}
        return StepResults(loss, grads, {name: made[r] for name, r in self.program.replaced.items()})


def _named(function: Callable[[Arrays], StepResults], name: str) -> Callable[[Arrays], StepResults]:
    """Return the function under another name, which JAX gives its module."""

    def step(arrays: Arrays) -> StepResults:
        return function(arrays)

    step.__name__ = name
    return step


def stablehlo(program: Program, machine: Machine, form: str, platform: str) -> str:
    """
    Return a plan's step as StableHLO, given one rank's program of it on `machine`. `form` is `manual` (each device's
    part, with the plan's collectives) or `annotated` (whole arrays, with the sharding of each value). `platform` is
    what it is for, one of `PLATFORMS`; no devices are needed.
    """
    dims = mesh_dims(program, machine)
    return JaxStep(program, machine, {}, AbstractMesh(dims.sizes, dims.names), form).lower(platform).as_text()


PLATFORMS = ("cuda", "rocm", "tpu", "cpu")
"""Platforms that StableHLO is written for; sorts and products of experts, among others, differ between them."""

FORMS = ("manual", "annotated")
"""The forms in which JAX is given a plan."""


def _check(program: Program, form: str) -> None:
    """Raise `UnityError` unless JAX can be given the program in this form."""
    if form not in FORMS:
        raise UnityError(f"jax: form={form}: must be {' or '.join(FORMS)}")
    if form == "annotated" and program.micro_batches > 1:
        raise UnityError(
            f"jax: @{program.name} has {program.micro_batches} micro-batches, which annotations do not say; plan with "
            "micro_batches=1, or take form=manual"
        )
    if program.optimizer is None or program.tensors[program.outputs[0]].shape:
        raise UnityError(f"jax: @{program.name} is a part of a model; plan it with its loss")


def _in_micro_batches(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    """Return the shape of a tensor of which `count` micro-batches divide a dim, with these in front."""
    return (count, *shape[:dim], shape[dim] // count, *shape[dim + 1 :])


def _on_host(name: str, array: Any) -> Any:
    """Return what is no array of JAX as one of NumPy; types of 16 bits of PyTorch as float32, which holds them."""
    try:
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            array = (array.float() if array.dtype.is_floating_point and array.dtype.itemsize < 4 else array).numpy()
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise UnityError(f"jax: {name} is no array: {str(error).splitlines()[0]}") from error


def _mesh(dims: MeshDims, program: Program, mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """Return the mesh of a plan: the given one, if it has the plan's dims, else one of JAX's first devices."""
    sizes = dims.sizes
    if mesh is not None:
        if not isinstance(mesh, Mesh | AbstractMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UnityError(f"jax: mesh is of {type(mesh).__name__}; give a jax.sharding.Mesh with the plan's dims")
        found = tuple(mesh.shape.values())
        if (tuple(mesh.axis_names), found) != (dims.names, sizes):
            need = ", ".join(f"{name} {size}" for name, size in zip(dims.names, sizes, strict=True))
            have = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
            raise UnityError(f"jax: the mesh has dims {have or 'none'}; the plan needs {need}, outermost first")
        # Without the types of its axes: what is divided by hand has none.
        return Mesh(mesh.devices, mesh.axis_names) if isinstance(mesh, Mesh) else mesh
    there = jax.devices()
    if len(there) < program.devices:
        raise UnityError(
            f"jax: the plan is for {program.devices} devices, and JAX has {len(there)}; plan for another machine, or "
            f"set jax_num_cpu_devices to {program.devices} to try it on CPUs"
        )
    return Mesh(np.asarray(there[: program.devices]).reshape(sizes), dims.names)
