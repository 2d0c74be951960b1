"""
A stand-in for CUDA graphs on the CPU: records what a step does, on which tensors, and does the same again.

As a graph's, its replay runs none of the step's Python: numbers of the host are those of the recorded step, and tensors
are at their addresses then. It refuses what a capture refuses: to wait for the device, to copy what the host makes.
"""

from __future__ import annotations

import io
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from unittest.mock import patch

import torch
from ranks import run_main
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

WAITS = ("tolist", "numpy", "cpu", "item", "pin_memory", "__array__")
"""Methods of a tensor that wait for the device, or make pinned memory, and need not be known to the dispatcher."""

REFUSED = ("_local_scalar_dense", "_pin_memory", "lift_fresh", "nonzero", "equal", "unique")
"""The dispatcher's names of such functions, and of what copies the host's numbers."""


class Refused(RuntimeError):
    """Raised where a capture would fail."""


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Callable[..., Any], Any, Any, Any]]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name.startswith(REFUSED):
            raise Refused(f"{name}: operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


class Recording:
    """Records what `step` does, by doing it once; `held` are tensors whose addresses must stay."""

    def __init__(self, program: Any, step: Callable[[], object], held: Callable[[], list[torch.Tensor]]):
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.held = held
        before = [x.clone() for x in held()]
        with recording(program, self.calls):
            step()
        # A capture runs nothing.
        for x, was in zip(held(), before, strict=True):
            x.copy_(was)
        self.addresses = [x.data_ptr() for x in held()]
        self.replays = 0

    def replay(self) -> None:
        """Do all of it again, in the same tensors."""
        assert self.addresses == [x.data_ptr() for x in self.held()], "a tensor that the graph knows is elsewhere"
        self.replays += 1
        for function, args, kwargs, made in self.calls:
            again = function(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(made), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)
                elif isinstance(new, torch.ScriptObject):
                    torch.distributed.distributed_c10d.Work.unbox(new).wait()


@contextmanager
def recording(program: Any, calls: list[tuple[Callable[..., Any], Any, Any, Any]]) -> Iterator[None]:
    """Append to `calls` what is done, of PyTorch's functions and Triton's kernels: (function, arguments, result)."""
    from triton.runtime.interpreter import InterpretedFunction

    run, is_inside = InterpretedFunction.run, [False]

    @contextmanager
    def outside() -> Iterator[None]:
        is_inside[0] = True
        with _disable_current_modes():
            yield
        is_inside[0] = False

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        # Not run: tables of addresses are filled after the capture.
        calls.append((lambda *a, **k: run(kernel, *a, **k), args, kwargs, None))

    def by_host(function: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **kwargs: Any) -> Any:
            with outside():
                return function(*args, **kwargs)

        return done

    def refusing(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def refused(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_inside[0]:
                return method(self, *args, **kwargs)
            raise Refused(f"{name}: operation not permitted when stream is capturing")

        return refused

    with ExitStack() as changed:
        for name in WAITS:
            changed.enter_context(patch.object(torch.Tensor, name, refusing(name)))
        changed.enter_context(patch.object(InterpretedFunction, "run", launched))
        changed.enter_context(patch.object(program, "_placed", by_host(program._placed)))
        # What gloo copies when it is waited for, it copies again in the replay.
        changed.enter_context(patch.object(torch.distributed.Work, "wait", by_host(torch.distributed.Work.wait)))
        changed.enter_context(patch.object(program, "is_capturing", lambda: True))
        changed.enter_context(_Recorder(calls))
        yield


def made_of(program: Any) -> tuple[type, list[Recording]]:
    """The program's StepGraph with recordings for graphs, and those that it makes."""
    made: list[Recording] = []

    class Recorded(program.StepGraph):
        """Steps that are recorded."""

        def _record(self) -> Recording:
            def held() -> list[torch.Tensor]:
                own = [self.rate, self.done, self.live, self.made, *self.weights.values(), *self.local.values()]
                return [x for x in [*own, *(m for pair in self.moments.values() for m in pair)] if x is not None]

            program.reserve_tables()
            apart = {x.untyped_storage().data_ptr() for x in program.RESERVED.values()}
            made.append(Recording(program, self._step, held))
            # In the graph's own memory operators of a replay would write over what was filled in before it.
            unfilled = {there.untyped_storage().data_ptr() for there, _ in program.UNFILLED}
            assert unfilled <= apart, "a table is in the memory of the graph"
            return made[-1]

    return Recorded, made


def run_as_graph(program: Any, options: list[str], folder: str = ".") -> tuple[list[str], list[int]]:
    """The lines a rank prints when the device does its steps, and how often each graph was replayed."""
    program.StepGraph, made = made_of(program)
    program.why_on_host = lambda ctx, options: None
    return run_main(program, ["--graph", *options], None, folder), [each.replays for each in made]


def ended(program: Any, options: list[str], folder: str, as_graph: bool = True) -> tuple[int, str, list[str]]:
    """With which code a rank ends, whose device may do its steps, what it writes to stderr, and its lines."""
    wrong, said = io.StringIO(), io.StringIO()
    if as_graph:
        program.StepGraph, _ = made_of(program)
        program.why_on_host = lambda ctx, options: None
    sys.argv = ["train.py", "--backend", "gloo", *(["--graph"] if as_graph else []), *options]
    os.chdir(folder)
    with redirect_stderr(wrong), redirect_stdout(said):
        try:
            program.main()
        except SystemExit as error:
            return int(error.code or 0), wrong.getvalue(), said.getvalue().splitlines()
    return 0, wrong.getvalue(), said.getvalue().splitlines()


def captured(program: Any, steps: int) -> tuple[list[float], list[float]]:
    """The losses of steps on one batch by the function for who imports the program, and by the host's steps."""
    ctx, batch, found = program.build("gloo"), program.Data().batch(0), list[list[float]]()
    for by_host in (False, True):
        weights = program.init_weights(ctx)
        moments = program.init_moments(weights)
        losses: list[float] = []
        if by_host:
            for t in range(steps):
                losses.append(float(program.step(ctx, weights, moments, batch, t)))
        else:
            step = program.captured(ctx, weights, moments, batch)
            losses += [step(t)()[0] for t in range(steps)]
        found.append(losses)
    return found[0], found[1]


def held_gradients(program: Any) -> list[str]:
    """The weights whose gradients somebody holds after a step, when whoever made it has let go of them."""
    ctx = program.build("gloo")
    weights, batch = program.init_weights(ctx), program.Data(None, 0).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    _, grads = program.forward_backward(ctx, weights, local)
    program.update(weights, grads, program.init_moments(weights), 1)
    found = {n: weakref.ref(grad) for n, grad in grads.items()}
    del grads
    return [n for n, grad in found.items() if grad() is not None]


def update_without_weights(program: Any) -> None:
    """The update of a rank that has no weights, given numbers on a device other than the CPU."""
    one = torch.ones((), dtype=torch.float64, device="meta")
    program.update({}, {}, {}, one, one, one, one)


def which_change_weights(program: Any, factors: list[float]) -> list[bool]:
    """Of steps whose losses, but not gradients, are multiplied by these factors, whether each changes weights."""
    ctx = program.build("gloo")
    weights, batch = program.init_weights(ctx), program.Data(None, 0).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    own, left = program.forward_backward, iter(factors)

    def spoiled(*given: Any) -> Any:
        loss, grads = own(*given)
        return loss * next(left), grads

    program.forward_backward = spoiled
    steps = program.StepGraph(ctx, weights, program.init_moments(weights), local, captures=False)
    found: list[bool] = []
    for _ in factors:
        before = {n: w.clone() for n, w in weights.items()}
        steps.step()
        found.append(any(not torch.equal(w, before[n]) for n, w in weights.items()))
    return found
