"""
Order pipelines whose ranks have two stages each, there and back: rank r of p has stages r and 2p - 1 - r.

The first and the last stage are on one rank, so a micro-batch's backward starts where its forward ended, and tied
weights of both ends need no send.
"""

from __future__ import annotations

from collections import Counter, deque

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import Kind, StageAction
from unity_ir.plan.pipeline.schedule import PipelineSchedule, schedule_by_rank, vee_ranks


class _Tape:
    """Actions of a rank, where each of a kind and stage takes the next micro-batch."""

    def __init__(self) -> None:
        self.actions: list[StageAction] = []
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.waiting: deque[int] = deque()
        """Stages of weight gradients that are not computed yet, oldest first."""

    def add(self, stage: int, *kinds: Kind, times: int = 1) -> None:
        for kind in kinds * times:
            # A full backward takes the place of both halves.
            count = self.done["I" if kind == "B" else kind, stage]
            self.actions.append(StageAction(stage, kind, count))
            for each in ("I", "W") if kind == "B" else (kind,):
                self.done[each, stage] += 1

    def add_input_gradient(self, stage: int, is_full: bool) -> None:
        """Add a full backward, or its first half, the second of which `add_weight_gradient` adds."""
        self.add(stage, "B" if is_full else "I")
        if not is_full:
            self.waiting.append(stage)

    def add_weight_gradient(self) -> None:
        """Add the oldest weight gradient that waits, if any."""
        if self.waiting:
            self.add(self.waiting.popleft(), "W")


def zb_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """
    Return ZB-V, of two stages per rank (Qi et al., arXiv 2401.10241, section 6). A rank does not wait between its first
    and last action if a forward and both halves of a backward (gradients of the input, and of the weights) take equally
    long.

    The order is made for at least 2 `ranks` - 1 micro-batches; with fewer, the actions of those that are missing are
    left out.
    """
    count = max(micro_batches, 2 * ranks - 1)

    def order(rank: int) -> list[StageAction]:
        there, back = rank, 2 * ranks - 1 - rank
        tape = _Tape()
        tape.add(there, "F", times=2 * (ranks - rank) - 1)
        for _ in range(rank):
            tape.add(back, "F")
            tape.add(there, "F")
        tape.add(back, "F", "I", "W", times=ranks - rank)
        while tape.done["F", back] < count:
            if tape.done["F", there] < count:
                tape.add(there, "F")
            tape.add(there, "I", "W")
            tape.add(back, "F", "I", "W")
        for _ in range(rank):
            tape.add(there, "I")
            tape.add(back, "I")
        tape.add(there, "I", "W", times=ranks - rank)
        for stage in (back, there):
            tape.add(stage, "W", times=count - tape.done["W", stage])
        return [a for a in tape.actions if a.micro_batch is not None and a.micro_batch < micro_batches]

    return schedule_by_rank("zb-v", micro_batches, vee_ranks(ranks), order)


def dual_pipe_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """
    Return DualPipeV, of two stages per rank: DeepSeek-V3's DualPipe cut in half (arXiv 2412.19437, section 3.2.1, and
    its repository).

    The original overlaps a forward with a backward of another micro-batch, which pays where experts are exchanged. Here
    the two are done one after the other. Raises `UnityError` for fewer micro-batches than stages.
    """
    if micro_batches < 2 * ranks:
        raise UnityError(
            f"pipeline schedule dualpipe-v: {micro_batches} micro-batches for {2 * ranks} stages; use at least as many"
        )

    def order(rank: int) -> list[StageAction]:
        there, back = rank, 2 * ranks - 1 - rank
        after = ranks - 1 - rank
        tape = _Tape()
        tape.add(there, "F", times=2 * after)
        for _ in range(rank + 1):
            tape.add(there, "F")
            tape.add(back, "F")
        for _ in range(after):
            tape.add_input_gradient(back, is_full=False)
            tape.add_weight_gradient()
            tape.add(back, "F")
        for _ in range(micro_batches - 2 * ranks + rank + 1):
            tape.add(there, "F")
            tape.add(back, "B")
            tape.add(back, "F")
            tape.add(there, "B")
        for _ in range(after):
            tape.add(back, "B")
            tape.add(back, "F")
            tape.add(there, "B")
        # Of the last backwards the second half are in halves, so that weight gradients fill the waits at the end.
        for k in range(2 * (rank + 1)):
            tape.add_input_gradient(there if k % 2 else back, is_full=k <= rank)
        for _ in range(after):
            tape.add_weight_gradient()
            tape.add_input_gradient(there, is_full=False)
        for _ in range(rank + 1):
            tape.add_weight_gradient()
        return tape.actions

    return schedule_by_rank("dualpipe-v", micro_batches, vee_ranks(ranks), order)
