"""
Foreign rules (of TASO and FlexFlow) as substitutions over whole tensors: what their values are, not how they are
divided.

TASO's tensors are matrices, or images and their kernels; what only operators by elements and concatenations are applied
to may have any number of dims. A convolution there has as many groups as its image has times the channels of its
kernel: one, unless the sizes tell otherwise.

FlexFlow's tensors have dims [replica, rows, columns], all of which are dims here: a linear operator multiplies each
matrix of a stack with its own. A partition or a combine says nothing of values; a replicate repeats a tensor along a
dim, a reduce adds up its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import AttrExpr, DimPack, Substitution
from unity_ir.rules.poly import Poly, number
from unity_ir.rules.research.foreign.collection import ForeignOp, ForeignRule
from unity_ir.rules.research.foreign.sizes import SizeEquations, Unsupported
from unity_ir.rules.research.foreign.terms import (
    ELEMENTWISE,
    MOST_PARTS,
    PARALLEL,
    Sized,
    activated,
    applied,
    concatenated,
    converted,
    degree_of,
    dim_of,
    elementwise,
    folded,
    parts_of,
    split,
    tiled,
)

POOLS = {"OP_POOL2D_MAX": "max_pool2d", "OP_POOL2D_AVG": "avg_pool2d"}
"""Operators over windows of images, and what they are called here."""

RANKS: Mapping[str, int] = {
    **{"OP_MATMUL": 2, "OP_CONV2D": 4, "OP_ENLARGE": 4, "OP_LINEAR": 3},
    **dict.fromkeys(POOLS, 4),
    **dict.fromkeys(PARALLEL, 3),
}
"""Dims of all operands and results of an operator; those of others have as many as each other."""

SCALED = "OP_MUL"
"""The operator whose second operand has no dims."""

SAME, VALID = 0, 1
"""PM_PAD."""

LARGEST_KERNEL = 11
"""Rows and columns of a kernel, at most: both sides are evaluated at samples."""


def whole(foreign: ForeignRule, fixed: bool = False) -> Substitution:
    """
    Convert another system's rule to a substitution over whole tensors. Its degrees become symbols, or if `fixed` stay
    the numbers they are.

    Raises `Unsupported` for a rule that these operators cannot express, `UnityError` where no sizes fit.
    """
    sizes, ranks = SizeEquations(fixed), _Ranks(foreign)
    return converted(
        foreign,
        sizes,
        lambda of: tuple(sizes.unknown() for _ in range(ranks.of(of) or 0)),
        lambda op, operands: _apply(op, operands, sizes),
        lambda of: () if ranks.of(of) == 0 else (DimPack(ranks.pack(of)),),
    )


class _Ranks:
    """The numbers of dims of a rule's inputs: tensors that one operation reads or makes have the same."""

    def __init__(self, foreign: ForeignRule):
        self.groups: list[tuple[set[object], set[int]]] = []
        for side, at in ((foreign.source, 0), (foreign.target, 1)):
            for n, op in enumerate(side):
                reads = [of if of[0] < 0 else (at, of[0]) for of in op.inputs]
                if op.type == SCALED:
                    self._join(set(reads[1:]), {0})
                    reads = reads[:1]
                rank = op.parameters.get("PM_NUMDIM") or RANKS.get(op.type)
                self._join({(at, n), *reads}, {rank} if rank else set())
        for left, right in foreign.outputs:
            self._join({(0, left[0]), (1, right[0])}, set())

    def _join(self, tensors: set[object], ranks: set[int]) -> None:
        for group in [g for g in self.groups if not g[0].isdisjoint(tensors)]:
            self.groups.remove(group)
            tensors, ranks = tensors | group[0], ranks | group[1]
        self.groups.append((tensors, ranks))

    def of(self, tensor: tuple[int, int]) -> int | None:
        """Return the number of dims, None if it is any. Raises `UnityError` where there are two."""
        ranks = sorted(next(r for tensors, r in self.groups if tensor in tensors))
        if len(ranks) > 1:
            raise UnityError(f"tensors of {' and '.join(map(str, ranks))} dims are one")
        return ranks[0] if ranks else None

    def pack(self, tensor: tuple[int, int]) -> str:
        """Return the name of the dims of a tensor that has any number."""
        at = next(i for i, (tensors, _) in enumerate(self.groups) if tensor in tensors)
        return "abcdefghijklm"[at] if at < 13 else f"a{at}"


