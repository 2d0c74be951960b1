"""
Checks that a rewrite rule refers to the same dims whatever the number of dims in its packs (`a..`, any number of dims).

A rule over packs is proved at 0 and at 2 dims of each. That stands for all other numbers if no line cuts a shape
inside a pack, and if every attribute that says where a dim is is, as a polynomial, the number of dims before it: `#a
+ 1` of [a.., n, m] is m for every number of dims in `a..`, while `2*#a` is n, m and then a dim of `a..`. All lines
treat the dims of an uncut pack alike, one by one, so that one dim more changes nothing. After TensorRight (POPL
2025), whose aggregated axes are packs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from unity_ir.ops import operator as find_operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import AttrExpr, Operation, Substitution
from unity_ir.rules.poly import ONE, ZERO, Poly, number, symbol
from unity_ir.rules.proof.cases import Case, inputs_at, result_of, tensors
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.sides import packs
from unity_ir.rules.proof.tensors import TensorForm
from unity_ir.tdl.syntax import Access, Entry, Line, Pack, accesses

RANK = 2
"""Dims of each pack at which cuts are looked at: a cut inside a pack has some of it on either side."""

_PACK_DIM = re.compile(r"(\w+)\.(\d+)")


def check_every_rank(rule: Substitution, cases: Iterable[Case]) -> None:
    """
    Check that each dim that a rule refers to by a number is the same dim however many dims its packs (`a..`) stand for,
    so that a proof for 2 dims holds for any number; raise `Undecided`, naming the operation, if not. `cases` are all
    cases of the rule (see `cases.cases`).
    """
    if not packs(rule):
        return
    case = next(c for c in cases if all(rank == RANK for rank in c.ranks.values()))
    for side in (rule.source, rule.target):
        context = ProofContext(dict(case.sample), case.given)
        inputs = inputs_at(rule, case.ranks, case.dtypes)
        _, made = tensors(rule, side, inputs, context, case.fixed)
        for operation in rule.operations(side):
            if operation.op in PARALLEL_OPERATORS:
                continue
            operands = [result_of(t, inputs, made) for t in operation.operands]
            if any(_packs_of(size) for t in (*operands, *made[id(operation)]) for size in t.shape):
                _check_operation(operation, operands, case)
            elif any(s.startswith("#") for s in _symbols(operation)):
                raise Undecided(
                    f"{operation.op}: an attribute depends on the number of dims of a pack it does not have"
                )


def _symbols(operation: Operation) -> Iterator[str]:
    for _, value in operation.attributes:
        for poly in value if isinstance(value, tuple) else (value,):
            if isinstance(poly, Poly):
                yield from poly.symbols


def _check_operation(operation: Operation, operands: Sequence[TensorForm], case: Case) -> None:
    operator = find_operator(operation.op)
    defaults = {a.name: number(a.default) for a in operator.line.attributes if isinstance(a.default, int)}
    given: dict[str, AttrExpr] = {**defaults, **dict(operation.attributes)}
    if isinstance(operator.tdl, str):
        ranks = {c.index.name: c.value for c in operator.line.clauses if c.kind == "rank" and isinstance(c.index, Pack)}
        placing = {v.attribute for v in ranks.values() if isinstance(v, Entry)}
        cuts = list(_line_cuts(operator.line, operands, ranks, given))
    else:
        # Lines that are written from the sizes, such as pad's, say by `dim` where they cut.
        placing, dim = {"dim"}, given.get("dim")
        cuts = [(operands[0], place) for place in ((dim, dim + 1) if isinstance(dim, Poly) else ())]
    for name, value in given.items():
        polys = value if isinstance(value, tuple) else (value,)
        if name not in placing and any(isinstance(p, Poly) and any("#" in s for s in p.symbols) for p in polys):
            raise Undecided(f"{operation.op}: {name} depends on the number of dims of a pack")
    for tensor, place in cuts:
        _check_cut(operation, tensor, place, case)
    _check_alignment(operation, operator.line, operands)


def _line_cuts(
    line: Line, operands: Sequence[TensorForm], ranks: dict[str, Entry | int], given: dict[str, AttrExpr]
) -> Iterator[tuple[TensorForm, Poly]]:
    """
    Yield the places where a line splits the dims of its operands: tensors, each with the number of dims before the cut.
    """
    names = [p.name for p in line.parameters]
    starred = next((i for i, p in enumerate(line.parameters) if p.variadic), len(names))
    behind = len(names) - starred - 1
    for result in line.results:
        for access in accesses(result.expr):
            if access.tensor not in names or any(isinstance(i, Pack) and i.broadcast for i in access.indices):
                continue
            at = names.index(access.tensor)
            last = len(operands) - behind
            these = operands[starred:last] if access.starred else [operands[at if at < starred else at - len(names)]]
            for tensor in these:
                yield from ((tensor, place) for place in _access_cuts(access, tensor, ranks, given))


def _access_cuts(
    access: Access, tensor: TensorForm, ranks: dict[str, Entry | int], given: dict[str, AttrExpr]
) -> Iterator[Poly]:
    """
    Yield the numbers of dims before each cut of one access: from the left up to a pack of any length, then from the
    right.
    """

    def length(index: object) -> Poly | None:
        if not isinstance(index, Pack):
            return ONE
        value = ranks.get(index.name)
        if value is None:
            return None
        found = number(value) if isinstance(value, int) else given.get(value.attribute)
        return found if isinstance(found, Poly) else None

    whole = _count(tensor.shape)
    for indices, start, sign in ((access.indices, ZERO, 1), (access.indices[::-1], whole, -1)):
        place = start
        for index in indices:
            step = length(index)
            if step is None:
                break
            place = place + step * sign
            yield place


def _count(shape: Sequence[Poly]) -> Poly:
    """Return the number of dims of a shape, as a polynomial in those of its packs, each of which has `RANK` of them."""
    total = ZERO
    for size in shape:
        named = _packs_of(size)
        if not named:
            total = total + 1
        elif _PACK_DIM.fullmatch(str(size)):
            total = total + (symbol(f"#{named[0]}") if str(size).endswith(".0") else ZERO)
        else:
            raise Undecided(f"a dim of {size} is made of dims of a pack")
    return total


@lru_cache(maxsize=4096)
def _packs_of(size: Poly) -> Sequence[str]:
    found = (_PACK_DIM.fullmatch(s) for s in size.symbols)
    return sorted({m.group(1) for m in found if m is not None})


def _check_cut(operation: Operation, tensor: TensorForm, place: Poly, case: Case) -> None:
    at = place.at({name: RANK for name in case.fixed} | {s: case.sample[s] for s in place.symbols - case.fixed.keys()})
    before, after = tensor.shape[:at], tensor.shape[at:]
    left, right = ([m.group(1) for size in part if (m := _PACK_DIM.fullmatch(str(size)))] for part in (before, after))
    cut = next((p for p in left if left.count(p) % RANK or right.count(p) % RANK), None)
    if cut is not None:
        raise Undecided(f"{operation.op}: dim {place} is one of {cut}.., if there are enough; name it in the shape")
    if place != _count(before):
        raise Undecided(
            f"{operation.op}: what is at dim {place} depends on the number of dims in a pack: it is {_count(before)} "
            f"for {RANK} dims; write a rule for each"
        )


def _check_alignment(operation: Operation, line: Line, operands: Sequence[TensorForm]) -> None:
    """Check that broadcasting operands, aligned at their last dims, meet a dim of a pack with that same dim only."""
    spread = {
        a.tensor
        for r in line.results
        for a in accesses(r.expr)
        if any(isinstance(i, Pack) and i.broadcast for i in a.indices)
    }
    shapes = [t.shape[::-1] for p, t in zip(line.parameters, operands, strict=False) if p.name in spread]
    for dims in zip(*shapes, strict=False):
        packed = {d for d in dims if _packs_of(d)}
        if packed and len(set(dims)) > 1:
            raise Undecided(
                f"{operation.op}: broadcasting aligns a dim of a pack with another, for some numbers of dims"
            )
