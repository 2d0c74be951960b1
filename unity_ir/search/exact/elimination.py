"""
Minimise a sum of tables over discrete variables exactly, by variable elimination (bucket elimination, Dechter 1999).

    min over x1..xn of sum_k table_k(f_ki(x_i), f_kj(x_j), ...)

On a chain this is dynamic programming; on a series-parallel graph it does the sequence and parallel splits of Unity
(section 5.2) without having to find them; on any graph it is exact, at a cost exponential in the treewidth of the
elimination order.

A table sees a variable through a projection `f`: the layout that a configuration needs, say. Values that all tables
around a variable project alike are merged, so tables stay small. Equal layers have identical tables and projections, so
each distinct elimination is done once over all graphs solved with one memo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from heapq import heappop, heappush
from math import inf, prod

import numpy as np
import numpy.typing as npt

from unity_ir.budget import spend
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits

VariableId = int


@dataclass(frozen=True, eq=False)
class Projection:
    """
    Sorts the values of one variable of a factor graph into classes, numbered below `size`: a table of costs has one row
    per class, not per value, since it costs the same for all values of a class (such as all configurations that need an
    operand in one layout). Every class occurs.
    """

    at: Ints
    size: int

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.at, kind="stable")
        return order, np.searchsorted(self.at[order], np.arange(self.size))

    def least(self, of_values: Floats) -> Floats:
        """
        Return the minimum cost in each class of the variable's values, [class]; `of_values` [value] is the cost of each
        value.
        """
        order, starts = self._order
        return np.minimum.reduceat(of_values[order], starts)


@dataclass(frozen=True, eq=False)
class Factor:
    """
    A table of costs over some variables; `axes` has, per variable, the projection from its values to table indices.
    """

    variables: tuple[VariableId, ...]
    axes: tuple[Projection, ...]
    table: Floats


@cache
def every(size: int) -> Projection:
    """Return the projection of a variable with `size` values that keeps all of them apart: value i has class i."""
    return Projection(np.arange(size), size)


def plain(variables: tuple[VariableId, ...], table: Floats) -> Factor:
    """
    Return a factor (a table of costs) over `variables`; `table` has one axis per variable, in that order, indexed by
    the variable's values themselves.
    """
    return Factor(variables, tuple(map(every, table.shape)), table)


@dataclass(frozen=True, eq=False)
class _JointProjection:
    """The coarsest common refinement of several projections of one variable, and each of them as a function of it."""

    axis: Projection
    each: Mapping[Projection, Ints]


@dataclass(frozen=True, eq=False)
class _Elimination:
    """Eliminate one variable: the factors it is in, and the shape of the factor that replaces them."""

    variable: VariableId
    involved: tuple[int, ...]
    """Numbers of factors."""
    key: tuple[object, ...]
    own: _JointProjection | None
    """The joint projection of this variable in factors with others; None if there are none."""
    others: tuple[VariableId, ...]
    seen: tuple[_JointProjection, ...]
    entries: int


@dataclass
class Memo:
    """Memo of the tables and projections made by eliminations, keyed by the identity of their inputs."""

    tables: dict[tuple[object, ...], Floats] = field(default_factory=dict[tuple[object, ...], Floats])
    joints: dict[tuple[int, ...], _JointProjection] = field(default_factory=dict[tuple[int, ...], _JointProjection])
    tokens: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    """A token for every table: of one made by an elimination, by its key."""
    parts: dict[tuple[object, ...], Floats] = field(default_factory=dict[tuple[object, ...], Floats])
    """Tables restricted to the only value of some variables."""
    held: dict[int, object] = field(default_factory=dict[int, object])
    """Objects whose `id` is in a key, kept alive so that no id is reused."""

    def joint(self, axes: Sequence[Projection]) -> _JointProjection:
        """
        Return the coarsest projection (classes of a variable's values) that tells apart all values that any of the
        projections `axes` tells apart; memoised. When the variable's tables are added up, their sum has one row per
        class of this projection.

        `axes`, at least one, are projections of the same variable. The result also maps each of its classes to the
        class in each of `axes`.
        """
        # Any order and number of the same axes is looked up by itself: sorting each time takes longer.
        given = tuple(map(id, axes))
        if given in self.joints:
            return self.joints[given]
        distinct = {id(a): a for a in axes}
        key = tuple(sorted(distinct))
        if key not in self.joints:
            parts = [distinct[k] for k in key]
            self.held.update(distinct)
            if len(parts) == 1:
                made = _JointProjection(parts[0], {parts[0]: np.arange(parts[0].size)})
            else:
                code = parts[0].at
                for part in parts[1:]:
                    code = code * part.size + part.at
                _, first, at = np.unique(code, return_index=True, return_inverse=True)
                made = _JointProjection(Projection(at.reshape(-1), len(first)), {p: p.at[first] for p in parts})
            self.joints[key] = made
        self.joints[given] = self.joints[key]
        return self.joints[key]

    def token(self, table: Floats) -> int:
        """
        Return a number that stands for an input table in the memo's keys. Tables are told apart as objects, not by
        their entries: the same object always gets the same number.
        """
        self.held[id(table)] = table
        return self.tokens.setdefault(("given", id(table)), len(self.tokens))


def minimise(sizes: Mapping[VariableId, int], factors: Sequence[Factor]) -> tuple[float, dict[VariableId, int]]:
    """
    Return (cost, assignment): the minimum of the sum of `factors` (tables of costs, each over some variables), and a
    value per variable that attains it.

    `sizes` has the number of values of each variable, by its number. Table entries of `inf` forbid a combination; the
    cost is `inf` if all are forbidden.
    """
    found = minimise_within(float("inf"), sizes, factors)
    assert found is not None
    return found


def minimise_within(
    limit: float, sizes: Mapping[VariableId, int], factors: Sequence[Factor], memo: Memo | None = None
) -> tuple[float, dict[VariableId, int]] | None:
    """
    Return (cost, assignment), as `minimise` does: the minimum of the sum of `factors` (tables of costs, each over some
    variables), and a value per variable that attains it; `sizes` has the number of values of each variable.

    Returns None if elimination would look at more than `limit` table entries. Those of tables in `memo`, which keeps
    the results of earlier eliminations, do not count; None starts with an empty memo.
    """
    found = {v: 0 for v, size in sizes.items() if size == 1}
    memo = memo or Memo()
    factors = [_without(f, found, memo) for f in factors]
    constant = sum(float(f.table) for f in factors if not f.variables)
    live = [f for f in factors if f.variables]
    order = _Order({v: size for v, size in sizes.items() if v not in found}, live, memo)
    steps = order.steps(limit)
    if steps is None:
        return None
    for step in steps:
        involved = [live[n] for n in step.involved]
        if step.key not in memo.tables:
            spend(limits().work_elimination + step.entries)
            memo.tables[step.key] = _eliminated(step, involved, sizes[step.variable])
        table = memo.tables[step.key]
        if step.others:
            live.append(Factor(step.others, tuple(j.axis for j in step.seen), table))
        else:
            constant += float(table)
    for step in reversed(steps):
        total = np.zeros(sizes[step.variable])
        for number in step.involved:
            factor = live[number]
            total += factor.table[
                tuple(
                    a.at if v == step.variable else a.at[found[v]]
                    for v, a in zip(factor.variables, factor.axes, strict=True)
                )
            ]
        found[step.variable] = int(total.argmin())
    return constant, found


def without(
    most: int,
    sizes: Mapping[VariableId, int],
    factors: Sequence[Factor],
    kept: Iterable[VariableId],
    memo: Memo,
) -> tuple[float, list[Factor]]:
    """
    Return (constant, factors): tables over fewer variables whose sum, with the constant, is for every assignment to
    these the minimum of the sum of `factors` over all others. `sizes` has the number of values of each variable.

    Left are the variables `kept`, and any whose elimination would look at more than `most` table entries by then.
    """
    order = _Order(sizes, factors, memo, kept)
    live = dict(enumerate(factors))
    constant, number = 0.0, len(factors)
    for step in order.cheap_steps(most):
        involved = [live.pop(n) for n in step.involved]
        if step.key not in memo.tables:
            spend(limits().work_elimination + step.entries)
            memo.tables[step.key] = _eliminated(step, involved, sizes[step.variable])
        table = memo.tables[step.key]
        if step.others:
            live[number] = Factor(step.others, tuple(j.axis for j in step.seen), table)
            number += 1
        else:
            constant += float(table)
    return constant, [*live.values()]


def _without(factor: Factor, fixed: Mapping[VariableId, int], memo: Memo) -> Factor:
    """Return the factor without the variables that have a single value."""
    left = tuple(v not in fixed for v in factor.variables)
    if all(left):
        return factor
    at = tuple(None if keep else int(a.at[0]) for a, keep in zip(factor.axes, left, strict=True))
    key = (id(factor.table), at)
    if key not in memo.parts:
        memo.held[id(factor.table)] = factor.table
        memo.parts[key] = factor.table[tuple(slice(None) if i is None else i for i in at)]
    return Factor(
        tuple(v for v, keep in zip(factor.variables, left, strict=True) if keep),
        tuple(a for a, keep in zip(factor.axes, left, strict=True) if keep),
        memo.parts[key],
    )


@dataclass(frozen=True, eq=False)
class _Outline:
    """A factor without its table."""

    variables: tuple[VariableId, ...]
    axes: tuple[Projection, ...]
    token: int


_Weight = tuple[int, _JointProjection | None, tuple[VariableId, ...], tuple[_JointProjection, ...]]
"""The entries of the table that an elimination looks at, and what else is known of it (`_Elimination`)."""


class _Order:
    """
    A greedy elimination order: always the variable with the smallest joint table next (min-weight), but for those that
    are kept.
    """

    def __init__(
        self,
        sizes: Mapping[VariableId, int],
        factors: Sequence[Factor],
        memo: Memo,
        kept: Iterable[VariableId] = (),
    ):
        self.memo = memo
        self.kept = frozenset(kept)
        self.outlines: list[_Outline] = []
        self.of: dict[VariableId, dict[int, _Outline]] = {v: {} for v in sizes}
        self.due: dict[VariableId, _Weight] = {}
        self.queue: list[tuple[int, VariableId]] = []
        for factor in factors:
            self._enter(_Outline(factor.variables, factor.axes, memo.token(factor.table)))
        for variable in sizes:
            self._weigh(variable)

    def steps(self, limit: float) -> list[_Elimination] | None:
        """Return the eliminations; None if those outside the memo look at more than `limit` entries."""
        out: list[_Elimination] = []
        new: set[tuple[object, ...]] = set()
        total = 0
        for step in self.cheap_steps(inf):
            if step.key not in self.memo.tables and step.key not in new:
                new.add(step.key)
                total += step.entries
                if total > limit:
                    return None
            out.append(step)
        return out

    def cheap_steps(self, most: float) -> Iterator[_Elimination]:
        """Yield the eliminations until the next one looks at more than `most` entries."""
        while self.queue:
            entries, variable = heappop(self.queue)
            weight = self.due.get(variable)
            if weight is None or weight[0] != entries:
                continue
            if entries > most:
                return
            step = self._elimination(variable, weight)
            yield step
            self._take(step)

    def _enter(self, outline: _Outline) -> None:
        for variable, axis in zip(outline.variables, outline.axes, strict=True):
            self.of[variable][len(self.outlines)] = outline
            self.memo.held[id(axis)] = axis
        self.outlines.append(outline)

    def _take(self, step: _Elimination) -> None:
        del self.due[step.variable]
        neighbours: dict[VariableId, None] = {}
        for number, outline in self.of.pop(step.variable).items():
            for other in outline.variables:
                if other != step.variable:
                    del self.of[other][number]
                    neighbours[other] = None
        if step.others:
            token = self.memo.tokens.setdefault(step.key, len(self.memo.tokens))
            self._enter(_Outline(step.others, tuple(j.axis for j in step.seen), token))
        for other in neighbours:
            self._weigh(other)

    def _weigh(self, variable: VariableId) -> None:
        if variable in self.kept:
            return
        spend(limits().work_elimination_order)
        seen: dict[VariableId, list[Projection]] = {}
        for outline in self.of[variable].values():
            if len(outline.variables) > 1:
                for v, axis in zip(outline.variables, outline.axes, strict=True):
                    seen.setdefault(v, []).append(axis)
        own = self.memo.joint(seen.pop(variable)) if seen else None
        found = {v: self.memo.joint(axes) for v, axes in seen.items()}
        # Those on which no table depends are no dims of the sum: an array has at most 32.
        joints = {v: joint for v, joint in found.items() if joint.axis.size > 1}
        entries = own.axis.size if own else 1
        for joint in joints.values():
            entries *= joint.axis.size
        self.due[variable] = entries, own, tuple(joints), tuple(joints.values())
        heappush(self.queue, (entries, variable))

    def _elimination(self, variable: VariableId, weight: _Weight) -> _Elimination:
        """Return the elimination of a variable, weighed as it is now."""
        entries, own, others, joints = weight
        names: dict[VariableId, int] = {variable: 0}
        key: list[object] = []
        for outline in self.of[variable].values():
            key.append(outline.token)
            key += [
                (names.setdefault(v, len(names)), id(axis))
                for v, axis in zip(outline.variables, outline.axes, strict=True)
            ]
        return _Elimination(variable, tuple(self.of[variable]), tuple(key), own, others, joints, entries)


def _eliminated(step: _Elimination, involved: Sequence[Factor], size: int) -> Floats:
    """Return the minimum over the variable of the sum of factors, indexed by the joint projections of the others."""
    alone = np.zeros(size)
    for factor in involved:
        if len(factor.variables) == 1:
            alone = alone + factor.table[factor.axes[0].at]
    if step.own is None:
        return np.asarray(alone.min())
    joints = {step.variable: step.own, **dict(zip(step.others, step.seen, strict=True))}
    order = list(joints)
    shape = tuple(joints[v].axis.size for v in order)
    tables: list[Floats] = []
    for factor in involved:
        if len(factor.variables) > 1:
            kept = [(v, axis) for v, axis in zip(factor.variables, factor.axes, strict=True) if v in joints]
            table = factor.table.reshape([axis.size for _, axis in kept])
            for i, (v, axis) in enumerate(kept):
                if joints[v].axis is not axis:
                    table = np.take(table, joints[v].each[axis], axis=i)
            places = [order.index(v) for v, _ in kept]
            table = table.transpose(np.argsort(places, kind="stable"))
            tables.append(table.reshape([n if i in places else 1 for i, n in enumerate(shape)]))
    return _least(step.own.axis.least(alone), tables, shape[1:])


def _least(alone: Floats, tables: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """Return the minimum over axis 0 of `alone` plus tables that broadcast to (len(alone), *shape)."""
    first, *others = _few(tables, len(alone) * prod(shape))
    first = first + alone.reshape(-1, *(1 for _ in shape))
    if not others:
        return np.broadcast_to(first.min(axis=0), shape).copy()
    if len(alone) * prod(shape) >= limits().dominance_entries:
        left = _not_above(np.hstack([t.reshape(len(alone), -1) for t in (first, *others)]))
        first, *others = (t[left] for t in (first, *others))
    best = np.full(shape, np.inf)
    lines = max(1, limits().cached_sums // prod(shape[1:]))
    for start in range(0, shape[0], lines):
        some = slice(start, start + lines)
        _least_of([t if t.shape[1] == 1 else t[:, some] for t in (first, *others)], best[some])
    return best


def _not_above(values: Floats) -> Ints:
    """Return the rows not dominated by one of a few others; a dominated row cannot attain a minimum of sums."""
    left = np.argsort(values.sum(axis=1), kind="stable")
    for tried in range(limits().dominance_rows):
        if tried >= len(left) or (tried == 2 and len(left) == len(values)):
            break
        after = left[tried + 1 :]
        left = np.concatenate([left[: tried + 1], after[_any_below(values, after, values[left[tried]])]])
    return np.sort(left)


def _any_below(values: Floats, rows: Ints, limit: Floats) -> npt.NDArray[np.bool_]:
    """Return, for some rows of `values`, whether any entry is below that of `limit` in its column: [row]."""
    some = limits().dominance_columns
    found = np.any(values[rows, :some] < limit[:some], axis=1)
    left = np.flatnonzero(~found)
    found[left] = np.any(values[rows[left], some:] < limit[some:], axis=1)
    return found


def _few(tables: Sequence[Floats], entries: int) -> list[Floats]:
    """Add up small tables while their sum stays small; return the rest, smallest first."""
    alike: dict[tuple[int, ...], Floats] = {}
    for table in tables:
        alike[table.shape] = alike[table.shape] + table if table.shape in alike else table
    left = sorted(alike.values(), key=lambda t: t.size)
    while len(left) > 1:
        shape = np.broadcast_shapes(left[0].shape, left[1].shape)
        if limits().presum_ratio * prod(shape) > entries:
            break
        left = sorted([left[0] + left[1], *left[2:]], key=lambda t: t.size)
    return left


def _least_of(tables: Sequence[Floats], best: Floats) -> None:
    """Lower `best` in place to the minimum over axis 0 of the sum of tables, in blocks that fit the cache."""
    rows = max(1, limits().cached_sums // best.size)
    joint = np.empty((rows, *best.shape))
    for start in range(0, len(tables[0]), rows):
        some = joint[: len(tables[0]) - start]
        np.add(tables[0][start : start + rows], tables[1][start : start + rows], out=some)
        for table in tables[2:]:
            some += table[start : start + rows]
        np.minimum(best, some[0] if len(some) == 1 else some.min(axis=0), out=best)
