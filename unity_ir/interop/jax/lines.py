# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Compute a bound line (an operator's definition in the tensor description language TDL at given shapes) in jax.numpy.

It says the same as `tdl.evaluate`, the reference: expressions are arrays over their index variables. Sums of products
become `dot_general`, sums that pick a position become gathers and scatters; the rest XLA fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import prod

import jax.numpy as jnp
from jax import Array, lax

from unity_ir.forms.convolution import Convolution, convolution
from unity_ir.forms.grouped import Routed, routed
from unity_ir.forms.windows import masked_body
from unity_ir.interop.jax.convolutions import convolved, window_name
from unity_ir.interop.jax.functions import FUNCTIONS, OPAQUE
from unity_ir.interop.jax.named import Named, read, union, written
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import Pick, gather, scatter
from unity_ir.tdl.segments import segments
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Const,
    Expr,
    Index,
    Name,
    Opaque,
    Reduce,
    Result,
    Window,
    index_extent,
    index_names,
)

DTYPES: Mapping[str, jnp.dtype] = {
    name: jnp.dtype(of)
    for name, of in (
        ("f64", "float64"),
        ("f32", "float32"),
        ("bf16", "bfloat16"),
        ("f16", "float16"),
        ("i64", "int64"),
        ("i32", "int32"),
        ("bool", "bool"),
    )
}
"""JAX's element type for each of the compiler's."""

HALVES = (DTYPES["bf16"], DTYPES["f16"])

_REDUCERS = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "prod": jnp.prod}
_OF_INTEGERS = ("philox", "and", "or", "not")
"""Functions that take integers or conditions as they are."""
_OF_NUMBERS = ("exp", "log", "erf", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "gelu", "pow")
"""Functions whose result is a floating point number, whatever they are of."""


def compute(bound: Bound, operands: Sequence[Array], offsets: Mapping[str, Array | int]) -> tuple[Array, ...]:
    """
    Compute a bound TDL line on arrays, one per operand, of the shapes that it was bound to; return its results. 64-bit
    types must be enabled (`jax.enable_x64`), as ids and positions are i64.

    `offsets` has, for an index variable that is used as a value, the global index at which this piece begins (0 if left
    out). Numbers of 16 bits are added up in float32, and rounded once, in the results.
    """
    line = _Line(bound, operands, offsets)
    return tuple(map(line.result, bound.results))


