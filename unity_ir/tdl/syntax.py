"""
Syntax of TDL, the tensor description language in which each operator is defined by one einsum-like line, such as
`matmul(x, w) out[m, n] = sum[k](x[m, k] * w[k, n])`. A line as written is a `Line`; at given shapes it is a `Bound`.

A `Line` is what was written. Binding it to operand shapes (`tdl.bind`) gives a `Bound`: packs and variadic names
spelled out, attributes replaced by their values, every index variable with its extent. Analysis, evaluation and code
generation only ever see a `Bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import add, mul
from typing import Any, TypeAlias, TypeGuard, TypeVar

AttrValue: TypeAlias = int | float | str | tuple[int, ...]
N = TypeVar("N")
"""Sizes or positions: ints, arrays of them, or polynomials."""

# --- indices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Var:
    """A dim indexed by one variable: `x[.., k]`."""

    name: str


@dataclass(frozen=True, slots=True)
class PaddedVar(Var):
    """
    The innermost dim of a tensor whose rows are stored with `row` elements, more than the dim has, so that each begins
    at an aligned address. What is stored beyond the dim is never read.
    """

    row: int


@dataclass(frozen=True, slots=True)
class Composite:
    """A dim indexed by several variables, the first the outermost: `x[(h d)]` is position `h * |d| + d`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """
    A dim that is the concatenation of the ranges of several variables.

    `active` is the position in `names` (from 0) of the variable through which the dim is read; None in a result, whose
    dim has the ranges of all of them.
    """

    names: tuple[str, ...]
    active: int | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """
    A part of a dim that has `size` elements in all: the position of `index`, counted from `start`. Lines as written
    have segments instead; composing lines (`forms.compose`) makes slices of those, since `index` may have several
    variables.
    """

    index: Var | Composite
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Starred:
    """One variable per variadic operand or result: `i*`."""

    name: str


@dataclass(frozen=True, slots=True)
class StarredSegments:
    """A dim that is the concatenation of the ranges of all variables of `i*`: `(i*)`."""

    name: str


@dataclass(frozen=True, slots=True)
class Pack:
    """
    Any number of variables, one for each dim left by the operand's other indices: `a..`, as `...` in einsum.

    `permuted_by` names an attribute with their order: dim d then has variable number `permuted_by[d]` of the pack. A
    pack that broadcasts, `~a..`, is aligned at the last dim: leading dims may be missing, dims of size 1 are read at 0.
    """

    name: str
    permuted_by: str | None = None
    broadcast: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """
    An integer that an attribute gives: entry number `at` of an attribute of kind `ints`, as in `stride.0`, or, if `at`
    is None, the value of an attribute of kind `int`.
    """

    attribute: str
    at: int | None = None

    def __str__(self) -> str:
        return self.attribute if self.at is None else f"{self.attribute}.{self.at}"


@dataclass(frozen=True, slots=True)
class AffineTerm:
    """A term of an affine index, `sign * factor * variable`; without a variable, `sign * factor`."""

    sign: int
    factor: int | Entry
    variable: str | None


