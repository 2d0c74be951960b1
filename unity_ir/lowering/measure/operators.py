# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""
Time the parts of programs: operators in plain PyTorch, updates of weights, collectives.

On CPUs, as many ranks as the machine has run the same call at once, so that the times include their competition for
caches and memory: forked processes of one thread each, as programs have, joined over gloo. On a GPU one process runs.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, prod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import operand_shapes
from unity_ir.forms.windows import needs_start
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.triton.optimizer import optimizer_launcher
from unity_ir.lowering import runtime
from unity_ir.lowering.emit.plan_text import compared
from unity_ir.pcg.collectives import COLLECTIVES, ON_DEVICE
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.tdl.parallel import line_of_task

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}
REPEATS = 5
"""Measurements of a call, each of many calls."""
COLD_BYTES = 64 * 2**20
"""
Bytes of operand sets that calls use in turn, and of results kept, more than caches hold: in a step, operands were
mostly not touched just before, and results are written to new memory.
"""
MOVES_LONGER = 4
"""Factor by which collectives are measured longer than kernels: which rank wakes first differs from call to call."""
WORK = 3
"""Products of 256 x 256 matrices between collectives where ranks share cores: a millisecond or two."""
MOST_SETS = 16
"""Most operand sets, however small the operands."""
MOST_BYTES = 2**30
"""An operator is not measured if its operands take more bytes than this."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of random numbers to call an operator with; integers are drawn from 0 to `below` - 1."""

    shape: tuple[int, ...]
    dtype: str
    below: int = 2

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class OperatorJob:
    """
    A call of a function to time: `source` is the Python text (it may use `torch`) that defines the function `name`,
    which is called with tensors like `operands`, then with `numbers`.
    """

    name: str
    source: str
    operands: tuple[Operand, ...]
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveJob:
    """
    A collective to time: the ranks form groups of `members`, which all do it at once; each rank's operand has
    `elements` f32 elements.

    `kind` is a key of `COLLECTIVES`. `elements` is rounded down to a multiple of 64; `members` divides the number of
    ranks.
    """

    kind: str
    members: int
    elements: int

    @property
    def bytes(self) -> int:
        """
        Bytes per rank that `Machine.move_seconds` takes as the size of this collective: those of its operand on one
        rank or, for one without communication (a slice, a padding), those of its result.
        """
        source, target = COLLECTIVES[self.kind].profiled or (None, None)
        after = self.elements * (1 if source is None else self.members) // (1 if target is None else self.members)
        return 4 * (after if self.kind in ON_DEVICE else self.elements)


Job = OperatorJob | CollectiveJob


@dataclass(frozen=True, slots=True)
class Measured:
    """
    The result of a measurement: the `seconds` of one call, their relative `spread`, and the number of repeats.

    `seconds` is the mean over ranks of each one's median of the repeats. If ranks share cores, it is the mean of the
    repeats on the slowest rank. `spread` is the range of the repeats without the extremes, divided by their median, on
    the rank where this is largest.
    """

    seconds: float
    spread: float
    repeats: int


def operator_job(node: Node) -> OperatorJob:
    """
    Return the job that times a sharded operator, in plain PyTorch, on the pieces of one rank.

    Raises `UnityError` for an operator that no launcher covers, or whose operands are too large.
    """
    configuration = node.configuration
    local = line_of_task(node.analysis.bound, configuration)
    dtypes = [v.type.dtype for v in node.operands]
    starts = [v for v in local.extents if configuration.degree(v) > 1 and needs_start(local, v)]
    made = launcher(local, dtypes, "torch", starts)
    shapes = operand_shapes(local)
    operands: list[Operand] = []
    for parameter, dtype, value in zip(local.operands, dtypes, node.operands, strict=True):
        below = [size for r in local.results for size in compared(r.expr, parameter.name, local)]
        operands.append(Operand(shapes.get(parameter.name, value.type.piece_shape), dtype, min(below, default=2)))
    if sum(o.bytes for o in operands) > MOST_BYTES:
        raise UnityError(f"pcg.{node.op}: its operands are too large to be measured")
    return OperatorJob(made.name, made.source, tuple(operands), (0,) * len(starts))


