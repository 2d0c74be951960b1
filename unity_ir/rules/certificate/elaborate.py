"""
Elaborate both sides of a substitution from the operators' TDL lines: elements of results at symbolic positions and
sizes as terms, by substitution alone (`gradients.py` does so with their vector-Jacobian products).

Where a line joins variables to one dim, as in `out[(h d)]`, and in windows, the element at a position is the sum over
all values of the variables that lead there, so that nothing is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias

from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.certificate import terms
from unity_ir.rules.certificate.terms import (
    REDUCERS,
    Apply,
    Constraint,
    Form,
    Read,
    Refused,
    Scope,
    as_poly,
    box,
    call,
    constant,
    of_factor,
    of_poly,
    scaled,
    summed,
    times,
)
from unity_ir.rules.pattern import (
    ELEMENTS,
    AttrExpr,
    AttrParameter,
    DimPack,
    Input,
    Operation,
    Substitution,
    Term,
    attribute_expression,
)
from unity_ir.rules.poly import ONE, ZERO, Poly, exact_quotient, number, product, symbol
from unity_ir.tdl.bind import Spelled, spell
from unity_ir.tdl.element_types import holds_all
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    NOT_FLOATING,
    Access,
    Affine,
    AttrValue,
    Binary,
    Call,
    Cases,
    Composite,
    Const,
    Entry,
    Expr,
    Name,
    Pack,
    Reduce,
    Result,
    Segments,
    Size,
    Var,
    accesses,
    joined_extent,
    joined_position,
)

Position: TypeAlias = tuple[Poly, ...]

SIMPLE = 1000
"""The largest denominator of a fraction that a decimal in a line stands for."""


def _above(p: Poly) -> Constraint:
    return Constraint(p - 1)


def _below(p: Poly) -> Constraint:
    return Constraint(-p - 1)


def _zero(p: Poly) -> Constraint:
    return Constraint(p, equal=True)


def _not_below(p: Poly) -> Constraint:
    return Constraint(p)


def _not_above(p: Poly) -> Constraint:
    return Constraint(-p)


Alternatives: TypeAlias = tuple[Callable[[Poly], Constraint], ...]

COMPARISONS: Mapping[str, tuple[Alternatives, Alternatives]] = {
    "gt": ((_above,), (_not_above,)),
    "ge": ((_not_below,), (_below,)),
    "lt": ((_below,), (_not_below,)),
    "le": ((_not_above,), (_above,)),
    "eq": ((_zero,), (_above, _below)),
    "ne": ((_above, _below), (_zero,)),
}
"""
The disjoint cases in which a comparison holds, and those in which it does not, as constraints of the difference of its
operands, by its name.
"""


@dataclass(frozen=True)
class Tensor:
    """A tensor of symbolic sizes: shape, element type, and its element at a position."""

    shape: Position
    element: Callable[[Position], Form]
    dtype: str
    held: str = ""
    """An element type that holds all elements as they are; "" where they are still to be rounded to `dtype`."""
    gradient: bool = False
    """Computed from the gradient of a result: how its casts round is not part of what is checked."""


@dataclass
class Elaborator:
    """Applies operators to symbolic tensors. `facts` hold: sizes are above 0, and what lines take for granted."""

    sample: dict[str, int]
    """A size above 1 for every symbol, at which packs and variadic names are spelled out."""
    given: Mapping[str, str]
    """Values of the rule's attribute parameters that name a function."""
    facts: list[Constraint] = field(default_factory=list[Constraint])
    dtypes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Element types of the inputs of a rule that casts."""
    rounds: bool = False
    """Functions that round are unknown ones, so that equal terms round alike."""
    made: int = 0
    counts: dict[tuple[Poly, Poly], Poly] = field(default_factory=dict[tuple[Poly, Poly], Poly])
    """Numbers of windows, by (room, step)."""

    def fresh(self, stem: str) -> str:
        """Return a new symbol."""
        self.made += 1
        return f"{stem.split('#')[0]}#{self.made}"

    def at_sample(self, of: Poly) -> int:
        """Return a size at the sample. Raises `Refused` where one that is not always 1 is 1 there."""
        value = of.at(self.sample)
        if value < 2 and of.constant is None:
            raise Refused(f"size {of} is {value} at the sample, which may hide a dim; take one above 1")
        return value

    def sampled(self, value: AttrExpr) -> AttrValue:
        """Return the value of an attribute at the sample."""
        match value:
            case Poly():
                return value.at(self.sample)
            case tuple():
                return tuple(p.at(self.sample) for p in value)
            case AttrParameter(name):
                return self.given.get(name, 0.5)
            case _:
                return value

    def apply(self, name: str, operands: Sequence[Tensor], attributes: Mapping[str, AttrExpr]) -> list[Tensor]:
        """Apply an operator. Raises `Refused` for lines that terms cannot say."""
        results = self._results(name, operands, attributes)
        return [replace(r, gradient=True) for r in results] if any(t.gradient for t in operands) else results

    def _results(self, name: str, operands: Sequence[Tensor], attributes: Mapping[str, AttrExpr]) -> list[Tensor]:
        operator = find_operator(name)
        if not isinstance(operator.tdl, str):
            return [_moved(self, name, operands[0], attributes)]
        written = [i for r in operator.line.results for of in (r, *r.accesses) for i in of.indices]
        fixed = {i.permuted_by for i in written if isinstance(i, Pack) and i.permuted_by is not None}
        fixed |= {c.value.attribute for c in operator.line.clauses if c.kind == "rank" and isinstance(c.value, Entry)}
        for a in fixed & attributes.keys():
            value = attributes[a]
            if any(
                p.constant is None for p in (value if isinstance(value, tuple) else (value,)) if isinstance(p, Poly)
            ):
                raise Refused(f"{name}: {a} depends on sizes")
        shapes = [tuple(map(self.at_sample, t.shape)) for t in operands]
        values = {a: self.sampled(v) for a, v in attributes.items()}
        line = _Line(
            self, operator, spell(operator.line, shapes, values, [t.dtype for t in operands]), operands, attributes
        )
        return [line.result(r) for r in line.spelled.bound.results]

    def windows(self, room: Poly, step: Poly) -> Poly:
        """Return room // step + 1, the number of windows `step` apart in a dim with `room` beyond the first."""
        if step == ONE:
            return room + 1
        if (room, step) not in self.counts:
            y = symbol(self.fresh("y"))
            self.counts[room, step] = y
            self.sample[str(y)] = room.at(self.sample) // step.at(self.sample) + 1
            self.facts += [Constraint(room - step * (y - 1)), Constraint(step * y - 1 - room), Constraint(y - 1)]
        return self.counts[room, step]


