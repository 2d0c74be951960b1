"""
Parallel typing from TDL: how an operator's index variables are divided (a `Configuration`: a degree, the number of
parts, for each), and what this makes of its operands and results (`Degrees`: shards per dim, partial sums, copies).

Which index variables may be divided at all is `tdl.divisibility`; this file makes types of a division. No operator says
anything of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.tdl.divisibility import Analysis, Halos
from unity_ir.tdl.syntax import Access, Binary, Bound, Call, Cases, Expr, Index, Opaque, Reduce, Result, Var, Window


@dataclass(frozen=True, slots=True)
class Degrees:
    """
    How one tensor is divided into pieces: the degree of each dim (its number of shards), the number of partial sums
    (`sum`), and of identical copies (`copy`).

    `halo` has a pair (before, after) per dim: the elements that a piece has in addition to its own, equal to those of
    the neighbouring pieces. `halo_sum` has such pairs of elements that are yet to be added to the neighbouring pieces.
    Both are () where there are none.
    """

    dims: tuple[int, ...]
    sum: int = 1
    copy: int = 1
    halo: Halos = ()
    halo_sum: Halos = ()

    @property
    def undivided(self) -> bool:
        """Whether the tensor is in one piece."""
        return (
            self.sum == self.copy == 1 and not self.halo and not self.halo_sum and self.dims.count(1) == len(self.dims)
        )


Carriers = frozenset[str]
"""Operands that carry addends together."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """
    How the work of an operator is divided into a grid of tasks (FlexFlow's SOAP, Tofu's partition-n-reduce), one per
    device or group of devices that repeat it: its degrees say into how many parts each index variable is divided.

    `degrees` are the numbers of parts of index variables (only those above 1), `copy` is the number of tasks that
    compute the same, and `sums` the number of partial sums in the operands, for each set of operands the operator is
    linear in. Both factors of a product may be in partial sums, each as a set of its own.
    """

    degrees: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    copy: int = 1
    sums: Mapping[Carriers, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def sum(self) -> int:
        """
        The number of addends, on different devices, that the operator's result is in because its operands are: the
        product of the numbers in `sums`; 1 if no operand is a partial sum. Operands that are so together (both of an
        addition) are one set in `sums`; each factor of a product is a set of its own.
        """
        return prod(self.sums.values())

    def degree(self, variable: str | None) -> int:
        """
        Return the number of parts into which an index variable (by name) is divided; 1 if it is not divided, or None is
        given.
        """
        return 1 if variable is None else self.degrees.get(variable, 1)


WHOLE = Configuration()
"""One task that computes everything."""


def operand_degrees(analysis: Analysis, configuration: Configuration) -> tuple[Degrees, ...]:
    """
    Return, for each operand in order, how it must be divided so that each task of `configuration` has what it reads:
    the number of shards of each dim, the numbers of partial sums and of copies, and halos.

    `analysis` is that of the operator's bound line. Given `out[m, n] = sum[k](x[m, k] * w[k, n])` and m divided by 2,
    returns x: dims (2, 1), and w: dims (1, 1), copy 2.
    """
    out: list[Degrees] = []
    for parameter in analysis.bound.operands:
        lead = analysis.operand_dims.get(parameter.name, ())
        unmentioned = prod(d for v, d in configuration.degrees.items() if v not in lead)
        carried = prod(d for carriers, d in configuration.sums.items() if parameter.name in carriers)
        dims = tuple(configuration.degree(v) for v in lead)
        copy = unmentioned * configuration.copy * (configuration.sum // carried)
        halo = _divided(analysis.operand_halos.get(parameter.name, ()), dims)
        out.append(Degrees(dims, carried, copy, halo))
    return tuple(out)


def result_degrees(analysis: Analysis, configuration: Configuration) -> tuple[Degrees, ...]:
    """
    Return, for each result in order, how the tasks of `configuration` leave it divided: each dim into as many shards as
    its index variable has parts. It is in partial sums if variables that are summed over are divided, or operands are
    in partial sums.

    `analysis` is that of the operator's bound line. Given `out[m, n] = sum[k](x[m, k] * w[k, n])` and k divided by 2,
    returns dims (1, 1), sum 2.
    """
    if configuration == WHOLE:
        return tuple(Degrees((1,) * len(r.indices)) for r in analysis.bound.results)
    out: list[Degrees] = []
    for i, dims in enumerate(analysis.result_dims):
        reduced = prod(d for v, d in configuration.degrees.items() if v not in dims)
        carried = prod(d for carriers, d in configuration.sums.items() if analysis.carried(i, carriers))
        copy = configuration.copy * (configuration.sum // carried)
        degrees = tuple(configuration.degree(v) for v in dims)
        out.append(Degrees(degrees, reduced * carried, copy, (), _divided(analysis.result_halos[i], degrees)))
    return tuple(out)


def _divided(halos: Halos, degrees: Sequence[int]) -> Halos:
    """Return the halos, with (0, 0) for dims that are not divided; () if none is left."""
    found = tuple(h if d > 1 else (0, 0) for h, d in zip(halos, degrees, strict=False))
    return found if any(map(any, found)) else ()


def infer_configuration(
    analysis: Analysis, operands: Sequence[Degrees], free: Mapping[str, int] | None = None
) -> Configuration:
    """
    Infer how an operator's work is divided into tasks, given how its operands are divided: return the only
    configuration whose tasks read operands in these pieces. This is the type check of parallel graphs.

    `operands` has one entry per operand, in order. `free` has the degrees of index variables that occur in no operand,
    by default those that the operator's attributes give. Raises `UnityError` if there is no such configuration, with
    the operator, the dim or operand that breaks a rule, and the parallel operator to insert.
    """
    bound = analysis.bound
    free = bound.free_degrees if free is None else free
    if all([d.undivided for d in operands]) and all(d == 1 for d in free.values()):
        return WHOLE
    degrees = dict(free)
    for variable, degree in degrees.items():
        if degree > 1 and variable not in analysis.splittable:
            raise UnityError(f"pcg.{bound.operator}: index {variable} cannot be divided; give it a degree of 1")
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
        _check_halo(bound.operator, parameter.name, have, need)
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


def configurations_in_time(
    analysis: Analysis, total: Configuration, operands: Sequence[Degrees], micro_batches: int
) -> list[Configuration]:
    """
    Infer how an operator's tasks can be divided over the micro-batches of a step alone; return that as configurations,
    at least one. Each is a factor of `total`, the configuration over micro-batches and devices together.

    `operands` has, for each operand in order, how it is divided over the `micro_batches` micro-batches. There are
    several where index variables occur in no operand: first that in which all of these are undivided over
    micro-batches, then those in which one is divided into `micro_batches` parts. Raises `UnityError` if no division
    fits the operands and divides `total`.
    """
    whole = dict.fromkeys(analysis.bound.free_degrees, 1)
    found: list[Configuration] = []
    error: UnityError | None = None
    for free in (whole, *({**whole, v: micro_batches} for v in whole)):
        try:
            time = infer_configuration(analysis, operands, free)
        except UnityError as raised:
            error = error or raised
            continue
        if _is_part(time, total):
            found.append(time)
    if not found:
        operator = analysis.bound.operator
        raise error or UnityError(f"pcg.{operator}: its tasks do not divide into {micro_batches} in time")
    return found


def _is_part(time: Configuration, total: Configuration) -> bool:
    """Return whether the division in time leaves whole numbers of parts for devices."""
    sums = all(total.sums.get(c, 1) % d == 0 for c, d in time.sums.items())
    return sums and total.copy % time.copy == 0 and all(total.degree(v) % d == 0 for v, d in time.degrees.items())


def without_time(total: Configuration, time: Configuration) -> Configuration:
    """
    Return how an operator's tasks are divided over devices within one micro-batch: the configuration `total`, over
    micro-batches and devices, divided by `time`, its part over micro-batches (`configurations_in_time`).
    """
    degrees = {v: n for v, d in total.degrees.items() if (n := d // time.degree(v)) > 1}
    sums = {c: n for c, d in total.sums.items() if (n := d // time.sums.get(c, 1)) > 1}
    return Configuration(MappingProxyType(degrees), total.copy // time.copy, MappingProxyType(sums))


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


def _check_halo(operator: str, name: str, have: Degrees, need: Degrees) -> None:
    if have.halo_sum:
        raise UnityError(
            f"pcg.{operator}: {name} has addends in its halo, which must be added up; insert pcg.halo_reduce"
        )
    rank = len(have.dims)
    none = ((0, 0),) * rank
    for dim, (h, n) in enumerate(zip(have.halo or none, need.halo or none, strict=True)):
        if h != n and any(h):
            wanted = f"needs one of {n[0]} and {n[1]}" if any(n) else "needs none"
            raise UnityError(
                f"pcg.{operator}: dim {dim} of {name} has a halo of {h[0]} and {h[1]}, but it {wanted}; "
                f"give it the value before pcg.halo"
            )
        if h != n:
            raise UnityError(
                f"pcg.{operator}: dim {dim} of {name} is divided, and each piece needs {n[0]} elements before it and "
                f"{n[1]} after; insert pcg.halo dim {dim} low {n[0]} high {n[1]}"
            )


def line_of_task(bound: Bound, configuration: Configuration, analysis: Analysis | None = None) -> Bound:
    """
    Return the bound TDL line that one task computes under a configuration. It has the same expressions; the extent of
    each index variable is divided by its number of parts (which must divide it), and windows have the sizes of the
    task's shards with their halos.

    `analysis` is that of `bound`; None computes it if it is needed.
    """
    extents = {v: size // configuration.degree(v) for v, size in bound.extents.items()}
    results = bound.results
    if bound.has_windows:
        results = _PieceOfWindows(analysis or Analysis(bound), configuration).results()
    return Bound(bound.operator, bound.operands, results, MappingProxyType(extents), MappingProxyType({}))


class _PieceOfWindows:
    """Rewrites the windows of a line for a piece: divided dims get the size of a piece with its halo."""

    def __init__(self, analysis: Analysis, configuration: Configuration):
        self.bound = analysis.bound
        self.operands = {
            p.name: d for p, d in zip(self.bound.operands, operand_degrees(analysis, configuration), strict=True)
        }
        self.of_results = result_degrees(analysis, configuration)

    def results(self) -> tuple[Result, ...]:
        return tuple(
            replace(r, indices=self.indices(r.indices, d.dims, d.halo_sum), expr=self.expr(r.expr))
            for r, d in zip(self.bound.results, self.of_results, strict=True)
        )

    def expr(self, expr: Expr) -> Expr:
        match expr:
            case Access(tensor, indices):
                degrees = self.operands[tensor]
                return Access(tensor, self.indices(indices, degrees.dims, degrees.halo))
            case Binary(op, left, right):
                return Binary(op, self.expr(left), self.expr(right))
            case Call(function, args):
                return Call(function, tuple(map(self.expr, args)))
            case Reduce(reducer, indices, body):
                return Reduce(reducer, indices, self.expr(body))
            case Opaque(function, outputs, inputs, body):
                return Opaque(function, outputs, inputs, self.expr(body))
            case Cases(branches):
                return Cases(tuple((v, self.expr(e)) for v, e in branches))
            case _:
                return expr

    def indices(self, indices: Sequence[object], degrees: Sequence[int], halos: Halos) -> tuple[Index, ...]:
        halos = halos or ((0, 0),) * len(degrees)
        return tuple(self.index(i, d, h) for i, d, h in zip(indices, degrees, halos, strict=True))

    def index(self, index: object, degree: int, halo: tuple[int, int]) -> Index:
        assert isinstance(index, Index)
        low, high = halo
        match index:
            case Var(name) if any(halo):
                whole = self.bound.extents[name]
                return Window(((1, name),), 0, whole // degree + low + high, whole, low)
            case Window(terms, offset, size, whole):
                return Window(terms, offset, size // degree + low + high, whole, low)
            case _:
                return index
