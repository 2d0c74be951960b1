"""
All terms up to a size, bottom-up: operators are applied to one representative of every class of equal terms.

A term that falls into a class there already is makes a candidate: it and the class's representative should be equal.
Terms are computed in batches, one for every operator and types of operands; those of the last size are told apart by
fingerprints and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from unity_ir.errors import UnityError
from unity_ir.rules.research.generate.attributes import steps
from unity_ir.rules.research.generate.field import Batch
from unity_ir.rules.research.generate.fingerprint import Fingerprints, fingerprints, line, random_value
from unity_ir.rules.research.generate.order import canonical, merged
from unity_ir.rules.research.generate.space import ARITY, PARALLEL, Space
from unity_ir.rules.research.generate.terms import Terms, TermStep, Type, TypedTerm, parallel_step, result_types

Ids = npt.NDArray[np.int32]

BATCH = 1 << 13
"""Terms computed at once: their values should fit into a processor's cache."""

MOST_VARIABLES = 15
"""Most variables: four bits tell them apart, and one value stands for none."""

Tick = Callable[[int, int, int], None]
"""Called with the size, the number of steps of this size that are done, and the number of all of them."""


@dataclass
class _Level:
    """The classes of one size: by type, their numbers and values."""

    ids: dict[int, Ids] = field(default_factory=dict[int, Ids])
    values: dict[int, Batch] = field(default_factory=dict[int, Batch])


@dataclass
class _Made:
    """The terms made of one type at one size, in order."""

    prints: list[Fingerprints] = field(default_factory=list[Fingerprints])
    steps: list[Ids] = field(default_factory=list[Ids])
    operands: list[Ids] = field(default_factory=list[Ids])
    values: list[Batch] = field(default_factory=list[Batch])


@dataclass(frozen=True, slots=True)
class _Work:
    """A step to apply to all classes of the given sizes and types."""

    step: TermStep
    type: int
    operands: tuple[tuple[int, int], ...]
    """Size and type of each."""
    alike: bool
    """Whether the step commutes, so that operands are taken in one order only."""


