"""Sizes of a rule from those of the terms it matches."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.rules.poly import Poly, number

Equations = Sequence[tuple[Poly, int]]


def solve(equations: Equations) -> dict[str, int] | None:
    """
    The symbols of polynomials that have given values; None where there are no such symbols, all 1 or more.

    Solves for one symbol at a time, which must be linear: `n + m = 10` after `n = 4`.
    """
    known: dict[str, int] = {}
    pending = list(equations)
    while pending:
        rest: list[tuple[Poly, int]] = []
        for poly, value in pending:
            left = poly.substitute({s: number(v) for s, v in known.items()}) - value
            unknown = left.symbols
            if not unknown:
                if left.constant:
                    return None
                continue
            factor = left.coefficient(next(iter(unknown))).constant if len(unknown) == 1 else None
            if factor is None or not factor:
                rest.append((poly, value))
                continue
            (name,) = unknown
            fixed = left.without(name).constant
            if fixed is None:
                return None
            quotient, remainder = divmod(-fixed, factor)
            if remainder or quotient < 1:
                return None
            known[name] = quotient
        if len(rest) == len(pending):
            return None
        pending = rest
    return known
