"""
Third step of binding a TDL line to operand shapes: solves for the extent (number of positions) of every index variable,
from sizes of operands and attributes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from unity_ir.tdl.indices import Indices
from unity_ir.tdl.syntax import (
    Affine,
    Composite,
    Index,
    Pack,
    Segments,
    Starred,
    Var,
    Window,
    WrittenIndex,
    index_names,
    is_constant_position,
)


class Extents(Indices):
    """
    Does the third step of binding: solves for the extents (numbers of positions) of index variables, given the sizes of
    operands and attributes. Raises `UnityError` for sizes that do not fit, naming the two that disagree.
    """

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
                for access in result.accesses:
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
        """Check that a dim that is read only at numbers has one position more than the largest of them."""
        if not any(r.reads_constant_positions for r in self.line.results):
            return
        read: dict[tuple[str, int], list[int | None]] = {}
        for result in self.line.results:
            for access in result.accesses:
                if any(isinstance(i, Pack) and i.broadcast for i in access.indices):
                    continue
                dim = 0
                for index in access.indices:
                    at = self._window(index.terms, 0).offset if is_constant_position(index) else None
                    read.setdefault((self._first(access), dim), []).append(at)
                    dim += self.ranks[index.name] if isinstance(index, Pack) else 1
        for (tensor, dim), positions in read.items():
            size, numbers = self.shapes[tensor][dim : dim + 1], [at for at in positions if at is not None]
            if len(numbers) == len(positions) and size != (max(numbers) + 1,):
                raise self.fail(f"{tensor} has {size[0]} positions along dim {dim}; it needs {max(numbers) + 1}")

    def _solve_window(self, tensor: str, window: Window, size: int) -> None:
        """
        Solve for the extent of the one variable that a window leaves open, or else check that the window lies in the
        dim.

        The padding after the dim is as long as the padding before it.
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
        """Solve for the extents of packs that broadcast: along each dim all operands have one size, or 1."""
        names = frozenset[str]().union(*(r.broadcast for r in self.line.results))
        if not names:
            return
        reads = [a for r in self.line.results for a in r.accesses]
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
