"""
Binds TDL lines (operators' definitions) to tensors of symbolic sizes: solves for the extents (numbers of positions) of
index variables, for all sizes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Operator
from unity_ir.rules.pattern import AttrExpr, attribute_expression
from unity_ir.rules.poly import ZERO, Poly, exact_quotient, number, product
from unity_ir.rules.proof.context import ProofContext
from unity_ir.rules.proof.dims import dim_size, number_of
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.forms import Constraint
from unity_ir.rules.proof.tensors import TensorForm
from unity_ir.tdl import syntax
from unity_ir.tdl.bind import Spelled
from unity_ir.tdl.syntax import Affine, Composite, Entry, Var, WrittenIndex


class SymbolicLine:
    """
    An operator's line bound to `operands` of symbolic sizes: tensors and attributes by name, and the extents of index
    variables as polynomials.

    `spelled` is the line with its packs expanded at the sample sizes of `context`; attributes left out have their
    defaults. The constructor raises `UnityError` where sizes do not fit, and `Undecided` where the extents do not
    follow for all sizes.
    """

    def __init__(
        self,
        context: ProofContext,
        operator: Operator,
        spelled: Spelled,
        operands: Sequence[TensorForm],
        attributes: Mapping[str, AttrExpr],
    ):
        self.context = context
        self.spelled = spelled
        self.name = operator.name
        kinds = zip(spelled.bound.operands, _of_any_type(operator.line, spelled.bound), operands, strict=True)
        self.dtype = next((t.dtype for p, of_any, t in kinds if p.floating or of_any), "f64")
        """The element type of results for which the line names none."""
        self.tensors = {p.name: t for p, t in zip(spelled.bound.operands, operands, strict=True)}
        self.attributes = {**_defaults(operator), **attributes}
        self.extents = self._extents()

    def terms(self, index: Affine) -> tuple[list[tuple[Poly, str]], Poly]:
        """
        Return ((factor, index variable) pairs, offset) of an affine index, such as that of a window, with the values of
        the line's attributes substituted.
        """
        found: list[tuple[Poly, str]] = []
        offset = ZERO
        for term in index.terms:
            factor, variable = number_of(term.factor, self.attributes), term.variable
            if variable in self.attributes:
                factor, variable = factor * number_of(Entry(str(variable)), self.attributes), None
            if variable is None:
                offset = offset + factor * term.sign
            else:
                found.append((factor, variable))
        return found, offset

    def _extents(self) -> dict[str, Poly]:
        extents: dict[str, Poly] = {v: number_of(of, self.attributes) for v, of in self.spelled.sizes.items()}
        places: list[tuple[str, object, Poly]] = []
        for result in self.spelled.bound.results:
            for access in result.accesses:
                for index, size in zip(access.indices, self.tensors[access.tensor].shape, strict=True):
                    if isinstance(index, Var):
                        self._set(extents, index.name, size, access.tensor)
                    else:
                        places.append((access.tensor, index, size))
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
        quotient = exact_quotient(size, known)
        if len(unknown) > 1 or quotient is None:
            raise Undecided(f"{self.name}: {size} is not written as a product with {known}")
        extents[unknown[0]] = quotient

    def _window(self, extents: dict[str, Poly], index: Affine, size: Poly) -> None:
        terms, offset = self.terms(index)
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
            self.context.assumed.append(Constraint(size - 1 + padding - reach))
            return
        ((factor, variable),) = unknown
        extents[variable] = self.context.count(size, padding, factor, reach)

    def extent(self, index: WrittenIndex) -> Poly:
        """
        Return the size, as a polynomial, of a dim of the line's result, given the index that the line has for it, such
        as `h` or `(h d)`. Raises `Undecided` where the attribute that gives the size is no number.
        """
        return dim_size(index, self.extents, self.spelled, self.attributes)


@cache
def _defaults(operator: Operator) -> Mapping[str, AttrExpr]:
    return {a.name: attribute_expression(a.default) for a in operator.line.attributes if a.default is not None}


def _of_any_type(line: syntax.Line, bound: syntax.Bound) -> list[bool]:
    """Return, for every operand of a bound line, whether its parameter is of kind `any`."""
    anything = {p.name: p.kind == "any" for p in line.parameters}
    variadic = next((p for p in line.parameters if p.variadic), None)
    return [anything.get(p.name, variadic is not None and variadic.kind == "any") for p in bound.operands]


def _is_padding(offset: Poly) -> bool | None:
    """
    Return whether an offset is at most 0, as `-p` is; None where that depends on the sizes, all of which are at least
    1.
    """
    before, within = (
        all(c > 0 for m, c in p.terms if m) and p.at(dict.fromkeys(p.symbols, 1)) >= 0 for p in (-offset, offset)
    )
    return True if before else False if within else None
