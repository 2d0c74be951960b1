"""
Represent labels that a language model shifts by one position and pads with the id that its loss ignores: the padding is
remembered, and built only where an operator other than the loss reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unity_ir.frontends.torch.values import Shape, constant, cut, op, reshape
from unity_ir.pcg.node import Value


@dataclass(frozen=True)
class Padded:
    """
    Labels of a loss that the model shifts by one position: the integers `value`, padded along `dim` with `before` and
    `after` elements that hold `fill`.

    A loss that ignores `fill` reads `value` without the padding; for other operators, `filled` builds the padding.
    """

    value: Value
    dim: int
    before: int
    after: int
    fill: int
    shape: Shape
    """The padded shape after reshapes."""

    @property
    def own(self) -> Shape:
        """
        The shape of the labels, padding included, right after they were padded; the field `shape` is their shape after
        later reshapes.
        """
        size = self.before + self.value.shape[self.dim] + self.after
        return (*self.value.shape[: self.dim], size, *self.value.shape[self.dim + 1 :])

    def filled(self) -> Value:
        """Return the labels with their padding as a value of the graph, in the shape after later reshapes (`shape`)."""
        shapes = [(*self.own[: self.dim], n, *self.own[self.dim + 1 :]) for n in (self.before, self.after)]
        before, after = ([constant(self.fill, s, self.value.type.dtype)] if s[self.dim] else [] for s in shapes)
        return reshape(op("concat", *before, self.value, *after, dim=self.dim), self.shape)

    def cut(self, dim: int, start: int, size: int) -> Padded | Value:
        """
        Return the slice of `size` positions from `start` on along dim `dim`, counted with the padding: as `Padded`, or
        as a value of the graph if no padding is left in it.

        Must not be called after a reshape.
        """
        if dim != self.dim:
            value = cut(self.value, dim, start, size)
            return replace(self, value=value, shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]))
        whole = self.value.shape[dim]
        low, high = max(start - self.before, 0), min(start + size - self.before, whole)
        value = cut(self.value, dim, low, high - low)
        before, after = max(self.before - start, 0), max(start + size - self.before - whole, 0)
        if not before and not after:
            return value
        return Padded(value, dim, before, after, self.fill, (*self.shape[:dim], size, *self.shape[dim + 1 :]))
