"""
Map operators on complex numbers from ATen to the compiler's operators on their real and imaginary parts (`Complex`).
Each mapping gets the call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen arguments,
in which complex numbers are `Complex`; it returns `Complex` where PyTorch's result is complex, else a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.complexes import Complex, complex_view, real_view
from unity_ir.frontends.torch.maps.elementwise import add, compared, div, mul, scale, sub, where
from unity_ir.frontends.torch.maps.shape import cat, stack
from unity_ir.frontends.torch.site import MAPPINGS, CallSite, maps_complex
from unity_ir.frontends.torch.values import Operand, op
from unity_ir.pcg.node import Value

Number: TypeAlias = "Complex | Value | torch.Tensor | float"
"""An operand of an operator on complex numbers: complex or real ones."""


def _by_parts(name: str) -> None:
    """Register the mapping of an ATen operator that does the same with real and imaginary parts."""

    @maps_complex(name)
    def both(site: CallSite, *args: Any, **kwargs: Any) -> Complex | list[Complex]:
        real, imag = (MAPPINGS[name](site.in_reals(), *part[0], **part[1]) for part in _parts(site, args, kwargs))
        if isinstance(real, list | tuple):
            return [Complex(a, b) for a, b in zip(real, imag, strict=True)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return Complex(real, imag)

    del both


def _parts(site: CallSite, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments with the real part of each `Complex`, and with the imaginary part, as values of the graph."""
    inner = site.in_reals()
    real = pytree.tree_map_only(Complex, lambda x: inner.value(x.real), (args, kwargs))
    imag = pytree.tree_map_only(Complex, lambda x: inner.value(x.imag), (args, kwargs))
    return real, imag


for _name in (
    *("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as"),
    *("ravel", "detach", "transpose", "swapaxes", "swapdims", "numpy_T", "t", "mT", "permute", "movedim", "moveaxis"),
    *("expand", "expand_as", "broadcast_to", "slice", "narrow", "select", "split", "split_with_sizes", "chunk"),
    *("unbind", "repeat", "tile", "repeat_interleave", "roll", "flip", "index", "index_select", "gather"),
    *("neg", "sum", "mean", "cumsum"),
):
    _by_parts(_name)


def _complex(x: Number) -> Complex:
    return x if isinstance(x, Complex) else Complex(x, 0.0)


@maps_complex("view_as_complex")
def view_as_complex(site: CallSite, x: Value) -> Complex:
    """Map PyTorch's view of pairs of real numbers [.., 2] as complex ones [..]."""
    del site
    return complex_view(x)


@maps_complex("view_as_real", "view_as_real_copy")
def view_as_real(site: CallSite, x: Complex) -> Value:
    """Map PyTorch's view of complex numbers [..] as pairs of real ones [.., 2]."""
    return real_view(site, x)


@maps_complex("real")
def real(site: CallSite, x: Complex) -> Value:
    """Map PyTorch's real parts of complex numbers."""
    return site.fit(site.value(x.real))


@maps_complex("imag")
def imag(site: CallSite, x: Complex) -> Value:
    """Map PyTorch's imaginary parts of complex numbers."""
    return site.fit(site.value(x.imag))


@maps_complex("complex")
def from_parts(site: CallSite, x: Operand, y: Operand) -> Complex:
    """Map PyTorch's complex numbers of real parts `x` and imaginary parts `y`, which are broadcast."""
    inner = site.in_reals()
    return Complex(inner.fit(inner.value(x)), inner.fit(inner.value(y)))


@maps_complex("polar")
def polar(site: CallSite, size: Operand, angle: Operand) -> Complex:
    """Map PyTorch's complex numbers of absolute values `size` at the angles `angle`, in radians."""
    inner = site.in_reals()
    a = inner.value(angle)
    return Complex(mul(inner, op("cos", a), size), mul(inner, op("sin", a), size))


@maps_complex("exp")
def exp(site: CallSite, x: Complex) -> Complex:
    """Map PyTorch's `exp(x)`: of the absolute value `exp(real(x))`, at the angle `imag(x)`."""
    return polar(site, op("exp", site.in_reals().value(x.real)), x.imag)


@maps_complex("_conj", "conj", "conj_physical")
def conj(site: CallSite, x: Complex) -> Complex:
    """Map PyTorch's complex conjugate."""
    return Complex(x.real, scale(site.in_reals().value(x.imag), -1))


@maps_complex("resolve_conj", "resolve_neg", "lift_fresh")
def unchanged(site: CallSite, x: Complex) -> Complex:
    """Map copies that carry out what PyTorch only noted (a conjugate): `x`, for here it is carried out at once."""
    del site
    return x


