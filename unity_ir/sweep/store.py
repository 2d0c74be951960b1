"""
Keep the answers of points on disk, a file each, so that a sweep that was stopped goes on, and points of another grid
that are the same are not searched again.

A file is named by all that an answer depends on: the model, the machine's description (not its name), precision,
optimizer and search, and the version of the program.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.sweep.grid import Point, machine_tables
from unity_ir.sweep.point import Answer, answer_from
from unity_ir.version import __version__


class Store:
    """
    Keeps the answers of a sweep's points in a folder, one file each, for later sweeps; with a folder of None it keeps
    nothing. `about` is what all points have in common (precision, optimizer, search).
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any]):
        self.folder = folder
        self.about = {**about, "version": __version__}
        """What all points have in common: precision, optimizer, search."""

    def prepare(self) -> None:
        """Make the folder, if there is none yet. Raises `UnityError` if that fails."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnityError(f"sweep: cannot make the folder {self.folder}: {error.strerror}") from error

    def path(self, point: Point) -> Path | None:
        """Return the path of the file for a point's answer, whether it exists or not; None if nothing is kept."""
        if self.folder is None:
            return None
        said = json.dumps(
            {**self.about, "model": point.text, "machine": machine_tables(point.changed_machine())}, sort_keys=True
        )
        return self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:24]}.json"

    def read(self, point: Point) -> Answer | None:
        """Return the stored answer of a point; None if there is none, it cannot be read, or the file is no answer."""
        path = self.path(point)
        if path is None or not path.exists():
            return None
        with suppress(OSError, ValueError, UnityError):
            return replace(answer_from(json.loads(path.read_text(encoding="utf-8"))), point=point)
        return None

    def write(self, answer: Answer) -> None:
        """Write a point's answer to its file, atomically; do nothing if nothing is kept. Call `prepare` before."""
        path = self.path(answer.point)
        if path is None:
            return
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(json.dumps(answer.table(), indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)
