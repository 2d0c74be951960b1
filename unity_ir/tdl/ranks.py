"""
First step of binding a TDL line to operand shapes: finds the number of operands of a variadic parameter, and the number
of dims that each pack (`a..`) stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.errors import UnityError
from unity_ir.tdl.syntax import (
    NOT_FLOATING,
    Access,
    Affine,
    AttrValue,
    Clause,
    Entry,
    Line,
    Pack,
    Parameter,
    Starred,
    WrittenIndex,
)

Shape = tuple[int, ...]


class Ranks:
    """
    Does the first step of binding: expands variadic parameters to operands, and solves for the number of dims of packs.

    `shapes` and `dtypes` are the operands' global shapes and element types (() if all are floating point), `attributes`
    all attributes, defaults filled in. With `keep`, sizes and attributes that are used as numbers stay symbolic, as
    `tdl.bind.spell` needs.
    """

    def __init__(
        self,
        line: Line,
        shapes: Sequence[Shape],
        attributes: Mapping[str, AttrValue],
        dtypes: Sequence[str],
        keep: bool = False,
    ):
        self.line = line
        self.keep = keep
        self.spelling = False
        """Windows are left as they are written."""
        self.attributes = attributes
        self.dtypes = dtypes
        self.followed: str | None = None
        """Element kind of results that do not declare one, where it is not float."""
        self.clauses: dict[tuple[str, WrittenIndex], Clause] = {(c.kind, c.index): c for c in line.clauses}
        self.operands, self.shapes = self._spell_operands(shapes)
        self.copies = self._count_copies(shapes)
        self.ranks = self._solve_ranks()
        self.extents: dict[str, int] = {}
        self.sizes: dict[WrittenIndex, int] = {
            i: self._number(c.value)
            for (kind, i), c in self.clauses.items()
            if kind == "size" and isinstance(i, Affine)
        }
        self.origin: dict[str, str] = {}
        self.units: dict[tuple[str, int], str] = {}
        """Variables of extent 1, for the dims of operands that broadcast."""

    def fail(self, message: str) -> UnityError:
        """Return, to be raised, a `UnityError` of this message that names the operator being bound."""
        return UnityError(f"pcg.{self.line.operator}: {message}")

    def _spell_operands(self, shapes: Sequence[Shape]) -> tuple[tuple[Parameter, ...], dict[str, Shape]]:
        parameters = self.line.parameters
        fixed = sum(not p.variadic for p in parameters)
        variadic = len(parameters) - fixed
        if variadic == 0 and len(shapes) != fixed:
            names = ", ".join(p.name for p in parameters)
            raise self.fail(f"takes {fixed} operands ({names}), got {len(shapes)}")
        if variadic and len(shapes) < fixed + 1:
            raise self.fail(f"takes at least {fixed + 1} operands, got {len(shapes)}")
        copies = len(shapes) - fixed
        spelled: list[Parameter] = []
        for p in parameters:
            names = [f"{p.name}{i}" for i in range(copies)] if p.variadic else [p.name]
            spelled += [Parameter(name, self._kind(p.kind, len(spelled) + i)) for i, name in enumerate(names)]
        return tuple(spelled), {p.name: tuple(s) for p, s in zip(spelled, shapes, strict=True)}

    def _kind(self, kind: str, operand: int) -> str:
        """Return the element kind of an operand: `any` is resolved by its element type."""
        if kind != "any":
            return kind
        dtype = self.dtypes[operand] if self.dtypes else "f32"
        if dtype not in NOT_FLOATING:
            return "float"
        self.followed = dtype
        return "bool" if dtype == "bool" else "int"

    def _count_copies(self, shapes: Sequence[Shape]) -> int:
        """
        Return the number of copies of starred names: operands of a variadic parameter, or sizes given by a clause.
        """
        fixed = sum(not p.variadic for p in self.line.parameters)
        if fixed < len(self.line.parameters):
            return len(shapes) - fixed
        for (kind, index), clause in self.clauses.items():
            if kind == "size" and isinstance(index, Starred):
                sizes = self._ints(clause)
                if not sizes:
                    raise self.fail(f"attribute {clause.value} is empty; give a size for each result")
                return len(sizes)
        return 1

    def _number(self, of: Entry | int) -> int:
        """Evaluate an entry of an attribute, or a number."""
        if isinstance(of, int):
            return of
        value = self.attributes[of.attribute]
        if isinstance(value, tuple) and of.at is not None:
            if of.at >= len(value):
                raise self.fail(f"attribute {of.attribute} has {len(value)} entries; it must have at least {of.at + 1}")
            value = value[of.at]
        if not isinstance(value, int):
            raise self.fail(f"attribute {of.attribute} must be an integer")
        return value

    def _ints(self, clause: Clause) -> tuple[int, ...]:
        value = self.attributes[str(clause.value)]
        if not isinstance(value, tuple):
            raise self.fail(f"attribute {clause.value} must be a list of integers")
        return value

    def _solve_ranks(self) -> dict[str, int]:
        ranks: dict[str, int] = {}
        for (kind, index), clause in self.clauses.items():
            if isinstance(index, Pack):
                if kind == "rank":
                    ranks[index.name] = self._number(clause.value)
                    if ranks[index.name] < 0:
                        raise self.fail(f"attribute {clause.value} is {ranks[index.name]}; it must not be negative")
                else:
                    entries = len(self._ints(clause))
                    if ranks.setdefault(index.name, entries) != entries:
                        raise self.fail(f"attribute {clause.value} has {entries} entries, expected {ranks[index.name]}")
        accesses = [(r, a) for r in self.line.results for a in r.accesses]
        broadcast = {i.name for _, a in accesses for i in a.indices if isinstance(i, Pack) and i.broadcast}
        broadcast -= {i.name for _, a in accesses for i in a.indices if isinstance(i, Pack) and not i.broadcast}
        pending = True
        while pending:
            pending = False
            for _, access in accesses:
                rank = len(self.shapes[self._first(access)])
                packs = [i.name for i in access.indices if isinstance(i, Pack) and not i.broadcast]
                unknown = {p for p in packs if p not in ranks}
                if len(unknown) == 1 and len([p for p in packs if p in unknown]) == 1:
                    have = sum(
                        ranks[i.name] if isinstance(i, Pack) else 1
                        for i in access.indices
                        if i not in unknown and not (isinstance(i, Pack) and i.name in unknown)
                    )
                    if rank < have:
                        raise self.fail(f"{access.tensor} has rank {rank}; it needs at least {have}")
                    ranks[unknown.pop()] = rank - have
                    pending = True
        for _, access in accesses:
            # A pack that only operands that broadcast have is as long as the longest.
            for pack in (i for i in access.indices if isinstance(i, Pack) and i.broadcast and i.name in broadcast):
                rank = len(self.shapes[self._first(access)]) - len(access.indices) + 1
                ranks[pack.name] = max(ranks.get(pack.name, 0), rank)
        for _, access in accesses:
            names = [f"{access.tensor}{c}" for c in range(self.copies)] if access.starred else [access.tensor]
            if any(isinstance(i, Pack) and i.broadcast for i in access.indices):
                least = len(access.indices) - 1
                most = least + sum(ranks[i.name] for i in access.indices if isinstance(i, Pack))
                for name in names:
                    if not least <= len(self.shapes[name]) <= most:
                        raise self.fail(f"{name} has rank {len(self.shapes[name])}; it needs {least} to {most}")
                continue
            need = sum(ranks.get(i.name, 0) if isinstance(i, Pack) else 1 for i in access.indices)
            for name in names:
                if len(self.shapes[name]) != need:
                    raise self.fail(f"{name} has rank {len(self.shapes[name])}, expected {need}")
        return ranks

    def _first(self, access: Access) -> str:
        return f"{access.tensor}0" if access.starred else access.tensor
