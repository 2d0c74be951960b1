# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false
"""Cut whole tensors into pieces, put pieces together again, and make initial weights and moments."""

from __future__ import annotations

import itertools
import math
import zlib

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.collectives import _ways
from unity_ir.lowering.runtime.plan import (
    MESH,
    MICRO_BATCHES,
    STATE,
    STATE_WINDOW,
    WEIGHTS,
    WORLD,
    moments_at_host,
    weights_at_host,
)

# --- copied into the program from here on ---


# --- pieces and whole tensors


def piece(ctx, whole, spec):
    """Return a copy of this rank's piece of tensor `whole` by Spec `spec`, on its device; None if pinned elsewhere."""
    own = piece_view(ctx, whole, spec)
    return None if own is None else own.to(ctx.device).contiguous().clone()


def sent(ctx, whole, spec):
    """
    Return what `piece` does. If `whole` is on the host and this rank on a GPU, copy from page-locked memory, without
    waiting for the copy.
    """
    own = piece_view(ctx, whole, spec)
    if own is None or ctx.device.type != "cuda" or own.is_cuda:
        return piece(ctx, whole, spec)
    return own.contiguous().pin_memory().to(ctx.device, non_blocking=True)


def piece_view(ctx, whole, spec):
    """Return this rank's piece of tensor `whole` by Spec `spec`, which may be a view; None if pinned elsewhere."""
    if not ctx.at(pins(spec)):
        return None
    parts = [whole] if spec.time is None else whole.chunk(MICRO_BATCHES, spec.time)
    for axis, role in enumerate(spec.roles):
        if isinstance(role, int):
            parts = [part.chunk(MESH[axis], role)[ctx.place[axis]] for part in parts]
    return parts[0] if spec.time is None else torch.cat(parts, spec.time)


def positions(ctx, spec, dim):
    """Return the indices along dim `dim` of a whole tensor that this rank's piece by Spec `spec` has, int64 [size]."""
    parts = [torch.arange(spec.shape[dim])]
    if spec.time == dim:
        parts = parts[0].chunk(MICRO_BATCHES)
    for axis, role in enumerate(spec.roles):
        if role == dim:
            parts = [part.chunk(MESH[axis])[ctx.place[axis]] for part in parts]
    return torch.cat(parts)


def pins(spec):
    """Return the (mesh axis, coordinate) pairs that ranks must have to hold the tensor of Spec `spec`; () if all do."""
    roles = enumerate(spec.roles)
    return tuple((axis, int(role[3:])) for axis, role in roles if isinstance(role, str) and role.startswith("at "))


def whole(ctx, part, spec):
    """
    Gather a tensor of Spec `spec` from all ranks' pieces `part` (None: this rank has none); return (whole tensor,
    largest difference between pieces that should be equal, a float) on every rank. All ranks call it.
    """
    return wholes(ctx, {"": part}, {"": spec})[""]


def wholes(ctx, parts, specs):
    """
    Return {name: what `whole` returns} for dicts of pieces and of Specs by name, by one all-gather for each 2^24
    elements or so. All ranks call it.
    """
    own = {n: _placeholder(ctx, specs[n]) if p is None else p.to(ctx.device) for n, p in parts.items()}
    ends = dict(zip(own, itertools.accumulate(p.numel() for p in own.values())))
    found = {}
    for _, together in itertools.groupby(own, lambda n: (own[n].dtype, ends[n] >> 24)):
        mine = {n: own[n] for n in together}
        flat = torch.cat([p.flatten() for p in mine.values()])
        gathered = [torch.empty_like(flat) for _ in range(WORLD)]
        dist.all_gather(gathered, flat)
        for (n, p), *pieces in zip(mine.items(), *(g.split([p.numel() for p in mine.values()]) for g in gathered)):
            found[n] = assemble([x.view(p.shape) for x in pieces], specs[n])
    return found


