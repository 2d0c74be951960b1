"""Write a kernel of attention's backward, which computes the weights again from the logarithms of the rows' sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unity_ir.forms.attention import Attention, AttentionSum, split_constant
from unity_ir.kernels.triton.attention.body import LOG2E, Body, Loop, Scope, allocation, beside, sides
from unity_ir.kernels.triton.attention.tiles import backward_blocks
from unity_ir.kernels.triton.launch import Buffer, KernelLaunch
from unity_ir.tdl.syntax import Access, Call, Expr, Reduce, Result, accesses, children


@dataclass(frozen=True, slots=True)
class Means:
    """
    The mean of every row that the gradient of a softmax subtracts: the sum over a row's columns of weight times the
    other product, that of the result's gradient and the values (`Attention.second`; D in FlashAttention, Dao et al.,
    2022). Holds the float32 buffer with one mean per row, and the TDL result that computes it.
    """

    buffer: Buffer
    result: Result
    """A product of two operands' rows, with the rows' index variables."""


class Gradient:
    """
    Builds a kernel of the backward of `of`, a TDL line matched as attention. The kernel computes `sums`, pairs of a
    result of the line and the buffer that it fills: gradients that are sums over the columns of the scores (keys) if
    `over_columns`, else over their rows (queries). Call `launch` once; the other methods are its steps.

    `place` is the launcher, with its tensors and names. `saved` reads the logarithm of every row's sum of exponentials.
    `means` is the mean of every row, which the gradient of a softmax subtracts; None if the line has none. The kernel
    over columns computes it and fills its buffer, the one over rows reads that.
    """

    def __init__(
        self,
        of: Attention,
        place: Scope,
        saved: Access,
        sums: Sequence[tuple[AttentionSum, Buffer]],
        over_columns: bool,
        means: Means | None,
    ):
        self.of = of
        self.place = place
        self.saved = saved
        self.over_columns = over_columns
        self.means = means
        outputs = [o for _, o in sums]
        self.sums = [(each, output, *split_constant(each.factor)) for each, output in sums]
        """Each sum, its buffer, and its factor as a constant, by which the whole sum is multiplied, and the rest."""
        known = (of.scores.weights, of.second, of.mean)
        reads: list[Expr] = [saved, *(e for s, *_ in self.sums for e in (s.other, *beside(s.factor, known)))]
        reads += [of.second] if of.second is not None else []
        if means is not None and over_columns:
            reads.append(means.result.expr)
            outputs.append(means.buffer)
        elif means is not None:
            reads.append(self.read_means(means))
        self.body = Body(of.scores, place, outputs, reads, rows_move=not over_columns)

    @staticmethod
    def read_means(means: Means) -> Access:
        """
        Return the TDL access that reads the buffer of `means`, one number per row of the scores, as a tensor called
        `means`. The kernel over rows loads the means by it; an earlier kernel has stored them.
        """
        return Access("means", means.result.indices)

    def launch(self) -> KernelLaunch:
        """Write the whole kernel, and return its launch. Call it once."""
        body, writer = self.body, self.body.writer
        scores, second = self.of.scores, self.of.second
        seconds = () if second is None else tuple(n for n in second.names if body.extents[n] > 1)
        widest = body.widest(seconds, *(s.free for s, *_ in self.sums))
        draws = any(isinstance(e, Call) and e.function == "philox" for *_, f in self.sums for e in _inner(f))
        takes = draws, scores.ranges is not None, scores.scale is not None
        body.blocks(backward_blocks(widest, body.dtype, self.over_columns, *takes))
        body.axis(self.over_columns, body.first)
        for names in (scores.inner, *([seconds] if seconds else []), *(s.free for s, *_ in self.sums)):
            body.width(names)
        # Tiles that stay the same are loaded before the loop.
        for product, names in ((scores.product, scores.inner), *([(second, seconds)] if second is not None else [])):
            by_rows, by_columns = sides(product, scores)
            body.tile(by_rows if self.over_columns else by_columns, self.over_columns, names)
        if self.over_columns:
            self.logsums()
            self.mean_of_rows()
        totals: list[str] = []
        for each, output, *_ in self.sums:
            totals.append(body.names.new(f"{output.name}_total"))
            size = "ROWS" if self.over_columns else "COLUMNS"
            writer.emit(f"{totals[-1]} = tl.zeros(({size}, {body.width(each.free)}), tl.float32)")
        writer.share([factor for *_, factor in self.sums])
        start = body.names.new("start")
        for loop in body.loops(start):
            with writer.block(loop.head):
                for line in loop.inside:
                    writer.emit(line)
                self.step(loop, start, totals)
        for (each, output, constant, _), total in zip(self.sums, totals, strict=True):
            value = total if constant == 1 else f"{total} * {constant!r}"
            body.store(output, each.result.indices, self.over_columns, each.free, value)
        before = [allocation(output, each.result.indices, self.place) for each, output, *_ in self.sums]
        if self.means is not None and self.over_columns:
            before.append(allocation(self.means.buffer, self.means.result.indices, self.place))
        return body.launch("rows" if self.over_columns else "columns", before)

    def step(self, loop: Loop, start: str, totals: Sequence[str]) -> None:
        """
        Write the body of one loop over tiles: the statements that compute the tile's softmax weights and add what the
        tile contributes to each sum. `start` is the name of the kernel variable with the tile's first row or column;
        `totals` are the names of the accumulators, one for each of the sums.
        """
        body, writer = self.body, self.body.writer
        body.axis(not self.over_columns, start, loop.place)
        self.weights(loop.masked)
        # Sums of the weights alone come first: fewer tiles are in registers at once.
        second = self.of.second
        for (each, _, _, factor), total in sorted(
            zip(self.sums, totals, strict=True), key=lambda pair: second in _inner(pair[0][-1])
        ):
            if second is not None and second in _inner(factor) and writer.known(second) is None:
                body.product(second, "seconds")
            body.over_tile()
            left = writer.number(factor).text
            if not left.isidentifier():
                left = writer.define(("factor", factor), "factor", left)
            tile = body.tile(each.other, not self.over_columns, each.free)
            product = f"{left}.to({tile}.dtype), {tile}, {total}"
            writer.emit(f"{total} = tl.dot({product}, input_precision=ATTENTION_PRECISION)")

    def logsums(self) -> str:
        """
        Write the load of the logarithm of every row's sum of exponentials, unless it is loaded already; return its
        name. The logarithm is to base 2 if scores are products times `Body.scale`, else natural.
        """
        return self.body.vector(self.saved, "" if self.body.scale is None else f" * {LOG2E!r}")

    def mean_of_rows(self) -> None:
        """
        Write the statements that compute the mean of every row of the tile (`Means`) and store it in its buffer. The
        mean is computed as the sum over features of the product of two operands: the forward's result and its gradient
        (the row sums of dO * O in FlashAttention).

        Only for the kernel over columns; writes nothing if the line has no means.
        """
        if self.means is None:
            return
        body, result = self.body, self.means.result
        assert isinstance(result.expr, Reduce)
        features = tuple(n for n in result.expr.names if body.extents[n] > 1)
        body.width(features)
        one, other = (f"{body.tile(a, True, features)}.to(tl.float32)" for a in accesses(result.expr))
        name = body.writer.define(("means",), "means", f"tl.sum({one} * {other}, 1)")
        body.store(self.means.buffer, result.indices, True, (), name)

    def weights(self, masked: bool) -> None:
        """
        Write the statements that compute a tile of the softmax's weights from the scores and the saved logarithms, with
        the causal mask applied if `masked`. The writer then knows the tile's name by the weights' TDL expression
        (`KernelWriter.known`).

        If the line has means of rows (`Means`), also define the mean, broadcast over the tile, as the value of the TDL
        expression `Attention.mean`.
        """
        body, writer, of = self.body, self.body.writer, self.of
        logsum, mean = self.logsums(), None
        if self.means is not None:
            mean = writer.known(("means",)) or body.vector(self.read_means(self.means))
        score, along = body.score(masked), body.along(True)
        if body.scale is None:
            text = f"tl.exp({score} - {logsum}{along})"
        else:
            text = f"tl.exp2({score} * {body.scale * LOG2E!r} - {logsum}{along})"
        inside = body.inside(True, True)
        writer.define(of.scores.weights, "weights", f"tl.where({inside}, {text}, 0.0)" if inside else text)
        if of.mean is not None and mean is not None:
            writer.define(of.mean, "mean", f"{mean}{along}")


def _inner(expr: Expr) -> set[Expr]:
    found: set[Expr] = {expr}
    for child in children(expr):
        found |= _inner(child)
    return found
