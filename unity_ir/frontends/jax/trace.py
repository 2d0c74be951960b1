# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Trace a loss function of JAX: its jaxpr, with a name for each array of its weights and of its batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.tree_util import DictKey, GetAttrKey, keystr, tree_flatten_with_path

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.attention import kept_whole
from unity_ir.frontends.report import one_line

CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "closed_call": "call_jaxpr"}
"""Primitives that call a function as it is, each with the parameter that holds its jaxpr."""


@dataclass(frozen=True)
class ArrayLeaf:
    """An array of the arguments of a loss function."""

    name: str
    """Its path in the argument, with dots: `layers.0.kernel`."""
    array: Any
    """A NumPy or JAX array, or the `jax.ShapeDtypeStruct` of one."""
    stacked: bool = False
    """Whether it is a weight that the loss reads only in scans over its first dim: one weight for each position."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        """The element type, as NumPy or JAX name it."""
        return self.array.dtype

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights or the input in the graph: several if `stacked`, else `name`."""
        return tuple(f"{self.name}.{i}" for i in range(self.shape[0])) if self.stacked else (self.name,)

    @property
    def is_key(self) -> bool:
        """Whether it is a key of random numbers: one of `jax.random.key`, or of `jax.random.PRNGKey`."""
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            return True
        return self.dtype == jnp.uint32 and self.shape == (2,)


@dataclass(frozen=True)
class LossTrace:
    """A loss function, traced for arrays of certain shapes."""

    name: str
    """The function's."""
    jaxpr: core.ClosedJaxpr
    """Takes the arrays of `weights`, then those of `batch`; its first result is the loss."""
    weights: tuple[ArrayLeaf, ...]
    batch: tuple[ArrayLeaf, ...]
    weights_tree: Any
    """The `PyTreeDef` of the first argument."""
    batch_tree: Any
    """The `PyTreeDef` of the tuple of the other arguments."""


def trace(loss: Callable[..., Any], arguments: Sequence[Any]) -> LossTrace:
    """
    Trace `loss(weights, *batch)`, which returns a scalar, or a tuple or list whose first element is one; `arguments`
    are examples of what it is called with, in which only shapes and element types count.

    Raises `UnityError` if the function fails, does not return a scalar, or has an argument that is no array.
    """
    if not arguments:
        raise UnityError("--from-jax: a loss needs its weights as first argument, and an example of a batch")
    weights, *batch = arguments
    parameters = _parameters(loss, len(batch))
    weight_leaves, weights_tree = _leaves(weights, "")
    batch_leaves: list[ArrayLeaf] = []
    for name, argument in zip(parameters, batch, strict=True):
        # The keys of a lone dict say enough.
        batch_leaves += _leaves(argument, "" if len(batch) == 1 and _has_keys(argument) else name)[0]
    batch_tree = jax.tree.structure(tuple(batch))
    names = _unique(weight_leaves, batch_leaves)

    def of_leaves(*arrays: Any) -> Any:
        own = weights_tree.unflatten(arrays[: len(weight_leaves)])
        return loss(own, *batch_tree.unflatten(arrays[len(weight_leaves) :]))

    try:
        with kept_whole():
            jaxpr = jax.make_jaxpr(of_leaves)(*(_struct(leaf.array) for leaf in (*weight_leaves, *batch_leaves)))
    except UnityError:
        raise
    except Exception as error:
        raise UnityError(f"--from-jax: tracing {_name(loss)} failed: {one_line(error)}") from error
    out = jaxpr.out_avals[0] if jaxpr.out_avals else None
    if out is None or getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, jnp.floating):
        what = "nothing" if out is None else out.str_short() if hasattr(out, "str_short") else str(out)
        raise UnityError(f"--from-jax: {_name(loss)} returns {what}; it must return a scalar loss, or (loss, other)")
    named = [ArrayLeaf(name, leaf.array) for name, leaf in zip(names, (*weight_leaves, *batch_leaves), strict=True)]
    own, given = named[: len(weight_leaves)], named[len(weight_leaves) :]
    variables = jaxpr.jaxpr.invars
    _check_weights(own, jaxpr.jaxpr)
    own = [
        ArrayLeaf(leaf.name, leaf.array, leaf.shape[:1] > (1,) and _only_scanned(jaxpr.jaxpr, variable))
        for leaf, variable in zip(own, variables, strict=False)
    ]
    return LossTrace(_name(loss), jaxpr, tuple(own), tuple(given), weights_tree, batch_tree)


