"""Figures of predicted beside published steps: errors, rank correlations, and those of sources weighed alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from published_rows import Row


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction."""

    row: Row
    ms: float
    """Predicted milliseconds."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.ms / self.row.ms

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.ratio - 1)


@dataclass(frozen=True)
class Figures:
    """Figures of some rows."""

    rows: int
    median_ratio: float
    median_error: float
    most_error: float
    """The 90th percentile of the errors."""
    spearman: float | None
    """Rank correlation of predicted and measured milliseconds; None of fewer than three rows."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The figures as cells of a table."""
        rank = "" if self.spearman is None else f"{self.spearman:.3f}"
        return f"{self.rows}", f"{self.median_ratio:.2f}", f"{self.median_error:.1%}", f"{self.most_error:.1%}", rank


def figures(found: Sequence[Predicted]) -> Figures:
    """Return the figures of some rows."""
    errors = [p.error for p in found]
    rank = spearman(found) if len(found) > 2 else None
    return Figures(len(found), median(p.ratio for p in found), median(errors), percentile(errors, 0.9), rank)


def percentile(values: Iterable[float], part: float) -> float:
    """Return a percentile, interpolated between the two nearest of the values."""
    known = sorted(values)
    place = part * (len(known) - 1)
    low = int(place)
    high = min(low + 1, len(known) - 1)
    return known[low] + (place - low) * (known[high] - known[low])


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    order = sorted(values)
    return [(2 * order.index(v) + order.count(v) - 1) / 2 for v in values]


def spearman(found: Sequence[Predicted]) -> float:
    """Return Spearman's rank correlation of predicted and measured milliseconds; 1 if all are equal."""
    xs, ys = ranks([p.ms for p in found]), ranks([p.row.ms for p in found])
    middle = (len(found) - 1) / 2
    over = sum((x - middle) * (y - middle) for x, y in zip(xs, ys, strict=True))
    under = (sum((x - middle) ** 2 for x in xs) * sum((y - middle) ** 2 for y in ys)) ** 0.5
    return over / under if under else 1.0


def by(found: Iterable[Predicted], key: Callable[[Predicted], str]) -> Mapping[str, list[Predicted]]:
    """Return the rows by a text, in the order of their first."""
    out: dict[str, list[Predicted]] = {}
    for each in found:
        out.setdefault(key(each), []).append(each)
    return out


def weighed(found: Sequence[Predicted]) -> tuple[float, float]:
    """
    Return (median error, 90th percentile of the errors), each the mean over sources, so that a source of many rows
    counts as one of few.
    """
    each = [figures(some) for some in by(found, lambda p: p.row.source).values()]
    return mean(f.median_error for f in each), mean(f.most_error for f in each)
