"""
Model the efficiency of kernels of one kind: the fraction of a device's peaks that they reach, as a function of size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from unity_ir.errors import UnityError
from unity_ir.forms.kinds import KINDS

Floats: TypeAlias = npt.NDArray[np.float64]
Numbers: TypeAlias = float | npt.NDArray[np.int64] | Floats


@dataclass(frozen=True, slots=True)
class RooflineCurve:
    """
    A roofline whose efficiency depends on the kernel's size.

    The seconds of a kernel are launch + max(flops / (peak e(flops)), bytes / (bandwidth e'(bytes))), with e(s) = top *
    (s / (s + half)) ** power; e and e' have parameters of their own. Large kernels reach the fraction `top` of a peak.
    Below the size `half` they reach less (they do not fill the device, power > 0) or more (they fit into caches, power
    < 0).
    """

    launch: float
    """Seconds."""
    compute_top: float
    compute_half: float
    """FLOPs."""
    compute_power: float
    memory_top: float
    memory_half: float
    """Bytes."""
    memory_power: float

    def seconds(self, flops: Numbers, bytes: Numbers, peak: float, bandwidth: float) -> Floats:
        """
        Return the estimated seconds of kernels of `flops` floating point operations that read and write `bytes` bytes.
        Both are numbers, for one kernel, or arrays [kernel]; then the result is an array [kernel], too.

        `peak` is the device's in FLOP/s, `bandwidth` its memory's in bytes/s.
        """
        return self.launch + np.maximum(
            _seconds(flops, peak * self.compute_top, self.compute_half, self.compute_power),
            _seconds(bytes, bandwidth * self.memory_top, self.memory_half, self.memory_power),
        )


PARAMETERS = tuple(f.name for f in fields(RooflineCurve))


LARGEST = 1e30
"""Maximum of any parameter; larger numbers are typing errors (the comparison also refuses nan)."""


def _seconds(size: Numbers, rate: float, half: float, power: float) -> Floats:
    size = np.asarray(size, dtype=np.float64)
    # Nothing to do takes no time, whatever part of the peak it would reach.
    relative = (size + half) / np.maximum(size, 1.0)
    return size / rate * relative**power


def curves(where: str, tables: Any) -> dict[str, RooflineCurve]:
    """
    Read efficiency curves from `tables`, the table `curves` of a TOML file: one table per kind of kernel
    (`[curves.contraction]`), with a number per parameter of `RooflineCurve`. Return the curves by kind.

    Other keys of a table, such as the quality of the fit, are ignored. `where` names the file in errors. Raises
    `UnityError` for tables of another form.
    """
    if not isinstance(tables, dict):
        raise UnityError(f"machine: {where}: curves must be a table with a table for each kind of kernel")
    return {str(kind): _curve(where, kind, table) for kind, table in cast("dict[object, object]", tables).items()}


def _curve(where: str, kind: object, table: object) -> RooflineCurve:
    if kind not in KINDS or not isinstance(table, dict):
        raise UnityError(f"machine: {where}: no curve can be for {kind!a}; kinds of kernels are {', '.join(KINDS)}")
    values: list[float] = []
    for name in PARAMETERS:
        value = cast("dict[str, object]", table).get(name)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not abs(value) <= LARGEST
            or (value <= 0 and not name.endswith("power"))
        ):
            raise UnityError(
                f"machine: {where}: {name} of the curve of {kind} is {value!r}; it must be a number"
                f"{'' if name.endswith('power') else ' above 0'}"
            )
        values.append(value)
    return RooflineCurve(*values)
