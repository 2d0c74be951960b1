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
    What a search minimises, a plan's cost: `second` times the seconds of a step, plus `byte` times the bytes that a
    device holds at the end of the forward. Where a step has several micro-batches, both are those of one of them.
    """

    second: float = 1.0
    """Cost of a second."""
    byte: float = 0.0
    """Cost of a byte; at 0, bytes are not counted, and `again` and `live` have no effect."""
    hidden: float = 0.0
    """
    Share (0 to 1) of the moves of weights and of their gradients, from and to where they rest, that is free, as
    overlapped with kernels.
    """
    again: bool = False
    """
    Whether a value that the backward reads costs the bytes of keeping it or the seconds of making it once more there
    (by its operator or, of one that was moved, by its move), whichever is less. Then no plan with recompute costs less
    than the minimum, whatever is recomputed and gathered again.
    """
    once: float = 1.0
    """
    Factor on the seconds that a step spends once (moves of weights and their gradients, updates) where the graph is one
    of several micro-batches, such as 1 / micro-batches. Below 1, moved weights and their accumulated gradients count as
    held for the whole step.
    """
    live: float = 1.0
    """Number of micro-batches whose activations are held at a time."""
    add: float = 0.0
    """
    Seconds per byte of adding a micro-batch's gradient of a weight to the sum of those before; charged only if `once`
    is not 1, and not where the product that makes the gradient adds it up (`additions`).
    """
    adding: float = 0.0
    """Share of the micro-batches whose gradients of weights are added to the sum of those before: all but the first."""

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
        Return the cost of storing a leaf (input, weight or constant) in each of several layouts: [layout]. `seconds`
        [layout] are those of the optimizer's update, and count times the field `once`, as a step has one update for all
        its micro-batches. `bytes` [layout] are those that the leaf and what is stored with it take on a device. Where
        the seconds are infinite, so is the cost.
        """
        return self.of(np.where(np.isfinite(seconds), self.once * np.nan_to_num(seconds, posinf=0.0), seconds), bytes)

    def additions(self, longer: Floats, reading: Floats) -> Floats:
        """
        Return the cost of having a matrix product, which makes a weight's gradient, also add it to the sum over earlier
        micro-batches, elementwise for arrays of choices. `longer` are the seconds by which the product takes longer in
        every micro-batch; `reading` those by which it takes longer in all but the first, where it also reads the sum.
        """
        return self.second * (longer + self.adding * reading)

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
        Return the cost of an operator for each way to shard it (a row of its `table`): [row]. `kept` says for each
        result whether the backward reads it, so that its bytes count.

        If `may_recompute`, or if the field `again` is True (any value may be recomputed), the cost of a row is that of
        saving the results or that of recomputing them in the backward, whichever is less. Recomputing reads the
        operator's operands once more: `before` is the cost of having them in the backward, which is added to that of
        recomputing.
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

        `sources` and `targets` are layout numbers. `training` adds the moves of the gradient in the other direction.
        `kept` adds the bytes of saving the moved value for the backward. If the field `again` is True (the backward may
        make values once more), it adds the seconds of moving the value again instead, where these cost less.
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
        Return the cost [rest, layout] of resharding a leaf (input, weight or constant) from each layout in which it may
        be stored (numbers `rests`) to every layout of `space`.

        `training` adds the seconds of resharding its gradient back, `kept` the bytes of keeping the moved leaf for the
        backward. If the leaf is a weight (`weight`), fields of this object change the cost:

        - `hidden`: this share of it is free, as overlapped.
        - `once`: seconds count times this. If it is not 1, the step has several micro-batches, and the bytes of the
          moved weight, and with `training` of its gradient, count whatever `kept` says.
        - `add`: if `once` is not 1, the cost also has the seconds for adding the gradient to the sum over earlier
          micro-batches. With `is_added` it has not: the matrix product that makes the gradient adds it.
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
