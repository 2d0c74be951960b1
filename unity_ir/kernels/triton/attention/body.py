"""
Write what kernels of attention have in common: a program keeps one tile of rows (or columns) of the scores of a batch
element, and loops over tiles of columns (or rows).

Under a causal mask, tiles that it hides are left out, and it is evaluated only in those that it crosses. Programs with
the longest loops come first, so that no long one is left when the others are done. Of a sequence in striped order
programs loop over tiles in natural order (`striped`). Where each row sees a range of columns, which is data, a program
finds the tiles that it needs before its loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import e, log2, prod

from unity_ir.forms.addresses import Names, address, power_of_two
from unity_ir.forms.attention import Ranges, Scores
from unity_ir.kernels.text import SUM
from unity_ir.kernels.triton.attention.striped import StripedPiece
from unity_ir.kernels.triton.attention.tiles import Blocks
from unity_ir.kernels.triton.expression import Axis, KernelWriter
from unity_ir.kernels.triton.launch import Argument, Buffer, KernelLaunch, Scalar, new_tensor, signature
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import NOT_FLOATING, Access, Bound, Expr, Reduce, Result, accesses, children, index_names

_HELPERS = """\
# Precision of float32 products, as in matrix products.
ATTENTION_PRECISION = tl.constexpr("ieee")
# The interpreter multiplies the bit patterns of bfloat16.
ATTENTION_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


