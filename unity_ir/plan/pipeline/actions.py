"""
Name what a rank of a pipeline does in the words of torch.distributed.pipelining: `2F0` is stage 2's forward of
micro-batch 0.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from unity_ir.errors import UnityError

Kind = Literal[
    "F",
    "B",
    "I",
    "W",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
]
"""
Forward; full backward, or its halves: the gradient of the stage's input (I) and of its weights (W); a send or receive
of the forward's result (F) or of the gradient of the stage's input (B); gather a stage's weights, drop them, reduce
their gradients over devices.
"""

COMPUTE: tuple[Kind, ...] = ("F", "B", "I", "W")

TRANSFERS: tuple[Kind, ...] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

_WORD = re.compile(rf"(\d{{1,9}})({'|'.join(sorted(get_args(Kind), key=len, reverse=True))})(\d{{0,9}})")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class StageAction(NamedTuple):
    """
    One thing that a rank does: a kind of work, for a stage and a micro-batch (None for work that is of no single
    micro-batch, such as a gather of weights).
    """

    stage: int
    kind: Kind
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


def read_actions(word: str) -> tuple[StageAction, ...]:
    """
    Return the actions in one cell of torch's CSV. A word such as `2F0` is stage, kind (`Kind`) and micro-batch: stage
    2's forward of micro-batch 0. Given a blank, returns (); given torch's `(0F4;3B1)OVERLAP_F_B`, the two actions
    inside, to be done one after the other.

    Raises `UnityError` for any other word.
    """
    text = word.strip()
    if not text:
        return ()
    if overlap := _OVERLAP.fullmatch(text):
        return tuple(action for part in overlap[1].split(";") for action in read_actions(part))
    found = _WORD.fullmatch(text)
    if found is None:
        raise UnityError(f"pipeline action '{text}': not a word such as 2F0, 1I3, 1W3, 0B2 or 2SEND_F0")
    stage, kind, micro_batch = found.groups()
    known: Kind = next(k for k in get_args(Kind) if k == kind)
    if (known in COMPUTE or known in TRANSFERS) != bool(micro_batch):
        fix = (
            "is of all micro-batches; leave out the last number"
            if micro_batch
            else "has no micro-batch; write it behind"
        )
        raise UnityError(f"pipeline action '{text}': it {fix}")
    return (StageAction(int(stage), known, int(micro_batch) if micro_batch else None),)
