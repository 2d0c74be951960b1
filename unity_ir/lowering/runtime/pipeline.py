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
    Run what SCHEDULE has for this rank. A send starts behind what makes it, and is waited for before the next in its
    direction; a receive starts where the schedule has it, and is waited for where its stage needs it.
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
    """The batch of a step under way: of each micro-batch what is kept, received, and made for other ranks."""

    def __init__(self, batch, once=None, sums=None):
        self.batch, self.once, self.sums = batch, once, {} if sums is None else sums
        self.sends = []  # those of what is made once
        self.kept = [{} for _ in range(MICRO_BATCHES)]
        self.made, self.received, self.done = {}, {}, dict.fromkeys(PARTS, 0)

    def send(self, ctx, stage, kind, k):
        """Start the sends of what a stage has made of a micro-batch, which may be nothing; return them."""
        return start_sends(ctx, stage, kind[-1], self.made.pop((stage, kind[-1], k), ()))

    def run(self, ctx, weights, stage, kind, k):
        """Do what a stage does of a micro-batch, or start to receive what it reads."""
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
    """Yield what this rank does, as (stage, kind, micro-batch)."""
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
    """Start the sends of what a stage has made, forward (F) or backward (B): a list of (name, work, tensor)."""
    to = rank_at(ctx, stage + (1 if way == "F" else -1))
    tensors = [x.contiguous() for x in tensors if x is not None]  # what other ranks of the stage hold is None here
    return [("", dist.isend(x, to, group=ctx.ways[way]), x) for x in tensors]


def start_receives(ctx, stage, way):
    """Start the receives of a stage, forward (F) or backward (B): a list of (name, work, tensor)."""
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
    """Return the rank, among all, that does on its stage what this one does on its own."""
    strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
    position, rank = RANK_OF[stage], ctx.rank
    for axis in reversed(PIPELINE):
        position, coordinate = divmod(position, MESH[axis])
        rank += (coordinate - ctx.place[axis]) * strides[axis]
    return rank
