"""Define what a search minimises: seconds, bytes, or seconds plus a price on bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.operator_table import OperatorTable
from unity_ir.search.layouts.space import LayoutSpace


@dataclass(frozen=True, slots=True)
class Price:
    """
    The objective of a search: `second` per second of an iteration, plus `byte` per byte held at the end of its forward.

    The share `hidden` of the moves of weights and their gradients, to and from where they rest, is free: it is taken as
    overlapped with kernels.

    With `again`, a value that the backward reads costs the bytes of keeping it or the seconds of making it once more
    there, by its operator or, of one that was moved, by its move, whichever is less. So no plan with recompute takes
    less, whatever is recomputed and gathered again.

    Of a graph that is one of several micro-batches, `once` is how much a second counts that a step spends once (moves
    of weights and their gradients, updates), such as 1 / micro-batches; below 1, what is moved is kept for the whole
    step, and so is the gradient that accumulates there: to add a micro-batch's gradient to those before takes `add`
    seconds for each byte of it, or none where a product does. `live` is the number of micro-batches whose activations
    are held.
    """

    second: float = 1.0
    byte: float = 0.0
    hidden: float = 0.0
    again: bool = False
    once: float = 1.0
    live: float = 1.0
    add: float = 0.0

    def of(self, seconds: Floats, bytes: Floats) -> Floats:
        """
        Return the cost of `seconds` and `bytes`, two arrays of one shape: `second * seconds + byte * bytes`,
        elementwise.

        For the objective `SPACE` (bytes alone), returns the bytes, even where the seconds are infinite.
        """
        if self.byte == 0 or self == SPACE:
            return bytes if self == SPACE else self.second * seconds
        return self.second * seconds + self.byte * bytes

    def rest(self, seconds: Floats, bytes: Floats) -> Floats:
        """
        Return the cost of storing a leaf, elementwise: `seconds` are those of its update, which a step does once, and
        `bytes` those that its tensors take.
        """
        return self.of(np.where(np.isfinite(seconds), self.once * np.nan_to_num(seconds, posinf=0.0), seconds), bytes)

    def recomputes(self, table: OperatorTable, kept: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """
        Return whether recomputing an operator's results in the backward costs less than saving them, for each way to
        shard the operator (a row of its table): [row].

        `kept` says for each result whether the backward reads it, so that it would be saved.
        """
        none = np.zeros(len(table))
        return self.of(table.again, none) < self.of(none, self.live * table.bytes(kept))

    def rows(self, table: OperatorTable, kept: Sequence[bool], may_recompute: bool, before: float = 0.0) -> Floats:
        """
        Return the cost of an operator for each way to shard it (a row of its table): [row]. `kept` says for each result
        whether the backward reads it, so that its bytes count.

        With `may_recompute`, or `again`, the cost of a row is that of saving the results or of recomputing them,
        whichever is less; `before` is the cost of having there what recomputing them reads.
        """
        if self.byte == 0:
            return self.second * table.seconds
        whole = self.of(table.seconds, self.live * (table.halos + table.bytes(kept)))
        if not may_recompute and not self.again:
            return whole
        return np.minimum(whole, self.of(table.seconds + table.again, self.live * table.halos) + before)

    def reshard(self, space: LayoutSpace, sources: Ints, targets: Ints, training: bool, kept: bool) -> Floats:
        """
        Return the cost [source, target] of moving a value between layouts of `space`.

        `sources` and `targets` are layout numbers. `training` adds the moves of the gradient in the other direction;
        `kept` adds the bytes of saving the moved value for the backward.
        """
        seconds = space.reshard(sources, targets, training)
        if self.byte == 0:
            return seconds if self.second == 1 else self.second * seconds
        bytes = space.moved_bytes(sources, targets) * (kept * self.live)
        if not self.again or not kept:
            return self.of(seconds, bytes)
        once_more = space.reshard(sources, targets, False) if training else seconds
        return self.second * seconds + np.minimum(self.byte * bytes, self.second * once_more)

    def leaf(
        self, space: LayoutSpace, rests: Ints, training: bool, kept: bool, weight: bool, is_added: bool = False
    ) -> Floats:
        """
        Return the cost [rest, layout] of resharding a leaf from each layout in which it is stored (numbers `rests`) to
        every layout of `space`.

        `training` adds the seconds of resharding its gradient back, `kept` the bytes of keeping the moved leaf for the
        backward. For a `weight` (rather than an input), the share `hidden` of the cost is not charged, as overlapped.
        Where its gradient `is_added` by the product that makes it, adding it up takes no seconds.
        """
        if weight and self.once != 1:
            seconds = self.second * self.once * space.reshard_from_few(rests, training)
            if training and self.add and not is_added:
                seconds = seconds + self.second * self.add * space.elements * space.gradient.item
            if self.byte:
                kept_elements = space.moved_bytes(rests, np.arange(len(space))) / space.item
                seconds = seconds + self.byte * kept_elements * (space.item + training * space.gradient.item)
        elif self.byte == 0 and self.second == 1 and weight:
            seconds = space.reshard_from_few(rests, training)
        else:
            seconds = self.reshard(space, rests, np.arange(len(space)), training, kept)
        return (1 - self.hidden) * seconds if weight and self.hidden else seconds


TIME = Price()
"""Seconds alone."""

SPACE = Price(0.0, 1.0)
"""Bytes alone."""
