"""Fixtures that run kernels in Triton's interpreter."""

from kernel_runner import drawn, runner

__all__ = ["drawn", "runner"]
