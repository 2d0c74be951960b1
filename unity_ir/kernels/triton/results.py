"""Cut the results of a TDL line into parts that one kernel each can compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from math import prod

from unity_ir.forms.addresses import Names
from unity_ir.forms.contraction import contraction, product_factors, with_factors
from unity_ir.forms.rewrite import canonical, map_children, outermost_reductions, reductions
from unity_ir.forms.scatter import scattered
from unity_ir.forms.window_writes import writes_windows
from unity_ir.kernels.triton.launch import Buffer
from unity_ir.kernels.triton.tiling import is_split
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.element_types import FLOAT8
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import NOT_FLOATING, Access, Bound, Cases, Const, Expr, Reduce, Result, Var, accesses


class Results:
    """
    The results of a line, split into parts, each of which one kernel can compute.

    A subexpression that cannot be computed within the kernel of its result becomes a part of its own, stored in a new
    buffer: the factors of a matrix product, a matrix product inside a larger expression, a reduction inside another on
    whose variable it depends, reductions over different rows, and reductions whose rows are split over programs.
    Subexpressions that differ in the names of variables alone are computed once.

    `buffers` has the operands' buffers by name, and then those of the parts as well.
    """

    def __init__(self, bound: Bound, buffers: Mapping[str, Buffer], names: Names, starts: Mapping[str, str]):
        self.extents = bound.extents
        self._place = {name: place for place, name in enumerate(bound.extents)}
        self.buffers = dict(buffers)
        self.names = names
        self.starts = starts
        self.parts: list[tuple[Result, Buffer]] = []
        """The parts in an order in which they can be computed, with the buffers they fill."""
        self.finals: list[Buffer] = []
        """The buffers of the line's results."""
        self._computed: dict[tuple[Expr, str], tuple[str, tuple[int, ...]]] = {}
        """Buffer by canonical expression and element type, and the free variable that each of its dims is."""
        nodes = (node for result in bound.results for node in reductions(result.expr))
        self._uses = Counter(canonical(node, self.extents, starts)[0] for node in nodes)
        """Number of occurrences of each reduction in the results."""

    def add(self, result: Result, output: Buffer) -> None:
        """
        Split one result of the line into parts that one kernel each can compute, and append these to `parts`, in an
        order in which they can be computed. The last part fills `output`, the others new buffers.
        """
        expr = result.expr
        if isinstance(expr, Reduce) and self._uses[canonical(expr, self.extents, self.starts)[0]] > 1:
            result = replace(result, expr=self._without_split(expr))
        self._add(result, output)
        self.finals.append(output)

    def _add(self, result: Result, output: Buffer) -> None:
        if writes_windows(result):
            result = replace(result, expr=self._without(result.expr, outermost_reductions(result.expr)))
        elif (places := scattered(result, self.extents)) is not None and places.total is not None:
            pass
        elif self._is_product(result):
            result = self._product(result)
        else:
            expr = self._without_nested(self._without_products(result.expr))
            if isinstance(expr, Cases):
                expr = map_children(expr, self._without_reductions)
            else:
                expr = self._with_equal_rows(expr)
                # The whole expression is split over programs by its own kernel.
                whole = isinstance(expr, Reduce)
                expr = map_children(expr, self._without_split) if whole else self._without_split(expr)
            result = Result(result.name, result.indices, expr)
        self.parts.append((result, output))

    def _indices(self, expr: Expr) -> tuple[Var, ...]:
        return tuple(map(Var, sorted(free_variables(expr), key=self._place.__getitem__)))

    def _compute_before(self, expr: Expr, like: Buffer | None = None) -> Access:
        """Compute an expression in a part of its own, in the element type of `like`, else float32; return its read."""
        dtype, torch_dtype = (like.dtype, f"{like.name}.dtype") if like else ("f32", "torch.float32")
        form, free = canonical(expr, self.extents, self.starts)
        if (form, dtype) not in self._computed:
            indices = self._indices(expr)
            buffer = Buffer(self.names.new("inner"), dtype, torch_dtype)
            self._add(Result(buffer.name, indices, expr), buffer)
            self.buffers[buffer.name] = buffer
            self._computed[form, dtype] = buffer.name, tuple(free.index(i.name) for i in indices)
        name, order = self._computed[form, dtype]
        return Access(name, tuple(Var(free[k]) for k in order))

    # -- matrix products

    def _is_product(self, result: Result) -> bool:
        """Return whether the result is a matrix product once its factors are stored in tensors."""
        factors = product_factors(result.expr)
        if factors is None or any(self.buffers[a.tensor].dtype in NOT_FLOATING for a in accesses(result.expr)):
            return False
        read = {f.tensor for f in factors if isinstance(f, Access)}
        if {self.buffers[tensor].dtype for tensor in read} != {FLOAT8}:
            read |= {a.tensor for a in accesses(with_factors(result, [Const(0.0), Const(0.0)]).expr)}
        if len({self.buffers[tensor].dtype for tensor in read}) > 1:
            return False
        stand_ins = [f if isinstance(f, Access) else Access("", self._indices(f)) for f in factors]
        return contraction(with_factors(result, stand_ins), self.extents) is not None

    def _product(self, result: Result) -> Result:
        factors = product_factors(result.expr)
        assert factors is not None
        # The kernel multiplies tensors of one element type.
        given = next((self.buffers[f.tensor] for f in factors if isinstance(f, Access)), None)
        return with_factors(result, [f if isinstance(f, Access) else self._compute_before(f, given) for f in factors])

    def _without_products(self, expr: Expr) -> Expr:
        """Replace matrix products below the root by reads."""
        if isinstance(expr, Reduce) and self._is_product(Result("", self._indices(expr), expr)):
            return self._compute_before(expr)
        return map_children(expr, self._without_products)

    # -- reductions

    def _without_nested(self, expr: Expr) -> Expr:
        """Replace reductions that depend on a variable of an outer one, and what surrounds them, by reads."""
        if isinstance(expr, Reduce):
            bound = frozenset(expr.names)
            return Reduce(expr.reducer, expr.indices, self._without_dependent(self._without_nested(expr.body), bound))
        return map_children(expr, self._without_nested)

    def _without_dependent(self, expr: Expr, bound: frozenset[str]) -> Expr:
        if not any(free_variables(r) & bound for r in reductions(expr)):
            return expr
        needed = frozenset[str]().union(*(free_variables(r) for r in outermost_reductions(expr)))
        if free_variables(expr) == needed:
            return self._compute_before(expr)
        return map_children(expr, lambda child: self._without_dependent(child, bound))

    def _without_reductions(self, expr: Expr) -> Expr:
        if isinstance(expr, Reduce) and reductions(expr):
            return self._compute_before(expr)
        return map_children(expr, self._without_reductions)

    def _with_equal_rows(self, expr: Expr) -> Expr:
        """Replace reductions by reads until those left have the same rows, so that none is computed repeatedly."""
        found = {r: frozenset(n for n in free_variables(r) if self.extents[n] > 1) for r in reductions(expr)}
        rows = set(found.values())
        if len(rows) < 2:
            return expr
        # Scalars first, which are long reductions; then what has the most rows. The whole expression cannot be before.
        others = rows - {found[expr]} if isinstance(expr, Reduce) and expr in found else rows
        first = max(others, key=lambda r: (not r, prod(self.extents[n] for n in r)))
        return self._with_equal_rows(self._without(expr, {r for r, own in found.items() if own == first}))

    def _without_split(self, expr: Expr) -> Expr:
        """Replace long reductions of few rows by reads."""
        if isinstance(expr, Reduce) and gather(expr) is None and is_split(expr, self.extents):
            return self._compute_before(expr)
        return map_children(expr, self._without_split)

    def _without(self, expr: Expr, those: Container[Expr]) -> Expr:
        if expr in those:
            return self._compute_before(expr)
        return map_children(expr, lambda child: self._without(child, those))
