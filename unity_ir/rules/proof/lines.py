"""
What a line of TDL says, as forms: tensors are functions from symbolic indices to forms, for all sizes at once.

A line is spelled out at sample sizes, which settle ranks and the number of variadic operands; its index variables then
get symbolic extents from the operands' symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Operator
from unity_ir.rules.pattern import Attribute, Parameter
from unity_ir.rules.poly import ONE, ZERO, Poly, number, product, symbol
from unity_ir.rules.proof.dims import dim_size, given_number
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.forms import (
    REAL,
    Apply,
    Bound,
    Constraint,
    Extreme,
    Form,
    Mono,
    Read,
    apply,
    as_poly,
    box,
    constant,
    fresh,
    guarded,
    of_poly,
    scaled,
    summed,
    times,
)
from unity_ir.rules.proof.normal import CONDITIONS
from unity_ir.rules.proof.tensors import PADDING, Position, Tensor, Undivided, divided, padded, reshaped, unbroadcast
from unity_ir.tdl import syntax
from unity_ir.tdl.bind import Spelled, spell
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
    Segments,
    Size,
    Var,
    WrittenIndex,
    accesses,
    joined_position,
)
from unity_ir.tdl.syntax import Reduce as ReduceExpr


@dataclass
class Lines:
    """Applies lines. `sample` has a value for every symbol, at which lines are spelled out."""

    sample: dict[str, int]
    given: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    """Values of attributes that a match gives: one each for those that name functions, any for numbers."""
    assumed: list[Constraint] = field(default_factory=list[Constraint])
    """What holds of the symbols this introduces, such as the number of windows that fit into a dim."""
    counts: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])
    digits: dict[tuple[Poly, Poly], tuple[Poly, Poly]] = field(
        default_factory=dict[tuple[Poly, Poly], tuple[Poly, Poly]]
    )
    """Positions in dims of several variables, by what they are divided by: quotient and remainder."""
    splits: dict[Poly, Poly] = field(default_factory=dict[Poly, Poly])
    """Sizes whose indices are made as quotient and remainder by another."""
    sizes: dict[Poly, Poly] = field(default_factory=dict[Poly, Poly])
    """The size of the dim each index runs over."""
    rounds: bool = True
    """
    Casts that may change a number are functions of which nothing is known; otherwise casts to floating point are the
    identity.
    """
    exact: bool = False
    """Additions, products and sums are functions of which nothing is known, so that equal forms round alike."""

    def index(self, stem: str, size: Poly) -> tuple[Poly, list[str], list[Constraint]]:
        """An index that runs over a dim: its position, its symbols, and their constraints."""
        inner = self.splits.get(size)
        outer = None if inner is None else divided(size, inner)
        if inner is None or outer is None or inner == size:
            name = fresh(stem)
            self.sizes[symbol(name)] = size
            if inner == size:
                self.digits[symbol(name), size] = (ZERO, symbol(name))
            return symbol(name), [name], list(box(name, size))
        quotient, names, within = self.index(stem, outer)
        remainder, more, also = self.index(stem, inner)
        position = quotient * inner + remainder
        self.digits[position, inner] = (quotient, remainder)
        return position, [*names, *more], [*within, *also]

    def multiple_and_rest(self, position: Poly, inner: Poly) -> tuple[Poly, Poly] | None:
        """
        Quotient and remainder of `multiple * inner + index`, where the index runs over a dim of size `inner`.

        Given c + i by c with i below c, returns 1 and i.
        """
        rest = Poly(tuple(t for t in position.terms if divided(Poly((t,)), inner) is None))
        multiple = divided(position - rest, inner)
        return (multiple, rest) if multiple is not None and self.sizes.get(rest) == inner else None

    def apply(self, name: str, operands: Sequence[Tensor], attributes: Mapping[str, Attribute]) -> list[Tensor]:
        """
        The results of an operator. Raises `Undecided` for what forms cannot say, `UnityError` where it does not apply.
        """
        operator = find_operator(name)
        results = self._results(operator, operands, attributes)
        return [replace(r, gradient=True) for r in results] if any(t.gradient for t in operands) else results

    def _results(
        self, operator: Operator, operands: Sequence[Tensor], attributes: Mapping[str, Attribute]
    ) -> list[Tensor]:
        name = operator.name
        if not isinstance(operator.tdl, str):
            return [self._moved(name, operands[0], attributes)]
        for clause in operator.line.clauses:
            given = attributes.get(clause.value.attribute) if isinstance(clause.value, Entry) else None
            if clause.kind == "rank" and isinstance(given, Poly) and given.constant is None:
                raise Undecided(f"{name}: {given} says which dims there are, but depends on sizes")
        shapes = [tuple(s.at(self.sample) for s in t.shape) for t in operands]
        values = {a: self._sample(v) for a, v in attributes.items()}
        spelled = spell(operator.line, shapes, values, [t.dtype for t in operands])
        return Line(self, operator, spelled, operands, attributes).results()

    def _moved(self, name: str, of: Tensor, attributes: Mapping[str, Attribute]) -> Tensor:
        """The result of an operator whose line is written from the sizes."""
        match name, attributes.get("shape"):
            case "pad", _:
                dim, before, after, interior = (_as_number(n, attributes.get(n, ZERO)) for n in PADDING)
                return padded(of, dim, before, after, interior)
            case "reshape", tuple() as shape:
                return reshaped(of, shape, self.digits)
            case "broadcast_grad", tuple() as shape:
                return unbroadcast(of, shape)
            case _:
                raise Undecided(f"the line of {name} depends on the sizes")

    def _sample(self, value: Attribute) -> AttrValue:
        match value:
            case Poly():
                return value.at(self.sample)
            case tuple():
                return tuple(p.at(self.sample) for p in value)
            case Parameter(name):
                return self.given[name]
            case _:
                return value

    def count(self, size: Poly, before: Poly, step: Poly, reach: Poly) -> Poly:
        """
        How many windows fit: the y with `step * (y - 1) + reach < size + before <= step * y + reach`.

        `before` is what padding adds on both sides together, `reach` how far one window extends.
        """
        room = size + before - 1 - reach
        if step.constant == 1:
            return room + 1
        key = (room, step)
        if key not in self.counts:
            name = fresh("y")
            self.counts[key] = name
            y = symbol(name)
            self.sample[name] = room.at(self.sample) // step.at(self.sample) + 1
            self.assumed += [Constraint(room - step * (y - 1)), Constraint(step * y - 1 - room), Constraint(y - 1)]
        return symbol(self.counts[key])


class Line:
    """A line applied to tensors."""

    def __init__(
        self,
        lines: Lines,
        operator: Operator,
        spelled: Spelled,
        operands: Sequence[Tensor],
        attributes: Mapping[str, Attribute],
    ):
        self.lines = lines
        self.spelled = spelled
        self.name = operator.name
        kinds = zip(spelled.bound.operands, operator_parameters(operator.line, spelled.bound), operands, strict=True)
        self.dtype = next((t.dtype for p, of_any, t in kinds if p.floating or of_any), "f64")
        """The element type of results that do not say theirs."""
        self.tensors = {p.name: t for p, t in zip(spelled.bound.operands, operands, strict=True)}
        defaults = {a.name: a.default for a in operator.line.attributes if a.default is not None}
        self.attributes: dict[str, Attribute] = {}
        for name, value in {**defaults, **attributes}.items():
            self.attributes[name] = _as_attribute(value)
        self.extents = self._extents()
        self.divided: dict[str, tuple[Poly, Poly]] = {}
        """Reduced variables of which only a piece is taken: which one, and of what size."""

    # -- sizes

    def _number(self, of: Entry | int) -> Poly:
        return given_number(of, self.attributes)

    def _terms(self, index: Affine) -> tuple[list[tuple[Poly, str]], Poly]:
        """Factors and variables of a window, and its offset."""
        found: list[tuple[Poly, str]] = []
        offset = ZERO
        for term in index.terms:
            factor, variable = self._number(term.factor), term.variable
            if variable in self.attributes:
                factor, variable = factor * self._number(Entry(str(variable))), None
            if variable is None:
                offset = offset + factor * term.sign
            else:
                found.append((factor, variable))
        return found, offset

    def _extents(self) -> dict[str, Poly]:
        extents: dict[str, Poly] = {v: self._number(of) for v, of in self.spelled.sizes.items()}
        places: list[tuple[str, object, Poly]] = []
        for result in self.spelled.bound.results:
            for access in accesses(result.expr):
                shape = self.tensors[access.tensor].shape
                places += [(access.tensor, i, s) for i, s in zip(access.indices, shape, strict=True)]
        for tensor, index, size in places:
            if isinstance(index, Var):
                self._set(extents, index.name, size, tensor)
        for tensor, index, size in places:
            if isinstance(index, Composite):
                self._composite(extents, index, size, tensor)
            elif isinstance(index, Affine):
                self._window(extents, index, size)
        for name, size in self.spelled.bound.extents.items():
            # A dim of size 1 that is read at its only position.
            extents.setdefault(name, number(size)) if size == 1 else None
        return extents

    def _set(self, extents: dict[str, Poly], name: str, size: Poly, where: str) -> None:
        old = extents.setdefault(name, size)
        if old != size:
            raise UnityError(f"{self.name}: index {name} is {old} and, in {where}, {size}; they must be the same")

    def _composite(self, extents: dict[str, Poly], index: Composite, size: Poly, tensor: str) -> None:
        unknown = [n for n in index.names if n not in extents]
        known = product(extents[n] for n in index.names if n in extents)
        if not unknown:
            if known != size:
                raise UnityError(f"{self.name}: {tensor} has a dim of {size}, which {known} does not fill")
            return
        quotient = divided(size, known)
        if len(unknown) > 1 or quotient is None:
            raise Undecided(f"{self.name}: {size} is not written as a product with {known}")
        extents[unknown[0]] = quotient

    def _window(self, extents: dict[str, Poly], index: Affine, size: Poly) -> None:
        terms, offset = self._terms(index)
        unknown = [(c, v) for c, v in terms if v not in extents]
        if len(unknown) > 1:
            raise Undecided(f"{self.name}: a window has several indices of unknown size")
        reach = ZERO
        for c, v in terms:
            if v in extents:
                reach = reach + c * (extents[v] - 1)
        before = _is_padding(offset)
        if before is None and not unknown:
            return
        if before is None:
            raise Undecided(f"{self.name}: a window begins at {offset}, before the dim or in it")
        padding = -offset - offset if before else -offset
        if not unknown:
            # Where the line applies at all, windows end in the dim, or in the padding behind it.
            self.lines.assumed.append(Constraint(size - 1 + padding - reach))
            return
        ((factor, variable),) = unknown
        extents[variable] = self.lines.count(size, padding, factor, reach)

    # -- results

    def results(self) -> list[Tensor]:
        """The tensors it makes."""
        return [self._result(r) for r in self.spelled.bound.results]

    def _result(self, result: syntax.Result) -> Tensor:
        shape = tuple(self._extent(i) for i in result.indices)

        def element(at: Position) -> Form:
            return self._element(result, at)

        if isinstance(result.expr, Access) and result.dtype is not None:
            source = self.tensors[result.expr.tensor]
            made = Tensor(shape, element, source.dtype, source.stored)
            return converted(made, result.dtype, self.lines.rounds and not source.gradient)
        dtype = result.dtype or self.dtype
        stored = dtype == "bool" or (dtype == self.dtype and self._selects(result.expr))
        return Tensor(shape, element, dtype, stored)

    def _selects(self, expr: Expr) -> bool:
        """Whether every element is an element of an operand as it is stored, a negated one, or a small number."""
        match expr:
            case Access(tensor):
                return self.tensors[tensor].stored
            case Const(value):
                return value in (0, 1, -1)
            case Cases(branches):
                return all(self._selects(e) for _, e in branches)
            case Call(function, _) if function in CONDITIONS:
                return True
            case Call("where", (_, yes, no)):
                return self._selects(yes) and self._selects(no)
            case Call("relu" | "maximum" | "minimum" | "abs", args) if self.dtype not in NOT_FLOATING:
                return all(map(self._selects, args))
            case ReduceExpr("max" | "min", _, body):
                return self._selects(body)
            case ReduceExpr("sum", _, _):
                picked = gather(expr)
                return picked is not None and self._selects(picked.body)
            case _:
                return False

    def _extent(self, index: WrittenIndex) -> Poly:
        return dim_size(index, self.extents, self.spelled, self.attributes)

    def _element(self, result: syntax.Result, at: Position) -> Form:
        where: dict[str, Poly] = {}
        guards: list[Constraint] = []
        bound: list[str] = []
        segment: tuple[tuple[str, ...], Poly] | None = None
        for index, position in zip(result.indices, at, strict=True):
            match index:
                case Var(name):
                    where[name] = position
                case Composite(names):
                    where |= self._digits(names, position)
                case Segments(names):
                    segment = (names, position)
                case _:
                    terms, offset = self._terms(index)  # pyright: ignore[reportArgumentType]
                    reached = offset
                    for factor, variable in terms:
                        if variable not in where:
                            where[variable], own, within = self.lines.index(variable, self.extents[variable])
                            bound += own
                            guards += within
                        reached = reached + factor * where[variable]
                    guards.append(Constraint(reached - position, equal=True))
        if segment is not None and isinstance(result.expr, Cases):
            return self._segments(result.expr, segment, where)
        return summed(self._form(result.expr, where), tuple(bound), guards)

    def _segments(self, cases: Cases, segment: tuple[tuple[str, ...], Poly], where: Mapping[str, Poly]) -> Form:
        _, position = segment
        out: list[Mono] = []
        start = ZERO
        for variable, expr in cases.branches:
            end = start + self.extents[variable]
            inside = (Constraint(position - start), Constraint(end - 1 - position))
            out += guarded(self._form(expr, {**where, variable: position - start}), inside)
            start = end
        return tuple(out)

    def _digits(self, names: Sequence[str], position: Poly) -> dict[str, Poly]:
        """The variables of a dim from a position in it."""
        if len(names) == 1:
            return {names[0]: position}
        inner = product(self.extents[n] for n in names[1:])
        found = self.lines.digits.get((position, inner)) or self.lines.multiple_and_rest(position, inner)
        if found is None:
            raise Undivided(position, inner)
        quotient, remainder = found
        return {names[0]: quotient, **self._digits(names[1:], remainder)}

    # -- expressions

    def _form(self, expr: Expr, where: Mapping[str, Poly]) -> Form:
        match expr:
            case Const(value):
                return constant(Fraction(value).limit_denominator(10**12) if value == int(value) else Fraction(value))
            case Name(name):
                return of_poly(where[name]) if name in where else self._attribute(name)
            case Size(indices):
                return of_poly(product(self._extent(i) for i in indices))
            case Access():
                return self._access(expr, where)
            case Binary(op, left, right):
                return self._binary(op, self._form(left, where), self._form(right, where))
            case Call("where", (condition, yes, no)):
                return self._where(condition, self._form(yes, where), self._form(no, where), where)
            case Call(function, args):
                arguments = tuple(self._form(a, where) for a in args)
                if self.lines.exact and function == "exp":
                    # As a product of exponentials it would round otherwise.
                    return (Mono(Fraction(1), (), frozenset(), (Apply(function, arguments),)),)
                return apply(function, arguments)
            case ReduceExpr():
                return self._reduce(expr, where)
            case _:
                raise Undecided(f"{self.name}: forms cannot say {type(expr).__name__.lower()}")

    def _attribute(self, name: str) -> Form:
        value = self.attributes.get(name)
        match value:
            case Poly():
                return of_poly(value)
            case Parameter(parameter):
                return of_poly(symbol(REAL + parameter))
            case int() | float():
                return constant(Fraction(value))
            case _:
                raise Undecided(f"{self.name}: attribute {name} is no number")

    def _access(self, access: Access, where: Mapping[str, Poly]) -> Form:
        tensor = self.tensors[access.tensor]
        position: list[Poly] = []
        guards: list[Constraint] = []
        for index, size in zip(access.indices, tensor.shape, strict=True):
            match index:
                case Var(name):
                    position.append(where.get(name, ZERO) if self.extents[name] == ONE else where[name])
                case Composite(names):
                    at = joined_position(index, self.extents, where.__getitem__)
                    self._remember(names, at, where)
                    position.append(at)
                case Segments(_, active) if active is not None:
                    position.append(joined_position(index, self.extents, where.__getitem__))
                case _:
                    at, inside = self._inside(index, size, where)
                    position.append(at)
                    guards += inside
        return guarded(tensor.element(tuple(position)), guards)

    def _remember(self, names: Sequence[str], at: Poly, where: Mapping[str, Poly]) -> None:
        inner = product(self.extents[n] for n in names[1:])
        rest = ZERO
        for n in names[1:]:
            rest = rest * self.extents[n] + where[n]
        self.lines.digits[at, inner] = (where[names[0]], rest)

    def _inside(self, index: object, size: Poly, where: Mapping[str, Poly]) -> tuple[Poly, list[Constraint]]:
        """The position of a window, and the constraints that it lies in the dim."""
        if not isinstance(index, Affine):
            raise Undecided(f"{self.name}: {index} is no index")
        terms, at = self._terms(index)
        for factor, variable in terms:
            at = at + factor * where[variable]
        return at, [Constraint(at), Constraint(size - 1 - at)]

    def _binary(self, op: str, left: Form, right: Form) -> Form:
        if self.lines.exact and (as_poly(left) is None or as_poly(right) is None):
            return _rounded(op, left, right)
        match op:
            case "+":
                return (*left, *right)
            case "-":
                return (*left, *scaled(right, -1))
            case "*":
                return times(left, right)
            case _:
                return times(left, apply("recip", (right,)))

    def _where(self, condition: Expr, yes: Form, no: Form, where: Mapping[str, Poly]) -> Form:
        """A condition on indices is a guard; one on values is a factor of which nothing is known."""
        match condition:
            case Call(comparison, (a, b)) if comparison in ("gt", "ge", "lt", "le", "eq", "ne"):
                left, right = self._form(a, where), self._form(b, where)
                difference = as_poly((*left, *scaled(right, -1)))
                if difference is not None:
                    holds, fails = _guards(comparison, difference)
                    return (*(m for g in holds for m in guarded(yes, g)), *(m for g in fails for m in guarded(no, g)))
                known = Apply(comparison, (_position(left), _position(right)))
                factor = (Mono(Fraction(1), (), frozenset(), (known,)),)
            case Call(function, args):
                known = Apply(function, tuple(self._form(a, where) for a in args))
                factor = (Mono(Fraction(1), (), frozenset(), (known,)),)
            case _:
                factor = self._form(condition, where)
        return (*times(factor, yes), *no, *scaled(times(factor, no), -1))

    def _reduce(self, expr: ReduceExpr, where: Mapping[str, Poly]) -> Form:
        inner = dict(where)
        binders: list[str] = []
        domain: list[Constraint] = []
        for name in expr.names:
            task, size = self.divided.get(name, (ZERO, self.extents[name]))
            position, own, within = self.lines.index(name, size)
            inner[name] = task * size + position
            binders += own
            domain += within
        # A reduction passes over the positions at which a window of its body lies outside.
        for access in accesses(expr.body):
            for index, size in zip(access.indices, self.tensors[access.tensor].shape, strict=True):
                if isinstance(index, Affine) and any(t.variable in expr.names for t in index.terms):
                    free = {t.variable for t in index.terms if t.variable is not None} - self.attributes.keys()
                    if free <= inner.keys():
                        domain += self._inside(index, size, inner)[1]
        body = self._form(expr.body, inner)
        if self.lines.exact and expr.reducer in ("sum", "prod") and len(expr.names) > 1:
            # Additions round by their order: a sum over the same elements, columns first, is another.
            order = Apply("in order", tuple(_position(of_poly(inner[name])) for name in expr.names))
            body = times((Mono(Fraction(1), (), frozenset(), (order,)),), body)
        if expr.reducer == "sum" and not (self.lines.exact and gather(expr) is None):
            return summed(body, tuple(binders), domain)
        part = Bound(tuple(binders), frozenset(domain), body)
        return (Mono(Fraction(1), (), frozenset(), (Extreme(expr.reducer, (part,)),)),)


def operator_parameters(line: syntax.Line, bound: syntax.Bound) -> list[bool]:
    """For every operand of a bound line, whether the written parameter takes any element type."""
    anything = {p.name: p.kind == "any" for p in line.parameters}
    variadic = next((p for p in line.parameters if p.variadic), None)
    return [anything.get(p.name, variadic is not None and variadic.kind == "any") for p in bound.operands]


def _rounded(op: str, left: Form, right: Form) -> Form:
    """An operation of arithmetic that rounds: a function of which no more is known than what holds to the last bit."""
    if op == "-":
        op, right = "+", scaled(right, -1)
    units = {constant(1): 1, constant(-1): -1}
    if op == "+" and not (left and right):
        return left or right
    if op == "*" and left in units:
        return scaled(right, units[left])
    if op in "*/" and right in units:
        return scaled(left, units[right])
    return (Mono(Fraction(1), (), frozenset(), (Apply(op, (left, right)),)),)


_SIGNIFICANT = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}
_EXPONENT = {"f64": 11, "f32": 8, "f16": 5, "bf16": 8}
_BITS = {"i64": 63, "i32": 31, "bool": 1}


def holds_all(source: str, target: str) -> bool:
    """
    Whether every number of one element type is one of another, so that a cast changes none.

    Given `bf16` and `f32` returns True, given `i64` and `f64` False.
    """
    if source == target:
        return True
    if target == "bool" or (source in _SIGNIFICANT and target in _BITS):
        return False
    if source in _BITS:
        return _BITS[source] <= (_BITS[target] if target in _BITS else _SIGNIFICANT[target])
    return _SIGNIFICANT[source] <= _SIGNIFICANT[target] and _EXPONENT[source] <= _EXPONENT[target]


def converted(of: Tensor, dtype: str, rounds: bool = True) -> Tensor:
    """
    A tensor cast to another element type. A cast that may change a number, as it is stored, is a function of which
    nothing is known: rounding, wrapping and truncation are never taken for the identity.
    """
    steps = [] if of.stored or of.dtype == dtype else [of.dtype]
    if not holds_all(of.dtype, dtype):
        steps.append(dtype)
    if not rounds:
        steps = [dtype] if dtype in NOT_FLOATING and not holds_all(of.dtype, dtype) else []

    def element(at: Position) -> Form:
        form = of.element(at)
        for step in steps:
            form = (Mono(Fraction(1), (), frozenset(), (Apply(f"as {step}", (form,)),)),)
        return form

    return Tensor(of.shape, element, dtype, stored=of.stored or of.dtype != dtype)


def _as_number(name: str, value: Attribute) -> Poly:
    if not isinstance(value, Poly):
        raise Undecided(f"attribute {name} is no number")
    return value


def _position(form: Form) -> Form:
    """An index that is compared with a value, as the element at that index of a tensor of all indices."""
    poly = as_poly(form)
    return form if poly is None else (Mono(Fraction(1), (), frozenset(), (Read("#", (poly,)),)),)


def _as_attribute(value: object) -> Attribute:
    match value:
        case bool():
            raise Undecided("an attribute is a truth value")
        case int():
            return number(value)
        case tuple():
            return tuple(number(v) if isinstance(v, int) else v for v in value)  # pyright: ignore
        case Poly() | Parameter() | float() | str():
            return value
        case _:
            raise Undecided(f"{value!r} is no attribute")


def _is_padding(offset: Poly) -> bool | None:
    """Whether an offset lies before the dim, `-p`, or in it; None where that depends on the sizes, all of them 1 up."""
    before, within = (
        all(c > 0 for m, c in p.terms if m) and p.at(dict.fromkeys(p.symbols, 1)) >= 0 for p in (-offset, offset)
    )
    return True if before else False if within else None


def _guards(comparison: str, difference: Poly) -> tuple[list[tuple[Constraint, ...]], list[tuple[Constraint, ...]]]:
    """The disjoint cases in which `difference` compares so with 0, and those in which it does not."""
    above, below = Constraint(difference - 1), Constraint(-difference - 1)
    zero = Constraint(difference, equal=True)
    not_below, not_above = Constraint(difference), Constraint(-difference)
    match comparison:
        case "gt":
            return [(above,)], [(not_above,)]
        case "ge":
            return [(not_below,)], [(below,)]
        case "lt":
            return [(below,)], [(not_below,)]
        case "le":
            return [(not_above,)], [(above,)]
        case "eq":
            return [(zero,)], [(above,), (below,)]
        case _:
            return [(above,), (below,)], [(zero,)]
