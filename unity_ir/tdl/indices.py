"""
Second step of binding a TDL line to operand shapes: replaces the line's indices as written by bound ones, in which
packs (`a..`, any number of dims) and variadic names (`i*`) are expanded to single variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

from unity_ir.tdl.ranks import Ranks
from unity_ir.tdl.syntax import (
    Affine,
    AffineTerm,
    Composite,
    Entry,
    Expr,
    Index,
    Pack,
    Reduce,
    Segments,
    Slice,
    Starred,
    StarredSegments,
    Var,
    Window,
    WrittenIndex,
    children,
)


class Indices(Ranks):
    """Does the second step of binding: replaces the written indices of tensor reads and of results by bound ones."""

    def index(self, index: WrittenIndex, copy: int | None) -> list[Index]:
        """
        Return the bound indices, one per dim, that one written index stands for: a pack `a..`, if it stands for two
        dims, becomes `a0, a1`; other indices become one.

        Where a variadic name (`i*`) stands for several operands or results, `copy` is the number (from 0) of the one
        that the index is of; elsewhere it is None. Raises `UnityError` where a pack's order is no permutation, or a
        factor of a window is out of range.
        """
        match index:
            case Pack(name, permuted_by):
                found = _numbered(name, self.ranks.get(name, 0))
                if permuted_by is not None:
                    order = self.attributes[permuted_by]
                    if not isinstance(order, tuple) or sorted(order) != list(range(len(found))):
                        raise self.fail(f"{permuted_by} is {order!r}; it must be a permutation of 0..{len(found) - 1}")
                    return [found[i] for i in order]
                return [*found]
            case Starred(name):
                return [Var(f"{name}{copy or 0}")]
            case StarredSegments(name):
                return [Segments(tuple(f"{name}{i}" for i in range(self.copies)), active=copy)]
            case Affine() if self.spelling:
                return [cast("Index", index)]
            case Affine(terms):
                return [self._window(terms, self.sizes.get(index, 0))]
            case Var() | Composite() | Segments() | Slice() | Window():
                return [index]

    def _window(self, terms: Sequence[AffineTerm], size: int) -> Window:
        """Return the window with its attributes' values; its size, where an operand gives it, is filled in later."""
        found: list[tuple[int, str]] = []
        offset = 0
        for term in terms:
            factor = self._number(term.factor)
            variable = term.variable
            if variable is not None and variable in self.attributes:
                factor, variable = factor * self._number(Entry(variable)), None
            least = 0 if variable is None else 1
            if factor < least:
                raise self.fail(f"{term.factor} is {factor}; it must be {least} or more")
            if variable is None:
                offset += term.sign * factor
            else:
                found.append((factor, variable))
        return Window(tuple(found), offset, size, size)

    def indices(
        self, written: Sequence[WrittenIndex], copy: int | None, tensor: str | None = None
    ) -> tuple[Index, ...]:
        """
        Return the bound indices, one per dim, that the `written` ones stand for. They are those of a read of the
        operand called `tensor`, or, if that is None, of a result. The size of a dim indexed by a window is taken from
        the operand's shape, or for a result from the line's where clause.

        Variables of extent 1 (one position) are left out of composite indices, and of windows that stay inside their
        dim; a window that reads a whole dim in order becomes a plain variable. Where a variadic name (`i*`) stands for
        several operands or results, `copy` is the number (from 0) of the one that the indices are of; elsewhere it is
        None.
        """
        shape = None if tensor is None else self.shapes[tensor]
        bound: list[Index] = []
        for index in written:
            if isinstance(index, Var):
                bound.append(index)
            elif isinstance(index, Pack) and index.broadcast and tensor is not None:
                bound += self._broadcast(index, tensor, len(bound), len(written))
            else:
                bound += self.index(index, copy)
        if shape is not None:
            bound = [
                replace(b, size=s, whole=s) if isinstance(b, Window) else b for b, s in zip(bound, shape, strict=True)
            ]
        return tuple([b if isinstance(b, Var) else self._plain(b) for b in bound])

    def _broadcast(self, pack: Pack, tensor: str, first: int, written: int) -> list[Index]:
        """
        Return the variables of a pack, aligned at the last; a dim of size 1 that the pack is longer along is read at 0.
        """
        shape, rank = self.shapes[tensor], self.ranks[pack.name]
        own = len(shape) - written + 1
        found: list[Index] = []
        for dim, i in enumerate(range(rank - own, rank), first):
            name = f"{pack.name}{i}"
            found.append(Var(self._unit(tensor, dim) if shape[dim] < self.extents[name] else name))
        return found

    def _is_said_to_be_one(self, name: str) -> bool:
        clause = self.clauses.get(("size", Var(name)))
        return clause is not None and clause.value == 1

    def _plain(self, index: Index) -> Index:
        """
        Return an index without variables of extent 1; a window that reads a whole dim in order becomes a plain
        variable.

        So a convolution of 1 x 1 is a matrix product, and one without groups can be divided by its channels. A window
        that may lie outside of its dim keeps all its variables, since a reduction over one passes over positions
        outside. Of several variables in one dim those stay of which the line itself says that their size is 1.
        """
        match index:
            case Composite(names):
                running = [n for n in names if self.extents.get(n) != 1 or self._is_said_to_be_one(n)]
                return Composite(tuple(running)) if len(running) > 1 else Var(*(running or names[-1:]))
            case Window():
                reach = sum(c * (self.extents.get(v, 1) - 1) for c, v in index.terms)
                if index.offset < 0 or index.offset + reach >= index.size:
                    return index
                terms = tuple((c, v) for c, v in index.terms if self.extents.get(v) != 1)
                if len(terms) == 1 and index.offset == 0:
                    ((factor, name),) = terms
                    if factor == 1 and self.extents.get(name) == index.size:
                        return Var(name)
                return replace(index, terms=terms)
            case _:
                return index

    def _unit(self, tensor: str, dim: int) -> str:
        name = self.units.get((tensor, dim))
        if name is None:
            name = f"unit{len(self.units)}"
            while name in self.extents:
                name += "_"
            self.units[tensor, dim] = name
            self._set(name, 1, tensor)
        return name

    # -- extents, as they become known

    def _set(self, name: str, size: int, where: str) -> None:
        old = self.extents.setdefault(name, size)
        if old != size:
            kind = "contracted sizes" if self._is_reduced(name) else "sizes"
            raise self.fail(f"{kind} differ: {self.origin[name]} has {old}, {where} has {size}")
        self.origin.setdefault(name, where)

    def _is_reduced(self, name: str) -> bool:
        stem = name.rstrip("0123456789")
        return any(i in (Var(name), Pack(stem)) for r in self.line.results for i in _reduced(r.expr))


@lru_cache(maxsize=1024)
def _numbered(stem: str, count: int) -> tuple[Var, ...]:
    """Return the index variables that a pack of `count` dims stands for."""
    return tuple(Var(f"{stem}{i}") for i in range(count))


def _reduced(expr: Expr) -> list[WrittenIndex]:
    own = list(expr.indices) if isinstance(expr, Reduce) else []
    return own + [i for child in children(expr) for i in _reduced(child)]
