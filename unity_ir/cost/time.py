"""Price a kernel: the measured seconds, if the device's profile has them, else the roofline's."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.machine.device import Device


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


def seconds(kernel: Kernel, device: Device) -> float:
    """
    Return the seconds of a kernel on a device: measured, if the device's profile has the kernel, else estimated by
    `Device.kernel_time`. `cost.table` does the same for many kernels at once.
    """
    if device.profile is not None and is_measured(kernel, device):
        return device.profile.kernels[kernel.operator][kernel.sizes]
    return device.kernel_time(kernel.flops, kernel.bytes, kernel.dtype, kernel.kind)


def is_measured(kernel: Kernel, device: Device) -> bool:
    """Return whether the device's profile has a measurement of this kernel."""
    return device.profile is not None and kernel.sizes in device.profile.kernels.get(kernel.operator, {})
