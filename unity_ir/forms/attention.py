"""
Recognise attention and its gradients in a bound line (an operator's definition in the tensor description language TDL
at given shapes): matrix products with the softmax of scores, which are made of a matrix product.

    weights[r, c]  = exp(s[r, c] - max[c](s[r, c])) / sum[c](exp(s[r, c] - max[c](s[r, c])))
                     or exp(s[r, c] - saved[r]), where saved[r] is the logarithm of that sum, plus the maximum
    scores s[r, c] = any pointwise function of sum[e](q[r, e] * k[c, e]), masks, other reads and positions
    over columns     out[r, x] = sum[c](f(weights)[r, c] * a[c, x]), where f may be dropout
    over rows        out[c, x] = sum[r](f(weights)[r, c] * a[r, x])
    in ranges        where(or(lt(c, first[r]), ge(c, end[r])), 0, weights), with scores of -1e30 there, and saved
                     logarithms of at least -1e20 (`LEAST`)
    under a mask     scores of -1e30 where c > r, or where natural(c) > natural(r), of a sequence in striped order
                     (`Stripes`)

Rows are of queries, columns of keys, of one matrix per batch element; rows may be several variables of the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from unity_ir.forms.rewrite import canonical, map_children, reductions, rename
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Const,
    Expr,
    Name,
    Reduce,
    Result,
    Var,
    children,
    index_names,
)

LEAST = -1e20
"""The saved logarithm of a row that sees no column, where rows see ranges of columns."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """
    The columns (keys) that each row (query) of an attention line sees: those from the number that `first` reads to the
    one before that which `end` reads. All other weights are 0.
    """

    first: Access
    end: Access


@dataclass(frozen=True, slots=True)
class Stripes:
    """
    The order of the queries and keys of an attention line whose sequence is in striped order (`ops.striped`), under a
    causal mask: the sequence is stripes of `length` tokens, one after the other, each of which has one block of `block`
    tokens in each round of all stripes.
    """

    row: str
    """The queries' index variable."""
    stripes: int
    length: int
    block: int


@dataclass(frozen=True, slots=True)
class Scores:
    """
    The softmax of an attention line: its weights (expression), the scores before softmax, and the matrix product of
    queries and keys in them, with the index variables of batch, rows (queries), columns (keys) and features.
    """

    weights: Expr
    """The softmax of the scores over the columns."""
    score: Expr
    """The scores before the softmax, with mask and scale."""
    product: Reduce
    """The matrix product of queries and keys in the scores."""
    q: Access
    """The factor that is read by rows."""
    k: Access
    """The factor that is read by columns."""
    saved: Access | None
    """The read of the logarithm of every row's sum; None if the line computes it."""
    batch: tuple[str, ...]
    rows: tuple[str, ...]
    column: str
    inner: tuple[str, ...]
    """The variables that the product sums over: features of queries and keys."""
    ranges: Ranges | None = None
    """
    The range of keys that each query sees; None if the line has none, or has weights that are not 0 outside of them.
    """

    def causal_row(self) -> str | None:
        """
        Return the name of the queries' index variable in a causal mask, which hides keys at later positions than the
        query's; None if the scores have no causal mask.
        """
        match self.score:
            case Call("where", (Call("gt", (Binary("-", Name(column), Name(row)), Const(0))), Const(low), _)) if (
                column == self.column and row in self.rows and low <= -1e30
            ):
                return row
            case _:
                return None

    def stripes(self) -> Stripes | None:
        """
        Return the striped order of the queries and keys of a causal mask that compares their positions in natural
        order; None if the scores have no such mask.
        """
        match self.score:
            case Call("where", (Call("gt", (Binary("-", key, query), Const(0))), Const(low), _)) if low <= -1e30:
                of_keys, of_queries = _striped(key), _striped(query)
            case _:
                return None
        if of_keys is None or of_queries is None or of_keys.row != self.column or of_queries.row not in self.rows:
            return None
        return of_queries if replace(of_keys, row=of_queries.row) == of_queries else None

    @property
    def visible(self) -> Expr:
        """
        The expression of the scores of keys that no causal mask and no range hides; of all scores if there is neither.
        """
        return self.score if self._mask is None else self._mask.args[2]

    @property
    def scale(self) -> float | None:
        """
        The constant c if the visible scores are c times the product of queries and keys (1.0 if they are the product
        itself); None if they are any other function of it.
        """
        match self.visible:
            case Binary("*", Const(factor), product) | Binary("*", product, Const(factor)):
                return factor if product == self.product else None
            case product:
                return 1.0 if product == self.product else None

    @property
    def hidden(self) -> Expr | None:
        """
        The condition (an expression) under which the causal mask or the range of a query hides a key; None if there is
        neither.
        """
        return None if self._mask is None else self._mask.args[0]

    @property
    def _mask(self) -> Call | None:
        """The scores, as the call of `where` that hides keys; None if they are no such call."""
        masked = self.ranges is not None or self.causal_row() is not None or self.stripes() is not None
        return self.score if masked and isinstance(self.score, Call) else None


