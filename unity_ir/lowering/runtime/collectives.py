# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false
"""
Do the moves of a step: collectives between ranks, and slices, paddings and constants on one rank.

Each takes `ctx`, this rank's context (process groups and coordinates in the mesh), its tensor `x` and mesh axes by
number. A rank's position along several axes, such as `root`, counts the first as outermost. What crosses links returns
a `Pending`: a handle whose `wait()` gives the result.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.plan import MESH
from unity_ir.lowering.runtime.ranks import fail

# --- copied into the program from here on ---


# --- collectives: each returns the result at once, or a Pending to wait for right before it is used


class Pending:
    """
    A collective under way. Call `wait` once for its result; until then this keeps the tensors that are read and
    written.
    """

    watch = None  # called with each collective that starts, its mesh axes and its work handle, for profiles

    def __init__(self, axes, work, finish, *holds):
        self._work, self._finish, self.holds, self.ended = work, finish, holds, None
        if Pending.watch:
            Pending.watch(self, axes, work)

    def wait(self):
        """Wait for the collective to end; return its result on this rank."""
        self._work.wait()
        if self.ended:
            self.ended()
        finish = self._finish
        del self._finish, self._work
        self.holds = ()
        return finish()


def wait(*pending):
    """Wait for several Pendings (None: this rank takes no part); return a tuple of their results, None for a None."""
    return tuple(each and each.wait() for each in pending)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _ways(axes) -> int:
    return math.prod(MESH[a] for a in axes)


def _joined(parts, dim):
    """Concatenate along `dim` into a contiguous tensor: by itself `cat` may choose other strides for dims of size 1."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.cat(parts, dim, out=parts[0].new_empty(shape))


