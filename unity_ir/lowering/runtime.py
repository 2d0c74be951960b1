# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false
"""
The fixed part of every emitted program: ranks and groups, collectives, pieces, checkpoints, the check, the command
line.

`lowering.program` copies everything below the mark into the program, after the plan, the kernels and the step. Above it
are stand-ins for what the plan defines, so that this file can be read, linted and tested like any other.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    roles: tuple[int | str, ...]
    below: int | None = None


NAME = ""
MESH: tuple[int, ...] = ()
WORLD = 1
GROUPS: tuple[tuple[int, ...], ...] = ()
INPUTS: dict[str, Spec] = {}
WEIGHTS: dict[str, Spec] = {}
LOSS = Spec((), torch.float32, ())
OPTIMIZER = ("sgd", {"lr": 0.1})


def forward_backward(ctx, weights, batch):
    raise NotImplementedError


def update(weights, grads, moments, t):
    raise NotImplementedError


def reference(weights, batch):
    raise NotImplementedError


# --- copied into the program from here on ---


def fail(message):
    """End with one line, written at once, so that those of several ranks do not mix."""
    sys.stderr.write(f"{NAME}: {' '.join(str(message).split())}\n")
    if dist.is_initialized():
        dist.destroy_process_group()  # or its threads may abort the process
    sys.exit(1)


class Context:
    """This rank: its device, its place in the mesh, and the groups it is in."""

    def __init__(self, backend: str):
        self.rank = dist.get_rank()
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
        self.place = tuple(self.rank // stride % size for stride, size in zip(strides, MESH))
        self.groups = {axes: self._group(axes) for axes in GROUPS}

    def _group(self, axes: tuple[int, ...]):
        """
        The group of ranks that differ from this one along `axes` only; every rank makes all of them, in one order.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(WORLD):
            strides = [math.prod(MESH[i + 1 :]) for i in range(len(MESH))]
            place = [rank // stride % size for stride, size in zip(strides, MESH)]
            found.setdefault(tuple(c for i, c in enumerate(place) if i not in axes), []).append(rank)
        mine = None
        for ranks in found.values():
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = group
        return mine

    def index(self, axes) -> int:
        """This rank's position along `axes`, the first outermost."""
        position = 0
        for axis in axes:
            position = position * MESH[axis] + self.place[axis]
        return position

    def at(self, pins) -> bool:
        """Whether this rank is where pinned axes are: pairs of an axis and a coordinate."""
        return all(self.place[axis] == coordinate for axis, coordinate in pins)


def build(backend: str) -> Context:
    """Join the other ranks; the world must be the plan's."""
    if not dist.is_initialized():
        if backend == "nccl" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            # Several ranks on one GPU, for tests: NCCL allows it if each believes to be on a host of its own.
            os.environ.update(
                NCCL_HOSTID=f"rank-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
                NCCL_NET="Socket", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_CUMEM_ENABLE="0",
                NCCL_NVLS_ENABLE="0", NCCL_ALGO="Ring", NCCL_PROTO="Simple", NCCL_MAX_NCHANNELS="1",
                TORCH_NCCL_BLOCKING_WAIT="1",
            )  # fmt: skip
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
        dist.init_process_group(backend)
    if dist.get_world_size() != WORLD:
        fail(f"this plan is for {WORLD} ranks, not {dist.get_world_size()}; run torchrun --nproc-per-node {WORLD}")
    return Context(backend)


# --- collectives: each returns the result at once, or a Pending to wait for right before it is used


class Pending:
    """A collective under way."""

    def __init__(self, work, finish):
        self._work, self._finish = work, finish

    def wait(self):
        self._work.wait()
        return self._finish()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _ways(axes) -> int:
    return math.prod(MESH[a] for a in axes)


def all_reduce(ctx, x, axes):
    """The sum of the group's tensors."""
    out = x.clone()
    return Pending(dist.all_reduce(out, group=ctx.groups[axes], async_op=True), lambda: out)


def all_gather(ctx, x, dim, axes):
    """The group's pieces end to end along `dim`."""
    out = x.new_empty((_ways(axes) * x.numel(),))
    work = _all_gather(out, x.contiguous().view(-1), group=ctx.groups[axes], async_op=True)
    return Pending(work, lambda: torch.cat(out.view(_ways(axes), *x.shape).unbind(0), dim))


def reduce_scatter(ctx, x, dim, axes):
    """This rank's part along `dim` of the sum of the group's tensors."""
    parts = torch.stack(x.chunk(_ways(axes), dim))
    out = torch.empty_like(parts[0])
    work = _reduce_scatter(out.view(-1), parts.view(-1), group=ctx.groups[axes], async_op=True)
    return Pending(work, lambda: out)


def all_to_all(ctx, x, source, target, axes):
    """From pieces along `source` to pieces along `target`."""
    parts = torch.stack(x.chunk(_ways(axes), target))
    out = torch.empty_like(parts)
    work = dist.all_to_all_single(out, parts, group=ctx.groups[axes], async_op=True)
    return Pending(work, lambda: torch.cat(out.unbind(0), source))


def broadcast(ctx, x, root, shape, dtype, axes):
    """The tensor of the group's rank `root`, everywhere in the group."""
    out = x.contiguous() if ctx.index(axes) == root else torch.empty(shape, dtype=dtype, device=ctx.device)
    return Pending(dist.broadcast(out, group=ctx.groups[axes], group_src=root, async_op=True), lambda: out)


def scatter(ctx, x, dim, root, shape, dtype, axes):
    """This rank's part along `dim` of the tensor of the group's rank `root`, whose shape is `shape`."""
    shape = [size // _ways(axes) if i == dim else size for i, size in enumerate(shape)]
    out = torch.empty(shape, dtype=dtype, device=ctx.device)
    parts = [p.contiguous() for p in x.chunk(_ways(axes), dim)] if ctx.index(axes) == root else None
    work = dist.scatter(out, parts, group=ctx.groups[axes], group_src=root, async_op=True)
    return Pending(work, lambda: out)


def gather(ctx, x, dim, root, axes):
    """On the group's rank `root` the group's pieces end to end along `dim`; None on the others."""
    mine = ctx.index(axes) == root
    parts = [torch.empty_like(x) for _ in range(_ways(axes))] if mine else []
    work = dist.gather(x.contiguous(), parts or None, group=ctx.groups[axes], group_dst=root, async_op=True)
    return Pending(work, lambda: torch.cat(parts, dim) if mine else None)


def reduce(ctx, x, root, axes):
    """On the group's rank `root` the sum of the group's tensors; None on the others."""
    out = x.clone()
    work = dist.reduce(out, group=ctx.groups[axes], group_dst=root, async_op=True)
    return Pending(work, lambda: out if ctx.index(axes) == root else None)


def send(ctx, x, root, to, shape, dtype, axes):
    """On the group's rank `to` the tensor of rank `root`; None on the others."""
    group, mine = ctx.groups[axes], ctx.index(axes)
    if mine == root:
        return Pending(dist.isend(x.contiguous(), group=group, group_dst=to), lambda: None)
    if mine == to:
        out = torch.empty(shape, dtype=dtype, device=ctx.device)
        return Pending(dist.irecv(out, group=group, group_src=root), lambda: out)
    return None


class Works:
    """Several messages under way."""

    def __init__(self, works):
        self._works = works

    def wait(self):
        for work in self._works:
            work.wait()


def _within(place, other, size, low, high):
    """Which elements of the piece at position `other` lie in the piece at `place` with its halo, first and end."""
    shift = (place - other) * size
    return max(0, shift - low), min(size, shift + size + high)


def _neighbours(ctx, size, low, high, axes):
    """For every rank of the group but this one: which elements of its piece this one's halo has, and the reverse."""
    me = ctx.index(axes)
    for other in range(_ways(axes)):
        theirs, mine = _within(me, other, size, low, high), _within(other, me, size, low, high)
        if other != me and (theirs[0] < theirs[1] or mine[0] < mine[1]):
            yield other, theirs, mine


def _exchange(ctx, messages, axes):
    """Send and receive: pairs of a rank of the group, and the tensors it gets and gives (None where there is none)."""
    group, ops = ctx.groups[axes], []
    for other, got, given in messages:
        if given is not None:
            ops.append(dist.P2POp(dist.isend, given, group=group, group_peer=other))
        if got is not None:
            ops.append(dist.P2POp(dist.irecv, got, group=group, group_peer=other))
    return Works(dist.batch_isend_irecv(ops) if ops else [])


def halo(ctx, x, dim, low, high, axes):
    """`x` with `low` elements before and `high` after it along `dim`, as its neighbours have them; 0 at the ends."""
    size, me = x.shape[dim], ctx.index(axes)
    shape = list(x.shape)
    shape[dim] += low + high
    out = x.new_zeros(shape)
    out.narrow(dim, low, size).copy_(x)
    messages, arrived = [], []
    for other, (first, end), (begin, stop) in _neighbours(ctx, size, low, high, axes):
        got = given = None
        if first < end:
            got = torch.empty_like(x.narrow(dim, first, end - first), memory_format=torch.contiguous_format)
            arrived.append((got, (other - me) * size + low + first))
        if begin < stop:
            given = x.narrow(dim, begin, stop - begin).contiguous()
        messages.append((other, got, given))

    def finish():
        for part, at in arrived:
            out.narrow(dim, at, part.shape[dim]).copy_(part)
        return out

    return Pending(_exchange(ctx, messages, axes), finish)


def halo_reduce(ctx, x, dim, low, high, axes):
    """`x` without `low` elements before and `high` after it along `dim`, plus what its neighbours have there for it."""
    size, me = x.shape[dim] - low - high, ctx.index(axes)
    out = x.narrow(dim, low, size).clone(memory_format=torch.contiguous_format)
    messages, arrived = [], []
    for other, (first, end), (begin, stop) in _neighbours(ctx, size, low, high, axes):
        got = given = None
        if first < end:
            given = x.narrow(dim, (other - me) * size + low + first, end - first).contiguous()
        if begin < stop:
            got = torch.empty_like(x.narrow(dim, 0, stop - begin), memory_format=torch.contiguous_format)
            arrived.append((got, begin))
        messages.append((other, got, given))

    def finish():
        for part, at in arrived:
            out.narrow(dim, at, part.shape[dim]).add_(part)
        return out

    return Pending(_exchange(ctx, messages, axes), finish)


def zero_elsewhere(ctx, x, root, shape, dtype, axes):
    """The tensor of the group's rank `root` as one addend: zero on the others."""
    return x if ctx.index(axes) == root else torch.zeros(shape, dtype=dtype, device=ctx.device)


def keep_part(ctx, x, dim, axes):
    """This rank's part of `x` along `dim`."""
    return x.chunk(_ways(axes), dim)[ctx.index(axes)].contiguous()


def zero_pad(ctx, x, dim, axes):
    """`x` as one addend: in its place along `dim`, or, where it has none, on the first rank only."""
    if dim is None:
        return x if ctx.index(axes) == 0 else torch.zeros_like(x)
    shape = list(x.shape)
    shape[dim] *= _ways(axes)
    out = x.new_zeros(shape)
    out.narrow(dim, ctx.index(axes) * x.shape[dim], x.shape[dim]).copy_(x)
    return out


def constant(ctx, value, shape, dtype, addend_axes):
    """A number everywhere; over `addend_axes` only the first rank has it and the others zero."""
    first = ctx.index(addend_axes) == 0
    return torch.full(shape, value if first else 0.0, dtype=dtype, device=ctx.device)


# --- pieces and whole tensors


def piece(ctx, whole, spec):
    """This rank's piece of a whole tensor; None where it has none."""
    if not ctx.at(pins(spec)):
        return None
    for axis, role in enumerate(spec.roles):
        if isinstance(role, int):
            whole = whole.chunk(MESH[axis], role)[ctx.place[axis]]
    return whole.to(ctx.device).contiguous().clone()


def pins(spec):
    """The axes on which only one coordinate has anything, and which."""
    roles = enumerate(spec.roles)
    return tuple((axis, int(role[3:])) for axis, role in roles if isinstance(role, str) and role.startswith("at "))


def whole(ctx, part, spec):
    """The whole tensor of everyone's pieces, and how much devices that should hold the same differ."""
    if part is None:  # what is in its place is not looked at
        shape = [size // _ways([i for i, r in enumerate(spec.roles) if r == d]) for d, size in enumerate(spec.shape)]
        part = torch.zeros(shape, dtype=spec.dtype, device=ctx.device)
    parts = [torch.empty_like(part) for _ in range(WORLD)]
    dist.all_gather(parts, part.contiguous())
    return assemble(parts, spec)


def assemble(parts, spec):
    """Put the pieces of all ranks together along the mesh axes, innermost first."""
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
                for other in group[1:]:
                    apart = torch.maximum(apart, (other.double() - group[0].double()).abs().max().cpu())
                joined.append(group[0])
        parts = joined
    return parts[0], float(apart)


def initial(name, spec, seed):
    """A whole weight, the same for every plan: normal, scaled by its fan-in."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    scale = (spec.shape[0] if spec.shape else 1) ** -0.5
    return (torch.randn(spec.shape, generator=generator, dtype=torch.float64) * scale).to(spec.dtype)


def init_weights(ctx, seed=0):
    """This rank's pieces of the initial weights, by full name; those that rest elsewhere are left out."""
    here = {name: spec for name, spec in WEIGHTS.items() if ctx.at(pins(spec))}
    return {name: piece(ctx, initial(name, spec, seed), spec) for name, spec in here.items()}


def init_moments(weights):
    """Adam's two moments of every weight."""
    if OPTIMIZER[0] != "adam":
        return {}
    return {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}


class Data:
    """
    Whole batches by step number: rows of the arrays of an .npz file, shuffled anew every epoch, or random numbers.
    """

    def __init__(self, path=None, seed=0):
        self.seed, self.arrays = seed, None
        if path:
            self.arrays = self._read(path)

    @staticmethod
    def _read(path):
        """The arrays of the inputs. A file that could only train something else than it says is refused."""
        import numpy

        try:
            with open(path, "rb") as file, numpy.load(file, allow_pickle=False) as loaded:
                arrays = {name: torch.from_numpy(loaded[name]) for name in INPUTS}
        except Exception as e:  # numpy, zip and torch have many ways to say what is wrong with a file
            fail(f"cannot read {', '.join(INPUTS)} from {path}: {e}")
        for name, spec in INPUTS.items():
            array = arrays[name]
            whole_batch = array.dim() == len(spec.shape) > 0 and len(array) >= spec.shape[0]
            if not whole_batch or array.shape[1:] != spec.shape[1:]:
                fail(f"{path}: {name} is {list(array.shape)}; a batch is {list(spec.shape)}")
            if array.is_complex() or (array.is_floating_point() and not spec.dtype.is_floating_point):
                fail(f"{path}: {name} is {array.dtype}; it must convert to {spec.dtype}")
            arrays[name] = array = array.to(spec.dtype)
            if spec.below is not None and not (0 <= int(array.min()) and int(array.max()) < spec.below):
                fail(f"{path}: {name} has values outside 0 to {spec.below - 1}")
        if len({len(a) for a in arrays.values()}) != 1 or len({s.shape[0] for s in INPUTS.values()}) != 1:
            fail(f"{path}: {', '.join(INPUTS)} must have as many rows as each other, in the file and in a batch")
        return arrays

    def batch(self, t):
        """The whole batch of step `t`, the same on every rank."""
        if self.arrays is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + t)
            return {name: self._random(spec, generator) for name, spec in INPUTS.items()}
        rows = len(next(iter(self.arrays.values())))
        size = next(iter(INPUTS.values())).shape[0]
        epoch, within = divmod(t, rows // size)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
        take = order[within * size : (within + 1) * size]
        return {name: self.arrays[name][take] for name in INPUTS}

    @staticmethod
    def _random(spec, generator):
        if not spec.dtype.is_floating_point:
            return torch.randint(0, spec.below or 2, spec.shape, generator=generator, dtype=spec.dtype)
        return torch.randn(spec.shape, generator=generator, dtype=torch.float32).to(spec.dtype)


# --- a step


def step(ctx, weights, moments, batch, t):
    """Forward, backward and update of step `t` on whole batches; returns this rank's part of the loss."""
    local = {name: piece(ctx, batch[name], spec) for name, spec in INPUTS.items()}
    loss, grads = forward_backward(ctx, weights, local)
    update(weights, grads, moments, t + 1)
    return loss


# --- checkpoints: distributed, by full name, so that any plan and any number of ranks can load them


def state_dict(ctx, weights, moments):
    """The weights and moments this rank has a piece of, as DTensors by full name."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # Every rank makes the mesh of every part of the machine on which something rests, in one order.
    ranks = torch.arange(WORLD).reshape(MESH or (1,))
    meshes = {}
    for pinned in dict.fromkeys(pins(spec) for spec in WEIGHTS.values()):
        held = ranks
        for axis, coordinate in pinned:
            held = held.narrow(axis, coordinate, 1)
        names = tuple(f"axis{i}" for i in range(held.dim()))
        meshes[pinned] = DeviceMesh(ctx.device.type, held, mesh_dim_names=names)

    def dtensor(local, spec):
        places = [Shard(r) if isinstance(r, int) else Replicate() for r in spec.roles] or [Replicate()]
        return DTensor.from_local(local, meshes[pins(spec)], places, run_check=False)

    state = {f"weights.{n}": dtensor(w, WEIGHTS[n]) for n, w in weights.items()}
    for n, pair in moments.items():
        state.update({f"moments.{k}.{n}": dtensor(m, WEIGHTS[n]) for k, m in enumerate(pair)})
    return state


def save(ctx, weights, moments, t, folder):
    """Write a checkpoint after `t` steps. It counts as complete once its metadata, written last, is there."""
    import torch.distributed.checkpoint as dcp

    state = {**state_dict(ctx, weights, moments), "step": torch.tensor(t)}
    path = Path(folder) / f"step_{t:08d}"
    try:
        dcp.save(state, checkpoint_id=str(path))
    except (Exception, dcp.CheckpointException) as e:  # which is no Exception, and wraps that of any rank
        fail(f"cannot write {path}: {_reason(e)}")


def load(ctx, weights, moments, folder):
    """Load the newest complete checkpoint in place; returns how many steps had been done."""
    import torch.distributed.checkpoint as dcp

    found = sorted(p.parent for p in Path(folder).glob("step_*/.metadata"))
    if not found:
        fail(f"no complete checkpoint in {folder}")
    state = {**state_dict(ctx, weights, moments), "step": torch.tensor(0)}
    try:
        dcp.load(state, checkpoint_id=str(found[-1]))
    except (Exception, dcp.CheckpointException) as e:
        fail(f"cannot load {found[-1]}: {_reason(e)}")
    return int(state["step"])


def _reason(error):
    """The last line of what went wrong first, on any rank."""
    failures = getattr(error, "failures", None) or {}
    first = next(iter(failures.values()), (error,))[0]
    lines = str(first).strip().splitlines()
    return lines[-1] if lines else type(first).__name__


# --- the check against plain PyTorch


NORM_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""
Half-precision tensors are compared as a whole: how long the difference from PyTorch in double precision may be, as a
part of the tensor's length. Float32 ones are compared entry by entry.
"""


def check(ctx, steps, seed, data):
    """
    Train `steps` steps and compare with plain PyTorch in double precision: the loss, every gradient by name, and at the
    end every weight. Returns what is wrong, a line each.
    """
    weights = init_weights(ctx, seed)
    moments = init_moments(weights)
    wrong: list[str] = []
    plain = {n: initial(n, s, seed).double().requires_grad_() for n, s in WEIGHTS.items()}
    name, settings = OPTIMIZER
    if name == "adam":
        betas = (settings["beta1"], settings["beta2"])
        optimizer = torch.optim.Adam(plain.values(), lr=settings["lr"], betas=betas, eps=settings["eps"])
    else:
        optimizer = torch.optim.SGD(plain.values(), lr=settings["lr"])
    # Where a gradient is rounding noise, Adam turns its sign into a whole step; such entries may differ by that much.
    noise = {n: torch.zeros(s.shape, dtype=torch.bool) for n, s in WEIGHTS.items()}

    def compare(what, got, apart, want, slack=None):
        loose = NORM_TOLERANCES.get(got.dtype)
        got, want = got.double().cpu(), want.detach()
        scale = float(want.abs().max()) if want.numel() else 0.0
        bound = torch.full_like(want, 1e-4 * scale + 1e-9)
        if slack is not None:
            bound = bound + slack
        off = (got - want).abs()
        if loose is not None:
            close = float(off.norm()) <= loose * float(want.norm()) + 1e-6
        else:
            close = bool((off <= bound).all())
        if not close:
            wrong.append(f"{what} differs from PyTorch's by {float(off.max()):.3g} (its largest entry is {scale:.3g})")
        if not apart <= 1e-5 * scale + 1e-12:
            wrong.append(f"{what} is not the same on devices that should hold the same: {apart:.3g} apart")

    for t in range(steps):
        batch = data.batch(t)
        local = {n: piece(ctx, batch[n], s) for n, s in INPUTS.items()}
        loss, grads = forward_backward(ctx, weights, local)
        optimizer.zero_grad()
        want = reference(plain, {n: b.double() if b.is_floating_point() else b for n, b in batch.items()})
        want.backward()
        compare(f"step {t}: loss", *whole(ctx, loss, LOSS), want)
        for n, spec in WEIGHTS.items():
            compare(f"step {t}: gradient of {n}", *whole(ctx, grads[n], spec), plain[n].grad)
            noise[n] |= plain[n].grad.abs() <= 1e-3 * plain[n].grad.abs().max()
        update(weights, grads, moments, t + 1)
        optimizer.step()
    for n, spec in WEIGHTS.items():
        slack = noise[n].double() * 2 * settings["lr"] * steps if name == "adam" else None
        compare(f"after {steps} steps: weight {n}", *whole(ctx, weights.get(n), spec), plain[n], slack)
    return wrong


# --- the command line


def arguments():
    """The options of the program."""
    parser = argparse.ArgumentParser(description=f"{NAME}: training step for {WORLD} ranks")
    parser.add_argument(
        "--steps", type=int, default=3, help="steps to train in all, those before --load counted (default 3)"
    )
    parser.add_argument("--data", metavar="FILE.npz", help="arrays by input name; random numbers if left out")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and data order (default 0)")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="nccl on GPUs, gloo and Triton's interpreter on CPUs"
    )
    parser.add_argument("--check", action="store_true", help="compare with plain PyTorch instead of training")
    parser.add_argument("--save", metavar="DIR", help="write checkpoints to DIR")
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="every N steps, beside the last")
    parser.add_argument("--load", metavar="DIR", help="go on from the newest complete checkpoint in DIR")
    options = parser.parse_args()
    if options.steps < (1 if options.check else 0) or options.save_every < 0:
        parser.error("--steps and --save-every count steps; --check takes at least one")
    return options


def main():
    """Train, or check."""
    options = arguments()
    torch.set_num_threads(1)
    ctx = build(options.backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    data = Data(options.data, options.seed)
    if options.check:
        wrong = check(ctx, options.steps, options.seed, data)
        if ctx.rank == 0:
            print(
                "\n".join(wrong) or f"check passed: {options.steps} steps, loss, gradients and weights equal PyTorch's"
            )
        dist.destroy_process_group()
        sys.exit(1 if wrong else 0)
    weights = init_weights(ctx, options.seed)
    moments = init_moments(weights)
    first = load(ctx, weights, moments, options.load) if options.load else 0
    for t in range(first, options.steps):
        loss, _ = whole(ctx, step(ctx, weights, moments, data.batch(t), t), LOSS)
        if ctx.rank == 0:
            print(f"step {t + 1} loss {float(loss):.6f}", flush=True)
        due = options.save_every and (t + 1) % options.save_every == 0
        if options.save and (due or t + 1 == options.steps):
            save(ctx, weights, moments, t + 1, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