def _moved(of: Elaborator, name: str, x: Tensor, attributes: Mapping[str, AttrExpr]) -> Tensor:
    """Apply an operator whose line is written from the sizes: pad, reshape, broadcast_grad."""
    shape = attributes.get("shape")
    if name == "pad":
        dim, before, after, interior = (_number(Entry(a), {a: ZERO, **attributes}) for a in PADDING)
        at = dim.constant
        if at is None:
            raise Refused("pad: its dim depends on sizes")
        size = before + (x.shape[at] - 1) * (interior + 1) + 1 + after

        def padded(position: Position) -> Form:
            i = of.fresh("i")
            place = _zero((interior + 1) * symbol(i) + before - position[at])
            inner = x.element((*position[:at], symbol(i), *position[at + 1 :]))
            return summed(inner, (i,), (*box(i, x.shape[at]), place))

        return replace(x, shape=(*x.shape[:at], size, *x.shape[at + 1 :]), element=padded)
    if not isinstance(shape, tuple):
        raise Refused(f"{name}: its line depends on sizes")
    if name == "reshape":
        if product(shape) != product(x.shape):
            raise Refused("reshape: not shown to keep the number of elements")

        def reshaped(position: Position) -> Form:
            old = [of.fresh("r") for _ in x.shape]
            same = _zero(_flat([symbol(i) for i in old], x.shape) - _flat(position, shape))
            inside = [c for i, size in zip(old, x.shape, strict=True) for c in box(i, size)]
            return summed(x.element(tuple(map(symbol, old))), old, (*inside, same))

        return replace(x, shape=shape, element=reshaped)
    if name != "broadcast_grad" or of.rounds:
        raise Refused(f"{name}: its line depends on sizes")
    missing = len(x.shape) - len(shape)
    spread = {*range(missing), *(d for d, new in enumerate(shape, missing) if new == ONE != x.shape[d])}
    if any(d not in spread and new != x.shape[d] for d, new in enumerate(shape, missing)):
        raise Refused("broadcast_grad: sizes differ and neither is 1")

    def unbroadcast(position: Position) -> Form:
        names = {d: of.fresh("s") for d in sorted(spread)}
        at = tuple(symbol(names[d]) if d in names else position[d - missing] for d in range(len(x.shape)))
        return summed(x.element(at), names.values(), [c for d, s in names.items() for c in box(s, x.shape[d])])

    return Tensor(shape, unbroadcast, x.dtype)


