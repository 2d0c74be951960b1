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
from unity_ir.plan.program import Compute, Fused, HaloExchange, Leaf, Program, Register, ReshardMove, TimeStep
from unity_ir.plan.schedule import Schedule, Start, communicates, moves_of, piece_bytes

MOST_PLACES = 2**16
"""Most places whose calls are compared; each is a few hundred bytes per call."""

Place = tuple[int, ...]
"""Coordinates along the mesh axes on which some tensor is pinned."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """
    A collective as one rank calls it: the ranks of its group (by place), the mesh axes, the kind, and this rank's
    bytes. A send between stages of a pipeline is one, too, called by its two ranks, without axes and with 0 bytes.
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
    Return the collective calls of every rank of a scheduled program, in the order in which it makes them.

    Keys are coordinates along the mesh axes on which some tensor is pinned to a part of the machine: ranks with the
    same ones make the same calls. With no pinned tensors the only key is (). Raises `UnityError` for more than
    `MOST_PLACES` keys.
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
        size = sum(piece_bytes(program, m.operand) for m in moves)
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
    Simulate the collective calls of all ranks: a call ends once all ranks of its group make the same one.

    `found` are the calls as `calls` returns them; messages begin with `subject`. Raises `UnityError`, naming the
    operator, if some call never ends (a deadlock).
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
    Return which ranks do a move: (mesh axis, coordinate) pairs that a rank's coordinates must match; () if all do.

    These are the axes on which the operand is pinned to a part of the machine, except those that the move goes along.
    For the kind `retype`, which moves nothing, they are all axes on which the result is pinned.
    """
    if isinstance(move, HaloExchange):
        return pins_of(program.tensors[move.operand].layout)
    layout = program.tensors[move.result if move.kind == "retype" else move.operand].layout
    return tuple(pin for pin in pins_of(layout) if move.kind == "retype" or pin[0] not in move.axes)


def register_names(program: Program) -> dict[Register, str]:
    """
    Return a name for every register of a program, for messages and traces: that of the operator that made the value, or
    of the leaf (its `op` if it has no name). What moves and steps in time make is named like their operand; names
    repeat.
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
            case _:
                pass
    return out
