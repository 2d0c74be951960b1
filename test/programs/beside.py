"""Make a rank's checkpoint wait before it is written, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranks import Refused, _raises, run_main, whole

LONG = 60.0
"""Seconds after which what is waited for is not expected to come."""


@contextmanager
def writing(change: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, DCP's function that writes in the background is `change` of itself."""
    from torch.distributed.checkpoint import state_dict_saver

    before = state_dict_saver.save
    state_dict_saver.save = change(before)
    try:
        yield
    finally:
        state_dict_saver.save = before


def held(event: threading.Event, order: list[str]) -> Callable[[Any], Any]:
    """A change of a function that begins when the event is set; `order` gets what happens."""

    def change(write: Any) -> Any:
        def wait_and_write(*arguments: Any, **options: Any) -> Any:
            order.append("begin")
            if not event.wait(LONG):
                raise RuntimeError("nobody waits for it")
            event.clear()
            order.append("write")
            return write(*arguments, **options)

        return wait_and_write

    return change


def saved_while_training(program: Any, folder: str) -> tuple[bool, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """
    Start a save after two steps, and do two more before anything is written. Return whether the checkpoint was complete
    by then, and the whole weights and moments at the save, after the two steps, and as loaded from the checkpoint.
    """
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)

    def state() -> dict[str, Any]:
        found = {f"weight {n}": w for n, w in whole(program, ctx, weights).items()}
        for k in range(2):
            each = whole(program, ctx, {n: pair[k] for n, pair in moments.items()})
            found.update({f"moment {k} {n}": m for n, m in each.items()})
        return found

    event, data, beside = threading.Event(), program.Data(), program.BackgroundWriter(ctx)
    with writing(held(event, [])):
        for t in range(2):
            program.step(ctx, weights, moments, data.batch(t), t)
        at = state()
        program.save(ctx, weights, moments, 2, folder, beside=beside)
        for t in range(2, 4):
            beside.poll()
            program.step(ctx, weights, moments, data.batch(t), t)
        later = state()
        is_complete = any(Path(folder).glob("step_*"))
        event.set()
        beside.wait()
    assert program.load(ctx, weights, moments, folder) == 2
    return is_complete, at, later, state()


def run_held(program: Any, options: list[str]) -> tuple[list[str], list[str]]:
    """A run whose checkpoints are written once they are waited for: the lines of the run, and what happened when."""
    event, order = threading.Event(), list[str]()
    wait, start = program.BackgroundWriter.wait, program.BackgroundWriter.start

    def waiting(beside: Any) -> None:
        if program.Context.writing is not None:
            order.append("wait")
            event.set()
        wait(beside)

    def starting(beside: Any, write: Any) -> None:
        assert program.Context.writing is None, "the one before is under way"
        start(beside, write)

    program.BackgroundWriter.wait, program.BackgroundWriter.start = waiting, starting
    program.BackgroundWriter.poll = lambda beside: None
    with writing(held(event, order)):
        return run_main(program, options), order


def failed(program: Any, folder: str) -> tuple[str, list[str]]:
    """Return what the next step prints after one rank failed to write a checkpoint, and the files that are left."""
    import errno
    import os

    from torch.distributed.checkpoint import FileSystemWriter

    ctx = program.build("gloo")
    program.fail_alike = _raises
    weights = program.init_weights(ctx)
    before = FileSystemWriter.write_data

    def no_space(writer: Any, *arguments: Any) -> Any:
        if ctx.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return before(writer, *arguments)

    FileSystemWriter.write_data = no_space
    try:
        beside = program.BackgroundWriter(ctx)
        program.save(ctx, weights, program.init_moments(weights), 1, folder, beside=beside)
        program.Context.writing.join()
        beside.poll()
    except Refused as error:
        return str(error), [path.name for path in Path(folder).iterdir()]
    finally:
        FileSystemWriter.write_data = before
    return "not said", []