@dataclass(frozen=True, slots=True)
class AttentionSum:
    """
    One result of an attention line: the sum over columns (keys), or over rows (queries), of `factor` times `other`.
    """

    result: Result
    factor: Expr
    """A function of the weights, and perhaps of `second` and `mean` (`Attention`), for each row and column."""
    other: Access
    """The read of the tensor that `factor` is multiplied by."""
    over_columns: bool
    """Whether the sum is over the columns (keys); else it is over the rows (queries)."""
    free: tuple[str, ...]
    """The variables of the result that only `other` has: features."""


@dataclass(frozen=True, slots=True)
class Attention:
    """
    An attention line, forward or backward, taken apart: the scores, and each result as a sum over columns (keys) or
    rows (queries).
    """

    scores: Scores
    sums: tuple[AttentionSum, ...]
    logsum: Result | None
    """
    The result that saves the logarithms of the rows' sums; None if there is none. Beside it is only the forward's
    result.
    """
    second: Reduce | None
    """
    The other product of rows and columns in the factors: of the result's gradient and the values. None if no factor has
    it.
    """
    mean: Reduce | None
    """The mean of `second` over a row's weights, which a softmax's gradient subtracts. None if no factor has it."""
    mean_product: Reduce | None
    """The mean as the product of the gradient and the forward's result, if the line reads that; else None."""

    @property
    def is_forward(self) -> bool:
        """
        Whether the line computes attention itself, not a gradient: it computes the softmax (rather than reading the
        saved logarithms of its sums), and its only sum is over keys, of the weights (scaled, or with dropout) times the
        values.
        """
        one = self.sums[0]
        computed = self.scores.saved is None
        return len(self.sums) == 1 and computed and one.over_columns and _proportional(one.factor, self.scores.weights)


def attention(bound: Bound, starts: Mapping[str, str]) -> Attention | None:
    """
    Match a bound TDL line as attention or its gradients: sums over keys or queries of a tensor times the softmax of
    scores, which are a function of a product of queries and keys. Return its parts; None for any other line, and where
    there is only one query, key or feature.

    The line must be simplified (`rewrite.simplified`). `starts` maps each index variable of which a task computes only
    a part to the name of the kernel argument with the global index at which the part begins; the others begin at 0.
    """
    return _Matching(bound, starts).line()


def scores_of(bound: Bound) -> Scores | None:
    """
    Return the scores of an attention line, forward or backward: those of the first softmax in it of a function of a
    product of queries and keys. None if it has none. Unlike `attention`, this does not ask what the line makes of the
    weights. The line must be simplified.
    """
    matching = _Matching(bound, {})
    found = (matching.scores(e) for result in bound.results for e in _parts(result.expr))
    return next((scores for scores in found if scores is not None), None)


