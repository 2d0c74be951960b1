"""
Reference semantics of graphs in numpy: globally, on whole values, and piecewise, on every piece as a device would.

The global interpreter ignores parallel operators, which are identities on meaning. The piecewise one carries them out,
and checks at every step that copies are equal; that both agree is what the type system promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.types import Piece, TensorType
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.elements import NUMPY, converted
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.functions import Array
from unity_ir.tdl.parallel import Carriers, Configuration, line_of_task

Pieces = dict[Piece, Array]


def interpret(graph: Graph, inputs: Mapping[str, Array], weights: Mapping[str, Array]) -> dict[Value, Array]:
    """
    Run a serial or parallel graph in numpy on whole arrays; return the array of every value, of its global shape.
    Parallel operators are identities here.

    `inputs` and `weights` are arrays of global shape, by the leaf's name. Raises `UnityError` if one is missing or has
    another shape.
    """
    values: dict[Value, Array] = {}
    for node in graph.nodes():
        operands = [values[v] for v in node.operands]
        if node.is_leaf:
            values[node.result] = _leaf(node, inputs, weights)
        elif node.is_parallel:
            values[node.result] = operands[0]
        else:
            values.update(zip(node.results, evaluate(node.analysis.bound, operands), strict=True))
    return values


def interpret_pieces(graph: Graph, inputs: Mapping[str, Array], weights: Mapping[str, Array]) -> dict[Value, Pieces]:
    """
    Run a graph in numpy piece by piece, as devices do; return, for every value, its pieces: arrays of the piece's
    shape, keyed by `Piece` (shard along each dim, partial sum, copy).

    `inputs` and `weights` are whole arrays, by the leaf's name. Raises `AssertionError` if copies are not equal, and
    `UnityError` if an array is missing or has another shape.
    """
    values: dict[Value, Pieces] = {}
    for node in graph.nodes():
        if node.is_leaf:
            results = [split(_leaf(node, inputs, weights), node.types[0])]
        elif node.is_parallel:
            results = [_parallel(node, values[node.operands[0]])]
        else:
            results = _compute(node, [values[v] for v in node.operands])
        for value, found in zip(node.results, results, strict=True):
            _check_copies(value, found)
            values[value] = found
    return values


def _leaf(node: Node, inputs: Mapping[str, Array], weights: Mapping[str, Array]) -> Array:
    (type,) = node.types
    if node.op == "constant":
        return np.full(type.shape, node.attribute("value"), dtype=NUMPY[type.dtype])
    source = inputs if node.op == "input" else weights
    if node.name not in source:
        raise UnityError(f"pcg.{node.op}: no array is given for {node.name}")
    array = np.asarray(source[node.name])
    if array.shape != type.shape:
        raise UnityError(f"pcg.{node.op}: the array for {node.name} is {list(array.shape)}, not {list(type.shape)}")
    return array if node.master == type.dtype else converted(array, type.dtype)


def split(array: Array, type: TensorType) -> Pieces:
    """
    Divide a whole array, of the global shape of `type`, into the pieces of `type`; return them keyed by `Piece` (shard
    along each dim, partial sum, copy).

    Copies are equal. Of the partial sums, the first holds the value's shard and the others zeros. A halo has the
    neighbours' elements, and 0 outside the array; a halo of addends (`halo_sum`) has zeros.
    """
    out: Pieces = {}
    for at in type.all_pieces():
        part = _cut(array, at.dims, type)
        out[at] = part if at.sum == 0 else np.zeros_like(part)
    return out


def join(pieces: Pieces, type: TensorType) -> Array:
    """
    Return the whole array of which `pieces` are the pieces, divided as `type` says: shards are concatenated, partial
    sums added, and the first of the copies is taken. A halo is dropped; one of addends (`halo_sum`) is added to the
    shards that it overlaps.
    """
    some = next(iter(pieces.values()))
    lows = [low for low, _ in type.borders]
    out = np.zeros([s + sum(b) for s, b in zip(type.shape, type.borders, strict=True)], dtype=some.dtype)
    for at, part in pieces.items():
        if at.copy == 0:
            if type.halo:
                inner = tuple(slice(low, low + s) for low, s in zip(lows, type.core_shape, strict=True))
                core = part[inner]
                part = np.zeros_like(part)
                part[inner] = core
            out[_window(at.dims, type)] += part
    return out[tuple(slice(low, low + s) for low, s in zip(lows, type.shape, strict=True))]


def _window(position: Sequence[int], type: TensorType) -> tuple[slice, ...]:
    """Return the slices of a piece in the value, which has the border of a halo around it."""
    sizes = zip(position, type.core_shape, type.piece_shape, strict=True)
    return tuple(slice(i * step, i * step + size) for i, step, size in sizes)


def _cut(array: Array, position: Sequence[int], type: TensorType) -> Array:
    if type.halo_sum:
        core = tuple(slice(i * size, (i + 1) * size) for i, size in zip(position, type.core_shape, strict=True))
        return np.pad(array[core], type.borders)
    padded = np.pad(array, type.borders) if type.halo else array
    return padded[_window(position, type)]


def _check_copies(value: Value, pieces: Pieces) -> None:
    for at, part in pieces.items():
        first = pieces[Piece(at.dims, at.sum, 0)]
        assert np.array_equal(part, first, equal_nan=True), f"{value.node}: copies differ"


def _parallel(node: Node, pieces: Pieces) -> Pieces:
    attributes = {k: v for k, v in node.attributes if isinstance(v, int)}
    rule = PARALLEL_OPERATORS[node.op]
    steps = rule.chain(attributes) if rule.chain else ((node.op, tuple(attributes.items())),)
    type = node.operands[0].type
    for name, attrs in steps:
        after = PARALLEL_OPERATORS[name].type(type, dict(attrs))
        pieces = _STEPS[name](pieces, type, after, dict(attrs))
        type = after
    return pieces


def _repartition(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Perform partition and combine: each copy and each addend is cut, or put together, by itself."""
    del attrs
    out: Pieces = {}
    for s, c in product(range(before.sum), range(before.copy)):
        some = next(iter(pieces.values()))
        full = np.zeros(before.shape, dtype=some.dtype)
        for at, part in pieces.items():
            if (at.sum, at.copy) == (s, c):
                full[_window(at.dims, before)] = part
        for dims in product(*(range(d) for d in after.degrees)):
            out[Piece(dims, s, c)] = full[_window(dims, after)]
    return out


