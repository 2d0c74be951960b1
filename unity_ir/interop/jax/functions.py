# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The scalar and opaque functions that TDL (the language in which operators are defined) may call, in jax.numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

_LOW = 0xFFFFFFFF


def _where(condition: Array | bool, one: Array, other: Array) -> Array:
    # Not jnp.where, which is a call of a function of its own in StableHLO.
    dtype = jnp.result_type(one, other)
    shape = jnp.broadcast_shapes(*map(jnp.shape, (condition, one, other)))
    one, other = (jnp.broadcast_to(jnp.asarray(x, dtype), shape) for x in (one, other))
    return lax.select(jnp.broadcast_to(jnp.asarray(condition), shape), one, other)


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _identity(x: Array) -> Array:
    return x


def _relu(x: Array) -> Array:
    return jnp.maximum(x, 0)


def philox(seed: Array, position: Array) -> Array:
    """
    Return the random numbers in [0, 1) of `tdl.functions.philox`, which says what they are, as float32: one for each
    pair of `seed` and `position`, arrays of integers that are broadcast together.
    """
    key, counter = (jnp.asarray(x).astype(jnp.uint64) for x in (seed, position))
    shift, low = jnp.uint64(32), jnp.uint64(_LOW)
    k0, k1 = key & low, key >> shift
    c0, c1 = counter & low, counter >> shift
    c2 = c3 = jnp.zeros_like(counter)
    for _ in range(10):
        a, b = c0 * jnp.uint64(0xD2511F53), c2 * jnp.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ k0, b & low, (a >> shift) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + jnp.uint64(0x9E3779B9)) & low, (k1 + jnp.uint64(0xBB67AE85)) & low
    # 24 bits: float32 holds them.
    return (c0 >> jnp.uint64(8)).astype(jnp.float32) * 2.0**-24


FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "identity": _identity,
    "float8": _identity,
    "relu": _relu,
    "gelu": _gelu,
    "exp": jnp.exp,
    "log": jnp.log,
    "erf": jax.scipy.special.erf,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "abs": jnp.abs,
    "floor": jnp.floor,
    "pow": jnp.power,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "philox": philox,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "not": jnp.logical_not,
    "where": _where,
}
"""By the name of each function of `tdl.functions.FUNCTIONS`."""


def _largest(x: Array, count: int) -> Array:
    return lax.top_k(x, count)[1].astype(jnp.int64)


def _largest_values(x: Array, count: int) -> Array:
    return lax.top_k(x, count)[0]


def _equals_before(x: Array, count: int) -> Array:
    order = jnp.argsort(x, axis=-1, stable=True)
    ordered = jnp.take_along_axis(x, order, axis=-1)
    place = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)
    first = jnp.ones((*x.shape[:-1], 1), bool)
    is_first = jnp.concatenate([first, ordered[..., 1:] != ordered[..., :-1]], axis=-1)
    begins = lax.cummax(jnp.where(is_first, place, 0), axis=x.ndim - 1)
    back = jnp.argsort(order, axis=-1, stable=True)
    return jnp.take_along_axis(place - begins, back, axis=-1)[..., :count].astype(jnp.int64)


OPAQUE: Mapping[str, Callable[[Array, int], Array]] = {
    "equals_before": _equals_before,
    "topk_values": _largest_values,
    "topk_indices": _largest,
}
"""By the name of each function of `tdl.opaque.OPAQUE`, as `(array, size)` over the last dim."""
