"""Parses the text of a TDL line, the definition of one operator in the tensor description language."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, cast

from lark import (
    Lark,
    Token,
    Transformer,
    v_args,  # pyright: ignore[reportUnknownVariableType]
)
from lark.exceptions import LarkError

from unity_ir.errors import UnityError
from unity_ir.tdl.check import check_line
from unity_ir.tdl.inline import Definition, inline
from unity_ir.tdl.syntax import (
    Access,
    Affine,
    AffineTerm,
    Attribute,
    AttrValue,
    Binary,
    Call,
    Clause,
    Composite,
    Const,
    Entry,
    Expr,
    Line,
    Name,
    Opaque,
    Pack,
    Parameter,
    Position,
    Reduce,
    Size,
    Starred,
    StarredSegments,
    Var,
    WrittenIndex,
    WrittenResult,
)


@v_args(inline=True)
class _Build(Transformer[Token, Line]):
    """One method per rule of the grammar."""

    def var(self, name: Token) -> WrittenIndex:
        return Var(str(name))

    def starred(self, name: Token, _star: Token) -> WrittenIndex:
        return Starred(str(name))

    def pack(self, name: Token) -> WrittenIndex:
        return Pack(str(name))

    def broadcast(self, name: Token) -> WrittenIndex:
        return Pack(str(name), broadcast=True)

    def composite(self, *names: Token) -> WrittenIndex:
        return Composite(tuple(map(str, names)))

    def segments(self, name: Token, _star: Token) -> WrittenIndex:
        return StarredSegments(str(name))

    def permuted(self, attribute: Token, name: Token) -> WrittenIndex:
        return Pack(str(name), permuted_by=str(attribute))

    def integer(self, number: Token) -> int:
        return int(number)

    def entry(self, attribute: Token, at: Token) -> Entry:
        return Entry(str(attribute), int(at))

    def named(self, attribute: Token) -> Entry:
        return Entry(str(attribute))

    def scaled(self, factor: int | Entry, name: Token) -> AffineTerm:
        return AffineTerm(1, factor, str(name))

    def fixed(self, factor: int | Entry) -> AffineTerm:
        return AffineTerm(1, factor, None)

    def unscaled(self, name: Token) -> AffineTerm:
        return AffineTerm(1, 1, str(name))

    def plus(self, term: AffineTerm) -> AffineTerm:
        return term

    def minus(self, term: AffineTerm) -> AffineTerm:
        return AffineTerm(-1, term.factor, term.variable)

    def affine(self, *terms: AffineTerm) -> WrittenIndex:
        return Affine(terms)

    def indices(self, *items: WrittenIndex) -> tuple[WrittenIndex, ...]:
        return items

    def number(self, text: Token) -> Expr:
        return Const(float(text))

    def name(self, text: Token) -> Expr:
        return Name(str(text))

    def size(self, indices: tuple[WrittenIndex, ...]) -> Expr:
        return Size(indices)

    def position(self, indices: tuple[WrittenIndex, ...]) -> Expr:
        return Position(indices)

    def opaque(
        self, name: Token, outputs: tuple[WrittenIndex, ...], inputs: tuple[WrittenIndex, ...], body: Expr
    ) -> Expr:
        return Opaque(str(name), outputs, inputs, body)

    def access(self, name: Token, *rest: Any) -> Expr:
        indices = rest[-1] or ()
        return Access(str(name), indices, starred=len(rest) == 2)

    def call(self, name: Token, *args: Expr) -> Expr:
        return Call(str(name), args)

    def reduce(self, reducer: Token, indices: tuple[WrittenIndex, ...], body: Expr) -> Expr:
        return Reduce(str(reducer), indices, body)

    def add(self, left: Expr, right: Expr) -> Expr:
        return Binary("+", left, right)

    def sub(self, left: Expr, right: Expr) -> Expr:
        return Binary("-", left, right)

    def mul(self, left: Expr, right: Expr) -> Expr:
        return Binary("*", left, right)

    def div(self, left: Expr, right: Expr) -> Expr:
        return Binary("/", left, right)

    def neg(self, operand: Expr) -> Expr:
        return Binary("*", Const(-1.0), operand)

    def param(self, name: Token, *rest: Token | None) -> Parameter:
        kinds = [r for r in rest if r is not None]
        return Parameter(
            str(name),
            kind=next((str(k) for k in kinds if k.type == "ELEMENTS"), "float"),
            variadic=any(k.type == "STAR" for k in kinds),
        )

    def attribute(self, name: Token, kind: Token, default: Token | None) -> Attribute:
        value: AttrValue | None = None
        if default is not None:
            number = default.type == "SIGNED_NUMBER"
            named = kind in ("name", "dtype")
            if kind == "ints" or number == named or (kind == "int" and not default.lstrip("+-").isdecimal()):
                raise UnityError(f"default of {name} is {default}, which is no {kind}")
            value = str(default) if named else int(default) if kind == "int" else float(default)
        return Attribute(str(name), str(kind), value)

    def params(self, *items: Parameter | Attribute | None) -> tuple[Parameter | Attribute, ...]:
        return tuple(i for i in items if i is not None)

    def result(self, name: Token, *rest: Any) -> WrittenResult:
        elements, indices, expr = rest[-3:]
        return WrittenResult(str(name), len(rest) == 4, indices or (), expr, elements and str(elements))

    def let(self, name: Token, indices: tuple[WrittenIndex, ...] | None, expr: Expr) -> Definition:
        return Definition(str(name), indices or (), expr)

    def clause(self, kind: Token, index: WrittenIndex, value: Entry | int) -> Clause:
        return Clause(str(kind), index, value)

    def where(self, *clauses: Clause) -> tuple[Clause, ...]:
        return clauses

    def line(self, name: Token, params: tuple[Parameter | Attribute, ...], *rest: Any) -> Line:
        clauses: tuple[Clause, ...] = () if isinstance(rest[-1], WrittenResult) else rest[-1]
        return Line(
            operator=str(name),
            parameters=tuple(p for p in params if isinstance(p, Parameter)),
            attributes=tuple(p for p in params if isinstance(p, Attribute)),
            results=inline(
                [d for d in rest if isinstance(d, Definition)], [r for r in rest if isinstance(r, WrittenResult)]
            ),
            clauses=clauses,
            text="",
        )


@cache
def _grammar() -> Lark:
    return Lark(
        files("unity_ir.tdl").joinpath("grammar.lark").read_text(),
        start="line",
        parser="lalr",
        maybe_placeholders=True,
        # Builds while it parses, without a tree of the text.
        transformer=_Build(),
    )


@cache
def parse_line(text: str) -> Line:
    """
    Parse an operator's TDL line; `text` is such as `matmul(x, w) out[m, n] = sum[k](x[m, k] * w[k, n])`. Memoised.

    Raises `UnityError` with the place where the text does not follow the grammar, or the name that is unknown.
    """
    text = " ".join(text.split())
    try:
        line = _built(text)
        line = Line(line.operator, line.parameters, line.attributes, line.results, line.clauses, text)
        check_line(line)
    except RecursionError:
        raise UnityError(f"TDL: `{text[:60]}...` is nested too deeply") from None
    except LarkError as e:
        place = getattr(e, "column", "?")
        raise UnityError(f"TDL: cannot read `{text}` from column {place}") from e
    return line


def _built(text: str) -> Line:
    try:
        return cast("Line", _grammar().parse(text))  # pyright: ignore[reportUnknownMemberType]
    except UnityError as e:
        raise UnityError(f"TDL: {e} in `{text}`") from e