class _Matching:
    def __init__(self, bound: Bound, starts: Mapping[str, str]):
        self.bound = bound
        self.extents = bound.extents
        self.starts = starts

    def line(self) -> Attention | None:
        results = list(self.bound.results)
        scores = next((s for e in _parts(results[0].expr) if (s := self.scores(e)) is not None), None)
        if scores is None:
            return None
        if (ranges := self.ranges(scores)) is not None:
            ranged = replace(scores, ranges=ranges)
            saves = len(results) == 2 and self.is_logsum(results[1].expr, ranged)
            zero = [self.zero_outside(r.expr, scores) for r in results[: 1 if saves else None]]
            if None not in zero:
                scores = ranged
                sums = [replace(r, expr=z) for r, z in zip(results, zero, strict=False) if z is not None]
                results = [*sums, *results[len(sums) :]]
        logsum = results.pop() if len(results) == 2 and self.is_logsum(results[1].expr, scores) else None
        sums = [self.sum(r, scores) for r in results]
        found = [s for s in sums if s is not None]
        if len(found) < len(sums):
            return None
        # Kernels leave out what is hidden, so that nothing may be added up there.
        if scores.hidden is not None and not all(_vanishes(each.factor, scores.weights) for each in found):
            return None
        others: dict[Reduce, None] = {}
        for each in found:
            others.update(dict.fromkeys(_outermost(each.factor, scores.weights)))
        # Of capped scores the derivative is a function of the product, which kernels have.
        others.pop(scores.product, None)
        second = mean = product = None
        for other in others:
            if self.is_tile(other, scores) and second is None:
                second = other
            elif not self.depends(other, scores.column) and mean is None:
                mean = other
            else:
                return None
        if mean is not None:
            product = mean if self.is_row_product(mean, scores) else None
            if product is None and (second is None or not self.is_mean(mean, second, scores)):
                return None
        made = Attention(scores, tuple(found), logsum, second, mean, product)
        # A backward that does not read the logarithms runs the forward for them, which needs the values in `second`.
        if not made.is_forward and (logsum is not None or (scores.saved is None and second is None)):
            return None
        return made

    # -- scores

    def same(self, one: Expr, other: Expr) -> bool:
        return canonical(one, self.extents, self.starts)[0] == canonical(other, self.extents, self.starts)[
            0
        ] and free_variables(one) == free_variables(other)

    def scores(self, expr: Expr) -> Scores | None:
        saved = None
        match expr:
            case Binary("/", Call("exp", (top,)), Reduce("sum", (Var(),))):
                pass
            case Call("exp", (Binary("-", top, Access() as saved),)):
                pass
            case _:
                return None
        score = top
        if saved is None:
            match top:
                case Binary("-", inside, Reduce("max", (Var(),))):
                    score = inside
                case _:
                    pass
        products = reductions(score)
        if len(products) != 1:
            return None
        (product,) = products
        match product:
            case Reduce("sum", _, Binary("*", Access() as q, Access() as k)):
                pass
            case _:
                return None
        for one, other in ((q, k), (k, q)):
            made = self.apart(expr, score, product, one, other, saved)
            if made is not None and self.is_softmax(made):
                return made
        return None

    def names(self, access: Access) -> tuple[str, ...]:
        return tuple(n for i in access.indices for n in index_names(i) if self.extents[n] > 1)

    def apart(
        self, weights: Expr, score: Expr, product: Reduce, q: Access, k: Access, saved: Access | None
    ) -> Scores | None:
        """Return the scores with the variables of batch, rows, columns and features; None if they do not fit."""
        inner = tuple(n for n in product.names if self.extents[n] > 1)
        of_q, of_k = (tuple(n for n in self.names(a) if n not in inner) for a in (q, k))
        batch = tuple(n for n in of_q if n in of_k)
        rows = tuple(n for n in of_q if n not in of_k)
        columns = [n for n in of_k if n not in of_q]
        if not inner or not rows or len(columns) != 1 or len(set(self.names(q))) < len(self.names(q)):
            return None
        known = {*batch, *rows, *columns}
        if any(self.extents[n] > 1 and n not in known for n in free_variables(score)):
            return None
        if saved is not None and not set(self.names(saved)) <= {*batch, *rows}:
            return None
        if any(not set(inner) <= set(self.names(a)) for a in (q, k)):
            return None
        return Scores(weights, score, product, q, k, saved, batch, rows, columns[0], inner)

    def is_softmax(self, scores: Scores) -> bool:
        match scores.weights:
            case Binary("/", Call("exp", (top,)), below):
                column = Var(scores.column)
                if not self.same(below, Reduce("sum", (column,), Call("exp", (top,)))):
                    return False
                if top == scores.score:
                    return True
                assert isinstance(top, Binary)
                return self.same(top.right, Reduce("max", (column,), scores.score))
            case _:
                return True

    def ranges(self, scores: Scores) -> Ranges | None:
        """
        Return the ranges of keys outside of which scores are -1e30, two integers of each row by itself; None if they
        are not of that form.
        """
        match scores.score:
            case Call(
                "where",
                (
                    Call(
                        "or", (Call("lt", (Name(one), Access() as first)), Call("ge", (Name(other), Access() as end)))
                    ),
                    Const(low),
                    _,
                ),
            ) if one == other == scores.column and low <= -1e30:
                one_end, other_end = {*self.names(first)}, {*self.names(end)}
                by_rows = not one_end.isdisjoint(scores.rows) and not other_end.isdisjoint(scores.rows)
                whole = {p.name for p in self.bound.operands if p.kind == "int"} >= {first.tensor, end.tensor}
                fits = whole and by_rows and one_end | other_end <= {*scores.batch, *scores.rows}
                return Ranges(first, end) if fits else None
            case _:
                return None

    def zero_outside(self, expr: Expr, scores: Scores) -> Expr | None:
        """
        Return the expression with `weights` in the place of `where(hidden, 0, weights)`, over whichever variable of
        columns; None if it has weights, or a softmax of other scores, that are not inside of such a `where`, or none.
        """
        assert isinstance(scores.score, Call)
        hidden, weights, found = scores.score.args[0], scores.weights, 0

        def over(variable: str) -> tuple[Expr, Expr]:
            names = {scores.column: variable}
            return rename(hidden, names), rename(weights, names)

        def change(part: Expr) -> Expr:
            nonlocal found
            match part:
                case Call("where", (Call("or", (Call("lt", (Name(name), _)), _)) as condition, Const(0), inner)) if (
                    condition,
                    inner,
                ) == over(name):
                    found += 1
                    return inner
                case _:
                    return map_children(part, change)

        changed = change(expr)
        exponentials = sum(isinstance(part, Call) and part.function == "exp" for part in _parts(changed))
        own = sum(isinstance(part, Call) and part.function == "exp" for part in _parts(weights))
        return changed if found and exponentials == found * own else None

    # -- what is made of them

    def sum(self, result: Result, scores: Scores) -> AttentionSum | None:
        match result.expr:
            case Reduce("sum", _, Binary("*", left, right)) as whole:
                pass
            case _:
                return None
        if result.dtype is not None:
            return None
        names = {n for n in whole.names if self.extents[n] > 1}
        over_columns = names == {scores.column}
        if not over_columns and names != set(scores.rows):
            return None
        kept = {*scores.batch, *(scores.rows if over_columns else (scores.column,))}
        gone = {*(scores.rows if not over_columns else (scores.column,))}
        for factor, other in ((left, right), (right, left)):
            if isinstance(other, Access) and scores.weights in _parts(factor) and self.is_tiled(factor, scores):
                own = self.names(other)
                free = tuple(n for n in own if n not in gone and n not in scores.batch)
                made = [n for i in result.indices for n in index_names(i) if self.extents[n] > 1]
                fits = gone <= set(own) and not kept & set(free) and set(made) == kept | set(free) and free
                if fits and len(set(own)) == len(own):
                    return AttentionSum(result, factor, other, over_columns, free)
        return None

    def is_tiled(self, factor: Expr, scores: Scores) -> bool:
        """Return whether a factor is one number for each row and column of a batch element."""
        known = {*scores.batch, *scores.rows, scores.column}
        return all(n in known or self.extents[n] == 1 for n in free_variables(factor))

    def depends(self, expr: Expr, variable: str) -> bool:
        return variable in free_variables(expr)

    def is_tile(self, node: Reduce, scores: Scores) -> bool:
        """Return whether a reduction is a product of a factor read by rows and one read by columns."""
        match node:
            case Reduce("sum", _, Binary("*", Access() as by_rows, Access() as by_columns)):
                pass
            case _:
                return False
        names = {n for n in node.names if self.extents[n] > 1}
        for one, other in ((by_rows, by_columns), (by_columns, by_rows)):
            of_rows, of_columns = set(self.names(one)) - names, set(self.names(other)) - names
            if of_rows == {*scores.batch, *scores.rows} and of_columns == {*scores.batch, scores.column}:
                return bool(names) and names <= set(self.names(one)) and names <= set(self.names(other))
        return False

    def is_row_product(self, node: Reduce, scores: Scores) -> bool:
        match node:
            case Reduce("sum", _, Binary("*", Access() as one, Access() as other)):
                names = set(node.names)
                return all(set(self.names(a)) - names <= {*scores.batch, *scores.rows} for a in (one, other))
            case _:
                return False

    def is_mean(self, node: Reduce, second: Reduce, scores: Scores) -> bool:
        column = (Var(scores.column),)
        products = (Binary("*", *pair) for pair in ((scores.weights, second), (second, scores.weights)))
        return any(self.same(node, Reduce("sum", column, p)) for p in products)

    def is_logsum(self, expr: Expr, scores: Scores) -> bool:
        column = (Var(scores.column),)
        largest = Reduce("max", column, scores.score)
        total = Reduce("sum", column, Call("exp", (Binary("-", scores.score, largest),)))
        terms = (largest, Call("log", (total,)))
        match expr:
            case Call("maximum", (inner, Const(least))) if scores.ranges is not None and least == LEAST:
                expr = inner
            case _:
                if scores.ranges is not None:
                    return False
        return any(self.same(expr, Binary("+", *pair)) for pair in (terms, terms[::-1]))


