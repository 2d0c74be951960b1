"""
Compose the lines of several operators (their definitions in the tensor description language TDL at given shapes) into
one: substitute each result's expression where another operator reads it.

    t[m, n] = sum[k](x[m, k] * w[k, n]);  s[m, n] = t[m, n] + b[n]  ->  out[m, n] = sum[k](x[m, k] * w[k, n]) + b[n]

Variables are renamed, index by index. A segment of a dim that is read becomes a slice of it; equal segments of the last
result are stacked along a new variable `k`, so that each may have several variables:

    q[b, h, s, d] = split_heads(split(x))    ->  q[b, h, s, d] = x[b, s, (h d) + start]
    out = concat(merge_heads(q), merge_heads(v))  ->  out[b, s, (k h d)] = k: q[b, h, s, d] | k: v[b, h, s, d]

Compositions are refused in which a kernel would compute an element of another operator's result several times, or a
dim's indices cannot be substituted into each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from unity_ir.forms.addresses import Names
from unity_ir.forms.rewrite import map_children, reductions
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
    Name,
    Opaque,
    Parameter,
    Reduce,
    Result,
    Segments,
    Slice,
    Var,
    Window,
    WrittenIndex,
    accesses,
    index_names,
)

Register = int
Axes = tuple[int, ...]
Place = Var | Composite
"""The index of the composed line that stands for a variable of one part."""

AND = " + "
"""Separator of the operators' names in a composed line's."""


@dataclass(frozen=True, slots=True)
class Part:
    """
    An operator of one rank's program, or several composed: its TDL line at local shapes, and the registers (numbers of
    the program's values) that it reads and makes.
    """

    line: Bound
    operands: tuple[Register, ...]
    results: tuple[Register, ...]
    axes: Mapping[str, Axes]
    """The mesh axes that divide each variable; of a composition, only of variables used as values."""
    apart: bool = False
    """
    Whether results may have index variables that no other result has, which `column_sums.with_common_variables` can
    join.
    """


def composed(parts: Sequence[Part], kept: Sequence[Register], apart: bool = False) -> Part | None:
    """
    Fuse operators of one rank's program (`parts`, in program order) into one, whose TDL line one kernel computes: the
    expression of a result is substituted wherever another of them reads it.

    `kept` are the registers (numbers of the program's values) that the fused line returns, in this order; other results
    are not stored. All of them are indexed by the variables of the last operator's results. A kept result that cannot
    be gets variables of its own if `apart` is True; else None is returned. Returns None, too, where fusing would
    compute an element more than once, or a dim's indices cannot be substituted.
    """
    try:
        return _Composer(parts).composed(kept, apart)
    except _Refused:
        return None


def relabelled(parts: Sequence[Part], kept: Sequence[Register]) -> Part | None:
    """
    Fuse an operator (the first of `parts`) with the operators after it that only copy its results to another order of
    dims: it stores each result where the copy would be, and computes the same.

        y[b, h, s, d] = attention(..);  out[b, s, (h d)] = y[b, h, s, d]  ->  out[b, s, (h d)] = attention(..)

    `kept` are the registers that the fused line returns, in this order: all results, with copies in the place of what
    they copy. Returns None if there are other results, if a part after the first is no copy, or if its dims are not
    those of the result.
    """
    first, *copies = parts
    results = dict(zip(first.results, first.line.results, strict=True))
    for copy in copies:
        copied = [r.expr for r in copy.line.results]
        if len(copy.operands) != 1 or len(copied) != 1 or not isinstance(access := copied[0], Access):
            return None
        (register,), (made,), laid = copy.operands, copy.results, copy.line.results[0].indices
        source = None if register in kept else results.pop(register, None)
        places = source and _places(access, source, copy.line.extents, first.line.extents)
        plain = all(isinstance(i, Var | Composite) and {*index_names(i)} <= {*(places or ())} for i in laid)
        if source is None or places is None or not plain:
            return None
        # What is copied lies as the copy, by the names of the variables that the result has.
        indices = tuple(tuple(n for name in index_names(i) for n in places[name]) for i in laid)
        lies = tuple(Composite(names) if len(names) > 1 else Var(*names) for names in indices)
        results[made] = replace(source, indices=lies)
    if {*results} != {*kept}:
        return None
    operator = AND.join(part.line.operator for part in parts)
    line = replace(first.line, operator=operator, results=tuple(results[r] for r in kept))
    return replace(first, line=line, results=tuple(kept))


def _places(
    read: Access, made: Result, own: Mapping[str, int], extents: Mapping[str, int]
) -> Mapping[str, tuple[str, ...]] | None:
    """
    Return the variables of a result, of `extents`, that each variable of a read of it stands for; None if a dim has
    other variables, or is no plain one. `own` are the extents of the read's variables.
    """
    found: dict[str, tuple[str, ...]] = {}
    for index, at in zip(read.indices, made.indices, strict=True):
        if not isinstance(index, Var | Composite) or not isinstance(at, Var | Composite):
            return None
        names, others = index_names(index), index_names(at)
        if len(names) == 1:
            found[names[0]] = others
        elif [own[n] for n in names] == [extents[n] for n in others]:
            found |= {n: (other,) for n, other in zip(names, others, strict=True)}
        else:
            return None
    return found


class _Refused(Exception):
    """The parts cannot be composed."""


class _Composer:
    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self.made = {register: (part, i) for part in parts for i, register in enumerate(part.results)}
        self.tensors: dict[Register, Parameter] = {}
        names = Names()
        for part in parts:
            for register, parameter in zip(part.operands, part.line.operands, strict=True):
                if register not in self.made and register not in self.tensors:
                    self.tensors[register] = Parameter(names.new(parameter.name), parameter.kind)
        self.names = names
        self.extents: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        """The number in the last variable named after one of a part, below which all are taken."""
        self.axes: dict[str, Axes] = {}
        """The mesh axes that divide each variable used as a value."""
        self.written: dict[tuple[Register, tuple[Place, ...]], Expr] = {}
        """The expression of each part's result, by the indices at which it is read."""

    def composed(self, kept: Sequence[Register], apart: bool) -> Part:
        last = self.parts[-1]
        plain = [i for r in last.line.results for i in r.indices if not isinstance(i, Segments)]
        shared = {n for i in plain for n in index_names(i)}
        self.extents = {n: size for n, size in last.line.extents.items() if n in shared}
        where: dict[str, Place] = {n: Var(n) for n in shared}
        found: dict[Register, tuple[tuple[Place, ...], Expr]] = {}
        for register, result in zip(last.results, last.line.results, strict=True):
            if isinstance(result.expr, Cases):
                found[register] = self.stacked(result, result.expr, last, where)
                shared = {*self.extents}
                continue
            space = prod(last.line.result_shape(result))
            indices = tuple(self.place_of(i, where) for i in result.indices)
            found[register] = indices, self.expr(result.expr, last, where, space)
        for (register, indices), expr in self.written.items():
            names = [n for i in indices for n in index_names(i) if self.extents[n] > 1]
            if shared.issuperset(names) and len(set(names)) == len(names):
                found.setdefault(register, (indices, expr))
        results: list[Result] = []
        for register in kept:
            if register not in found and not apart:
                raise _Refused
            indices, expr = found[register] if register in found else self.by_itself(register)
            results.append(Result(self.names.new("out" if register in last.results else "kept"), indices, expr))
        operator = AND.join(part.line.operator for part in self.parts)
        extents = MappingProxyType(self.extents)
        line = Bound(operator, tuple(self.tensors.values()), tuple(results), extents, MappingProxyType({}))
        return Part(line, tuple(self.tensors), tuple(kept), self.axes, apart)

    def by_itself(self, register: Register) -> tuple[tuple[Place, ...], Expr]:
        """Return the indices and expression of a result over new variables."""
        part, number = self.made[register]
        result = part.line.results[number]
        where: dict[str, Place] = {n: self.variable(n, part) for i in result.indices for n in index_names(i)}
        indices = tuple(self.place_of(i, where) for i in result.indices)
        return indices, self.expr(result.expr, part, where, prod(part.line.result_shape(result)))

    def stacked(
        self, result: Result, cases: Cases, part: Part, where: dict[str, Place]
    ) -> tuple[tuple[Place, ...], Expr]:
        """
        Return the indices and expression of a result of equal segments, with a new variable that counts the segments.
        """
        sizes = {part.line.extents[name] for name, _ in cases.branches}
        if len(sizes) > 1 or len(cases.branches) < 2:
            raise _Refused
        first = cases.branches[0][0]
        number = self.new(f"{first.rstrip('0123456789')}_segment", len(cases.branches))
        segment = self.segment(cases, part)
        space = prod(part.line.result_shape(result)) // len(cases.branches)
        branches = tuple(
            (number.name, self.expr(e, part, {**where, name: segment}, space)) for name, e in cases.branches
        )
        whole = Composite((number.name, *index_names(segment)))
        indices = tuple(whole if isinstance(i, Segments) else self.place_of(i, where) for i in result.indices)
        return indices, Cases(branches)

    def segment(self, cases: Cases, part: Part) -> Place:
        """
        Return new variables for the positions of a segment: those of a dim that a part before makes of several, if a
        segment is such a dim.
        """
        for name, expr in cases.branches:
            for access in accesses(expr):
                register = part.operands[self.number(access.tensor, part)]
                if register in self.made and Var(name) in access.indices:
                    maker, number = self.made[register]
                    own = maker.line.results[number].indices[access.indices.index(Var(name))]
                    if isinstance(own, Composite):
                        return Composite(tuple(self.variable(n, maker).name for n in own.names))
        return self.variable(cases.branches[0][0], part)

    def expr(self, expr: Expr, part: Part, where: dict[str, Place], space: int) -> Expr:
        """An expression of a part, computed at `space` places, with its variables where they are in the line of all."""
        match expr:
            case Access(tensor, indices):
                register = part.operands[self.number(tensor, part)]
                return self.read(register, tuple(self.index(i, where, part) for i in indices), space)
            case Name(name):
                return self.position(name, part, where)
            case Reduce(reducer, _, body):
                inner = dict(where)
                for name in expr.names:
                    inner[name] = self.variable(name, part)
                # In the order of the line, as a set's order differs from process to process.
                used = free_variables(expr).union(expr.names)
                read = [self.place(v, inner, part) for v in part.line.extents if v in used]
                # A gather reads one place only.
                around = {n for place in read for n in index_names(place)}
                places = 0 if gather(expr) is not None else prod(self.extents[n] for n in around)
                names = tuple(n for name in expr.names for n in index_names(inner[name]))
                return Reduce(reducer, tuple(map(Var, names)), self.expr(body, part, inner, places))
            case Cases() | Opaque():
                raise _Refused
            case Call("eq" | "ne") if len({self.is_made(a, part) for a in accesses(expr)}) > 1:
                # A stored value, as a maximum, equals an element only if both are rounded alike, as when stored.
                raise _Refused
            case _:
                return map_children(expr, lambda child: self.expr(child, part, where, space))

    def is_made(self, access: Access, part: Part) -> bool:
        """Return whether another part makes the tensor that a part reads."""
        return part.operands[self.number(access.tensor, part)] in self.made

    @staticmethod
    def number(tensor: str, part: Part) -> int:
        return next(k for k, p in enumerate(part.line.operands) if p.name == tensor)

    def read(self, register: Register, indices: tuple[Place | Slice, ...], space: int) -> Expr:
        """Return the expression of a register read at these indices: an access, or that of the part that makes it."""
        if register not in self.made:
            return Access(self.tensors[register].name, indices)
        places = tuple(i for i in indices if not isinstance(i, Slice))
        if len(places) < len(indices):
            # A part of what another part makes whole.
            raise _Refused
        return self.substituted(register, places, space)

    def substituted(self, register: Register, indices: tuple[Place, ...], space: int) -> Expr:
        """Return the expression of a register that a part makes, at these indices."""
        if (register, indices) not in self.written:
            part, number = self.made[register]
            result = part.line.results[number]
            where: dict[str, Place] = {}
            for own, at in zip(result.indices, indices, strict=True):
                where |= self.unified(own, at, part)
            size = prod(part.line.result_shape(result))
            self.written[register, indices] = self.expr(result.expr, part, where, size)
        expr = self.written[register, indices]
        part, number = self.made[register]
        # A reduction's result is computed once per row; anything else would be computed for each element that reads it.
        # What a gather reads is computed at one place, unless it takes a row to know it.
        if space != prod(part.line.result_shape(part.line.results[number])) and bool(space) != bool(reductions(expr)):
            raise _Refused
        return expr

    def unified(self, own: WrittenIndex, at: Place, part: Part) -> dict[str, Place]:
        """Return the place of each of a part's variables in index `own`, given that the dim is read at `at`."""
        match own, at:
            case Var(name), _:
                return {name: at}
            case Composite(names), Composite(others) if [part.line.extents[n] for n in names] == [
                self.extents[n] for n in others
            ]:
                return {n: Var(other) for n, other in zip(names, others, strict=True)}
            case _:
                raise _Refused

    def index(self, index: WrittenIndex, where: dict[str, Place], part: Part) -> Place | Slice:
        """Return the index at which a part reads a tensor."""
        if isinstance(index, Segments) and index.active is not None:
            sizes = [part.line.extents[n] for n in index.names]
            at = self.place(index.names[index.active], where, part)
            return Slice(at, sum(sizes[: index.active]), sum(sizes))
        return self.place_of(index, where, part)

    def place_of(self, index: WrittenIndex, where: dict[str, Place], part: Part | None = None) -> Place:
        """Return the index that stands for another, of variables that are where `where` says."""
        if isinstance(index, Segments | Slice | Window):
            raise _Refused
        places = [self.place(name, where, part) for name in index_names(index)]
        if isinstance(index, Var):
            return places[0]
        return Composite(tuple(n for place in places for n in index_names(place)))

    def place(self, name: str, where: dict[str, Place], part: Part | None) -> Place:
        if name not in where:
            # A dim of size 1 that broadcasts.
            assert part is not None
            where[name] = self.variable(name, part)
        return where[name]

    def variable(self, name: str, part: Part) -> Var:
        """Return a new variable of the composed line, named and sized like one of a part."""
        return self.new(name, part.line.extents[name])

    def new(self, name: str, size: int) -> Var:
        """Return a new variable of the composed line, named like `name`, of `size` positions."""
        number, own = self.numbers.get(name, 1), name
        if number > 1:
            own = f"{name}_{number}"
        while own in self.extents:
            number += 1
            own = f"{name}_{number}"
        self.numbers[name] = number
        self.extents[own] = size
        return Var(own)

    def position(self, name: str, part: Part, where: dict[str, Place]) -> Expr:
        """
        Return a variable used as a value, its global index, as an expression of the composed line's variables.

        If these are several, the outermost has the variable's mesh axes, and so its start.
        """
        found: Expr | None = None
        axes = part.axes.get(name, ())
        for n in index_names(self.place(name, where, part)):
            if self.axes.setdefault(n, axes) != axes:
                raise _Refused
            axes = ()
            step = Const(float(self.extents[n]))
            found = Name(n) if found is None else Binary("+", Binary("*", found, step), Name(n))
        assert found is not None
        return found
