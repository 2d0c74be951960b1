"""
Solves for the sizes, degrees and attributes at which a rewrite rule's pattern equals a part of a graph.

Equations are `polynomial = number`. An equation with one unknown left, to the first power, is solved for it; where that
does not determine all symbols, the pattern does not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from unity_ir.errors import UnityError
from unity_ir.pcg.types import TensorType
from unity_ir.rules.pattern import ELEMENTS, AttrExpr, AttrParameter, Bindings, Condition, DimPack, Input, value_of
from unity_ir.rules.poly import ONE, Poly
from unity_ir.tdl.syntax import AttrValue


@dataclass(slots=True)
class Equations:
    """
    A system of equations between a pattern's symbols and a graph's sizes and attributes.

    Methods that add an equation return False if the equations then have no solution; the system is of no more use then.
    """

    known: dict[str, int] = field(default_factory=dict)
    """Sizes, degrees, and ranks of packs as `#a`."""
    packs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The sizes of the dims that each pack `a..` stands for, by its name."""
    parameters: dict[str, AttrValue] = field(default_factory=dict)
    """The values of attribute parameters (`$act`), by name."""
    open: list[tuple[Poly, int]] = field(default_factory=list)
    """Equations with several unknowns, (left side, value), which `again` tries to solve once more is known."""

    @staticmethod
    def given(bindings: Bindings) -> Equations:
        """
        Make a system in which symbols already have the values in `bindings`, by name; only integers are taken over, not
        the sizes of packs (`a..`, any number of dims) and the values of attribute parameters.
        """
        equations = Equations()
        for name, value in bindings.items():
            if isinstance(value, int):
                equations.known[name] = value
        return equations

    def equal(self, poly: Poly, value: int) -> bool:
        """
        Add the equation `poly = value`: solve it if one unknown is left, keep it for `again` if more are. Return False
        if it has no solution in integers of at least 1 (0 for the number of dims `#a` of a pack), or is not linear in
        the one unknown, else True.
        """
        constant = poly.constant
        if constant is not None:
            return constant == value
        unknown = poly.symbols - self.known.keys()
        if not unknown:
            return poly.at(self.known) == value
        if len(unknown) > 1:
            self.open.append((poly, value))
            return True
        (symbol,) = unknown
        factor, rest = poly.coefficient(symbol), poly.without(symbol)
        if any(m.count(symbol) > 1 for m, _ in poly.terms):
            return False
        by, total = factor.at(self.known), value - rest.at(self.known)
        if by == 0 or total % by:
            return False
        solved = total // by
        if solved < (0 if symbol.startswith("#") else 1):
            return False
        self.known[symbol] = solved
        return True

    def attribute(self, pattern: AttrExpr, value: AttrValue) -> bool:
        """
        Add the equation that an attribute has the same value in the pattern (`pattern`) and in the graph (`value`). A
        parameter (`$act`) takes the value, which must be the same wherever it occurs. Return False if the equation has
        no solution.
        """
        match pattern:
            case Poly():
                constant = pattern.constant
                if constant is not None:
                    return constant == value
                return isinstance(value, int) and self.equal(pattern, value)
            case tuple():
                if not isinstance(value, tuple) or len(value) != len(pattern):
                    return False
                return all(self.equal(p, v) for p, v in zip(pattern, value, strict=True))
            case AttrParameter(name):
                return self.parameters.setdefault(name, value) == value
            case _:
                return pattern == value

    def again(self) -> bool:
        """Solve the equations that `equal` kept, as far as possible; return False if one has no solution."""
        while self.open:
            kept, self.open = self.open, []
            if not all(self.equal(poly, value) for poly, value in kept):
                return False
            if len(self.open) == len(kept):
                break
        return True

    def shape(self, item: Input, type: TensorType) -> bool | None:
        """
        Add the equations that an input of the pattern has the shape and degrees of a type in the graph. Return True if
        they may have a solution; return False if they have none, or if the type has halos or elements of another type.

        Return None, adding nothing, while the numbers of dims of several of the input's packs (`a..`, any number of
        dims) are unknown.
        """
        if type.halo or type.halo_sum or type.dtype not in ELEMENTS[item.elements]:
            return False
        names = [p.name for p in item.shape if isinstance(p, DimPack)]
        unknown = [n for n in names if f"#{n}" not in self.known]
        rest = len(type.shape) - (len(item.shape) - len(names))
        rest -= sum(self.known[f"#{n}"] for n in names if n not in unknown)
        if len(unknown) > 1:
            return None
        if rest < 0 or (not unknown and rest):
            return False
        if unknown:
            self.known[f"#{unknown[0]}"] = rest
        at = 0
        degrees = item.degrees or (ONE,) * len(item.shape)
        for size, degree in zip(item.shape, degrees, strict=True):
            if isinstance(size, DimPack):
                end = at + self.known[f"#{size.name}"]
                dims = type.shape[at:end]
                if self.packs.setdefault(size.name, dims) != dims or any(d > 1 for d in type.degrees[at:end]):
                    return False
                at = end
            elif self.equal(degree, type.degrees[at]) and self.equal(size, type.shape[at]):
                at += 1
            else:
                return False
        return self.equal(item.sum, type.sum) and self.equal(item.copy, type.copy)

    def bindings(self) -> Bindings:
        """
        Return the values found, by name: an integer for a symbol, a tuple of sizes for a pack `a..`, and the
        attribute's value for a parameter `$act`.
        """
        sizes = {name: value for name, value in self.known.items() if not name.startswith("#")}
        return {**sizes, **self.packs, **self.parameters}


def solve(
    inputs: Iterable[tuple[Input, TensorType]],
    attributes: Iterable[tuple[AttrExpr, AttrValue]],
    conditions: Iterable[Condition],
    given: Bindings,
) -> Bindings | None:
    """
    Solve for the values of a pattern's symbols, packs and attribute parameters at which it equals a part of a graph,
    and all conditions hold; return them by name, or None if there are none.

    `inputs` are pairs (input of the pattern, type of the graph's value for it), `attributes` pairs (value in the
    pattern, value in the graph). `given` has values, by name, that the caller has chosen.
    """
    equations = Equations.given(given)
    if not all(equations.attribute(pattern, value) for pattern, value in attributes):
        return None
    left = list(inputs)
    while left:
        waiting: list[tuple[Input, TensorType]] = []
        for item, type in left:
            laid = equations.shape(item, type)
            if laid is False:
                return None
            if laid is None:
                waiting.append((item, type))
        if not equations.again() or len(waiting) == len(left):
            return None
        left = waiting
    bindings = equations.bindings()
    return bindings if not equations.open and _hold(conditions, bindings) else None


def _hold(conditions: Iterable[Condition], bindings: Mapping[str, int | float | str | tuple[int, ...]]) -> bool:
    try:
        return all(value_of(c.poly, bindings) >= 0 for c in conditions)
    except UnityError:
        return False
