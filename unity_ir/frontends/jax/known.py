# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Functions of `jax.nn` and `jax.numpy` that PyTorch has as one operator.

A call counts as one of them if its name and its jaxpr are the same as those that JAX makes of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as nn

Function: TypeAlias = Callable[..., torch.Tensor]


def _same(jax_function: Callable[..., Any], function: Function) -> Callable[[Any], Function | None]:
    """Return a function that gives `function` for an equation that calls `jax_function`, else None."""

    def of(eqn: Any) -> Function | None:
        own = _text_of(jax_function, eqn.primitive.name, tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars))
        return function if own == _text(eqn) else None

    return of


@cache
def _text_of(function: Callable[..., Any], primitive: str, types: tuple[tuple[Any, Any], ...]) -> str | None:
    try:
        made = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types))
    except (TypeError, ValueError):
        return None
    return next((_text(eqn) for eqn in made.jaxpr.eqns if eqn.primitive.name == primitive), None)


def _text(eqn: Any) -> str:
    return str(eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr"))


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def _logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(x, y)


KNOWN: Mapping[str, Sequence[Callable[[Any], Function | None]]] = {
    "relu": [_same(jax.nn.relu, torch.relu)],
    "relu6": [_same(jax.nn.relu6, nn.relu6)],
    "silu": [_same(jax.nn.silu, nn.silu)],
    "softplus": [_same(jax.nn.softplus, nn.softplus)],
    "elu": [_same(jax.nn.elu, nn.elu)],
    "leaky_relu": [_same(jax.nn.leaky_relu, nn.leaky_relu)],
    "log_softmax": [_same(jax.nn.log_softmax, _log_softmax)],
    "log_sigmoid": [_same(jax.nn.log_sigmoid, nn.logsigmoid)],
    "logaddexp": [_same(jnp.logaddexp, _logaddexp)],
}
"""By the name of the call."""

WITH_NUMBER = ("elu", "leaky_relu")
"""Names of calls whose operands after the first are numbers in PyTorch, so must be known."""
