"""
Parallel typing from TDL: the degrees of an operator's index variables, and what they make of its operands and results.

This is the only place that knows how operators may be partitioned; no operator says anything of its own
(DESIGN: "A configuration gives each index variable a degree").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.tdl.analysis import Analysis
from unity_ir.tdl.syntax import Bound


@dataclass(frozen=True, slots=True)
class Degrees:
    """
    How one tensor is divided: a degree per dim, pieces that are addends (`sum`), pieces that are identical (`copy`).
    """

    dims: tuple[int, ...]
    sum: int = 1
    copy: int = 1


Carriers = frozenset[str]
"""Operands that carry addends together."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """
    How an operator's task grid is divided (FlexFlow's SOAP, Tofu's partition-n-reduce).

    `degrees` of index variables (only those above 1), `copy` tasks that compute the same, and `sums`: for a set of
    operands the operator is linear in, how many addends they are in. A product may have both its factors in addends,
    each set by itself, since it is linear in either.
    """

    degrees: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    copy: int = 1
    sums: Mapping[Carriers, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def sum(self) -> int:
        """The addends of all sets of carriers."""
        return prod(self.sums.values())

    def degree(self, variable: str | None) -> int:
        return 1 if variable is None else self.degrees.get(variable, 1)


def operand_degrees(analysis: Analysis, configuration: Configuration) -> tuple[Degrees, ...]:
    """
    What each operand must look like under a configuration.

    Given `out[m, n] = sum[k](x[m, k] * w[k, n])` and m by 2, returns x: dims (2, 1), and w: dims (1, 1), copy 2.
    """
    out: list[Degrees] = []
    for parameter in analysis.bound.operands:
        lead = analysis.operand_dims.get(parameter.name, ())
        unmentioned = prod(d for v, d in configuration.degrees.items() if v not in lead)
        carried = prod(d for carriers, d in configuration.sums.items() if parameter.name in carriers)
        dims = tuple(configuration.degree(v) for v in lead)
        out.append(Degrees(dims, carried, unmentioned * configuration.copy * (configuration.sum // carried)))
    return tuple(out)


def result_degrees(analysis: Analysis, configuration: Configuration) -> tuple[Degrees, ...]:
    """
    What each result looks like under a configuration: its dims follow their variables, root-level sums leave addends.

    Given `out[m, n] = sum[k](x[m, k] * w[k, n])` and k by 2, returns dims (1, 1), sum 2.
    """
    out: list[Degrees] = []
    for i, dims in enumerate(analysis.result_dims):
        reduced = prod(d for v, d in configuration.degrees.items() if v not in dims)
        carried = prod(d for carriers, d in configuration.sums.items() if analysis.carried(i, carriers))
        copy = configuration.copy * (configuration.sum // carried)
        out.append(Degrees(tuple(configuration.degree(v) for v in dims), reduced * carried, copy))
    return tuple(out)


def infer_configuration(analysis: Analysis, operands: Sequence[Degrees]) -> Configuration:
    """
    The one configuration under which the operands are what they are.

    Raises `UnityError` where there is none: the operator, the dim or operand that breaks a rule, and the parallel
    operator that would mend it.
    """
    bound = analysis.bound
    degrees = dict(bound.free_degrees)
    origin: dict[str, str] = {}
    for parameter, have in zip(bound.operands, operands, strict=True):
        for dim, (variable, degree) in enumerate(zip(analysis.operand_dims[parameter.name], have.dims, strict=True)):
            if variable is None:
                if degree > 1:
                    raise UnityError(
                        f"pcg.{bound.operator}: dim {dim} of {parameter.name} has degree {degree}, but it needs the "
                        f"whole dim; insert pcg.combine dim {dim} by {degree}"
                    )
            elif bound.extents[variable] % degree:
                raise UnityError(
                    f"pcg.{bound.operator}: dim {dim} of {parameter.name} has degree {degree}, which does not divide "
                    f"size {bound.extents[variable]} of index {variable}; insert pcg.combine dim {dim} by {degree}"
                )
            elif degrees.setdefault(variable, degree) != degree:
                where = origin.get(variable, "the attributes")
                raise UnityError(
                    f"pcg.{bound.operator}: degrees of index {variable} differ: {where} has {degrees[variable]}, "
                    f"{parameter.name} has {degree}; partition or combine one of them"
                )
            else:
                origin.setdefault(variable, parameter.name)
    degrees = {v: degrees[v] for v in bound.extents if degrees.get(v, 1) > 1}
    base = Configuration(MappingProxyType(degrees), 1, MappingProxyType(_infer_sums(analysis, operands)))
    copies: dict[str, int] = {}
    for parameter, have, need in zip(bound.operands, operands, operand_degrees(analysis, base), strict=True):
        if have.copy % need.copy:
            raise UnityError(
                f"pcg.{bound.operator}: {parameter.name} has {have.copy} copies, but its tasks need {need.copy}; "
                f"insert pcg.replicate"
            )
        copies[parameter.name] = have.copy // need.copy
    if len(set(copies.values())) > 1:
        seen = ", ".join(f"{name}: {have.copy}" for name, have in zip(copies, operands, strict=True))
        raise UnityError(f"pcg.{bound.operator}: copies of the operands do not agree ({seen}); replicate or pick")
    return Configuration(base.degrees, next(iter(copies.values()), 1), base.sums)


def _infer_sums(analysis: Analysis, operands: Sequence[Degrees]) -> dict[Carriers, int]:
    bound = analysis.bound
    left = {p.name: have.sum for p, have in zip(bound.operands, operands, strict=True)}
    found: dict[Carriers, int] = {}
    for carriers in analysis.carriers:
        together = gcd(*(left[name] for name in carriers))
        if together > 1:
            found[carriers] = together
            left.update({name: left[name] // together for name in carriers})
    for name, addends in left.items():
        if addends == 1:
            continue
        partners = next((sorted(c - {name}) for c in analysis.carriers if name in c and len(c) > 1), None)
        if partners:
            raise UnityError(
                f"pcg.{bound.operator}: {name} is in {addends} partial sums that {', '.join(partners)} is not in, "
                f"but they must be together; insert pcg.reduce by {addends}"
            )
        raise UnityError(
            f"pcg.{bound.operator}: not linear in {name}, which is in {addends} partial sums; "
            f"insert pcg.reduce by {addends} before it"
        )
    return found


def piece(bound: Bound, configuration: Configuration) -> Bound:
    """The line one task of the grid computes: the same expressions over extents divided by their degrees."""
    extents = {v: size // configuration.degree(v) for v, size in bound.extents.items()}
    return Bound(bound.operator, bound.operands, bound.results, MappingProxyType(extents), MappingProxyType({}))
