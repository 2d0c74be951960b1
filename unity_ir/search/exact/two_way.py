"""
What stands between two ports of a value, without the table of all pairs.

A layout says where a value is on the way there, and where its gradient goes on the way back; with REPEAT, the second
does not follow from the first. Least sums over both ways are taken one way at a time: first over the ways there of
all layouts whose gradient goes to the same place, then over the ways back. That needs the seconds between layouts
without REPEAT only, some ten times fewer on large machines, and of them only those that the ports have. Sums are taken
in single precision, and a little less than that is said, so that a bound by them is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from unity_ir.search.exact.factor_graph import NOWHERE, Port, numbered
from unity_ir.search.layouts.axes import Floats, Ints, Singles
from unity_ir.search.layouts.space import LayoutSpace

GRAIN = 1e-12
"""Seconds to which sums are rounded down, so that equal layers, one after the other, come to ask for the same."""

CACHED = 2**16
"""Numbers that a processor holds near by: so many are summed at a time."""

ROUNDED = 2.0**-20
"""What is taken off sums of a few numbers in single precision, as a part of them, so that none is too much."""


@dataclass(frozen=True, eq=False)
class _End:
    """The layouts of a port, by where values are (`there`) and where their gradients are (`back`), each numbered."""

    there: Ints
    theres: Ints
    """Which layouts without REPEAT these are."""
    back: Ints
    backs: Ints

    @cached_property
    def _by_back(self) -> tuple[Ints, list[Ints]]:
        """
        Where gradients may be, those with most layouts first; and of each of them a first layout, of those that have
        one a second, and so on.
        """
        order = np.argsort(self.back, kind="stable")
        along = self.back[order]
        starts = np.flatnonzero(np.diff(along, prepend=-1))
        distinct, sizes = along[starts], np.diff(starts, append=len(along))
        largest = np.argsort(-sizes, kind="stable")
        distinct, starts, sizes = distinct[largest], starts[largest], sizes[largest]
        rounds = [order[starts[sizes > n] + n] for n in range(int(sizes.max(initial=0)))]
        return distinct, rounds

    def least_both(self, of_layouts: Singles, other: _End, out: Singles, home: Singles) -> Singles:
        """For each layout of the other end the least of `of_layouts` + out[its there, there] + home[its back, back]."""
        distinct, (some, *more) = self._by_back
        first = out[self.there[some]]
        first += of_layouts[some][:, None]
        for some in more:
            ways = out[self.there[some]]
            ways += of_layouts[some][:, None]
            np.minimum(first[: len(some)], ways, out=first[: len(some)])
        there, back = np.ascontiguousarray(first.T), np.ascontiguousarray(home[distinct].T)
        least = np.empty(len(other.there), dtype=there.dtype)
        rows = max(1, CACHED // len(distinct))
        for start in range(0, len(least), rows):
            at = slice(start, start + rows)
            ways = there[other.there[at]]
            ways += back[other.back[at]]
            ways.min(axis=1, out=least[at])
        return least

    def least_there(self, of_layouts: Singles, other: _End, out: Singles) -> Singles:
        """Likewise, where nothing comes back."""
        alone = np.full(len(out), np.inf, dtype=np.float32)
        np.minimum.at(alone, self.there, of_layouts)
        return (out + alone[:, None]).min(axis=0)[other.there]


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

    def ready(self) -> None:
        """Find the seconds of the ways, which is done otherwise when they are asked for."""
        if self._nowhere < len(self.needs.layouts):
            _ = self._out, self._home if self.training else None

    @cached_property
    def _nowhere(self) -> int:
        return int(len(self.needs.layouts) > 0 and self.needs.layouts[0] == NOWHERE)

    @cached_property
    def _ends(self) -> tuple[_End, _End]:
        there, back = self.space.stands
        made, needs = self.made.layouts, self.needs.layouts[self._nowhere :]
        of_made, of_needs = self._numbered(there[made], there[needs])
        back_needs, back_made = self._numbered(back[needs], back[made])
        return _End(*of_made, *back_made), _End(*of_needs, *back_needs)

    def _numbered(self, sources: Ints, targets: Ints) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """Layouts by number, and which are numbered: those there are, if they are few."""
        (some, source), (targeted, target) = numbered(sources), numbered(targets)
        if self.space.mostly(len(some), len(targeted)):
            return (sources, some), (targets, targeted)
        return (source, some), (target, targeted)

    @cached_property
    def _out(self) -> Singles:
        """Seconds of the ways there [where made, where needed]."""
        made, needs = self._ends
        return self.space.least(made.theres, needs.theres)

    @cached_property
    def _home(self) -> Singles:
        """Seconds of the ways back [from where needed, to where made]."""
        made, needs = self._ends
        return self.space.least(needs.backs, made.backs)

    def there(self, of_made: Floats) -> Floats:
        """The least of `of_made` and the way, for each layout needed, at most a little too little."""
        return self._kept(True, of_made)

    def back(self, of_needs: Floats) -> Floats:
        """The least of `of_needs` and the way, for each layout made, at most a little too little."""
        return self._kept(False, of_needs)

    def _kept(self, there: bool, given: Floats) -> Floats:
        if self._nowhere == len(self.needs.layouts):
            return np.full(len((self.needs if there else self.made).layouts), given.min())
        least = given.min()
        grains = np.floor((given - least) / GRAIN)
        key = there, grains.tobytes()
        if key not in self._seen:
            more = (grains * GRAIN).astype(np.float32)
            found = self._there(more) if there else self._back(more)
            self._seen[key] = found.astype(np.float64) * (1 - ROUNDED)
        return self._seen[key] + least

    def _there(self, of_made: Singles) -> Singles:
        made, needs = self._ends
        if self.training:
            least = made.least_both(of_made, needs, self._out, self._home.T)
        else:
            least = made.least_there(of_made, needs, self._out)
        return np.concatenate([np.full(self._nowhere, of_made.min()), least])

    def _back(self, of_needs: Singles) -> Singles:
        made, needs = self._ends
        somewhere = of_needs[self._nowhere :]
        if self.training:
            least = needs.least_both(somewhere, made, self._out.T, self._home)
        else:
            least = needs.least_there(somewhere, made, self._out.T)
        return np.minimum(least, of_needs[0]) if self._nowhere else least