def _apply(op: ForeignOp, operands: Sequence[Sized], sizes: SizeEquations) -> Iterator[Sized]:
    """Yield the results of an operation."""
    first, *others = operands
    match op.type:
        case "OP_MATMUL":
            yield _matmul(op, first, others[0], sizes)
        case "OP_CONV2D":
            yield _convolution(op, first, others[0], sizes)
        case "OP_ENLARGE":
            yield _enlarged(op, first, sizes)
        case "OP_TRANSPOSE":
            yield _transposed(op, first)
        case kind if kind in POOLS:
            yield _pooled(op, first)
        case kind if kind == SCALED:
            if others[0].shape:
                raise UnityError(f"{kind}: by a tensor of {len(others[0].shape)} dims")
            yield replace(first, term=applied("mul", operands))
        case "OP_LINEAR":
            yield _linear(op, first, others[0], sizes)
        case "OP_CONCAT":
            yield concatenated(dim_of(op, "PM_AXIS", len(first.shape)), operands, sizes)
        case "OP_SPLIT":
            yield from split(op, dim_of(op, "PM_AXIS", len(first.shape)), first, sizes)
        case kind if kind in PARALLEL:
            yield _parallel(op, first, sizes)
        case kind if kind in ELEMENTWISE:
            yield elementwise(op, operands, sizes)
        case kind:
            raise Unsupported(f"operator {kind}")


def _matmul(op: ForeignOp, x: Sized, y: Sized, sizes: SizeEquations) -> Sized:
    sizes.equate("OP_MATMUL", x.shape[1], y.shape[0])
    joins = {dim: of.joins[dim] for dim, of in enumerate((x, y)) if dim in of.joins}
    return activated(op, Sized(applied("matmul", (x, y)), (x.shape[0], y.shape[1]), joins))


def _linear(op: ForeignOp, x: Sized, w: Sized, sizes: SizeEquations) -> Sized:
    """Return the products of a stack of matrices with one of weights, which are [outputs, inputs]."""
    for dim in (0, 2):
        sizes.equate("OP_LINEAR", x.shape[dim], w.shape[dim])
    joins = {dim: of.joins[1] for dim, of in ((1, x), (2, w)) if 1 in of.joins}
    return activated(op, Sized(applied("batch_matmul_nt", (x, w)), (*x.shape[:2], w.shape[1]), joins))


def _parallel(op: ForeignOp, x: Sized, sizes: SizeEquations) -> Sized:
    dim, count = dim_of(op, "PM_PARALLEL_DIM", len(x.shape)), degree_of(op)
    if sizes.fixed and count > MOST_PARTS:
        raise Unsupported(f"{op.type} by {count}")
    match op.type:
        case "OP_REPLICATE" if sizes.fixed:
            return concatenated(dim, [x] * count, sizes)
        case "OP_REPLICATE":
            return tiled(x, dim, sizes.degree(count))
        case "OP_REDUCE" if sizes.fixed:
            return _total(list(parts_of(x, dim, count, sizes)))
        case "OP_REDUCE":
            return folded(x, dim, sizes.degree(count), sizes)
        case _:
            return x


def _total(parts: Sequence[Sized]) -> Sized:
    """Return the sum of equal parts of one tensor."""
    total = parts[0]
    for part in parts[1:]:
        total = Sized(applied("add", (total, part)), part.shape, part.joins)
    return total


def _transposed(op: ForeignOp, x: Sized) -> Sized:
    rank, left = len(x.shape), op.parameters.get("PM_PERM", 0)
    perm: list[int] = []
    for _ in x.shape:
        perm.insert(0, left % rank)
        left //= rank
    if left or sorted(perm) != list(range(rank)):
        raise Unsupported(f"OP_TRANSPOSE by {op.parameters.get('PM_PERM', 0)} of {rank} dims")
    made = applied("transpose", (x,), perm=tuple(map(number, perm)))
    joins = {to: x.joins[of] for to, of in enumerate(perm) if of in x.joins}
    return Sized(made, tuple(x.shape[of] for of in perm), joins)


