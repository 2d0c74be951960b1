"""
Binding: a written line at given operand shapes and attributes.

Spells out packs and variadic names, replaces attributes by their values, and solves for the extent of every index
variable. This is the serial shape rule of every operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TypeGuard, cast

from unity_ir.errors import UnityError
from unity_ir.tdl.functions import ACTIVATIONS, DTYPES
from unity_ir.tdl.syntax import (
    NOT_FLOATING,
    Access,
    Affine,
    AttrValue,
    Binary,
    Bound,
    Call,
    Cases,
    Clause,
    Composite,
    Const,
    Entry,
    Expr,
    Index,
    Line,
    Name,
    Opaque,
    Pack,
    Parameter,
    Position,
    Reduce,
    Result,
    Segments,
    Size,
    Starred,
    StarredSegments,
    Term,
    Var,
    Window,
    WrittenIndex,
    WrittenResult,
    children,
    index_names,
)

Shape = tuple[int, ...]


def check_attributes(line: Line, attributes: Mapping[str, AttrValue]) -> dict[str, AttrValue]:
    """
    The attributes of `line` with defaults filled in.

    Raises `UnityError` for one that is unknown, missing, or of the wrong kind.
    """
    known = {a.name: a for a in line.attributes}
    for name in attributes:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UnityError(f"pcg.{line.operator}: unknown attribute {name}; {takes}")
    full: dict[str, AttrValue] = {}
    for name, attribute in known.items():
        value = attributes.get(name, attribute.default)
        if value is None:
            raise UnityError(f"pcg.{line.operator}: attribute {name} is missing; add {{{name} = ...}}")
        fits = {
            "int": _is_int(value),
            "ints": isinstance(value, tuple) and all(map(_is_int, value)),
            "float": isinstance(value, float) or _is_int(value),
            "name": value in ACTIVATIONS,
            "dtype": value in DTYPES,
        }[attribute.kind]
        if not fits:
            wanted = " or ".join({"name": ACTIVATIONS, "dtype": DTYPES}.get(attribute.kind, (attribute.kind,)))
            raise UnityError(f"pcg.{line.operator}: attribute {name} is {value!r}; it must be {wanted}")
        full[name] = value
    return full


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def bind(line: Line, shapes: Sequence[Shape], attributes: Mapping[str, AttrValue], dtypes: Sequence[str] = ()) -> Bound:
    """
    Bind `line` to operand shapes (global sizes, one per operand, variadic ones in place) and attributes. `dtypes` are
    the operands' element types, which matter where a parameter may hold `any`; all of those are floats if left out.

    Raises `UnityError` where ranks, sizes or attributes do not fit, naming the operator and the two that disagree.
    """
    return _Binder(line, shapes, check_attributes(line, attributes), dtypes).bind()


@dataclass(frozen=True, slots=True)
class Spelled:
    """
    A line with packs and variadic names spelled out, but sizes, numbers given by attributes, and windows as written:
    what holds at more sizes than those it was bound at.
    """

    bound: Bound
    """Its windows are `Affine` still; names that are no index are attributes."""
    sizes: Mapping[str, Entry | int]
    """Index variables whose extent a clause gives."""
    windows: Mapping[WrittenIndex, Entry | int]
    """Windows of results, and the sizes of their dims."""


def spell(line: Line, shapes: Sequence[Shape], attributes: Mapping[str, AttrValue]) -> Spelled:
    """The line spelled out as at these shapes and attributes. Raises `UnityError` as `bind` does."""
    return _Binder(line, shapes, check_attributes(line, attributes), (), keep=True).spell()


class _Binder:
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
        """What results hold that do not say it, where that is no float."""
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
        return UnityError(f"pcg.{self.line.operator}: {message}")

    # -- operands, variadic counts and pack ranks

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
        """What an operand of a kind holds: `any` is resolved by its element type."""
        if kind != "any":
            return kind
        dtype = self.dtypes[operand] if self.dtypes else "f32"
        if dtype not in NOT_FLOATING:
            return "float"
        self.followed = dtype
        return "bool" if dtype == "bool" else "int"

    def _count_copies(self, shapes: Sequence[Shape]) -> int:
        """How many of everything starred: operands of a variadic parameter, or sizes given by a clause."""
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
        """What an entry of an attribute, or a number, is."""
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
        accesses = [(r, a) for r in self.line.results for a in _written_accesses(r.expr)]
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

    # -- spelling out

    def index(self, index: WrittenIndex, copy: int | None) -> list[Index]:
        """The bound indices one written index stands for, in copy number `copy` of a starred access or result."""
        match index:
            case Pack(name, permuted_by):
                names = [f"{name}{i}" for i in range(self.ranks.get(name, 0))]
                if permuted_by is not None:
                    order = self.attributes[permuted_by]
                    if not isinstance(order, tuple) or sorted(order) != list(range(len(names))):
                        raise self.fail(f"{permuted_by} is {order!r}; it must be a permutation of 0..{len(names) - 1}")
                    names = [names[i] for i in order]
                return [Var(n) for n in names]
            case Starred(name):
                return [Var(f"{name}{copy or 0}")]
            case StarredSegments(name):
                return [Segments(tuple(f"{name}{i}" for i in range(self.copies)), active=copy)]
            case Affine() if self.spelling:
                return [cast("Index", index)]
            case Affine(terms):
                return [self._window(terms, self.sizes.get(index, 0))]
            case Var() | Composite() | Segments() | Window():
                return [index]

    def _window(self, terms: Sequence[Term], size: int) -> Window:
        """The window with its attributes' values; its size, where an operand gives it, is filled in later."""
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
        """The bound indices of an access to a tensor, or of a result, whose clauses give sizes."""
        shape = None if tensor is None else self.shapes[tensor]
        bound: list[Index] = []
        for index in written:
            if isinstance(index, Pack) and index.broadcast and tensor is not None:
                bound += self._broadcast(index, tensor, len(bound), len(written))
            else:
                bound += self.index(index, copy)
        if shape is not None:
            bound = [
                replace(b, size=s, whole=s) if isinstance(b, Window) else b for b, s in zip(bound, shape, strict=True)
            ]
        return tuple(map(self._plain, bound))

    def _broadcast(self, pack: Pack, tensor: str, first: int, written: int) -> list[Index]:
        """The variables of a pack, aligned at the last; a dim of size 1 that the pack is longer along is read at 0."""
        shape, rank = self.shapes[tensor], self.ranks[pack.name]
        own = len(shape) - written + 1
        found: list[Index] = []
        for dim, i in enumerate(range(rank - own, rank), first):
            name = f"{pack.name}{i}"
            found.append(Var(self._unit(tensor, dim) if shape[dim] < self.extents[name] else name))
        return found

    def _plain(self, index: Index) -> Index:
        """
        Without variables that have one value only; a window that does nothing is a plain variable.

        So a convolution of 1 x 1 is a matrix product, and one without groups can be divided by its channels.
        """
        match index:
            case Composite(names):
                running = [n for n in names if self.extents.get(n) != 1]
                return Composite(tuple(running)) if len(running) > 1 else Var(*(running or names[-1:]))
            case Window():
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

    def expr(self, expr: Expr, copy: int | None) -> Expr:
        match expr:
            case Access(tensor, indices, starred):
                name = f"{tensor}{copy}" if starred else tensor
                return Access(name, self.indices(indices, copy, name))
            case Binary(op, left, right):
                return Binary(op, self.expr(left, copy), self.expr(right, copy))
            case Call(function, args):
                if function in self.attributes:
                    function = str(self.attributes[function])
                bound = tuple(self.expr(a, copy) for a in args)
                return bound[0] if function == "identity" else Call(function, bound)
            case Reduce(reducer, indices, body):
                names = self.indices(indices, copy)
                return Reduce(reducer, names, self.expr(body, copy)) if names else self.expr(body, copy)
            case Opaque(function, outputs, inputs, body):
                made, taken = self.indices(outputs, copy), self.indices(inputs, copy)
                bound = Opaque(function, made, taken, self.expr(body, copy))
                for new, old in zip(bound.made, bound.names, strict=True):
                    if self.extents.get(new, 1) > self.extents.get(old, self.extents.get(new, 1)):
                        raise self.fail(f"{self.extents[new]} of {self.extents[old]} elements are too many; take fewer")
                return bound
            case Size(indices) if self.keep:
                return Size(self.indices(indices, copy))
            case Position(indices):
                names = [n for i in self.indices(indices, copy) for n in index_names(i)]
                position: Expr = Name(names[0]) if names else Const(0.0)
                for name in names[1:]:
                    size: Expr = Size((Var(name),)) if self.keep else Const(float(self.extents[name]))
                    position = Binary("+", Binary("*", position, size), Name(name))
                return position
            case Size(indices):
                return Const(float(prod(self.extent_of(i) for i in self.indices(indices, copy))))
            case Name(name):
                value = None if self.keep else self.attributes.get(name)
                return expr if value is None else Const(float(value)) if isinstance(value, int | float) else expr
            case _:
                return expr

    def extent_of(self, index: Index) -> int:
        return prod(self.extents[n] for n in index_names(index))

    # -- extents

    def _set(self, name: str, size: int, where: str) -> None:
        old = self.extents.setdefault(name, size)
        if old != size:
            kind = "contracted sizes" if self._is_reduced(name) else "sizes"
            raise self.fail(f"{kind} differ: {self.origin[name]} has {old}, {where} has {size}")
        self.origin.setdefault(name, where)

    def _is_reduced(self, name: str) -> bool:
        stem = name.rstrip("0123456789")
        return any(i in (Var(name), Pack(stem)) for r in self.line.results for i in _reduced(r.expr))

    def _solve_extents(self) -> None:
        for (kind, index), clause in self.clauses.items():
            if kind == "size" and not isinstance(index, Affine):
                names = [n for b in self._all_copies(index) for n in index_names(b)]
                sizes = self._ints(clause) if isinstance(index, Pack | Starred) else (self._number(clause.value),)
                for name, size in zip(names, sizes, strict=True):
                    if size < 1:
                        raise self.fail(f"attribute {clause.value} has {size}; sizes start at 1")
                    self._set(name, size, f"attribute {clause.value}")
        self._solve_broadcasts()
        places: list[tuple[str, Index, int]] = []
        for result in self.line.results:
            for copy in range(self.copies):
                for access in _written_accesses(result.expr):
                    tensor = f"{access.tensor}{copy}" if access.starred else access.tensor
                    places += [
                        (tensor, index, size)
                        for index, size in zip(
                            self.indices(access.indices, copy, tensor), self.shapes[tensor], strict=True
                        )
                    ]
        for tensor, index, size in places:
            if isinstance(index, Var):
                self._set(index.name, size, tensor)
        for tensor, index, size in places:
            if isinstance(index, Composite):
                unknown = [n for n in index.names if n not in self.extents]
                known = prod(self.extents[n] for n in index.names if n in self.extents)
                if len(unknown) > 1:
                    raise self.fail(f"sizes of {', '.join(unknown)} are not known")
                if size % known or (not unknown and size != known):
                    raise self.fail(
                        f"{tensor} has a dim of {size}, which {known} does not {'divide' if unknown else 'fill'}"
                    )
                if unknown:
                    self._set(unknown[0], size // known, tensor)
            elif isinstance(index, Segments):
                total = sum(self.extents[n] for n in index.names)
                if total != size:
                    sizes = " + ".join(str(self.extents[n]) for n in index.names)
                    raise self.fail(f"{tensor} has a dim of {size}, but the sizes are {sizes} = {total}")

        for tensor, index, size in places:
            if isinstance(index, Window):
                self._solve_window(tensor, index, size)
        self._check_numbered()
        for result in self.line.results:
            for index in result.indices:
                if isinstance(index, Affine):
                    self._solve_window(result.name, self._window(index.terms, self.sizes[index]), self.sizes[index])

    def _check_numbered(self) -> None:
        """A dim that is only read at numbers has just as many positions."""
        read: dict[tuple[str, int], list[int | None]] = {}
        for result in self.line.results:
            for access in _written_accesses(result.expr):
                if any(isinstance(i, Pack) and i.broadcast for i in access.indices):
                    continue
                dim = 0
                for index in access.indices:
                    at = self._window(index.terms, 0).offset if _is_number(index) else None
                    read.setdefault((self._first(access), dim), []).append(at)
                    dim += self.ranks[index.name] if isinstance(index, Pack) else 1
        for (tensor, dim), positions in read.items():
            size, numbers = self.shapes[tensor][dim : dim + 1], [at for at in positions if at is not None]
            if len(numbers) == len(positions) and size != (max(numbers) + 1,):
                raise self.fail(f"{tensor} has {size[0]} positions along dim {dim}; it needs {max(numbers) + 1}")

    def _solve_window(self, tensor: str, window: Window, size: int) -> None:
        """
        The extent of the one variable a window leaves open, or that the window lies in the dim.

        What lies before the dim is padding, and there is as much of it behind.
        """
        last = size - 1 + max(0, -window.offset)
        unknown = [(c, v) for c, v in window.terms if v not in self.extents]
        known = replace(window, terms=tuple(t for t in window.terms if t not in unknown))
        room = last - window.offset - known.span(self.extents)
        if size < 1:
            raise self.fail(f"{tensor} has a dim of {size}; sizes start at 1")
        if room < 0:
            raise self.fail(f"{tensor} has a dim of {size}, too small for a window of {known.span(self.extents) + 1}")
        if len(unknown) > 1:
            raise self.fail(f"sizes of {', '.join(v for _, v in unknown)} are not known")
        for factor, name in unknown:
            self._set(name, room // factor + 1, tensor)

    def _solve_broadcasts(self) -> None:
        """Extents of packs that broadcast: along each dim all operands have one size, or 1."""
        reads = [a for r in self.line.results for a in _written_accesses(r.expr)]
        names = {i.name for a in reads for i in a.indices if isinstance(i, Pack) and i.broadcast}
        ones: list[tuple[str, str]] = []
        for access in reads:
            for tensor in [f"{access.tensor}{c}" for c in range(self.copies)] if access.starred else [access.tensor]:
                shape, dim = self.shapes[tensor], 0
                for index in access.indices:
                    rank = self.ranks[index.name] if isinstance(index, Pack) else 1
                    if not isinstance(index, Pack) or index.name not in names:
                        dim += rank
                        continue
                    own = len(shape) - len(access.indices) + 1 if index.broadcast else rank
                    for i in range(own):
                        name = f"{index.name}{rank - own + i}"
                        if index.broadcast and shape[dim] == 1:
                            ones.append((name, tensor))
                        elif self.extents.setdefault(name, shape[dim]) != shape[dim]:
                            raise self.fail(
                                f"sizes do not broadcast: {self.origin[name]} has {self.extents[name]}, {tensor} has "
                                f"{shape[dim]}; make them the same, or one of them 1"
                            )
                        else:
                            self.origin.setdefault(name, tensor)
                        dim += 1
        for name, tensor in ones:
            self.extents.setdefault(name, 1)
            self.origin.setdefault(name, tensor)

    def _all_copies(self, index: WrittenIndex) -> list[Index]:
        copies = range(self.copies) if isinstance(index, Starred) else (None,)
        return [b for c in copies for b in self.index(index, c)]

    # -- the whole

    def bind(self) -> Bound:
        self._solve_extents()
        self.spelling = self.keep
        results: list[Result] = []
        for written in self.line.results:
            dtype = self._dtype(written)
            if written.variadic:
                for copy in range(self.copies):
                    indices = self.indices(written.indices, copy)
                    results.append(Result(f"{written.name}{copy}", indices, self.expr(written.expr, copy), dtype))
                continue
            indices = self.indices(written.indices, None)
            segments = [i for i in indices if isinstance(i, Segments)]
            if segments:
                branches = tuple((n, self.expr(written.expr, c)) for c, n in enumerate(segments[0].names))
                results.append(Result(written.name, indices, Cases(branches), dtype))
            else:
                results.append(Result(written.name, indices, self.expr(written.expr, None), dtype))
        if self.keep:
            return Bound(self.line.operator, self.operands, tuple(results), MappingProxyType(self.extents), {})
        order = _order(results)
        missing = [n for n in order if n not in self.extents]
        if missing:
            raise self.fail(f"the size of index {missing[0]} is not given by any operand; give it in a where clause")
        extents = MappingProxyType({n: self.extents[n] for n in order})
        return Bound(self.line.operator, self.operands, tuple(results), extents, self._free_degrees())

    def spell(self) -> Spelled:
        """See `spell`."""
        bound = self.bind()
        sizes: dict[str, Entry | int] = {}
        windows: dict[WrittenIndex, Entry | int] = {}
        for (kind, index), clause in self.clauses.items():
            if kind == "size" and isinstance(index, Affine):
                windows[index] = clause.value
            elif kind == "size":
                names = [n for b in self._all_copies(index) for n in index_names(b)]
                value = clause.value
                many = isinstance(value, Entry) and isinstance(index, Pack | Starred)
                sizes |= {n: Entry(value.attribute, i) if many else value for i, n in enumerate(names)}  # pyright: ignore
        return Spelled(bound, sizes, windows)

    def _dtype(self, written: WrittenResult) -> str | None:
        match written.elements:
            case None:
                return self.followed
            case "int":
                return "i64"
            case "bool":
                return "bool"
            case name:
                return str(self.attributes[name])

    def _free_degrees(self) -> Mapping[str, int]:
        degrees: dict[str, int] = {}
        for (kind, index), clause in self.clauses.items():
            if kind == "degree":
                names = [n for b in self._all_copies(index) for n in index_names(b)]
                whole = isinstance(clause.value, Entry) and clause.value.at is None
                values = self._ints(clause) if whole else (self._number(clause.value),)
                for name, degree in zip(names, values, strict=True):
                    if degree < 1 or self.extents[name] % degree:
                        raise self.fail(f"degree {degree} does not divide size {self.extents[name]}")
                    degrees[name] = degree
        return MappingProxyType(degrees)


def _is_number(index: WrittenIndex) -> TypeGuard[Affine]:
    return isinstance(index, Affine) and all(t.variable is None for t in index.terms)


def _written_accesses(expr: Expr) -> list[Access]:
    if isinstance(expr, Access):
        return [expr]
    return [a for child in children(expr) for a in _written_accesses(child)]


def _reduced(expr: Expr) -> list[WrittenIndex]:
    own = list(expr.indices) if isinstance(expr, Reduce) else []
    return own + [i for child in children(expr) for i in _reduced(child)]


def _order(results: Sequence[Result]) -> list[str]:
    """Index variables in TDL order: those of the results' dims, then as the expressions mention them."""
    seen: dict[str, None] = {}

    def visit(expr: Expr) -> None:
        match expr:
            case Reduce(_, indices, body):
                seen.update(dict.fromkeys(n for i in indices for n in index_names(i)))
                visit(body)
            case Opaque(_, _, inputs, body):
                seen.update(dict.fromkeys(n for i in inputs for n in index_names(i)))
                visit(body)
            case Access(_, indices):
                seen.update(dict.fromkeys(n for i in indices for n in index_names(i)))
            case Name(name):
                seen.setdefault(name)
            case _:
                for child in children(expr):
                    visit(child)

    for result in results:
        seen.update(dict.fromkeys(n for i in result.indices for n in index_names(i)))
    for result in results:
        visit(result.expr)
    return list(seen)
