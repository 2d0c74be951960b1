"""A kind of device, and what a kernel costs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.errors import UnityError


@dataclass(frozen=True)
class Device:
    """A kind of device. FLOP/s and bytes/s are peaks; `efficiency` is the part of them a good kernel reaches."""

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

    def kernel_time(self, flops: float, bytes: float, dtype: str) -> float:
        """Seconds of one kernel by the roofline."""
        peak = self.flops.get(dtype)
        if peak is None:
            raise UnityError(f"machine: {self.name} has no peak for {dtype}; it has {', '.join(self.flops)}")
        return self.launch + max(flops / peak, bytes / self.memory_bandwidth) / self.efficiency