@dataclass(frozen=True, slots=True)
class Affine:
    """
    A window as it is written, an affine index such as `stride.0*y + i - pad`; a term's variable may also be the name of
    an attribute.
    """

    terms: tuple[AffineTerm, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """
    The affine index of a dim, as of convolutions: position `sum(coefficient * variable) + offset`.

    A read outside of the tensor gives 0, and a reduction leaves it out; a write outside is dropped; several writes to
    one position are added up.
    """

    terms: tuple[tuple[int, str], ...]
    """Coefficients, all above 0, and variables."""
    offset: int
    """Position in the whole dim at which all variables are 0; below 0 where the dim is padded."""
    size: int
    """Elements of the dim; in a piece, of the piece with its halo."""
    whole: int
    """Elements of the whole dim."""
    low: int = 0
    """Elements of a piece's halo before the piece."""

    def span(self, extents: Mapping[str, int], without: str | None = None) -> int:
        """
        Return the highest minus the lowest position that the index takes on as its variables run over `extents`, their
        numbers of positions.

        `without` names a variable that is held still; None holds none.
        """
        return sum(c * (extents[v] - 1) for c, v in self.terms if v != without)


Index: TypeAlias = Var | Composite | Segments | Slice | Window
"""Indices of a bound line."""
WrittenIndex: TypeAlias = Index | Starred | StarredSegments | Pack | Affine

# --- expressions -----------------------------------------------------------------------------------------------------


class CachedExpr:
    """
    An expression that keeps its hash and its free variables once they are computed.

    Composed lines share subexpressions; without this, each is walked once per path that leads to it.
    """

    __slots__ = ("free", "hashed")
    free: frozenset[str]
    """Kept by `tdl.counts.free_variables`."""
    hashed: int


E = TypeVar("E", bound=CachedExpr)


def _hashed_once(cls: type[E]) -> type[E]:
    compute: Callable[[E], int] = cls.__hash__

    def __hash__(self: E) -> int:
        try:
            return self.hashed
        except AttributeError:
            found = compute(self)
            object.__setattr__(self, "hashed", found)
            return found

    cls.__hash__ = __hash__
    return cls


@dataclass(frozen=True, slots=True)
class Const:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class Name:
    """An index variable used as a value (its global index), or, in a written line, an attribute."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """
    `size(k)`: the number of positions of index variables, of several the product. In a bound line it is that of the
    whole tensor, also if the line is for one task's piece.
    """

    indices: tuple[WrittenIndex, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """`position(i, j)`: the row-major position of index variables in the whole tensor they index."""

    indices: tuple[WrittenIndex, ...]


@_hashed_once
@dataclass(frozen=True, slots=True)
class Access(CachedExpr):
    """A read of a tensor: `x[m, k]`; `starred` if it reads every variadic operand."""

    tensor: str
    indices: tuple[WrittenIndex, ...]
    starred: bool = False


@_hashed_once
@dataclass(frozen=True, slots=True)
class Binary(CachedExpr):
    """Arithmetic on two expressions: `+`, `-`, `*` or `/`."""

    op: str
    """One of `+ - * /`."""
    left: Expr
    right: Expr


@_hashed_once
@dataclass(frozen=True, slots=True)
class Call(CachedExpr):
    """A scalar function of expressions."""

    function: str
    """A scalar function of `tdl.functions`, or, in a written line, an attribute that names one."""
    args: tuple[Expr, ...]


@_hashed_once
@dataclass(frozen=True, slots=True)
class Reduce(CachedExpr):
    """A reduction over index variables: `sum[k](...)`."""

    reducer: str
    """One of `sum max min prod`."""
    indices: tuple[WrittenIndex, ...]
    body: Expr

    @property
    def names(self) -> tuple[str, ...]:
        """
        The names of the index variables reduced over, in a bound line; in a line as written, packs (`a..`) are left
        out.
        """
        return tuple(i.name for i in self.indices if isinstance(i, Var))


@_hashed_once
@dataclass(frozen=True, slots=True)
class Cases(CachedExpr):
    """
    The value along a `Segments` dim of the result: one expression for each segment, by its variable. Where the segments
    are equally long, composed lines (`forms.compose`) may have a `Composite` dim instead: then all branches have the
    name of its outermost variable, and each is the value at one of that variable's positions, in order.
    """

    branches: tuple[tuple[str, Expr], ...]


@_hashed_once
@dataclass(frozen=True, slots=True)
class Opaque(CachedExpr):
    """
    A call of a function that TDL has no formula for, such as top-k (`tdl.opaque`): it replaces the dims `inputs` of its
    argument `body` by the dims `outputs`.

    It treats every position of all other variables alike, so those may be divided; nothing else is known of it.
    """

    function: str
    outputs: tuple[WrittenIndex, ...]
    inputs: tuple[WrittenIndex, ...]
    body: Expr

    @property
    def made(self) -> tuple[str, ...]:
        """
        The names of the index variables among `outputs`, the dims that the function makes: of `topk`, the one over the
        k elements that it returns. Packs (`a..`), which lines have until they are bound, are left out.
        """
        return tuple(i.name for i in self.outputs if isinstance(i, Var))

    @property
    def names(self) -> tuple[str, ...]:
        """
        The names of the index variables of the dims that the function takes away (of `topk`: over all elements it
        chooses from), in a bound line; in a line as written, packs (`a..`) are left out.
        """
        return tuple(i.name for i in self.inputs if isinstance(i, Var))


Expr: TypeAlias = Const | Name | Size | Position | Access | Binary | Call | Reduce | Cases | Opaque

# --- a line ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """
    An operand as an operator's TDL line declares it: its name, the kind of its elements, and whether it is variadic
    (`x*`, any number of operands).
    """

    name: str
    kind: str = "float"
    """Element kind: `float`, `int` (class ids, token ids), `bool`, or, in a written line, `any` of them."""
    variadic: bool = False

    @property
    def floating(self) -> bool:
        """Whether the operand holds floating point numbers; only these can be in partial sums and have gradients."""
        return self.kind == "float"

    @property
    def integer(self) -> bool:
        """Whether the operand holds integers."""
        return self.kind == "int"


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute (constant argument) as an operator's TDL line declares it."""

    name: str
    kind: str
    """`int`, `ints`, `float`, `name` (a scalar function) or `dtype` (an element type)."""
    default: AttrValue | None = None
    """None for an attribute that must be given."""


@dataclass(frozen=True)
class WrittenResult:
    """A result of a TDL line as written: name, indices and expression."""

    name: str
    variadic: bool
    indices: tuple[WrittenIndex, ...]
    expr: Expr
    elements: str | None = None
    """`int` (i64), `bool`, or the name of an attribute of kind `dtype`; None for the element type of the operands."""

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Every read of a tensor in the result's expression, as written, in reading order."""
        return accesses(self.expr)

    @cached_property
    def reads_constant_positions(self) -> bool:
        """
        Whether a dim of an operand is read at a constant position, such as `z[b.., 0, n]` for a gate of an LSTM cell.
        """
        return any(is_constant_position(i) for a in self.accesses for i in a.indices)

    @cached_property
    def broadcast(self) -> frozenset[str]:
        """The names of the packs along which operands broadcast: a, if an operand is read as `x[~a..]`."""
        return frozenset(i.name for a in self.accesses for i in a.indices if isinstance(i, Pack) and i.broadcast)


@dataclass(frozen=True, slots=True)
class Clause:
    """
    A condition in the where clause of a TDL line: `rank(a..) = dim`, `size(h) = heads`, `size(y + i) = sizes.0` or
    `degree(k..) = degrees`; the right side is a number or an attribute.
    """

    kind: str
    """`rank`, `size` or `degree`."""
    index: WrittenIndex
    value: Entry | int


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed line of the tensor description language (TDL), as written: the definition of one operator."""

    operator: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[Attribute, ...]
    results: tuple[WrittenResult, ...]
    clauses: tuple[Clause, ...]
    text: str
    """The line as given, with single spaces."""


NOT_FLOATING = ("i64", "i32", "bool")
"""Element types that cannot be in partial sums and have no gradient."""

# --- bound -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A result of a bound TDL line: its name, the indices of its dims, and the expression of its elements."""

    name: str
    indices: tuple[Index, ...]
    expr: Expr
    dtype: str | None = None
    """Its element type; None for that of the floating operands."""

    @property
    def floating(self) -> bool:
        """Whether the result holds floating point numbers."""
        return self.dtype not in NOT_FLOATING

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Every read of a tensor in the result's expression, in reading order."""
        return accesses(self.expr)


@dataclass(frozen=True, slots=True)
class Bound:
    """
    An operator's TDL line at given operand shapes and attributes: a bound line. The extent (number of positions) of
    every index variable is known.
    """

    operator: str
    operands: tuple[Parameter, ...]
    results: tuple[Result, ...]
    extents: Mapping[str, int]
    """Extent of every index variable, in TDL order: result dims first, then as the expressions bind them."""
    free_degrees: Mapping[str, int]
    """Degrees of result variables that no operand mentions, from the operator's attributes."""

    def result_shape(self, result: Result) -> tuple[int, ...]:
        """
        Return the shape of `result`, one of the line's results: the global shape, or, in the line of one task, that of
        the task's shard.

        Given `out[m, (h d)]` with extents m=4, h=2, d=8, returns `(4, 16)`.
        """
        return tuple(index_extent(i, self.extents) for i in result.indices)

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every result, in order: global, or, for the line of one task, those of the task's shards."""
        return tuple(self.result_shape(r) for r in self.results)

    @property
    def has_windows(self) -> bool:
        """Whether any dim of an operand or result is indexed by a window (an affine index, as of convolutions)."""
        return any(isinstance(i, Window) for r in self.results for of in (r, *r.accesses) for i in of.indices)

    @property
    def is_concatenation(self) -> bool:
        """
        Whether a result is a concatenation: one of its dims has segments, each computed by an expression of its own
        (`Cases`).
        """
        return any(isinstance(r.expr, Cases) for r in self.results)


def is_constant_position(index: WrittenIndex) -> TypeGuard[Affine]:
    """
    Return whether an index as written names no variable, so that the dim is read at one constant position, such as the
    0 of `z[b.., 0, n]`.
    """
    return isinstance(index, Affine) and all(t.variable is None for t in index.terms)


def index_names(index: WrittenIndex) -> tuple[str, ...]:
    """
    Return the names of the variables in one bound index of a dim, outermost first: given `(h d)` returns h and d.
    Raises `TypeError` for an index that is not bound (a pack `a..`).
    """
    # No `match`: this is called for every dim of everything that is bound or evaluated.
    if isinstance(index, Var):
        return (index.name,)
    if isinstance(index, Composite | Segments):
        return index.names
    if isinstance(index, Window):
        return tuple([v for _, v in index.terms])
    if isinstance(index, Slice):
        return index_names(index.index)
    raise TypeError(f"{index} is not bound")


def index_extent(index: WrittenIndex, extents: Mapping[str, int]) -> int:
    """
    Return the size of the dim that has this bound index. `extents` maps each index variable to its number of positions.
    A window and a slice carry the size of their dim; for any other index it is `joined_extent`.
    """
    return index.size if isinstance(index, Window | Slice) else joined_extent(index, extents)


def joined_extent(index: WrittenIndex, extents: Mapping[str, N]) -> N:
    """
    Return the number of positions that a bound index runs over: the product of the extents of its variables, or for a
    concatenation (`Segments`) their sum. Given `(h d)` returns |h| * |d|.

    `extents` maps each index variable to its number of positions, as int or polynomial. This is the size of the dim,
    but for a slice, which is only a part of its dim, and for a window, whose positions may overlap: use `index_extent`
    there.
    """
    sizes: list[Any] = [extents[n] for n in index_names(index)]
    return reduce(add if isinstance(index, Segments) else mul, sizes)


def joined_position(index: WrittenIndex, extents: Mapping[str, Any], at: Callable[[str], N]) -> N:
    """
    Return the position in its dim to which a bound index points. Windows are not allowed.

    `at(name)` is the position of each of its variables, `extents` the number of positions of each; both may be ints,
    arrays or polynomials. Given `(h d)` returns `at(h) * |d| + at(d)`; given a concatenation (`Segments`) of h and d
    that is read through d, `at(d) + |h|`.
    """
    names = index_names(index)
    if isinstance(index, Slice):
        within: Any = joined_position(index.index, extents, at)
        return within + index.start
    if isinstance(index, Segments):
        assert index.active is not None, "a segment is read through one of its variables"
        return reduce(add, (extents[n] for n in names[: index.active]), at(names[index.active]))
    outermost: Any = at(names[0])
    return reduce(lambda position, name: position * extents[name] + at(name), names[1:], outermost)


def children(expr: Expr) -> tuple[Expr, ...]:
    """
    Return the direct subexpressions of `expr`, in reading order; () for constants, names, sizes, positions and reads of
    tensors.
    """
    # No `match`, and what is most frequent first: every walk of an expression calls this.
    if isinstance(expr, Access | Const | Name):
        return ()
    if isinstance(expr, Binary):
        return (expr.left, expr.right)
    if isinstance(expr, Call):
        return expr.args
    if isinstance(expr, Reduce | Opaque):
        return (expr.body,)
    if isinstance(expr, Cases):
        return tuple([e for _, e in expr.branches])
    return ()


def accesses(expr: Expr) -> tuple[Access, ...]:
    """Return every read of a tensor in `expr`, in reading order, repeated as often as it occurs."""
    if isinstance(expr, Access):
        return (expr,)
    return _accesses(expr) if isinstance(expr, CachedExpr) else ()


@lru_cache(maxsize=16384)
def _accesses(expr: Expr) -> tuple[Access, ...]:
    return tuple([a for child in children(expr) for a in accesses(child)])


def tensors(expr: Expr) -> frozenset[str]:
    """Return the names of the tensors that `expr` reads."""
    return frozenset(a.tensor for a in accesses(expr))
