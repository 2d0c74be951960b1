"""
The layout search of one graph as a sum of terms: variables with costs, and links between two of them.

A variable is an operator (its rows are configurations) or a relay (its rows are the layouts in which a value with
several users, or a leaf, may be found). A link is a value on its way: from the layout one variable's row makes to the
layout another's row needs, at what resharding costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unity_ir.search.exact.elimination import Axis, every
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.objective import TIME, Price
from unity_ir.search.layouts.space import LayoutSpace

SPARSE = 20
"""Numbers of layouts are sorted where there are fewer than one in so many."""

NOWHERE = -1
"""Instead of a layout: nothing is needed, because another operand of the same operator is there already."""


@dataclass(frozen=True, eq=False)
class Port:
    """The layouts that rows of a variable make or need, where a link begins or ends."""

    layouts: Ints
    """Distinct, sorted."""
    axis: Axis
    """For each row, which of them."""

    @property
    def at(self) -> Ints:
        return self.axis.at

    def least(self, of_rows: Floats) -> Floats:
        """The minimum over the rows of each layout."""
        return self.axis.least(of_rows)

    def of(self, rows: Ints | npt.NDArray[np.bool_]) -> Port:
        """The port of some of the rows."""
        return port(self.layouts[self.at[rows]])


def port(layouts: Ints) -> Port:
    """The port of rows that make or need these layouts."""
    distinct, at = numbered(layouts)
    return Port(distinct, Axis(at, len(distinct)))


def numbered(layouts: Ints) -> tuple[Ints, Ints]:
    """The different layouts, sorted, and which of them each is; where they lie near each other, without sorting."""
    least, most = (int(layouts.min()), int(layouts.max())) if len(layouts) else (0, 0)
    if most - least > SPARSE * len(layouts):
        distinct, at = np.unique(layouts, return_inverse=True)
        return distinct, at.reshape(-1)
    there = np.zeros(most + 1 - least, dtype=bool)
    there[layouts - least] = True
    distinct = np.flatnonzero(there)
    number = np.empty(len(there), dtype=np.int64)
    number[distinct] = np.arange(len(distinct))
    return distinct + least, number[layouts - least]


@dataclass(frozen=True, eq=False)
class Kind:
    """What variables of one structure share."""

    among: int
    """Rows there were before those no optimum needs were left out."""
    rows: Ints
    """Their numbers: of configurations in the operator's table, or of layouts."""
    seconds: Floats
    """What each costs, with the leaves that only it reads."""
    own: Axis
    """The rows themselves."""
    made: tuple[Port, ...]
    """Per result; of a relay, one."""
    needs: tuple[Port, ...]
    """Per operand that is no leaf, or is shared; of a relay, one, or none if it is a leaf."""


@dataclass(frozen=True, eq=False)
class Between:
    """What stands between two ports: seconds [layout made, layout needed]."""

    made: Port
    needs: Port
    seconds: Floats

    def there(self, of_made: Floats) -> Floats:
        """The least of `of_made` and the way, for each layout needed."""
        return (of_made[:, None] + self.seconds).min(axis=0)

    def back(self, of_needs: Floats) -> Floats:
        """The least of `of_needs` and the way, for each layout made."""
        return (self.seconds + of_needs).min(axis=1)

    def of(self, made: Port, needs: Port) -> Between:
        """What stands between ports with some of the layouts."""
        at = np.searchsorted(self.made.layouts, made.layouts), np.searchsorted(self.needs.layouts, needs.layouts)
        return Between(made, needs, self.seconds[np.ix_(*at)])


class Way(Protocol):
    """What stands between two ports, as far as messages need to know."""

    @property
    def made(self) -> Port: ...

    @property
    def needs(self) -> Port: ...

    def there(self, of_made: Floats) -> Floats:
        """The least of `of_made` and the way, for each layout needed."""
        ...

    def back(self, of_needs: Floats) -> Floats:
        """The least of `of_needs` and the way, for each layout made."""
        ...

    def of(self, made: Port, needs: Port) -> Way:
        """What stands between ports with some of the layouts."""
        ...


@dataclass(frozen=True, eq=False)
class Link:
    """A value between two variables."""

    source: int
    target: int
    between: Way

    @property
    def made(self) -> Port:
        return self.between.made

    @property
    def needs(self) -> Port:
        return self.between.needs

    @property
    def seconds(self) -> Floats:
        """Seconds [layout made, layout needed]. Raises `TypeError` where only messages are passed."""
        if not isinstance(self.between, Between):
            raise TypeError("search: this link has no table of seconds")
        return self.between.seconds


