"""
Export what has a gradient of its own, `torch.autograd.Function`, as operators whose gradient is the same.

torch.export sees the forward of such a function alone. Two kinds can be told from it by their numbers, on random
operands: those whose backward is the gradient of their forward, such as fused activations, are their forward; those
whose backward multiplies each element by a number, such as rounding straight through, and reversal of gradients, are
`detach(forward(x)) + (x - detach(x)) * backward(1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from unity_ir.frontends.report import refuse

no_function_modes: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]
TRIES = 2
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""How far gradients may be apart, for constants in formulas are rounded, as those of gelu are."""


class Context:
    """
    Stands for the `ctx` of an `autograd.Function`: `save_for_backward` sets `saved_tensors`; the other methods do
    nothing.
    """

    def __init__(self, needs_input_grad: Sequence[bool]):
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Set `saved_tensors` to these tensors, in place of earlier ones."""
        self.saved_tensors = tensors

    def _ignored(self, *_: Any) -> None:
        """Take note of nothing."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignored


def exported(cls: Any, args: Sequence[Any]) -> Any:
    """
    Compute the `autograd.Function` `cls` on `args` by operators that torch.export records and that have the function's
    gradient; return the result.

    The function is first run several times on random operands, to tell which of two kinds it is: its backward is the
    gradient of its forward, or multiplies each element of the gradient by a factor. Raises `UnityError` if it is
    neither.
    """
    if _agrees(cls, args):
        return _forward(cls, _context(args), args)
    if not _is_by_elements(cls, args):
        why = "whose gradient is neither its forward's nor by elements"
        raise refuse(f"{cls.__name__} is a torch.autograd.Function, {why}; write it in PyTorch's operators")
    context, still = _context(args), [_still(a) for a in args]
    with torch.no_grad():
        out = _forward(cls, context, still)
        factors = _backward(cls, context, torch.ones_like(out))
    out = out.detach()
    for x, factor in zip(args, factors, strict=False):
        if factor is not None and _is_float(x):
            out = out + (x - x.detach()) * factor.detach()
    return out


def _still(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _context(args: Sequence[Any]) -> Context:
    return Context([_is_float(a) for a in args])


def _forward(cls: Any, context: Context, args: Sequence[Any]) -> Any:
    if cls.setup_context is torch.autograd.Function.setup_context:
        return cls.forward(context, *args)
    out = cls.forward(*args)
    cls.setup_context(context, tuple(args), out)
    return out


def _backward(cls: Any, context: Context, grad: torch.Tensor) -> tuple[Any, ...]:
    grads: Any = cls.backward(context, grad)
    return (*grads,) if isinstance(grads, tuple) else (grads,)  # pyright: ignore[reportUnknownVariableType]


def _random(args: Sequence[Any], seed: int) -> list[Any]:
    """Return operands of the same shapes and types, with random numbers in the place of floats."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for a in args:
        if not isinstance(a, torch.Tensor):
            found.append(a)
        elif _is_float(a):
            x = torch.randn(tuple(a.shape), generator=generator, dtype=torch.float64).to(a.dtype)
            found.append(x.requires_grad_())
        else:
            found.append(torch.ones(tuple(a.shape), dtype=a.dtype))
    return found


def _agrees(cls: Any, args: Sequence[Any]) -> bool:
    """Return whether the backward is the gradient of the forward."""

    def holds(seed: int) -> bool:
        operands = _random(args, seed)
        floats = [x for x in operands if _is_float(x)]
        out = _forward(cls, _context(operands), operands)
        grad = _random([out], seed + TRIES)[0].detach()
        wanted = torch.autograd.grad(out, floats, grad, allow_unused=True, materialize_grads=True)
        context = _context(operands)
        with torch.no_grad():
            _forward(cls, context, [_still(x) for x in operands])
            found = _backward(cls, context, grad)
        pairs = zip([g for x, g in zip(operands, found, strict=False) if _is_float(x)], wanted, strict=True)
        return all(torch.allclose(torch.zeros_like(b) if a is None else a, b, RELATIVE, ABSOLUTE) for a, b in pairs)

    return _tried(holds)


def _is_by_elements(cls: Any, args: Sequence[Any]) -> bool:
    """Return whether the backward multiplies each element of the gradient by a number."""

    def holds(seed: int) -> bool:
        operands = [_still(x) for x in _random(args, seed)]
        context = _context(operands)
        with torch.no_grad():
            out = _forward(cls, context, operands)
            grad = _random([out], seed + TRIES)[0].detach()
            factors, found = _backward(cls, context, torch.ones_like(out)), _backward(cls, context, grad)
        pairs = [(f, g) for f, g in zip(factors, found, strict=True) if f is not None]
        return bool(pairs) and all(
            f.shape == out.shape and torch.allclose(f * grad, g, RELATIVE, ABSOLUTE) for f, g in pairs
        )

    return _tried(holds)


def _tried(holds: Any) -> bool:
    """Return whether `holds` does for some seeds, on tensors with data, outside of the export; False where it fails."""
    with _disable_current_modes(), no_function_modes(), torch.enable_grad():
        try:
            return all(holds(seed) for seed in range(TRIES))
        except Exception:  # the function's own, for operands that are none of its
            return False
