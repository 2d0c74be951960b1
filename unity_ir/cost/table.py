"""
Compute the work of one operator under many configurations at once: each row of an array `degrees` [row, variable] is a
configuration, the number of parts of each index variable.

A configuration divides extents and changes nothing else of a task. So the kernels are found once, for the whole
operator; dividing by one index variable at a time shows which degree divides which extent of which kernel. Sizes, FLOPs
and bytes are then products over arrays of degrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from unity_ir.cost.masks import CausalMask
from unity_ir.cost.time import rounding_bytes, rounding_seconds
from unity_ir.cost.work import applied, computes_in, kernel_operator, kind_of, mask_of, work
from unity_ir.errors import UnityError
from unity_ir.forms.float8 import rounding_reads
from unity_ir.machine.device import Device
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import prime_factors
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.tdl.counts import FlopsTerm, rounds, terms

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Divided = tuple[tuple[int, ...], ...]
"""Per extent, the columns of the degrees that divide it."""


@dataclass(frozen=True, slots=True)
class _Value:
    """
    A tensor that a kernel reads or writes: bytes of an element, sizes, the degrees that divide each dim, and the halo
    that a piece of a divided dim has in addition.
    """

    item: int
    sizes: tuple[int, ...]
    divided: Divided
    halos: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Term:
    """A term of `tdl.counts`, with index variables replaced by the numbers of their extents."""

    each: int
    over: tuple[int, ...]
    picked: tuple[int, ...]
    equal: tuple[tuple[tuple[int, int], ...], ...]
    """Lists of pairs of extents: if all pairs of a list are equal, the term equals an earlier one, not counted."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel as a function of degrees."""

    operator: str
    kind: str
    dtype: str
    extents: tuple[int, ...]
    divided: Divided
    terms: tuple[_Term, ...]
    operands: tuple[int, ...]
    """The index into `values` of each operand."""
    values: tuple[_Value, ...]
    """The distinct operands and results."""
    mask: tuple[CausalMask, int, int] | None
    """A causal mask, and the numbers of the extents of its queries and keys; None without."""
    reads: tuple[int, ...]
    """How often kernels before it read each operand, to round it to 8 bits; () for kernels that round nothing."""


@dataclass(frozen=True, slots=True)
class Template:
    """
    The kernels of an operator, forward and backward, as functions of its degrees: the numbers of parts into which its
    index variables are divided.

    `unknown` are the columns, in an array of degrees, of variables for which it is not known how dividing them changes
    the kernels.
    """

    kernels: tuple[_Kernel, ...]
    """Empty if `kernel_counts` would be right for no degrees."""
    unknown: tuple[int, ...]

    def is_exact(self, degrees: Ints) -> npt.NDArray[np.bool_]:
        """
        Return a mask [row]: True where `kernel_counts` is exact for that row of `degrees` [row, variable], that is,
        where all `unknown` variables are whole (degree 1). The caller computes the other rows one by one with
        `cost.work.work`.
        """
        return np.all(degrees[:, self.unknown] == 1, axis=1) & bool(self.kernels)


@dataclass(frozen=True, slots=True)
class Counts:
    """The sizes, FLOPs and bytes of one kernel under many choices of degrees, a row each; see `cost.time.Kernel`."""

    kernel: _Kernel
    columns: tuple[Ints, ...]
    """Each of the kernel's sizes, [row]."""
    flops: Ints
    bytes: Ints
    rounded: Ints | None = None
    """As `cost.time.Kernel.rounded`; None for kernels that round nothing."""

    @property
    def sizes(self) -> Ints:
        """The kernel's sizes, [row, size]."""
        return np.array(self.columns, dtype=np.int64).reshape(len(self.columns), len(self.flops)).T


