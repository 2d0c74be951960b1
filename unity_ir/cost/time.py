"""Price a kernel: the measured seconds, if the device's profile has them, else the roofline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from unity_ir.machine.device import Device

Bytes = TypeVar("Bytes", int, float, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Kernel:
    """
    One kernel of one task. Kernels of equal `operator` and `sizes` take the same time.

    `operator` is a canonical text of everything but the sizes: `matmul{act=relu}(f32, f32)`.
    """

    operator: str
    sizes: tuple[int, ...]
    """Sizes of the operands' shards, dim by dim, then the extents of the line's index variables in TDL order."""
    kind: str
    """The kind of kernel: see `forms.kinds`."""
    flops: int
    """Floating point operations."""
    bytes: int
    """Bytes read and written."""
    dtype: str
    """The element type of its arithmetic."""
    rounded: int = 0
    """Bytes that kernels before it read and write, which round its operands to 8 bits."""
    halved: int = 0
    """Bytes of its operands that it then does not read."""

    def rounding(self, operands: Sequence[int], reads: Sequence[int]) -> Kernel:
        """
        Return the kernel with what comes before it: kernels that read its operands, whose bytes are `operands`, as
        often as `reads` says, and write each in half of its bytes, which the kernel reads.
        """
        rounded, less = rounding_bytes(operands, reads)
        return replace(self, bytes=self.bytes - less, rounded=rounded, halved=less)


def seconds(kernel: Kernel, device: Device) -> float:
    """
    Return the seconds of a kernel on a device: measured, if the device's profile has the kernel, else estimated by
    `Device.kernel_time`. `cost.table` does the same for many kernels at once.
    """
    if device.profile is not None and is_measured(kernel, device):
        return device.profile.kernels[kernel.operator][kernel.sizes]
    alone = device.kernel_time(kernel.flops, kernel.bytes, kernel.dtype, kernel.kind)
    return alone + rounding_seconds(kernel.rounded, device) if kernel.rounded else alone


ROUNDINGS = 2
"""Kernels that round the operands of a product to 8 bits."""


def rounding_seconds(bytes: float, device: Device) -> float:
    """
    Return the seconds of the two kernels that round a product's operands; `bytes` are all that they read and write.
    """
    return ROUNDINGS * device.launch + bytes / (device.memory_bandwidth * device.efficiency)


def rounding_bytes(operands: Sequence[Bytes], reads: Sequence[int]) -> tuple[Bytes, Bytes]:
    """
    Return the bytes that the kernels read and write which round a product's two operands from 16 to 8 bits, and the
    bytes that the product reads less for it. `operands` has the bytes of each operand in 16 bits, `reads` how often it
    is read. Scales of rows are few, and left out.
    """
    left, right = operands
    less = left // 2 + right // 2
    return left * reads[0] + right * reads[1] + less, less


def is_measured(kernel: Kernel, device: Device) -> bool:
    """Return whether the device's profile has a measurement of this kernel."""
    return device.profile is not None and kernel.sizes in device.profile.kernels.get(kernel.operator, {})