@maps_complex("abs")
def absolute(site: CallSite, x: Complex) -> Value:
    """Map PyTorch's absolute value; at 0, where it has no gradient, PyTorch's is 0."""
    a, b = (site.value(part, site.dtype) for part in (x.real, x.imag))
    squares = op("add", op("square", a), op("square", b))
    zero = compared("eq", squares, 0.0)
    return where(site, zero, 0.0, op("sqrt", where(site, zero, 1.0, squares)))


@maps_complex("contiguous", "clone", "alias", "to", "_to_copy", "type_as")
def converted(site: CallSite, x: Number, *_: object, **__: object) -> Complex | Value:
    """
    Map copies and type conversions to and from complex numbers. As in PyTorch, of complex numbers that become real the
    imaginary part is lost.
    """
    inner, x = site.in_reals(), _complex(x)
    parts = [inner.fit(inner.value(part)) for part in (x.real, x.imag)]
    return Complex(*parts) if site.result.dtype.is_complex else parts[0]


@maps_complex("copy")
def copy(site: CallSite, x: Number, source: Number, non_blocking: bool = False) -> Complex | Value:
    """Map PyTorch's copy of `source` into `x`, of which either may be real, in the shape and element type of `x`."""
    del x, non_blocking
    return converted(site, source)


def _sums(name: str, by: Callable[..., Value]) -> None:
    """Register the mapping of a sum or difference, by that of real numbers; of a real operand the other part is 0."""

    @maps_complex(name)
    def mapped(site: CallSite, x: Number, y: Number, **kwargs: Any) -> Complex:
        inner, a, b = site.in_reals(), _complex(x), _complex(y)
        return Complex(*(by(inner, inner.value(v), w, **kwargs) for v, w in ((a.real, b.real), (a.imag, b.imag))))

    del mapped


for _name, _by in (("add", add), ("sub", sub), ("rsub", MAPPINGS["rsub"])):
    _sums(_name, _by)


@maps_complex("div", "divide", "true_divide")
def divided(site: CallSite, x: Number, y: Number) -> Complex:
    """Map PyTorch's `x / y`, of which either may be real: `x` times the conjugate of `y`, by its squared size."""
    inner, a = site.in_reals(), _complex(x)
    if isinstance(y, Complex):
        c, d = (inner.value(part) for part in (y.real, y.imag))
        size = add(inner, op("square", c), op("square", d))
        a, y = product(site, mul, a, Complex(c, scale(d, -1))), size
    return Complex(*(div(inner, inner.value(part), y) for part in (a.real, a.imag)))


@maps_complex("reciprocal")
def reciprocal(site: CallSite, x: Complex) -> Complex:
    """Map PyTorch's `1 / x`."""
    return divided(site, 1.0, x)


def product(site: CallSite, by: Callable[..., Value], x: Number, y: Number) -> Complex:
    """Return the product of complex numbers, or of complex and real ones, by that of real numbers."""
    inner = site.in_reals()
    if not isinstance(y, Complex):
        a = _complex(x)
        return Complex(*(by(inner, inner.value(part), y) for part in (a.real, a.imag)))
    if not isinstance(x, Complex):
        return Complex(by(inner, x, y.real), by(inner, x, y.imag))
    a, b, c, d = x.real, x.imag, y.real, y.imag
    real = sub(inner, by(inner, a, c), by(inner, b, d))
    return Complex(real, add(inner, by(inner, a, d), by(inner, b, c)))


def _products(name: str) -> None:
    """Register the mapping of a product of complex numbers."""

    @maps_complex(name)
    def mapped(site: CallSite, x: Number, y: Number) -> Complex:
        return product(site, MAPPINGS[name], x, y)

    del mapped


for _name in ("mul", "multiply", "matmul", "mm", "bmm", "mv", "dot"):
    _products(_name)


@maps_complex("where")
def chosen(site: CallSite, condition: Operand, x: Number, y: Number) -> Complex:
    """Map PyTorch's choice by a condition between complex numbers, of which either may be real."""
    inner, a, b = site.in_reals(), _complex(x), _complex(y)
    return Complex(*(where(inner, condition, v, w) for v, w in ((a.real, b.real), (a.imag, b.imag))))


def _joins(name: str, by: Callable[..., Value]) -> None:
    """Register the mapping of a concatenation, by that of real numbers."""

    @maps_complex(name)
    def mapped(site: CallSite, xs: Sequence[Number], dim: int = 0) -> Complex:
        if not all(isinstance(x, Complex) for x in xs):
            raise UnityError("it joins complex and real numbers; convert the real ones (`.to(torch.complex64)`) before")
        found = [_complex(x) for x in xs]
        return Complex(*(by(site.in_reals(), part, dim) for part in ([x.real for x in found], [x.imag for x in found])))

    del mapped


for _name, _by in (("cat", cat), ("stack", stack)):
    _joins(_name, _by)
