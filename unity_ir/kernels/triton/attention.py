"""
Generate kernels of attention that never hold a whole matrix of scores (FlashAttention: Dao et al., 2022; Dao, 2023).

The forward loops over the columns with a running maximum and sum for every row. A backward computes the weights again
from the logarithm of that sum: one kernel for all sums over columns, one for all sums over rows, no atomics. If the
line does not read the logarithms, the forward's kernel computes them first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from unity_ir.forms.addresses import Names, address, power_of_two
from unity_ir.forms.attention import Attention, AttentionSum, Scores
from unity_ir.kernels.text import ATOM, SUM
from unity_ir.kernels.triton.expression import Axis, KernelWriter
from unity_ir.kernels.triton.launch import Argument, Buffer, KernelLaunch, Scalar, Stage, signature
from unity_ir.kernels.triton.reduction import reduction_launches
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import (
    NOT_FLOATING,
    Access,
    Binary,
    Bound,
    Expr,
    Reduce,
    Result,
    Var,
    accesses,
    children,
)

_HELPERS = """\
# Precision of float32 products, as in matrix products.
ATTENTION_PRECISION = tl.constexpr("ieee")
# The interpreter multiplies the bit patterns of bfloat16.
ATTENTION_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


"""
_NEVER = 'float("-inf")'


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


def attention_launches(of: Attention, place: Scope) -> list[KernelLaunch] | None:
    """
    Return the launches that compute all results of a line that is attention or its gradient, matched as `of`; `place`
    has the buffers of its operands and results, and the identifiers of its launcher.

    None if the operands differ in element type or hold integers, or if rows are too wide for the kernels.
    """
    dtypes = {place.buffers[a.tensor].dtype for a in _operands(of)}
    if len(dtypes) != 1 or dtypes & {*NOT_FLOATING}:
        return None
    extents = place.bound.extents
    sums = [p.names for p in (of.scores.product, of.second) if p is not None]
    widest = max(prod(extents[n] for n in names) for names in (*sums, *(each.free for each in of.sums)))
    if not _fits(widest, next(iter(dtypes))):
        return None
    if of.is_forward:
        logsum = None if of.logsum is None else (place.outputs[1], of.logsum)
        return [_forward(of.scores, of.sums[0], place, place.outputs[0], logsum)]
    return _backward(of, place)


def _operands(of: Attention) -> list[Access]:
    """Return the accesses that are factors of matrix products."""
    products = [of.scores.product, *([of.second] if of.second is not None else [])]
    return [*(a for p in products for a in accesses(p)), *(each.other for each in of.sums)]


def _backward(of: Attention, place: Scope) -> list[KernelLaunch]:
    launches: list[KernelLaunch] = []
    vector = tuple(Var(n) for n in (*of.scores.batch, *of.scores.rows))
    saved, mean = of.scores.saved, None
    buffers = dict(place.buffers)
    extents = place.bound.extents
    if saved is None or (of.mean is not None and of.mean_product is None):
        launches.append(_again(of, place, buffers))
        saved = Access("logsum", vector)
    if of.mean is not None:
        product = of.mean_product or _mean_of_rows(of)
        mean = Buffer(place.names.new("means"), "f32", "torch.float32")
        read = {a.tensor: buffers[a.tensor] for a in accesses(product)}
        stage = Stage(
            Result("means", vector, product), extents, read, mean, place.like, f"{place.name}_means_kernel", None
        )
        launches += reduction_launches(replace(stage, names=place.names))
        buffers["means"] = mean
    place = replace(place, buffers=buffers)
    for over_columns in (True, False):
        sums = [(s, o) for s, o in zip(of.sums, place.outputs, strict=True) if s.over_columns == over_columns]
        if sums:
            launches.append(_Gradient(of, place, saved, sums, over_columns).launch())
    return launches


def _again(of: Attention, place: Scope, buffers: dict[str, Buffer]) -> KernelLaunch:
    """Return the launch of the forward that computes the sums' logarithms and the result, from which means are made."""
    scores = of.scores
    assert of.second is not None
    by_rows, by_columns = _sides(of.second, scores)
    free = tuple(n for n in of.second.names if place.bound.extents[n] > 1)
    # The forward's result lies as its gradient does.
    result = Result("again", by_rows.indices, Reduce("sum", (Var(scores.column),), scores.weights))  # pyright: ignore[reportArgumentType]
    dtype = place.buffers[by_rows.tensor]
    again = Buffer(place.names.new("again"), dtype.dtype, dtype.torch_dtype)
    logsum = Buffer(place.names.new("logsum"), "f32", "torch.float32")
    buffers |= {"again": again, "logsum": logsum}
    vector = Result("logsum", tuple(Var(n) for n in (*scores.batch, *scores.rows)), scores.score)
    one = AttentionSum(result, scores.weights, by_columns, True, free)
    return _forward(scores, one, replace(place, name=f"{place.name}_again"), again, (logsum, vector))


