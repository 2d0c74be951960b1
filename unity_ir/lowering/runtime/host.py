# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""
Keep the optimizer's state in the memory of the host, and bring it to the device in windows while weights update. Keep
there, between forward and backward, values that the forward saves.
"""

from __future__ import annotations

import math

import torch

from unity_ir.lowering.runtime.collectives import Pending
from unity_ir.lowering.runtime.pieces import Weights, trained
from unity_ir.lowering.runtime.plan import STATE, STATE_WINDOW, WEIGHTS

# --- copied into the program from here on ---


# --- the memory of the host: the optimizer's state, which comes in windows and goes back, and values of the step


SLOTS = 3
"""Windows on the device at once: one that arrives, one that is updated, and one that goes back."""

GRAIN = 64
"""The number of elements at whose multiples a weight is divided."""


class HostCopy:
    """
    Copies to the tensors `targets` from `sources`, which go on beside kernels on a CUDA `stream` until they are waited
    for. Without a stream they are done only then, as late as they can be, so that CPUs show what waits too late.
    """

    def __init__(self, targets, sources, stream=None):
        self.left, self.event = [*zip(targets, sources)], None
        if stream is not None:
            with torch.cuda.stream(stream):
                self._copy()
            self.event = stream.record_event()

    def _copy(self):
        for target, source in self.left:
            target.copy_(source, non_blocking=True)
        self.left = []

    def wait(self, stream=None):
        """Let `stream` (None: the current one) wait for the copies."""
        if self.event is None:
            self._copy()
        else:
            (stream or torch.cuda.current_stream()).wait_event(self.event)


COPY_STREAMS: dict = {}
"""The CUDA streams for copies from the host and to it, by device."""


def copy_streams(device):
    """Return (the stream for copies from the host, that for copies to it) of a device; (None, None) on CPUs."""
    if device.type != "cuda":
        return None, None
    if device not in COPY_STREAMS:
        COPY_STREAMS[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return COPY_STREAMS[device]


BLOCK_BYTES = 2**30
"""Least bytes of a block of pinned memory: PyTorch makes all of them a power of 2."""


class HostMemory:
    """Memory of the host, pinned if `is_pinned`, in blocks whose sizes are powers of 2, each for many tensors."""

    def __init__(self, is_pinned):
        self.is_pinned, self.blocks = is_pinned, []

    def zeros(self, like):
        """Return zeros of the shape and type of `like`."""
        if not self.is_pinned:
            return torch.zeros(like.shape, dtype=like.dtype)
        size = aligned(like.numel() * like.element_size())
        at = next((i for i, (block, used) in enumerate(self.blocks) if used + size <= block.numel()), None)
        if at is None:
            at, whole = len(self.blocks), max(BLOCK_BYTES, 2 ** (size - 1).bit_length())
            self.blocks.append((torch.zeros(whole, dtype=torch.uint8, pin_memory=True), 0))
        block, used = self.blocks[at]
        self.blocks[at] = block, used + size
        return block[used : used + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def weights_at_host(weights):
    """Move those of the Weights to the memory of the host that rest there, in place; return them."""
    memory = HostMemory(any(weight.is_cuda for weight in weights.values()))
    for name, weight in weights.items():
        if WEIGHTS[name].at_host:
            weights[name] = memory.zeros(weight).copy_(weight)
    return weights


def moments_at_host(weights):
    """Return what `init_moments` does, in the memory of the host."""
    memory = HostMemory(any(x.is_cuda for x in (*weights.values(), *weights.casts.values())))
    return {name: tuple(memory.zeros(weight) for _ in STATE) for name, weight in trained(weights).items()}


def windows(sizes, each, most):
    """
    Return the windows of state, lists of (weight, first element, end): of weights with `sizes` {name: elements} and
    `each` {name: bytes of state per element}, at most `most` bytes each, in the order of names.
    """
    found, parts, left = [], [], most
    for name in sorted(sizes):
        begin = 0
        while begin < sizes[name]:
            room = max(left // each[name], 0 if parts else GRAIN)
            end = min(sizes[name], begin + (room if sizes[name] - begin <= room else room // GRAIN * GRAIN))
            if end == begin:
                found.append(parts)
                parts, left = [], most
                continue
            parts.append((name, begin, end))
            left -= (end - begin) * each[name]
            begin = end
    return [*found, parts] if parts else found


def state_windows(weights, grads, moments):
    """
    Yield, for each window of the state `moments` at the host, (its Weights, gradients, moments), by name: views of
    `weights` and `grads`, flat, and a copy of the state on the device. What the caller has changed of the state when it
    asks for the next window goes back to the host; two windows are on their way meanwhile.
    """
    own = trained(weights)
    if not own:
        return
    device = grads[next(iter(own))].device
    from_host, to_host = copy_streams(device)
    sizes = {name: weight.numel() for name, weight in own.items()}
    rest = {name: (*([own[name]] if WEIGHTS[name].at_host else []), *moments[name]) for name in own}
    each = {name: sum(x.element_size() for x in rest[name]) for name in own}
    parts = windows(sizes, each, STATE_WINDOW)
    slots = [Slot(device, max(map(_slot_bytes(rest), parts))) for _ in range(min(SLOTS, len(parts)))]
    if from_host is not None:
        from_host.wait_stream(torch.cuda.current_stream())  # kernels may have used the slots' memory
    there, arriving, leaving = {}, {}, {}
    for number in range(len(parts) + SLOTS - 1):
        if number < len(parts):
            if number >= SLOTS:
                leaving.pop(number - SLOTS).wait(from_host)
            rests = [x.view(-1)[begin:end] for name, begin, end in parts[number] for x in rest[name]]
            here = slots[number % SLOTS].like(rests)
            there[number] = here, rests
            arriving[number] = HostCopy(here, rests, from_host)
        behind = number - (SLOTS - 1)
        if behind >= 0:
            arriving.pop(behind).wait()
            here, rests = there.pop(behind)
            yield _window(parts[behind], weights, grads, iter(here))
            if to_host is not None:
                to_host.wait_stream(torch.cuda.current_stream())
            leaving[behind] = HostCopy(rests, here, to_host)
    for copy in leaving.values():
        copy.wait()


class Slot:
    """Memory on a device for the state of one window at a time, `size` bytes."""

    def __init__(self, device, size):
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def like(self, tensors):
        """Return flat tensors as large as these, side by side in the memory."""
        found, at = [], 0
        for x in tensors:
            size = x.numel() * x.element_size()
            found.append(self.memory[at : at + size].view(x.dtype))
            at += aligned(size)
        return found


def aligned(size):
    """Return `size` bytes, rounded up to what all kernels load whole vectors from."""
    return math.ceil(size / 256) * 256


class ValueAtHost:
    """A value of the step in the memory of the host: the tensor `x` there."""

    def __init__(self, x):
        self.x = x


VALUES: dict = {}
"""
The values of the step at the host, by name and type. Their memory is there for all micro-batches and steps.
"""

VALUE_MEMORY: dict = {}
"""The memory of the host that they are in, by device."""


class ValueCopy(Pending):
    """
    A copy of a value between the device and its host under way. It keeps the tensor on the device until the stream of
    kernels has waited for the copy, so that what gets that memory next comes after it. (With `record_stream` it would
    be free only once the host sees that the copy has ended; but the host is ahead, and would take more memory.)
    """

    def __init__(self, copy, finish, *holds):
        self._work, self._finish, self.holds, self.ended = copy, finish, holds, None


def to_host(ctx, name, x):
    """Start to copy `x` to the host's memory for `name`; return a ValueCopy with the ValueAtHost."""
    key = name, x.dtype
    if key not in VALUES:
        memory = VALUE_MEMORY.setdefault(ctx.device, HostMemory(ctx.device.type == "cuda"))
        VALUES[key] = ValueAtHost(memory.zeros(x))
    value, (_, stream) = VALUES[key], copy_streams(ctx.device)
    x = x.contiguous()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # it has made `x`, and read what was here before
    return ValueCopy(HostCopy([value.x], [x], stream), lambda: value, x)


def from_host(ctx, value):
    """Start to copy a ValueAtHost to the device; return a ValueCopy with a new tensor."""
    out, (stream, _) = torch.empty_like(value.x, device=ctx.device), copy_streams(ctx.device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # kernels may have used the memory of `out`
    return ValueCopy(HostCopy([out], [value.x], stream), lambda: out, out)


def _slot_bytes(rest):
    return lambda parts: sum(
        aligned((end - begin) * x.element_size()) for name, begin, end in parts for x in rest[name]
    )


def _window(parts, weights, grads, here):
    """Return (Weights, gradients, moments) of a window, given the tensors of its state in order."""

    def flat(x, begin, end):
        return x.view(-1)[begin:end]

    own = Weights({})
    kept = {}
    for name, *at in parts:
        own[name] = next(here) if WEIGHTS[name].at_host else flat(weights[name], *at)
        kept[name] = tuple(next(here) for _ in STATE)
    own.casts.update({name: flat(weights.casts[name], *at) for name, *at in parts if name in weights.casts})
    return (
        own,
        {name: flat(grads[name].contiguous(), *at) for name, *at in parts},
        kept,
    )
