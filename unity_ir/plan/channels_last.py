"""
Store images with the channels last, [samples, rows, columns, channels], where convolutions compute in 16 bits.

    y = conv2d(x, w);  z = relu(batch_norm(y, ..))   ->   v = cast(w);  y = conv2d(x, v);  z = relu(batch_norm(y, ..))
                                                          x, y, z: channels last; v: a copy of w, channels last

Tensor cores multiply what lies side by side in memory, which the sum over channels should be. cuDNN's kernels for them
take images and weights with the channels last, and transpose others before and after; a 1 x 1 convolution is a plain
matrix product then, and a gather of implicit GEMM reads whole rows of channels. Only the order in memory changes:
shapes, layouts and what a program returns are as before.

Images are changed together, all that operators connect dim by dim, unless many of their bytes cannot be, as collectives
move them or the step returns them. Inputs come as they are, and the first convolution's cast or cuDNN turns them.
Weights and their gradients rest as they were, so that checkpoints, optimizers and collectives know of nothing;
convolutions of more than one tap read a copy of their weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from unity_ir.forms.convolution import convolution, pointwise_convolution
from unity_ir.forms.stored import IMAGE_RANK
from unity_ir.plan.groups import GroupMemo
from unity_ir.plan.instructions import Compute, Instruction, Register, makes, reading, reads
from unity_ir.plan.padded_rows import copy_of
from unity_ir.plan.program import Program
from unity_ir.tdl.element_types import HALVES
from unity_ir.tdl.syntax import Bound, Segments, Slice, Window, WrittenIndex

FIXED = 1 / 16
"""
Largest part of the bytes of connected images that collectives may move, or the step may return. These keep the channels
before rows and columns, so that their readers go through memory in two orders.
"""


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution of a program, or one of its gradients: the registers of its two images, and of its weight."""

    compute: Compute
    images: tuple[Register, Register]
    weight: Register
    """The weight that it reads, or the gradient of the weight that it makes."""


def with_channels_last(program: Program, memo: GroupMemo, are_short: bool = True) -> Program:
    """
    Return the program in which images that convolutions read and make are stored with the channels last
    (`Tensor.is_channels_last`), and so are all others that operators make of these, or these of them. With `are_short`
    it is done where convolutions have 16-bit operands, else for all; not in a part of a step. `memo` is a cache, read
    and extended.
    """
    if program.part_of is not None:
        return program  # other parts read and make images, too
    computes = [i for i in program.body if isinstance(i, Compute)]
    found = [c for i in computes if (c := _convolution(program, i, memo)) is not None]
    wanted = [c for c in found if not are_short or program.tensors[c.images[0]].dtype in HALVES]
    if not wanted:
        return program
    fixed, given, sizes = *_fixed(program), program.bytes
    starts = {c.images[0] for c in wanted}
    changed: set[Register] = set()
    for together in _connected(program, computes, {id(c.compute): c for c in found}, memo):
        still = sum(sizes[r] for r in (together & fixed) - given)
        if not starts.isdisjoint(together) and still <= FIXED * sum(sizes[r] for r in together):
            changed |= together - fixed
    tensors = {r: replace(t, is_channels_last=True) if r in changed else t for r, t in program.tensors.items()}
    program = replace(program, tensors=tensors)
    return _with_weights(program, [c for c in wanted if not changed.isdisjoint(c.images)], fixed)


def _convolution(program: Program, compute: Compute, memo: GroupMemo) -> _Convolution | None:
    """Return the images and the weight of a convolution, or of one of its gradients; None for other operators."""
    registers = (*compute.operands, *compute.results)
    if len(compute.operands) != 2 or len(registers) != 3:
        return None
    if any(len(program.tensors[r].shape) != IMAGE_RANK for r in registers):
        return None
    number, known = program.number(compute), memo.convolutions
    if number not in known:
        known[number] = _places(program.local_line(compute))
    places = known[number]
    if places is None:
        return None
    image, other, weight = (registers[n] for n in places)
    return _Convolution(compute, (image, other), weight)


def _places(line: Bound) -> tuple[int, int, int] | None:
    """
    Return the places, among its operands and its result, of the two images and the weight of a convolution's line, or
    of one of its gradients; None for another line.
    """
    (result,) = line.results
    found = convolution(result.indices, result.expr, line.extents) or pointwise_convolution(result.expr, line.extents)
    if found is None:
        return None
    # Images have samples in their first dim; a small image's gradient by the weight has the form of a convolution.
    read = {a.tensor: a.indices[0] for a in result.accesses}
    first = [*(read[p.name] for p in line.operands), result.indices[0]]
    pairs = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    return next((places for places in pairs if first[places[0]] == first[places[1]]), None)


