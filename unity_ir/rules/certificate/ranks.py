"""
Checks that 2 dims of each pack (`a..`) stand for any number of them: each place at which a line cuts a shape is, as a
polynomial, the number of dims before it, so that no line tells the dims of a pack apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from unity_ir.ops import operator as find_operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.certificate.elaborate import Elaborator, Tensor, key_of, side_of
from unity_ir.rules.certificate.terms import Refused
from unity_ir.rules.pattern import AttrExpr, Operation, Substitution
from unity_ir.rules.poly import ONE, ZERO, Poly, number, symbol
from unity_ir.tdl.syntax import Access, Entry, Line, Pack

RANK = 2
"""Dims of each pack where this is checked."""

_PACK_DIM = re.compile(r"(\w+)\.(\d+)")


def check_ranks(of: Elaborator, rule: Substitution, ranks: Mapping[str, int]) -> None:
    """Raise `Refused` unless 2 dims of each pack, which `ranks` has, stand for any number of them."""
    for side in (rule.source, rule.target):
        made = side_of(of, rule, side, ranks)
        for operation in rule.operations(side):
            if operation.op in PARALLEL_OPERATORS:
                continue
            operands = [made[key_of(t)] for t in operation.operands]
            placing = _check_cuts(operation, operands)
            for name, value in operation.attributes:
                polys = [p for p in (value if isinstance(value, tuple) else (value,)) if isinstance(p, Poly)]
                if name not in placing and any("#" in s for p in polys for s in p.symbols):
                    raise Refused(f"{operation.op}: {name} depends on the number of dims of a pack")


def _check_cuts(operation: Operation, operands: Sequence[Tensor]) -> set[str]:
    """Check where a line cuts its operands; return the attributes that say so."""
    operator = find_operator(operation.op)
    given: dict[str, AttrExpr] = {
        a.name: number(a.default) for a in operator.line.attributes if isinstance(a.default, int)
    }
    given |= dict(operation.attributes)
    line = operator.line
    if not isinstance(operator.tdl, str):
        dim = given.get("dim")
        for place in (dim, dim + 1) if isinstance(dim, Poly) else ():
            _check_cut(operation.op, operands[0], place)
        return {"dim"}
    lengths: dict[str, Poly] = {}
    for clause in line.clauses:
        if clause.kind == "rank" and isinstance(clause.index, Pack):
            value = given.get(clause.value.attribute) if isinstance(clause.value, Entry) else number(clause.value)
            if isinstance(value, Poly):
                lengths[clause.index.name] = value
    broadcast: list[Sequence[Poly]] = []
    for access, tensor in _reads(line, operands):
        if any(isinstance(i, Pack) and i.broadcast for i in access.indices):
            broadcast.append(tensor.shape[::-1])
            continue
        for place in _cuts(access, tensor, lengths):
            _check_cut(operation.op, tensor, place)
    for at in range(max(map(len, broadcast), default=0)):
        dims = {shape[at] for shape in broadcast if at < len(shape)}
        if len(dims) > 1 and any(_PACK_DIM.search(str(d)) for d in dims):
            raise Refused(f"{operation.op}: broadcasting aligns a dim of a pack with another")
    return {c.value.attribute for c in line.clauses if c.kind == "rank" and isinstance(c.value, Entry)}


def _reads(line: Line, operands: Sequence[Tensor]) -> Iterator[tuple[Access, Tensor]]:
    """Yield each access of a line with each operand that it reads."""
    names = [p.name for p in line.parameters]
    starred = next((n for n, p in enumerate(line.parameters) if p.variadic), len(names))
    many = len(operands) - len(names) + 1
    of = {name: [operands[n if n < starred else n + many - 1]] for n, name in enumerate(names) if n != starred}
    if starred < len(names):
        of[names[starred]] = list(operands[starred : starred + many])
    for result in line.results:
        for access in result.accesses:
            yield from ((access, tensor) for tensor in of.get(access.tensor, ()))


def _cuts(access: Access, tensor: Tensor, lengths: Mapping[str, Poly]) -> Iterator[Poly]:
    """Yield the numbers of dims before each cut: from the left up to a pack of any length, then from the right."""
    whole = _count(tensor.shape)
    for indices, start, sign in ((access.indices, ZERO, 1), (access.indices[::-1], whole, -1)):
        place = start
        for index in indices:
            step = lengths.get(index.name) if isinstance(index, Pack) else ONE
            if step is None:
                break
            place = place + step * sign
            yield place


def _count(shape: Sequence[Poly]) -> Poly:
    """Return a number of dims as a polynomial in those of packs. Raises `Refused` where a pack is not whole."""
    packs = [m.group(1) for size in shape if (m := _PACK_DIM.fullmatch(str(size)))]
    if any(_PACK_DIM.search(str(size)) and not _PACK_DIM.fullmatch(str(size)) for size in shape):
        raise Refused("a dim is made of dims of a pack")
    if any(packs.count(p) % RANK for p in packs):
        raise Refused("a line cuts a pack; name the dim in the shape")
    return number(len(shape) - len(packs)) + sum((symbol(f"#{p}") for p in packs[::RANK]), ZERO)


def _check_cut(op: str, tensor: Tensor, place: Poly) -> None:
    at = place.at(dict.fromkeys(place.symbols, RANK))
    if any(not s.startswith("#") for s in place.symbols) or not 0 <= at <= len(tensor.shape):
        raise Refused(f"{op}: where dim {place} is depends on sizes")
    if _count(tensor.shape[:at]) != place:
        raise Refused(f"{op}: what is at dim {place} depends on the number of dims of a pack")
