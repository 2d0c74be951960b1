"""Files that are written whole or not at all, all of them or none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from errno import EISDIR
from io import StringIO
from tempfile import NamedTemporaryFile

from unity_ir.errors import UnityError


class Kept(StringIO):
    """Text that is still there after closing, which the driver does even when it failed."""

    def close(self) -> None:
        pass


def staged_files(texts: Mapping[str, str]) -> dict[str, str]:
    """
    Files beside those to write that have their texts, by those' paths. Raises `UnityError`, and leaves none, if one
    cannot be written.
    """
    staged: dict[str, str] = {}
    path = ""
    try:
        for path, text in texts.items():
            if os.path.isdir(path):
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
            if os.path.exists(path) and not os.path.isfile(path):
                # A pipe or a terminal, which is there and takes what it gets.
                continue
            real = os.path.realpath(path)
            mode = os.stat(real).st_mode if os.path.exists(real) else 0o666 & ~_umask()
            with NamedTemporaryFile("w", encoding="utf-8", dir=os.path.dirname(real), delete=False) as file:
                staged[path] = file.name
                file.write(text)
            os.chmod(file.name, mode)
    except BaseException as error:
        for left in staged.values():
            os.unlink(left)
        if isinstance(error, OSError):
            raise UnityError(f"{path}: {error.strerror}") from error
        raise
    return staged


def write_files(texts: Mapping[str, str], staged: dict[str, str]) -> None:
    """Give what is staged its names, after which it is not any more. Raises `UnityError` where that fails."""
    for path, text in texts.items():
        try:
            if path in staged:
                os.replace(staged[path], os.path.realpath(path))
                del staged[path]
            else:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            raise UnityError(f"{path}: {error.strerror}") from error


def _umask() -> int:
    """The permissions new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
