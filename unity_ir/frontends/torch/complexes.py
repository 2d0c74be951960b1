"""
Represent complex numbers during an import by their real and imaginary parts: rotary position embedding multiplies by
them, and the compiler has no complex element type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from unity_ir.frontends.torch.site import CallSite
from unity_ir.frontends.torch.values import Operand, Shape, cut, op, reshape, shape_of
from unity_ir.pcg.node import Value


@dataclass(frozen=True)
class Complex:
    """
    A tensor of complex numbers during an import: operands `real` and `imag`, of one shape and one real element type.

    Never part of a graph: PyTorch's loss is real, so that every complex number ends in operators that read its parts.
    Gradients of the parts are those that PyTorch computes (its gradient of a complex number has that of the real part
    and that of the imaginary part).
    """

    real: Operand
    imag: Operand

    @property
    def shape(self) -> Shape:
        return shape_of(self.real)


def is_complex(node: fx.Node) -> bool:
    """Return whether an operator of an exported graph computes one tensor, of complex numbers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def in_parts(x: Any) -> Any:
    """Return complex numbers that are known at import, a tensor or a number, as `Complex`; anything else as it is."""
    if isinstance(x, torch.Tensor) and x.is_complex():
        return Complex(x.real.contiguous(), x.imag.contiguous())
    return Complex(x.real, x.imag) if isinstance(x, complex) else x


def real_view(site: CallSite, x: Any) -> Any:
    """
    Return complex numbers as PyTorch's `view_as_real` does, [.., 2] with real and imaginary parts: a value of the graph
    for `Complex`, a tensor for a tensor. Anything else is returned as it is.
    """
    if isinstance(x, torch.Tensor) and x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    if not isinstance(x, Complex):
        return x
    parts = [site.value(part) for part in (x.real, x.imag)]
    parts = [reshape(part, (*part.shape, 1)) for part in parts]
    return op("concat", *parts, dim=len(x.shape))


def complex_view(x: Any) -> Any:
    """
    Return the complex numbers that a real view [.., 2] holds, as PyTorch's `view_as_complex` does: `Complex` for a
    value of the graph, a tensor for a tensor. Anything else is returned as it is.

    Of a value that was reshaped from [.., 2 n] to [.., n, 2], the parts are every other element of the last dim of the
    value before, as in models that write rotary embedding in real numbers.
    """
    if isinstance(x, torch.Tensor):
        return torch.view_as_complex(x.contiguous())
    if not isinstance(x, Value):
        return x
    before = x.node.operands[0] if x.node.op == "reshape" else x
    *lead, count, _ = (1, *x.shape)
    last = len(before.shape) - 1
    if before.shape == (*lead[1:], 2 * count):
        real, imag = (cut(before, last, i, count, 2) for i in (0, 1))
    else:
        real, imag = (reshape(cut(x, len(x.shape) - 1, i, 1), x.shape[:-1]) for i in (0, 1))
    return Complex(real, imag)
