# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The step of a plan of a loss function of JAX, which takes and returns trees of arrays as the function does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from unity_ir.errors import UnityError
from unity_ir.interop.jax.step import Arrays, JaxStep


class StepTrees(NamedTuple):
    """The loss of a batch, the gradients in a tree as the weights, and the next running statistics by name."""

    loss: jax.Array
    gradients: Any
    buffers: Arrays


@dataclass(frozen=True)
class ArgumentTrees:
    """How the arguments of a loss function hold the weights and inputs of a plan of it."""

    weights: Any
    """The `PyTreeDef` of the first argument."""
    weight_names: Sequence[tuple[str, ...]]
    """The names of the weights that each array of the first argument holds: several if they are stacked in it."""
    weight_shapes: Sequence[tuple[int, ...]]
    """The shape of each array of the first argument."""
    batch: Any
    """The `PyTreeDef` of the tuple of the other arguments."""
    input_names: Sequence[str | None]
    """The name of the input that each array of these is; None for a key of random numbers."""


class LossStep:
    """
    A plan's step, called as the loss that was planned: `step(weights, *batch)` returns its loss and the gradients of
    the weights (`StepTrees`). `place` brings weights to the devices.

    A weight that the loss only scans over is one array for each position of its first dim here, in a tuple: in what
    `place` and the step return; and one that it only reads as a matrix has that shape. `restore` makes of them what the
    loss takes.
    """

    def __init__(self, step: JaxStep, trees: ArgumentTrees):
        self.step = step
        """The step by names."""
        self._trees = trees

    @cached_property
    def shardings(self) -> Any:
        """The sharding of each weight, in the tree that `place` returns."""
        return self._tree(self.step.shardings, self._replicated)

    def place(self, weights: Any) -> Any:
        """
        Return weights on the devices, in the shardings of the plan, given the tree of whole arrays that the loss takes.
        Arrays that the loss does not depend on are on every device. Raises `UnityError` for another tree, or an array
        of another shape or kind.
        """
        named = self._named(weights)
        placed = self.step.place(named)
        with jax.enable_x64(True):
            others = {n: x for n, x in named.items() if n not in placed}
            placed |= {n: jax.device_put(jnp.asarray(x), self._replicated(n)) for n, x in others.items()}
        return self._tree(placed)

    def restore(self, weights: Any) -> Any:
        """Return the tree that the loss takes, stacked arrays and all, given one as `place` returns it."""
        named = self._named(weights)
        whole: list[Any] = []
        for names, shape in zip(self._trees.weight_names, self._trees.weight_shapes, strict=True):
            found = named[names[0]] if len(names) == 1 else jnp.stack([named[name] for name in names])
            whole.append(found if tuple(found.shape) == shape else found.reshape(shape))
        return self._trees.weights.unflatten(whole)

    def __call__(self, weights: Any, *batch: Any) -> StepTrees:
        """
        Return the loss and the gradients of a batch, given weights and the other arguments of the loss. What is not
        placed yet is. Keys of random numbers are not used: the plan has seeds of its own. It may be called in a
        function that JAX traces, but not differentiated.

        Raises `UnityError` for other trees than those of the loss, and arrays of another shape or kind.
        """
        named = self._named(weights)
        inputs = self._inputs(batch)
        given = {n: x for n, x in named.items() if n in self.step.weights}
        buffers = {n: x for n, x in named.items() if n in self.step.buffers}
        found = self.step(given, {n: x for n, x in inputs.items() if n in self.step.inputs}, buffers)
        with jax.enable_x64(True):
            gradients = self._tree(found.gradients, lambda name: jnp.zeros_like(named[name]))
        return StepTrees(found.loss, gradients, found.buffers)

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """Return the step by names, lowered to StableHLO and not compiled (`JaxStep.lower`)."""
        return self.step.lower(platform)

    def _replicated(self, name: str) -> jax.sharding.NamedSharding:
        del name
        return jax.sharding.NamedSharding(self.step.mesh, jax.sharding.PartitionSpec())

    def _named(self, weights: Any) -> dict[str, Any]:
        """Return the arrays of a tree of weights by name."""
        found: dict[str, Any] = {}
        for names, value in zip(self._trees.weight_names, _parts(self._trees.weights, weights, "weights"), strict=True):
            is_one = len(names) == 1 and not isinstance(value, tuple | list)
            if isinstance(value, jax.ShapeDtypeStruct):
                raise UnityError(f"jax: {names[0]} is only a shape; give an array")
            count = len(value) if isinstance(value, tuple | list) else (*getattr(value, "shape", ()), 1)[0]
            if not is_one and count != len(names):
                raise UnityError(f"jax: {names[0]} and its like are {count}; the plan has {len(names)}")
            found.update({names[0]: value} if is_one else dict(zip(names, value, strict=True)))
        return {name: self._shaped(name, array) for name, array in found.items()}

    def _shaped(self, name: str, array: Any) -> Any:
        """Return an array in the shape that the plan has for it, if that has as many elements."""
        wanted = self.step.shapes.get(name)
        shape = tuple(array.shape) if wanted is None else tuple(wanted.shape)
        return array if shape == tuple(array.shape) or prod(shape) != prod(array.shape) else array.reshape(shape)

    def _inputs(self, batch: Sequence[Any]) -> dict[str, Any]:
        parts = _parts(self._trees.batch, tuple(batch), "batch")
        return {n: x for n, x in zip(self._trees.input_names, parts, strict=True) if n is not None}

    def _tree(self, named: Mapping[str, Any], missing: Callable[[str], Any] | None = None) -> Any:
        """Return values by name in the tree of the weights; of names that they lack, what `missing` returns."""

        def of(name: str) -> Any:
            return named[name] if missing is None or name in named else missing(name)

        leaves = [of(n[0]) if len(n) == 1 else tuple(map(of, n)) for n in self._trees.weight_names]
        return self._trees.weights.unflatten(leaves)


def _parts(tree: Any, value: Any, what: str) -> list[Any]:
    """Return what is at each leaf of a tree in a value. Raises `UnityError` if it has another structure."""
    try:
        return tree.flatten_up_to(value)
    except (TypeError, ValueError) as error:
        raise UnityError(
            f"jax: the {what} are not as the loss was planned with: {str(error).splitlines()[0]}"
        ) from error