class Enumeration:
    """
    Enumerates the terms (operators applied to variables) of a space, groups those of equal value into classes, and
    collects pairs of equal terms as candidates for rules. Call `run` once, then `candidates`.

    Values are compared by 64-bit fingerprints at the first set of sizes only. The constructor raises `UnityError` for a
    space of more than `MOST_VARIABLES` variables.
    """

    def __init__(self, space: Space):
        self.space, self._most = space, space.most_elements
        self.types: list[Type] = []
        self.steps: list[TermStep] = []
        self.variables: list[tuple[int, Type]] = []
        self.terms = self.found = 0
        """Terms computed, and how many of them fell into a class there already was."""
        self._type_ids: dict[Type, int] = {}
        self._step_ids: dict[TermStep, int] = {}
        self._steps_on: dict[tuple[str, tuple[Type, ...]], list[tuple[TermStep, Type]]] = {}
        self._levels: list[_Level] = []
        # Of every class: the step that makes it (below 0 for variables), its operands, its variables in order of use.
        self._step = np.zeros(0, dtype=np.int32)
        self._operands = np.zeros((0, ARITY), dtype=np.int32)
        self._uses = np.zeros(0, dtype=np.uint64)
        self._known: dict[int, tuple[Fingerprints, Ids]] = {}
        self._pairs: list[tuple[Ids, Ids, Ids]] = []
        self._start()

    @property
    def classes(self) -> int:
        """The number of distinct values among the terms enumerated so far, each the class of all terms that have it."""
        return len(self._step)

    @property
    def kept(self) -> int:
        """
        The number of candidates for rules (pairs of equal terms) that `candidates` yields: most of those that differ
        from another only in the names of variables are left out.
        """
        return sum(len(made_by) for made_by, _, _ in self._pairs)

    def run(self, tick: Tick = lambda size, done, total: None) -> None:
        """
        Enumerate the terms of every number of operators up to the space's (`space.size`), smallest first; the method
        `candidates` then yields the pairs of equal ones.

        `tick` reports progress: it is called with three numbers, that of the operators in the terms now enumerated, and
        those of the steps done and of all steps for such terms. A step applies one operator to all operands of given
        types and numbers of operators.
        """
        for size in range(1, self.space.size + 1):
            last = size == self.space.size
            pending: dict[int, _Made] = {}
            work = list(self._work(size))
            for done, item in enumerate(work):
                tick(size, done, len(work))
                self._apply(item, pending, keep=not last)
            self._close(pending, keep=not last)

    def _start(self) -> None:
        pending: dict[int, _Made] = {}
        for type in self.space.inputs:
            numbers = np.arange(len(self.variables), len(self.variables) + self.space.variables, dtype=np.int32)
            values = np.concatenate([random_value(str(n), type[0], self.space.seed, 0) for n in numbers])
            self.variables += [(i, type) for i in range(self.space.variables)]
            none = np.full((len(numbers), ARITY), -1, dtype=np.int32)
            pending[self._type(type)] = _Made([fingerprints(values)], [-1 - numbers], [none], [values])
        if len(self.variables) > MOST_VARIABLES:
            raise UnityError(
                f"unity-rules: {len(self.variables)} variables, of {len(self.space.inputs)} types; "
                f"{MOST_VARIABLES} are told apart; take fewer of each type"
            )
        self._close(pending, keep=True)
        self.terms = self.found = 0

    # -- what to apply

    def _type(self, type: Type) -> int:
        if type not in self._type_ids:
            self._type_ids[type] = len(self.types)
            self.types.append(type)
        return self._type_ids[type]

    def _step_id(self, step: TermStep) -> int:
        if step not in self._step_ids:
            self._step_ids[step] = len(self.steps)
            self.steps.append(step)
        return self._step_ids[step]

    def _work(self, size: int) -> Iterator[_Work]:
        for name in (*self.space.operators, *self.space.parallel):
            for sizes in product(range(size), repeat=self.space.arity(name)):
                if sum(sizes) != size - 1:
                    continue
                for ids in product(*(self._levels[s].ids for s in sizes)):
                    types = tuple(self.types[t] for t in ids)
                    for step, result in self._steps_for(name, types):
                        alike = size > 1 and self._commutes(step, types)
                        yield _Work(step, self._type(result), tuple(zip(sizes, ids, strict=True)), alike)

    def _steps_for(self, name: str, types: tuple[Type, ...]) -> list[tuple[TermStep, Type]]:
        """Return the steps of an operator that are well typed, with small results in few pieces, and their types."""
        if (name, types) not in self._steps_on:
            found: list[tuple[TermStep, Type]] = []
            for step in self._tried(name, types):
                for i, type in enumerate(result_types(step.op, step.attributes, types)):
                    if type[0].elements <= self._most and type[0].pieces <= self.space.degree:
                        found.append((TermStep(step.op, step.attributes, i), type))
            self._steps_on[name, types] = found
        return self._steps_on[name, types]

    def _tried(self, name: str, types: tuple[Type, ...]) -> Iterator[TermStep]:
        sets, by = len(types[0]), self.space.degree
        if name in ("partition", "combine"):
            yield from (parallel_step(name, sets, dim=d, by=by) for d in range(len(types[0][0].shape)))
        elif name in PARALLEL:
            yield parallel_step(name, sets, by=by)
        else:
            yield from steps(name, types, self.space.sizes, frozenset(self.space.operators))

    def _commutes(self, step: TermStep, types: tuple[Type, ...]) -> bool:
        """Return whether the operands may be exchanged, judged by random operands."""
        if len(types) != 2 or types[0][0].shape != types[1][0].shape:
            return False
        if result_types(step.op, step.attributes, types) != result_types(step.op, step.attributes, types[::-1]):
            return False
        a, b = (random_value(name, types[0][0], self.space.seed, 0) for name in ("a", "b"))
        apply = self._line(step, types)
        return np.array_equal(apply([a, b])[step.result], apply([b, a])[step.result])

    def _line(self, step: TermStep, types: tuple[Type, ...]) -> Callable[[list[Batch]], list[Batch]]:
        if step.op in PARALLEL:
            return lambda operands: operands
        return line(step, tuple(t[0].shape for t in types), tuple(t[0].dtype for t in types), 0)

    # -- terms of one size

    def _apply(self, work: _Work, pending: dict[int, _Made], keep: bool) -> None:
        ids = [self._levels[s].ids[t] for s, t in work.operands]
        values = [self._levels[s].values[t] for s, t in work.operands]
        apply = self._line(work.step, tuple(self.types[t] for _, t in work.operands))
        counts = tuple(map(len, ids))
        made = pending.setdefault(work.type, _Made())
        step = self._step_id(work.step)
        for start in range(0, prod(counts), BATCH):
            at = np.unravel_index(np.arange(start, min(start + BATCH, prod(counts))), counts)
            if work.alike:
                ordered = ids[0][at[0]] <= ids[1][at[1]]
                at = tuple(a[ordered] for a in at)
                if not len(at[0]):
                    continue
            value = apply([v[a] for v, a in zip(values, at, strict=True)])[work.step.result]
            operands = np.full((len(value), ARITY), -1, dtype=np.int32)
            for i, (own, a) in enumerate(zip(ids, at, strict=True)):
                operands[:, i] = own[a]
            made.prints.append(fingerprints(value))
            made.steps.append(np.full(len(value), step, dtype=np.int32))
            made.operands.append(operands)
            if keep:
                made.values.append(value)

    def _close(self, pending: dict[int, _Made], keep: bool) -> None:
        """Sort the terms that were made into classes."""
        level = _Level()
        for type, made in pending.items():
            if not made.prints:
                continue
            prints, made_by = np.concatenate(made.prints), np.concatenate(made.steps)
            operands = np.concatenate(made.operands)
            uses = self._uses_of(made_by, operands)
            self.terms += len(prints)
            known, known_ids = self._known.get(type, (prints[:0], made_by[:0]))
            # The first term of each fingerprint stands for its class.
            unique, first, which = np.unique(prints, return_index=True, return_inverse=True)
            place = np.searchsorted(known, unique)
            there = np.zeros(len(unique), dtype=np.bool_)
            if len(known):
                there = known[np.minimum(place, len(known) - 1)] == unique
            new = np.sort(first[~there])
            ids = np.arange(self.classes, self.classes + len(new), dtype=np.int32)
            of = np.zeros(len(unique), dtype=np.int32)
            of[there] = known_ids[place[there]]
            of[which[new]] = ids
            self._step = np.concatenate([self._step, made_by[new]])
            self._operands = np.concatenate([self._operands, operands[new]])
            self._uses = np.concatenate([self._uses, uses[new]])
            later = np.ones(len(prints), dtype=np.bool_)
            later[new] = False
            self.found += int(later.sum())
            # All renamings of a candidate are candidates; one of them is enough.
            groups = [self._type_ids[t] for _, t in self.variables]
            kept = later & (canonical(uses, groups) | canonical(self._uses[of[which]], groups))
            self._pairs.append((made_by[kept], operands[kept], of[which][kept]))
            if keep and len(new):
                order = np.argsort(np.concatenate([known, prints[new]]), kind="stable")
                self._known[type] = (
                    np.concatenate([known, prints[new]])[order],
                    np.concatenate([known_ids, ids])[order],
                )
                level.ids[type] = ids
                starts = np.cumsum([0, *map(len, made.values)])
                chunks = zip(made.values, starts, strict=False)
                level.values[type] = np.concatenate([v[new[(new >= s) & (new < s + len(v))] - s] for v, s in chunks])
            pending[type] = _Made()
        self._levels.append(level)

    def _uses_of(self, made_by: Ids, operands: Ids) -> npt.NDArray[np.uint64]:
        """Return the variables of terms in order of first use."""
        uses = np.where(made_by < 0, (-made_by).astype(np.uint64), np.uint64(0))
        for i in range(ARITY):
            there = operands[:, i] >= 0
            if there.any():
                uses[there] = merged(uses[there], self._uses[operands[there, i]])
        return uses

    # -- terms

    def candidates(self, terms: Terms) -> Iterator[tuple[TypedTerm, TypedTerm]]:
        """
        Yield the candidates for rules, smaller terms first: pairs of two terms of (probably) equal value, of which the
        second is the first term that was found with this value. The terms are made by `terms`.
        """
        made: dict[int, TypedTerm] = {}

        def of_class(number: int) -> TypedTerm:
            found = made.get(number)
            if found is None:
                step = int(self._step[number])
                if step < 0:
                    found = terms.variable(*self.variables[-1 - step])
                else:
                    found = applied(step, self._operands[number].tolist())
                made[number] = found
            return found

        def applied(step: int, operands: list[int]) -> TypedTerm:
            term = terms.make(self.steps[step], [of_class(o) for o in operands if o >= 0])
            assert term is not None, "enumerated terms are well typed"
            return term

        for made_by, operands, of in self._pairs:
            for step, own, number in zip(made_by.tolist(), operands.tolist(), of.tolist(), strict=True):
                yield applied(step, own), of_class(number)
