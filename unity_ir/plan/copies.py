"""
Count the copies that a device makes for its collectives: the kernels, and the bytes that they read and write.

NCCL sends and receives contiguous buffers. So kernels copy pieces that are cut or joined along an inner dim, halos, and
the members of a bucket: before the collective starts, or once it was waited for. The copies are made by
`lowering/runtime/collectives.py` and `lowering/runtime/halos.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.sharding import is_shard
from unity_ir.plan.instructions import HaloExchange, Register, ReshardMove, RowMove, communicates
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import Bucket, Start


@dataclass(frozen=True, slots=True)
class Copies:
    """
    Copies on one device, one after the other: the number of kernels, and the bytes that they read and write together.
    """

    kernels: int = 0
    bytes: int = 0

    def __add__(self, other: Copies) -> Copies:
        return Copies(self.kernels + other.kernels, self.bytes + other.bytes)


NONE = Copies()


def copies(program: Program, start: Start, in_place: Collection[Register]) -> tuple[Copies, Copies]:
    """
    Return the copies that one device makes for one call of a collective (`start`), which sends and receives contiguous
    buffers only: (those before it starts, those after it was waited for), each as a number of kernels and the bytes
    that they read and write (`Copies`). A move that does not communicate has none.

    Where devices differ, the one that copies most counts: for a halo exchange a device with neighbours on both sides,
    for a collective with a root the root. `in_place` has the results (registers) of all-reduces that overwrite their
    operand (`Plan.in_place`); other all-reduces copy it first.
    """
    if isinstance(start, Bucket):
        return _of_bucket(program, start)
    if not communicates(start):
        return NONE, NONE
    if isinstance(start, HaloExchange):
        return _of_halo(program, start)
    before, after = program.bytes[start.operand], program.bytes[start.result]
    if isinstance(start, RowMove):
        # A buffer is filled where no rows come.
        return Copies(1, after * (start.rows - start.live) // start.rows) if start.kind == "send_rows" else NONE, NONE
    is_sum = start.kind == "reduce" or (start.kind == "all_reduce" and start.result not in in_place)
    return _copy(before, is_sum) + _cut(program, start), _copy(after, _joins(start))


def _of_bucket(program: Program, bucket: Bucket) -> tuple[Copies, Copies]:
    """One kernel joins the operands, one divides what was gathered. Pieces along inner dims have their own."""
    before, after = _copy(sum(program.bytes[m.operand] for m in bucket.moves)), NONE
    for move in bucket.moves:
        before += _cut(program, move)
        after += _copy(program.bytes[move.result], _joins(move))
    if bucket.moves[0].kind == "all_gather":
        after += _copy(sum(program.bytes[m.result] for m in bucket.moves))
    return before, after


def _of_halo(program: Program, exchange: HaloExchange) -> tuple[Copies, Copies]:
    """The piece and its borders are copied to and from a larger one, on a device that has neighbours on both sides."""
    small, large = exchange.operand, exchange.result
    is_sum = COLLECTIVES[exchange.kind].reduces
    if is_sum:
        small, large = large, small
    piece, whole = program.bytes[small], program.bytes[large]
    size = program.tensors[small].local(program.mesh)[exchange.dim]
    sides = exchange.low, exchange.high
    messages = sum(-(-border // size) for border in sides)
    arrived = whole - piece
    if is_sum:
        return _copy(piece) + Copies(messages, 2 * arrived), Copies(messages, 3 * arrived)
    # Pieces that are sent whole are not cut.
    cut = [border % size for border in sides if border % size]
    sent = Copies(len(cut), 2 * sum(cut) * (piece // size))
    return Copies(1, whole) + _copy(piece) + sent, Copies(messages, 2 * arrived)


def _copy(size: int, is_made: bool = True) -> Copies:
    return Copies(1, 2 * size) if is_made else NONE


def _cut(program: Program, move: ReshardMove) -> Copies:
    """The parts of an operand along an inner dim, one after the other."""
    inner = COLLECTIVES[move.kind].cuts and is_shard(move.target) and move.target > 0
    return _copy(program.bytes[move.operand], inner)


def _joins(move: ReshardMove) -> bool:
    """Whether pieces are joined along an inner dim."""
    return COLLECTIVES[move.kind].joins and is_shard(move.source) and move.source > 0
