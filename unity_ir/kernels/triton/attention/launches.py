"""
Return the launches that compute an attention line: forward, or backward.

The forward loops over the columns with a running maximum and sum for every row. A backward computes the weights again
from the logarithm of that sum: one kernel for all sums over columns, one for all sums over rows, no atomics. The first
also computes every row's mean, which both use. If the line does not read the logarithms, the forward's kernel computes
them before.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from unity_ir.forms.attention import Attention, AttentionSum
from unity_ir.kernels.triton.attention.backward import Gradient, Means
from unity_ir.kernels.triton.attention.body import Scope, sides
from unity_ir.kernels.triton.attention.forward import forward
from unity_ir.kernels.triton.attention.tiles import fits
from unity_ir.kernels.triton.launch import Buffer, KernelLaunch, Stage
from unity_ir.kernels.triton.reduction import reduction_launches
from unity_ir.tdl.syntax import NOT_FLOATING, Access, Binary, Reduce, Result, Var, accesses


def attention_launches(of: Attention, place: Scope) -> list[KernelLaunch] | None:
    """
    Return the kernel launches that compute all results of a TDL line matched as `of`, attention or its gradients.
    `place` is the line's launcher: the buffers of its operands and results, and its identifiers.

    Returns None if the operands differ in element type or hold integers, or if rows are too wide for the kernels.
    """
    dtypes = {place.buffers[a.tensor].dtype for a in _operands(of)}
    if len(dtypes) != 1 or dtypes & {*NOT_FLOATING}:
        return None
    extents = place.bound.extents
    sums = [p.names for p in (of.scores.product, of.second) if p is not None]
    widest = max(prod(extents[n] for n in names) for names in (*sums, *(each.free for each in of.sums)))
    if not fits(widest, next(iter(dtypes))):
        return None
    if of.is_forward:
        logsum = None if of.logsum is None else (place.outputs[1], of.logsum)
        return [forward(of.scores, of.sums[0], place, place.outputs[0], logsum)]
    return _backward(of, place)


def _operands(of: Attention) -> list[Access]:
    """Return the accesses that are factors of matrix products."""
    products = [of.scores.product, *([of.second] if of.second is not None else [])]
    return [*(a for p in products for a in accesses(p)), *(each.other for each in of.sums)]


def _backward(of: Attention, place: Scope) -> list[KernelLaunch]:
    launches: list[KernelLaunch] = []
    vector = tuple(Var(n) for n in (*of.scores.batch, *of.scores.rows))
    saved = of.scores.saved
    buffers = dict(place.buffers)
    if saved is None or (of.mean is not None and of.mean_product is None):
        launches.append(_again(of, place, buffers))
        saved = Access("logsum", vector)
    sides = [
        [(s, o) for s, o in zip(of.sums, place.outputs, strict=True) if s.over_columns == over_columns]
        for over_columns in (True, False)
    ]
    means: Means | None = None
    if of.mean is not None:
        buffer = Buffer(place.names.new("means"), "f32", "torch.float32")
        means = Means(buffer, Result("means", vector, of.mean_product or _mean_of_rows(of)))
        if not sides[0]:
            launches += _means(means, replace(place, buffers=buffers))
        buffers["means"] = buffer
    place = replace(place, buffers=buffers)
    for sums, over_columns in zip(sides, (True, False), strict=True):
        if sums:
            launches.append(Gradient(of, place, saved, sums, over_columns, means).launch())
    return launches


def _means(of: Means, place: Scope) -> list[KernelLaunch]:
    """Return the launches that compute the rows' means, where no kernel of sums over columns does."""
    read = {a.tensor: place.buffers[a.tensor] for a in accesses(of.result.expr)}
    name = f"{place.name}_means_kernel"
    return reduction_launches(
        Stage(of.result, place.bound.extents, read, of.buffer, place.like, name, None, names=place.names)
    )


def _again(of: Attention, place: Scope, buffers: dict[str, Buffer]) -> KernelLaunch:
    """Return the launch of the forward that computes the sums' logarithms and the result, from which means are made."""
    scores = of.scores
    assert of.second is not None
    by_rows, by_columns = sides(of.second, scores)
    free = tuple(n for n in of.second.names if place.bound.extents[n] > 1)
    # The forward's result lies as its gradient does.
    result = Result("again", by_rows.indices, Reduce("sum", (Var(scores.column),), scores.weights))  # pyright: ignore[reportArgumentType]
    dtype = place.buffers[by_rows.tensor]
    again = Buffer(place.names.new("again"), dtype.dtype, dtype.torch_dtype)
    logsum = Buffer(place.names.new("logsum"), "f32", "torch.float32")
    buffers |= {"again": again, "logsum": logsum}
    vector = Result("logsum", tuple(Var(n) for n in (*scores.batch, *scores.rows)), scores.score)
    one = AttentionSum(result, scores.weights, by_columns, True, free)
    return forward(scores, one, replace(place, name=f"{place.name}_again"), again, (logsum, vector))


def _mean_of_rows(of: Attention) -> Reduce:
    """Return the mean of the second product over a row's weights: the product of its row and the forward's result."""
    assert of.second is not None
    by_rows, _ = sides(of.second, of.scores)
    return Reduce("sum", of.second.indices, Binary("*", by_rows, Access("again", by_rows.indices)))
