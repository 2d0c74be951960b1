"""A kind of device, and what a kernel costs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.machine.curve import Curve, Floats, Numbers
from unity_ir.machine.profile import Profile


@dataclass(frozen=True)
class Device:
    """
    A kind of device. FLOP/s and bytes/s are peaks; of them a good kernel reaches the part its kind's curve says, or,
    where there is none, `efficiency`.
    """

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s per element type."""
    memory_bandwidth: float
    """Bytes/s."""
    memory: int
    """Bytes."""
    launch: float
    """Seconds a kernel costs at least."""
    efficiency: float = 0.7
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    """By kind of kernel (see `tdl.kinds`), fitted from a profile."""
    profile: Profile | None = None
    """What was measured, which goes before what is estimated."""

    def peak(self, dtype: str) -> float:
        """FLOP/s. Raises `UnityError` where the device does not say."""
        peak = self.flops.get(dtype)
        if peak is None:
            raise UnityError(f"machine: {self.name} has no peak for {dtype}; it has {', '.join(self.flops)}")
        return peak

    def kernel_time(self, flops: float, bytes: float, dtype: str, kind: str = "") -> float:
        """Seconds of one kernel by the roofline."""
        return float(self.kernel_times(flops, bytes, dtype, kind))

    def kernel_times(self, flops: Numbers, bytes: Numbers, dtype: str, kind: str = "") -> Floats:
        """Seconds of kernels of one kind and element type, which do so many operations and move so many bytes."""
        curve = self.curves.get(kind)
        if curve is not None:
            return curve.seconds(flops, bytes, self.peak(dtype), self.memory_bandwidth)
        compute = np.asarray(flops) / self.peak(dtype)
        return self.launch + np.maximum(compute, np.asarray(bytes) / self.memory_bandwidth) / self.efficiency