def update_job(elements: int, dtype: str, optimizer: Optimizer) -> OperatorJob:
    """
    Return the job that times an optimizer's update, in PyTorch, of a weight of `elements` elements of element type
    `dtype`.
    """
    made = optimizer_launcher(optimizer.name, dtype, "torch", dtype, dtype)
    numbers = (*((1,) if optimizer.states else ()), *optimizer.settings.values())
    return OperatorJob(made.name, made.source, (Operand((elements,), dtype),) * (2 + optimizer.states), numbers)


class RankPool:
    """
    A pool of `count` processes, the ranks, that time the same call at once. As a context manager it starts and ends
    them.

    They run on `device` (`cpu` or `cuda`), for about `seconds` per operator and `MOVES_LONGER` times that per
    collective.
    """

    def __init__(self, count: int, device: str = "cpu", seconds: float = 0.1):
        self.count = count
        self.device = device
        self.seconds = seconds
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def __enter__(self) -> Self:
        context = get_context("fork" if self.device == "cpu" else "spawn")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, self.count, self.device, self.seconds, theirs, self.folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def measure(self, job: Job) -> Measured:
        """
        Time an operator's call or a collective, run on all ranks of the pool at once. Return `Measured`: the seconds of
        one call, and how far repeated calls differ, as a fraction of these. Raises `UnityError` if the call fails, or a
        process dies.
        """
        try:
            for pipe in self.pipes:
                pipe.send(job)
            answers = [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError) as error:
            raise UnityError("unity-profile: a measuring process has died; is there enough memory?") from error
        failed = next((a for a in answers if isinstance(a, str)), None)
        if failed is not None:
            raise UnityError(failed)
        # The largest spread of any rank is reported.
        spreads = [(sorted(a)[-2] - sorted(a)[1]) / median(a) for a in answers]
        seconds = mean(median(a) for a in answers)
        if self.count > (os.cpu_count() or 1):
            # Ranks that share a core are interrupted in some repeats, and in a step the others wait for the last.
            seconds = max(mean(a) for a in answers)
        return Measured(seconds, max(spreads), len(answers[0]))


# --- in the processes


def _rank(rank: int, count: int, device: str, seconds: float, pipe: Connection, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'ranks'}", rank=rank, world_size=count)
    with suppress(EOFError, OSError):
        worker = _Worker(rank, count, torch.device(device), seconds)
        while True:
            pipe.send(worker.answer(pipe.recv()))
    os._exit(0)  # gloo would wait for ranks that have gone