def _parameters(loss: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the arguments of a loss after the first, of which there are `count`."""
    try:
        names = [p.name for p in inspect.signature(loss).parameters.values() if p.kind != p.VAR_POSITIONAL][1:]
    except (TypeError, ValueError):
        names = []
    return [*names[:count], *(f"argument{i}" for i in range(len(names[:count]) + 1, count + 1))]


def _has_keys(argument: Any) -> bool:
    """Return whether all arrays of a tree lie below names, as in a dict."""
    found = tree_flatten_with_path(argument)[0]
    return all(path and isinstance(path[0], DictKey | GetAttrKey) for path, _ in found)


def _leaves(argument: Any, prefix: str) -> tuple[list[ArrayLeaf], Any]:
    """Return the arrays of an argument, named by their paths behind `prefix`, and how it holds them."""
    found, tree = tree_flatten_with_path(argument)
    leaves: list[ArrayLeaf] = []
    for path, value in found:
        name = ".".join(filter(None, (prefix, keystr(path, simple=True, separator="."))))
        array = value if hasattr(value, "shape") and hasattr(value, "dtype") else _array(name, value)
        leaves.append(ArrayLeaf(name, array))
    return leaves, tree


def _array(name: str, value: Any) -> Any:
    if not isinstance(value, bool | int | float):
        raise UnityError(f"--from-jax: {name or 'an argument'} is {type(value).__name__}; it must be an array")
    return jnp.asarray(value)


def _unique(weights: Sequence[ArrayLeaf], batch: Sequence[ArrayLeaf]) -> list[str]:
    """Return a name for each array, all different: of a lone array `weight` or `input`; else its path."""
    taken: set[str] = set()
    names: list[str] = []
    for kind, leaves in (("weight", weights), ("input", batch)):
        for leaf in leaves:
            path = re.sub(r"[^\w.\-]+", "_", leaf.name).strip("._") or kind
            name, number = path, 1
            while name in taken or any(other.startswith(f"{name}.") for other in taken):
                number += 1
                name = f"{path}_{number}"
            taken.add(name)
            names.append(name)
    return names


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(array.shape), array.dtype)


def _name(loss: Callable[..., Any]) -> str:
    return re.sub(r"\W+", "_", getattr(loss, "__name__", type(loss).__name__)).strip("_") or "loss"


def _check_weights(leaves: Sequence[ArrayLeaf], jaxpr: core.Jaxpr) -> None:
    """Raise `UnityError` for keys of random numbers among the weights, and integers that are read but not given."""
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    for leaf, variable in zip(leaves, jaxpr.invars, strict=False):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UnityError(
                f"--from-jax: {leaf.name} of the weights is a key of random numbers; give it with the batch"
            )
        is_shape = isinstance(leaf.array, jax.ShapeDtypeStruct) and not jnp.issubdtype(leaf.dtype, jnp.floating)
        if is_shape and id(variable) in read:
            raise UnityError(f"--from-jax: {leaf.name} of the weights is {leaf.dtype}: a constant; give its values")


def _only_scanned(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """Return whether all that a jaxpr does with a variable, and at least something, is to scan over its first dim."""
    if any(out is variable for out in jaxpr.outvars):
        return False
    uses = 0
    for eqn in jaxpr.eqns:
        for at, operand in enumerate(eqn.invars):
            if operand is not variable:
                continue
            uses += 1
            name, params = eqn.primitive.name, eqn.params
            if name == "convert_element_type" and _only_scanned(jaxpr, eqn.outvars[0]):
                continue
            if name == "scan" and at >= params["num_consts"] + params["num_carry"]:
                continue
            if name not in CALLS:
                return False
            inner = params[CALLS[name]]
            inner = getattr(inner, "jaxpr", inner)
            if not _only_scanned(inner, inner.invars[at]):
                return False
    return uses > 0
