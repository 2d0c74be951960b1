"""
Choose the tiles of reduction kernels: rows and columns per program, passes over the columns, programs per row. A stage
is a result to compute. Rows are the result's variables that reductions depend on. Columns are the variables reduced, or
those of the result that no reduction depends on.

Whether a kernel spills registers does not follow from the tile alone: run `make aot` after a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.forms.addresses import address, power_of_two
from unity_ir.forms.rewrite import reductions
from unity_ir.kernels.triton.launch import Stage, warps
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Call, Expr, Reduce, Segments, accesses, children, index_names

TILE = 4096
"""Elements of a tile: the interpreter's time is per tile, whatever its size, and 16 warps hold a few of them."""
LONGEST_ROW = 16384
"""Rows up to this long are one tile, loaded once; longer ones are read in loops."""
LOOPED = 2048
"""
Columns of a tile of a row that is read in a loop: fewer than `TILE`, since the accumulators take registers as well, and
half as many where columns are of several dims, whose indices take registers, too.
"""
ROWS_IN_A_SEGMENT = 64
"""Rows per tile where neighbours in memory lie in different rows: 256 bytes of float32."""
SHORT = 8
"""Most tiles of a row that is never split over programs, however few rows there are."""
AT_WORK = 2**19
"""Elements in flight that keep a large GPU's memory busy: its bandwidth times its latency."""
MOST_PARTS = 1024
"""Most programs that a row is split over; their partial results are one tile of the second kernel."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """
    The tile that a program of a reduction kernel computes: its number of rows, and its number of columns. A kernel may
    reduce or store over several tuples of index variables, so there is a number of columns for each, by the tuple of
    their extents.
    """

    rows: int
    """Rows of a tile."""
    columns: Mapping[tuple[int, ...], int]
    """Columns of a tile, by the extents of the variables that are flattened into columns."""

    @property
    def elements(self) -> int:
        """Number of elements of the tile with the most columns."""
        return self.rows * max(self.columns.values(), default=1)


def variables(stages: Sequence[Stage]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Return (rows, columns) of a reduction kernel that computes `stages`: names of index variables, in the order of the
    result. They are the variables, of extents above 1, of the stage whose result has the most of them. Those on which a
    reduction depends are rows, the others columns.

    Given `x[b, c] - max[j](x[b, j])`, returns (("b",), ("c",)).
    """
    names = max(map(names_of, stages), key=len)
    needed = _needed(stages)
    return tuple(n for n in names if n in needed), tuple(n for n in names if n not in needed)


def names_of(stage: Stage) -> tuple[str, ...]:
    """Return the index variables of extents above 1 of the result of `stage`, a result to compute, in order."""
    return tuple(n for i in stage.result.indices for n in index_names(i) if stage.extents[n] > 1)


def _needed(stages: Sequence[Stage]) -> frozenset[str]:
    """Return the variables that reductions depend on."""
    free = frozenset[str]().union(*(free_variables(r) for each in stages for r in reductions(each.expr)))
    return frozenset(n for n in free if stages[0].extents[n] > 1)


