"""
The spmd dialect: one rank's program, with local shapes and explicit collectives. Devices form a mesh; a piece's type
says of each mesh axis its role, what the devices along it hold: shards of a dim, addends (`sum`), `copy` (equal, each
used for its own part of the work, so that gradients are added) or `repeat` (equal, and all do the same work).
"""

from xdsl.ir import Dialect

from unity_ir.dialects.spmd.ops import (
    EXCHANGES,
    HOST_COPIES,
    MOVES,
    TIME_STEPS,
    ComputeOp,
    ConstantOp,
    ExchangeOp,
    HostOp,
    InputOp,
    MoveOp,
    ProgramOp,
    ReturnOp,
    TimeOp,
    UpdateOp,
    WeightOp,
)
from unity_ir.dialects.spmd.types import LocalTensorType, PieceType

SPMD = Dialect(
    "spmd",
    [
        *(ProgramOp, InputOp, WeightOp, ConstantOp, ComputeOp),
        *MOVES.values(),
        *EXCHANGES.values(),
        *TIME_STEPS.values(),
        *HOST_COPIES.values(),
        *(UpdateOp, ReturnOp),
    ],
    [PieceType],
)

__all__ = [
    "EXCHANGES",
    "HOST_COPIES",
    "MOVES",
    "SPMD",
    "TIME_STEPS",
    "ComputeOp",
    "ConstantOp",
    "ExchangeOp",
    "HostOp",
    "InputOp",
    "LocalTensorType",
    "MoveOp",
    "PieceType",
    "ProgramOp",
    "ReturnOp",
    "TimeOp",
    "UpdateOp",
    "WeightOp",
]