def _fixed(program: Program) -> tuple[set[Register], set[Register]]:
    """
    Return the registers that something else than operators makes or reads, and those of them that no operator has made:
    inputs, weights, and what collectives make of these.
    """
    fixed, given = {*program.outputs}, set[Register]()
    for instruction in program.body:
        if not isinstance(instruction, Compute):
            read, made = reads(instruction), makes(instruction)
            fixed.update(read, made)
            if given.issuperset(read):
                given.update(made)
    return fixed, given


def _connected(
    program: Program, computes: Iterable[Compute], convolutions: Mapping[int, _Convolution], memo: GroupMemo
) -> Iterable[set[Register]]:
    """
    Return the sets of images that operators connect; `convolutions` are by `id` of the operator. Weights are in sets of
    their own.
    """
    of: dict[Register, set[Register]] = {}
    for compute in computes:
        known = convolutions.get(id(compute))
        if known is not None:
            _connect(of, known.images)
            continue
        registers = (*compute.operands, *compute.results)
        if sum(len(program.tensors[r].shape) == IMAGE_RANK for r in registers) < 2:
            continue
        number, alike = program.number(compute), memo.images
        if number not in alike:
            alike[number] = _alike(program.local_line(compute))
        for places in alike[number]:
            _connect(of, [registers[n] for n in places])
    return {id(each): each for each in of.values()}.values()


def _connect(of: dict[Register, set[Register]], registers: Iterable[Register]) -> None:
    """Make one set of those of some registers; `of` has the set of each, and is changed in place."""
    sets = [of.setdefault(r, {r}) for r in registers]
    largest = max(sets, key=len)
    for each in sets:
        if each is not largest:
            largest |= each
            of.update(dict.fromkeys(each, largest))


def _alike(line: Bound) -> tuple[tuple[int, ...], ...]:
    """
    Return the places, among a line's operands and results, of images whose samples and channels are the same, or parts
    of each other's channels: not of heads of attention, say, among which an operator divides the channels.
    """
    read = {a.tensor: a.indices for r in line.results for a in r.accesses}
    every = [*(read.get(p.name, ()) for p in line.operands), *(r.indices for r in line.results)]
    images = {n: indices for n, indices in enumerate(every) if len(indices) == IMAGE_RANK}
    found: list[tuple[int, ...]] = []
    for number, (samples, channels, *_) in images.items():
        others = (n for n, (s, c, *_) in images.items() if n > number and s == samples and _fit(c, channels))
        found += [(number, n) for n in others]
    return tuple(found)


def _fit(one: WrittenIndex, other: WrittenIndex) -> bool:
    """Return whether two dims of channels are the same, or one of them has parts."""
    return one == other or any(isinstance(i, Segments | Slice | Window) for i in (one, other))


def _with_weights(program: Program, convolutions: Iterable[_Convolution], fixed: AbstractSet[Register]) -> Program:
    """
    Return the program in which convolutions read weights with the channels last: casts of weights that nothing else
    reads are stored so, others are copied. Weights of one tap are the same in either order.
    """
    weights: dict[int, Register] = {}
    for each in convolutions:
        *_, rows, columns = program.tensors[each.weight].shape
        if each.weight in each.compute.operands and rows * columns > 1:
            weights[id(each.compute)] = each.weight
    others = {r for i in program.body if id(i) not in weights for r in reads(i)}
    tensors = dict(program.tensors)
    copies: dict[Register, Compute] = {}
    for weight in dict.fromkeys(weights.values()):
        if weight not in fixed and weight not in others:
            tensors[weight] = replace(tensors[weight], is_channels_last=True)
        elif (copy := copy_of(program, weight, max(tensors) + 1)) is not None:
            copies[weight] = copy
            tensors[copy.results[0]] = replace(tensors[weight], is_channels_last=True)
    body: list[Instruction] = []
    copied: dict[Register, Register] = {}
    for instruction in program.body:
        weight = weights.get(id(instruction))
        if weight is None or weight not in copies:
            body.append(instruction)
            continue
        if weight not in copied:
            body.append(copies[weight])
            (copied[weight],) = copies[weight].results
        body.append(reading(instruction, {weight: copied[weight]}))
    return replace(program, tensors=tensors, body=tuple(body))
