"""
Definitions in a TDL line: names for expressions that are used several times.

    let mean[a..] = sum[k](x[a.., k] / size(k));  out[a.., i] = x[a.., i] - mean[a..]

They are written out where they are used, so that nothing after parsing knows of them; equal subexpressions are computed
once anyway (`tdl.counts`, the kernels).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from unity_ir.errors import UnityError
from unity_ir.tdl.syntax import (
    Access,
    Affine,
    Binary,
    Call,
    Composite,
    Const,
    Expr,
    Name,
    Opaque,
    Pack,
    Position,
    Reduce,
    Size,
    Var,
    WrittenIndex,
    WrittenResult,
)


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition `let name[indices] = expr;` of a TDL line, whose indices are plain variables and packs."""

    name: str
    indices: tuple[WrittenIndex, ...]
    expr: Expr


def inline(definitions: Iterable[Definition], results: Iterable[WrittenResult]) -> tuple[WrittenResult, ...]:
    """
    Return the results of a TDL line with its definitions (`let mean[a..] = ..;`) substituted where they are used. A
    definition may use those before it.

    Raises `UnityError` for a name defined twice, for definitions over other indices than variables and packs, and for
    uses with another number or kind of indices.
    """
    known: dict[str, Definition] = {}
    for definition in definitions:
        if definition.name in known:
            raise UnityError(f"TDL: {definition.name} is defined twice")
        if not all(isinstance(i, Var | Pack) for i in definition.indices):
            raise UnityError(f"TDL: let {definition.name}[...] takes plain indices and packs")
        known[definition.name] = replace(definition, expr=_written_out(definition.expr, known))
    return tuple(replace(r, expr=_written_out(r.expr, known)) for r in results)


def _written_out(expr: Expr, known: Mapping[str, Definition]) -> Expr:
    match expr:
        case Access(name, indices) if name in known:
            definition = known[name]
            if len(indices) != len(definition.indices):
                raise UnityError(
                    f"TDL: {name} is defined over {len(definition.indices)} indices, used with {len(indices)}"
                )
            for own, given in zip(definition.indices, indices, strict=True):
                if type(own) is not type(given):
                    raise UnityError(f"TDL: {name} is used with another kind of index than it is defined over")
            return renamed(definition.expr, dict(zip(definition.indices, indices, strict=True)))
        case Binary(op, left, right):
            return Binary(op, _written_out(left, known), _written_out(right, known))
        case Call(function, args):
            return Call(function, tuple(_written_out(a, known) for a in args))
        case Reduce(reducer, indices, body):
            return Reduce(reducer, indices, _written_out(body, known))
        case Opaque(function, outputs, inputs, body):
            return Opaque(function, outputs, inputs, _written_out(body, known))
        case _:
            return expr


def renamed(expr: Expr, names: Mapping[WrittenIndex, WrittenIndex]) -> Expr:
    """
    Return the expression with its free indices replaced: `names` maps old indices (variables, packs) to new ones.
    Indices that a reduction inside of it binds keep their names.
    """

    def index(old: WrittenIndex) -> WrittenIndex:
        match old:
            case Composite(parts):
                return Composite(tuple(variable(p) for p in parts))
            case Affine(terms):
                return Affine(tuple(replace(t, variable=t.variable and variable(t.variable)) for t in terms))
            case Pack(name, broadcast=True):
                new = names.get(Pack(name), old)
                return replace(new, broadcast=True) if isinstance(new, Pack) else old
            case _:
                return names.get(old, old)

    def variable(old: str) -> str:
        new = names.get(Var(old), Var(old))
        return new.name if isinstance(new, Var) else old

    match expr:
        case Access(tensor, indices, starred):
            return Access(tensor, tuple(map(index, indices)), starred)
        case Size(indices):
            return Size(tuple(map(index, indices)))
        case Position(indices):
            return Position(tuple(map(index, indices)))
        case Name(name):
            return Name(variable(name))
        case Binary(op, left, right):
            return Binary(op, renamed(left, names), renamed(right, names))
        case Call(function, args):
            return Call(function, tuple(renamed(a, names) for a in args))
        case Reduce(reducer, indices, body):
            kept = {old: new for old, new in names.items() if old not in indices}
            return Reduce(reducer, indices, renamed(body, kept))
        case Opaque(function, outputs, inputs, body):
            kept = {old: new for old, new in names.items() if old not in inputs}
            return Opaque(function, tuple(map(index, outputs)), inputs, renamed(body, kept))
        case Const() | _:
            return expr
