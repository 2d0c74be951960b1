"""Write several files, or a folder of them, atomically: each whole, and all of them or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from errno import EISDIR, ENOTDIR
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, mkdtemp

from unity_ir.errors import UnityError


def staged_files(texts: Mapping[str, str]) -> dict[str, str]:
    """
    Write each text to a temporary file next to the file that it is for; `write_files` then renames all of them into
    place. `texts` maps the wanted files' paths to their texts. Return the temporary files' paths by wanted path.

    Pipes and terminals are left out. Raises `UnityError`, and leaves no file, if one cannot be written.
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
    """
    Rename the temporary files that `staged_files` wrote to the wanted ones. `staged` maps the wanted paths to the
    temporary ones; those that were renamed are removed from it. `texts` maps the wanted paths to their texts: the files
    that are not in `staged` (pipes, terminals) are written directly.

    Raises `UnityError` where that fails: files that were renamed before stay, and the caller must remove the temporary
    files that are left in `staged`.
    """
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


def staged_folder(path: str, files: Iterable[tuple[str, bytes]], is_replaced: Callable[[str], bool]) -> str:
    """
    Write files, given as (name, content), to a temporary folder next to the folder `path` that they are for;
    `place_folder` then renames it. Return its path.

    Raises `UnityError`, and leaves nothing, if that fails, and if there is a folder already with a file in it for whose
    name `is_replaced` is false.
    """
    real, staged = os.path.realpath(path), None
    try:
        if os.path.exists(real) and not os.path.isdir(real):
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        other = next((n for n in sorted(os.listdir(real)) if not is_replaced(n)), None) if os.path.isdir(real) else None
        if other is not None:
            raise UnityError(f"{path}: the folder has {other}, which would be lost; name a new folder")
        staged = mkdtemp(dir=os.path.dirname(real))
        for name, content in files:
            Path(staged, name).write_bytes(content)
        os.chmod(staged, 0o777 & ~_umask())
    except BaseException as error:
        if staged is not None:
            rmtree(staged)
        if isinstance(error, OSError):
            raise UnityError(f"{path}: {error.strerror}") from error
        raise
    return staged


def place_folder(path: str, staged: str) -> None:
    """
    Rename the temporary folder that `staged_folder` wrote to the one it is for, in the place of one that is there.
    Raises `UnityError` where that fails; the caller must remove the temporary folder then.
    """
    real = os.path.realpath(path)
    try:
        if os.path.isdir(real):
            old = mkdtemp(dir=os.path.dirname(real))
            os.rename(real, old)
            try:
                os.rename(staged, real)
            except OSError:
                os.rename(old, real)
                raise
            rmtree(old)
        else:
            os.rename(staged, real)
    except OSError as error:
        raise UnityError(f"{path}: {error.strerror}") from error


def write_folder(path: str | Path, files: Iterable[tuple[str, bytes]], is_replaced: Callable[[str], bool]) -> None:
    """
    Write a folder of files, given as (name, content), atomically (all or nothing), in place of one that is there and
    has only files for whose names `is_replaced` is true. Raises `UnityError` if it cannot be written.
    """
    staged = staged_folder(str(path), files, is_replaced)
    try:
        place_folder(str(path), staged)
    finally:
        rmtree(staged, ignore_errors=True)


def _umask() -> int:
    """Return the process's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: str | Path, text: str) -> None:
    """
    Write one file atomically (whole or not at all), replacing any that is there. Raises `UnityError` if it cannot be
    written.
    """
    texts = {str(path): text}
    staged = staged_files(texts)
    try:
        write_files(texts, staged)
    finally:
        for left in staged.values():
            os.unlink(left)