def _striped(expr: Expr) -> Stripes | None:
    """Match the position in natural order of a token of a sequence in striped order, as simplified lines have it."""
    match expr:
        case Binary(
            "-",
            Binary("+", Name(token), Binary("*", Call("floor", (Binary("/", _, Const(block)),)), Const(skipped))),
            Binary("*", Call("floor", (Binary("/", _, Const(length)),)), _),
        ) if block >= 1:
            stripes = skipped / block + 1
        case _:
            return None
    # A half is added to whole numbers before they are divided and rounded down, against errors of rounding.
    stripe = Call("floor", (Binary("/", Binary("+", Name(token), Const(0.5)), Const(length)),))
    inside = Binary("+", Binary("-", Name(token), Binary("*", stripe, Const(length))), Const(0.5))
    rounds = Call("floor", (Binary("/", inside, Const(block)),))
    onwards = Binary("+", Name(token), Binary("*", rounds, Const(block * (stripes - 1))))
    if expr != Binary("-", onwards, Binary("*", stripe, Const(length - block))):
        return None
    return Stripes(token, int(stripes), int(length), int(block))


def _proportional(factor: Expr, weights: Expr) -> bool:
    """Return whether a factor is the weights, scaled by expressions without reductions, or 0 in places (dropout)."""

    def beside(expr: Expr) -> bool:
        return not any(isinstance(part, Reduce) for part in _parts(expr))

    match factor:
        case Binary("*", left, right) if beside(right):
            return _proportional(left, weights)
        case Binary("*", left, right) if beside(left):
            return _proportional(right, weights)
        case Binary("/", left, right) if beside(right):
            return _proportional(left, weights)
        case Call("where", (condition, yes, Const(0))) if beside(condition):
            return _proportional(yes, weights)
        case Call("where", (condition, Const(0), no)) if beside(condition):
            return _proportional(no, weights)
        case _:
            return factor == weights


