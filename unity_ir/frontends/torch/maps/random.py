"""
Map random numbers from ATen operators to the compiler's, drawn by seed and position: each operator has a seed of its
own, so numbers differ from PyTorch's, and are alike however tensors are divided. Each mapping gets the call's `site`
(what PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns a value of the compiler's
graph.
"""

from __future__ import annotations

from math import pi

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import binary, scale, shift
from unity_ir.frontends.torch.site import CallSite, cast, maps
from unity_ir.frontends.torch.values import Operand, constant, op
from unity_ir.pcg.node import Value


def uniform_numbers(site: CallSite) -> Value:
    """
    Return random numbers in [0, 1), drawn from a new seed, in the shape and element type of the result that PyTorch
    recorded at `site` (f32 if that holds integers).
    """
    dtype = site.dtype if site.result.dtype.is_floating_point else "f32"
    return op("uniform", constant(0.0, site.shape, dtype), seed=site.seeds())


def normal_numbers(site: CallSite) -> Value:
    """
    Return standard normal random numbers in the shape and element type of the result that PyTorch recorded at `site`
    (f32 if that holds integers), by the method of Box and Muller (1958) from two new seeds.
    """
    radius, angle = uniform_numbers(site), uniform_numbers(site)
    root = op("sqrt", scale(op("log", shift(scale(radius, -1), 1)), -2))
    return op("mul", root, op("cos", scale(angle, 2 * pi)))


@maps("rand", "rand_like")
def rand(site: CallSite, *_: object, **__: object) -> Value:
    """Map PyTorch's random numbers in [0, 1), of the shape of its result."""
    return uniform_numbers(site)


@maps("randn", "randn_like")
def randn(site: CallSite, *_: object, **__: object) -> Value:
    """Map PyTorch's `randn`: normal random numbers of the shape that the call site records; arguments are not used."""
    return normal_numbers(site)


@maps("uniform")
def uniform(site: CallSite, x: Operand, low: float = 0, high: float = 1, **_: object) -> Value:
    """Map PyTorch's random numbers in [low, high), of the shape of `x`."""
    del x
    return shift(scale(uniform_numbers(site), high - low), low)


@maps("exponential")
def exponential(site: CallSite, x: Operand, rate: float = 1, **_: object) -> Value:
    """Map PyTorch's exponential random numbers with parameter `rate` (mean 1 / `rate`), of the shape of `x`."""
    del x
    return scale(op("log", shift(scale(uniform_numbers(site), -1), 1)), -1 / rate)


@maps("normal")
def normal(site: CallSite, x: Operand, mean: Operand = 0, deviation: Operand = 1, **_: object) -> Value:
    """
    Map PyTorch's `x.normal_(mean, deviation)`: return normal random numbers with this mean and deviation, in the shape
    of `x`. Raises `UnityError` for means or deviations that are tensors.
    """
    del x
    if not isinstance(mean, int | float) or not isinstance(deviation, int | float):
        raise UnityError("a mean or deviation that is a tensor has no mapping; scale and shift torch.randn_like")
    return shift(scale(normal_numbers(site), deviation), mean)


@maps("randint", "randint_like")
def randint(site: CallSite, *arguments: object, **_: object) -> Value:
    """
    Map PyTorch's random integers in [low, high), in the shape and element type of the result that PyTorch recorded at
    `site`. Of `arguments`, the integers are (low, high), or only high, and then low is 0; the others are not read.
    """
    bounds = [a for a in arguments if isinstance(a, int)]
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    whole = op("floor", scale(uniform_numbers(site), high - low))
    return cast(shift(whole, low), site.dtype)


@maps("bernoulli")
def bernoulli(site: CallSite, x: Operand, p: Operand | None = None, **_: object) -> Value:
    """
    Map PyTorch's random draws of 0 and 1: each is 1 with probability `p`, as in `x.bernoulli_(p)`, or, if `p` is None,
    with the probability that `x` has at the same position, as in `bernoulli(x)`.
    """
    drawn = uniform_numbers(site)
    return cast(binary(site.of_bools(), "lt", drawn, x if p is None else p, drawn.type.dtype), site.dtype)
