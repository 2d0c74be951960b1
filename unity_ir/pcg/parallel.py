"""
The parallel operators: identities on meaning that change how a value is divided (Unity, section 3.3).

Each is a rule on types; its gradient follows from duality. Fused operators do the work of a chain of two in one
collective; they appear only after search. Operators in time (`IN_TIME`) lead into and out of the loop over the
micro-batches of a step: what they do is no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd

from unity_ir.errors import UnityError
from unity_ir.pcg.collectives import FUSED, HALO_EXCHANGES, Collective
from unity_ir.pcg.types import InTime, TensorType

ParallelStep = tuple[str, tuple[tuple[str, int], ...]]
"""A parallel operator and its attributes."""


@dataclass(frozen=True, slots=True)
class ParallelOperator:
    """
    The rules of a parallel operator (`partition`, `combine`, `replicate`, `reduce`, ..).

    `attributes` are the names of its attributes, in written order. Given the attributes, `type` returns the result's
    type for the operand's type, `backward` the parallel operators that turn the result's gradient into the operand's,
    and `chain`, of a fused operator such as `all_reduce`, the operators that it stands for.
    """

    name: str
    attributes: tuple[str, ...]
    type: Callable[[TensorType, Mapping[str, int]], TensorType]
    backward: Callable[[Mapping[str, int]], tuple[ParallelStep, ...]]
    chain: Callable[[Mapping[str, int]], tuple[ParallelStep, ...]] | None = None


def _dim(op: str, x: TensorType, dim: int) -> int:
    if not 0 <= dim < len(x.shape):
        raise UnityError(f"pcg.{op}: dim {dim} is out of range; {x} has dims 0..{len(x.shape) - 1}")
    return dim


def _by(op: str, attributes: Mapping[str, int]) -> int:
    if attributes["by"] < 1:
        raise UnityError(f"pcg.{op}: by {attributes['by']} is not a degree; degrees start at 1")
    return attributes["by"]


def _within(x: TensorType) -> str:
    """Return what to say after a degree over devices where there are micro-batches, too."""
    return "" if x.time is None else " within a micro-batch"


def _plain(op: str, x: TensorType) -> None:
    if x.halo:
        raise UnityError(f"pcg.{op}: {x} has a halo, which comes last; give it the value before pcg.halo")
    if x.halo_sum:
        raise UnityError(f"pcg.{op}: {x} has addends in its halo; insert pcg.halo_reduce first")


def _halo(x: TensorType, a: Mapping[str, int]) -> TensorType:
    dim, low, high = _dim("halo", x, a["dim"]), a["low"], a["high"]
    if x.halo_sum or any(x.borders[dim]):
        raise UnityError(f"pcg.halo: dim {dim} of {x} cannot get a halo beside the one there is")
    if min(low, high) < 0 or low + high == 0:
        raise UnityError(f"pcg.halo: low {low} and high {high} are no halo; give the elements before and after a piece")
    if x.degrees[dim] == 1:
        raise UnityError(f"pcg.halo: dim {dim} of {x} is not divided, so its piece has no neighbours; partition it")
    return x.with_halo(dim, low, high)


def _halo_reduce(x: TensorType, a: Mapping[str, int]) -> TensorType:
    dim, low, high = _dim("halo_reduce", x, a["dim"]), a["low"], a["high"]
    if not x.halo_sum or x.halo_sum[dim] != (low, high) or low + high == 0:
        raise UnityError(f"pcg.halo_reduce: dim {dim} of {x} has no halo_sum({low}, {high})")
    return x.with_halo(dim, 0, 0, "halo_sum")


def _partition(x: TensorType, a: Mapping[str, int]) -> TensorType:
    dim, by = _dim("partition", x, a["dim"]), _by("partition", a)
    degree = x.degrees[dim] * by
    if x.shape[dim] % degree:
        raise UnityError(
            f"pcg.partition: degree {degree} does not divide size {x.shape[dim]} of dim {dim}; choose a divisor"
        )
    return x.with_degree(dim, degree)


def _combine(x: TensorType, a: Mapping[str, int]) -> TensorType:
    dim, by = _dim("combine", x, a["dim"]), _by("combine", a)
    if x.parts_in_space.dims[dim] % by:
        degree, within = x.parts_in_space.dims[dim], _within(x)
        raise UnityError(f"pcg.combine: dim {dim} has degree {degree}{within}, which cannot be combined by {by}")
    return x.with_degree(dim, x.degrees[dim] // by)


def _replicate(x: TensorType, a: Mapping[str, int]) -> TensorType:
    return x.with_copy(x.copy * _by("replicate", a))


def _reduce(x: TensorType, a: Mapping[str, int]) -> TensorType:
    by = _by("reduce", a)
    if x.parts_in_space.sum % by:
        addends, within = x.parts_in_space.sum, _within(x)
        raise UnityError(f"pcg.reduce: the value is in {addends} partial sums{within}, which cannot be reduced by {by}")
    return x.with_sum(x.sum // by)


def _pick(x: TensorType, a: Mapping[str, int]) -> TensorType:
    by = _by("pick", a)
    if x.parts_in_space.copy % by:
        copies, within = x.parts_in_space.copy, _within(x)
        raise UnityError(f"pcg.pick: the value has {copies} copies{within}, of which one of {by} cannot be picked")
    return x.with_copy(x.copy // by)


def _zero_pad(x: TensorType, a: Mapping[str, int]) -> TensorType:
    return x.with_sum(x.sum * _by("zero_pad", a))


def _into_time(op: str, x: TensorType, time: InTime) -> TensorType:
    """Return the type of a value that micro-batches read: their pieces of it, or all the same (copies)."""
    if x.time is not None:
        raise UnityError(f"pcg.{op}: {x} is in time already; a step has one loop over micro-batches")
    if not isinstance(time.role, str) and x.shape[time.role] % (x.degrees[time.role] * time.pieces):
        held = f" in {x.degrees[time.role]} shards" if x.degrees[time.role] > 1 else ""
        raise UnityError(
            f"pcg.{op}: {time.pieces} micro-batches do not divide size {x.shape[time.role]}{held} of dim {time.role}; "
            "choose a divisor"
        )
    return x.in_time(time)


def _out_of_time(op: str, x: TensorType, time: InTime) -> TensorType:
    """Return the type of a value once all micro-batches have made their pieces of it, or addends."""
    if x.time != (time if time.pieces > 1 else None):
        where = time.role if isinstance(time.role, str) else f"dim {time.role}"
        raise UnityError(f"pcg.{op}: {x} is not in time by {time.pieces} in {where}")
    return x.out_of_time


def _pipeline(x: TensorType, a: Mapping[str, int]) -> TensorType:
    return _into_time("pipeline", x, InTime(_dim("pipeline", x, a["dim"]), _by("pipeline", a)))


def _batch(x: TensorType, a: Mapping[str, int]) -> TensorType:
    return _out_of_time("batch", x, InTime(_dim("batch", x, a["dim"]), _by("batch", a)))


def _reuse(x: TensorType, a: Mapping[str, int]) -> TensorType:
    return _into_time("reuse", x, InTime("copy", _by("reuse", a)))


def _accumulate(x: TensorType, a: Mapping[str, int]) -> TensorType:
    return _out_of_time("accumulate", x, InTime("sum", _by("accumulate", a)))


def _send(x: TensorType, a: Mapping[str, int]) -> TensorType:
    source, target = a["source"], a["target"]
    if min(source, target) < 0 or source == target:
        raise UnityError(f"pcg.send: source {source} and target {target} must be two stages, numbered from 0")
    _plain("send", x)
    return x


def _step(name: str, **attributes: int) -> ParallelStep:
    return name, tuple(attributes.items())


def _simple(
    name: str,
    type_rule: Callable[[TensorType, Mapping[str, int]], TensorType],
    inverse: str,
    names: tuple[str, ...] = ("by",),
) -> ParallelOperator:
    def checked(x: TensorType, a: Mapping[str, int]) -> TensorType:
        _plain(name, x)
        return type_rule(x, a)

    rule = type_rule if "low" in names else checked
    return ParallelOperator(name, names, rule, lambda a: (_step(inverse, **{n: a[n] for n in names}),))


def _fused(row: Collective) -> ParallelOperator:
    """Return the parallel operator of a collective, which does what the chain it fuses does."""

    def chain(a: Mapping[str, int]) -> tuple[ParallelStep, ...]:
        return tuple(
            _step(op, by=a["by"]) if dim is None else _step(op, dim=a[dim], by=a["by"]) for op, dim in row.fuses
        )

    def type_rule(x: TensorType, a: Mapping[str, int]) -> TensorType:
        return _chain_type(x, chain(a))

    def backward(a: Mapping[str, int]) -> tuple[ParallelStep, ...]:
        return tuple(step for op, attrs in reversed(chain(a)) for step in PARALLEL_OPERATORS[op].backward(dict(attrs)))

    return ParallelOperator(row.name, row.attributes, type_rule, backward, chain)


PARALLEL_OPERATORS: dict[str, ParallelOperator] = {
    p.name: p
    for p in (
        _simple("partition", _partition, "combine", ("dim", "by")),
        _simple("combine", _combine, "partition", ("dim", "by")),
        _simple("replicate", _replicate, "reduce"),
        _simple("reduce", _reduce, "replicate"),
        _simple("pick", _pick, "zero_pad"),
        _simple("zero_pad", _zero_pad, "pick"),
        ParallelOperator("recompute", (), lambda x, a: x, lambda a: ()),
        ParallelOperator(
            "send", ("source", "target"), _send, lambda a: (_step("send", source=a["target"], target=a["source"]),)
        ),
        _simple("pipeline", _pipeline, "batch", ("dim", "by")),
        _simple("batch", _batch, "pipeline", ("dim", "by")),
        _simple("reuse", _reuse, "accumulate"),
        _simple("accumulate", _accumulate, "reuse"),
        _simple("halo", _halo, "halo_reduce", ("dim", "low", "high")),
        _simple("halo_reduce", _halo_reduce, "halo", ("dim", "low", "high")),
        *map(_fused, FUSED),
    )
}
"""
Every parallel operator by name. `zero_pad` is the dual of `pick`: the value is one addend, the others are zero. `halo`
copies to each piece what its neighbours along a dim hold next to it; its dual adds that to them. `recompute` says that
its operand is not kept for the backward, but computed again: see `pcg.recompute`. `send` hands every piece from a stage
to another, to the device that its view says (`pcg.stages`). `pipeline` gives each micro-batch its part of a dim,
`batch` puts the parts together again (Unity, section 3.3); `reuse` gives every micro-batch the whole, its dual
`accumulate` adds up what each has made.
"""

IN_TIME = ("pipeline", "batch", "reuse", "accumulate")
"""The operators that lead into the loop over micro-batches, and out of it; every shard stays on its device."""

HALO_OPERATORS = HALO_EXCHANGES
"""The operators that change the borders of the shards, not which device holds which."""

STAYING = (*HALO_OPERATORS, *IN_TIME, "recompute", "send")
"""The operators after which, without a view, every shard is on the device it was on."""


def _chain_type(x: TensorType, steps: tuple[ParallelStep, ...]) -> TensorType:
    """
    Return the type of a value of type `x` after a chain of parallel operators. `steps` are (operator's name,
    attributes) pairs, the first applied first. Raises `UnityError` where one does not apply.
    """
    for name, attributes in steps:
        x = PARALLEL_OPERATORS[name].type(x, dict(attributes))
    return x


def type_steps(source: TensorType, target: TensorType) -> list[tuple[str, dict[str, int]]]:
    """
    Return the parallel operators, in order, that turn a value of type `source` into one of type `target`, each as
    (name, attributes). First come those that undo a division, then those that make one.

    Given `[64:2, 8]` and `[64, 8], copy = 2`, returns combine dim 0 by 2, replicate by 2. Raises `UnityError` if
    `source` has a halo, which no operator removes, if `target` has a halo of addends, which none makes, and if the two
    types are divided in time differently.
    """
    if source.halo or target.halo_sum or source.time != target.time:
        raise UnityError(f"pcg: no parallel operators take {source} to {target}")
    undo: list[tuple[str, dict[str, int]]] = []
    make: list[tuple[str, dict[str, int]]] = []
    pairs = [
        ("reduce", "zero_pad", None, source.sum, target.sum),
        ("pick", "replicate", None, source.copy, target.copy),
    ]
    pairs += [
        ("combine", "partition", dim, a, b)
        for dim, (a, b) in enumerate(zip(source.degrees, target.degrees, strict=True))
    ]
    for down, up, dim, a, b in pairs:
        common = gcd(a, b)
        where = {} if dim is None else {"dim": dim}
        if a > common:
            undo.append((down, {**where, "by": a // common}))
        if b > common:
            make.append((up, {**where, "by": b // common}))
    return [*_halo_steps("halo_reduce", source), *undo, *make, *_halo_steps("halo", target)]


def _halo_steps(op: str, type: TensorType) -> list[tuple[str, dict[str, int]]]:
    return [(op, {"dim": d, "low": low, "high": high}) for d, (low, high) in enumerate(type.borders) if low or high]