PADDING = ("dim", "before", "after", "interior")
"""The attributes of `pad`."""


def _flat(position: Sequence[Poly], shape: Sequence[Poly]) -> Poly:
    at = ZERO
    for i, size in zip(position, shape, strict=True):
        at = at * size + i
    return at


def _number(of: Entry | int, attributes: Mapping[str, AttrExpr]) -> Poly:
    if isinstance(of, int):
        return number(of)
    value = attributes[of.attribute]
    if isinstance(value, tuple) and of.at is not None:
        value = value[of.at]
    if not isinstance(value, Poly):
        raise Refused(f"attribute {of.attribute} is no number")
    return value


def _cast(of: Tensor, dtype: str) -> Tensor:
    """
    Return a tensor whose elements are cast to another element type: a function of which nothing is known, unless the
    type holds all of them. Results of arithmetic are first rounded, or wrapped around, to their own type.
    """
    steps, held = list[str](), of.held
    if of.dtype != dtype and not held:
        steps, held = [_rounded_to(of.dtype)], of.dtype
    if held and not holds_all(held, dtype):
        steps, held = [*steps, f"as {dtype}"], dtype
    if of.gradient and dtype not in NOT_FLOATING:
        steps = []

    def element(at: Position) -> Form:
        form = of.element(at)
        for step in steps:
            form = call(step, form)
        return form

    return replace(of, element=element, dtype=dtype, held=held)


INTEGERS = ("i64", "i32")


def _rounded_to(dtype: str) -> str:
    """Return the function that makes a result of arithmetic an element: rounding, or wrapping around of integers."""
    return f"{'wrapped' if dtype in INTEGERS else 'as'} {dtype}"


