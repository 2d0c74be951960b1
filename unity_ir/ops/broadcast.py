"""The gradient of a broadcast: sums over the broadcast dims."""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Operator, Shapes, Tensor
from unity_ir.ops.reduction import sum_leading
from unity_ir.tdl.syntax import AttrValue


def _broadcast_grad_line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    """
    Return the line that sums the dims that were missing or of size 1; those of size 1 are written at position 0.

    Given [2, 3, 4] to [3, 1], returns `out[i1, u2] = sum[i0, i2](g[i0, i1, i2])` with u2 of size 1.
    """
    (full,), shape = shapes, attributes["shape"]
    assert isinstance(shape, tuple)
    missing = len(full) - len(shape)
    if missing < 0 or any(new not in (1, old) for old, new in zip(full[max(missing, 0) :], shape, strict=False)):
        raise UnityError(f"pcg.broadcast_grad: {list(shape)} does not broadcast to {list(full)}")
    ones = [d for d, old in enumerate(full) if d >= missing and shape[d - missing] == 1 != old]
    summed = ", ".join(f"i{d}" for d in range(len(full)) if d < missing or d in ones)
    made = ", ".join(f"u{d}" if d in ones else f"i{d}" for d in range(missing, len(full)))
    read = f"g[{', '.join(f'i{d}' for d in range(len(full)))}]"
    sizes = f"  where {', '.join(f'size(u{d}) = 1' for d in ones)}" if ones else ""
    return f"broadcast_grad(g)  out[{made}] = " + (f"sum[{summed}]({read})" if summed else read) + sizes


BROADCAST_GRAD = Operator(_broadcast_grad_line, signature="broadcast_grad(g; shape: ints)")


def unbroadcast(grad: Tensor, x: Tensor) -> Tensor:
    """
    Return the gradient of `x`, of its shape, given `grad`, the gradient of `x` after NumPy's broadcasting: `grad`
    summed over the dims that broadcasting added or stretched.
    """
    missing = len(grad.shape) - len(x.shape)
    if grad.shape[missing:] == x.shape:
        return sum_leading(grad, missing)
    return BROADCAST_GRAD.one(grad, shape=x.shape)


OPERATORS = (BROADCAST_GRAD,)
