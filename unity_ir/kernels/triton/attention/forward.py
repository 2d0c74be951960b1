"""Write the kernel of attention's forward: a loop over columns with a running maximum and sum for every row."""

from __future__ import annotations

from math import log

from unity_ir.forms.attention import LEAST, AttentionSum, Scores
from unity_ir.kernels.text import ATOM
from unity_ir.kernels.triton.attention.body import LOG2E, NEVER, Body, Scope, allocation, beside
from unity_ir.kernels.triton.attention.tiles import forward_blocks
from unity_ir.kernels.triton.launch import Buffer, KernelLaunch
from unity_ir.tdl.syntax import Result


def forward(
    scores: Scores, of: AttentionSum, place: Scope, out: Buffer, logsum: tuple[Buffer, Result] | None
) -> KernelLaunch:
    """
    Return the launch of the kernel of attention's forward. It fills the buffer `out` with the result `of`: the sum over
    columns (keys) of a function of the softmax of `scores`, times a tensor (the values).

    `logsum` is None, or (buffer, result): then the kernel also fills that buffer with the natural logarithm of every
    row's sum of exponentials. `place` is the launcher, with its tensors and names.
    """
    outputs = [out, *([logsum[0]] if logsum else [])]
    body = Body(scores, place, outputs, [of.other, *beside(of.factor, (scores.weights,))], rows_move=False)
    writer, names = body.writer, body.names
    body.blocks(forward_blocks(body.widest(of.free), body.dtype, scores.scale is not None))
    body.axis(True, body.first)
    body.width(scores.inner)
    width = body.width(of.free)
    body.tile(scores.q, True, scores.inner)
    largest, total, result = names.new("largest"), names.new("total"), names.new("result")
    writer.emit(f"{largest} = tl.full((ROWS,), {NEVER}, tl.float32)")
    writer.emit(f"{total} = tl.zeros((ROWS,), tl.float32)")
    writer.emit(f"{result} = tl.zeros((ROWS, {width}), tl.float32)")
    start, new, kept = (names.new(n) for n in ("start", "new", "kept"))
    for loop in body.loops(start, split=True):
        with writer.block(loop.head):
            for line in loop.inside:
                writer.emit(line)
            body.axis(False, start)
            score = names.new("score")
            text = body.score(loop.masked)
            inside = body.inside(False, True)
            writer.emit(f"{score} = tl.where({inside}, {text}, {NEVER})" if inside else f"{score} = {text}")
            # Exponents of 2: the factor is part of the subtraction, and the exponential one instruction.
            exp, factor = ("tl.exp", "") if body.scale is None else ("tl.exp2", f" * {body.scale * LOG2E!r}")
            writer.emit(f"{new} = tl.maximum({largest}, tl.max({score}, 1){factor})")
            finite = new
            if not body.always_finite:
                # A row whose scores so far are all minus infinity keeps nothing, and adds 0.
                finite = names.new("finite")
                writer.emit(f"{finite} = tl.where({new} == {NEVER}, 0.0, {new})")
            weight = f"{exp}({score}{factor} - {finite}[:, None])"
            writer.emit(f"{kept} = {exp}({largest} - {finite})")
            weight = writer.define(scores.weights, "weight", weight)
            writer.emit(f"{total} = {total} * {kept} + tl.sum({weight}, 1)")
            body.over_tile()
            factor = writer.number(of.factor).at(ATOM)
            tile = body.tile(of.other, False, of.free)
            writer.emit(f"{result} = {result} * {kept}[:, None]")
            product = f"{factor}.to({tile}.dtype), {tile}, {result}"
            writer.emit(f"{result} = tl.dot({product}, input_precision=ATTENTION_PRECISION)")
            writer.emit(f"{largest} = {new}")
    if scores.ranges is not None:
        # A row that sees no column has a sum of 0, and its result is 0.
        writer.emit(f"{total} = tl.where({total} == 0.0, 1.0, {total})")
    body.store(out, of.result.indices, True, of.free, f"{result} / {total}[:, None]")
    before = [allocation(out, of.result.indices, place)]
    if logsum is not None:
        text = f"{largest} + tl.log({total})"
        if body.scale is not None:
            text = f"({largest} + tl.log2({total})) * {log(2)!r}"
        if scores.ranges is not None:
            text = f"tl.maximum({text}, {LEAST!r})"
        body.store(logsum[0], logsum[1].indices, True, (), text)
        before.append(allocation(logsum[0], logsum[1].indices, place))
    return body.launch("forward", before)
