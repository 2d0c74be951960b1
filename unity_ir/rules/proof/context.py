"""
The state of one proof while operators are applied at symbolic sizes: sample sizes, and the indices and symbols
introduced so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unity_ir.rules.poly import ZERO, Poly, exact_quotient, symbol
from unity_ir.rules.proof.forms import Constraint, box, fresh
from unity_ir.rules.proof.tensors import Undivided


@dataclass
class ProofContext:
    """
    The state of one proof: sample values of its symbols, the symbols and constraints that it introduced, and how its
    arithmetic rounds.
    """

    sample: dict[str, int]
    """A value for every symbol: the sizes at which lines are spelled out."""
    given: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    """Sample values of the rule's attribute parameters (`pattern.AttrParameter`)."""
    assumed: list[Constraint] = field(default_factory=list[Constraint])
    """Constraints on symbols that were introduced, such as the number of windows that fit into a dim."""
    counts: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])
    """The symbols that `count` introduced, by its (room, step)."""
    digits: dict[tuple[Poly, Poly], tuple[Poly, Poly]] = field(
        default_factory=dict[tuple[Poly, Poly], tuple[Poly, Poly]]
    )
    """Maps (position, divisor) to (quotient, remainder), for positions in dims of several variables."""
    splits: dict[tuple[str, Poly], Poly] = field(default_factory=dict[tuple[str, Poly], Poly])
    """
    Maps (side, size) to the divisor by which indices over that size, made for that side, are made as `quotient *
    divisor + remainder`.
    """
    side: str = ""
    """Of the two values compared the one whose element is made, `left` or `right`; empty for indices of both."""
    sizes: dict[Poly, tuple[str, Poly]] = field(default_factory=dict[Poly, tuple[str, Poly]])
    """Maps the position of each index to (side it was made for, size of the dim it runs over)."""
    rounds: bool = True
    """
    Casts that may change a number are uninterpreted functions; if False, casts to floating point are the identity.
    """
    exact: bool = False
    """Additions, products and sums are uninterpreted functions, so that equal forms round alike."""
    _values: dict[Poly, int] = field(default_factory=dict[Poly, int], repr=False)

    def at_sample(self, poly: Poly) -> int:
        """
        Return the value of a polynomial at the sample sizes, `sample`. Raises `KeyError` for a symbol that has none
        there.
        """
        known = self._values.get(poly)
        if known is None:
            # Symbols are added to the sample, but none changes its value.
            known = self._values[poly] = poly.at(self.sample)
        return known

    def index(self, stem: str, size: Poly) -> tuple[Poly, list[str], list[Constraint]]:
        """
        Make a new index that runs over a dim of `size`; return (position, symbols, constraints): its position as a
        polynomial in new symbols, the names of these symbols, and the constraints on them that keep the position in the
        dim.

        The position is a single symbol, whose name begins with `stem`. But where the proof has to divide positions in
        dims of this size by some divisor (`self.splits` gives it), the position is `quotient * divisor + remainder`,
        with a symbol for each of the two.
        """
        inner = self.splits.get((self.side, size))
        outer = None if inner is None else exact_quotient(size, inner)
        if inner is None or outer is None or inner == size:
            name = fresh(stem)
            self.sizes[symbol(name)] = self.side, size
            if inner == size:
                self.digits[symbol(name), size] = (ZERO, symbol(name))
            return symbol(name), [name], list(box(name, size))
        quotient, names, within = self.index(stem, outer)
        remainder, more, also = self.index(stem, inner)
        position = quotient * inner + remainder
        self.digits[position, inner] = (quotient, remainder)
        return position, [*names, *more], [*within, *also]

    def divided(self, position: Poly, inner: Poly) -> tuple[Poly, Poly] | None:
        """
        Divide a position by `inner`; return (quotient, remainder). That is possible only if the position was composed
        so, or is the sum of a multiple of `inner` and of an index over a dim of size `inner`, which is then the
        remainder; otherwise returns None.

        Given the position c + i, where i runs over a dim of size c, and c, returns (1, i).
        """
        if (known := self.digits.get((position, inner))) is not None:
            return known
        rest = Poly(tuple(t for t in position.terms if exact_quotient(Poly((t,)), inner) is None))
        multiple = exact_quotient(position - rest, inner)
        return (multiple, rest) if multiple is not None and self._runs_over(rest, inner) else None

    def _runs_over(self, position: Poly, size: Poly) -> bool:
        """Return whether a position is an index over a dim of `size`, or one of several variables."""
        _, own = self.sizes.get(position, ("", ZERO))
        if own == size:
            return True
        for s in sorted(position.symbols):
            _, inner = self.sizes.get(symbol(s), ("", ZERO))
            if position.coefficient(s).constant != 1 or inner == ZERO:
                continue
            outer, quotient = exact_quotient(size, inner), exact_quotient(position - symbol(s), inner)
            if outer is not None and quotient is not None and quotient != ZERO and self._runs_over(quotient, outer):
                return True
        return False

    def finer(self, need: Undivided) -> dict[tuple[str, Poly], Poly]:
        """
        Return `splits` with one more, by which the position that was not divided may be: that of an index in it. Raises
        `need` again if there is none.
        """
        for s in sorted(need.position.symbols):
            made = self.sizes.get(symbol(s))
            divisor = exact_quotient(need.by, need.position.coefficient(s))
            if made is None or divisor is None or made in self.splits:
                continue
            if exact_quotient(made[1], divisor) is not None or need.position == symbol(s):
                return {**self.splits, made: divisor}
        raise need

    def count(self, size: Poly, before: Poly, step: Poly, reach: Poly) -> Poly:
        """
        Return the number of windows that fit into a dim of `size`: `(size + before - 1 - reach) // step + 1`, where
        `before` is the padding on both sides together, `step` the stride, and `reach` the distance from the first to
        the last element of a window.

        For a step other than 1 it is a symbol, the same for equal arguments, with constraints added to `assumed`.
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