@dataclass
class Problem:
    """Minimise the sum of `seconds` of one row per variable, and of the links between them. Links go up in number."""

    rows: list[Ints]
    """Per variable, the rows of its kind that are left."""
    seconds: list[Floats]
    own: list[Axis]
    """The rows themselves."""
    links: list[Link]

    def __post_init__(self) -> None:
        # Ports and ways of the same rows of the same ones, so that equal layers go on sharing them.
        self._ports: dict[tuple[int, bytes], tuple[Port, Port]] = {}
        self._ways: dict[tuple[int, int, int], tuple[Way, Way]] = {}
        self.into: list[list[int]] = [[] for _ in self.rows]
        self.out: list[list[int]] = [[] for _ in self.rows]
        for number, link in enumerate(self.links):
            self.out[link.source].append(number)
            self.into[link.target].append(number)

    def among(self, rows: Sequence[Ints]) -> Problem:
        """The problem with some of the rows of every variable."""
        links: list[Link] = []
        for link in self.links:
            made, needs = self._port(link.made, rows[link.source]), self._port(link.needs, rows[link.target])
            links.append(Link(link.source, link.target, self._way(link.between, made, needs)))
        return Problem(
            [of[some] for of, some in zip(self.rows, rows, strict=True)],
            [of[some] for of, some in zip(self.seconds, rows, strict=True)],
            [every(len(some)) for some in rows],
            links,
        )

    def steps(self) -> int:
        """Sums in one pass of messages, about."""
        return sum((len(k.made.layouts) + len(k.needs.layouts)) * len(k.made.layouts) for k in self.links)

    def keep(self, variable: int, rows: npt.NDArray[np.bool_]) -> None:
        """Drop rows of a variable."""
        self.rows[variable] = self.rows[variable][rows]
        self.seconds[variable] = self.seconds[variable][rows]
        self.own[variable] = every(len(self.rows[variable]))
        for number in (*self.into[variable], *self.out[variable]):
            link = self.links[number]
            made = self._port(link.made, rows) if variable == link.source else link.made
            needs = self._port(link.needs, rows) if variable == link.target else link.needs
            self.links[number] = Link(link.source, link.target, self._way(link.between, made, needs))

    def _port(self, of: Port, rows: Ints | npt.NDArray[np.bool_]) -> Port:
        key = id(of), rows.tobytes()
        if key not in self._ports:
            self._ports[key] = of, of.of(rows)
        return self._ports[key][1]

    def _way(self, of: Way, made: Port, needs: Port) -> Way:
        key = id(of), id(made), id(needs)
        if key not in self._ways:
            self._ways[key] = of, of.of(made, needs)
        return self._ways[key][1]


def between(
    space: LayoutSpace, made: Port, needs: Port, training: bool, price: Price = TIME, kept: bool = True
) -> Between:
    """What resharding costs between two ports; what is needed nowhere costs nothing."""
    nowhere = int(len(needs.layouts) > 0 and needs.layouts[0] == NOWHERE)
    seconds = price.reshard(space, made.layouts, needs.layouts[nowhere:], training, kept)
    return Between(made, needs, np.hstack([np.zeros((len(seconds), 1)), seconds]) if nowhere else seconds)


class Rows(Protocol):
    """A table of which a row is made when it is asked for."""

    def __getitem__(self, at: int, /) -> Floats: ...


def undominated(
    seconds: Floats, ends: Sequence[tuple[Ints, Rows | Floats]], candidates: int = 256
) -> npt.NDArray[np.bool_]:
    """
    Which rows are needed: not those that another row and the reshards to and from its layouts stand in for.

    `ends` has for every link of the variable the layouts of the rows, and the seconds [of another, of one] it takes to
    put another row's layout in the place of one's: from where one finds the value to where another needs it, or from
    where another makes it to where one does. This is the dead-end elimination of side-chain placement (Goldstein,
    1994), with the triangle inequality for the difference of the links.
    """
    alive = np.ones(len(seconds), dtype=bool)
    tried = 0
    for best in np.argsort(seconds, kind="stable"):
        if not alive[best]:
            continue
        left = np.flatnonzero(alive)
        instead = np.full(len(left), seconds[best])
        for at, apart in ends:
            instead += apart[int(at[best])][at[left]]
        alive[left[instead < seconds[left] - 1e-15]] = False
        tried += 1
        if tried == candidates:
            break
    return alive
