"""
Compute messages over the reshard of a value and of its gradient, without the dense table of layout pairs.

A layout says where the value is, and where its gradient is; with REPEAT, one does not follow from the other. Minima
over both are taken in two steps: first over the value's reshards from all layouts with the same gradient layout, then
over the gradient's reshards. That needs distances between layouts without REPEAT only, some ten times fewer on large
machines, and only between those in the ports. Sums are in float32 and rounded down, so that bounds computed from them
hold. Where few pairs of layouts are left, minima are over a table of these, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from unity_ir.search.exact.factor_graph import NOWHERE, Port, numbered
from unity_ir.search.layouts.axes import Floats, Ints, Singles
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.space import LayoutSpace

GRAIN = 1e-12
"""Seconds to which costs are rounded down, so that equal layers in sequence send equal (memoised) messages."""


ROUNDED = 2.0**-20
"""float32 slack that keeps the sum a lower bound."""

TILE = 128
"""Rows that are transposed at a time."""


@dataclass(frozen=True, eq=False)
class _Groups:
    """
    Layouts in groups, by the number of each group: each round has one more layout of each, of the largest groups first.
    """

    numbers: Ints
    """The number of the group of each layout in the first round."""
    rounds: list[Ints]

    @staticmethod
    def of(numbers: Ints) -> _Groups:
        """Return the groups, given the number of the group of each layout."""
        order = np.argsort(numbers, kind="stable")
        along = numbers[order]
        starts = np.flatnonzero(np.diff(along, prepend=-1))
        distinct, sizes = along[starts], np.diff(starts, append=len(along))
        largest = np.argsort(-sizes, kind="stable")
        distinct, starts, sizes = distinct[largest], starts[largest], sizes[largest]
        return _Groups(distinct, [order[starts[sizes > n] + n] for n in range(int(sizes.max(initial=0)))])

    def least(
        self, rows: Ints, of_layouts: Singles, near: Singles, columns: Ints, targets: Ints, far: Singles
    ) -> Singles:
        """
        Return, for each target, the minimum over layouts of `of_layouts` + near[row, column] + far[target, group].

        `rows` has the row of each layout; `columns` and `targets` have the column, and the row in `far`, of each
        target.
        """
        there = self._least_near(rows, of_layouts, near, far.shape[1])
        least = np.empty(len(columns), dtype=np.float32)
        block = max(1, limits().cached_messages // far.shape[1])
        ways, more = np.empty((2, block, far.shape[1]), dtype=np.float32)
        for start in range(0, len(least), block):
            at = slice(start, start + block)
            some = len(columns[at])
            # Without a mode, `take` fills a copy first.
            np.take(there, columns[at], axis=0, out=ways[:some], mode="clip")
            np.take(far, targets[at], axis=0, out=more[:some], mode="clip")
            ways[:some] += more[:some]
            ways[:some].min(axis=1, out=least[at])
        return least

    def _least_near(self, rows: Ints, of_layouts: Singles, near: Singles, groups: int) -> Singles:
        """Return [column, group] the minimum over a group's layouts of `of_layouts` + near[row, column]."""
        columns = near.shape[1]
        ordered = np.full((groups, columns), np.inf, dtype=np.float32)
        block = max(1, limits().cached_messages // max(1, columns))
        first, ways = np.empty((2, block, columns), dtype=np.float32)
        for start in range(0, len(self.numbers), block):
            numbers = self.numbers[start : start + block]
            for number, layouts in enumerate(self.rounds):
                some = layouts[start : start + block]
                if not len(some):
                    break
                sums = (ways if number else first)[: len(some)]
                np.take(near, rows[some], axis=0, out=sums, mode="clip")
                sums += of_layouts[some][:, None]
                if number:
                    np.minimum(first[: len(some)], sums, out=first[: len(some)])
            ordered[numbers] = first[: len(numbers)]
        least = np.empty((columns, groups), dtype=np.float32)
        for start in range(0, groups, TILE):
            # In one piece, it takes several times as long.
            least[:, start : start + TILE] = ordered[start : start + TILE].T
        return least


@dataclass(frozen=True, eq=False)
class _End:
    """The layouts of a port as pairs of indices: where the value is (`there`) and where its gradient is (`back`)."""

    there: Ints
    theres: Ints
    """The layouts without REPEAT that `there` indexes."""
    back: Ints
    backs: Ints

    @cached_property
    def _by_there(self) -> _Groups:
        return _Groups.of(self.there)

    @cached_property
    def _by_back(self) -> _Groups:
        return _Groups.of(self.back)

    def least_both(self, of_layouts: Singles, other: _End, out: Singles, home: Singles) -> Singles:
        """
        Return, for each layout of the other end, the minimum of `of_layouts` + out[there, there] + home[back, back].

        One of the tables is the transpose of a contiguous one: the value's is taken first if it is not that one, so
        that both are read along rows.
        """
        if out.flags.c_contiguous:
            return self._by_back.least(self.there, of_layouts, out, other.there, other.back, home.T)
        return self._by_there.least(self.back, of_layouts, home, other.back, other.there, out.T)

    def least_there(self, of_layouts: Singles, other: _End, out: Singles) -> Singles:
        """
        Return, for each layout of the other end, the minimum of `of_layouts` + out[there, there], without a gradient.
        """
        alone = np.full(len(out), np.inf, dtype=np.float32)
        np.minimum.at(alone, self.there, of_layouts)
        return (out + alone[:, None]).min(axis=0)[other.there]


@dataclass(frozen=True, eq=False)
class TwoWayCost:
    """
    The seconds [layout made, layout needed] of moving a value of `space` and, if `training`, its gradient back, as an
    edge cost that needs no dense table.

    `made` are the layouts in which an operator makes the value, `needs` those in which its reader needs it.
    """

    made: Port
    needs: Port
    space: LayoutSpace
    training: bool
    _seen: dict[tuple[bool, bytes], Floats] = field(default_factory=dict[tuple[bool, bytes], Floats])
    _known: Floats | None = None
    """The table `_dense`, if it was known when this was made."""

    def of(self, made: Port, needs: Port) -> TwoWayCost:
        """
        Return the cost restricted to fewer layouts at either end of the edge: those of the ports `made` and `needs`,
        which must be among those of this cost's own ports.
        """
        known: Floats | None = self.__dict__.get("_dense")
        if known is not None:
            rows = np.searchsorted(self.made.layouts, made.layouts)
            known = known[np.ix_(rows, np.searchsorted(self.needs.layouts, needs.layouts))]
        return TwoWayCost(made, needs, self.space, self.training, _known=known)

    def ready(self) -> None:
        """
        Compute now the seconds of reshards between this edge's layouts, rather than when the first message along the
        edge (least seconds of one side for each layout of the other) is asked for. `Bounds.ahead` does so while it
        waits.
        """
        if self._nowhere < len(self.needs.layouts):
            _ = self._out, self._home if self.training else None

    @cached_property
    def _nowhere(self) -> int:
        return int(len(self.needs.layouts) > 0 and self.needs.layouts[0] == NOWHERE)

    @cached_property
    def _ends(self) -> tuple[_End, _End]:
        there, back = self.space.representatives
        made, needs = self.made.layouts, self.needs.layouts[self._nowhere :]
        of_made, of_needs = self._numbered(there[made], there[needs])
        back_needs, back_made = self._numbered(back[needs], back[made])
        return _End(*of_made, *back_made), _End(*of_needs, *back_needs)

    def _numbered(self, sources: Ints, targets: Ints) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """Return layouts as indices, and the layouts indexed: only those that occur, if they are few."""
        (some, source), (targeted, target) = numbered(sources), numbered(targets)
        if self.space.mostly(len(some), len(targeted)):
            return (sources, some), (targets, targeted)
        return (source, some), (target, targeted)

    @cached_property
    def _out(self) -> Singles:
        """Seconds of the value's reshards [where made, where needed]."""
        made, needs = self._ends
        return self.space.lower_bounds(made.theres, needs.theres)

    @cached_property
    def _home(self) -> Singles:
        """Seconds of the gradient's reshards [from where needed, to where made]."""
        made, needs = self._ends
        return self.space.gradient.lower_bounds(needs.backs, made.backs)

    @cached_property
    def _dense(self) -> Floats | None:
        """
        The seconds [layout made, layout needed], where these are so few pairs that one table of them takes less than
        minima in two steps; else None.
        """
        if self._known is not None or len(self.made.layouts) * len(self.needs.layouts) > limits().dense_pairs:
            return self._known
        return self._tabulated()

    @property
    def seconds(self) -> Floats:
        """The seconds [layout made, layout needed] as one table, however large."""
        return self._tabulated() if self._dense is None else self._dense

    def _tabulated(self) -> Floats:
        seconds = np.zeros((len(self.made.layouts), len(self.needs.layouts)))
        if self._nowhere < len(self.needs.layouts):
            made, needs = self._ends
            seconds[:, self._nowhere :] = self._out[np.ix_(made.there, needs.there)]
            if self.training:
                seconds[:, self._nowhere :] += self._home.T[np.ix_(made.back, needs.back)]
        return seconds

    def there(self, of_made: Floats) -> Floats:
        """
        Return the min-sum message to the target, [layout needed]: min over layouts made of `of_made` + cost, rounded
        down.

        `of_made` [layout made] is the message that arrives at the source, in seconds.
        """
        return self._kept(True, of_made)

    def back(self, of_needs: Floats) -> Floats:
        """
        Return the min-sum message to the source, [layout made]: min over layouts needed of cost + `of_needs`, rounded
        down.

        `of_needs` [layout needed] is the message that arrives at the target, in seconds.
        """
        return self._kept(False, of_needs)

    def _kept(self, there: bool, given: Floats) -> Floats:
        if self._dense is not None:
            return (self._dense + given[:, None]).min(axis=0) if there else (self._dense + given).min(axis=1)
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
