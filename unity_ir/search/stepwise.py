"""
What stands between two ports of a value, without the table of all pairs.

A layout says where a value is on the way there, and where its gradient goes on the way back; with REPEAT, the second
does not follow from the first. Least sums over both ways are taken one way at a time: first over the ways there of
all layouts whose gradient goes to the same place, then over the ways back. That needs the seconds between layouts
without REPEAT only, some ten times fewer on large machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from unity_ir.search.problem import NOWHERE, Port
from unity_ir.search.space import Floats, Ints, LayoutSpace

GRAIN = 1e-12
"""Seconds to which sums are rounded down, so that equal layers, one after the other, come to ask for the same."""


@dataclass(frozen=True, eq=False)
class _End:
    """The layouts of a port, by where values are (`there`) and by where their gradients are (`back`)."""

    there: Ints
    back: Ints

    @cached_property
    def _by_back(self) -> tuple[Ints, list[Ints]]:
        """
        Where gradients may be, those with most layouts first; and of each of them a first layout, of those that have
        one a second, and so on.
        """
        order = np.argsort(self.back, kind="stable")
        distinct, starts, sizes = np.unique(self.back[order], return_index=True, return_counts=True)
        largest = np.argsort(-sizes, kind="stable")
        distinct, starts, sizes = distinct[largest], starts[largest], sizes[largest]
        rounds = [order[starts[sizes > n] + n] for n in range(int(sizes.max(initial=0)))]
        return distinct, rounds

    def least_both(self, of_layouts: Floats, other: _End, out: Floats, home: Floats) -> Floats:
        """For each layout of the other end the least of `of_layouts` + out[there, its there] + home[back, its back]."""
        distinct, (some, *more) = self._by_back
        first = out[self.there[some]]
        first += of_layouts[some][:, None]
        for some in more:
            ways = out[self.there[some]]
            ways += of_layouts[some][:, None]
            np.minimum(first[: len(some)], ways, out=first[: len(some)])
        ways = np.ascontiguousarray(first.T)[other.there]
        ways += np.ascontiguousarray(home[distinct].T)[other.back]
        return ways.min(axis=1)

    def least_there(self, of_layouts: Floats, other: _End, out: Floats) -> Floats:
        """Likewise, where nothing comes back."""
        alone = np.full(len(out), np.inf)
        np.minimum.at(alone, self.there, of_layouts)
        used = np.flatnonzero(np.isfinite(alone))
        return (out[used] + alone[used][:, None]).min(axis=0)[other.there]


@dataclass(frozen=True, eq=False)
class StepwiseBetween:
    """As `Between`, for messages only."""

    made: Port
    needs: Port
    space: LayoutSpace
    training: bool
    _seen: dict[tuple[bool, bytes], Floats] = field(default_factory=dict[tuple[bool, bytes], Floats])

    def of(self, made: Port, needs: Port) -> StepwiseBetween:
        """What stands between ports with some of the layouts."""
        return StepwiseBetween(made, needs, self.space, self.training)

    @cached_property
    def _nowhere(self) -> int:
        return int(len(self.needs.layouts) > 0 and self.needs.layouts[0] == NOWHERE)

    @cached_property
    def _ends(self) -> tuple[_End, _End]:
        there, back = self.space.stands
        made, needs = self.made.layouts, self.needs.layouts[self._nowhere :]
        return _End(there[made], back[made]), _End(there[needs], back[needs])

    def there(self, of_made: Floats) -> Floats:
        """The least of `of_made` and the way, for each layout needed, at most a grain too little."""
        return self._kept(True, of_made)

    def back(self, of_needs: Floats) -> Floats:
        """The least of `of_needs` and the way, for each layout made, at most a grain too little."""
        return self._kept(False, of_needs)

    def _kept(self, there: bool, given: Floats) -> Floats:
        if self._nowhere == len(self.needs.layouts):
            return np.full(len((self.needs if there else self.made).layouts), given.min())
        least = given.min()
        grains = np.floor((given - least) / GRAIN)
        key = there, grains.tobytes()
        if key not in self._seen:
            self._seen[key] = self._there(grains * GRAIN) if there else self._back(grains * GRAIN)
        return self._seen[key] + least

    def _there(self, of_made: Floats) -> Floats:
        made, needs = self._ends
        seconds = self.space.cheapest
        if self.training:
            least = made.least_both(of_made, needs, seconds, seconds.T)
        else:
            least = made.least_there(of_made, needs, seconds)
        return np.concatenate([np.full(self._nowhere, of_made.min()), least])

    def _back(self, of_needs: Floats) -> Floats:
        made, needs = self._ends
        seconds = self.space.cheapest
        somewhere = of_needs[self._nowhere :]
        if self.training:
            least = needs.least_both(somewhere, made, seconds.T, seconds)
        else:
            least = needs.least_there(somewhere, made, seconds.T)
        return np.minimum(least, of_needs[0]) if self._nowhere else least