def _cut(x, dim, axes):
    """Return the group's parts of `x` along `dim`, stacked along a new first dim and contiguous (as along dim 0)."""
    if dim == 0:
        return x.contiguous().view(-1).view(_ways(axes), x.shape[0] // _ways(axes), *x.shape[1:])
    parts = x.chunk(_ways(axes), dim)
    return torch.stack(parts, out=x.new_empty((len(parts), *parts[0].shape)))


def all_reduce(ctx, x, axes):
    """Start an all-reduce (sum) of `x`, in place, along mesh axes `axes`; return a Pending with the result `x`."""
    return Pending(axes, dist.all_reduce(x, group=ctx.groups[axes], async_op=True), lambda: x, x)


def all_reduce_many(ctx, tensors, axes):
    """
    Start one all-reduce (sum) of several tensors along mesh axes `axes`; return a Pending with a tuple of new tensors,
    their sums.
    """
    out = torch.cat([x.reshape(-1) for x in tensors])
    shapes = [x.shape for x in tensors]
    work = dist.all_reduce(out, group=ctx.groups[axes], async_op=True)

    def finish():
        parts = out.split([math.prod(shape) for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes))

    return Pending(axes, work, finish, out)


def all_gather(ctx, x, dim, axes):
    """Start an all-gather of `x` along mesh axes `axes`; return a Pending with all ranks' `x`, joined along `dim`."""
    out, shape, x = x.new_empty((_ways(axes) * x.numel(),)), x.shape, x.contiguous().view(-1)
    work = _all_gather(out, x, group=ctx.groups[axes], async_op=True)
    if dim == 0:
        return Pending(axes, work, lambda: out.view(_ways(axes) * shape[0], *shape[1:]), out, x)
    return Pending(axes, work, lambda: _joined(out.view(_ways(axes), *shape).unbind(0), dim), out, x)


def all_gather_many(ctx, tensors, dims, axes):
    """Start one all-gather along `axes`; return a Pending with a tuple of what `all_gather` gives for each tensor."""
    ways, sizes = _ways(axes), [x.numel() for x in tensors]
    mine, shapes = torch.cat([x.reshape(-1) for x in tensors]), [x.shape for x in tensors]
    out = mine.new_empty((ways * mine.numel(),))
    work = _all_gather(out, mine, group=ctx.groups[axes], async_op=True)

    def finish():
        parts = [out.new_empty((ways, size)) for size in sizes]
        torch.split_with_sizes_copy(out.view(ways, -1), sizes, 1, out=parts)
        parts = [p.view(ways, *shape) for p, shape in zip(parts, shapes)]
        return tuple(_joined(p.unbind(0), d) if d else p.flatten(0, 1) for p, d in zip(parts, dims))

    return Pending(axes, work, finish, out, mine)


def reduce_scatter(ctx, x, dim, axes):
    """Start a reduce-scatter along `axes`; return a Pending with this rank's part, along `dim`, of the sum of `x`."""
    parts = _cut(x, dim, axes)
    out = torch.empty_like(parts[0])
    work = _reduce_scatter(out.view(-1), parts.view(-1), group=ctx.groups[axes], async_op=True)
    return Pending(axes, work, lambda: out, out, parts)


def reduce_scatter_many(ctx, tensors, dims, axes):
    """Start one reduce-scatter along `axes`; return a Pending with a tuple of what `reduce_scatter` gives for each."""
    parts = [_cut(x, dim, axes) for x, dim in zip(tensors, dims)]
    shapes, mine = [p.shape[1:] for p in parts], torch.cat([p.flatten(1) for p in parts], 1)
    out = mine.new_empty((mine.shape[1],))
    work = _reduce_scatter(out, mine.view(-1), group=ctx.groups[axes], async_op=True)

    def finish():
        found = out.split([math.prod(shape) for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(found, shapes))

    return Pending(axes, work, finish, out, mine)


def all_to_all(ctx, x, source, target, axes):
    """Start an all-to-all along `axes`; return a Pending with `x` resharded from dim `source` to dim `target`."""
    parts = _cut(x, target, axes)
    out = torch.empty_like(parts)
    work = dist.all_to_all_single(out, parts, group=ctx.groups[axes], async_op=True)
    return Pending(axes, work, lambda: _joined(out.unbind(0), source) if source else out.flatten(0, 1), out, parts)


def broadcast(ctx, x, root, shape, dtype, axes):
    """
    Start a broadcast along mesh axes `axes` of `x`, of shape `shape` and type `dtype`, which the rank at position
    `root` has (others pass None); return a Pending with `x`.
    """
    out = x.contiguous() if ctx.index(axes) == root else torch.empty(shape, dtype=dtype, device=ctx.device)
    work = dist.broadcast(out, group=ctx.groups[axes], group_src=root, async_op=True)
    return Pending(axes, work, lambda: out, out)


def scatter(ctx, x, dim, root, shape, dtype, axes):
    """
    Start a scatter along mesh axes `axes` of `x`, of shape `shape` and type `dtype`, which the rank at position `root`
    has (others pass None); return a Pending with this rank's part along `dim`.
    """
    shape = [size // _ways(axes) if i == dim else size for i, size in enumerate(shape)]
    out = torch.empty(shape, dtype=dtype, device=ctx.device)
    parts = list(_cut(x, dim, axes)) if ctx.index(axes) == root else None
    work = dist.scatter(out, parts, group=ctx.groups[axes], group_src=root, async_op=True)
    return Pending(axes, work, lambda: out, out, parts)


def gather(ctx, x, dim, root, axes):
    """Start a gather along `axes`; return a Pending: at position `root` pieces `x` joined along `dim`, else None."""
    mine = ctx.index(axes) == root
    out = x.new_empty((_ways(axes) if mine else 0, *x.shape))
    x, parts = x.contiguous(), out.unbind(0)
    work = dist.gather(x, list(parts) or None, group=ctx.groups[axes], group_dst=root, async_op=True)
    return Pending(axes, work, lambda: (_joined(parts, dim) if dim else out.flatten(0, 1)) if mine else None, x, out)


def reduce(ctx, x, root, axes):
    """Start a reduce along mesh axes `axes`; return a Pending: the sum of `x` at position `root`, None elsewhere."""
    out = x.clone()
    work = dist.reduce(out, group=ctx.groups[axes], group_dst=root, async_op=True)
    return Pending(axes, work, lambda: out if ctx.index(axes) == root else None, out)


class _Unwaited(Pending):
    """A send that somebody else waits for."""

    def wait(self):
        """Return None at once."""


def send(ctx, x, root, to, shape, dtype, axes):
    """
    Start to send `x`, of shape `shape` and type `dtype`, from position `root` along mesh axes `axes` to position `to`.
    Return a Pending, with `x` at `to` and None at `root`; other ranks get no Pending, but None.
    """
    group, mine = ctx.groups[axes], ctx.index(axes)
    if mine == root:
        x = x.contiguous()
        work = dist.isend(x, group=group, group_dst=to)
        if ctx.flight and ctx.flight.unwaited is not None:  # the other rank may come to it much later
            ctx.flight.unwaited.append(("", work, x))
            return _Unwaited(axes, work, lambda: None, x)
        return Pending(axes, work, lambda: None, x)
    if mine == to:
        out = torch.empty(shape, dtype=dtype, device=ctx.device)
        return Pending(axes, dist.irecv(out, group=group, group_src=root), lambda: out, out)
    return None


def zero_elsewhere(ctx, x, root, shape, dtype, axes):
    """Return `x` at position `root` along `axes`, zeros (`shape`, `dtype`) elsewhere: addends, whose sum is `x`."""
    return x if ctx.index(axes) == root else torch.zeros(shape, dtype=dtype, device=ctx.device)


def keep_part(ctx, x, dim, axes):
    """
    Return this rank's part along dim `dim` of a tensor `x` that all ranks along mesh axes `axes` hold. It may share
    memory with `x`.
    """
    return x.chunk(_ways(axes), dim)[ctx.index(axes)].contiguous()


def zero_pad(ctx, x, dim, axes):
    """
    Return this rank's addend of a whole tensor: zeros, and piece `x` where it belongs on `dim`. If `dim` is None, all
    ranks along mesh axes `axes` have the whole `x`: the first of them returns it, the others zeros.
    """
    if dim is None:
        return x if ctx.index(axes) == 0 else torch.zeros_like(x)
    shape = list(x.shape)
    shape[dim] *= _ways(axes)
    out = x.new_zeros(shape)
    out.narrow(dim, ctx.index(axes) * x.shape[dim], x.shape[dim]).copy_(x)
    return out


def zero_pad_many(ctx, tensors, dim, axes):
    """Return a tuple of `zero_pad(ctx, x, dim, axes)` for each `x` of several tensors."""
    return tuple(zero_pad(ctx, x, dim, axes) for x in tensors)


def constant(ctx, value, shape, dtype, addend_axes):
    """Return this rank's addend of a tensor filled with `value`: that on the first rank along `addend_axes`, else 0."""
    first = ctx.index(addend_axes) == 0
    return torch.full(shape, value if first else 0.0, dtype=dtype, device=ctx.device)


# --- rows of experts, of which data say how many go where


def count_rows(ctx, e, experts, rows, layer, axes):
    """
    Start to count the rows that ranks along mesh axes `axes` are to send each other: each row to the rank that has its
    expert, of the integers `e`, of which each rank has `experts` in order. Return a Pending with two lists, of how many
    rows this rank sends to each and receives from each, whose `wait` waits for the device. It ends the run where a rank
    would receive more than `rows`; `layer` is the name of the experts.
    """
    ways, to = _ways(axes), e.reshape(-1).long() // experts
    mine = to.new_zeros(ways).scatter_add_(0, to, torch.ones_like(to))
    out = mine.new_empty(ways * ways)
    work = _all_gather(out, mine, group=ctx.groups[axes], async_op=True)

    def finish():
        table, me = out.view(ways, ways).tolist(), ctx.index(axes)
        most = max(map(sum, zip(*table)))
        if most > rows:
            fail(
                f"{layer}: {most} rows go to the experts of one rank, which has room for {rows}; make the plan with a "
                "larger imbalance, and resume from the last checkpoint"
            )
        return table[me], [sent[me] for sent in table]

    return Pending(axes, work, finish, out, mine)


def send_rows(ctx, x, counts, rows, axes):
    """
    Start to send the rows `x` [1, n, ..], sorted by rank, to the ranks along `axes`, as many as `counts` says. Return a
    Pending with [1, `rows`, ..]: the rows that come, in order of ranks, and zeros (-1 of integers) after them.
    """
    (to, come), x = counts, x.contiguous()
    out = x.new_empty((1, rows, *x.shape[2:]))
    out[:, sum(come) :].fill_(0 if out.is_floating_point() else -1)
    group = ctx.groups[axes]
    work = dist.all_to_all_single(out[0, : sum(come)], x[0], come, to, group=group, async_op=True)
    return Pending(axes, work, lambda: out, out, x)


def return_rows(ctx, x, counts, axes):
    """Start to send rows that `send_rows` with these `counts` brought back; return a Pending with them [1, n, ..]."""
    (to, come), x = counts, x.contiguous()
    out = x.new_empty((1, sum(to), *x.shape[2:]))
    work = dist.all_to_all_single(out[0], x[0, : sum(come)], to, come, group=ctx.groups[axes], async_op=True)
    return Pending(axes, work, lambda: out, out, x)


# --- micro-batches


def micro_batches(ctx, count):
    """Yield (is first, is last) for each of a step's `count` micro-batches; `ctx.micro_batch` is then its number."""
    for ctx.micro_batch in range(count):
        yield ctx.micro_batch == 0, ctx.micro_batch == count - 1


def take_micro_batch(ctx, x, dim, count):
    """
    Split `x` into `count` equal parts along `dim`; return part `ctx.micro_batch` (from 0), the current micro-batch's.
    """
    return x.chunk(count, dim)[ctx.micro_batch].contiguous()


def accumulated(total, x, last, dtype=None):
    """
    Return `total`, the sum over earlier micro-batches or loss pieces, after adding `x` to it in place. At the first,
    `total` is None, and `x` itself is returned. Half precision is summed in float32 until the `last`, which returns the
    sum as `dtype` (None: the type of `x`).
    """
    half = x.dtype in (torch.float16, torch.bfloat16)
    total = (x.float() if half else x) if total is None else total.add_(x)
    return total.to(dtype or x.dtype) if last else total


def join_micro_batches(total, x, dim, last):
    """
    Return the list `total` of earlier micro-batches' parts (None: none yet) with `x` appended; at the `last`, return
    all parts joined along `dim`.
    """
    parts = [*(total or []), x]
    return torch.cat(parts, dim) if last else parts


def loss_pieces(ctx, count):
    """
    Iterate over `count` loss pieces: each the loss of a part of the tokens, so that memory holds fewer logits. Set
    `ctx.piece`, which `take_piece` reads, to the number of the piece, from 0, and yield whether it is the last.
    """
    for ctx.piece in range(count):
        yield ctx.piece == count - 1


def take_piece(ctx, x, dim, count):
    """
    Split `x` into `count` equal parts along `dim`; return that of the current piece of the loss, number `ctx.piece`.
    """
    return x.chunk(count, dim)[ctx.piece].contiguous()


def put_piece(ctx, whole, x, dim, count):
    """Copy `x` into part `ctx.piece` of `count` equal ones along `dim` of `whole` (None: new zeros); return `whole`."""
    if whole is None:
        shape = list(x.shape)
        shape[dim] *= count
        whole = x.new_zeros(shape)  # what others look at must be finite
    whole.chunk(count, dim)[ctx.piece].copy_(x)
    return whole