class _Worker:
    def __init__(self, rank: int, count: int, device: torch.device, seconds: float):
        self.rank = rank
        self.count = count
        self.device = device
        self.seconds = seconds
        self.shared = count > (os.cpu_count() or 1)
        """Whether ranks share cores."""
        self.runtimes: dict[int, SimpleNamespace] = {}

    def answer(self, job: Job) -> list[float] | str:
        """Return the seconds of a call for each repeat, or an error's message; ranks agree on that beforehand."""
        wrong, run = "", None
        try:
            run = self._function(job) if isinstance(job, OperatorJob) else self._move(job)
            if isinstance(job, OperatorJob):
                run()
        except Exception as error:
            wrong = f"{job.name if isinstance(job, OperatorJob) else job.kind}: {error}"
        if self._most(float(bool(wrong))) or run is None:
            return wrong or "another rank failed"
        if isinstance(job, OperatorJob):
            return self._times(run, self.seconds)
        if not self.shared:
            return self._times(run, MOVES_LONGER * self.seconds)
        return self._times_after_work(run, MOVES_LONGER * self.seconds)

    def _times_after_work(self, run: Callable[[], object], seconds: float) -> list[float]:
        """
        Return the seconds of a call after work of about a millisecond, less the work: where ranks share a core, those
        that have arrived wait for those that have not yet had their turn to work.
        """
        factor = torch.rand(256, 256)

        def work() -> None:
            for _ in range(WORK):
                torch.mm(factor, factor)

        def both() -> None:
            work()
            run()

        alone = median(self._times(work, seconds / 2))
        return [max(t - alone, t / 10) for t in self._times(both, seconds)]

    def _most(self, value: float) -> float:
        """Return the largest value of all ranks, which also makes them wait for each other."""
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def _times(self, run: Callable[[], object], seconds: float) -> list[float]:
        calls, took = 1, 0.0
        run()
        # A single call may be interrupted, so calls are doubled until they take a part of a repeat's time.
        while (took := self._most(self._seconds(run, calls))) < seconds / REPEATS / 4 and calls < 100_000:
            calls *= 2
        calls = max(1, ceil(calls * seconds / REPEATS / max(took, 1e-6)))
        self._most(0.0)
        return [self._seconds(run, calls) / calls for _ in range(REPEATS)]

    def _seconds(self, run: Callable[[], object], calls: int) -> float:
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - begin

    def _function(self, call: OperatorJob) -> Callable[[], object]:
        scope: dict[str, Any] = {"torch": torch}
        exec(call.source, scope)
        function = scope[call.name]
        return self._in_turn(call.operands, lambda *given: function(*given, *call.numbers))

    def _in_turn(self, operands: tuple[Operand, ...], function: Callable[..., object]) -> Callable[[], object]:
        """Return a call of `function` on sets of operands in turn, which keeps results for a while (`COLD_BYTES`)."""
        bytes = sum(o.bytes for o in operands)
        sets = [self._operands(operands, k) for k in range(max(1, min(MOST_SETS, COLD_BYTES // max(bytes, 1))))]
        kept: list[object] = []
        turn, room = 0, 0

        def run() -> None:
            nonlocal turn, room
            turn = turn + 1 if turn + 1 < len(sets) else 0
            kept.append(function(*sets[turn]))
            room -= 1
            if room < 0:
                room = max(1, COLD_BYTES // max(_bytes(kept[-1]), 1024))
                kept.clear()

        return run

    def _operands(self, operands: Sequence[Operand], seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        out: list[torch.Tensor] = []
        for operand in operands:
            dtype = DTYPES[operand.dtype]
            if dtype.is_floating_point:
                # Between 0.5 and 1.5, where every function is defined.
                tensor = (torch.rand(operand.shape, generator=generator) + 0.5).to(dtype)
            else:
                tensor = torch.randint(0, operand.below, operand.shape, generator=generator).to(dtype)
            out.append(tensor.to(self.device))
        return out

    def _move(self, job: CollectiveJob) -> Callable[[], object]:
        of = self._runtime(job.members)
        context, axes = of.context, (1,)
        call, dims = COLLECTIVES[job.kind].profiled_call()
        function = getattr(of, call.function)

        def moved(x: torch.Tensor) -> object:
            return function(context, x, *dims, axes)

        def received(x: torch.Tensor) -> object:
            return function(context, x, *dims, axes).wait()

        waits = COLLECTIVES[job.kind].crosses_links
        return self._in_turn((Operand((job.elements // 64, 64), "f32"),), received if waits else moved)

    def _runtime(self, members: int) -> SimpleNamespace:
        """Return the runtime's collectives, and this rank's context in a mesh whose second axis has `members` ranks."""
        if members not in self.runtimes:
            mesh = (self.count // members, members)
            plan = {"NAME": "measure", "MESH": mesh, "WORLD": self.count, "GROUPS": ((1,),), "flight": None}
            of = runtime.load(("ranks", "collectives"), **plan)
            of.context = of.Context("gloo")
            self.runtimes[members] = of
        return self.runtimes[members]


def _bytes(results: object) -> int:
    """Return the bytes of the tensors that a function has returned."""
    tensors = results if isinstance(results, tuple) else (results,)
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
