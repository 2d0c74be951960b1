# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Draw random numbers from keys that are inputs of a loss. They are not JAX's: every draw has a seed of its own.

Numbers drawn from a key that is known at import are constants, as JAX has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.values import to_torch, torch_type


class RandomKey:
    """Stands for a key of random numbers that is, or was made of, an input of the loss."""


def _result(eqn: Any) -> tuple[tuple[int, ...], torch.dtype]:
    aval = eqn.outvars[0].aval
    return tuple(aval.shape), torch_type(aval.dtype)


def _uniform(eqn: Any, key: RandomKey, low: Any, high: Any) -> torch.Tensor:
    del key
    shape, dtype = _result(eqn)
    low, high = to_torch(low), to_torch(high)
    return torch.rand(shape, dtype=dtype) * (high - low) + low


def _bernoulli(eqn: Any, key: RandomKey, chance: Any) -> torch.Tensor:
    del key
    chance = to_torch(chance)
    return torch.rand(_result(eqn)[0], dtype=chance.dtype) < chance


def _normal(eqn: Any, key: RandomKey) -> torch.Tensor:
    del key
    shape, dtype = _result(eqn)
    return torch.randn(shape, dtype=dtype)


def _integers(eqn: Any, key: RandomKey, low: Any, high: Any) -> torch.Tensor:
    del key
    if not low.size == high.size == 1:
        raise UnityError("the bounds of random integers depend on data, or on the place; give two numbers")
    shape, dtype = _result(eqn)
    return torch.randint(int(low.reshape(-1)[0]), int(high.reshape(-1)[0]), shape).to(dtype)


DRAWS: Mapping[str, Callable[..., torch.Tensor]] = {
    "_uniform": _uniform,
    "_bernoulli": _bernoulli,
    "_normal": _normal,
    "_normal_real": _normal,
    "_randint": _integers,
}
"""By the name that `jax.random` gives the function that draws."""