def seconds(
    node: Node, needs: tuple[bool, ...], variables: tuple[str, ...], degrees: Ints, same: Ints, device: Device
) -> tuple[Floats, Floats]:
    """
    Return (seconds of forward and backward, seconds of the forward alone), each an array [row]: those of one task (the
    work of one device) of a serial compute node, for each row of `degrees`.

    `degrees` [row, variable] are the numbers of parts of the index variables named in `variables`; `needs` says, per
    operand, whether its gradient is wanted; `same` [row, operand] is the index of the first operand that is the same
    value in the same layout (see `cost.work.repeats`). Each row equals the seconds of what `cost.work.work` returns.
    """
    first, inverse = distinct(np.hstack([degrees, same]))
    degrees, same = degrees[first], same[first]
    out, alone = np.zeros(len(first)), np.zeros(len(first))
    patterns, pattern = np.unique(same, axis=0, return_inverse=True)
    for i, repeated in enumerate(patterns.tolist()):
        at = np.flatnonzero(pattern.reshape(-1) == i)
        template = _template(node.op, _operands(node), node.attributes, variables, needs, tuple(repeated))
        known = template.is_exact(degrees[at])
        forward, *backward = (
            (_seconds(c, device) for c in kernel_counts(template, degrees[at[known]])) if known.any() else (0.0,)
        )
        out[at[known]], alone[at[known]] = forward + sum(backward), forward
        for row in at[~known].tolist():
            named = tuple((v, d) for v, d in zip(variables, degrees[row].tolist(), strict=True) if d > 1)
            done = work(node.op, _operands(node), node.attributes, named, needs, tuple(repeated))
            alone[row] = done.forward_time(device)
            out[row] = alone[row] + done.backward_time(device)
    return out[inverse], alone[inverse]


def addition_seconds(
    node: Node, operand: int, variables: tuple[str, ...], degrees: Ints, elements: Ints, device: Device
) -> tuple[Floats, Floats]:
    """
    Return two arrays of extra seconds [row] of the matrix product that makes the gradient of operand number `operand`:
    (those for storing the gradient in the element type in which gradients are summed, such as float32 for a bf16
    product; those for also reading the sum over earlier micro-batches, to which it adds the gradient,
    `plan.additions`). Both are 0 where the product's arithmetic takes longer than its memory traffic, and where
    `Template.is_exact` is False.

    `degrees` [row, variable] are as in `seconds`; `elements` [row] are the numbers of elements of the gradient on a
    device.
    """
    needs = tuple(i == operand for i in range(len(node.operands)))
    same = tuple(map(node.operands.index, node.operands))
    form = template(node, needs, variables, same)
    type = node.operands[operand].type
    total = elements * ELEMENT_BYTES[type.grad_dtype]
    wider = total - elements * ELEMENT_BYTES[type.dtype]
    longer, reading = np.zeros((2, len(degrees)))
    known = form.is_exact(degrees)
    if known.any():
        rows = degrees[known]
        product = _product_of_one(form, tuple(rows[0].tolist())) if len(rows) == 1 else _product(form, rows)
        stored = replace(product, bytes=product.bytes + wider[known])
        both = replace(stored, bytes=stored.bytes + total[known])
        alone, first, second = (_seconds(each, device) for each in (product, stored, both))
        longer[known], reading[known] = first - alone, second - first
    return longer, reading


def _product(form: Template, degrees: Ints) -> Counts:
    """Return the work of the largest kernel of a backward."""
    return max(list(kernel_counts(form, degrees))[1:], key=lambda each: int(each.flops.sum()))


@lru_cache(maxsize=65536)
def _product_of_one(form: Template, degrees: tuple[int, ...]) -> Counts:
    # Plans are priced one by one, and most of the operators in each are those of others.
    return _product(form, np.array([degrees], dtype=np.int64))


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """
    Return (first, group) for an array of non-negative integers, as `np.unique` does for rows. `first` [group] is the
    index of the first row of each group of equal rows, `group` [row] the number of each row's group. Groups are sorted
    by row.
    """
    sizes = rows.max(axis=0, initial=0) + 1
    if prod(sizes.tolist()) < 2**62:
        code = np.zeros(len(rows), dtype=np.int64)
        for column, size in enumerate(sizes.tolist()):
            code = code * size + rows[:, column]
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    else:
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def template(node: Node, needs: tuple[bool, ...], variables: tuple[str, ...], same: tuple[int, ...]) -> Template:
    """
    Return the kernels of a serial compute node as functions of the degrees of the index variables named in `variables`,
    cached by operator, operand types and arguments.

    `needs` says, per operand, whether its gradient is wanted; `same` is, per operand, the index of the first operand
    that is the same value (`cost.work.repeats`).
    """
    return _template(node.op, _operands(node), node.attributes, variables, needs, same)


def _operands(node: Node) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((v.type.shape, v.type.dtype) for v in node.operands)


