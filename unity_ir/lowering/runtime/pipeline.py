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
    if ctx.ways is None:
        ctx.ways = {way: ctx._group(PIPELINE) for way in "FB"}
    kept = [{} for _ in range(MICRO_BATCHES)]
    made, waits, sent, done = {}, {}, {}, {}
    for stage, kind, k in actions_of(ctx):
        way = kind[-1] if "_" in kind else "F" if kind == "F" else "B"
        if kind.startswith("SEND"):
            for work, _ in sent.pop(way, ()):
                work.wait()
            sent[way] = start_sends(ctx, stage, way, made.pop((stage, way, k)))
        elif kind.startswith("RECV"):
            waits[stage, way, k] = start_receives(ctx, stage, way)
        else:
            if kind != "W":
                for work, name, x in waits.pop((stage, way, k), ()):
                    if work is not None:
                        work.wait()
                    kept[k][name] = x
            part = f"{stage}{kind}"
            done[part] = done.get(part, 0) + 1
            if part in PARTS:
                ctx.micro_batch, ctx.is_last = k, done[part] == MICRO_BATCHES
                made[stage, way, k] = PARTS[part](ctx, weights, batch, once, sums, kept[k])
    for works in sent.values():
        for work, _ in works:
            work.wait()
    ctx.micro_batch = 0


def actions_of(ctx):
    """Yield what this rank does, as (stage, kind, micro-batch)."""
    for word in SCHEDULE[ctx.index(PIPELINE)].split():
        stage, kind, k = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", word).groups()
        yield int(stage), kind, int(k)


def start_sends(ctx, stage, way, tensors):
    """Start the sends of what a stage has made, forward (F) or backward (B): a list of (work, tensor)."""
    to = rank_at(ctx, stage + (1 if way == "F" else -1))
    tensors = [x.contiguous() for x in tensors if x is not None]  # what other ranks of the stage hold is None here
    return [(dist.isend(x, to, group=ctx.ways[way]), x) for x in tensors]


def start_receives(ctx, stage, way):
    """Start the receives of a stage, forward (F) or backward (B): a list of (work, name, tensor)."""
    source, works = rank_at(ctx, stage + (-1 if way == "F" else 1)), []
    for name, shape, dtype, pins in RECEIVES.get(f"{stage}{way}", ()):
        x = torch.empty(shape, dtype=dtype, device=ctx.device) if ctx.at(pins) else None
        works.append((None if x is None else dist.irecv(x, source, group=ctx.ways[way]), name, x))
    return works


def rank_at(ctx, stage):
    """Return the rank, among all, that does on its stage what this one does on its own."""
    strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
    position, rank = RANK_OF[stage], ctx.rank
    for axis in reversed(PIPELINE):
        position, coordinate = divmod(position, MESH[axis])
        rank += (coordinate - ctx.place[axis]) * strides[axis]
    return rank