"""
NEVER = 'float("-inf")'
GROUP_ROWS = 64
"""Rows of the smallest product of a group of four warps (`wgmma`)."""
_SCANNED = 1024
"""Rows of which a program looks at once whether they see its columns."""
LOG2E = log2(e)


@dataclass(frozen=True)
class Scope:
    """The launcher of one TDL line: the tensors and identifiers that its kernels may use."""

    bound: Bound
    buffers: Mapping[str, Buffer]
    """The buffer of every operand, by name."""
    outputs: Sequence[Buffer]
    """The buffer of every result."""
    like: str
    """The operand on whose device results are allocated."""
    name: str
    """The launcher's name, with which the kernels' names begin."""
    names: Names
    starts: Mapping[str, str]
    """As `Stage.starts`."""


@dataclass(frozen=True, slots=True)
class Loop:
    """
    A loop of a kernel over tiles of the scores: the line that opens it (`head`), the lines at the beginning of its body
    that find the tile's start (`inside`), and whether the causal mask has to be applied (`masked`).
    """

    head: str
    inside: tuple[str, ...]
    masked: bool
    """Whether the causal mask may hide some of a tile; the rows and columns of other tiles all see each other."""
    place: str | None = None
    """The position of a tile of rows under the causal mask; None if it is where the tile starts."""


class Body:
    """
    Writes a kernel of attention over tiles of the scores of one batch element, whose rows are queries and whose columns
    are keys. Call `blocks` first, then write the tiles and loops, and `launch` last.

    `scores` is the softmax that was matched. `place` is the launcher, with its tensors and names; `outputs` are the
    buffers that the kernel fills, and `reads` the expressions that it reads beside the softmax's weights. With
    `rows_move` a program holds the operand tiles of some columns and loops over rows, else the other way round.
    """

    def __init__(self, scores: Scores, place: Scope, outputs: Iterable[Buffer], reads: Iterable[Expr], rows_move: bool):
        self.scores = scores
        self.place = place
        self.extents = place.bound.extents
        self.rows_move = rows_move
        """
        Whether a program loops over rows and keeps one tile of columns; else the other way round. What is kept comes
        first in tiles of scores, so that they are left factors of products as they are, in registers.
        """
        self.names = Names()
        reads = [scores.weights, *reads]
        tensors = dict.fromkeys(a.tensor for e in reads for a in accesses(e))
        pointers = {t: self.names.new(f"{t}_ptr") for t in tensors}
        self.arguments: dict[str, Argument] = {pointers[t]: place.buffers[t].argument for t in tensors}
        for output in outputs:
            pointers[output.name] = name = self.names.new(f"{output.name}_ptr")
            self.arguments[name] = output.argument
        used = frozenset[str]().union(*map(free_variables, reads))
        starts = {n: self.names.new(f"{n}_start") for n in place.starts if n in used}
        self.arguments |= {starts[n]: Argument(place.starts[n], "i32") for n in starts}
        self.starts = starts
        self.constants: dict[str, Scalar] = {}
        integers = frozenset(t for t in tensors if place.buffers[t].dtype in NOT_FLOATING)
        self.writer = KernelWriter(self.extents, pointers, integers, self.names, starts)
        self.row_count = prod(self.extents[n] for n in scores.rows)
        self.column_count = self.extents[scores.column]
        self.batch_count = prod(self.extents[n] for n in scores.batch)
        self.dtype = place.buffers[scores.q.tensor].dtype
        self.features: dict[tuple[int, ...], tuple[str, str | None]] = {}
        self.striped: Mapping[bool, StripedPiece] = {}
        """
        The pieces of rows (True) and of columns (False) of a sequence in striped order, if no tile is of two blocks;
        else none.
        """
        self.positions: dict[bool, str] = {}
        """The variables with the positions in natural order of a tile's rows and columns, of such a sequence."""

    # -- tiles

    def blocks(self, of: Blocks) -> None:
        """
        Set the size of a tile of scores: the rows and columns of `of`, or fewer (at least 16) if the scores have fewer.
        Write the statements that find which batch element a program computes, and the first of the rows that it holds
        while it loops over columns; with `rows_move`, the first of the columns that it holds while it loops over rows.
        """
        self.options = of
        self.rows = min(of.rows, max(16, power_of_two(self.row_count)))
        self.columns = min(of.columns, max(16, power_of_two(self.column_count)))
        self.constants |= {"ROWS": self.rows, "COLUMNS": self.columns}
        count, width = (self.column_count, self.columns) if self.rows_move else (self.row_count, self.rows)
        self.tiles = -(-count // width)
        names = self.names
        for name in ("ROWS", "COLUMNS"):
            names.new(name)
        self.causal = self._causal_size()
        self.seen_positions = self._seen_size()
        """Positions of rows in a group, of which those that see a column are found before the loop; None for all."""
        self.head, self.first = names.new("head"), names.new("first")
        self._place()
        self.row, self.column = names.new("row"), names.new("column")
        self.row_mask = names.new("row_mask") if self.row_count % self.rows else None
        self.column_mask = names.new("column_mask") if self.column_count % self.columns else None

    def _causal_size(self) -> int | None:
        """
        Return the number of queries' positions under a causal mask, of which rows are one or more groups; None if there
        is no mask, or if a tile of rows may be of two groups, or of two blocks of a sequence in striped order.
        """
        of = self.scores.stripes()
        if of is None:
            return self._size_of_group(self.scores.causal_row())
        size = self._size_of_group(of.row)
        rows = StripedPiece(of, self.extents[of.row], self.starts.get(of.row))
        columns = StripedPiece(of, self.column_count, self.starts.get(self.scores.column))
        if size is None or not rows.fits(self.rows) or not columns.fits(self.columns):
            return None
        self.striped = {True: rows, False: columns}
        return size

    def _seen_size(self) -> int | None:
        """
        Return the number of queries' positions, if each sees a range of keys, the same in every group of rows; else
        None.
        """
        ranges, inner = self.scores.ranges, [n for n in self.scores.rows if self.extents[n] > 1]
        if ranges is None or not inner:
            return None
        read = {n for a in (ranges.first, ranges.end) for i in a.indices for n in index_names(i)}
        return None if read & set(inner[:-1]) else self._size_of_group(inner[-1])

    def _size_of_group(self, row: str | None) -> int | None:
        """
        Return the positions of the rows' innermost variable `row`, if rows are one or more groups of them, and no tile
        is of two groups; else None.
        """
        inner = [n for n in self.scores.rows if self.extents[n] > 1]
        if row is None or not inner or inner[-1] != row:
            return None
        size = self.extents[row]
        return size if size == self.row_count or size % self.rows == 0 else None

    def _place(self) -> None:
        emit, width = self.writer.emit, "COLUMNS" if self.rows_move else "ROWS"
        if self.causal is None:
            emit(f"{self.head} = tl.program_id(0) // {self.tiles}")
            emit(f"{self.first} = tl.program_id(0) % {self.tiles} * {width}")
            return
        # The first columns are seen by most rows, the last rows see most columns.
        if self.rows_move:
            emit(f"{self.head} = tl.program_id(0) % {self.batch_count}")
            emit(f"{self.first} = tl.program_id(0) // {self.batch_count} * {width}")
            return
        groups = self.row_count // self.causal
        units, last = self.batch_count * groups, self.tiles // groups - 1
        if groups == 1:
            emit(f"{self.head} = tl.program_id(0) % {units}")
            emit(f"{self.first} = ({last} - tl.program_id(0) // {units}) * {width}")
        else:
            emit(f"{self.head} = tl.program_id(0) % {units} // {groups}")
            group = f"tl.program_id(0) % {groups} * {self.causal}"
            emit(f"{self.first} = {group} + ({last} - tl.program_id(0) // {units}) * {width}")

    def axis(self, rows: bool, start: str, place: str | None = None) -> None:
        """
        Write the statements that define the positions of a tile's rows (`rows` true) or columns, from the kernel
        variable `start` on, and the mask of those that exist.

        `place` is only for rows in several groups, such as the query heads that share one key head: their positions
        under the causal mask begin at 0 in each group. It is the name of the kernel variable with the position of the
        tile's first row in its group.
        """
        index, mask = (self.row, self.row_mask) if rows else (self.column, self.column_mask)
        self.writer.emit(f"{index} = {start} + tl.arange(0, {'ROWS' if rows else 'COLUMNS'})")
        if mask is not None:
            self.writer.emit(f"{mask} = {index} < {self.row_count if rows else self.column_count}")
        if self.striped:
            at = start if place is None else place
            if rows and place is None and self.causal != self.row_count:
                at = f"({start} % {self.causal})"
            own = self.striped[rows].position(at)
            self.positions[rows] = self.names.new("place")
            self.writer.emit(f"{self.positions[rows]} = {own} + tl.arange(0, {'ROWS' if rows else 'COLUMNS'})")
        if place is not None:
            position = self.writer.define(("place", place), "position", f"{place} + tl.arange(0, ROWS)")
            side = self.along(True)
            size = self.causal or self.seen_positions
            self.writer.let(("coordinate", f"{index}{side}", 1, size), f"{position}{side}")

    def width(self, names: Sequence[str]) -> str:
        """
        Write the statements that define the positions of the features over which the index variables `names` run, all
        in one tile, unless they are written already for variables of the same sizes. Return the tile's width as text: a
        power of two, at least 16.
        """
        sizes = tuple(self.extents[n] for n in names)
        if sizes not in self.features:
            size = prod(sizes)
            block = max(16, power_of_two(size))
            index, mask = self.names.new("feature"), None
            self.writer.emit(f"{index} = tl.arange(0, {block})")
            if block != size:
                mask = self.names.new("feature_mask")
                self.writer.emit(f"{mask} = {index} < {size}")
            self.features[sizes] = index, mask
        return str(max(16, power_of_two(prod(sizes))))

    def along(self, rows: bool) -> str:
        """
        Return the subscript, `[:, None]` or `[None, :]`, with which a vector of one number per row (`rows` true) or per
        column broadcasts over a tile of scores.
        """
        return "[:, None]" if rows != self.rows_move else "[None, :]"

    def _axes(self, rows: bool | None, features: Sequence[str]) -> list[Axis]:
        scores = self.scores
        axes = [Axis(self.head, scores.batch)] if self.batch_count > 1 else []
        for own, index, mask, names in (
            (True, self.row, self.row_mask, scores.rows),
            (False, self.column, self.column_mask, (scores.column,)),
        ):
            if rows is own or rows is None:
                side = self.along(own) if rows is None else "[:, None]" if features else ""
                axes.append(Axis(f"{index}{side}", names, f"{mask}{side}" if mask else None))
        if features:
            index, mask = self.features[tuple(self.extents[n] for n in features)]
            axes.append(Axis(f"{index}[None, :]", tuple(features), f"{mask}[None, :]" if mask else None))
        return axes

    def tile(self, access: Access, rows: bool, features: Sequence[str]) -> str:
        """
        Write the load of a tile, [rows, features] if `rows` is true, else [columns, features], of the tensor that
        `access` reads, unless it is loaded already; return its name. `features` are the index variables of the
        features.
        """
        writer = self.writer
        writer.axes = self._axes(rows, features)
        pointer, mask = writer.pointer(access.tensor, address(access.indices, self.extents))
        key = ("tile", pointer, mask)
        name = writer.known(key)
        if name is None:
            options = f", mask={mask}, other=0.0" if mask else ""
            name = writer.define(key, f"{access.tensor}_tile", f"tl.load({pointer}{options})")
            writer.emit("if ATTENTION_INTERPRETED:")
            writer.emit(f"    {name} = {name}.to(tl.float32)")
        return name

    def vector(self, access: Access, scale: str = "") -> str:
        """
        Write the load of one number for every row, in float32 and multiplied by `scale` (text such as ` * 2.0`), from
        the tensor that `access` reads, unless it is loaded already; return its name.
        """
        writer = self.writer
        writer.axes = self._axes(True, ())
        pointer, mask = writer.pointer(access.tensor, address(access.indices, self.extents))
        key = ("vector", pointer, mask)
        options = f", mask={mask}, other=0.0" if mask else ""
        wide = "" if self.place.buffers[access.tensor].dtype == "f32" else ".to(tl.float32)"
        return writer.known(key) or writer.define(key, access.tensor, f"tl.load({pointer}{options}){wide}{scale}")

    def store(self, buffer: Buffer, indices: Sequence[object], rows: bool, features: Sequence[str], value: str) -> None:
        """
        Write the store of `value`, the expression of a tile [rows, features] if `rows` is true, else [columns,
        features], to `buffer`. `indices` are the TDL indices of the result that the buffer holds, one per dim;
        `features` are the index variables of the features.
        """
        writer = self.writer
        writer.axes = self._axes(rows, features)
        writer.store(buffer.name, address(indices, self.extents), value)  # pyright: ignore[reportArgumentType]

    # -- scores

    def product(self, node: Reduce, wish: str) -> str:
        """
        Write the matrix product `node` of a tile of rows and a tile of columns, a float32 tile of the size of the
        scores; return its name, which is like `wish`.
        """
        features = tuple(n for n in node.names if self.extents[n] > 1)
        by_rows, by_columns = sides(node, self.scores)
        row, column = self.tile(by_rows, True, features), self.tile(by_columns, False, features)
        left, right = (column, row) if self.rows_move else (row, column)
        text = f"tl.dot({left}, tl.trans({right}), input_precision=ATTENTION_PRECISION)"
        return self.writer.define(node, wish, text)

    def over_tile(self) -> None:
        """
        Set the writer's axes to those of a tile of scores, so that the expressions that it writes next are computed for
        every row and column of the tile.
        """
        self.writer.axes = self._axes(None, ())

    @property
    def scale(self) -> float | None:
        """
        The positive number that a product of query and key is multiplied by to give its score, where no causal mask
        hides it; None if scores are another function of the products.
        """
        scale = self.scores.scale
        return scale if scale is not None and scale > 0 else None

    def score(self, masked: bool) -> str:
        """
        Write the scores of a tile in float32, or only the products of queries and keys if scores are these times
        `scale`; return their expression. If `masked`, the causal mask is applied.
        """
        scores, ranges = self.scores, self.scores.ranges is not None
        products = self.product(scores.product, "products")
        self.over_tile()
        if self.scale is None and not ranges:
            return self.writer.number(scores.score if masked else scores.visible).at(SUM)
        shown = products if self.scale is not None else self.writer.number(scores.visible).at(SUM)
        if not masked or scores.hidden is None:
            return shown
        if scores.ranges is not None:
            hidden = self._outside(scores.ranges)
        elif self.striped:
            key, query = (f"{self.positions[rows]}{self.along(rows)}" for rows in (False, True))
            hidden = f"{key} > {query}"
        else:
            hidden = self.writer.value(scores.hidden).text
        # Under a causal mask a row sees at least the first column, so that its maximum is finite.
        return f"tl.where({hidden}, {NEVER}, {shown})"

    @property
    def always_finite(self) -> bool:
        """Whether the maximum of a row's scores is finite from the first tile on, whatever the tensors hold."""
        return self.scale is not None and self.scores.ranges is None

    def inside(self, rows: bool, columns: bool) -> str | None:
        """
        Return the expression of a mask over the tile of scores, true where the row exists (checked if `rows` is true)
        and the column exists (checked if `columns` is true); None if all do.
        """
        masks = [f"{self.row_mask}{self.along(True)}"] if rows and self.row_mask else []
        masks += [f"{self.column_mask}{self.along(False)}"] if columns and self.column_mask else []
        return " & ".join(masks) or None

    # -- loops

    def loops(self, start: str, split: bool = False) -> list[Loop]:
        """
        Write the statements that find where the loops over tiles begin and end; return the loops, in order. In each,
        the variable `start` is a tile's first row or column.

        Under a causal mask, and where rows see ranges of columns, tiles that are hidden completely are left out. If
        `split`, and the loop is over columns, tiles that are not masked at all have a loop of their own.
        """
        if self.scores.ranges is not None:
            return [self._seen_rows(start, self.scores.ranges)] if self.rows_move else self._seen_columns(start, split)
        if self.causal is None:
            masked = self.scores.hidden is not None
            count, step = (self.row_count, "ROWS") if self.rows_move else (self.column_count, "COLUMNS")
            return [Loop(f"for {start} in range(0, {count}, {step}):", (), masked)]
        if self.striped:
            return [self._over_striped_rows(start)] if self.rows_move else self._over_striped_columns(start, split)
        return [self._over_rows(start)] if self.rows_move else self._over_columns(start, split)

    @property
    def _shift(self) -> str:
        """Text to add to a row's position so that it is on one line with the columns', where pieces start elsewhere."""
        row, column = self.scores.causal_row(), self.scores.column
        plus = f" + {self.starts[row]}" if row in self.starts else ""
        return plus + (f" - {self.starts[column]}" if column in self.starts else "")

    def _over_columns(self, start: str, split: bool) -> list[Loop]:
        emit, count = self.writer.emit, self.column_count
        first = self.first if self.causal == self.row_count else f"{self.first} % {self.causal}"
        visible, begin, found = f"{first}{self._shift}", "0", list[Loop]()
        if split:
            # Columns up to the first row's position are seen by all rows.
            begin = self.names.new("middle")
            emit(f"{begin} = tl.maximum(0, tl.minimum({count}, {visible} + 1)) // COLUMNS * COLUMNS")
            found.append(Loop(f"for {start} in range(0, {begin}, COLUMNS):", (), False))
        # None after the last row's is seen.
        end = f"tl.minimum({count}, {visible} + ROWS)"
        return [*found, Loop(f"for {start} in range({begin}, {end}, COLUMNS):", (), True)]

    def _over_rows(self, start: str) -> Loop:
        assert self.causal is not None
        shift = self._shift.translate(str.maketrans("+-", "-+"))
        # Rows before the first column's position see nothing.
        begin = f"tl.maximum(0, {self.first}{shift}) // ROWS * ROWS"
        size, groups = self.causal, self.row_count // self.causal
        if groups == 1:
            return Loop(f"for {start} in range({begin}, {size}, ROWS):", (), True)
        return self._in_groups(start, begin, str(size), size)

    def _over_striped_columns(self, start: str, split: bool) -> list[Loop]:
        """Return the loops over those tiles of columns, in natural order, that a row of the program's tile sees."""
        emit, names, columns = self.writer.emit, self.names, self.striped[False]
        first = self.first if self.causal == self.row_count else f"({self.first} % {self.causal})"
        visible, after, order = names.new("visible"), names.new("after"), names.new("order")
        emit(f"{visible} = {self.striped[True].position(first)}")
        emit(f"{after} = {visible} + ROWS")
        begin, found, lines = "0", list[Loop](), (f"{start} = {columns.token(order)}",)
        if split:
            # Columns before the first row's position are seen by all rows.
            begin = names.new("middle")
            emit(f"{begin} = {columns.before(visible)} // COLUMNS * COLUMNS")
            found.append(Loop(f"for {order} in range(0, {begin}, COLUMNS):", lines, False))
        return [*found, Loop(f"for {order} in range({begin}, {columns.before(after)}, COLUMNS):", lines, True)]

    def _over_striped_rows(self, start: str) -> Loop:
        """Return the loop over those tiles of rows, in natural order, that see a column of the program's tile."""
        assert self.causal is not None
        names, rows = self.names, self.striped[True]
        first = names.new("visible")
        self.writer.emit(f"{first} = {self.striped[False].position(self.first)}")
        begin = f"{rows.before(first)} // ROWS * ROWS"
        if self.causal == self.row_count:
            order = names.new("order")
            return Loop(
                f"for {order} in range({begin}, {self.causal}, ROWS):", (f"{start} = {rows.token(order)}",), True
            )
        return self._in_groups(start, begin, str(self.causal), self.causal, rows)

    def _in_groups(self, start: str, begin: str, end: str, size: int, piece: StripedPiece | None = None) -> Loop:
        """
        Return one loop over the tiles of rows from position `begin` to `end` (expressions) of every group of `size`
        rows: the compiler can overlap it with loads throughout. With the `piece` that a group is of a sequence in
        striped order, positions are those in its natural order.
        """
        names, emit = self.names, self.writer.emit
        low, each, step, place = (names.new(n) for n in ("begin", "each", "step", "place"))
        emit(f"{low} = {begin}")
        emit(f"{each} = ({end} - {low} + ROWS - 1) // ROWS")
        order = f"{low} + {step} % {each} * ROWS"
        if piece is not None:
            at = names.new("order")
            lines = (f"{at} = {order}", f"{place} = {piece.token(at)}")
        else:
            lines = (f"{place} = {order}",)
        lines = (*lines, f"{start} = {step} // {each} * {size} + {place}")
        return Loop(f"for {step} in range(0, {self.row_count // size} * {each}):", lines, True, place)

    def _outside(self, ranges: Ranges) -> str:
        """Return the condition under which a row of the tile of scores does not see a column."""
        low, high = self._limits(ranges)
        column = f"{self.column}{self.along(False)}"
        return f"({column} < {low}) | ({column} >= {high})"

    def _limits(self, ranges: Ranges) -> tuple[str, str]:
        """
        Write the loads of the range of columns that each row sees, of those of this piece; return the names of its two
        ends, which broadcast over the writer's axes.
        """
        writer, column = self.writer, self.scores.column
        less = f" - {self.starts[column]}" if column in self.starts else ""

        def limit(access: Access, wish: str) -> str:
            read = writer.load(access)
            inside = f"tl.minimum(tl.maximum({read}{less}, 0), {self.column_count}).to(tl.int32)"
            return writer.known((wish, read)) or writer.define((wish, read), wish, inside)

        return limit(ranges.first, "low"), limit(ranges.end, "high")

    def _seen_columns(self, start: str, split: bool) -> list[Loop]:
        """Return the loops over those tiles of columns that a row of the program's tile sees."""
        assert self.scores.ranges is not None
        writer, names = self.writer, self.names
        self.over_tile()
        low, high = self._limits(self.scores.ranges)
        begin, finish = (names.new(n) for n in ("begin", "finish"))
        seen = f"{low} < {high}"
        writer.emit(f"{begin} = tl.min(tl.where({seen}, {low}, {self.column_count})) // COLUMNS * COLUMNS")
        writer.emit(f"{finish} = tl.max(tl.where({seen}, {high}, 0))")
        if not split:
            return [Loop(f"for {start} in range({begin}, {finish}, COLUMNS):", (), True)]
        # Columns from `middle` to `after` are seen by all rows: there are none if a row sees none.
        middle, after = (names.new(n) for n in ("middle", "after"))
        writer.emit(f"{middle} = tl.cdiv(tl.max({low}), COLUMNS) * COLUMNS")
        writer.emit(f"{after} = tl.min({high}) // COLUMNS * COLUMNS")
        parts = (
            (begin, f"tl.minimum({middle}, {finish})", True),
            (middle, after, False),
            (f"tl.maximum({middle}, {after})", finish, True),
        )
        return [Loop(f"for {start} in range({a}, {b}, COLUMNS):", (), masked) for a, b, masked in parts]

    def _seen_rows(self, start: str, ranges: Ranges) -> Loop:
        """Return the loop over those tiles of rows that see a column of the program's tile."""
        size = self.seen_positions
        if size is None:
            return Loop(f"for {start} in range(0, {self.row_count}, ROWS):", (), True)
        writer, names = self.writer, self.names
        begin, finish, scanned, index = (names.new(n) for n in ("begin", "finish", "scanned", "index"))
        width = min(_SCANNED, power_of_two(size))
        writer.emit(f"{begin} = {size}")
        writer.emit(f"{finish} = 0")
        row = next(n for n in reversed(self.scores.rows) if self.extents[n] > 1)
        with writer.block(f"for {scanned} in range(0, {size}, {width}):"):
            writer.emit(f"{index} = {scanned} + tl.arange(0, {width})")
            batch = [Axis(self.head, self.scores.batch)] if self.batch_count > 1 else []
            writer.axes = [*batch, Axis(index, (row,), f"({index} < {size})" if size % width else None)]
            low, high = self._limits(ranges)
            some = f"tl.maximum({low}, {self.first}) < tl.minimum({high}, {self.first} + COLUMNS)"
            seen = writer.define(("seen", scanned), "seen", some)
            writer.emit(f"{begin} = tl.minimum({begin}, tl.min(tl.where({seen}, {index}, {size})))")
            writer.emit(f"{finish} = tl.maximum({finish}, tl.max(tl.where({seen}, {index} + 1, 0)))")
        groups = self.row_count // size
        if groups == 1:
            return Loop(f"for {start} in range({begin} // ROWS * ROWS, {finish}, ROWS):", (), True)
        return self._in_groups(start, f"{begin} // ROWS * ROWS", finish, size)

    # -- launch

    def launch(self, kind: str, before: Sequence[str]) -> KernelLaunch:
        """
        Finish the kernel and return its launch. The kernel's name is the launcher's followed by `kind`, such as `rows`.
        `before` has the launcher's lines of code that allocate the results, at least one.
        """
        name = f"{self.place.name}_{kind}_kernel"
        head = signature(name, self.arguments, self.constants)
        text = _HELPERS + "\n".join(["@triton.jit", head, *self.writer.lines]) + "\n"
        grid = (self.tiles * self.batch_count,)
        allocation, *others = before
        expects = ("mma", "pipelined") if self.dtype != "f32" and self.aligned() else ()
        # Tiles of wider heads have fewer rows, so that they fit registers.
        if expects and min(self.row_count, self.column_count) >= GROUP_ROWS and max(map(prod, self.features)) <= 128:
            expects += ("wgmma",)
        of = self.options
        # Tiles of few rows or columns are small everywhere.
        most = {"ROWS": self.rows, "COLUMNS": self.columns, "num_stages": of.num_stages}
        on_amd = {n: v for n, v in of.on_amd.items() if v < most[n]}
        return KernelLaunch(
            name,
            text,
            grid,
            self.arguments,
            self.constants,
            of.num_warps,
            of.num_stages,
            allocation,
            tuple(others),
            expects,
            "attention",
            on_amd=on_amd,
        )

    def aligned(self) -> bool:
        """
        Return whether the rows of every tile have a multiple of 16 features, so that they are read in vectors of 16
        bytes.
        """
        return all(prod(sizes) % 16 == 0 for sizes in self.features)

    def widest(self, *others: Sequence[str]) -> int:
        """
        Return the number of features of the widest operand tile, by which the size of tiles of scores is chosen
        (`Blocks`): the most positions that any of these tuples of index variables has: those that the product of
        queries and keys sums over, and each of `others`.
        """
        return max(prod(self.extents[n] for n in names) for names in (self.scores.inner, *others))


def sides(product: Reduce, scores: Scores) -> tuple[Access, Access]:
    """
    Return the two operands of `product`, a sum over features of an operand with rows times one with columns of the
    scores, such as that of queries and keys: (the read of the one with rows, the read of the one with columns).
    """
    one, other = accesses(product)
    return (other, one) if scores.column in free_variables(one) else (one, other)


def beside(factor: Expr, known: Collection[Expr | None]) -> Iterator[Access]:
    """
    Yield the tensor reads in the expression `factor`, but not those inside one of the `known` subexpressions (None is
    skipped), such as the softmax's weights: the kernel computes these itself, so that their tensors need no further
    load.
    """
    if isinstance(factor, Access):
        yield factor
    elif factor not in known:
        for child in children(factor):
            yield from beside(child, known)


def allocation(buffer: Buffer, indices: Sequence[object], place: Scope) -> str:
    """
    Return the launcher's line of code that allocates `buffer` for a result of the TDL line of the launcher `place`.
    `indices` are the result's TDL indices, one per dim, which give its shape.
    """
    shape = place.bound.result_shape(Result("", tuple(indices), Access("", ())))  # pyright: ignore[reportArgumentType]
    return new_tensor(buffer, shape, place.like)