def tiling_of(
    exprs: Sequence[Expr], extents: Mapping[str, int], rows: tuple[str, ...], columns: tuple[str, ...]
) -> Tiling:
    """
    Return the tile, of about `TILE` (4096) elements, that one program of a reduction kernel computes, chosen so that
    its reads are of consecutive elements in memory.

    `exprs` are the results' expressions, `rows` and `columns` the results' index variables (see `variables`), and
    `extents` has the number of positions of each variable.
    """
    groups = {sizes_of(r, extents) for each in exprs for r in reductions(each)}
    if columns:
        groups.add(tuple(extents[n] for n in columns))
    count = power_of_two(prod(extents[n] for n in rows))
    tile = TILE // 2 if any(map(_turns, exprs)) else TILE
    if _rows_are_neighbours(exprs, extents, rows):
        widths = {g: min(power_of_two(prod(g)), tile // min(count, ROWS_IN_A_SEGMENT)) for g in groups}
        return Tiling(min(count, tile // max(widths.values())), widths)
    widths = {g: power_of_two(prod(g)) for g in groups}
    looped = max(widths.values()) > LONGEST_ROW
    widths = {g: w if w <= LONGEST_ROW else _looped(g) for g, w in widths.items()}
    height = 1 if looped else max(1, min(count, tile // max(widths.values())))
    return Tiling(height, widths)


def _looped(sizes: tuple[int, ...]) -> int:
    """Return the columns of a tile of a row that is read in a loop."""
    return LOOPED if sum(size > 1 for size in sizes) <= 1 else LOOPED // 2


def _turns(expr: Expr) -> bool:
    """Return whether an expression has a sine or cosine, which need registers to reduce large angles."""
    return (isinstance(expr, Call) and expr.function in ("sin", "cos")) or any(map(_turns, children(expr)))


def _rows_are_neighbours(exprs: Sequence[Expr], extents: Mapping[str, int], rows: tuple[str, ...]) -> bool:
    """Return whether neighbours in memory of the largest operand lie in different rows."""
    best, found = 0, False
    for access in (a for each in exprs for a in accesses(each)):
        strides = address(access.indices, extents).strides
        size = prod(extents[n] for n in strides)
        if strides and size > best:
            fastest = min(strides, key=lambda n: strides[n])
            best, found = size, fastest in rows
    return found


def sizes_of(node: Reduce, extents: Mapping[str, int]) -> tuple[int, ...]:
    """
    Return the extents of the variables that a reduction sums (or takes the maximum) over, in its order. `extents` has
    the number of positions of each variable.
    """
    return tuple(extents[n] for n in node.names)


def is_split(node: Reduce, extents: Mapping[str, int]) -> bool:
    """
    Return whether several programs share the computation of each element of a reduction's result, so that the reduction
    needs kernels of its own: if there are few elements, and each sums much. `extents` has the number of positions of
    each variable.
    """
    rows = tuple(n for n in free_variables(node) if extents[n] > 1)
    return _parts([node], extents, rows) > 1


def have_rows_in_common(one: Stage, other: Stage) -> bool:
    """
    Return whether one reduction kernel can compute both stages (results to compute): their reductions depend on the
    same index variables of the results (rows), and the results' other variables (columns) are equal, or one has none.
    """
    if any(isinstance(i, Segments) for each in (one, other) for i in each.result.indices):
        return False
    needed = [_needed((each,)) for each in (one, other) if reductions(each.expr)]
    if not needed or any(each != needed[0] for each in needed):
        return False
    if len({parts_of((one,)), parts_of((other,)), parts_of((one, other))}) > 1:
        return False
    names = [names_of(each) for each in (one, other)]
    rows = [[n for n in each if n in needed[0]] for each in names]
    columns = [[n for n in each if n not in needed[0]] for each in names]
    alike = not columns[0] or not columns[1] or columns[0] == columns[1]
    return rows[0] == rows[1] and len(rows[0]) == len(needed[0]) and alike


def parts_of(stages: Sequence[Stage]) -> int:
    """
    Return the number of programs that share the computation of each element of the results of `stages`. It is 1 unless
    every stage is a single reduction, and all reductions are of the same sizes.
    """
    extents = stages[0].extents
    nodes = [each.expr for each in stages if isinstance(each.expr, Reduce) and reductions(each.expr) == [each.expr]]
    rows, columns = variables(stages)
    if len(nodes) < len(stages) or columns or len({sizes_of(n, extents) for n in nodes}) > 1:
        return 1
    return _parts(nodes, extents, rows)


def _parts(nodes: Sequence[Reduce], extents: Mapping[str, int], rows: tuple[str, ...]) -> int:
    """Return over how many programs to split the rows of reductions of equal sizes: rows that are long but too few."""
    sizes = sizes_of(nodes[0], extents)
    width = tiling_of(nodes, extents, rows, ()).columns[sizes]
    tiles, at_work = -(-prod(sizes) // width), prod(extents[n] for n in rows) * width
    return 1 if tiles <= SHORT else min(MOST_PARTS, tiles, -(-AT_WORK // at_work))


def passes(nodes: Sequence[Reduce]) -> list[list[Reduce]]:
    """
    Group reductions into passes over a kernel's input, in order: those of one group are over the same index variables,
    and need only results of earlier groups.
    """
    left, done, found = list(nodes), set[Reduce](), list[list[Reduce]]()
    while left:
        together = [n for n in left if n.names == left[0].names and done.issuperset(reductions(n.body))]
        left = [n for n in left if n not in together]
        done.update(together)
        found.append(together)
    return found


def warps_of(tiling: Tiling, results: int, loops: int) -> int:
    """
    Return the number of warps of a reduction kernel that stores `results` results, and reads tiles in `loops` loops
    over columns.

    There is a warp for every 256 elements (8 elements per thread), since at 16 per thread the assembler spills a few
    bytes in places. There are 32 elements per thread if several results are computed from the same columns, all loaded
    at once: there it spilled at 8 and at 16. Of a single row there are 16: at 32 A100's assembler spills.
    """
    if results == 1 or len(tiling.columns) > 1 or loops:
        return warps(tiling.elements * 2)
    return warps(tiling.elements if tiling.rows == 1 else tiling.elements // 2)
