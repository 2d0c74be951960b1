"""
Parallel tensor types: a value's global shape and element type, and the pieces that it is divided into
(docs/concepts.md).

A type says what a value is (global sizes, element type) and into what pieces it is divided: a degree per dim, pieces
that are addends of the value (`sum`), pieces that are identical (`copy`). Unity's (size, degree) plus replica
dimension, with the latter split in two, because a single one makes `relu` of partial sums well typed and wrong.

A value's gradient may have another element type (`grad`): a weight that is computed with in bf16 has its gradient cast
to f32 where an operator makes it, and summed over devices in f32.

Pieces may reach beyond their part of a dim, as windows read it: the elements of their halo are copies of what their
neighbours hold (`halo`), or, in a gradient, addends of it (`halo_sum`); outside of the value they are 0.

Pieces may be in time: a step runs its batch in micro-batches, one after the other, and a device has one piece for each
(`InTime`). Degrees count all pieces, those in time included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import prod
from typing import Literal

from unity_ir.errors import UnityError
from unity_ir.tdl.divisibility import Halos
from unity_ir.tdl.parallel import Degrees
from unity_ir.tdl.syntax import NOT_FLOATING

ELEMENT_BYTES = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "bool": 1}
"""Element types and their sizes."""

MAX_ELEMENTS = 2**62
"""Sizes beyond this cannot be addressed in bytes by 64-bit integers."""

MAX_PIECES = 2**20
"""More pieces than any machine has devices; beyond it they cannot be listed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a value: its position along every dim, which of the partial sums it is, and which of the copies."""

    dims: tuple[int, ...]
    sum: int = 0
    copy: int = 0


@dataclass(frozen=True, slots=True)
class InTime:
    """
    How the micro-batches of a step divide a value: along `role`, into `pieces`, the number of micro-batches.

    If `role` is a dim's number, each micro-batch has its own shard of the dim. `copy`: every micro-batch reads the same
    (weights). `sum`: each makes an addend (gradients of weights, a loss). Time divides first, so the shards of a
    micro-batch lie side by side.
    """

    role: int | Literal["sum", "copy"]
    pieces: int

    @property
    def dual(self) -> InTime:
        """How micro-batches divide the value's gradient: `sum` and `copy` change places."""
        return InTime("sum" if self.role == "copy" else "copy" if self.role == "sum" else self.role, self.pieces)


