# pyright: basic, reportPrivateImportUsage=false
"""Write files whole or not at all, and never in the place of a device."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from unity_ir.lowering.runtime.ranks import fail

# --- copied into the program from here on ---


# --- files: whole or not at all


def write_file(path, write):
    """
    Call `write` with the path of a temporary file, then rename that to `path`. Folders on the way
    are made, links followed; an existing file keeps its mode, a new one gets the umask's; into a pipe or a device the
    content is copied. Ends the run on errors.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with tempfile.TemporaryDirectory() as folder:
                write(f"{folder}/file")
                with open(f"{folder}/file", "rb") as content, open(path, "wb") as out:
                    shutil.copyfileobj(content, out)
            return
        real = os.path.realpath(path)
        os.makedirs(os.path.dirname(real), exist_ok=True)
        partial = f"{real}.{secrets.token_hex(4)}.partial"
        try:
            # Created here, since the library that writes it may ignore the umask.
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            mode = stat.S_IMODE(os.stat(real if os.path.exists(real) else partial).st_mode)
            write(partial)
            os.chmod(partial, mode)
            os.replace(partial, real)
        finally:
            Path(partial).unlink(missing_ok=True)
    except Exception as e:  # whatever the library that writes raises, the run ends with one line
        fail(f"cannot write {path}: {getattr(e, 'strerror', None) or e}")


def why_not_written(path, is_folder):
    """Return, as text, why the file `path` (if `is_folder`: files in it) cannot be written; None if it can."""
    try:
        if path.is_dir() and not is_folder:
            return f"cannot write {path}: it is a folder"
        if path.exists() and not path.is_file() and not is_folder:
            return None if os.access(path, os.W_OK) else f"cannot write {path}: Permission denied"
        parent = path if is_folder else Path(os.path.realpath(path)).parent
        while is_folder and not parent.exists():
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as e:
        return f"cannot write {path}: {e.strerror}"
