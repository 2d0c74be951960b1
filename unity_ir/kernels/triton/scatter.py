"""
Generate kernels of sums that add every element to the one place that an integer operand picks, such as the gradient of
an embedding table.

Lines before the launch sort the positions by their places; a program then sums the consecutive positions of a place.
No atomics, so that results do not depend on timing.

One place may have most of the positions (a table of two rows, a frequent token, padding). So many positions are cut
into chunks of their sorted order, and a first kernel sums every chunk that lies within one place. The second kernel
sums those, and the positions in the chunks at both ends of a place: about the square root of the number of positions,
however they are distributed.

A sum that is added to a tensor reads each place of it where it stores the result.

A table of more rows than there are positions (a recommender's) is filled with zeros instead, and a program for each
position writes the sum of its place if the position is the first of it.

Many such sums, of groups of integers that each have places of their own (the slots of a mixture's experts), are one
sum: the places of all groups are numbered one after the other. Their positions are not cut into chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod

from unity_ir.forms.addresses import address, power_of_two
from unity_ir.forms.scatter import Scatter
from unity_ir.kernels.text import SUM
from unity_ir.kernels.triton.expression import Axis
from unity_ir.kernels.triton.launch import Argument, Buffer, KernelBuilder, KernelLaunch, Stage, warps
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Access, Binary, Result, Var, WrittenIndex, index_names

COLUMNS = 256
"""Most elements of a place per program, so that few places still make many programs."""

TILE = 1024
"""
Elements that a program reads at a time, of several positions where a place has fewer elements. More would not spill,
but leave threads idle where places have few positions, as in large tables.
"""

SHORT = 512
"""Most positions that one program sums for a place; more are summed in chunks first."""

FEWEST = 4
"""Fewest chunks that are worth a launch of their own."""


def scatter_launches(stage: Stage, of: Scatter) -> list[KernelLaunch]:
    """
    Return the one or two launches that compute `stage`, a result that was matched as `of`, a scatter-add: an integer
    operand gives each element a *place*, a position along one dim of the result (in an embedding's gradient, the
    token's row of the table), and each place gets the sum of its elements. If there are many elements, a first launch
    sums chunks of them.

    The first launch has lines of code before it that sort the integers.
    """
    made = Sorted.of(stage)
    count = prod(stage.extents[n] for n in of.positions)
    by_position = stage.extents[of.pick.variable] > count and of.total is None and not of.kept
    found = made.of_positions(stage, of) if by_position else None
    if found:
        before = found.lines
    else:
        before = made.lines_of_groups(stage, of) if of.kept else made.lines(stage, of.pick.variable, of.pick.at)
    whole = of.kept or of.pick.variable in free_variables(of.pick.body)
    chunks = None if whole else _Chunks.of(stage, of, count)
    first = [] if chunks is None else [_chunks(stage, of, made, chunks)]
    launches = [*first, _places(stage, of, made, chunks, found)]
    # The positions are sorted before the first launch, whichever that is.
    return [replace(launches[0], before=before), *launches[1:]]


@dataclass(frozen=True, slots=True)
class Sorted:
    """
    Names of two int64 tensors in a launcher that sort the elements of an integer array, each of which gives a place: a
    position along one dim of the result (see `scatter_launches`).

    `order` has the positions in the array, sorted by the place that is given there. `begins` has, for each place, the
    index in `order` at which its positions begin, and one entry more for the end of the last place.
    """

    order: str
    begins: str

    @staticmethod
    def of(stage: Stage) -> Sorted:
        """
        Return two new identifiers in the launcher of `stage`, for the tensors `order` and `begins`. The code that
        computes these tensors comes from `lines` or `of_positions`.
        """
        return Sorted(*(stage.names.new(f"{stage.output.name}_{of}") for of in ("order", "begins")))

    def of_positions(self, stage: Stage, of: Scatter) -> Positions:
        """
        Return what a kernel with one program per position of the integer array needs: two further tensors, with an
        entry for each position in sorted order: its place, and the index in `order` at which that place ends. Also
        return the launcher's lines of code that compute these, `order` and `begins`. Here `begins` has an entry for
        each position, too: the index in `order` at which its place begins.

        `stage` is the result to compute, matched as `of`. Such a kernel is for results with more places than the array
        has positions; for others call `lines`, whose `begins` has an entry for each place.
        """
        ids, place = stage.buffers[of.pick.at.tensor], of.pick.variable
        places, ends = (stage.names.new(f"{stage.output.name}_{of}") for of in ("places", "ends"))
        lines = [
            f"{places}, {self.order} = torch.sort({ids.name}.flatten(), stable=True)",
            f"{self.begins} = torch.searchsorted({places}, {places})",
            f"{ends} = torch.searchsorted({places}, {places}, right=True)",
        ]
        if place in stage.starts:
            lines.append(f"{places} -= {stage.starts[place]}")
        count = prod(stage.extents[n] for n in of.positions)
        return Positions(tuple(lines), Argument(places, ids.argument.type), Argument(ends, "*i64"), count)

    def lines(self, stage: Stage, variable: str, at: Access) -> tuple[str, ...]:
        """
        Return the launcher's lines of code that compute the tensors `order` and `begins` for `stage`, the result to
        compute.

        `at` reads the integer operand, whose values are positions along the index variable called `variable`. If this
        rank has only a piece of that variable's positions, `begins` has entries for the piece alone, and one for its
        end.
        """
        ids = stage.buffers[at.tensor].name
        start, count = stage.starts.get(variable), stage.extents[variable]
        limits = f"{count + 1}" if start is None else f"{start}, {start} + {count + 1}"
        return (
            f"{self.order} = torch.argsort({ids}.flatten(), stable=True)",
            f"{self.begins} = torch.arange({limits}, dtype={ids}.dtype, device={ids}.device)",
            f"{self.begins} = torch.searchsorted({ids}.flatten()[{self.order}], {self.begins})",
        )

    def lines_of_groups(self, stage: Stage, of: Scatter) -> tuple[str, ...]:
        """
        Return what `lines` does where `of` has a sum for each position along the integers' first dims, a *group*. The
        places of the first group come first in `begins`; after those of each group there is an entry for its end, where
        the integers begin that name no place of this rank's piece.
        """
        variable, ids = of.pick.variable, stage.buffers[of.pick.at.tensor].name
        start, count = stage.starts.get(variable), stage.extents[variable]
        groups, places = prod(stage.extents[n] for n in of.kept), f"{self.order}_places"
        less = "" if start is None else f" - {start}"
        return (
            f"{places} = {ids}.reshape({groups}, -1){less}",
            f"{places} = torch.where(({places} >= 0) & ({places} < {count}), {places}, {count})",
            f"{places} = {places} + {count + 1} * torch.arange({groups}, device={ids}.device)[:, None]",
            f"{places}, {self.order} = torch.sort({places}.flatten(), stable=True)",
            f"{self.begins} = torch.arange({groups * (count + 1)}, device={ids}.device)",
            f"{self.begins} = torch.searchsorted({places}, {self.begins})",
        )


@dataclass(frozen=True, slots=True)
class Positions:
    """
    Of each of `count` positions in sorted order: its place, from the start of the piece, and the index in the order at
    which the place ends. Both are arguments of the kernel, which `lines` of the launcher compute.
    """

    lines: tuple[str, ...]
    places: Argument
    ends: Argument
    count: int


@dataclass(frozen=True, slots=True)
class _Chunks:
    """
    The chunks that sorted positions are cut into, and the `buffer` of the sums of chunks that lie within one place.
    """

    buffer: Buffer
    size: int
    """Positions per chunk: a power of two near the square root of all, which makes the longest loop shortest."""
    count: int
    """Number of whole chunks; the positions after the last are summed with their places."""

    @staticmethod
    def of(stage: Stage, of: Scatter, positions: int) -> _Chunks | None:
        """Return the chunks for a number of positions; None if they are few enough for one program."""
        size = max(power_of_two(isqrt(positions)), _tile(stage, (of.pick.variable,))[0])
        if positions <= SHORT or positions < FEWEST * size:
            return None
        buffer = Buffer(stage.names.new(f"{stage.output.name}_chunks"), "f32", "torch.float32")
        return _Chunks(buffer, size, positions // size)


def _columns(stage: Stage, rows: Sequence[str]) -> tuple[str, ...]:
    """Return the variables of a result other than `rows`."""
    return tuple(n for i in stage.result.indices for n in index_names(i) if n not in rows)


def _tile(stage: Stage, rows: Sequence[str]) -> tuple[int, int]:
    """Return how many positions, and how many elements of each, a program reads at a time."""
    width = min(power_of_two(prod(stage.extents[n] for n in _columns(stage, rows))), COLUMNS)
    return TILE // width, width


class _Body:
    """
    Builder of a kernel whose programs sum positions: the tile, and the statements that both kernels share.

    `variables` are those of the result's rows, of which a program computes one; `tensors` are further pointer
    parameters, by their names. `total` is the read of what is added to the result; None for nothing.
    """

    def __init__(
        self,
        stage: Stage,
        of: Scatter,
        variables: tuple[str, ...],
        tensors: Mapping[str, Argument],
        total: Access | None = None,
    ):
        self.of = of
        self.added_to = total
        self.variables = variables
        self.columns = _columns(stage, variables)
        self.size = prod(stage.extents[n] for n in self.columns)
        self.height, self.width = _tile(stage, variables)
        read = of.pick.body if total is None else Binary("+", of.pick.body, total)
        self.kernel = KernelBuilder(replace(stage, result=replace(stage.result, expr=read)))
        self.pointers = {wish: self.kernel.names.new(f"{wish}_ptr") for wish in tensors}
        given = {self.pointers[wish]: argument for wish, argument in tensors.items()}
        self.kernel.arguments = {**given, **self.kernel.arguments}

    def new(self, wish: str) -> str:
        """Return a new identifier of the kernel, like `wish`."""
        return self.kernel.names.new(wish)

    def begin(self, wish: str) -> str:
        """Write the statements that find a program's row and columns of the result; return the row's name."""
        row = self.new(wish)
        self.kernel.writer.emit(f"{row} = {self.kernel.program(0)}")
        self.columns_of(Axis(row, self.variables))
        return row

    def columns_of(self, row: Axis) -> None:
        """Write the statements that find a program's columns of the result, in the row that an axis says."""
        writer = self.kernel.writer
        writer.axes = [row]
        self.rows = self.kernel.constant("ROWS", self.height)
        self.tile, along = f"({self.rows},)", ""
        self.mask, self.column = None, ""
        if self.size > 1:
            columns = self.kernel.constant("COLUMNS", self.width)
            self.tile, along = f"({self.rows}, {columns})", "[:, None]"
            self.column = self.new("column")
            writer.emit(f"{self.column} = ({self.kernel.program(1)} * {columns} + tl.arange(0, {columns}))[None, :]")
            if self.size % self.width:
                self.mask = self.new("column_mask")
                writer.emit(f"{self.mask} = {self.column} < {self.size}")
            writer.axes.append(Axis(self.column, self.columns, self.mask))
        self.each = self.new("each")
        writer.emit(f"{self.each} = tl.arange(0, {self.rows}){along}")

    def total(self) -> str:
        """Write the statement that makes a tile of zeros to sum in; return its name."""
        total = self.new("total")
        self.kernel.writer.emit(f"{total} = tl.zeros({self.tile}, tl.float32)")
        return total

    def add(self, total: str, number: str, mask: str | None) -> None:
        """Write the statements that add the elements at indices `number` of the sorted order to `total`."""
        writer, position = self.kernel.writer, self.new("position")
        only = f", mask={mask}, other=0" if mask else ""
        writer.emit(f"{position} = tl.load({self.pointers['order']} + {number}{only})")
        if self.of.kept:
            # The row says which group it is of.
            writer.emit(f"{position} %= {prod(writer.extents[n] for n in self.of.positions)}")
        writer.axes.append(Axis(position, self.of.positions, mask))
        value = writer.number(self.of.pick.body)
        # Loads are masked, but functions of them need not be 0.
        text = f"tl.where({mask}, {value.text}, 0.0)" if mask else value.at(SUM)
        writer.emit(f"{total} += {text}")

    def end(self, total: str, indices: tuple[WrittenIndex, ...], name: str, rows: int) -> KernelLaunch:
        """Write the store of a tile's sum; return the launch of the kernel `name` over a number of rows."""
        where = address(indices, self.kernel.writer.extents)
        summed = f"tl.sum({total}, 0, keep_dims=True)" if self.size > 1 else f"tl.sum({total}, 0)"
        if self.added_to is not None:
            summed += f" + {self.kernel.writer.number(self.added_to).text}"
        self.kernel.writer.store(KernelBuilder.OUT, where, summed)
        grid = rows, -(-self.size // self.width)
        return self.kernel.launch(name, grid, warps(self.height * self.width), kind="scatter")


def _chunks(stage: Stage, of: Scatter, made: Sorted, chunks: _Chunks) -> KernelLaunch:
    """Return the launch that sums every chunk that lies within one place."""
    chunk = "chunk"
    while chunk in stage.extents:
        chunk += "_"
    indices = (Var(chunk), *map(Var, _columns(stage, (of.pick.variable,))))
    stage = replace(
        stage,
        result=Result(chunks.buffer.name, indices, stage.expr),
        output=chunks.buffer,
        extents={**stage.extents, chunk: chunks.count},
        kernel=f"{stage.kernel.removesuffix('_kernel')}_chunks_kernel",
    )
    tensors = {"ids": stage.buffers[of.pick.at.tensor].argument, "order": Argument(made.order, "*i64")}
    body = _Body(stage, of, (chunk,), tensors)
    writer = body.kernel.writer
    row = body.begin("chunk")
    begin, first, last, end = (body.new(n) for n in ("begin", "first", "last", "end"))
    size = body.kernel.constant("CHUNK", chunks.size)
    writer.emit(f"{begin} = {row} * {size}")
    for place, at in ((first, begin), (last, f"{begin} + {size} - 1")):
        writer.emit(f"{place} = tl.load({body.pointers['ids']} + tl.load({body.pointers['order']} + {at}))")
    writer.emit(f"{end} = tl.where({first} == {last}, {begin} + {size}, {begin})")
    total, start, number = body.total(), body.new("start"), body.new("number")
    # A chunk is a multiple of a tile.
    with writer.block(f"for {start} in range({begin}, {end}, {body.rows}):"):
        writer.emit(f"{number} = {start} + {body.each}")
        body.add(total, number, None)
    return body.end(total, indices, stage.kernel, chunks.count)


def _places(stage: Stage, of: Scatter, made: Sorted, chunks: _Chunks | None, found: Positions | None) -> KernelLaunch:
    """
    Return the launch that sums the positions of every place, reading the sums of whole chunks if there are any; or, if
    positions are given as `found`, of the place of every position that is the first of it.
    """
    tensors = {"order": Argument(made.order, "*i64"), "begins": Argument(made.begins, "*i64")}
    tensors |= {"places": found.places, "ends": found.ends} if found else {}
    if chunks is not None:
        tensors["chunks"] = chunks.buffer.argument
    body = _Body(stage, of, (*of.kept, of.pick.variable), tensors, of.total)
    writer = body.kernel.writer
    begin, end = body.new("begin"), body.new("end")

    def to_row() -> None:
        """Write the coordinates of what is stored, before the loop, which needs some of them as well."""
        writer.pointer(KernelBuilder.OUT, address(stage.result.indices, stage.extents))

    if found is None:
        row = body.begin("row")
        to_row()
        # After the places of each group there is an entry for its end.
        at = f"{row} + {row} // {stage.extents[of.pick.variable]}" if of.kept else row
        writer.emit(f"{begin} = tl.load({body.pointers['begins']} + {at})")
        writer.emit(f"{end} = tl.load({body.pointers['begins']} + {at} + 1)")
    else:
        first, row, is_first = body.new("first"), body.new("row"), body.new("is_first")
        writer.emit(f"{first} = {body.kernel.program(0)}")
        writer.emit(f"{begin} = tl.load({body.pointers['begins']} + {first})")
        writer.emit(f"{row} = tl.load({body.pointers['places']} + {first})")
        # Other ranks have the places beyond this piece.
        inside = f"({row} >= 0) & ({row} < {stage.extents[of.pick.variable]})"
        writer.emit(f"{is_first} = ({begin} == {first}) & {inside}")
        writer.emit(f"{end} = tl.where({is_first}, tl.load({body.pointers['ends']} + {first}), {begin})")
        body.columns_of(Axis(row, (of.pick.variable,), is_first))
        to_row()
    total, stop, before, skipped = body.total(), end, "", ""
    if chunks is not None:
        first, last, before, after = (body.new(n) for n in ("first", "last", "before", "after"))
        size = body.kernel.constant("CHUNK", chunks.size)
        writer.emit(f"{first} = ({begin} + {size} - 1) // {size}")
        writer.emit(f"{last} = tl.maximum({end} // {size}, {first})")
        _add_chunks(body, total, first, last)
        # The positions before the first whole chunk and after the last are one loop, which skips the chunks.
        skipped, stop = body.new("skipped"), body.new("stop")
        writer.emit(f"{before} = tl.minimum({first} * {size}, {end})")
        writer.emit(f"{after} = tl.maximum({last} * {size}, {before})")
        writer.emit(f"{skipped} = tl.minimum({after}, {end}) - {before}")
        writer.emit(f"{stop} = {end} - {skipped}")
    start, number, mask = (body.new(n) for n in ("start", "number", "number_mask"))
    with writer.block(f"for {start} in range({begin}, {stop}, {body.rows}):"):
        writer.emit(f"{number} = {start} + {body.each}")
        writer.emit(f"{mask} = {number} < {stop}")
        if skipped:
            writer.emit(f"{number} += tl.where({number} < {before}, 0, {skipped})")
        body.add(total, number, mask)
    if found is None:
        rows = prod(stage.extents[n] for n in body.variables)
        return body.end(total, stage.result.indices, stage.kernel, rows)
    launch = body.end(total, stage.result.indices, stage.kernel, found.count)
    return replace(launch, allocation=stage.allocation.replace(".new_empty(", ".new_zeros(", 1))


def _add_chunks(body: _Body, total: str, first: str, last: str) -> None:
    """Write the loop that adds the sums of the chunks `first` to `last` (exclusive) to `total`."""
    writer = body.kernel.writer
    start, number, mask = (body.new(n) for n in ("start", "chunk", "chunk_mask"))
    with writer.block(f"for {start} in range({first}, {last}, {body.rows}):"):
        writer.emit(f"{number} = {start} + {body.each}")
        writer.emit(f"{mask} = {number} < {last}")
        masks = " & ".join(filter(None, [mask, body.mask]))
        at = f"{number} * {body.size} + {body.column}" if body.size > 1 else number
        writer.emit(f"{total} += tl.load({body.pointers['chunks']} + {at}, mask={masks}, other=0.0)")