def _replicate(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Perform replicate: copies i * by to (i + 1) * by - 1 of the result are copy i of the operand."""
    del before
    return {at: pieces[Piece(at.dims, at.sum, at.copy // attrs["by"])] for at in after.all_pieces()}


def _reuse(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Perform reuse: every micro-batch has all copies of the operand; time is the outer part of a copy's number."""
    del attrs
    return {at: pieces[Piece(at.dims, at.sum, at.copy % before.copy)] for at in after.all_pieces()}


def _accumulate(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Perform accumulate: addend i of the result is the sum of addend i of every micro-batch."""
    del before
    return {
        at: np.sum([pieces[Piece(at.dims, i * after.sum + at.sum, at.copy)] for i in range(attrs["by"])], axis=0)
        for at in after.all_pieces()
    }


def _reduce(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Perform reduce: addend i of the result is the sum of `by` neighbouring addends."""
    del before
    by = attrs["by"]
    return {
        at: np.sum([pieces[Piece(at.dims, at.sum * by + i, at.copy)] for i in range(by)], axis=0)
        for at in after.all_pieces()
    }


def _pick(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Perform pick: copy i of the result is the first of `by` neighbouring copies."""
    del before
    return {at: pieces[Piece(at.dims, at.sum, at.copy * attrs["by"])] for at in after.all_pieces()}


def _zero_pad(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Perform zero_pad: the first of every `by` addends is the operand's addend, the others are zero."""
    del before
    out: Pieces = {}
    for at in after.all_pieces():
        old, rest = divmod(at.sum, attrs["by"])
        part = pieces[Piece(at.dims, old, at.copy)]
        out[at] = part if rest == 0 else np.zeros_like(part)
    return out


def _halo(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """
    Perform halo: each piece gets its neighbours' elements along a dim; pieces may already have halos along other dims.
    """
    dim, low, high = attrs["dim"], attrs["low"], attrs["high"]
    size = before.core_shape[dim]
    border = [(low, high) if d == dim else (0, 0) for d in range(len(before.shape))]
    out: Pieces = {}
    for at in after.all_pieces():
        row = [pieces[replace(at, dims=_moved(at.dims, dim, i))] for i in range(before.degrees[dim])]
        padded = np.pad(np.concatenate(row, dim), border)
        start = at.dims[dim] * size
        out[at] = padded.take(range(start, start + size + low + high), dim)
    return out


def _halo_reduce(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    """Add the halo contributions of all pieces to the piece they belong to; drop those outside the tensor."""
    dim, low = attrs["dim"], attrs["low"]
    size, width = before.core_shape[dim], before.piece_shape[dim]
    out: Pieces = {}
    for at in after.all_pieces():
        own = np.zeros_like(pieces[at].take(range(size), dim))
        for i in range(before.degrees[dim]):
            # Element e of piece i is element e + shift of this one.
            shift = (i - at.dims[dim]) * size - low
            held = [e for e in range(width) if 0 <= e + shift < size]
            where = [slice(None)] * own.ndim
            where[dim] = slice(held[0] + shift, held[-1] + shift + 1) if held else slice(0, 0)
            own[tuple(where)] += pieces[replace(at, dims=_moved(at.dims, dim, i))].take(held, dim)
        out[at] = own
    return out


def _moved(dims: tuple[int, ...], dim: int, to: int) -> tuple[int, ...]:
    return (*dims[:dim], to, *dims[dim + 1 :])


def _same(pieces: Pieces, before: TensorType, after: TensorType, attrs: Mapping[str, int]) -> Pieces:
    del before, after, attrs
    return pieces


_STEPS = {
    "recompute": _same,
    "send": _same,
    "halo": _halo,
    "halo_reduce": _halo_reduce,
    "partition": _repartition,
    "combine": _repartition,
    "pipeline": _repartition,
    "batch": _repartition,
    "reuse": _reuse,
    "accumulate": _accumulate,
    "replicate": _replicate,
    "reduce": _reduce,
    "pick": _pick,
    "zero_pad": _zero_pad,
}


def _compute(node: Node, operands: Sequence[Pieces]) -> list[Pieces]:
    """Return the results of a compute operator: every task of its grid is evaluated on its pieces."""
    analysis, configuration = node.analysis, node.configuration
    local = line_of_task(analysis.bound, configuration)
    results: list[Pieces] = [{} for _ in node.types]
    variables = [v for v in analysis.bound.extents if configuration.degree(v) > 1]
    carriers = list(configuration.sums)
    grid = [*map(configuration.degree, variables), *configuration.sums.values(), configuration.copy]
    for task in product(*map(range, grid)):
        at = dict(zip(variables, task, strict=False))
        addend = dict(zip(carriers, task[len(variables) :], strict=False))
        copy = task[-1]
        arrays = [
            pieces[_operand_piece(analysis, configuration, i, at, copy, addend)] for i, pieces in enumerate(operands)
        ]
        offsets = {v: at[v] * local.extents[v] for v in variables}
        for i, array in enumerate(evaluate(local, arrays, offsets)):
            results[i][_result_piece(analysis, configuration, i, at, copy, addend)] = array
    return results


def _operand_piece(
    analysis: Analysis,
    configuration: Configuration,
    operand: int,
    at: Mapping[str, int],
    copy: int,
    addend: Mapping[Carriers, int],
) -> Piece:
    """
    Return the piece of an operand that one task reads: copies are numbered by the task axes that the operand does not
    have.
    """
    name = analysis.bound.operands[operand].name
    dims = analysis.operand_dims[name]
    number = 0
    for variable, position in at.items():
        if variable not in dims:
            number = number * configuration.degree(variable) + position
    number = number * configuration.copy + copy
    carried = 0
    for carriers, position in addend.items():
        if name in carriers:
            carried = carried * configuration.sums[carriers] + position
        else:
            number = number * configuration.sums[carriers] + position
    return Piece(tuple(at.get(v, 0) if v else 0 for v in dims), carried, number)


def _result_piece(
    analysis: Analysis,
    configuration: Configuration,
    result: int,
    at: Mapping[str, int],
    copy: int,
    addend: Mapping[Carriers, int],
) -> Piece:
    dims = analysis.result_dims[result]
    number = 0
    for variable, position in at.items():
        if variable not in dims:
            number = number * configuration.degree(variable) + position
    for carriers, position in addend.items():
        if analysis.carried(result, carriers):
            number = number * configuration.sums[carriers] + position
        else:
            copy = copy * configuration.sums[carriers] + position
    return Piece(tuple(at.get(v, 0) if v else 0 for v in dims), number, copy)
