"""
Train by a plan in a loop of one's own: its program's functions, on this rank, with the state that they change.

The program is the text that `Plan.emit` writes; its `main` is not called, and its parts are (`lowering/runtime`): the
context of a rank, pieces of a batch, a step, the forward alone, weights by name, and checkpoints.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from unity_ir.api.program import as_errors, executed, forget
from unity_ir.api.ranks import ensure_process_group, leave
from unity_ir.errors import UnityError

Batch = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""A whole batch: tensors by the names of the model's inputs, or in their order, or the only one."""

Weights = nn.Module | Mapping[str, torch.Tensor] | str | Path
"""What has whole weights, and tables, by name: a module, a state dict, or the path of a safetensors file."""


@dataclass(frozen=True)
class Model:
    """The plan that a step runs: its name, inputs, program text, and the weights that it came with."""

    name: str
    inputs: tuple[str, ...]
    """The names of the model's inputs, in order."""
    text: str
    """The text of its program."""
    own: Mapping[str, torch.Tensor] | None
    """The weights and tables of the module that was planned, by name; None of other plans."""


class Step:
    """
    A plan's training step on this rank. Calling it with a batch trains on it, and returns the loss.

    Every rank calls each method with the same arguments: a batch is the whole batch, of which each rank takes its
    pieces. Methods raise `UnityError` for a batch or state that does not fit the model, on all ranks alike, and the
    process goes on. After `close` it can do nothing. It is its own context manager.
    """

    def __init__(self, model: Model, program: Any, context: Any, owns_ranks: bool, seed: int):
        """Use `start`, which joins the ranks and sets the weights."""
        self._model, self._program, self._context, self._owns_ranks = model, program, context, owns_ranks
        self._seed, self._steps, self._skipped = seed, 0, 0
        self._lr: float = program.OPTIMIZER[1]["lr"]
        self._norm: float | None = None
        self._batch: dict[str, torch.Tensor] = {}
        self._compared = self._closed = False
        self._locks: dict[Path, Any] = {}
        self._weights: dict[str, torch.Tensor] = program.init_weights(context, seed)
        self._moments: dict[str, tuple[torch.Tensor, ...]] = program.init_moments(self._weights)
        self._data: Any = None

    # Training

    def __call__(self, batch: Batch) -> torch.Tensor:
        """
        Train on a whole batch: one step of the optimizer at the learning rate `lr`. Return the loss of the batch before
        it, a scalar on this rank's device, the same on all ranks.

        The batch has the shapes of the plan's example; it is compared between the ranks in the first call. With `clip`,
        a step whose gradient is not finite changes nothing but `skipped`.
        """
        with self._open():
            pieces, t = self._pieces(batch), self._steps - self._skipped
            program, norms = self._program, [0.0]

            def before_update(pieces: object, loss: object, norm: float | None) -> None:
                self._norm = norm
                norms.append(0.0 if norm is None else norm)

            rate = self._lr / program.OPTIMIZER[1]["lr"]
            loss = program.step_on(self._context, self._weights, self._moments, pieces, t, rate, before_update)
            self._steps += 1
            if isfinite(norms[-1]):
                self._data.trained()
            else:
                self._skipped += 1
            return program.whole(self._context, loss, program.LOSS)[0]

    def evaluate(self, batch: Batch, average: bool = False) -> torch.Tensor:
        """
        Return the loss of a whole batch, a scalar on this rank's device, computed by the forward alone, without
        dropout, and with batch norms by their running statistics; with `average` by the moving average of the weights.
        Nothing changes, the state of random numbers included. Raises `UnityError` for a program that was made with
        `evaluate=False`, or without `ema` if its average is wanted.
        """
        with self._open():
            program, context = self._program, self._context
            if program.forward is None:
                raise UnityError("evaluate: the program has no forward alone; make it with evaluate=True")
            devices = [context.device] if context.device.type == "cuda" else []
            with torch.random.fork_rng(devices):  # pyright: ignore[reportUnknownMemberType]
                found = program.forward(context, self._shown(average), self._pieces(batch))
            return program.whole(context, found[0] if program.COUNT else found, program.LOSS)[0]

    @property
    def lr(self) -> float:
        """
        The learning rate of the next step; set it from any schedule. The rates of groups of weights that have their own
        change in proportion. Setting it to a negative or infinite number raises `UnityError`.
        """
        return self._lr

    @lr.setter
    def lr(self, rate: float) -> None:
        """Set the learning rate of the next step, a finite number from 0. Raises `UnityError` for any other."""
        if not 0 <= rate < inf:
            raise UnityError(f"step: lr is {rate}; it must be a number from 0")
        self._lr = float(rate)

    @property
    def steps(self) -> int:
        """The number of steps done, those before a loaded checkpoint included."""
        return self._steps

    @property
    def skipped(self) -> int:
        """
        The number of steps that changed nothing because their gradient was not finite, those before a loaded checkpoint
        included. Gradients are checked only with `clip`.
        """
        return self._skipped

    @property
    def norm(self) -> float | None:
        """
        The norm of the last step's gradient, before it was clipped; None without `clip`, and before the first step.
        """
        return self._norm

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._context.rank

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._context.device

    # State

    def state_dict(self, average: bool = False) -> dict[str, torch.Tensor]:
        """
        Return the whole weights and running statistics, on the CPU, on every rank, for `module.load_state_dict`: by the
        module's own names, a tied weight under each of its names. With `average` they are the moving averages of the
        trained weights; raises `UnityError` for a program without `ema` then.
        """
        with self._open():
            tables = self._data.whole_tables(self._context)
            return self._program.whole_weights(self._context, self._shown(average), tables, everywhere=True)

    def _shown(self, average: bool) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of the weights or, with `average`, of their average."""
        if not average:
            return self._weights
        if "ema" not in self._program.OPTIMIZER[1]:
            raise UnityError("average: the program keeps none of its weights; make it with ema=0.999")
        return self._program.averaged(self._weights, self._moments, self._steps - self._skipped)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Set the weights from whole tensors by name, and those tables (running statistics and other inputs whose values
        come with the model) that are there; the optimizer's state stays. Names that the model does not have are
        ignored. If a weight is missing, or has another shape, raises `UnityError` and changes nothing.
        """
        with self._open():
            self._set(_detached(state), "state dict", self._data.tables)

    def save_weights(self, path: str | Path, average: bool = False) -> None:
        """
        Write what `state_dict` returns, the whole weights and running statistics by the module's own names: to a
        safetensors file, if the path ends in `.safetensors`, else to a folder as Hugging Face has them, files of about
        5 GB and an index, for `from_pretrained`. Rank 0 writes, and holds one of these files at a time. Every rank
        calls it. Raises `UnityError` if the path cannot be written, or the folder has weights already.
        """
        program, context = self._program, self._context
        to = str(path) if Path(path).suffix == ".safetensors" else f"{path}/"
        with self._open():
            why = program.from_first(context, program.why_no_weights(to) if context.rank == 0 else None)
            if why:
                program.fail_alike(why)
            program.write_weights(context, self._shown(average), to, self._data.whole_tables(context))

    def save(self, folder: str | Path, keep: int = 0) -> None:
        """
        Write a checkpoint into a folder: each rank writes its pieces of the weights and the optimizer's state, and the
        counts of steps. Any plan of the model, on any number of ranks, can load it, and so can emitted programs. Then
        complete checkpoints of the folder are removed, except the newest `keep`, this one included; `keep` 0 removes
        none.
        """
        with self._open():
            path = Path(folder)
            if path not in self._locks:
                self._locks[path] = self._program.Locked(self._context, path)
            tables = self._data.whole_tables(self._context)
            state = self._context, self._weights, self._moments, self._steps, path, self._seed, keep, tables
            self._program.save(*state, self._skipped)

    def load(self, folder: str | Path, changed: Sequence[str] = ()) -> int:
        """
        Continue from the newest complete checkpoint in a folder: set the weights, the optimizer's state, the counts of
        steps, and the state of random numbers. Return its number of steps. The hyperparameters must be those it was
        trained with, except those named in `changed`. The learning rate `lr` is not restored; set it.
        """
        with self._open():
            program, context = self._program, self._context
            found = program.newest(context, folder)
            state = context, self._weights, self._moments, folder, tuple(changed), self._data.tables
            # What is loaded may have the weights of one step ago, which are the flight's.
            flight, context.flight = context.flight, program.flight and program.flight()
            try:
                self._steps = program.load(*state)
            except BaseException:
                context.flight = flight
                raise
            self._skipped = found[1].get("skipped", 0)
            self._forget_tables()
            return self._steps

    def close(self) -> None:
        """
        Release what the step holds: its weights, locks of folders, process groups, and the process group of all ranks
        if it was started for this step. All ranks call it; a second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        for lock in self._locks.values():
            lock.release()
        leave(self._context, self._owns_ranks)
        forget(self._program)
        self._weights, self._moments, self._data = {}, {}, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    # Within

    def _open(self):
        if self._closed:
            raise UnityError("step: it is closed; make another by Plan.program")
        return as_errors(self._model.name)

    def begin(self, weights: Weights | None) -> None:
        """
        Set the weights and tables (inputs whose values come with the model) that training starts from; `start` calls
        it, once.

        `weights` are a module, a state dict, or the path of a safetensors file or of a Hugging Face folder. None takes
        those of the module that was planned; for a model that was not imported, it keeps the random ones. Raises
        `UnityError` for weights or tables that are missing, or have another shape.
        """
        with self._open():
            program = self._program
            tables: dict[str, torch.Tensor] = {}
            if isinstance(weights, str | Path):
                tables = dict(program.read_tables(weights)) if program.TABLES else {}
                program.check_running(weights, tables)
                program.read_weights(self._context, self._weights, weights)
            elif weights is not None or self._model.own is not None:
                self._set(self._found(weights), "weights", tables)
                program.check_running("weights", tables)
            elif program.IMPORTED:
                program.fail_alike(
                    "the model was imported with weights; give a module, its state dict, or a file of them"
                )
            missing = [n for n in program.TABLES if n not in tables and n not in program.RUNNING]
            if missing:
                program.fail_alike(
                    f"the model has a constant {missing[0]!r}, which the weights do not have; plan the module here, or "
                    "give the file of Plan.save_weights"
                )
            self._data = program.Data(None, self._seed, tables)
            self._data.source, self._data.function = "batch", self._current

    def _current(self, step: int) -> dict[str, torch.Tensor]:
        """Return the batch of a call, in place of a function that makes that of each step."""
        del step
        return self._batch

    def _found(self, weights: nn.Module | Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Return whole tensors by name; constants of the model are those it was planned with."""
        own = dict(self._model.own or {})
        if weights is None:
            return own
        if not isinstance(weights, nn.Module):
            return own | _detached(weights)
        # Tables may be buffers that are in no state dict.
        buffers = dict(weights.named_buffers(remove_duplicate=False))
        return own | _detached(buffers | dict(weights.named_parameters(remove_duplicate=False)))

    def _set(self, state: Mapping[str, torch.Tensor], source: str, tables: dict[str, torch.Tensor]) -> None:
        """Set weights in place, and `tables`, from what `state` has."""
        program = self._program
        found = program.by_names(source, state, state.__getitem__, program.WEIGHTS, "weight")
        replaced = program.by_names(source, state, state.__getitem__, program.tables_in(state), "table")
        program.set_weights(self._context, self._weights, found, source)
        tables.update(replaced)
        if self._data is not None:
            self._forget_tables()
        self._context.flight = program.flight and program.flight()

    def _forget_tables(self) -> None:
        """Forget this rank's pieces of tables, which the next batch is to be computed with anew."""
        self._data.running.clear()
        self._data.kept.clear()

    def _pieces(self, batch: Batch) -> dict[str, torch.Tensor | None]:
        """Return this rank's pieces of a whole batch, and of tables, by name."""
        self._batch = self._named(batch)
        if not self._compared:
            sums = {name: _checksum(x) for name, x in self._batch.items()}
            others: list[dict[str, int]] = self._program.from_all(sums)
            apart = next((rank for rank, other in enumerate(others) if other != others[0]), None)
            if apart is not None:
                self._program.fail_alike(
                    f"batch: ranks 0 and {apart} have different ones; give every rank the whole batch, by the same seed"
                )
            self._compared = True
        try:
            return self._data.pieces(self._context, self._steps)
        finally:
            self._batch = {}

    def _named(self, batch: Batch) -> dict[str, torch.Tensor]:
        names = [name for name in self._model.inputs if name not in self._program.TABLES]
        if isinstance(batch, Mapping):
            missing = [name for name in names if name not in batch]
            if missing:
                self._program.fail(f"batch: it has no {missing[0]!r}; it must have {', '.join(names)}")
            return {name: batch[name] for name in names}
        given = [batch] if isinstance(batch, torch.Tensor) else list(batch)
        if len(given) != len(names):
            self._program.fail(f"batch: it has {len(given)} tensors; it must have {', '.join(names)}")
        return dict(zip(names, given, strict=True))


