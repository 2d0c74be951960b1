# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false
"""Run a step whose operators are in stages, in the order of a pipeline schedule."""

from __future__ import annotations

import math
import re

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.plan import (
    MESH,
    MICRO_BATCHES,
    PARTS,
    PIPELINE,
    RANK_OF,
    RECEIVES,
    SCHEDULE,
)

# --- copied into the program from here on ---


# --- pipeline


def run_schedule(ctx, weights, batch, once, sums):
    """
    Run this rank's actions in SCHEDULE on its pieces `batch`, with what `before` returned as `once`; parts add to the
    dict `sums`. A send starts behind what makes it, and is waited for before the next in its direction; a receive
    starts where the schedule has it, and is waited for where its stage needs it. All ranks call it.
    """
    start_groups(ctx)
    under_way, sent = UnderWay(batch, once, sums), {"F": [], "B": []}
    for stage, kind, k in actions_of(ctx):
        if kind.startswith("SEND"):
            wait_for(sent[kind[-1]])
            sent[kind[-1]] = under_way.send(ctx, stage, kind, k)
        else:
            under_way.run(ctx, weights, stage, kind, k)
    wait_for(sent["F"])
    wait_for(sent["B"])
    ctx.micro_batch = 0


class UnderWay:
    """
    State of one batch in a pipeline: for each micro-batch, what parts keep for each other, receive, and make for sends.
    """

    def __init__(self, batch, once=None, sums=None):
        self.batch, self.once, self.sums = batch, once, {} if sums is None else sums
        self.sends = []  # those of what is made once
        self.kept = [{} for _ in range(MICRO_BATCHES)]
        self.made, self.received, self.done = {}, {}, dict.fromkeys(PARTS, 0)

    def send(self, ctx, stage, kind, k):
        """
        Start the sends (`kind` SEND_F or SEND_B) of what a stage made of micro-batch `k`; return them as `start_sends`
        does.
        """
        return start_sends(ctx, stage, kind[-1], self.made.pop((stage, kind[-1], k), ()))

    def run(self, ctx, weights, stage, kind, k):
        """
        Run `kind` (F, B, I or W) of a stage on micro-batch `k`, after waiting for what it reads; RECV_F and RECV_B
        start that.
        """
        way = "F" if kind in ("F", "RECV_F") else "B"
        if kind.startswith("RECV"):
            self.received[stage, way, k] = start_receives(ctx, stage, way)
            return
        if kind != "W":
            self.kept[k].update(wait_for(self.received.pop((stage, way, k), ())))
        for part in parts_of(stage, kind):
            self.done[part] += 1
            ctx.micro_batch, ctx.is_last = k, self.done[part] == MICRO_BATCHES
            result = PARTS[part](ctx, weights, self.batch, self.once, self.sums, self.kept[k])
            self.made |= {} if result is None else {(stage, way, k): result}


def actions_of(ctx):
    """Yield this rank's actions in order, as (stage, kind, micro-batch): F, B, I, W, or SEND_ or RECV_ of F or B."""
    for stage, kind, k in re.findall(r"(\d+)([A-Z_]+)(\d+)", SCHEDULE[ctx.index(PIPELINE)]):
        yield int(stage), kind, int(k)


def parts_of(stage, kind):
    """Return the parts, by name, that an action runs: a backward is two where others of its stage are in halves."""
    names = (f"{stage}I", f"{stage}W") if kind == "B" and f"{stage}B" not in PARTS else (f"{stage}{kind}",)
    return [name for name in names if name in PARTS]


def start_groups(ctx):
    """Make the process groups of sends forward (F) and backward (B), if there are none yet: all ranks call it."""
    if not ctx.ways:
        ctx.ways = {way: ctx._group(PIPELINE) for way in "FB"}


def start_sends(ctx, stage, way, tensors):
    """
    Start to send tensors that a stage has made to the next stage (`way` F) or the one before (B): a list of (name,
    work, tensor), with empty names, without those that are None.
    """
    to = rank_at(ctx, stage + (1 if way == "F" else -1))
    tensors = [x.contiguous() for x in tensors if x is not None]  # what other ranks of the stage hold is None here
    return [("", dist.isend(x, to, group=ctx.ways[way]), x) for x in tensors]


def start_receives(ctx, stage, way):
    """
    Start to receive what a stage reads of the one before (`way` F) or the next (B): a list of (name, work, tensor), the
    latter two None where other ranks of the stage hold it.
    """
    source, works = rank_at(ctx, stage + (-1 if way == "F" else 1)), []
    for name, shape, dtype, pins in RECEIVES.get(f"{stage}{way}", ()):
        x = torch.empty(shape, dtype=dtype, device=ctx.device) if ctx.at(pins) else None
        works.append((name, None if x is None else dist.irecv(x, source, group=ctx.ways[way]), x))
    return works


def wait_for(transfers):
    """Wait for transfers that have started; return the tensors by name, None of those that other ranks hold."""
    for _, work, _ in transfers:
        if work is not None:
            work.wait()
    return {name: x for name, _, x in transfers}


def rank_at(ctx, stage):
    """
    Return the rank, among all, of stage `stage` whose coordinates on the mesh axes outside of PIPELINE are this rank's.
    """
    strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
    position, rank = RANK_OF[stage], ctx.rank
    for axis in reversed(PIPELINE):
        position, coordinate = divmod(position, MESH[axis])
        rank += (coordinate - ctx.place[axis]) * strides[axis]
    return rank