@dataclass(frozen=True, eq=False)
class TensorType:
    """
    The parallel type of a value: its global shape, its element type, and the pieces that it is divided into. Make one
    with `tensor_type`, which checks it; equal types are one object. Examples as text:

    - `!pcg.tensor<[64:2, 784], f32, sum = 2, copy = 4>`: dim 0 is cut into 2 shards (its degree), the value is the sum
      of 2 addends (partial sums), and each is there 4 times (copies, whose gradients are addends).
    - `[64, 3, 224:2 halo(3, 2), 224]`: shards have 3 more elements before and 2 after them, equal to their neighbours';
      with `halo_sum(3, 2)`, addends of these.
    - `bf16, grad = f32`: the gradient has another element type.
    - `[64:8:t4]`: each of 4 micro-batches has 2 of the 8 shards; likewise `sum = 8:t4` and `copy = 8:t4`.
    """

    shape: tuple[int, ...]
    degrees: tuple[int, ...]
    dtype: str
    sum: int = 1
    copy: int = 1
    halo: Halos = ()
    """Per dim, elements before and after a piece that copy its neighbours'; () where there are none."""
    halo_sum: Halos = ()
    """Per dim, elements before and after a piece that are addends of its neighbours'; () where there are none."""
    grad: str = ""
    """The element type of the gradient where it is another than the value's; else empty."""
    time: InTime | None = None
    """Which of its pieces are in time; None for a value that is not made or read once per micro-batch."""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that make or read the value; 1 for a value that a step makes once."""
        return 1 if self.time is None else self.time.pieces

    @cached_property
    def micro_shape(self) -> tuple[int, ...]:
        """The shape of what one micro-batch has of the value: the global shape if micro-batches divide no dim."""
        return tuple(s // d for s, d in zip(self.shape, self.parts_in_time.dims, strict=True))

    @cached_property
    def parts_in_time(self) -> Degrees:
        """
        How micro-batches divide the value: `micro_batches` is the degree of the one dim that they divide, or else the
        number of their partial sums or copies; all other degrees are 1.
        """
        role, pieces = (None, 1) if self.time is None else (self.time.role, self.time.pieces)
        dims = tuple(pieces if dim == role else 1 for dim in range(len(self.shape)))
        return Degrees(dims, pieces if role == "sum" else 1, pieces if role == "copy" else 1)

    @cached_property
    def parts_in_space(self) -> Degrees:
        """
        How devices divide the value within one micro-batch: as `parts`, but with degrees that count devices alone, not
        micro-batches.
        """
        if self.time is None:
            return self.parts
        parts, time = self.parts, self.parts_in_time
        dims = tuple(d // t for d, t in zip(parts.dims, time.dims, strict=True))
        return replace(parts, dims=dims, sum=parts.sum // time.sum, copy=parts.copy // time.copy)

    def __reduce__(self) -> tuple[Callable[..., TensorType], tuple[object, ...]]:
        """Pickle the fields alone, so that equal types are one object again."""
        return tensor_type, self.fields

    @property
    def fields(self) -> tuple[object, ...]:
        """The arguments of `tensor_type`, in order, that make this type."""
        return (
            *(self.shape, self.dtype, self.degrees, self.sum, self.copy),
            *(self.halo, self.halo_sum, self.grad, self.time),
        )

    @property
    def grad_dtype(self) -> str:
        """The element type in which the value's gradient is moved, summed and kept."""
        return self.grad or self.dtype

    @cached_property
    def pieces(self) -> int:
        """The number of pieces: shards times partial sums times copies, those in time included."""
        return prod(self.degrees) * self.sum * self.copy

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers (not booleans)."""
        return self.dtype.startswith("i")

    @property
    def is_floating(self) -> bool:
        """Whether the elements are floating point numbers; only these may be in partial sums, and have a gradient."""
        return self.dtype not in NOT_FLOATING

    @cached_property
    def elements(self) -> int:
        """The number of elements of the whole value."""
        return prod(self.shape)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a piece, with its halo."""
        return tuple(s + low + high for s, (low, high) in zip(self.core_shape, self.borders, strict=True))

    @cached_property
    def core_shape(self) -> tuple[int, ...]:
        """The shape of a piece without its halo."""
        return tuple(s // d for s, d in zip(self.shape, self.degrees, strict=True))

    @property
    def borders(self) -> Halos:
        """
        Per dim, the numbers of elements (before, after) that a piece has in addition to its shard: those of `halo` or,
        in a gradient, of `halo_sum`; (0, 0) for dims without.
        """
        return self.halo or self.halo_sum or ((0, 0),) * len(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the whole value."""
        return self.elements * ELEMENT_BYTES[self.dtype]

    @cached_property
    def parts(self) -> Degrees:
        """
        How the value is divided: the degree of each dim, the numbers of partial sums and copies, and halos. Shape and
        element type are no part of it.
        """
        return Degrees(self.degrees, self.sum, self.copy, self.halo, self.halo_sum)

    @property
    def serial(self) -> TensorType:
        """The type of the same value in one piece: no shards, partial sums, copies or halo, nothing in time."""
        return tensor_type(self.shape, self.dtype, grad=self.grad)

    @property
    def dual(self) -> TensorType:
        """
        The type of the value's gradient: `sum` and `copy` change places (docs/concepts.md: "Duality"), in halos, too.
        """
        time = self.time and self.time.dual
        return tensor_type(
            self.shape, self.grad_dtype, self.degrees, self.copy, self.sum, self.halo_sum, self.halo, time=time
        )

    def with_degree(self, dim: int, degree: int) -> TensorType:
        """
        Return the type with `degree` shards of dim number `dim`. Partial sums, copies and pieces in time stay; halos
        are dropped. Raises `UnityError` as `tensor_type` does.
        """
        degrees = (*self.degrees[:dim], degree, *self.degrees[dim + 1 :])
        return tensor_type(self.shape, self.dtype, degrees, self.sum, self.copy, grad=self.grad, time=self.time)

    def with_sum(self, degree: int) -> TensorType:
        """Return the type with `degree` partial sums (1: none). Shards and copies stay; halos are dropped."""
        return tensor_type(self.shape, self.dtype, self.degrees, degree, self.copy, grad=self.grad, time=self.time)

    def with_copy(self, degree: int) -> TensorType:
        """
        Return the type with `degree` copies (1: no further ones). Shards and partial sums stay; halos are dropped.
        """
        return tensor_type(self.shape, self.dtype, self.degrees, self.sum, degree, grad=self.grad, time=self.time)

    def in_time(self, time: InTime) -> TensorType:
        """
        Return the type with micro-batches that divide the value, in addition to devices: the degree that `time.role`
        names (a dim's, that of `sum` or of `copy`) is multiplied by `time.pieces`. The type must not be divided over
        micro-batches yet. Halos stay.
        """
        parts = self.parts
        match time.role:
            case "sum":
                parts = replace(parts, sum=parts.sum * time.pieces)
            case "copy":
                parts = replace(parts, copy=parts.copy * time.pieces)
            case dim:
                degree = parts.dims[dim] * time.pieces
                parts = replace(parts, dims=(*parts.dims[:dim], degree, *parts.dims[dim + 1 :]))
        return divided_type(self.shape, self.dtype, parts, self.grad, time)

    @property
    def out_of_time(self) -> TensorType:
        """The type of the same value if devices alone divide it, and no micro-batches do."""
        return divided_type(self.shape, self.dtype, self.parts_in_space, self.grad)

    def with_halo(self, dim: int, low: int, high: int, kind: str = "halo") -> TensorType:
        """
        Return the type with a halo along dim number `dim`: `low` elements before each piece and `high` after it. `kind`
        is `halo` (equal to the neighbouring pieces' elements) or `halo_sum` (to be added to them).

        Raises `UnityError` for a dim of degree 1, and for a type that has a halo of the other kind.
        """
        borders = (*self.borders[:dim], (low, high), *self.borders[dim + 1 :])
        return divided_type(self.shape, self.dtype, replace(self.parts, **{kind: borders}), self.grad, self.time)

    def all_pieces(self) -> list[Piece]:
        """
        Return every piece, as its position along each dim, the number of its partial sum, and the number of its copy;
        ordered in this way.
        """
        return [
            Piece(dims, s, c)
            for dims in product(*(range(d) for d in self.degrees))
            for s in range(self.sum)
            for c in range(self.copy)
        ]

    def __str__(self) -> str:
        kind = "halo" if self.halo else "halo_sum"

        def degree(number: int, role: int | str) -> str:
            is_in_time = self.time is not None and self.time.role == role
            return f"{number}:t{self.micro_batches}" if is_in_time else str(number)

        dims = ", ".join(
            (f"{s}:{degree(d, i)}" if d > 1 else str(s)) + (f" {kind}({b[0]}, {b[1]})" if any(b) else "")
            for i, (s, d, b) in enumerate(zip(self.shape, self.degrees, self.borders, strict=True))
        )
        extra = "".join(f", {k} = {degree(v, k)}" for k, v in (("sum", self.sum), ("copy", self.copy)) if v > 1)
        grad = f", grad = {self.grad}" if self.grad else ""
        return f"!pcg.tensor<[{dims}], {self.dtype}{grad}{extra}>"


_interned: dict[tuple[object, ...], TensorType] = {}


@cache
def tensor_type(
    shape: Sequence[int],
    dtype: str,
    degrees: Sequence[int] | None = None,
    sum: int = 1,
    copy: int = 1,
    halo: Halos = (),
    halo_sum: Halos = (),
    grad: str = "",
    time: InTime | None = None,
) -> TensorType:
    """
    Return the parallel type of global shape `shape`, element type `dtype` and one degree per dim (None: all 1), with
    `sum` partial sums and `copy` copies. `halo` has, per dim, the elements (before, after) that pieces have of their
    neighbours; `halo_sum` those that are addends of their neighbours'. () stands for none.

    `grad` is the element type of the gradient (empty: that of the value); `time` says which pieces are in time.
    Arguments must be hashable (tuples, not lists), and equal types are one object.

    Raises `UnityError` for an unknown element type, sizes below 1 or too large to address, and degrees that do not
    divide.
    """
    degrees = tuple(degrees) if degrees is not None else (1,) * len(shape)
    if dtype not in ELEMENT_BYTES:
        raise UnityError(f"pcg.tensor: unknown element type {dtype}; known are {', '.join(ELEMENT_BYTES)}")
    if grad and (grad not in ELEMENT_BYTES or dtype in NOT_FLOATING or grad in NOT_FLOATING):
        raise UnityError(f"pcg.tensor: {dtype} values have no gradient in {grad}; both must be floating point")
    if len(shape) != len(degrees):
        raise UnityError(f"pcg.tensor: {len(shape)} sizes but {len(degrees)} degrees")
    for size, degree in zip(shape, degrees, strict=True):
        if size < 1:
            raise UnityError(f"pcg.tensor: size {size} is not allowed; sizes start at 1")
        if degree < 1 or size % degree:
            raise UnityError(f"pcg.tensor: degree {degree} does not divide size {size}")
    if prod(shape) * ELEMENT_BYTES[dtype] > MAX_ELEMENTS:
        raise UnityError(f"pcg.tensor: {' x '.join(map(str, shape))} elements are too many to address")
    if sum < 1 or copy < 1:
        raise UnityError(f"pcg.tensor: sum = {sum}, copy = {copy}; degrees start at 1")
    if prod(degrees) * sum * copy > MAX_PIECES:
        raise UnityError(
            f"pcg.tensor: {prod(degrees) * sum * copy} pieces are too many; at most {MAX_PIECES} are allowed"
        )
    if dtype in NOT_FLOATING and sum > 1:
        raise UnityError(f"pcg.tensor: {dtype} values cannot be in partial sums")
    halo, halo_sum = (h if any(map(any, h)) else () for h in (halo, halo_sum))
    if halo and halo_sum:
        raise UnityError("pcg.tensor: a halo holds copies or addends, not both")
    for size, degree, (low, high) in zip(shape, degrees, halo or halo_sum or ((0, 0),) * len(shape), strict=True):
        if low < 0 or high < 0 or low > size or high > size:
            raise UnityError(f"pcg.tensor: a halo of {low} and {high} does not fit a dim of {size}")
        if degree == 1 and low + high > 0:
            raise UnityError("pcg.tensor: a dim of degree 1 has no halo")
    if dtype in NOT_FLOATING and halo_sum:
        raise UnityError(f"pcg.tensor: {dtype} values cannot have addends in a halo")
    if time is not None:
        time = _checked_time(time, degrees, sum, copy, halo or halo_sum)
    made = TensorType(tuple(shape), degrees, dtype, sum, copy, halo, halo_sum, "" if grad == dtype else grad, time)
    return _interned.setdefault(made.fields, made)


def _checked_time(time: InTime, degrees: Sequence[int], sum: int, copy: int, halo: Halos) -> InTime | None:
    """Return a division in time, None for one of 1 piece. Raises `UnityError` where the degrees do not have it."""
    if time.pieces < 1:
        raise UnityError(f"pcg.tensor: t{time.pieces} is not a number of micro-batches; it starts at 1")
    if isinstance(time.role, str):
        degree = sum if time.role == "sum" else copy
    elif not 0 <= time.role < len(degrees):
        raise UnityError(f"pcg.tensor: there is no dim {time.role} to divide in time")
    else:
        degree = degrees[time.role]
        if time.pieces > 1 and halo and any(halo[time.role]):
            raise UnityError(f"pcg.tensor: dim {time.role} is divided in time and cannot have a halo")
    if degree % time.pieces:
        raise UnityError(f"pcg.tensor: of a degree of {degree}, t{time.pieces} cannot be in time; it must divide it")
    return time if time.pieces > 1 else None


def divided_type(
    shape: tuple[int, ...], dtype: str, degrees: Degrees, grad: str = "", time: InTime | None = None
) -> TensorType:
    """
    Return the parallel type of a value of global shape `shape` and element type `dtype` that is divided as `degrees`
    says (shards of each dim, partial sums, copies, halos). `grad` is the element type of the gradient (empty: that of
    the value); `time` says what of this division is over micro-batches (None: nothing). Raises `UnityError` as
    `tensor_type` does.
    """
    return tensor_type(
        shape, dtype, degrees.dims, degrees.sum, degrees.copy, degrees.halo, degrees.halo_sum, grad, time
    )
