"""Write the weights of an imported model to a safetensors file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from unity_ir.errors import UnityError


def save_weights(tensors: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """
    Write tensors by full name to a safetensors file, which appears only when complete.

    Raises `UnityError` for tensors without data (on the meta device), `OSError` where the file cannot be written.
    """
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise UnityError(f"--weights-out: {empty[0]} is on the meta device and has no data; materialise the module")
    path = Path(path)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    try:
        _write(path, data)
    except OSError as error:
        # Named after the file that is wanted, not the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