@dataclass(frozen=True, slots=True)
class _Window:
    """The rows and columns of a kernel that goes over an image by steps of 1, and of the zeros before and after it."""

    kernel: tuple[int, int]
    padding: tuple[int, int]

    def image(self, of: Sized) -> list[Poly]:
        """Return the rows and columns of what is made of an image."""
        return [n + 2 * p - k + 1 for n, p, k in zip(of.shape[2:], self.padding, self.kernel, strict=True)]

    @property
    def attributes(self) -> dict[str, AttrExpr]:
        """The attributes of an operator here."""
        return {"stride": (number(1),) * 2, "padding": tuple(map(number, self.padding))}


def _window(op: ForeignOp) -> _Window:
    kernel, stride = (tuple(op.parameters.get(f"PM_{of}_{d}", 1) for d in "HW") for of in ("KERNEL", "STRIDE"))
    pad = op.parameters.get("PM_PAD", SAME)
    if (
        pad not in (SAME, VALID)
        or stride != (1, 1)
        or any(not 1 <= k <= LARGEST_KERNEL or (pad == SAME and k % 2 == 0) for k in kernel)
    ):
        # What lies before and behind an image then depends on its size.
        raise Unsupported(f"{op.type} of kernel {kernel}, stride {stride}, padding {pad}")
    rows, columns = (k // 2 if pad == SAME else 0 for k in kernel)
    return _Window((kernel[0], kernel[1]), (rows, columns))


def _pooled(op: ForeignOp, x: Sized) -> Sized:
    window = _window(op)
    attributes = {**window.attributes, "kernel": tuple(map(number, window.kernel))}
    if op.type == "OP_POOL2D_MAX":
        attributes["dilation"] = (number(1),) * 2
    joins = {dim: join for dim, join in x.joins.items() if dim < 2}
    made = Sized(applied(POOLS[op.type], (x,), **attributes), (*x.shape[:2], *window.image(x)), joins)
    return activated(op, made)


def _enlarged(op: ForeignOp, w: Sized, sizes: SizeEquations) -> Sized:
    """Return a kernel with zeros around it, as many on each side, so that it gets larger, or stays as it is."""
    for dim, by in ((2, op.parameters.get("PM_KERNEL_H", 1)), (3, op.parameters.get("PM_KERNEL_W", 1))):
        if not 1 <= by <= LARGEST_KERNEL:
            raise Unsupported(f"OP_ENLARGE to {by}")
        # What is unknown is 1 or more.
        before = sizes.unknown() - 1
        sizes.equate("OP_ENLARGE", w.shape[dim], number(by) - before * 2)
        shape = (*w.shape[:dim], number(by), *w.shape[dim + 1 :])
        joins = {d: join for d, join in w.joins.items() if d != dim}
        w = Sized(applied("pad", (w,), dim=number(dim), before=before, after=before), shape, joins)
    return w


def _convolution(op: ForeignOp, x: Sized, w: Sized, sizes: SizeEquations) -> Sized:
    window = _window(op)
    for size, by in zip(w.shape[2:], window.kernel, strict=True):
        sizes.equate("OP_CONV2D", size, number(by))
    groups = _groups(x.shape[1], w.shape[1], sizes)
    if groups > 1:
        sizes.equate("OP_CONV2D", w.shape[0], sizes.unknown() * groups)
    made = applied("conv2d", (x, w), dilation=(number(1),) * 2, groups=number(groups), **window.attributes)
    joins = {dim: of.joins[0] for dim, of in enumerate((x, w)) if 0 in of.joins}
    return activated(op, Sized(made, (x.shape[0], w.shape[0], *window.image(x)), joins))


def _groups(channels: Poly, own: Poly, sizes: SizeEquations) -> int:
    """
    Return the number of groups of a convolution: the channels of its image over those of its kernel (`own`). Where that
    does not follow from sizes, it is 1, and the channels are equated.
    """
    many, one = sizes.now(channels), sizes.now(own)
    groups = many.terms[0][1] // one.terms[0][1] if many.terms and one.terms else 1
    if groups > 1 and many == one * groups:
        return groups
    sizes.equate("OP_CONV2D", channels, own)
    return 1
