# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Compare the gradient that a function defines (`jax.custom_vjp`, `jax.custom_jvp`) with that of what it computes.

The compiler makes its own gradients, of what is computed; a function whose own differs is refused.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.values import evaluate

LARGEST = 1 << 24
"""Elements of operands above which gradients are not compared: it takes seconds."""

LIBRARY = Path(jax.__file__).parent
"""The folder of JAX, whose own functions have the gradients of what they compute."""


def check_gradient(eqn: Any, inner: Any) -> None:
    """
    Raise `UnityError` unless a function that an equation calls has the gradient of what it computes, the jaxpr `inner`,
    on random operands.
    """
    info = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    file = str(getattr(info, "func_filename", "") or "")
    if file and Path(file).is_relative_to(LIBRARY):
        return
    avals = [v.aval for v in eqn.invars]
    if sum(prod(a.shape) for a in avals) > LARGEST:
        raise UnityError("its own gradient cannot be compared on operands of this size; try a smaller example")
    generator = np.random.default_rng(0)
    operands = [_sample(a, generator) for a in avals]

    def own(*arguments: Any) -> Any:
        return evaluate(eqn, arguments)

    def plain(*arguments: Any) -> Any:
        return core.jaxpr_as_fun(inner)(*arguments)

    for a, b in zip(_gradients(own, operands), _gradients(plain, operands), strict=True):
        if not np.allclose(a, b, rtol=1e-3, atol=1e-5):
            raise UnityError("its own gradient is not that of what it computes; write it with lax.stop_gradient")


def _gradients(function: Any, operands: list[Any]) -> list[Any]:
    floating = [i for i, v in enumerate(operands) if jnp.issubdtype(v.dtype, jnp.floating)]

    def of(values: list[Any]) -> list[Any]:
        given = list(operands)
        for i, v in zip(floating, values, strict=True):
            given[i] = v
        found = function(*given)
        found = found if isinstance(found, list | tuple) else [found]
        return [v for v in found if jnp.issubdtype(v.dtype, jnp.floating)]

    made, pull = jax.vjp(of, [operands[i] for i in floating])
    generator = np.random.default_rng(1)
    (gradients,) = pull([jnp.asarray(generator.standard_normal(v.shape), v.dtype) for v in made])
    return [np.asarray(g, np.float64) for g in gradients]


def _sample(aval: Any, generator: np.random.Generator) -> Any:
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.asarray(generator.standard_normal(aval.shape), aval.dtype)
    if aval.dtype == jnp.bool_:
        return jnp.asarray(generator.random(aval.shape) < 0.5)
    return jnp.asarray(generator.integers(0, 2, aval.shape), aval.dtype)
