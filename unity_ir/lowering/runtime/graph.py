# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Do steps on a GPU without the host between forward and update, as one CUDA graph where that can be."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.plan import CLIP, NAME, RUNNING, TABLES, WORLD, forward_backward, update
from unity_ir.lowering.runtime.ranks import everywhere
from unity_ir.lowering.runtime.recipe import clip_scale, gradient_norm, loss_part
from unity_ir.lowering.runtime.tables import drop_tables, fill_tables, reserve_tables

# --- copied into the program from here on ---


# --- steps of which the host decides nothing: one CUDA graph


WARM_UP = 3
"""Steps that are done kernel by kernel before a CUDA graph is made of one: they compile kernels, and meet ranks."""


class StepGraph:
    """
    Training steps that make their decisions on the device, so that the host can start one before the last has ended:
    whether the step is skipped, how far gradients are clipped, and how many steps were not skipped (`done` before the
    first). The first WARM_UP steps run kernel by kernel; each later one replays a CUDA graph, if `captures`.

    Weights, moments, and running statistics among the pieces `local` of a batch are updated in place. A step is skipped
    if its gradient's norm is nan or inf. If its loss is, but the norm is finite or not computed (no CLIP), the step and
    all later ones are skipped, as the run is to end.
    """

    def __init__(self, ctx, weights, moments, local, done=0, captures=True):
        self.ctx, self.weights, self.moments = ctx, weights, moments
        # Where steps read their batch; running statistics stay where others read them.
        self.local = {n: x if x is None or n in RUNNING else x.clone() for n, x in local.items()}
        self.given = {}
        self.rate, self.done, self.live = (
            torch.full((), number, dtype=torch.float64, device=ctx.device) for number in (1.0, done, 1.0)
        )
        self.ends = torch.zeros((), dtype=torch.bool, device=ctx.device)
        self.made = torch.zeros(3, dtype=torch.float64, device=ctx.device)
        self.steps, self.captures, self.graph, self.tables, self.waits = 0, captures, None, (), None
        if ctx.device.type == "cuda":
            self.stream = torch.cuda.Stream()
            self.slots = torch.zeros(2, 3, dtype=torch.float64).pin_memory()

    def step(self, local=None, rate=1.0):
        """
        Start a step on `local`, this rank's pieces of a batch by name (None: those of the step before), at `rate` times
        the learning rate. Return a function that waits for the step and returns three floats: the whole loss, the
        gradient's norm (0 without CLIP), and 1 if the step counts, 0 if it is skipped. Call that function before the
        second step after this one is started, which reuses its memory.
        """
        for name, x in (local or {}).items():
            if x is not None and x is not self.local[name] and not (name in TABLES and x is self.given.get(name)):
                self.local[name].copy_(x, non_blocking=True)
        self.given = local or self.given
        self.rate.fill_(rate)
        if self.captures and self.graph is None and self.steps >= WARM_UP:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._by_kernels()
        self.steps += 1
        return self._reading()

    def release(self):
        """Give back the graph's memory; further steps are done kernel by kernel."""
        self.graph, self.tables, self.captures = None, (), False

    def _step(self):
        """Do a step on the device; nothing in it waits for the device."""
        loss, grads = forward_backward(self.ctx, self.weights, self.local)
        norm = gradient_norm(self.ctx, grads) if CLIP else torch.zeros_like(self.live)
        loss = loss_part(self.ctx, loss)
        if WORLD > 1:
            dist.all_reduce(loss)
        finite = torch.isfinite(loss).all()
        if CLIP:
            self.ends.copy_(self.ends | (torch.isfinite(norm) & ~finite))
            self.live.copy_(torch.isfinite(norm) & ~self.ends)
        else:
            self.live.mul_(finite)
        self.done.add_(self.live)
        scale = clip_scale(norm) if CLIP else 1.0
        update(self.weights, grads, self.moments, self.done, self.rate, scale, self.live)
        for name in RUNNING:
            now = self.local[name]
            if now is not None:
                now.copy_(torch.where(self.live > 0, grads[name], now))
        self.made.copy_(torch.stack([loss.to(torch.float64).reshape(()), norm, self.live]))

    def _by_kernels(self):
        """Do a step kernel by kernel, on the stream that is captured later, if any is."""
        if self.ctx.device.type != "cuda" or not self.captures:
            self._step()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.captures and self.steps == WARM_UP - 1:
                self._look()
            else:
                self._step()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _look(self):
        """Do a step, and find out whether something in it waits for the GPU; a capture would fail, this does not."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if any("called a synchronizing" in str(each.message) for each in said):
            self.waits = "an operator of it waits for the device"

    def _capture(self):
        """Make a CUDA graph of a step, on all ranks or on none; say why there is none."""
        why, graph = self.waits, None
        if everywhere(self.ctx, why is None):
            try:
                graph = self._record()
            except Exception as e:  # CUDA, NCCL and Triton refuse what a graph cannot have by many classes
                why = (str(e).strip().splitlines() or [type(e).__name__])[0]
            if everywhere(self.ctx, graph is not None):
                self.tables, self.graph = fill_tables(), graph
                return
            drop_tables()
        self.captures = False
        if self.ctx.rank == 0:
            sys.stderr.write(f"{NAME}: steps are no CUDA graph: {why or 'another rank has none'}\n")

    def _record(self):
        """Return a CUDA graph of a step, which does not run it."""
        graph = torch.cuda.CUDAGraph()
        reserve_tables()
        # Other threads look after collectives and read data, which is none of this graph's business.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self._step()
        return graph

    def _reading(self):
        if self.ctx.device.type != "cuda":
            found = self.made.tolist()
            return lambda: found
        slot, event = self.slots[self.steps % 2], torch.cuda.Event()
        slot.copy_(self.made, non_blocking=True)
        event.record()

        def read():
            event.synchronize()
            return slot.tolist()

        return read


def captured(ctx, weights, moments, batch):
    """
    Return a function that ignores its arguments, starts a training step on this rank's pieces `batch`, on GPUs as a
    CUDA graph, and returns what `StepGraph.step` returns. On GPUs, do WARM_UP + 1 steps first, which update weights and
    moments. For scripts that import this program. Raises `RuntimeError` if a GPU cannot make the graph.
    """
    is_cuda = ctx.device.type == "cuda"
    steps = StepGraph(ctx, weights, moments, batch, captures=is_cuda)
    while is_cuda and steps.steps <= WARM_UP:
        steps.step()
    if is_cuda and steps.graph is None:
        raise RuntimeError("steps are no CUDA graph")
    return lambda *_: steps.step()


def why_on_host(ctx, options):
    """Return, as text, why `train` with these command-line options cannot use StepGraph; None if it can."""
    if ctx.device.type != "cuda":
        return "ranks are on CPUs"
    traced = "--check-nan" if options.check_nan else "--profile" if options.profile else None
    return traced and f"{traced} follows the lines of a step"