def _detached(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # A state dict may hold anything beside tensors.
    return {name: x.detach() for name, x in state.items() if isinstance(cast(object, x), torch.Tensor)}


def _checksum(x: torch.Tensor) -> int:
    return zlib.crc32(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def start(model: Model, weights: Weights | None, seed: int, backend: str | None) -> Step:
    """
    Execute the program of a model, join its ranks, and return its training step, which starts from `weights`. Every
    rank calls this, with the same arguments.

    `weights` are as in `Step.begin`, `seed` is that of random weights, and `backend` is `nccl` or `gloo` (None: as
    `ranks.ensure_process_group` chooses). Raises `UnityError` for another backend, ranks with different programs, and
    wrong weights; process groups that were started are then destroyed.
    """
    if backend not in (None, "nccl", "gloo"):
        raise UnityError(f"program: backend is {backend!a}; it must be nccl or gloo")
    program = executed(model.text, model.name)
    owns_ranks = not dist.is_initialized()
    context = None
    try:
        with as_errors(model.name):
            context = program.build(ensure_process_group(backend))
            texts: list[int] = program.from_all(zlib.crc32(model.text.encode()))
            if len(set(texts)) > 1:
                program.fail_alike("the ranks have different plans; plan with the same arguments, or load one plan")
            step = Step(model, program, context, owns_ranks, seed)
            step.begin(weights)
            return step
    except BaseException:
        leave(context, owns_ranks)
        forget(program)
        raise