def kernel_counts(template: Template, degrees: Ints) -> Iterator[Counts]:
    """
    Yield the work of each kernel of an operator (the forward's first) under many configurations: its sizes [row, size],
    FLOPs [row] and bytes [row] on one device.

    `template` has the operator's kernels; each row of `degrees` [row, variable] is one configuration, the number of
    parts of each index variable. `Template.is_exact` must be true of all rows.
    """
    pieces = _Pieces(degrees)
    for kernel in template.kernels:
        yield _count(kernel, pieces)


class _Pieces:
    """The sizes of pieces at each row of `degrees` [row, variable], memoised: many dims have the same."""

    def __init__(self, degrees: Ints):
        self.count = len(degrees)
        self._columns = np.ascontiguousarray(degrees.T)
        self._known: dict[tuple[int, tuple[int, ...], int], Ints] = {}

    def of(self, size: int, by: tuple[int, ...], halo: int = 0) -> Ints:
        """
        Return a size, [row], divided by the degrees of the variables `by`, their numbers, and with `halo` more where
        any of these is above 1. It must not be changed.
        """
        key = size, by, halo
        if key not in self._known:
            self._known[key] = self._new(size, by, halo)
        return self._known[key]

    def _new(self, size: int, by: tuple[int, ...], halo: int) -> Ints:
        if halo:
            divided = np.any(self._columns[list(by)] > 1, axis=0)
            return self.of(size, by) + divided * halo
        out = np.full(self.count, size, dtype=np.int64)
        for column in by:
            out = out // self._columns[column]
        return out


def _count(kernel: _Kernel, pieces: _Pieces) -> Counts:
    extents = [pieces.of(size, by) for size, by in zip(kernel.extents, kernel.divided, strict=True)]
    flops = np.zeros(pieces.count, dtype=np.int64)
    for term in kernel.terms:
        operations = np.full(pieces.count, term.each, dtype=np.int64)
        for i in term.over:
            operations = operations * extents[i]
        for i in term.picked:
            operations = operations // (kernel.extents[i] // extents[i])
        for pairs in term.equal:
            operations = np.where(np.all([extents[a] == extents[b] for a, b in pairs], axis=0), 0, operations)
        flops = flops + operations
    if kernel.mask is not None:
        mask, row, column = kernel.mask
        flops = (flops * mask.part(extents[row], extents[column])).astype(np.int64)
    shapes: list[list[Ints]] = []
    sizes: list[Ints] = []
    for value in kernel.values:
        shape = [pieces.of(*dim) for dim in zip(value.sizes, value.divided, value.halos, strict=True)]
        elements = np.full(pieces.count, value.item, dtype=np.int64)
        for size in shape:
            elements = elements * size
        shapes.append(shape)
        sizes.append(elements)
    moved = sum(sizes, start=np.zeros(pieces.count, dtype=np.int64))
    columns = (*(size for i in kernel.operands for size in shapes[i]), *extents)
    if not kernel.reads:
        return Counts(kernel, columns, flops, moved)
    rounded, less = rounding_bytes([sizes[i] for i in kernel.operands], kernel.reads)
    return Counts(kernel, columns, flops, moved - less, rounded)


def _seconds(counts: Counts, device: Device) -> Floats:
    kernel = counts.kernel
    measured = None if device.profile is None else device.profile.kernels.get(kernel.operator)
    estimated = device.kernel_times(counts.flops, counts.bytes, kernel.dtype, kernel.kind)
    if counts.rounded is not None:
        estimated = estimated + [rounding_seconds(bytes, device) for bytes in counts.rounded.tolist()]
    if measured is None:
        return estimated
    rows = counts.sizes.tolist()
    return np.array([measured.get(tuple(row), other) for row, other in zip(rows, estimated.tolist(), strict=True)])


# --- finding the kernels


