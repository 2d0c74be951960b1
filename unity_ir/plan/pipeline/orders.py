"""
Order pipelines whose stages are dealt to ranks round-robin: GPipe, the 1F1B family, looped breadth-first, ZB-H1, ZB-H2.

All of the 1F1B family are one order with other numbers (`_one_forward_one_backward`): how many forwards a rank does
first, and how many weight gradients it leaves for later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import StageAction
from unity_ir.plan.pipeline.schedule import PipelineSchedule, looped_ranks, schedule_by_rank


def gpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    """Return GPipe: all forwards, then all backwards (Huang et al., NeurIPS 2019, section 2.3)."""

    def order(rank: int) -> list[StageAction]:
        forwards = [StageAction(rank, "F", k) for k in range(micro_batches)]
        return [*forwards, *(StageAction(rank, "B", k) for k in range(micro_batches))]

    return schedule_by_rank("gpipe", micro_batches, looped_ranks(ranks), order)


def one_f_one_b(ranks: int, micro_batches: int) -> PipelineSchedule:
    """
    Return 1F1B with a flush (PipeDream-Flush: Narayanan et al., ICML 2021, section 3.2).

    Rank r does `ranks` - 1 - r forwards, then pairs of a forward and a backward, then the remaining backwards.
    """

    def order(rank: int) -> list[StageAction]:
        return _one_forward_one_backward(rank, ranks, micro_batches, first=ranks - 1 - rank)

    return schedule_by_rank("1f1b", micro_batches, looped_ranks(ranks), order)


def eager_one_f_one_b(ranks: int, micro_batches: int) -> PipelineSchedule:
    """
    Return 1F1B with twice as many forwards before a rank's first backward, so that sends overlap with computation
    (Zhuang et al., MLSys 2023, section 4.2).

    If a send takes c seconds, the step is 2 (`ranks` - 1) c longer than with sends that take none; 1F1B loses up to 2 c
    per micro-batch.
    """

    def order(rank: int) -> list[StageAction]:
        return _one_forward_one_backward(rank, ranks, micro_batches, first=2 * (ranks - 1 - rank))

    return schedule_by_rank("eager-1f1b", micro_batches, looped_ranks(ranks), order)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """
    Return interleaved 1F1B, with `chunks` stages per rank (Narayanan et al., SC 2021, section 2.2).

    Raises `UnityError` unless the number of rounds, max(1, `micro_batches` // `ranks`), divides `micro_batches`, as in
    torch.
    """
    rounds = max(1, micro_batches // ranks) if ranks > 0 else 1
    if micro_batches % rounds:
        raise UnityError(
            f"pipeline schedule interleaved: {micro_batches} micro-batches do not divide into {rounds} rounds on "
            f"{ranks} ranks; use {micro_batches - micro_batches % rounds} micro-batches"
        )
    group = micro_batches // rounds

    def order(rank: int) -> list[StageAction]:
        first = (chunks - 1) * group + 2 * (ranks - 1 - rank)
        return _one_forward_one_backward(rank, ranks, micro_batches, first, chunks, group)

    return schedule_by_rank("interleaved", micro_batches, looped_ranks(ranks, chunks), order)


def looped_breadth_first(ranks: int, micro_batches: int, chunks: int) -> PipelineSchedule:
    """
    Return breadth-first order: all forwards of a rank's first chunk, then of its next; backwards in reverse
    (Lamy-Poirier, arXiv 2211.05953, section 4). Weights of a chunk are gathered once per pass.
    """

    def order(rank: int) -> list[StageAction]:
        stages = range(rank, ranks * chunks, ranks)
        forwards = [StageAction(stage, "F", k) for stage in stages for k in range(micro_batches)]
        return [*forwards, *(StageAction(a.stage, "B", a.micro_batch) for a in reversed(forwards))]

    return schedule_by_rank("looped-bfs", micro_batches, looped_ranks(ranks, chunks), order)


def zb_h1(ranks: int, micro_batches: int) -> PipelineSchedule:
    """
    Return ZB-H1, whose ranks hold no more than the first rank of 1F1B does (Qi et al., arXiv 2401.10241, section
    2.1.1).

    Rank r follows 1F1B's order, and leaves r weight gradients for the end, where it would wait.
    """

    def order(rank: int) -> list[StageAction]:
        return _one_forward_one_backward(rank, ranks, micro_batches, first=ranks - 1 - rank, late=rank)

    return schedule_by_rank("zb-h1", micro_batches, looped_ranks(ranks), order)


def zb_h2(ranks: int, micro_batches: int) -> PipelineSchedule:
    """
    Return ZB-H2: ZB-H1 with twice as many forwards first, and twice as many weight gradients left for the end (Qi et
    al., arXiv 2401.10241, section 2.1.2).
    """

    def order(rank: int) -> list[StageAction]:
        return _one_forward_one_backward(rank, ranks, micro_batches, first=2 * (ranks - 1 - rank), late=2 * rank)

    return schedule_by_rank("zb-h2", micro_batches, looped_ranks(ranks), order)


def double_buffered(ranks: int, micro_batches: int, steps: int = 2) -> PipelineSchedule:
    """
    Return PipeDream-2BW: 1F1B that does not drain between training steps (Narayanan et al., ICML 2021, section 3.1;
    Unity, section 5). The schedule covers `steps` training steps of `micro_batches` each; the numbers of micro-batches
    go on from step to step.

    It is asynchronous: while the gradient of a batch is summed, the next batch is computed with older weights. So
    w(t+1) = update(w(t), g(w(t-1))), and a rank holds two versions of the weights. Raises `UnityError` for fewer
    micro-batches than ranks, for which two versions are not enough.
    """
    if micro_batches < ranks:
        raise UnityError(
            f"pipeline schedule 2bw: {micro_batches} micro-batches on {ranks} ranks would need more than two versions "
            f"of the weights; use at least {ranks}"
        )
    running = one_f_one_b(ranks, micro_batches * steps)
    return replace(running, name="2bw", steps=steps, gradient_delay=1)


def steady_step(schedule: PipelineSchedule) -> PipelineSchedule:
    """
    Return one training step of a schedule that never drains, as it repeats: what each rank does from the end of its
    last backward of one step to the end of its last backward of the next. `schedule` covers at least 3 steps.

    Micro-batches are numbered from the first of the step whose backwards these are. Numbers from `micro_batches` on are
    forwards of the step after it. A rank that repeats this step after step does what `schedule` says, with two
    exceptions: in the first step it begins with the forwards of that step (the actions numbered from `micro_batches`
    on), and in the last step it leaves these actions out.

    Sends and receives are kept; a send belongs to the step of what it sends.
    """
    count = schedule.micro_batches // schedule.steps
    rows: list[tuple[StageAction, ...]] = []
    for actions in schedule.ranks:
        begin = _end_of_step(actions, count, 0)
        end = _end_of_step(actions, count, 1)
        rows.append(tuple(a._replace(micro_batch=(a.micro_batch or 0) - count) for a in actions[begin:end]))
    return replace(schedule, micro_batches=count, steps=1, ranks=tuple(rows))


def _end_of_step(actions: Sequence[StageAction], count: int, step: int) -> int:
    """Return the place behind the last backward of a step, of `count` micro-batches, and the send of what it makes."""
    last = count * (step + 1) - 1
    return 1 + max(n for n, (_, kind, k) in enumerate(actions) if k == last and kind in ("B", "SEND_B"))


def _one_forward_one_backward(
    rank: int,
    ranks: int,
    micro_batches: int,
    first: int,
    chunks: int = 1,
    group: int = 1,
    late: int | None = None,
) -> list[StageAction]:
    """
    Order a rank's actions: `first` forwards, then forward and backward in turn, then the remaining backwards.

    Forwards take `group` micro-batches through each of the rank's chunks in turn, backwards through the chunks in
    reverse. If `late` is given, backwards are in halves, and so many weight gradients are left for the end.
    """
    total = micro_batches * chunks

    def place(k: int) -> tuple[int, int]:
        """Return (chunk, micro-batch) of the k-th forward."""
        return (k // group) % chunks, k // (group * chunks) * group + k % group

    forwards = [StageAction(chunk * ranks + rank, "F", j) for chunk, j in map(place, range(total))]
    backwards = [((chunks - 1 - chunk) * ranks + rank, j) for chunk, j in map(place, range(total))]
    out = forwards[:first]
    for k, (stage, j) in enumerate(backwards):
        out += forwards[first + k : first + k + 1]
        out.append(StageAction(stage, "B" if late is None else "I", j))
        if late is not None and k >= late:
            out.append(StageAction(backwards[k - late][0], "W", backwards[k - late][1]))
    return out + [StageAction(stage, "W", j) for stage, j in backwards[total - min(late or 0, total) :]]
