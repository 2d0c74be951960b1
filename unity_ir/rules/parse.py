"""
Parses rewrite rules (substitutions) from text. A file holds any number of them:

    // The products of one value with two others are one product.
    subst.rule "merge-matmuls" (%x: [a.., k], %v: [k, n], %w: [k, m]) {
      %p = matmul %x, %v {act = $act}
      %q = matmul %x, %w {act = $act}
      yield %p, %q
    } to {
      %vw = concat %v, %w {dim = 1}
      %pq = matmul %x, %vw {act = $act}
      %p, %q = split %pq {dim = #a, sizes = [n, m]}
      yield %p, %q
    }

Sizes, degrees and integers are polynomials, `a..` any number of dims and `#a` their number, `$act` an attribute that
the match gives; an attribute that is not written has its default. Symbols are 1 or more (a padding is `p - 1`).
`[d*n:d, k] sum = d copy = e` is a divided input, `int [b..]` one of integers, `bool [b..]` one of conditions. After the
inputs may follow `where n >= 2*m, ..` and `attributes {exact, proof = {verdict = "proved", seconds = 0.1, assumed =
[".."]}}`.

The dialect `subst` reads the same text, through the functions here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import Any, cast

from lark import (
    Lark,
    Token,
    Transformer,
    v_args,  # pyright: ignore[reportUnknownVariableType]
)
from lark.exceptions import LarkError, UnexpectedInput, VisitError

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import (
    AttrExpr,
    AttrParameter,
    Condition,
    DimPack,
    Input,
    Operation,
    ProofRecord,
    ResultOf,
    ShapeEntry,
    Substitution,
    Term,
)
from unity_ir.rules.poly import ONE, Poly, number, product, symbol


class RuleTextError(UnityError):
    """Raised for text that cannot be read as a rule. `position` is the offset, in characters, of the part at fault."""

    def __init__(self, message: str, position: int):
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True)
class _Statement:
    names: tuple[Token, ...]
    op: Token
    operands: tuple[Token, ...]
    attributes: tuple[tuple[str, AttrExpr], ...]


@dataclass(frozen=True, slots=True)
class _Where:
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class _Flags:
    exact: bool
    proof: ProofRecord | None


DIGITS = 18
"""Most digits of a number: more do not fit 64 bits."""

STATEMENTS = 200
"""Most operators on a side: terms are trees, which are walked by recursion."""

_Block = tuple[tuple[_Statement, ...], tuple[Token, ...]]
"""Statements, and the values yielded."""


@v_args(inline=True)
class _Build(Transformer[Token, tuple[Substitution, ...]]):
    """One method per rule of the grammar."""

    def integer(self, text: Token) -> Poly:
        if len(text) > DIGITS:
            raise _error(f"a number of {len(text)} digits; it must have at most {DIGITS}", text)
        return number(int(text))

    def symbol(self, name: Token) -> Poly:
        return symbol(str(name))

    def term(self, *factors: Poly) -> Poly:
        return product(factors)

    def poly(self, minus: Token | None, first: Poly, *rest: Token | Poly) -> Poly:
        total = -first if minus else first
        for sign, term in zip(rest[::2], rest[1::2], strict=True):
            assert isinstance(term, Poly)
            total = total - term if sign == "-" else total + term
        return total

    def pack(self, name: Token) -> tuple[ShapeEntry, Poly]:
        return DimPack(str(name).removesuffix("..")), ONE

    def size(self, size: Poly, degree: Poly | None) -> tuple[ShapeEntry, Poly]:
        return size, ONE if degree is None else degree

    def dims(self, *items: tuple[ShapeEntry, Poly]) -> tuple[tuple[ShapeEntry, Poly], ...]:
        return items

    def sum(self, degree: Poly) -> tuple[str, Poly]:
        return "sum", degree

    def copy(self, degree: Poly) -> tuple[str, Poly]:
        return "copy", degree

    def tensor(self, *parts: Any) -> Input:
        elements = str(parts[0]) if isinstance(parts[0], Token) else "float"
        dims, *others = parts[isinstance(parts[0], Token) :]
        sizes, degrees = zip(*dims, strict=True) if dims else ((), ())
        return Input("", sizes, degrees if any(d != ONE for d in degrees) else (), **dict(others), elements=elements)

    def input(self, name: Token, tensor: Input) -> tuple[Token, Input]:
        return name, Input(name[1:], tensor.shape, tensor.degrees, tensor.sum, tensor.copy, tensor.elements)

    def inputs(self, *items: tuple[Token, Input]) -> tuple[tuple[Token, Input], ...]:
        return items

    def condition(self, left: Poly, relation: Token, right: Poly) -> tuple[Condition, ...]:
        at_least, at_most = Condition(left - right), Condition(right - left)
        return {">=": (at_least,), "<=": (at_most,), "=": (at_least, at_most)}[str(relation)]

    def where(self, *conditions: tuple[Condition, ...]) -> _Where:
        return _Where(tuple(c for cs in conditions for c in cs))

    def exact(self) -> bool:
        return True

    def number(self, text: Token) -> float:
        return _finite(text)

    def strings(self, *items: Token) -> tuple[str, ...]:
        return tuple(map(_string, items))

    def proof(
        self, verdict: Token, seconds: float, assumed: tuple[str, ...] | None, digest: Token | None
    ) -> ProofRecord:
        return ProofRecord(_string(verdict), seconds, assumed or (), _string(digest) if digest else "")

    def attributes(self, *flags: bool | ProofRecord | None) -> _Flags:
        given = [type(f) for f in flags if f is not None]
        if len(set(given)) < len(given):
            raise RuleTextError("attributes: exact or proof is given twice; remove one", 0)
        return _Flags(True in flags, next((f for f in flags if isinstance(f, ProofRecord)), None))

    def polys(self, *items: Poly | None) -> tuple[Poly, ...]:
        return tuple(i for i in items if i is not None)

    def parameter(self, name: Token) -> AttrParameter:
        return AttrParameter(name[1:])

    def float(self, text: Token) -> AttrExpr:
        return _finite(text)

    def string(self, text: Token) -> AttrExpr:
        return _string(text)

    def entry(self, name: Token, value: AttrExpr) -> tuple[Token, AttrExpr]:
        return name, value

    def entries(self, *items: tuple[Token, AttrExpr]) -> tuple[tuple[str, AttrExpr], ...]:
        seen: set[str] = set()
        for name, _ in items:
            if name in seen:
                raise _error(f"attribute {name} is given twice; remove one", name)
            seen.add(str(name))
        return tuple(sorted((str(name), value) for name, value in items))

    def values(self, *names: Token) -> tuple[Token, ...]:
        return names

    def yields(self, names: tuple[Token, ...]) -> tuple[Token, ...]:
        return names

    def statement(self, names: tuple[Token, ...], op: Token, operands: tuple[Token, ...], *rest: Any) -> _Statement:
        return _Statement(names, op, operands, rest[0] if rest else ())

    def block(self, *items: Any) -> _Block:
        return items[:-1], items[-1]

    def rule(self, name: Token, inputs: tuple[tuple[Token, Input], ...] | None, *rest: Any) -> Substitution:
        options: tuple[_Where | _Flags, ...] = rest[:-2]
        source, target = rest[-2:]
        bound: dict[str, Input] = {}
        for token, item in inputs or ():
            if item.name in bound:
                raise _error(f"input {token} is declared twice; rename one", token)
            bound[item.name] = item
        check_rule_name(_string(name), name.start_pos or 0)
        where = next((o for o in options if isinstance(o, _Where)), _Where(()))
        flags = next((o for o in options if isinstance(o, _Flags)), _Flags(False, None))
        sides = _side(source, bound), _side(target, bound)
        return Substitution(_string(name), tuple(bound.values()), *sides, where.conditions, flags.exact, flags.proof)

    def start(self, *rules: Substitution) -> tuple[Substitution, ...]:
        return rules


def _error(message: str, token: Token) -> RuleTextError:
    return RuleTextError(message, token.start_pos or 0)


def check_rule_name(name: str, position: int = 0) -> None:
    """
    Check that a rule's name prints as it is written: printable, with single blanks inside only, without double quotes
    and backslashes. Raises `RuleTextError` otherwise, at `position`, the name's offset in the text.

    An empty name passes: `check.check` reports it.
    """
    if name != " ".join(name.split()) or not name.isprintable() or set(name) & {'"', "\\"}:
        raise RuleTextError(f"the name {name!a} has blanks or signs that no name may; rename it", position)


def _string(token: Token) -> str:
    """Return the text between the quotes."""
    text = token[1:-1]
    unseen = next((c for c in text if not c.isprintable()), None)
    if unseen is not None:
        raise _error(f"the text has the character U+{ord(unseen):04X}, which cannot be seen; remove it", token)
    return text


def _finite(token: Token) -> float:
    number = float(token)
    if not isfinite(number):
        raise _error(f"{token} is beyond all numbers; make it smaller", token)
    return number


def _side(block: _Block, inputs: Mapping[str, Input]) -> tuple[Term, ...]:
    """Return the terms a block yields. A name may be given once."""
    statements, yields = block
    if len(statements) > STATEMENTS:
        raise _error(f"a side of {len(statements)} operators; it must have at most {STATEMENTS}", statements[-1].op)
    terms: dict[str, Term] = dict(inputs)

    def find(token: Token) -> Term:
        if token[1:] not in terms:
            raise _error(f"{token} is not defined; it must be an input or a result before it", token)
        return terms[token[1:]]

    for s in statements:
        operation = Operation(str(s.op), tuple(map(find, s.operands)), s.attributes)
        for i, token in enumerate(s.names):
            if token[1:] in terms:
                raise _error(f"{token} is defined twice; rename one", token)
            terms[token[1:]] = ResultOf(operation, i)
    return tuple(map(find, yields))


@cache
def _grammar() -> Lark:
    text = files("unity_ir.rules").joinpath("grammar.lark").read_text()
    return Lark(text, start=["start", "tensor", "poly"], parser="lalr", maybe_placeholders=True)


def _parse(text: str, start: str) -> Any:
    try:
        tree: Any = _grammar().parse(text, start=start)  # pyright: ignore[reportUnknownMemberType]
        return cast("Any", _Build().transform(tree))  # pyright: ignore[reportUnknownMemberType]
    except VisitError as e:
        if isinstance(e.orig_exc, UnityError):
            raise e.orig_exc from None
        raise
    except UnexpectedInput as e:
        token: Any = getattr(e, "token", None)
        ended = token is not None and token.type == "$END"
        position = len(text) if ended else e.pos_in_stream or 0
        found = text[position : position + 20].split("\n")[0].strip()
        raise RuleTextError(f"`{found}` is not expected here" if found else "the text ends too soon", position) from e
    except LarkError as e:
        raise RuleTextError(str(e), 0) from e


def parse_rules(text: str, where: str = "") -> tuple[Substitution, ...]:
    """
    Parse the rules in a text; return them in order. They are not checked to be well formed (see
    `unity_ir.rules.check`).

    `where` is the name of the file, if any. Raises `RuleTextError`, which begins `file:line:column:` if `where` is
    given.
    """
    try:
        return cast("tuple[Substitution, ...]", _parse(text, "start"))
    except RuleTextError as error:
        if not where:
            raise
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1
        raise RuleTextError(f"{where}:{line}:{column}: {error}", error.position) from None


def parse_tensor(text: str) -> Input:
    """
    Parse the type of a rule's input, such as `int [b.., n]`; return an input without a name. Raises `RuleTextError`.
    """
    return cast("Input", _parse(text, "tensor"))


def parse_poly(text: str) -> Poly:
    """Parse a polynomial in a rule's symbols, such as `2*d*m + n - 1`. Raises `RuleTextError` for any other text."""
    return cast("Poly", _parse(text, "poly"))