class _Line:
    """Expressions of one line as arrays over their index variables, each computed once."""

    def __init__(self, bound: Bound, operands: Sequence[Array], offsets: Mapping[str, Array | int]):
        self.extents = bound.extents
        self.tensors = {p.name: a for p, a in zip(bound.operands, operands, strict=True)}
        self.offsets = offsets
        floats = [self.tensors[p.name].dtype for p in bound.operands if p.floating]
        self.dtype = floats[0] if floats else DTYPES["f32"]
        """The element type of results that have none of their own."""
        self.number = DTYPES["f32"] if self.dtype in HALVES else self.dtype
        """The element type that it is computed in."""
        self.known: dict[Expr, Named] = {}

    # -- results

    def result(self, result: Result) -> Array:
        dtype = self.dtype if result.dtype is None else DTYPES[result.dtype]
        axis, branches = segments(result)
        pieces = [self._folded(indices, expr, dtype) for indices, expr in branches]
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)

    def _folded(self, indices: Sequence[Index], expr: Expr, dtype: jnp.dtype) -> Array:
        """Return an expression over all values of the indices' variables, one dim for each index."""
        if any(isinstance(i, Window) for i in indices):
            of = convolution(indices, expr, self.extents)
            if of is not None:
                return self._written_whole(of, indices).astype(dtype)
        names = tuple(n for i in indices for n in index_names(i))
        value = written(self.value(expr).expanded(names, self.extents), indices, self.extents)
        assert value.shape == tuple(index_extent(i, self.extents) for i in indices)
        return value.astype(dtype)

    def _written_whole(self, of: Convolution, indices: Sequence[Index]) -> Array:
        """Return a convolution whose result is written through windows, each of which is one of its dims."""
        value, numbers = self._convolved(of), count()
        sizes = {**self.extents, **{window_name(k): s.window.size for k, s in enumerate(of.slidings)}}
        groups = [(window_name(next(numbers)),) if isinstance(i, Window) else index_names(i) for i in indices]
        array = value.expanded([n for group in groups for n in group], sizes)
        return array.reshape([prod(sizes[n] for n in group) for group in groups])

    # -- values

    def value(self, expr: Expr) -> Named:
        """Return an expression as an array over the index variables that it depends on."""
        if expr not in self.known:
            self.known[expr] = self._value(expr)
        return self.known[expr]

    def _value(self, expr: Expr) -> Named:
        match expr:
            case Const(value):
                return Named(int(value) if value.is_integer() and abs(value) < 2**31 else value)
            case Name(name):
                return Named(_moved(jnp.arange(self.extents[name]), self.offsets.get(name, 0)), (name,))
            case Access():
                found = self.read(expr)
                return replace(found, array=jnp.asarray(found.array).astype(self.number)) if _is_half(found) else found
            case Binary(op, left, right):
                a, b = self.value(left), self.value(right)
                if op == "/":
                    return self._each(jnp.divide, [self._as_number(a), self._as_number(b)])
                return self._each({"+": jnp.add, "-": jnp.subtract, "*": jnp.multiply}[op], [a, b])
            case Call(function, args):
                values = list(map(self.value, args))
                if function in _OF_NUMBERS:
                    values = list(map(self._as_number, values))
                return self._each(FUNCTIONS[function], values, function)
            case Reduce():
                return self._reduction(expr)
            case Opaque(function, _, _, body):
                (made,), (taken,) = expr.made, expr.names
                value = self.value(body)
                others = tuple(n for n in value.dims if n != taken)
                full = value.expanded((*others, taken), self.extents)
                return Named(OPAQUE[function](full, self.extents[made]), (*others, made))
            case _:
                raise TypeError(f"{expr} cannot stand inside an expression")

    def read(self, access: Access) -> Named:
        """Return what is read of an operand, in the operand's element type."""
        return read(self.tensors[access.tensor], access.indices, self.extents)

    def _as_number(self, value: Named) -> Named:
        """Return a value as floating point numbers."""
        if not isinstance(value.array, Array):
            return replace(value, array=float(value.array))
        is_number = jnp.issubdtype(value.array.dtype, jnp.floating)
        return value if is_number else replace(value, array=value.array.astype(self.number))

    def _each(self, function: Callable[..., Array], values: Sequence[Named], name: str = "") -> Named:
        """Apply a function, perhaps that called `name`, to every position of some values."""
        dims = union(values)
        first = 1 if name == "where" else 0
        if name not in _OF_INTEGERS and any(map(_is_number, values[first:])):
            values = [
                *values[:first],
                *(self._as_number(v) if isinstance(v.array, Array) else v for v in values[first:]),
            ]
        return Named(jnp.asarray(function(*(v.ordered(dims) for v in values))), dims)

    # -- reductions

    def _reduction(self, expr: Reduce) -> Named:
        of = routed(expr, self.extents)
        if of is not None:
            return self._routed(of)
        picked = gather(expr)
        if picked is not None:
            return self._gathered(picked)
        picked = scatter(expr)
        if picked is not None and set(expr.names) <= free_variables(picked.at):
            if picked.variable not in free_variables(picked.body):
                return self._scattered(picked, expr.names)
        of_windows = convolution((), expr, self.extents)
        if of_windows is not None:
            return self._convolved(of_windows)
        expr = masked_body(expr, self.extents)
        found = self._product(expr)
        if found is not None:
            return found
        value = self.value(expr.body)
        array = jnp.asarray(value.array)
        if expr.reducer in ("sum", "prod") and array.dtype == bool:
            # Conditions count as numbers: a sum of them is no disjunction.
            array = array.astype(jnp.int64)
        axes = tuple(d for d, n in enumerate(value.dims) if n in expr.names)
        array = _REDUCERS[expr.reducer](array, axis=axes)
        return Named(self._repeated(expr, array, value.dims), tuple(n for n in value.dims if n not in expr.names))

    def _repeated(self, expr: Reduce, array: Array, dims: Sequence[str]) -> Array:
        """Return a reduction of what repeats along those of its variables that are not among `dims`."""
        times = prod(self.extents[n] for n in expr.names if n not in dims)
        return (
            array
            if times == 1 or expr.reducer in ("max", "min")
            else (array * times if expr.reducer == "sum" else array**times)
        )

    def _product(self, expr: Reduce) -> Named | None:
        """Return a sum of a product that is a matrix product, over two factors with variables of their own."""
        match expr:
            case Reduce("sum", _, Binary("*", left, right)):
                a, b = self._factor(left), self._factor(right)
            case _:
                return None
        if not isinstance(a.array, Array) or not isinstance(b.array, Array):
            return None
        own = {n for n in a.dims if self.extents[n] > 1}, {n for n in b.dims if self.extents[n] > 1}
        if not (own[0] - own[1] and own[1] - own[0] and own[0] & own[1] & {*expr.names}):
            return None
        if a.array.dtype != b.array.dtype or not jnp.issubdtype(a.array.dtype, jnp.floating):
            a, b = (self._as_number(self.value(each)) for each in (left, right))
        assert isinstance(a.array, Array)
        assert isinstance(b.array, Array)
        out = [n for n in self.extents if n in {*a.dims, *b.dims} - {*expr.names}]
        labels = {n: i for i, n in enumerate(self.extents)}
        array = jnp.einsum(
            a.array,
            [labels[n] for n in a.dims],
            b.array,
            [labels[n] for n in b.dims],
            [labels[n] for n in out],
            preferred_element_type=self.number,
        )
        return Named(self._repeated(expr, array, (*a.dims, *b.dims)), tuple(out))

    def _convolved(self, of: Convolution) -> Named:
        """Return a convolution, or its gradient by the image or the weight."""
        image, other = (
            read(self.tensors[a.tensor], a.indices, self.extents, window_name) for a in (of.image, of.other)
        )
        if jnp.asarray(image.array).dtype != jnp.asarray(other.array).dtype:
            image, other = (replace(v, array=jnp.asarray(v.array).astype(self.number)) for v in (image, other))
        return convolved(of, image, other, self.extents, self.number)

    def _factor(self, expr: Expr) -> Named:
        """Return a factor of a product; a tensor of 16 bits as it is, for the product adds up in float32."""
        return self.read(expr) if isinstance(expr, Access) else self.value(expr)

    # -- positions that integers pick

    def _place(self, at: Access, variable: str) -> tuple[Named, Array]:
        """Return the positions that integers name in this piece, and where they are in it."""
        index = self.read(at)
        local = _moved(jnp.asarray(index.array), -self.offsets.get(variable, 0))
        return replace(index, array=local), (local >= 0) & (local < self.extents[variable])

    def _gathered(self, picked: Pick) -> Named:
        """Return the body at the one position that the integers name, where that is in this piece; 0 elsewhere."""
        index, there = self._place(picked.at, picked.variable)
        table = self.read(picked.body) if isinstance(picked.body, Access) else self.value(picked.body)
        if picked.variable not in table.dims:
            return self._each(FUNCTIONS["where"], [Named(there, index.dims), table, Named(0)], "where")
        shared = [n for n in index.dims if n in table.dims]
        others = [n for n in table.dims if n not in (picked.variable, *shared)]
        ordered = table.ordered((*shared, picked.variable, *others))
        assert isinstance(ordered, Array)
        assert isinstance(index.array, Array)
        where = (*self._positions(shared, index.dims), FUNCTIONS["where"](there, index.array, 0))
        array = ordered.at[where].get(mode="promise_in_bounds", wrap_negative_indices=False)
        inside = Named(there, index.dims)
        found = Named(array.astype(self.number) if array.dtype in HALVES else array, (*index.dims, *others))
        return self._each(FUNCTIONS["where"], [inside, found, Named(0)], "where")

    def _scattered(self, picked: Pick, summed: Sequence[str]) -> Named:
        """Return the sum that adds each element of the body at the position that the integers name."""
        index, there = self._place(picked.at, picked.variable)
        body = self.value(picked.body)
        kept = [n for n in index.dims if n not in summed]
        rest = [n for n in body.dims if n not in index.dims]
        values = self._as_number(body).expanded((*index.dims, *rest), self.extents)
        size = self.extents[picked.variable]
        shape = [*(self.extents[n] for n in kept), size, *(self.extents[n] for n in rest)]
        where = (*self._positions(kept, index.dims), FUNCTIONS["where"](there, index.array, size))
        out = jnp.zeros(shape, values.dtype).at[where].add(values, mode="drop", wrap_negative_indices=False)
        return Named(out, (*kept, picked.variable, *rest))

    def _positions(self, names: Sequence[str], dims: Sequence[str]) -> list[Array]:
        """Return for each name the position along it, as an array that broadcasts over `dims`."""
        made: list[Array] = []
        for name in names:
            shape = [self.extents[n] if n == name else 1 for n in dims]
            made.append(jnp.arange(self.extents[name]).reshape(shape))
        return made

    def _routed(self, of: Routed) -> Named:
        """Return a product of rows with the weights that integers pick for them, or the gradient of the weights."""
        index, there = self._place(of.at, of.variable)
        count, rows = self.extents[of.variable], tuple(index.dims)
        place = FUNCTIONS["where"](there, index.array, count).reshape(-1)
        order = jnp.argsort(place, stable=True)
        sizes = jnp.bincount(place, length=count + 1)[:count].astype(jnp.int32)
        x = self._matrix(of.x, (rows, of.left))[order]
        if of.of_weights:
            y = self._matrix(of.w, (rows, of.right))[order]
            over = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
            made = lax.ragged_dot_general(x, y, sizes, over, preferred_element_type=self.number)
            names = (of.variable, *of.left, *of.right)
        else:
            w = self._matrix(of.w, ((of.variable,), of.left, of.right))
            made = lax.ragged_dot(x, w, sizes, preferred_element_type=self.number)
            made = FUNCTIONS["where"](there.reshape(-1, 1), made[jnp.argsort(order)], 0)
            names = (*rows, *of.right)
        return Named(made.reshape([self.extents[n] for n in names]), names)

    def _matrix(self, access: Access, groups: Sequence[Sequence[str]]) -> Array:
        """Return a tensor with one dim for each group of its variables."""
        full = self.read(access).expanded([n for group in groups for n in group], self.extents)
        return full.reshape([prod(self.extents[n] for n in group) for group in groups])


def _moved(positions: Array, offset: Array | int) -> Array:
    """Return positions moved by an offset; the same for none, so that no text adds 0."""
    return positions if isinstance(offset, int) and offset == 0 else positions + offset


def _is_half(value: Named) -> bool:
    return isinstance(value.array, Array) and value.array.dtype in HALVES


def _is_number(value: Named) -> bool:
    """Return whether a value is of floating point numbers."""
    return isinstance(value.array, float) or (
        isinstance(value.array, Array) and jnp.issubdtype(value.array.dtype, jnp.floating)
    )
