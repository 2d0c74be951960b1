# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false
"""Exchange halos, the borders of pieces, between neighbours."""

from __future__ import annotations

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.collectives import Pending, _ways

# --- copied into the program from here on ---


# --- halos: the borders of pieces, exchanged between neighbours


class Works:
    """The work handles of several messages of torch.distributed (`isend`, `irecv`) as one handle for a Pending."""

    def __init__(self, works):
        self._works = works

    def get_future(self):
        """Always raise `RuntimeError`, as no one future exists; a Profile then times messages to the end of `wait`."""
        raise RuntimeError("several messages have no future in common")

    def wait(self):
        """Wait for all of the messages."""
        for work in self._works:
            work.wait()


def _within(place, other, size, low, high):
    """Return the first and the end of the elements of piece `other` that lie in piece `place` with its halo."""
    shift = (place - other) * size
    return max(0, shift - low), min(size, shift + size + high)


def _neighbours(ctx, size, low, high, axes):
    """Yield each other rank of the group with the elements of its piece in this one's halo, and the reverse, if any."""
    me = ctx.index(axes)
    for other in range(_ways(axes)):
        theirs, mine = _within(me, other, size, low, high), _within(other, me, size, low, high)
        if other != me and (theirs[0] < theirs[1] or mine[0] < mine[1]):
            yield other, theirs, mine


def _exchange(ctx, messages, axes):
    """Start the messages, each a rank of the group, the tensor to receive from it, and the one to send it, or None."""
    group, ops = ctx.groups[axes], []
    for other, got, given in messages:
        if given is not None:
            ops.append(dist.P2POp(dist.isend, given, group=group, group_peer=other))
        if got is not None:
            ops.append(dist.P2POp(dist.irecv, got, group=group, group_peer=other))
    return Works(dist.batch_isend_irecv(ops) if ops else [])


def halo(ctx, x, dim, low, high, axes):
    """
    Start a halo exchange along mesh axes `axes`; return a Pending with piece `x`, extended along dim `dim` by the `low`
    elements before it and the `high` after it, which neighbours hold; zeros beyond the ends of the whole tensor.
    """
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

    return Pending(axes, _exchange(ctx, messages, axes), finish, out, messages)


def halo_reduce(ctx, x, dim, low, high, axes):
    """
    Start the adjoint of `halo`; return a Pending with `x` less its `low` first and `high` last elements along dim
    `dim`, to which neighbours' elements for the same positions of the whole tensor are added.
    """
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

    return Pending(axes, _exchange(ctx, messages, axes), finish, out, messages)


def ring_shift(ctx, x, axes):
    """
    Start to hand `x` on to the next rank along mesh axes `axes`, the last to the first; return a Pending with the `x`
    of the rank before.
    """
    x, ways, me = x.contiguous(), _ways(axes), ctx.index(axes)
    out = torch.empty_like(x)
    work = _exchange(ctx, [((me + 1) % ways, None, x), ((me - 1) % ways, out, None)], axes)
    return Pending(axes, work, lambda: out, out, x)
