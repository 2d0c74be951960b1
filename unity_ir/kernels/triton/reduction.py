"""
Generate kernels with reductions: a program computes a tile of rows by columns (`tiling`).

No atomics, so that results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from unity_ir.forms.addresses import address, power_of_two
from unity_ir.forms.rewrite import reductions, rename
from unity_ir.kernels.text import SUM, UNARY, Text
from unity_ir.kernels.triton.expression import Axis
from unity_ir.kernels.triton.launch import Buffer, KernelBuilder, KernelLaunch, Stage
from unity_ir.kernels.triton.tiling import (
    Tiling,
    names_of,
    parts_of,
    passes,
    sizes_of,
    tiling_of,
    variables,
    warps_of,
)
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Call,
    Expr,
    PaddedVar,
    Reduce,
    Result,
    Var,
    accesses,
    index_names,
)

_NEUTRAL: Mapping[str, str] = {"sum": "0.0", "prod": "1.0", "max": '-float("inf")', "min": 'float("inf")'}
_MERGE: Mapping[str, str] = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
}
_MULTIPLY = "@triton.jit\ndef multiply(a, b):\n    return a * b\n\n\n"


def reduction_launches(stage: Stage, more: Sequence[Stage] = ()) -> list[KernelLaunch]:
    """
    Return the launches that compute `stage`, a result whose expression has reductions, and `more` stages, by the same
    kernels. All stages must depend on the same index variables of the result (see `have_rows_in_common`).

    One reduction may be inside another, but must not use the variables over which the outer one reduces (`Results`
    splits results so that none does). There is one launch, or two if long reductions are split over programs: the first
    computes partial results, the second reduces these.
    """
    stages = (stage, *more)
    parts = parts_of(stages)
    if parts == 1:
        return [reduction_launch(stages)]
    part = new_variable("part", stage.extents)
    first, second = zip(*(in_parts(each, part, parts) for each in stages), strict=True)
    # Only the first kernel is split: there are few partial results.
    return [reduction_launch(first, parts), reduction_launch(second)]


def new_variable(wish: str, extents: Mapping[str, int]) -> str:
    """Return the name of a new index variable, `wish` or like it, that is not in `extents`."""
    while wish in extents:
        wish += "_"
    return wish


def in_parts(stage: Stage, part: str, parts: int) -> tuple[Stage, Stage]:
    """
    Split a reduction `stage` into two stages (results to compute): return (the stage of partial results, the stage that
    reduces them to the result). Partial results are a new float32 buffer, whose first dim is the new index variable
    `part`, of extent `parts`.
    """
    assert isinstance(stage.expr, Reduce)
    extents = {**stage.extents, part: parts}
    names = tuple(n for i in stage.result.indices for n in index_names(i))
    buffer = Buffer(stage.names.new(f"{stage.output.name}_parts"), "f32", "torch.float32")
    kernel = f"{stage.kernel.removesuffix('_kernel')}_parts_kernel"
    partial = Result(buffer.name, (Var(part), *(Var(n) for n in names)), stage.expr)
    read = Access(buffer.name, partial.indices)
    total = Result(stage.result.name, stage.result.indices, Reduce(stage.expr.reducer, (Var(part),), read))
    return (
        replace(stage, result=partial, output=buffer, extents=extents, kernel=kernel),
        replace(stage, result=total, extents=extents, buffers={buffer.name: buffer}),
    )


def reduction_launch(stages: Sequence[Stage], parts: int = 1, tiling: Tiling | None = None) -> KernelLaunch:
    """
    Return the launch of the kernel that computes `stages`, results for which `have_rows_in_common` is true, in tiles of
    `tiling` (None: those that `tiling_of` chooses).

    If `parts` is above 1, the stages must be those of partial results that `in_parts` returns: the first dim of each
    result has `parts` positions, and a program computes its rows at one of them.
    """
    rows, columns = variables(stages)
    if parts > 1:
        columns = ()
    tiling = tiling or tiling_of([each.expr for each in stages], stages[0].extents, rows, columns)
    stages = unified(stages, rows, columns)
    body = RowKernel(stages, rows, tiling, parts)
    body.rows_of_program()
    body.writer.share([each.expr for each in stages])
    nodes = list(dict.fromkeys(node for each in stages for node in reductions(each.expr)))
    body.reduce_all(nodes)
    over = [columns if set(columns) & set(names_of(each)) else () for each in stages]
    for each in dict.fromkeys(over):
        body.store([number for number, own in enumerate(over) if own == each], each)
    grid = (*((-(-body.row_count // tiling.rows),) if body.row_count > 1 else ()), *((parts,) if parts > 1 else ()))
    helpers = _MULTIPLY if any(n.reducer == "prod" for n in nodes) else ""
    threads = warps_of(tiling, len(stages), body.loops)
    return body.kernel.launch(stages[0].kernel, grid or (1,), threads, helpers, "rows", max(body.loops, 1))


TRANSPOSED = (32, 128)
"""
Rows and columns of a tile where neighbours in memory lie in different rows, and both passes of a program over its rows
are to find the second time in the cache what they read the first: 64 bytes of each column.
"""


def rounding_launch(stages: Sequence[Stage], is_transposed: bool) -> KernelLaunch:
    """
    Return the launch of the kernel that computes `stages`, the scales of an operand's rows and the rows in 8 bits
    (`forms.float8`). Rows are not split over programs, however few they are: each is read for its scale, and rounded.
    """
    if not is_transposed:
        return reduction_launch(stages)
    (node,) = dict.fromkeys(node for each in stages for node in reductions(each.expr))
    sizes = sizes_of(node, stages[0].extents)
    rows, columns = TRANSPOSED
    return reduction_launch(stages, tiling=Tiling(rows, {sizes: min(columns, power_of_two(prod(sizes)))}))


class RowKernel:
    """
    Writes a kernel that computes `stages`, results to compute, by tiles of rows and columns. A row is one position of
    the index variables `rows`, on which reductions depend; columns are the positions that are reduced, or over which a
    result runs in addition. A reduction over more columns than the tile of `tiling` has becomes a loop. With several
    `parts`, a program reduces one part of the columns.
    """

    def __init__(self, stages: Sequence[Stage], rows: tuple[str, ...], tiling: Tiling, parts: int):
        self.stages = stages
        stage = self.stage = stages[0]
        self.loops = 0
        self.kernel = KernelBuilder(stage, None, stages[1:])
        self.writer = self.kernel.writer
        self.tiling = tiling
        self.parts = parts
        self.row_count = prod(stage.extents[n] for n in rows)
        self.two_dimensional = self.row_count > 1
        self.row_names = rows
        self.rows = self.kernel.constant("ROWS", tiling.rows) if self.two_dimensional else "1"
        self.padded: dict[str, tuple[str, int]] = {}
        """The variable of the padded dim, and the elements of a stored row, of each tensor whose rows are padded."""
        for number, each in enumerate(stages):
            named = [(self.kernel.out(number), each.result.indices)]
            named += [(a.tensor, a.indices) for a in accesses(each.expr)]
            last = ((tensor, i[-1]) for tensor, i in named if i)
            self.padded |= {tensor: (i.name, i.row) for tensor, i in last if isinstance(i, PaddedVar)}
        self.writer.rows = {tensor: row for tensor, (_, row) in self.padded.items()}
        self.normalised: Mapping[Reduce, Reduce] = {}
        """Of each maximum that is reduced at present, the sum of a softmax that is reduced in the same pass."""
        self.widths: dict[tuple[int, ...], str] = {}
        self.tiles: dict[tuple[int, ...], Axis] = {}

    def rows_of_program(self) -> None:
        """Write the statements that find which tile of rows this program computes, and which part of their columns."""
        if self.two_dimensional:
            self.tile_of_rows(f"{self.kernel.program(0)} * {self.rows}")
        if self.parts > 1:
            self.part = self.kernel.names.new("part")
            self.writer.emit(f"{self.part} = {self.kernel.program(int(self.two_dimensional))}")

    def tile_of_rows(self, first: str) -> Axis:
        """
        Write the positions of the tile of rows that begins at the expression `first`; set and return them as the only
        axis of the writer's tile.
        """
        row = self.kernel.names.new("row")
        self.writer.emit(f"{row} = ({first} + tl.arange(0, {self.rows}))[:, None]")
        mask = None
        if self.row_count % self.tiling.rows:
            mask = self.kernel.names.new("row_mask")
            self.writer.emit(f"{mask} = {row} < {self.row_count}")
        axis = Axis(row, self.row_names, mask)
        self.writer.axes = [axis]
        return axis

    def is_looped(self, node: Reduce) -> bool:
        """Return whether the reduction `node` reads its columns in a loop, since one tile does not hold them all."""
        sizes = sizes_of(node, self.stage.extents)
        return self.parts > 1 or prod(sizes) > self.tiling.columns[sizes]

    # -- columns

    def width(self, sizes: tuple[int, ...]) -> str:
        """
        Return the name of the constexpr parameter that holds the number of columns of a tile, if the index variables
        that are columns have extents `sizes`. The parameter is added if it is new.
        """
        if sizes not in self.widths:
            self.widths[sizes] = self.kernel.constant("COLUMNS", self.tiling.columns[sizes])
        return self.widths[sizes]

    def columns(self, names: tuple[str, ...], sizes: tuple[int, ...], start: str | None) -> Axis:
        """
        Write the positions of one tile of columns, which begins at the expression `start` (None: 0). The columns are
        the index variables `names`, of extents `sizes`, flattened. Return their axis, which the caller adds to the
        tile.
        """
        width = self.width(sizes)
        index = self.kernel.names.new("column")
        count = prod(sizes)
        positions = f"tl.arange(0, {width})" + (".to(tl.int64)" if self.stage.wide else "")
        positions += "[None, :]" if self.two_dimensional else ""
        self.writer.emit(f"{index} = {start} + {positions}" if start else f"{index} = {positions}")
        mask = None
        if self.parts > 1 or count % self.tiling.columns[sizes]:
            mask = self.kernel.names.new("column_mask")
            self.writer.emit(f"{mask} = {index} < {count}")
        return Axis(index, names, mask, self.stored(index, names) if mask else {})

    def stored(self, index: str, names: tuple[str, ...]) -> dict[int, str]:
        """
        Write masks for tensors whose rows are padded (stored with more elements than the dim has), and return their
        names, by the number of elements in a stored row. A mask is true for the positions `index` of a tile that lie
        within a stored row, its padding included, so that whole rows are read and written in aligned vectors.

        There is a mask for each length of row of the tensors whose padded dim is the only variable in `names`.
        """
        found: dict[int, str] = {}
        for row in dict.fromkeys(row for name, row in self.padded.values() if (name,) == names):
            found[row] = self.kernel.names.new("stored_mask")
            self.writer.emit(f"{found[row]} = {index} < {row}")
        return found

    def single(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> Axis | None:
        """
        Return the axis of the columns, the index variables `names` of extents `sizes`, if one tile holds them all; None
        if it takes a loop. Positions are written once for equal sizes.
        """
        if self.parts > 1 or prod(sizes) > self.tiling.columns[sizes]:
            return None
        if sizes not in self.tiles:
            self.tiles[sizes] = self.columns(names, sizes, None)
        return replace(self.tiles[sizes], variables=names)

    def loop(self, sizes: tuple[int, ...]) -> tuple[str, str]:
        """
        Return (loop variable, head line) of a new loop over tiles of columns, whose index variables have extents
        `sizes`; nothing is written. If several programs share the columns (`parts`), it is over this program's part of
        them. Counts the loop in `loops`.
        """
        start = self.kernel.names.new("start")
        self.loops += 1
        count, width = prod(sizes), self.width(sizes)
        if self.parts == 1:
            return start, f"for {start} in range(0, {count}, {width}):"
        span = -(-count // (self.parts * self.tiling.columns[sizes])) * self.tiling.columns[sizes]
        end = self.kernel.names.new("end")
        # AMD's compiler unrolls a loop of known length completely, which spills.
        self.writer.emit(f"{end} = tl.minimum(({self.part} + 1) * {span}, {count})")
        return start, f"for {start} in range({self.part} * {span}, {end}, {width}):"

    # -- statements

    def reduce_all(self, nodes: Sequence[Reduce]) -> None:
        """
        Write the reductions `nodes` in as few passes over the columns as they need. Reductions inside others come first
        in `nodes`.
        """
        for together in passes(nodes):
            softmaxes = {n: _sum_of_softmax(n, nodes) for n in together if self.is_looped(n)}
            self.normalised = {n: total for n, total in softmaxes.items() if total is not None}
            left = [n for n in together if not self.writer.known(n)]
            if left:
                self.reduce(left)

    def reduce(self, nodes: Sequence[Reduce]) -> None:
        """
        Write the reductions `nodes`, all over the same columns, in one pass; the writer then knows their names by the
        reductions (`KernelWriter.known`). Reductions inside them must be written already.
        """
        writer = self.writer
        names = nodes[0].names
        sizes = sizes_of(nodes[0], self.stage.extents)
        wishes = [f"{node.reducer}_{'_'.join(names)}" for node in nodes]
        axis = self.single(names, sizes)
        if axis is not None:
            for node, wish in zip(nodes, wishes, strict=True):
                writer.axes.append(axis)
                tile = self.masked(node, axis)
                writer.axes.pop()
                writer.define(node, wish, self.reduced(node.reducer, tile.text))
            return
        shape = f"({self.rows}, {self.width(sizes)})" if self.two_dimensional else f"({self.width(sizes)},)"
        totals = [self.kernel.names.new(f"{node.reducer}s") for node in nodes]
        weights = {node: self.kernel.names.new("sums") for node in nodes if node in self.normalised}
        for node, total in zip(nodes, totals, strict=True):
            writer.emit(f"{total} = tl.full({shape}, {_NEUTRAL[node.reducer]}, tl.float32)")
        for total in weights.values():
            writer.emit(f"{total} = tl.full({shape}, 0.0, tl.float32)")
        start, head = self.loop(sizes)
        with writer.block(head):
            axis = self.columns(names, sizes, start)
            writer.axes.append(axis)
            for node, total in zip(nodes, totals, strict=True):
                value = self.masked(node, axis)
                if node in weights:
                    self.merge_softmax(value, total, weights[node])
                else:
                    writer.emit(f"{total} = {_MERGE[node.reducer].format(total, value.at(UNARY))}")
        for node, wish, total in zip(nodes, wishes, totals, strict=True):
            largest = writer.define(node, wish, self.reduced(node.reducer, total))
            if node in weights:
                total = f"{weights[node]} * tl.exp({total} - {largest})"
                writer.define(self.normalised[node], f"sum_{'_'.join(names)}", self.reduced("sum", total))

    def merge_softmax(self, value: Text, largest: str, total: str) -> None:
        """
        Write the statements that add a tile `value` to a softmax's two accumulator tiles, given by their names:
        `largest`, the maximum so far of each element, and `total`, the sum of exponentials relative to it. So both
        reductions take one pass ("Online normalizer calculation for softmax", Milakov and Gimelshein, 2018).
        """
        writer = self.writer
        new, finite, own = (self.kernel.names.new(n) for n in ("new", "finite", "own"))
        writer.emit(f"{own} = {value.text}")
        writer.emit(f"{new} = tl.maximum({largest}, {own})")
        writer.emit(f'{finite} = tl.where({new} == -float("inf"), 0.0, {new})')
        writer.emit(f"{total} = {total} * tl.exp({largest} - {finite}) + tl.exp({own} - {finite})")
        writer.emit(f"{largest} = {new}")

    def masked(self, node: Reduce, axis: Axis) -> Text:
        """
        Return code for the body of the reduction `node` over a tile whose columns are `axis`, with the reduction's
        neutral element at positions beyond the last column.
        """
        body = self.writer.number(node.body)
        if axis.mask is not None:
            return Text(f"tl.where({axis.mask}, {body.text}, {_NEUTRAL[node.reducer]})")
        if _spans(node.body, node.names, self.stage.extents):
            return body
        return Text(f"{body.at(SUM)} + tl.zeros_like({axis.index}).to(tl.float32)", SUM)

    def reduced(self, reducer: str, tile: str) -> str:
        """
        Return the expression that reduces the columns of the expression `tile` by `reducer` (`sum`, `prod`, `max`,
        `min`).
        """
        along = "1, keep_dims=True" if self.two_dimensional else "0"
        if reducer == "prod":
            along = "1, multiply, keep_dims=True" if self.two_dimensional else "0, multiply"
            return f"tl.reduce({tile}, {along})"
        return f"tl.{reducer}({tile}, {along})"

    def store(self, numbers: Sequence[int], columns: tuple[str, ...]) -> None:
        """
        Write the stores of several results, those of the stages with these `numbers` (indices into `stages`), in one
        tile or in a loop over tiles. Beside the rows, all of these results run over the index variables `columns`; ()
        for results that have rows alone.
        """
        sizes = tuple(self.stage.extents[n] for n in columns)
        if prod(sizes) == 1:
            self.store_elements(numbers)
            return
        axis = self.single(columns, sizes)
        if axis is not None:
            self.writer.axes.append(axis)
            self.store_elements(numbers)
            self.writer.axes.pop()
            return
        start, head = self.loop(sizes)
        with self.writer.block(head):
            self.writer.axes.append(self.columns(columns, sizes, start))
            self.store_elements(numbers)

    def store_elements(self, numbers: Sequence[int]) -> None:
        """
        Write, for each of the stages with these `numbers` (indices into `stages`), the store of its result: one element
        per position of the tile's present axes.
        """
        for number in numbers:
            result = self.stages[number].result
            indices = result.indices
            if self.parts > 1:
                # The part is no axis of the tile, so its offset is added to the pointer.
                stride = self.row_count
                pointer = self.writer.pointers[self.kernel.out(number)]
                self.writer.emit(f"{pointer} += {self.part} * {stride}" if stride > 1 else f"{pointer} += {self.part}")
                indices = indices[1:]
            value = self.writer.value(result.expr).text
            if self.stages[number].output.dtype == "bool":
                # Booleans are stored as bytes that must be 0 or 1.
                value = f"({value}) != 0"
            self.writer.store(self.kernel.out(number), address(indices, self.stage.extents), value)


def _sum_of_softmax(largest: Reduce, nodes: Sequence[Reduce]) -> Reduce | None:
    """Return that of the reductions which sums the exponentials of what `largest` is the maximum of, relative to it."""
    if largest.reducer != "max":
        return None
    exponential = Call("exp", (Binary("-", largest.body, largest),))
    return next((n for n in nodes if n == Reduce("sum", largest.indices, exponential)), None)


def _spans(expr: Expr, names: tuple[str, ...], extents: Mapping[str, int]) -> bool:
    """Return whether an expression depends on these variables, so that its tile has all columns and not just one."""
    return any(extents[n] > 1 and n in free_variables(expr) for n in names)


def unified(stages: Sequence[Stage], rows: tuple[str, ...], columns: tuple[str, ...]) -> list[Stage]:
    """
    Return the stages (results to compute) with the variables of their reductions renamed, so that reductions over equal
    sizes are over the same variables and share loads. `rows` and `columns` are those of `tiling.variables`.

    Given `exp(x[b, c] - max[j](x[b, j]))` with columns c, returns `exp(x[b, c] - max[c](x[b, c]))`.
    """
    extents, starts = dict(stages[0].extents), dict(stages[0].starts)

    def kind(names: tuple[str, ...]) -> tuple[tuple[int, str | None], ...]:
        return tuple((extents[n], starts.get(n)) for n in names)

    # A reduction that reads a picked element has no tile to share: it gets variables of its own.
    common: dict[tuple[frozenset[str] | None, object], tuple[str, ...]]
    common = {(None, kind(columns)): columns} if columns else {}
    taken = {*rows, *columns}
    picked = set[str]()

    def bind(node: Reduce, names: Mapping[str, str]) -> Mapping[str, str]:
        around = None if gather(node) is None else frozenset(picked.intersection(names.values()))
        key = around, kind(node.names)
        new = common.get(key)
        if new is None:
            fresh: list[str] = []
            for name in node.names:
                own = name
                while own in taken or (own in extents and own != name):
                    own += "_"
                taken.add(own)
                extents[own] = extents[name]
                if name in starts:
                    starts[own] = starts[name]
                fresh.append(own)
            new = common[key] = tuple(fresh)
        picked.update(new if around is not None else ())
        return dict(zip(node.names, new, strict=True))

    results = [replace(each.result, expr=rename(each.expr, {}, bind)) for each in stages]
    return [replace(each, result=r, extents=extents, starts=starts) for each, r in zip(stages, results, strict=True)]