@lru_cache(maxsize=65536)
def _template(
    operator: str,
    operands: tuple[tuple[tuple[int, ...], str], ...],
    attributes: Attributes,
    variables: tuple[str, ...],
    needs: tuple[bool, ...],
    same: tuple[int, ...],
) -> Template:
    def nodes(*degrees: tuple[str, int]) -> tuple[Node, ...]:
        forward, backward = applied(operator, operands, attributes, degrees, needs, same)
        return forward, *backward

    whole = nodes()
    extents = whole[0].analysis.bound.extents
    divided: dict[int, tuple[Node, ...]] = {}
    for column, variable in enumerate(variables):
        by = min(prime_factors(extents[variable]), default=1)
        try:
            found = nodes((variable, by))
        except UnityError:
            continue
        if _alike(whole, found):
            divided[column] = found
    unknown = tuple(c for c in range(len(variables)) if c not in divided)
    kernels = [_kernel(node, {c: found[i] for c, found in divided.items()}) for i, node in enumerate(whole)]
    if any(k is None for k in kernels):
        return Template((), tuple(range(len(variables))))
    return Template(tuple(k for k in kernels if k is not None), unknown)


def _alike(whole: Sequence[Node], divided: Sequence[Node]) -> bool:
    """Return whether the kernels of a piece are those of the whole operator."""
    return [(n.op, n.operator.name, _distinct(n)) for n in whole] == [
        (n.op, n.operator.name, _distinct(n)) for n in divided
    ] and all(
        kernel_operator(a.op, a.attributes, _dtypes(a)) == kernel_operator(b.op, b.attributes, _dtypes(b))
        for a, b in zip(whole, divided, strict=True)
    )


def _dtypes(node: Node) -> tuple[str, ...]:
    return tuple(v.type.dtype for v in node.operands)


def _distinct(node: Node) -> tuple[int, ...]:
    """Return, for each operand and result, the position of its first occurrence."""
    values: list[Value] = [*node.operands, *node.results]
    return tuple(values.index(v) for v in values)


def _kernel(node: Node, divided: Mapping[int, Node]) -> _Kernel | None:
    """
    Return the kernel of a node; `divided` has the node at a degree of each variable (by column).

    Returns None if its work depends on degrees in another way than by division of extents.
    """
    analysis = node.analysis
    bound = analysis.bound
    configurations = {c: n.configuration for c, n in divided.items()}
    by = {v: tuple(c for c, found in configurations.items() if found.degree(v) > 1) for v in bound.extents}
    names = {v: i for i, v in enumerate(bound.extents)}
    counted = _terms(terms(bound), names)
    if bound.has_windows and any(term.equal for term in counted):
        return None
    firsts = _distinct(node)
    values: list[_Value] = []
    numbers: dict[int, int] = {}
    for place, first in enumerate(firsts):
        if place == first:
            numbers[place] = len(values)
            values.append(_value(place, node, divided))
    return _Kernel(
        kernel_operator(node.op, node.attributes, _dtypes(node)),
        kind_of(node),
        computes_in(_dtypes(node), analysis),
        tuple(bound.extents.values()),
        tuple(by.values()),
        counted,
        tuple(numbers[firsts[i]] for i in range(len(node.operands))),
        tuple(values),
        None if (mask := mask_of(node)) is None else (mask, names[mask.row], names[mask.column]),
        rounding_reads(bound.results) if rounds(bound, _dtypes(node)) else (),
    )


def _terms(found: Sequence[FlopsTerm], names: Mapping[str, int]) -> tuple[_Term, ...]:
    """Return the terms by numbers of extents, each with the conditions under which it equals an earlier term."""
    before: dict[object, list[tuple[str, ...]]] = {}
    out: list[_Term] = []
    for term in found:
        earlier = before.setdefault(term.form, [])
        equal = tuple(
            tuple((names[a], names[b]) for a, b in zip(other, term.names, strict=True) if a != b) for other in earlier
        )
        over, picked = (tuple(names[n] for n in variables) for variables in (term.over, term.picked))
        out.append(_Term(term.each, over, picked, equal))
        earlier.append(term.names)
    return tuple(out)


def _value(place: int, node: Node, divided: Mapping[int, Node]) -> _Value:
    def type_of(of: Node):
        return [*of.operands, *of.results][place].type

    whole = type_of(node)
    by: list[tuple[int, ...]] = []
    halos: list[int] = []
    for dim in range(len(whole.shape)):
        columns = [c for c, n in divided.items() if type_of(n).degrees[dim] > 1]
        by.append(tuple(columns))
        halos.append(max((sum(type_of(divided[c]).borders[dim]) for c in columns), default=0))
    return _Value(ELEMENT_BYTES[whole.dtype], whole.shape, tuple(by), tuple(halos))