class _Line:
    """An operator's line, spelled out, over operands of symbolic sizes: extents of its variables, and its results."""

    def __init__(
        self,
        of: Elaborator,
        operator: Operator,
        spelled: Spelled,
        operands: Sequence[Tensor],
        attributes: Mapping[str, AttrExpr],
    ):
        self.of, self.spelled, self.name = of, spelled, operator.name
        defaults = {a.name: attribute_expression(a.default) for a in operator.line.attributes if a.default is not None}
        self.attributes: Mapping[str, AttrExpr] = {**defaults, **attributes}
        self.tensors = {p.name: t for p, t in zip(spelled.bound.operands, operands, strict=True)}
        self.dtype = next((t.dtype for t in operands if t.dtype not in NOT_FLOATING), "f64")
        self.extents: dict[str, Poly] = {v: _number(size, self.attributes) for v, size in spelled.sizes.items()}
        self.integer = False
        self._solve()

    def _solve(self) -> None:
        """Find the extents of all variables. Raises `Refused` where they do not follow for all sizes."""
        reads = [a for r in self.spelled.bound.results for a in r.accesses]
        places = [(i, s) for a in reads for i, s in zip(a.indices, self.tensors[a.tensor].shape, strict=True)]
        for index, size in places:
            if isinstance(index, Var) and self.extents.setdefault(index.name, size) != size:
                raise Refused(f"{self.name}: {index.name} is {size} and {self.extents[index.name]}")
        for index, size in places:
            if isinstance(index, Composite):
                unknown = [n for n in index.names if n not in self.extents]
                known = product([self.extents[n] for n in index.names if n in self.extents])
                quotient = exact_quotient(size, known)
                if quotient is None or len(unknown) > 1 or (not unknown and quotient != ONE):
                    raise Refused(f"{self.name}: {size} is not {known} times an extent")
                self.extents |= dict.fromkeys(unknown, quotient)
            elif isinstance(index, Affine):
                self._window(index, size)
        for name, size in self.spelled.bound.extents.items():
            if size == 1:
                self.extents.setdefault(name, ONE)

    def _window(self, index: Affine, size: Poly) -> None:
        terms, offset = self.terms(index)
        unknown = [(c, v) for c, v in terms if v not in self.extents]
        reach = sum((c * (self.extents[v] - 1) for c, v in terms if v in self.extents), ZERO)
        before, within = _never_below_zero(-offset), _never_below_zero(offset)
        if len(unknown) > 1 or not (before or within or not unknown):
            raise Refused(f"{self.name}: a window's extent does not follow")
        if not (before or within):
            return
        padding = -offset - offset if before else -offset
        if unknown:
            ((step, variable),) = unknown
            self.extents[variable] = self.of.windows(size + padding - 1 - reach, step)
        else:
            # Where the line applies at all, windows end in the dim, or in the padding behind it.
            self.of.facts.append(Constraint(size - 1 + padding - reach))

    def terms(self, index: Affine) -> tuple[list[tuple[Poly, str]], Poly]:
        """Return the (factor, variable) pairs of a window, and its offset."""
        found: list[tuple[Poly, str]] = []
        offset = ZERO
        for term in index.terms:
            factor, variable = _number(term.factor, self.attributes) * term.sign, term.variable
            if variable is not None and variable not in self.attributes:
                found.append((factor, variable))
            else:
                offset = offset + (factor if variable is None else factor * _number(Entry(variable), self.attributes))
        return found, offset

    def reached(self, index: Affine, where: Mapping[str, Poly]) -> Poly:
        """Return the position of a window."""
        terms, at = self.terms(index)
        return sum((factor * where[variable] for factor, variable in terms), at)

    def result(self, result: Result) -> Tensor:
        """Return a result of the line."""
        shape = tuple(
            _number(self.spelled.windows[i], self.attributes)
            if isinstance(i, Affine)
            else joined_extent(i, self.extents)
            for i in result.indices
        )
        dtype = result.dtype or self.dtype
        branches = [e for _, e in result.expr.branches] if isinstance(result.expr, Cases) else [result.expr]
        read = {self.tensors[e.tensor] for e in branches if isinstance(e, Access)}
        whole = Tensor(shape, lambda at: self.element(result, at), dtype)
        if len(branches) == len(read) == 1:
            (source,) = read
            held = "" if any(isinstance(i, Affine) for i in result.indices) else source.held
            return _cast(replace(whole, dtype=source.dtype, held=held, gradient=source.gradient), dtype)
        if any(t.dtype != dtype for t in read):
            raise Refused(f"{self.name}: some of its values are cast")
        picked = gather(result.expr) if isinstance(result.expr, Reduce) else None
        body = None if picked is None else picked.body
        moved = isinstance(body, Access) and self.tensors[body.tensor].held == dtype
        held = dtype if dtype == "bool" or moved else ""
        return replace(whole, held=held)

    def element(self, result: Result, at: Position) -> Form:
        """Return the element of a result at a position: the sum over all values of its variables that lead there."""
        # Sums and products of integers may wrap around once, in the end.
        self.integer = (result.dtype or self.dtype) in INTEGERS
        where = {i.name: p for i, p in zip(result.indices, at, strict=True) if isinstance(i, Var)}
        bound: list[str] = []
        domain: list[Constraint] = []
        segment: tuple[Segments, Poly] | None = None
        for index, position in zip(result.indices, at, strict=True):
            if isinstance(index, Segments):
                segment = index, position
            elif not isinstance(index, Var):
                if self.of.rounds and isinstance(index, Affine):
                    raise Refused(f"{self.name}: in which order its sums round is not known")
                names = index.names if isinstance(index, Composite) else [v for _, v in self.terms(_affine(index))[0]]
                for name in names:
                    if name not in where:
                        bound.append(self.of.fresh(name))
                        where[name] = symbol(bound[-1])
                        domain += box(bound[-1], self.extents[name])
                joined = isinstance(index, Composite)
                reached = joined_position(index, self.extents, where.__getitem__) if joined else ZERO
                domain.append(_zero((reached if joined else self.reached(_affine(index), where)) - position))
        if segment is None or not isinstance(result.expr, Cases):
            return summed(self.form(result.expr, where), bound, domain)
        out: Form = ()
        start = ZERO
        for variable, expr in result.expr.branches:
            within = segment[1] - start
            inside = (Constraint(within), Constraint(self.extents[variable] - 1 - within))
            out += summed(self.form(expr, {**where, variable: within}), bound, (*domain, *inside))
            start = start + self.extents[variable]
        return out

    def form(self, expr: Expr, where: Mapping[str, Poly]) -> Form:
        """Return the value of an expression with its variables at positions."""
        match expr:
            case Access(tensor, indices):
                return self._access(tensor, indices, where)
            case Const(value):
                return constant(_fraction(value))
            case Name(name):
                return of_poly(where[name]) if name in where else self._attribute(name)
            case Size(indices):
                return of_poly(product(joined_extent(i, self.extents) for i in indices))
            case Binary(op, left, right):
                if op == "/" and self._wraps(expr):
                    raise Refused(f"{self.name}: its integers may have wrapped around")
                a, b = self.form(left, where), self.form(right, where)
                if self.of.rounds and (as_poly(a) is None or as_poly(b) is None):
                    return _rounded(op, a, b)
                if op in "+-":
                    return (*a, *(b if op == "+" else scaled(b, -1)))
                return terms.product(a, b if op == "*" else call("recip", b))
            case Call("where", (condition, yes, no)):
                holds, fails = self._condition(condition, where)
                chosen = (*times(holds, self.form(yes, where)), *times(fails, self.form(no, where)))
                return (*chosen, *terms.computed(holds))
            case Call(function, args):
                rounds = self.of.rounds and function not in EXACT
                return call(f"{function}'" if rounds else function, *(self._stored(a, where) for a in args))
            case Reduce(reducer, _, body):
                if reducer != "sum" and self._wraps(body):
                    raise Refused(f"{self.name}: its integers may have wrapped around")
                return self._reduce(reducer, expr, body, where)
            case _:
                raise Refused(f"{self.name}: terms cannot say {type(expr).__name__.lower()}")

    def _stored(self, expr: Expr, where: Mapping[str, Poly]) -> Form:
        """Return an argument of a function, which sees what integers' arithmetic has made after it has wrapped."""
        if isinstance(expr, Access):
            return self._access(expr.tensor, expr.indices, where, wraps=True)
        if self._wraps(expr):
            raise Refused(f"{self.name}: its integers may have wrapped around")
        return self.form(expr, where)

    def _wraps(self, expr: Expr) -> bool:
        """Return whether an expression reads what integers' arithmetic has made, and does not wrap it."""
        return self.integer and any(_unwrapped(self.tensors[a.tensor]) for a in accesses(expr))

    def _access(self, tensor: str, indices: Sequence[object], where: Mapping[str, Poly], wraps: bool = False) -> Form:
        of = self.tensors[tensor]
        position: list[Poly] = []
        guards: list[Constraint] = []
        for index, size in zip(indices, of.shape, strict=True):
            match index:
                case Var(name):
                    position.append(where.get(name, ZERO) if self.extents[name] == ONE else where[name])
                case Composite() | Segments():
                    position.append(joined_position(index, self.extents, where.__getitem__))
                case _:
                    position.append(self.reached(_affine(index), where))
                    guards += [Constraint(position[-1]), Constraint(size - 1 - position[-1])]
        found = of.element(tuple(position))
        if _unwrapped(of) and (wraps or not self.integer):
            found = call(_rounded_to(of.dtype), found)
        return summed(found, (), guards)

    def _attribute(self, name: str) -> Form:
        value = self.attributes.get(name)
        match value:
            case Poly():
                return of_poly(value)
            case AttrParameter(parameter):
                return of_factor(Read(f"${parameter}", ()))
            case int() | float():
                return constant(_fraction(value))
            case _:
                raise Refused(f"{self.name}: attribute {name} is no number")

    def _condition(self, expr: Expr, where: Mapping[str, Poly]) -> tuple[Form, Form]:
        """
        Return a condition as 1 where it holds and 0 elsewhere, and the opposite; guards if it is on indices, else `if`
        and `if not`, which mark what is computed in one branch only.
        """
        if isinstance(expr, Call) and expr.function in COMPARISONS:
            left, right = (self._stored(a, where) for a in expr.args)
            difference = as_poly((*left, *scaled(right, -1)))
            if difference is not None:
                yes, no = (
                    tuple(m for c in cases for m in summed(constant(1), (), (c(difference),)))
                    for cases in COMPARISONS[expr.function]
                )
                return yes, no
        return call("if", self.form(expr, where)), call("if not", self.form(expr, where))

    def _reduce(self, reducer: str, expr: Reduce, body: Expr, where: Mapping[str, Poly]) -> Form:
        names = {name: self.of.fresh(name) for name in expr.names}
        inner = {**where, **{name: symbol(new) for name, new in names.items()}}
        domain = [c for name, new in names.items() for c in box(new, self.extents[name])]
        # A reduction passes over the positions at which a window of its body lies outside.
        for access in accesses(body):
            for index, size in zip(access.indices, self.tensors[access.tensor].shape, strict=True):
                if isinstance(index, Affine):
                    variables = {v for _, v in self.terms(index)[0]}
                    if variables & names.keys() and variables <= inner.keys():
                        at = self.reached(index, inner)
                        domain += [Constraint(at), Constraint(size - 1 - at)]
        found = self.form(body, inner)
        if self.of.rounds and reducer in ("sum", "prod") and gather(expr) is None:
            # Rows first is another order than columns first.
            order = call("in order", *(of_poly(inner[name]) for name in expr.names))
            body_ = times(order, found) if len(names) > 1 else found
            return of_factor(Apply(f"{reducer}'", (Scope(tuple(names.values()), frozenset(domain), body_),)))
        if reducer == "sum":
            return summed(found, names.values(), domain)
        if reducer not in REDUCERS:
            raise Refused(f"{self.name}: terms cannot say {reducer}")
        return of_factor(Apply(reducer, (Scope(tuple(names.values()), frozenset(domain), found),)))


