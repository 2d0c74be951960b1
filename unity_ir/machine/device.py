"""Describe kinds of device, and price kernels on them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from unity_ir.errors import UnityError
from unity_ir.machine.curve import Floats, Numbers, RooflineCurve, curves
from unity_ir.machine.profile import Profile, read_profile
from unity_ir.machine.tuned import read_tuned

COPIES = ("from_host", "to_host")
"""Kinds of copies between a device and its host."""


@dataclass(frozen=True)
class HostLink:
    """
    The link between a device and the memory of its host, in bytes/s: `from_host` and `to_host` as large copies of
    pinned memory reach them alone, and `both`, which the two reach together while both are under way (0: their sum).
    What devices share, such as the host's memory, is divided among them.
    """

    from_host: float
    to_host: float
    both: float = 0.0
    latency: float = 0.0
    """Seconds before the first byte of a copy."""
    memory: int = 0
    """Bytes of the host's memory for each device; 0 if nothing limits them."""

    def bandwidth(self, kind: str, both: bool = False) -> float:
        """
        Return the bytes/s of a `kind` of copies: `from_host` or `to_host`. With `both`, copies of as many bytes go the
        other way meanwhile.
        """
        alone = self.from_host if kind == "from_host" else self.to_host
        return min(alone, self.both / 2) if both and self.both else alone

    def seconds(self, kind: str, bytes: float, both: bool = False) -> float:
        """Return the seconds of a copy of `bytes` bytes, by the bandwidth of its kind (`bandwidth`)."""
        return self.latency + bytes / self.bandwidth(kind, both)


@dataclass(frozen=True)
class Device:
    """
    A kind of device (a GPU): its peaks in FLOP/s and bytes/s, and the fraction of them that kernels reach.

    That fraction is given by the curve of the kernel's kind, or is `efficiency` where there is no curve.
    """

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s per element type."""
    memory_bandwidth: float
    """Peak bandwidth of the device's memory in bytes/s."""
    memory: int
    """Size of the device's memory in bytes, as its driver reports it."""
    reserve: int = field(default=0, kw_only=True)
    """
    Bytes of `memory` that no plan may take: what the driver, the CUDA context and the buffers of NCCL occupy, and what
    the allocator loses to fragmentation.
    """
    launch: float
    """Least seconds of a kernel."""
    efficiency: float = 0.7
    """Fraction of its peaks that kernels reach, for kinds of kernel without a curve."""
    curves: Mapping[str, RooflineCurve] = field(default_factory=dict[str, RooflineCurve])
    """Efficiency curves by kind of kernel (see `forms.kinds`), fitted to a profile."""
    profile: Profile | None = None
    """Measured seconds, which take precedence over estimates."""
    host: HostLink | None = field(default=None, kw_only=True)
    """The link to the memory of its host; None if a description has none."""

    @property
    def usable(self) -> int:
        """The bytes of memory that a plan may take on the device: its memory less its reserve."""
        return self.memory - self.reserve

    @property
    def limit_text(self) -> str:
        """
        The end of a message about a plan that does not fit, such as `needs 3 GB more than ..`: `H100-SXM5-80GB has
        (85.5 GB less 5.5 GB in reserve)`, or without the parentheses if nothing is in reserve.
        """
        if not self.reserve:
            return f"{self.name} has"
        memory, reserve = (decimal(size) for size in (self.memory, self.reserve))
        return f"{self.name} has ({memory} less {reserve} in reserve)"

    def peak(self, dtype: str) -> float:
        """
        Return the peak FLOP/s for an element type, such as `bf16`. Raises `UnityError` if the device gives none for it.
        """
        peak = self.flops.get(dtype)
        if peak is None:
            raise UnityError(f"machine: {self.name} has no peak for {dtype}; it has {', '.join(self.flops)}")
        return peak

    def curve(self, kind: str) -> RooflineCurve | None:
        """
        Return the efficiency curve of a kind of kernel (see `forms.kinds`); None if there is none. Attention without a
        curve of its own has that of other products of matrices.
        """
        found = self.curves.get(kind)
        return self.curves.get("contraction") if found is None and kind == "attention" else found

    def kernel_time(self, flops: float, bytes: float, dtype: str, kind: str = "") -> float:
        """
        Return the estimated seconds of one kernel of `flops` floating point operations in the element type `dtype` that
        reads and writes `bytes` bytes.

        The estimate is by the curve of the kernel's kind (see `forms.kinds`), such as `contraction`; if the device has
        none for it, by roofline. It ignores the profile's measurements (see `cost.time`). Raises `UnityError` if the
        device has no peak for `dtype`.
        """
        if self.curve(kind) is not None:
            return float(self.kernel_times(flops, bytes, dtype, kind))
        # As `kernel_times` computes it, without arrays.
        return float(
            self.launch + max(float(flops) / self.peak(dtype), float(bytes) / self.memory_bandwidth) / self.efficiency
        )

    def kernel_times(self, flops: Numbers, bytes: Numbers, dtype: str, kind: str = "") -> Floats:
        """
        Return the estimated seconds of kernels of one kind and element type, given their FLOPs and the bytes that they
        read and write. Both are numbers, for one kernel, or arrays [kernel]; then the result is an array [kernel], too.

        As for `kernel_time`, estimates are by the curve of `kind`, or else by roofline, and not the profile's
        measurements. Raises `UnityError` if the device has no peak for `dtype`.
        """
        curve = self.curve(kind)
        if curve is not None:
            return curve.seconds(flops, bytes, self.peak(dtype), self.memory_bandwidth)
        compute = np.asarray(flops) / self.peak(dtype)
        return self.launch + np.maximum(compute, np.asarray(bytes) / self.memory_bandwidth) / self.efficiency


def profiled(device: Device, ranks: int, path: str = "") -> Device:
    """
    Return a device with measured times (a profile), and with the efficiency curves fitted to them, if a `.toml` file
    beside the profile has any.

    The profile is the file at `path` (`.json` for a table of `unity-tune`), or else the one that comes with the package
    for this device; if there is none, returns `device`. `ranks` is the number of devices of the machine, which picks
    the measurements made with as many at work at once.

    Raises `UnityError` for a file that cannot be read, and for a profile of another device.
    """
    if path:
        profile, found = _read(path, device.name, ranks)
    else:
        folder = files("unity_ir.machine").joinpath("profiles")
        # A name may be anything, and is no path.
        shipped = {file.name: file for file in folder.iterdir()}.get(f"{device.name}.sqlite")
        if shipped is None:
            return device
        profile, found = _shipped(str(shipped), device.name, ranks)
    return replace(device, profile=profile, curves={**device.curves, **found})


def _read(path: str, device: str, ranks: int) -> tuple[Profile, dict[str, RooflineCurve]]:
    tuned = path.endswith(".json")
    profile = read_tuned(Path(path), device) if tuned else read_profile(path, device, ranks)
    fit = fit_path(Path(path), ranks)
    try:
        return profile, curves(
            str(fit), tomllib.loads(fit.read_text(encoding="utf-8"))["curves"]
        ) if fit.exists() else {}
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UnityError(f"profile: {fit} is not what unity-profile writes: {error}; fit again") from error


_shipped = lru_cache(_read)


def fit_path(profile: Path, ranks: int) -> Path:
    """
    Return the path of the `.toml` file with the curves fitted to the profile at `profile`, as measured with `ranks`
    ranks at work at once: `h100.sqlite` and 8 give `h100-8.toml`, in the same folder.
    """
    return profile.with_name(f"{profile.stem}-{ranks}.toml")