def _placeholder(ctx, spec):
    """Return a piece of the right shape for a rank that has none; `assemble` ignores it."""
    shape = [size // _ways([i for i, r in enumerate(spec.roles) if r == d]) for d, size in enumerate(spec.shape)]
    return torch.zeros(shape, dtype=spec.dtype, device=ctx.device)


def assemble(parts, spec):
    """
    Return (whole tensor, largest difference between copies) given the list `parts` of all ranks' pieces, by rank:
    shards are joined, addends added up, and of copies the first is taken.
    """
    apart = torch.zeros((), dtype=torch.float64)
    for axis in reversed(range(len(MESH))):
        size, role = MESH[axis], spec.roles[axis]
        joined = []
        for first in range(0, len(parts), size):
            group = parts[first : first + size]
            if isinstance(role, int):
                joined.append(torch.cat(group, role))
            elif role == "sum":
                joined.append(torch.stack(group).sum(0))
            elif role.startswith("at "):
                joined.append(group[int(role[3:])])
            else:
                # Copies are mostly equal, which one look at them tells.
                for other in [other for other in group[1:] if not torch.equal(other, group[0])]:
                    apart = torch.maximum(apart, (other.double() - group[0].double()).abs().max().cpu())
                joined.append(group[0])
        parts = joined
    return parts[0], float(apart)


def initial(name, spec, seed):
    """Return a whole initial weight, normal of deviation `spec.shape[0] ** -0.5`, seeded by `name` and `seed`."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    scale = (spec.shape[0] if spec.shape else 1) ** -0.5
    return (torch.randn(spec.shape, generator=generator, dtype=torch.float64) * scale).to(spec.dtype)


def own_initial(ctx, name, spec, seed, most=2**22):
    """
    Return this rank's piece of an initial weight, made on its device: distributed as `initial`'s, with other values.
    Each element is a hash of its position in the whole, so ranks make only their own, about `most` elements at a time.
    """
    size = [positions(ctx, spec, dim).to(ctx.device) for dim in range(len(spec.shape))]
    out = torch.empty([len(at) for at in size], dtype=spec.dtype, device=ctx.device)
    flat, offset = out.view(len(size[0]) if size else 1, -1), torch.zeros((1,), dtype=torch.int64, device=ctx.device)
    for dim, at in list(enumerate(size))[1:]:
        offset = (offset[:, None] + at * math.prod(spec.shape[dim + 1 :])).flatten()
    rows = size[0] * math.prod(spec.shape[1:]) if size else offset
    step = max(most // max(len(offset), 1), 1)
    for first in range(0, len(rows), step):
        at = rows[first : first + step, None] + offset
        made = normal(at, zlib.crc32(name.encode()) + seed) * (spec.shape[0] if spec.shape else 1) ** -0.5
        flat[first : first + step].copy_(made)
    return out


def normal(at, seed):
    """
    Return standard normal numbers, f64, one for each int64 in tensor `at`: Box-Muller of its seeded SplitMix64 hash.
    """
    x = (at + 1) * -0x61C8864680B583EB + seed * 0x2545F4914F6CDD1D % 2**62
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * factor
    radius, angle = (((part & 0xFFFFFF).to(torch.float64) + 0.5) * 2.0**-24 for part in (x >> 40, x))
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)


class Weights(dict):
    """
    This rank's pieces of weights by full name. For weights whose Spec has a type `cast`, `casts` has copies in that
    type by name, which are kept from step to step. An update writes both; after any other write call `renew_casts`.
    They are on the devices of the dict `like` of such copies, or else on those of the weights.
    """

    def __init__(self, weights, like={}):
        super().__init__(weights)
        kept = {name: WEIGHTS[name].cast for name in self if WEIGHTS[name].cast}
        on = {**self, **like}
        self.casts = {n: torch.empty_like(self[n], dtype=d, device=on[n].device) for n, d in kept.items()}
        self.renew_casts()

    def renew_casts(self):
        """Set the kept cast of each weight that has one, in place, to the weight's present value."""
        for name, cast in self.casts.items():
            cast.copy_(self[name])


def init_weights(ctx, seed=0):
    """
    Return the Weights of this rank, with initial values by `seed`, other ones on GPUs (`own_initial`) than on CPUs
    (`initial`); weights pinned to other ranks are left out.
    """
    here = {name: spec for name, spec in WEIGHTS.items() if ctx.at(pins(spec))}
    is_own = ctx.device.type == "cuda"
    made = {n: own_initial(ctx, n, s, seed) if is_own else piece(ctx, initial(n, s, seed), s) for n, s in here.items()}
    if STATE_WINDOW:
        return weights_at_host(Weights(made))
    return Weights(made)


def trained(weights):
    """Return those of `weights`, {name: tensor or Spec}, that are trained: all but the frozen ones."""
    return {name: weight for name, weight in weights.items() if not WEIGHTS[name].frozen}


def init_moments(weights):
    """Return {trained weight: tuple of the optimizer's moments, zeros shaped as the weight}; {} if it has none."""
    if STATE_WINDOW:
        return moments_at_host(weights)
    return {name: tuple(torch.zeros_like(w) for _ in STATE) for name, w in trained(weights).items()} if STATE else {}


def averaged(weights, moments, updates):
    """
    Return the Weights whose trained ones are the moving averages that `moments` has, after `updates` updates; `weights`
    themselves before the first. Frozen ones are as they are.
    """
    at = STATE.index("average")
    there = {n: moments[n][at].to(w.device) if n in moments else w for n, w in weights.items()}
    return Weights(there, weights.casts) if updates else weights