def _unwrapped(of: Tensor) -> bool:
    return of.dtype in INTEGERS and not of.held


def _never_below_zero(of: Poly) -> bool:
    """Return whether a number is 0 or above for all sizes, which are above 0."""
    return all(c > 0 for m, c in of.terms if m) and of.at(dict.fromkeys(of.symbols, 1)) >= 0


def _affine(index: object) -> Affine:
    if not isinstance(index, Affine):
        raise Refused(f"{index} is no index")
    return index


EXACT = ("relu", "abs", "maximum", "minimum", "floor", "gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not", "where")
"""Functions that do not round, whose axioms hold to the last bit."""


def _rounded(op: str, left: Form, right: Form) -> Form:
    """Return arithmetic that rounds as an unknown function, but for adding 0 and multiplying by 1 or -1."""
    if op == "-":
        op, right = "+", scaled(right, -1)
    units = {constant(1): 1, constant(-1): -1}
    if op == "+" and not (left and right):
        return left or right
    if op == "*" and left in units:
        return scaled(right, units[left])
    if op in "*/" and right in units:
        return scaled(left, units[right])
    return call(op, left, right)


def _fraction(value: float) -> Fraction:
    simple = Fraction(value).limit_denominator(SIMPLE)
    return simple if float(simple) == value else Fraction(repr(float(value)))