def _vanishes(factor: Expr, weights: Expr) -> bool:
    """Return whether a factor is surely 0 where the weights are."""
    if factor in (weights, Const(0)):
        return True
    match factor:
        case Binary("*", left, right):
            return _vanishes(left, weights) or _vanishes(right, weights)
        case Binary("/", left, _):
            return _vanishes(left, weights)
        case Binary("+" | "-", left, right) | Call("where", (_, left, right)):
            return _vanishes(left, weights) and _vanishes(right, weights)
        case _:
            return False


def _parts(expr: Expr) -> Iterator[Expr]:
    """Yield an expression and all its subexpressions, outer ones first."""
    yield expr
    for child in children(expr):
        yield from _parts(child)


def _outermost(expr: Expr, but: Expr) -> Iterator[Reduce]:
    """Yield the outermost reductions in `expr` that are not inside of `but`."""
    if expr == but:
        return
    if isinstance(expr, Reduce):
        yield expr
        return
    for child in children(expr):
        yield from _outermost(child, but)


def split_constant(factor: Expr) -> tuple[float, Expr]:
    """
    Split a product into its constants and the rest: return (constant, rest), so that `constant * rest` equals `factor`.

    constant is the product of the nonzero constants, 1 if there are none. Constants inside a right operand that is
    itself a product stay in the rest.
    """
    match factor:
        case Binary("*", Const(value), rest) | Binary("*", rest, Const(value)) if value:
            constant, rest = split_constant(rest)
            return value * constant, rest
        case Binary("*", left, right):
            constant, left = split_constant(left)
            return constant, Binary("*", left, right)
        case _:
            return 1.0, factor
