"""
The rules a TDL line (an operator's definition as written) must follow beyond its grammar: every name has one meaning,
and is used where it has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.tdl.functions import ACTIVATIONS, DTYPES, FUNCTIONS
from unity_ir.tdl.opaque import OPAQUE
from unity_ir.tdl.syntax import (
    Access,
    Affine,
    Attribute,
    Call,
    Clause,
    Composite,
    Entry,
    Expr,
    Line,
    Name,
    Opaque,
    Pack,
    Position,
    Reduce,
    Segments,
    Size,
    Slice,
    Starred,
    StarredSegments,
    Var,
    Window,
    WrittenIndex,
    WrittenResult,
    children,
)


def check_line(line: Line) -> None:
    """
    Raise `UnityError`, with the operator and the name, if a name of a written TDL line (parameter, attribute, index,
    result) breaks a rule.

    A name must not be unknown, defined twice, read where it is not bound, or never read.
    """
    try:
        _Check(line).check()
    except _Broken as e:
        raise UnityError(f"TDL: {line.operator}: {e}") from None


class _Broken(Exception):
    """A rule that is broken, in words."""


@dataclass(frozen=True, slots=True)
class _Scope:
    bound: frozenset[str]
    """Written names of the indices that have a value here."""
    starred: bool
    """Whether this is written out once per variadic operand or result."""


class _Check:
    def __init__(self, line: Line):
        self.line = line
        self.parameters = {p.name: p for p in line.parameters}
        self.attributes = {a.name: a for a in line.attributes}
        self.read: set[str] = set()
        self.indices: set[str] = set()
        # A dim of size 1 needs no index variable that runs: its only position is 0.
        self.units = {n for c in line.clauses if (c.kind, c.value) == ("size", 1) for n in _written_names(c.index)}

    def check(self) -> None:
        self.heads()
        for result in self.line.results:
            self.result(result)
        for clause in self.line.clauses:
            self.clause(clause)
        for name in self.parameters:
            if name not in self.read:
                raise _Broken(f"{name} is never read")
        for name in sorted(self.indices & self.attributes.keys()):
            raise _Broken(f"{name} is an index and an attribute; rename one")
        self.spelled_out(p.name + ("*" if p.variadic else "") for p in self.line.parameters)
        self.spelled_out(self.indices)

    def heads(self) -> None:
        for what, names in (
            ("parameter", [p.name for p in self.line.parameters] + [a.name for a in self.line.attributes]),
            ("result", [r.name for r in self.line.results]),
        ):
            for name in names:
                if names.count(name) > 1:
                    raise _Broken(f"{what} {name} is defined twice")
        follows = any(p.kind in ("float", "any") for p in self.line.parameters)
        for result in self.line.results:
            self.elements(result, follows)
        if sum(p.variadic for p in self.line.parameters) > 1:
            raise _Broken("only one parameter may be variadic")
        for attribute in self.line.attributes:
            _check_default(attribute)

    def elements(self, result: WrittenResult, follows: bool) -> None:
        if result.elements is None:
            if not follows:
                raise _Broken(f"no parameter is floating point; say what {result.name} holds: {result.name}: int[...]")
        elif result.elements not in ("int", "bool"):
            attribute = self.attributes.get(result.elements)
            if attribute is None or attribute.kind != "dtype":
                raise _Broken(f"{result.name} holds {result.elements}, which is no attribute of kind dtype")

    def result(self, result: WrittenResult) -> None:
        for index in result.indices:
            self.whole_pack(index, result.name)
        names = [n for i in result.indices for n in self.variables(i)]
        for name in names:
            if names.count(name) > 1:
                raise _Broken(f"index {name} is twice in {result.name}")
        for index in result.indices:
            if isinstance(index, Affine):
                self.affine(index, result.name)
                if not any(c.kind == "size" and c.index == index for c in self.line.clauses):
                    raise _Broken(f"the size of a window of {result.name} is not given; give it in a where clause")
        segments = sum(isinstance(i, StarredSegments) for i in result.indices)
        if segments + result.variadic > 1:
            raise _Broken(f"{result.name} has more than one dim laid end to end")
        if any(isinstance(i, Starred) for i in result.indices) and not result.variadic:
            raise _Broken(f"{result.name} is one result, but is indexed by {_starred(names)}")
        self.indices.update(names)
        for index in result.indices:
            self.permutation(index)
        self.expr(result.expr, _Scope(frozenset(names), bool(segments) or result.variadic))

    def expr(self, expr: Expr, scope: _Scope) -> None:
        match expr:
            case Access(tensor, indices, starred):
                self.access(tensor, indices, starred, scope)
            case Call(function, args):
                self.call(function, len(args))
            case Reduce(reducer, indices, body):
                names = [n for i in indices for n in _written_names(i)]
                if not all(isinstance(i, Var) or (isinstance(i, Pack) and i.permuted_by is None) for i in indices):
                    raise _Broken(f"{reducer}[...] takes plain indices and packs")
                for index in indices:
                    self.whole_pack(index, reducer)
                self.binds(names, body, scope)
                return
            case Opaque(function, outputs, inputs, body):
                if function not in OPAQUE:
                    raise _Broken(f"no opaque function {function}; known are {', '.join(OPAQUE)}")
                if not all(isinstance(i, Var) for i in (*outputs, *inputs)) or len(outputs) != 1 or len(inputs) != 1:
                    raise _Broken(f"{function}[...] takes one plain index and makes one")
                for name in (n for i in outputs for n in _written_names(i)):
                    self.bound(name, scope, function)
                self.binds([n for i in inputs for n in _written_names(i)], body, scope)
                return
            case Name(name):
                kind = self.attributes[name].kind if name in self.attributes else None
                if kind not in ("int", "float") and name not in scope.bound:
                    raise _Broken(f"{name} is neither an index nor an attribute that is a number")
            case Size(indices) | Position(indices):
                what = "size" if isinstance(expr, Size) else "position"
                for index in indices:
                    self.whole_pack(index, what)
                for name in (n for i in indices for n in _written_names(i)):
                    self.bound(name, scope, what)
            case _:
                pass
        for child in children(expr):
            self.expr(child, scope)

    def binds(self, names: list[str], body: Expr, scope: _Scope) -> None:
        """Check a body in which further names are bound."""
        for name in names:
            if name in scope.bound or names.count(name) > 1:
                raise _Broken(f"{name} is bound twice in nested scopes; rename one")
        self.indices.update(names)
        self.expr(body, _Scope(scope.bound | set(names), scope.starred))

    def whole_pack(self, index: WrittenIndex, where: str) -> None:
        if isinstance(index, Pack) and index.broadcast:
            raise _Broken(f"~{index.name}.. in {where}: only operands broadcast")

    def access(self, tensor: str, indices: tuple[WrittenIndex, ...], starred: bool, scope: _Scope) -> None:
        if tensor not in self.parameters:
            raise _Broken(f"reads {tensor}, which is not a parameter")
        if starred != self.parameters[tensor].variadic:
            raise _Broken(f"{tensor} is variadic in one place and not in another")
        self.read.add(tensor)
        repeated = starred or any(isinstance(i, Starred | StarredSegments) for i in indices)
        if repeated and not scope.starred:
            raise _Broken(f"{tensor} is read once per variadic operand, but the result is one")
        packs = [i for i in indices if isinstance(i, Pack)]
        if len(packs) > 1 and any(p.broadcast for p in packs):
            raise _Broken(f"{tensor} broadcasts ~{next(p.name for p in packs if p.broadcast)}.. beside another pack")
        for index in indices:
            names = self.variables(index)
            if isinstance(index, Affine):
                self.affine(index, tensor)
            for name in names:
                if names.count(name) > 1:
                    raise _Broken(f"index {name} is twice in one dim of {tensor}")
                self.bound(name, scope, tensor)
            self.permutation(index)

    def variables(self, index: WrittenIndex) -> tuple[str, ...]:
        """Return the index variables among the names of an index; the others are attributes."""
        names = _written_names(index)
        return tuple(n for n in names if n not in self.attributes) if isinstance(index, Affine) else names

    def affine(self, index: Affine, where: str) -> None:
        for term in index.terms:
            if isinstance(term.factor, Entry):
                self.number(term.factor, f"a window of {where}")
            if term.variable in self.attributes:
                self.number(Entry(term.variable), f"a window of {where}")
            elif term.variable is not None and term.sign < 0:
                raise _Broken(f"{term.variable} is subtracted in a window of {where}; only numbers may be")

    def number(self, entry: Entry, where: str) -> None:
        attribute = self.attributes.get(entry.attribute)
        wanted = "int" if entry.at is None else "ints"
        if attribute is None or attribute.kind != wanted:
            raise _Broken(f"{where} is given by {entry}, but {entry.attribute} is no attribute of kind {wanted}")

    def bound(self, name: str, scope: _Scope, where: str) -> None:
        if name not in scope.bound and name not in self.units:
            raise _Broken(f"index {name} of {where} is neither in the result nor under a reduction")
        self.indices.add(name)

    def permutation(self, index: WrittenIndex) -> None:
        if isinstance(index, Pack) and index.permuted_by is not None:
            by = self.attributes.get(index.permuted_by)
            if by is None or by.kind != "ints":
                raise _Broken(f"{index.permuted_by} orders {index.name}.., but is no attribute of kind ints")

    def call(self, function: str, arguments: int) -> None:
        attribute = self.attributes.get(function)
        known = FUNCTIONS.get(function)
        arity = 1 if attribute and attribute.kind == "name" else known.arity if known else None
        if arity != arguments:
            raise _Broken(f"no function {function} of {arguments} arguments")

    def clause(self, clause: Clause) -> None:
        self.whole_pack(clause.index, clause.kind)
        for name in self.variables(clause.index):
            if name not in self.indices:
                raise _Broken(f"{clause.kind}({name}) is given, but nothing is indexed by {name}")
        many = isinstance(clause.index, Pack | Starred) and clause.kind != "rank"
        if clause.kind == "rank" and not isinstance(clause.index, Pack):
            raise _Broken("rank(...) takes a pack")
        if isinstance(clause.value, int):
            if many:
                raise _Broken(f"{clause.kind} of several indices is one number; give it by an attribute of kind ints")
            return
        attribute = self.attributes.get(clause.value.attribute)
        wanted = "ints" if many or clause.kind == "degree" or clause.value.at is not None else "int"
        if attribute is None or attribute.kind != wanted:
            raise _Broken(f"{clause.kind} is given by {clause.value}, which is no attribute of kind {wanted}")

    def spelled_out(self, names: Iterable[str]) -> None:
        """Check that no name is one that a pack is spelled out to: `a..` becomes a0, a1, ..."""
        found = sorted(names)
        for name in found:
            stem = name.rstrip(".*")
            for other in found:
                if stem != name and other.startswith(stem) and other[len(stem) :].isdecimal():
                    raise _Broken(f"{other} is also one of {name}; rename one")
                if stem != name and other != name and other.rstrip(".*") == stem and other != stem:
                    raise _Broken(f"{name} and {other} have one name; rename one")


def _written_names(index: WrittenIndex) -> tuple[str, ...]:
    """
    Return the names that an index, as written in a TDL line, mentions: `k` for a variable, `a..` for a pack, `i*` for
    one variable per variadic operand, of an affine index the variables of its terms.
    """
    match index:
        case Var(name):
            return (name,)
        case Composite(names) | Segments(names):
            return names
        case Pack(name):
            return (f"{name}..",)
        case Starred(name) | StarredSegments(name):
            return (f"{name}*",)
        case Affine(terms):
            return tuple(t.variable for t in terms if t.variable is not None)
        case Window(terms):
            return tuple(v for _, v in terms)
        case Slice(part):
            return _written_names(part)


def _starred(names: Iterable[str]) -> str:
    return next(n for n in names if n.endswith("*"))


def _check_default(attribute: Attribute) -> None:
    allowed = {"name": ACTIVATIONS, "dtype": DTYPES}.get(attribute.kind, ())
    if allowed and attribute.default is not None and attribute.default not in allowed:
        raise _Broken(f"default of {attribute.name} is not one of {', '.join(allowed)}")
