"""
Emitted programs that run on their own, each rank a process that ends as it may, forked off one that has PyTorch loaded.

Starting Python and importing PyTorch takes far longer than what such a rank does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ranks import PRELOADED


def _main(path: Path, options: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Do what `python path options` does in the folder of `path`, and write to the files `out` and `err`."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    os.chdir(path.parent)
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
    sys.argv = [str(path), *options]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


class Forked:
    """A rank that runs the program in the file `path` with options; what it writes goes to files in `folder`."""

    def __init__(self, path: Path, options: Sequence[str], environment: Mapping[str, str], folder: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._out, self._err = folder / "out", folder / "err"
        for file in (self._out, self._err):
            file.touch()
        self._process = context.Process(
            target=_main, args=(path, options, environment, self._out, self._err), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process's number."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def written(self) -> str:
        """The text that the run has written to stderr so far."""
        return self._err.read_text()

    def first_line(self) -> str:
        """Wait for the first line that it prints and return it, or all it has printed once it has ended."""
        while True:
            is_alive, text = self._process.is_alive(), self._out.read_text()
            if "\n" in text or not is_alive:
                return text.partition("\n")[0]
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Wait for its end for so long at most; return its exit code, that of a signal negative, or none."""
        self._process.join(seconds)
        return self._process.exitcode
