"""
Derive from a bound line (an operator's definition in the tensor description language TDL at given shapes) which index
variables may be divided among tasks, and which operands may be partial sums.

Tofu (section 4.2) finds the regions each of d workers reads by symbolic intervals (`tdl.regions`): a piece of 1/d, bare
or with a halo, or all of a dim. A variable is splittable when all its dims are of these kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from types import MappingProxyType

from unity_ir.tdl.functions import ROUNDED
from unity_ir.tdl.regions import halo, sharding_variable
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
    Index,
    Name,
    Opaque,
    Parameter,
    Reduce,
    Result,
    Var,
    Window,
    children,
    index_names,
    tensors,
)


@dataclass(frozen=True, eq=False)
class Analysis:
    """
    The ways to parallelize an operator, derived from its bound TDL line alone: which index variables can be divided
    among tasks, which dims of operands and results are then sharded, and which operands may be partial sums.
    """

    bound: Bound

    @cached_property
    def _derived(self) -> _Derivation:
        # Only windows care for sizes: without any, lines bound at other sizes are analysed once.
        bound, windows = self.bound, self.bound.has_windows
        extents = tuple((name, size if windows else 0) for name, size in bound.extents.items())
        return _derive(bound.operands, bound.results, extents, frozenset(bound.free_degrees))

    @property
    def operand_dims(self) -> Mapping[str, tuple[str | None, ...]]:
        """
        By operand name, for each dim the index variable that shards it: dividing the variable among d tasks shards the
        dim d ways.

        None where the dim cannot be sharded, such as a concatenation, or a dim indexed by two different variables. An
        operand that is never read has no entry. Given `out[m, n] = sum[k](x[m, k] * w[k, n])`, returns x: (m, k), and
        w: (k, n).
        """
        return self._derived.operand_dims

    @property
    def result_dims(self) -> tuple[tuple[str | None, ...], ...]:
        """
        For each result, and each of its dims, the index variable whose division among tasks shards the dim; None where
        the dim cannot be sharded. Given `out[m, n] = sum[k](..)`, returns ((m, n),).
        """
        return self._derived.result_dims

    @property
    def operand_halos(self) -> Mapping[str, Halos]:
        """
        By operand name, a pair (before, after) for each dim: the numbers of elements that a task also reads before and
        after its own shard when the dim is sharded, as a convolution does.

        An operand without such a halo has no entry.
        """
        return self._derived.operand_halos

    @property
    def result_halos(self) -> tuple[Halos, ...]:
        """
        For each result, a pair (before, after) for each dim: the numbers of elements before and after its own shard to
        which a task also adds when the dim is sharded, as a convolution's gradient does; () for a result without such a
        halo.
        """
        return self._derived.result_halos

    @property
    def splittable(self) -> tuple[str, ...]:
        """
        The names of the index variables that can be divided among tasks, in the order of the line: those of results'
        dims, then those that are summed over.
        """
        return self._derived.splittable

    @property
    def carriers(self) -> tuple[frozenset[str], ...]:
        """
        The minimal sets of operands that may be partial sums (addends on different devices) together, as sets of names.
        If all operands of a set are partial sums, the results are partial sums of the true results.

        The operator is linear in the operands of such a set taken together: each result is, or reads none of them.
        Given `x + y` returns `({x, y},)`; given `x * y` returns `({x}, {y})`; given `relu(x)` returns `()`.
        """
        return self._derived.carriers

    def carried(self, result: int, carriers: frozenset[str]) -> bool:
        """
        Return whether result number `result` (from 0) is a partial sum when the operands named in `carriers` are:
        whether its expression reads one of them. If not, every task computes the same result.

        `carriers` must be one of the sets of the property `carriers`.
        """
        return not carriers.isdisjoint(self._derived.tensors[result])

    @property
    def moves_data_only(self) -> bool:
        """Whether the operator does no arithmetic: every element of a result is one element of an operand."""
        return self._derived.moves_data_only

    def leading(self, index: object) -> str | None:
        """
        Return the index variable whose division shards a dim with the bound index `index`, its outermost one: given `(h
        d)`, h. None if the dim cannot be sharded; `regions.sharding_variable` says when.
        """
        return sharding_variable(_bound_index(index), self.bound.extents)


@lru_cache(maxsize=65536)
def _derive(
    operands: tuple[Parameter, ...],
    results: tuple[Result, ...],
    extents: tuple[tuple[str, int], ...],
    free: frozenset[str],
) -> _Derivation:
    return _Derivation(operands, results, MappingProxyType(dict(extents)), free)


@dataclass(frozen=True)
class _Derivation:
    """Computes the properties of a bound line that `Analysis` gives; equal lines share one."""

    operands: tuple[Parameter, ...]
    results: tuple[Result, ...]
    extents: Mapping[str, int]
    """All 0 for a line without windows."""
    free: frozenset[str]
    """Variables whose degrees are attributes."""

    @cached_property
    def operand_dims(self) -> Mapping[str, tuple[str | None, ...]]:
        dims: dict[str, list[str | None]] = {}
        for access in self.accesses:
            lead = [self.leading(i) for i in access.indices]
            old = dims.setdefault(access.tensor, lead)
            dims[access.tensor] = [a if a == b else None for a, b in zip(old, lead, strict=True)]
        return {t: tuple(v if v in self.splittable else None for v in lead) for t, lead in dims.items()}

    @cached_property
    def result_dims(self) -> tuple[tuple[str | None, ...], ...]:
        lead = [tuple(self.leading(i) for i in r.indices) for r in self.results]
        return tuple(tuple(v if v in self.splittable else None for v in dims) for dims in lead)

    @cached_property
    def operand_halos(self) -> Mapping[str, Halos]:
        found: dict[str, Halos] = {}
        for access in self.accesses:
            if any(isinstance(i, Window) for i in access.indices):
                have = found.get(access.tensor, ((0, 0),) * len(access.indices))
                need = self._halos(access.indices, self.operand_dims[access.tensor])
                found[access.tensor] = tuple((max(a, c), max(b, d)) for (a, b), (c, d) in zip(have, need, strict=True))
        return {t: halos for t, halos in found.items() if any(map(any, halos))}

    @cached_property
    def result_halos(self) -> tuple[Halos, ...]:
        found = [self._halos(r.indices, d) for r, d in zip(self.results, self.result_dims, strict=True)]
        return tuple(halos if any(map(any, halos)) else () for halos in found)

    @cached_property
    def splittable(self) -> tuple[str, ...]:
        return tuple(v for v in self.extents if self._is_splittable(v))

    @cached_property
    def carriers(self) -> tuple[frozenset[str], ...]:
        found = [
            (reads, _linear(r.expr) if r.floating else []) for r, reads in zip(self.results, self.tensors, strict=True)
        ]
        others = {p.name for p in self.operands if not p.floating}
        common = {
            s
            for _, sets in found
            for s in sets or ()
            if not s & others and all(sets is None or s in sets or not s & reads for reads, sets in found)
        }
        minimal = [s for s in common if not any(t < s for t in common)]
        return tuple(sorted(set(minimal), key=sorted))

    @cached_property
    def moves_data_only(self) -> bool:
        windows = any(isinstance(i, Window) for of in (*self.results, *self.accesses) for i in of.indices)
        return not windows and all(
            isinstance(e, Access)
            for r in self.results
            for e in (children(r.expr) if isinstance(r.expr, Cases) else (r.expr,))
        )

    # -- how

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        return tuple(a for r in self.results for a in r.accesses)

    @cached_property
    def tensors(self) -> tuple[frozenset[str], ...]:
        """Names of the tensors that each result reads."""
        return tuple(tensors(r.expr) for r in self.results)

    def leading(self, index: object) -> str | None:
        return sharding_variable(_bound_index(index), self.extents)

    def _halos(self, indices: Sequence[object], dims: Sequence[str | None]) -> Halos:
        return tuple(
            halo(_bound_index(i), v, self.extents) if v is not None else (0, 0)
            for i, v in zip(indices, dims, strict=True)
        )

    def _is_splittable(self, variable: str) -> bool:
        places = [(a.tensor, d, _bound_index(i)) for a in self.accesses for d, i in enumerate(a.indices)]
        if variable not in self.free and not any(variable in index_names(i) for _, _, i in places):
            # Nothing would say what its degree is.
            return False
        for tensor, dim, index in places:
            if variable not in index_names(index):
                continue
            if self.leading(index) != variable:
                return False
            others = [i for t, d, i in places if t == tensor and d == dim and i != index]
            if not all(self._steps_alike(i, index, variable) for i in others):
                return False
        # A diagonal: its pieces are not a grid of the operand's.
        if any(sum(variable in index_names(_bound_index(i)) for i in a.indices) > 1 for a in self.accesses):
            return False
        if any(variable in (*o.made, *o.names) for r in self.results for o in _opaque(r.expr)):
            return False
        for result in self.results:
            uses = [i for i in result.indices if variable in index_names(i)]
            if uses:
                if self.leading(uses[0]) != variable:
                    return False
            elif not result.floating or not _is_root_sum(result.expr, variable):
                return False
        return True

    def _steps_alike(self, one: Index, other: Index, variable: str) -> bool:
        """Return whether two indices of one dim read the same pieces of it, but for their halos."""
        return all(isinstance(i, Var | Window | Composite) and self.leading(i) == variable for i in (one, other))


Halos = tuple[tuple[int, int], ...]
"""Per dim, elements before and after a piece; () where there are none."""


def _bound_index(index: object) -> Index:
    assert isinstance(index, Index), index
    return index


def _opaque(expr: Expr) -> list[Opaque]:
    own = [expr] if isinstance(expr, Opaque) else []
    return own + [o for child in children(expr) for o in _opaque(child)]


def _binds(expr: Expr, variable: str) -> bool:
    own = isinstance(expr, Reduce | Opaque) and variable in expr.names
    return own or any(_binds(c, variable) for c in children(expr))


def _is_root_sum(expr: Expr, variable: str) -> bool:
    """Return whether `expr` is, up to linear operations, a sum over `variable`, so that its pieces add up to it."""
    match expr:
        case Reduce("sum", _, body):
            if variable in expr.names:
                return not _binds(body, variable)
            return _is_root_sum(body, variable)
        case Binary("+" | "-", left, right):
            return _is_root_sum(left, variable) and _is_root_sum(right, variable)
        case Binary("*", left, right):
            one = _is_root_sum(left, variable) and not _binds(right, variable)
            return one or (_is_root_sum(right, variable) and not _binds(left, variable))
        case Binary("/", left, right):
            return _is_root_sum(left, variable) and not _binds(right, variable)
        case Call("where", (condition, yes, Const(0))):
            return _is_root_sum(yes, variable) and not _binds(condition, variable)
        case Cases(branches):
            return all(_is_root_sum(e, variable) for _, e in branches)
        case _:
            return False


def _linear(expr: Expr) -> list[frozenset[str]] | None:
    """Return the sets of tensors in which `expr` is jointly linear; None for zero, which is linear in anything."""
    match expr:
        case Const(value):
            return None if value == 0 else []
        case Access(tensor, _):
            return [frozenset({tensor})]
        case Binary("+" | "-", left, right):
            return _joint((left, right))
        case Binary("*", left, right):
            return _scaled(left, right) + _scaled(right, left)
        case Binary("/", left, right):
            return _scaled(left, right)
        case Reduce("sum", _, body):
            return _linear(body)
        case Call(function, (number,)) if function == ROUNDED:
            # It is the number, as a cast is; addends are rounded, as casts round them.
            return _linear(number)
        case Call("where", (condition, yes, no)):
            joint = _joint((yes, no))
            return None if joint is None else [s for s in joint if not s & tensors(condition)]
        case Cases(branches):
            return _joint(tuple(e for _, e in branches))
        case _:
            return []


def _scaled(expr: Expr, by: Expr) -> list[frozenset[str]]:
    return [s for s in _linear(expr) or [] if not s & tensors(by)]


def _joint(terms: tuple[Expr, ...]) -> list[frozenset[str]] | None:
    """Return the unions of one linear set of each term, where every term is linear in all it reads of the union."""
    choices = [(term, found) for term in terms if (found := _linear(term)) is not None]
    if not choices:
        return None
    joint: list[frozenset[str]] = []
    for combination in product(*(found for _, found in choices)):
        union = frozenset[str]().union(*combination)
        if all(union & tensors(t) == own for (t, _), own in zip(choices, combination, strict=True)):
            joint.append(union)
    return joint


def uses_as_value(bound: Bound, variable: str) -> bool:
    """
    Return whether the bound TDL line uses the global position along the index variable called `variable` as a number,
    as a causal mask does. A task that computes only a part of that variable must then know where its part begins.
    """

    def visit(expr: Expr) -> bool:
        return expr == Name(variable) or any(map(visit, children(expr)))

    return any(visit(r.expr) for r in bound.results)