def _mean_of_rows(of: Attention) -> Reduce:
    """Return the mean of the second product over a row's weights: the product of its row and the forward's result."""
    assert of.second is not None
    by_rows, _ = _sides(of.second, of.scores)
    return Reduce("sum", of.second.indices, Binary("*", by_rows, Access("again", by_rows.indices)))


def _sides(product: Reduce, scores: Scores) -> tuple[Access, Access]:
    """Return the factor of a product that is read by rows, and the one read by columns."""
    one, other = accesses(product)
    return (other, one) if scores.column in free_variables(one) else (one, other)


# --- writing ---------------------------------------------------------------------------------------------------------


class _Body:
    """
    Builder of a kernel over tiles of rows and columns of the scores of one batch element.

    `outputs` are the buffers it fills, `reads` the expressions it reads beside the weights.
    """

    def __init__(self, scores: Scores, place: Scope, outputs: Iterable[Buffer], reads: Iterable[Expr], rows_move: bool):
        self.scores = scores
        self.place = place
        self.extents = place.bound.extents
        self.rows_move = rows_move
        """Whether a program loops over rows and keeps one tile of columns; else the other way round."""
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

    def blocks(self, rows: int, columns: int) -> None:
        """Set the tile's rows and columns, at most these, and write the statements that find a program's tile."""
        self.rows = min(rows, max(16, power_of_two(self.row_count)))
        self.columns = min(columns, max(16, power_of_two(self.column_count)))
        self.constants |= {"ROWS": self.rows, "COLUMNS": self.columns}
        count, width = (self.column_count, self.columns) if self.rows_move else (self.row_count, self.rows)
        self.tiles = -(-count // width)
        emit, names = self.writer.emit, self.names
        for name in ("ROWS", "COLUMNS"):
            names.new(name)
        self.head, self.first = names.new("head"), names.new("first")
        emit(f"{self.head} = tl.program_id(0) // {self.tiles}")
        emit(f"{self.first} = tl.program_id(0) % {self.tiles} * {'COLUMNS' if self.rows_move else 'ROWS'}")
        self.row, self.column = names.new("row"), names.new("column")
        self.row_mask = names.new("row_mask") if self.row_count % self.rows else None
        self.column_mask = names.new("column_mask") if self.column_count % self.columns else None

    def axis(self, rows: bool, start: str) -> None:
        """Write the positions, and the mask, of a tile's rows or columns, which begin at `start`."""
        index, mask = (self.row, self.row_mask) if rows else (self.column, self.column_mask)
        self.writer.emit(f"{index} = {start} + tl.arange(0, {'ROWS' if rows else 'COLUMNS'})")
        if mask is not None:
            self.writer.emit(f"{mask} = {index} < {self.row_count if rows else self.column_count}")

    def width(self, names: Sequence[str]) -> str:
        """Write the positions of features, once, all of which are in one tile; return the tile's width."""
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

    def _axes(self, rows: bool | None, features: Sequence[str]) -> list[Axis]:
        scores = self.scores
        axes = [Axis(self.head, scores.batch)] if self.batch_count > 1 else []
        after, before = "[:, None]" if features else "", "[None, :]"
        for own, index, mask, names in (
            (True, self.row, self.row_mask, scores.rows),
            (False, self.column, self.column_mask, (scores.column,)),
        ):
            if rows is own:
                axes.append(Axis(f"{index}{after}", names, f"{mask}{after}" if mask else None))
            elif rows is None:
                side = after if own else before
                axes.append(Axis(f"{index}{side}", names, f"{mask}{side}" if mask else None))
        if features and rows is not None:
            index, mask = self.features[tuple(self.extents[n] for n in features)]
            axes.append(Axis(f"{index}{before}", tuple(features), f"{mask}{before}" if mask else None))
        return axes

    def tile(self, access: Access, rows: bool, features: Sequence[str]) -> str:
        """Load a tile of rows, or columns, by features, unless it is loaded; return its name."""
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

    def vector(self, access: Access) -> str:
        """Load one number for every row, unless it is loaded; return the name."""
        writer = self.writer
        writer.axes = self._axes(True, ())
        pointer, mask = writer.pointer(access.tensor, address(access.indices, self.extents))
        key = ("vector", pointer, mask)
        options = f", mask={mask}, other=0.0" if mask else ""
        return writer.known(key) or writer.define(key, access.tensor, f"tl.load({pointer}{options})")

    def store(self, buffer: Buffer, indices: Sequence[object], rows: bool, features: Sequence[str], value: str) -> None:
        """Write the store of a tile of rows, or columns, by features to a buffer."""
        writer = self.writer
        writer.axes = self._axes(rows, features)
        writer.store(buffer.name, address(indices, self.extents), value)  # pyright: ignore[reportArgumentType]

    def product(self, node: Reduce, wish: str) -> str:
        """Write the matrix product of a tile of rows and a tile of columns; return its name."""
        features = tuple(n for n in node.names if self.extents[n] > 1)
        by_rows, by_columns = _sides(node, self.scores)
        row, column = self.tile(by_rows, True, features), self.tile(by_columns, False, features)
        text = f"tl.dot({row}, tl.trans({column}), input_precision=ATTENTION_PRECISION)"
        return self.writer.define(node, wish, text)

    def over_tile(self) -> None:
        """Set the axes so that the next expressions are computed element by element of the tile of rows by columns."""
        self.writer.axes = self._axes(None, ("",))

    def score(self) -> str:
        """Write the scores of a tile; return their expression, in float32."""
        self.product(self.scores.product, "products")
        self.over_tile()
        return self.writer.number(self.scores.score).at(SUM)

    def inside(self, rows: bool, columns: bool) -> str | None:
        """Return the mask of the elements that exist along rows or columns; None if all do."""
        masks = [f"{self.row_mask}[:, None]"] if rows and self.row_mask else []
        masks += [f"{self.column_mask}[None, :]"] if columns and self.column_mask else []
        return " & ".join(masks) or None

    def last_column(self) -> str:
        """Return the end of the columns to loop over: under a causal mask, those with a weight in this tile's rows."""
        row = self.scores.causal()
        place = self._causal_position(row)
        if row is None or place is None:
            return str(self.column_count)
        start = f" + {self.starts[row]}" if row in self.starts else ""
        return f"tl.minimum({self.column_count}, {place} + ROWS{start})"

    def _causal_position(self, row: str | None) -> str | None:
        """Return the position along the row variable at which a tile begins; None if the tile may wrap around."""
        inner = [n for n in self.scores.rows if self.extents[n] > 1]
        if row is None or not inner or inner[-1] != row:
            return None
        if len(inner) == 1:
            return self.first
        size = self.extents[row]
        return f"{self.first} % {size}" if size % self.rows == 0 else None

    def first_row(self) -> str:
        """Return the first of the rows to loop over: under a causal mask, the tile of the first one with a weight."""
        row = self.scores.causal()
        if row is None or [n for n in self.scores.rows if self.extents[n] > 1] != [row]:
            return "0"
        start = f" - {self.starts[row]}" if row in self.starts else ""
        return f"tl.maximum(0, {self.first}{start}) // ROWS * ROWS"

    def launch(self, kind: str, num_warps: int, num_stages: int, before: Sequence[str]) -> KernelLaunch:
        """Finish the kernel, named after `kind`, and return its launch, after the allocations `before` it."""
        name = f"{self.place.name}_{kind}_kernel"
        head = signature(name, self.arguments, self.constants)
        text = _HELPERS + "\n".join(["@triton.jit", head, *self.writer.lines]) + "\n"
        grid = (self.tiles * self.batch_count,)
        allocation, *others = before
        expects = ("mma", "pipelined") if self.dtype != "f32" and self.aligned() else ()
        return KernelLaunch(
            name, text, grid, self.arguments, self.constants, num_warps, num_stages, allocation, tuple(others), expects
        )

    def aligned(self) -> bool:
        """Return whether rows and columns are read in whole vectors of 16 bytes."""
        return all(prod(sizes) % 16 == 0 for sizes in self.features)


def _allocation(buffer: Buffer, indices: Sequence[object], place: Scope) -> str:
    shape = place.bound.result_shape(Result("", tuple(indices), Access("", ())))  # pyright: ignore[reportArgumentType]
    return f"{buffer.name} = torch.empty({shape}, dtype={buffer.torch_dtype}, device={place.like}.device)"


# --- forward ---------------------------------------------------------------------------------------------------------


def _forward(
    scores: Scores, of: AttentionSum, place: Scope, out: Buffer, logsum: tuple[Buffer, Result] | None
) -> KernelLaunch:
    outputs = [out, *([logsum[0]] if logsum else [])]
    body = _Body(scores, place, outputs, [of.other, *_beside(of.factor, (scores.weights,))], rows_move=False)
    writer, names = body.writer, body.names
    rows, columns, num_warps, num_stages = _forward_blocks(_widest(body, scores, of.free), body.dtype)
    body.blocks(rows, columns)
    body.axis(True, body.first)
    body.width(scores.inner)
    width = body.width(of.free)
    body.tile(scores.q, True, scores.inner)
    largest, total, result = names.new("largest"), names.new("total"), names.new("result")
    finite = names.new("finite")
    writer.emit(f"{largest} = tl.full((ROWS,), {_NEVER}, tl.float32)")
    writer.emit(f"{total} = tl.zeros((ROWS,), tl.float32)")
    writer.emit(f"{result} = tl.zeros((ROWS, {width}), tl.float32)")
    start, score, new, kept = (names.new(n) for n in ("start", "score", "new", "kept"))
    with writer.block(f"for {start} in range(0, {body.last_column()}, COLUMNS):"):
        body.axis(False, start)
        text = body.score()
        inside = body.inside(False, True)
        writer.emit(f"{score} = tl.where({inside}, {text}, {_NEVER})" if inside else f"{score} = {text}")
        writer.emit(f"{new} = tl.maximum({largest}, tl.max({score}, 1))")
        # A row whose scores so far are all minus infinity keeps nothing, and adds 0.
        writer.emit(f"{finite} = tl.where({new} == {_NEVER}, 0.0, {new})")
        weight = writer.define(scores.weights, "weight", f"tl.exp({score} - {finite}[:, None])")
        writer.emit(f"{kept} = tl.exp({largest} - {finite})")
        writer.emit(f"{total} = {total} * {kept} + tl.sum({weight}, 1)")
        body.over_tile()
        factor = writer.number(of.factor).at(ATOM)
        tile = body.tile(of.other, False, of.free)
        weights = f"{factor}.to({tile}.dtype)"
        writer.emit(f"{result} = {result} * {kept}[:, None]")
        writer.emit(f"{result} = tl.dot({weights}, {tile}, {result}, input_precision=ATTENTION_PRECISION)")
        writer.emit(f"{largest} = {new}")
    body.store(out, of.result.indices, True, of.free, f"{result} / {total}[:, None]")
    before = [_allocation(out, of.result.indices, place)]
    if logsum is not None:
        body.store(logsum[0], logsum[1].indices, True, (), f"{largest} + tl.log({total})")
        before.append(_allocation(logsum[0], logsum[1].indices, place))
    return body.launch("forward", num_warps, num_stages, before)


def _widest(body: _Body, scores: Scores, *others: Sequence[str]) -> int:
    return max(prod(body.extents[n] for n in names) for names in (scores.inner, *others))


# --- backward --------------------------------------------------------------------------------------------------------


class _Gradient:
    """Builder of the kernel of a backward that computes all `sums` over columns, or all over rows."""

    def __init__(
        self,
        of: Attention,
        place: Scope,
        saved: Access,
        sums: Sequence[tuple[AttentionSum, Buffer]],
        over_columns: bool,
    ):
        self.of = of
        self.place = place
        self.saved = saved
        self.sums = sums
        self.over_columns = over_columns
        vector = tuple(Var(n) for n in (*of.scores.batch, *of.scores.rows))
        self.mean = None if of.mean is None else Access("means", vector)
        known = (of.scores.weights, of.second, of.mean)
        reads: list[Expr] = [saved, *(e for s, _ in sums for e in (s.other, *_beside(s.factor, known)))]
        reads += [of.second] if of.second is not None else []
        reads += [self.mean] if self.mean is not None else []
        self.body = _Body(of.scores, place, [o for _, o in sums], reads, rows_move=not over_columns)

    def launch(self) -> KernelLaunch:
        """Finish the kernel and return its launch."""
        body, writer = self.body, self.body.writer
        scores, second = self.of.scores, self.of.second
        seconds = () if second is None else tuple(n for n in second.names if body.extents[n] > 1)
        widest = _widest(body, scores, seconds, *(s.free for s, _ in self.sums))
        rows, columns, num_warps, num_stages = _backward_blocks(widest, body.dtype, self.over_columns)
        body.blocks(rows, columns)
        body.axis(self.over_columns, body.first)
        for names in (scores.inner, *([seconds] if seconds else []), *(s.free for s, _ in self.sums)):
            body.width(names)
        # Tiles that stay the same are loaded before the loop.
        for product, names in ((scores.product, scores.inner), *([(second, seconds)] if second is not None else [])):
            by_rows, by_columns = _sides(product, scores)
            body.tile(by_rows if self.over_columns else by_columns, self.over_columns, names)
        if self.over_columns:
            self.vectors()
        totals: list[str] = []
        for each, output in self.sums:
            totals.append(body.names.new(f"{output.name}_total"))
            size = "ROWS" if self.over_columns else "COLUMNS"
            writer.emit(f"{totals[-1]} = tl.zeros(({size}, {body.width(each.free)}), tl.float32)")
        writer.share([each.factor for each, _ in self.sums])
        start = body.names.new("start")
        if self.over_columns:
            head = f"for {start} in range(0, {body.last_column()}, COLUMNS):"
        else:
            head = f"for {start} in range({body.first_row()}, {body.row_count}, ROWS):"
        with writer.block(head):
            body.axis(not self.over_columns, start)
            self.weights()
            for (each, _), total in zip(self.sums, totals, strict=True):
                body.over_tile()
                factor = body.names.new("factor")
                writer.emit(f"{factor} = {writer.number(each.factor).text}")
                tile = body.tile(each.other, not self.over_columns, each.free)
                left = factor if self.over_columns else f"tl.trans({factor})"
                writer.emit(
                    f"{total} = tl.dot({left}.to({tile}.dtype), {tile}, {total}, input_precision=ATTENTION_PRECISION)"
                )
        for (each, output), total in zip(self.sums, totals, strict=True):
            body.store(output, each.result.indices, self.over_columns, each.free, total)
        before = [_allocation(output, each.result.indices, self.place) for each, output in self.sums]
        return body.launch("rows" if self.over_columns else "columns", num_warps, num_stages, before)

    def vectors(self) -> tuple[str, str | None]:
        """Load the logarithm of every row's sum, and its mean if that is used; return their names."""
        return self.body.vector(self.saved), None if self.mean is None else self.body.vector(self.mean)

    def weights(self) -> None:
        """Write a tile's weights, and the second product and the mean where factors use them."""
        body, writer, of = self.body, self.body.writer, self.of
        logsum, mean = self.vectors()
        score = body.score()
        text = f"tl.exp({score} - {logsum}[:, None])"
        inside = body.inside(True, True)
        writer.define(of.scores.weights, "weights", f"tl.where({inside}, {text}, 0.0)" if inside else text)
        if of.second is not None and any(of.second in _inner(s.factor) for s, _ in self.sums):
            body.product(of.second, "seconds")
        if of.mean is not None and mean is not None:
            writer.define(of.mean, "mean", f"{mean}[:, None]")


def _beside(factor: Expr, known: Collection[Expr | None]) -> Iterator[Access]:
    """Yield the accesses of a factor outside of the `known` subexpressions, which are computed from tiles."""
    if isinstance(factor, Access):
        yield factor
    elif factor not in known:
        for child in children(factor):
            yield from _beside(child, known)


def _inner(expr: Expr) -> set[Expr]:
    found: set[Expr] = {expr}
    for child in children(expr):
        found |= _inner(child)
    return found


# --- tiles -----------------------------------------------------------------------------------------------------------


def _fits(width: int, dtype: str) -> bool:
    """
    Return whether tiles of `width` features fit registers.

    Exact products of float32 keep whole rows of both factors in registers, so heads of the usual width do not fit: they
    are computed as the products and the softmax of which the line is made.
    """
    return width <= (32 if dtype == "f32" else 256)


def _forward_blocks(width: int, dtype: str) -> tuple[int, int, int, int]:
    """Return rows, columns, warps and stages that fit sm_80, sm_90 and gfx942, as test_aot.py checks."""
    if dtype == "f32":
        return 32, 32, 4, 2
    if width <= 64:
        return 128, 64, 4, 2
    return (128, 32, 8, 2) if width <= 128 else (64, 32, 4, 2)


def _backward_blocks(width: int, dtype: str, over_columns: bool) -> tuple[int, int, int, int]:
    """Return the same for a backward's kernel, which loops over columns or over rows."""
    if dtype == "f32":
        return 32, 32, 4, 2
    if width <= 64:
        return (64, 64, 4, 2) if over_columns else (64, 32, 4, 2)
    if width <= 128:
        return (64, 32, 4, 2) if over_columns else (32, 64, 4, 2)
    return 32, 16, 4, 2
