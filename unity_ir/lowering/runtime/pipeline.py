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
    Run this rank's actions of a step in the order of SCHEDULE, on its pieces `batch`. `once` is the dict that the
    program's `before` returned; the dict `sums` gets what micro-batches add up, for its `after`. A send is waited for
    before the next in its direction, a receive before the part that reads it. All ranks call it.
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
    State of one batch on a rank of a pipeline: what parts keep for later parts, receive, or send, and sums so far.
    """

    def __init__(self, batch, once=None, sums=None):
        self.batch, self.once, self.sums = batch, once, {} if sums is None else sums
        self.sends = []  # those of what is made once
        self.kept = [{} for _ in range(MICRO_BATCHES)]
        self.made, self.received, self.done = {}, {}, dict.fromkeys(PARTS, 0)

    def send(self, ctx, stage, kind, k):
        """
        Start to send what stage number `stage` made of micro-batch `k` (`kind`: SEND_F or SEND_B); return its sends.
        """
        return start_sends(ctx, stage, kind[-1], self.made.pop((stage, kind[-1], k), ()))

    def run(self, ctx, weights, stage, kind, k):
        """
        Do an action on micro-batch `k`, but no send: for `kind` RECV_F or RECV_B start the receives of `stage`; for F,
        B, I or W wait for what it reads of these, and call its functions in PARTS (`parts_of`).
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
    """
    Yield this rank's actions as (stage, kind, micro-batch). Kinds: F, B (forward, backward), I, W (the backward's
    halves: gradients of inputs, of weights), and SEND_F, SEND_B, RECV_F, RECV_B.
    """
    for stage, kind, k in re.findall(r"(\d+)([A-Z_]+)(\d+)", SCHEDULE[ctx.index(PIPELINE)]):
        yield int(stage), kind, int(k)


def parts_of(stage, kind):
    """Return the keys in PARTS that a stage's action `kind` runs: ["2F"], or for B ["2I", "2W"] if there is no "2B"."""
    names = (f"{stage}I", f"{stage}W") if kind == "B" and f"{stage}B" not in PARTS else (f"{stage}{kind}",)
    return [name for name in names if name in PARTS]


def start_groups(ctx):
    """Make `ctx.ways`: process groups for sends forward (F) and backward (B), if not yet made. All ranks call it."""
    if not ctx.ways:
        ctx.ways = {way: ctx._group(PIPELINE) for way in "FB"}


def start_sends(ctx, stage, way, tensors):
    """
    Start to send a list of tensors (None is left out) from a stage to the next one (`way` F) or the one before (B).
    Return a list of ("", work handle, tensor) for `wait_for`.
    """
    to = rank_at(ctx, stage + (1 if way == "F" else -1))
    tensors = [x.contiguous() for x in tensors if x is not None]  # what other ranks of the stage hold is None here
    return [("", dist.isend(x, to, group=ctx.ways[way]), x) for x in tensors]


def start_receives(ctx, stage, way):
    """
    Start to receive what a stage reads of the one before (`way` F) or the next (B); return a list of (name, work
    handle, tensor) for `wait_for`, the last two None if only other ranks of the stage hold it.
    """
    source, works = rank_at(ctx, stage + (-1 if way == "F" else 1)), []
    for name, shape, dtype, pins in RECEIVES.get(f"{stage}{way}", ()):
        x = torch.empty(shape, dtype=dtype, device=ctx.device) if ctx.at(pins) else None
        works.append((name, None if x is None else dist.irecv(x, source, group=ctx.ways[way]), x))
    return works


def wait_for(transfers):
    """Wait for transfers from `start_sends` or `start_receives`; return {name: tensor}, None if not held here."""
    for _, work, _ in transfers:
        if work is not None:
            work.wait()
    return {name: x for name, _, x in transfers}


def rank_at(ctx, stage):
    """
    Return the global number of the rank of `stage` that has this rank's coordinates along mesh axes not in PIPELINE.
    """
    strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
    position, rank = RANK_OF[stage], ctx.rank
    for axis in reversed(PIPELINE):
        position, coordinate = divmod(position, MESH[axis])
        rank += (coordinate - ctx.place[axis]) * strides[axis]
    return rank