# --- sides and gradients ---------------------------------------------------------------------------------------------


def named(name: str, shape: Position, dtype: str) -> Tensor:
    """Return the symbolic tensor of an input; one of conditions has elements that are 0 or 1."""

    def element(at: Position) -> Form:
        value = of_factor(Read(name, at))
        return call("as bool", value) if dtype == "bool" else value

    return Tensor(shape, element, dtype, dtype)


def inputs(rule: Substitution, ranks: Mapping[str, int], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the rule's inputs as symbolic tensors, each pack as `ranks[pack]` dims."""
    found: dict[str, Tensor] = {}
    for i in rule.inputs:
        shape: list[Poly] = []
        for size in i.shape:
            if isinstance(size, DimPack):
                shape += [symbol(f"{size.name}.{d}") for d in range(ranks[size.name])]
            else:
                shape.append(size)
        found[i.name] = named(i.name, tuple(shape), dtypes.get(i.name, ELEMENTS[i.elements][0]))
    return found


def fixed(operation: Operation, ranks: Mapping[str, int]) -> dict[str, AttrExpr]:
    known = {f"#{p}": number(rank) for p, rank in ranks.items()}

    def value(of: AttrExpr) -> AttrExpr:
        if isinstance(of, tuple):
            return tuple(p.substitute(known) for p in of)
        return of.substitute(known) if isinstance(of, Poly) else of

    return {name: value(of) for name, of in operation.attributes}


Made: TypeAlias = dict[object, Tensor]


def key_of(term: Term) -> object:
    """Return the key of a term in what `side_of` makes."""
    return term.name if isinstance(term, Input) else (id(term.operation), term.index)


def side_of(of: Elaborator, rule: Substitution, side: tuple[Term, ...], ranks: Mapping[str, int]) -> Made:
    """Return the inputs, and the results of all operations of a side."""
    made: Made = {**inputs(rule, ranks, of.dtypes)}
    for operation in rule.operations(side):
        operands = [made[key_of(t)] for t in operation.operands]
        if operation.op not in PARALLEL_OPERATORS:
            operands = of.apply(operation.op, operands, fixed(operation, ranks))
        made |= {(id(operation), n): t for n, t in enumerate(operands)}
    return made


def values(of: Elaborator, rule: Substitution, ranks: Mapping[str, int]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """
    Yield each pair of results that have to be equal (and to round alike, if `of` rounds): a name, the source's, the
    target's.
    """
    source, target = (side_of(of, rule, side, ranks) for side in (rule.source, rule.target))
    for n, (a, b) in enumerate(zip(rule.source, rule.target, strict=True)):
        yield f"{'rounded ' if of.rounds else ''}result {n}", source[key_of(a)], target[key_of(b)]
