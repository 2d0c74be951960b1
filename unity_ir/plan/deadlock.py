"""
Check that the ranks of a program do not deadlock: all ranks of a group make the same calls in the same order.

What ranks do differs only along mesh axes on which some tensor is pinned, so one rank for each place along those axes
is checked for all others there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unity_ir.errors import UnityError
from unity_ir.pcg.sharding import Pins, pins_of
from unity_ir.plan.instructions import (
    Compute,
    Fused,
    HaloExchange,
    Leaf,
    Register,
    ReshardMove,
    TimeStep,
    ValueMove,
    communicates,
)
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import Schedule, Start, moves_of

MOST_PLACES = 2**16
"""Most places whose calls are compared; each is a few hundred bytes per call."""

Place = tuple[int, ...]
"""Coordinates along the mesh axes on which some tensor is pinned."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """
    A collective as one rank calls it: the ranks of its group (by place), the mesh axes, the kind, and this rank's
    bytes. A send between stages of a pipeline counts as a collective of its two ranks, without axes and with 0 bytes.
    """

    group: tuple[Place, ...]
    axes: tuple[int, ...]
    kind: str
    bytes: int
    of: str
    """The operator whose result it moves, for messages."""
    result: Register = -1
    """The (first) register it makes, so that calls which move different tensors are different."""


def calls(program: Program, schedule: Schedule) -> dict[Place, list[CollectiveCall]]:
    """
    Return the collective calls of every rank of a scheduled program, in the order in which the rank makes them.

    Ranks are grouped by place: their coordinates along the mesh axes on which some tensor is pinned. Ranks of one place
    make the same calls, so the result has one list per place; without pinned tensors the only place is ().

    Raises `UnityError` if there are more than `MOST_PLACES` places.
    """
    sizes = program.mesh.sizes
    layouts = [t.layout for t in program.tensors.values()]
    apart = tuple(sorted({axis for layout in layouts for axis, _ in pins_of(layout)}))
    if (count := prod(sizes[axis] for axis in apart)) > MOST_PLACES:
        raise UnityError(
            f"spmd.program @{program.name}: values are pinned along axes of {count:,} devices, of which each may make "
            f"other calls; at most {MOST_PLACES:,} can be checked for deadlocks, so use fewer devices"
        )
    places = list(product(*(range(sizes[axis]) for axis in apart)))
    names = register_names(program)
    groups: dict[tuple[int, ...], dict[Place, tuple[Place, ...]]] = {}
    found: dict[Place, list[CollectiveCall]] = {place: [] for place in places}
    for line in schedule.lines:
        if not isinstance(line.action, Start):
            continue
        moves = moves_of(line.action)
        first = moves[0]
        if not communicates(first):
            continue
        pinned = dict(ranks_of_move(program, first))
        size = sum(program.bytes[m.operand] for m in moves)
        for place in places:
            if all(c == pinned.get(axis, c) for axis, c in zip(apart, place, strict=True)):
                if first.axes not in groups:
                    groups[first.axes] = _groups(places, apart, first.axes)
                group = groups[first.axes][_elsewhere(place, apart, first.axes)]
                call = CollectiveCall(group, first.axes, first.kind, size, names[first.operand], first.result)
                found[place].append(call)
    return found


def _groups(places: Sequence[Place], apart: Sequence[int], axes: Sequence[int]) -> dict[Place, tuple[Place, ...]]:
    """Return the places that differ along `axes` only, by their coordinates along the other axes of `apart`."""
    found: dict[Place, list[Place]] = {}
    for place in places:
        found.setdefault(_elsewhere(place, apart, axes), []).append(place)
    return {at: tuple(group) for at, group in found.items()}


def _elsewhere(place: Place, apart: Sequence[int], axes: Sequence[int]) -> Place:
    return tuple(x for x, axis in zip(place, apart, strict=True) if axis not in axes)


def check_order(subject: str, found: dict[Place, list[CollectiveCall]]) -> None:
    """
    Check that no ranks wait for each other for ever, by simulating their collective calls: a call ends once all ranks
    of its group have reached the same one.

    `found` has the calls of each place, as `calls` returns them; messages begin with `subject`. Raises `UnityError`,
    naming the operator, if some call never ends (a deadlock).
    """
    at = dict.fromkeys(found, 0)
    current = {place: mine[0] for place, mine in found.items() if mine}
    while current:
        ended: set[Place] = set()
        for place, call in current.items():
            if place not in ended and all(current.get(other) == call for other in call.group):
                ended.update(call.group)
        if not ended:
            place, call = next(iter(current.items()))
            other = next(o for o in call.group if current.get(o) != call)
            theirs = current.get(other)
            does = f"does {_words(theirs)}" if theirs else "has done all of its own"
            raise UnityError(
                f"{subject}: {_words(call)}: ranks at {list(place)} wait for those at {list(other)}, which "
                f"{does}; all ranks of a group must make the same calls in the same order"
            )
        for place in ended:
            at[place] += 1
            if at[place] < len(found[place]):
                current[place] = found[place][at[place]]
            else:
                del current[place]


def _words(call: CollectiveCall) -> str:
    if not call.axes:
        return f"{call.kind} of {call.of}"
    return f"{call.kind} of {call.of} along {list(call.axes)}, {call.bytes:,} bytes"


def ranks_of_move(program: Program, move: ReshardMove | HaloExchange) -> Pins:
    """
    Return which ranks do a move, as (mesh axis, coordinate) pairs that a rank's coordinates must match; () if all ranks
    do it.

    The pairs are the pinned axes of the operand, except those along which the move goes. For the kind `retype`, which
    moves nothing, they are the pinned axes of the result.
    """
    if isinstance(move, HaloExchange):
        return pins_of(program.tensors[move.operand].layout)
    layout = program.tensors[move.result if move.kind == "retype" else move.operand].layout
    return tuple(pin for pin in pins_of(layout) if move.kind == "retype" or pin[0] not in move.axes)


def register_names(program: Program) -> dict[Register, str]:
    """
    Return a name for every register (number of a local tensor) of a program, for messages and traces. A result of an
    operator has the operator's name. A leaf (input, weight, constant) has its own, or its `op`, such as `constant`, if
    it has none. The result of a move, and of a step into or out of a loop (`TimeStep`), has the name of its operand.
    Several registers may have the same name.
    """
    out: dict[Register, str] = {}
    for instruction in program.body:
        match instruction:
            case Leaf(op, result, name):
                out[result] = name or op
            case Fused(members=members):
                out.update((r, m.operator) for m in members for r in m.results)
            case Compute(name, _, results):
                out.update(dict.fromkeys(results, name))
            case ReshardMove(operand, result) | HaloExchange(operand, result) | TimeStep(operand, result):
                out[result] = out[operand]
            case ValueMove(operand, result):
                out[result] = out[operand]
            case _:
                pass
    return out
