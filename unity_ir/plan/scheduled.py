"""A schedule: the lines of a rank's step in the order in which it runs them, as `plan.schedule` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Leaf,
    Register,
    ReshardMove,
    TimeStep,
    ValueMove,
    When,
    reads,
)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Several moves that one call does; they have the same kind, process group and element type."""

    moves: tuple[ReshardMove, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """
    Wait for the collective that makes these registers: one register, or all those of a bucket. Or for the copy between
    the device and its host that makes one; what it reads is held until then.
    """

    registers: tuple[Register, ...]


Start = ReshardMove | HaloExchange | Bucket
"""One call of the runtime: it starts one or several moves over links, or does one on the device itself."""

Action = Leaf | Compute | Start | TimeStep | ValueMove | Wait


@dataclass(frozen=True, slots=True)
class ScheduledLine:
    """
    One line of a schedule: an action (an instruction, bucket or wait), and the micro-batches that run it (`when`).

    `dies` are the registers that are freed after the line: it reads them last, or nobody reads them. `dies_last` are
    registers made once per step that the line reads last: they are freed after its run in the last micro-batch.

    With `in_pieces` the line is in the loop over the pieces of the loss, whose lines are consecutive. What each piece
    makes dies in these lines; what was made before the loop dies in its last line.
    """

    action: Action
    dies: tuple[Register, ...] = ()
    when: When = "every"
    dies_last: tuple[Register, ...] = ()
    in_pieces: bool = False


@dataclass(frozen=True)
class Schedule:
    """
    The lines of a step, in order. `same` is for registers (numbers of local tensors) that are made without any work: it
    maps each to the register whose tensor it shares.
    """

    lines: tuple[ScheduledLine, ...]
    same: Mapping[Register, Register]

    def held(self, register: Register) -> Register:
        """
        Return the register whose tensor `register` shares at run time. It is another one if the move that makes
        `register` has nothing to do, such as one from COPY to REPEAT; else `register` itself.
        """
        return self.same.get(register, register)

    def reads_and_makes(self, action: Action) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
        """
        Return (registers that an action reads, registers that it makes). The action is what one line of the schedule
        does: an instruction, a call with several moves (`Bucket`) or a `Wait`; it is not an action of a pipeline. Those
        read are the ones that hold the tensors at run time (`held`). A wait reads what its collectives made.
        """
        same = self.same
        if isinstance(action, Compute):
            return tuple([same.get(r, r) for r in action.operands]), action.results
        if isinstance(action, Wait):
            return action.registers, ()
        if isinstance(action, Bucket):
            return tuple(self.held(m.operand) for m in action.moves), tuple(m.result for m in action.moves)
        return tuple([same.get(r, r) for r in reads(action)]), (action.result,)


def moves_of(start: Start) -> tuple[ReshardMove | HaloExchange, ...]:
    """Return the moves that one call does: those of a bucket, or the one move itself."""
    return start.moves if isinstance(start, Bucket) else (start,)
