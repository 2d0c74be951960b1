"""A driver of Triton for an H100 that is not there: kernels are not compiled, and launches end before CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel


def nothing(*args: Any) -> None:
    """Launch nothing."""


@contextmanager
def without_gpu(launch: Callable[..., None] = nothing) -> Iterator[None]:
    """
    Let Triton launch kernels on an H100 that is not there, by `launch` in place of its function in C: called with what
    `CudaLauncher` passes to that in this version of Triton, of which the fifth is the kernel, a `CompiledKernel`, and
    the last ones are its arguments.
    """

    class Loaded(CompiledKernel):
        """A kernel that is not compiled."""

        def __init__(self, src: Any, *args: Any, **kwargs: Any):
            self.src, self.name = src, src.fn.__name__
            self.module, self.function, self.packed_metadata = 0, self, ()
            self._run = CudaLauncher.__new__(CudaLauncher)
            sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
            others = ("global_scratch_align", "profile_scratch_align", "launch_cooperative_grid", "launch_pdl")
            vars(self._run).update(launch=launch, num_ctas=1, **sizes, **dict.fromkeys(others, 1))
            # Triton 3.6 has a function in C for each signature.
            own = {"arg_annotations", "kernel_signature"}.intersection(CudaLauncher.__init__.__code__.co_names)
            vars(self._run).update(dict.fromkeys(own))

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    with patch.object(triton.runtime.driver, "_active", driver), patch.object(triton.compiler, "compile", Loaded):
        yield
