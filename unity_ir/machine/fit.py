"""Fit efficiency curves and cost lines to measured times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unity_ir.machine.curve import PARAMETERS, Floats, RooflineCurve

FEWEST = 2 * len(PARAMETERS)
"""Least number of samples for which a curve is fitted."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured kernel: FLOPs, bytes read and written, peak FLOP/s of its element type, and seconds."""

    flops: float
    bytes: float
    peak: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """
    An efficiency curve fitted to `samples` measurements, and its errors on them, |predicted / measured - 1|: `median`,
    and the 90th percentile.
    """

    curve: RooflineCurve
    samples: int
    median: float
    percentile_90: float
    """The error that 90% of the samples do not exceed."""


_LOW = np.array([1e-8, 1e-3, 1e-3, -1.0, 1e-3, 1e-3, -1.0])
_HIGH = np.array([1e-2, 2.0, 1e15, 2.0, 4.0, 1e12, 2.0])
_POSITIVE = np.array([True, True, True, False, True, True, False])


def fit(samples: Sequence[Measurement], bandwidth: float) -> Fit:
    """
    Fit an efficiency curve to `samples`, measured kernels of one kind on one device, by least squares of log(measured /
    predicted seconds). `bandwidth` is the peak of the device's memory in bytes/s.

    `samples` must not be empty. Callers check that there are at least `FEWEST`, as fewer make no sound fit.
    """
    flops, bytes, peaks, measured = (
        np.array([getattr(s, name) for s in samples], dtype=np.float64)
        for name in ("flops", "bytes", "peak", "seconds")
    )
    # Peaks differ by element type; the curve takes one at a time.
    peak = float(np.median(peaks))
    flops = flops * (peak / peaks)

    def residuals(free: Floats) -> Floats:
        return np.log(_curve(free).seconds(flops, bytes, peak, bandwidth)) - np.log(measured)

    fastest = float(measured.min())
    found: list[tuple[float, Floats]] = []
    for power in (-0.3, 0.0, 0.7):
        for half in (1e4, 1e6):
            start = np.array([0.8 * fastest, 0.7, half * 10, 0.3, 0.7, half, power])
            free, loss = _least_squares(residuals, _free(start))
            found.append((loss, free))
    curve = _curve(min(found, key=lambda f: f[0])[1])
    errors = np.abs(curve.seconds(flops, bytes, peak, bandwidth) / measured - 1)
    return Fit(curve, len(samples), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _free(values: Floats) -> Floats:
    """Positive parameters as logarithms."""
    return np.where(_POSITIVE, np.log(np.where(_POSITIVE, values, 1.0)), values)


def _curve(free: Floats) -> RooflineCurve:
    values = np.where(_POSITIVE, np.exp(np.clip(np.where(_POSITIVE, free, 0.0), -50, 50)), free)
    return RooflineCurve(*np.clip(values, _LOW, _HIGH).tolist())


def _least_squares(residuals: Callable[[Floats], Floats], x: Floats, steps: int = 80) -> tuple[Floats, float]:
    """Levenberg and Marquardt's method with a numerical Jacobian; returns the point and the sum of squares there."""
    r = residuals(x)
    loss, damping = float(r @ r), 1e-2
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + 1e-5 * e) - r) / 1e-5 for e in np.eye(len(x))], axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ r
        step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-6 * np.eye(len(x))), -slope)
        new = x + np.clip(step, -2, 2)
        r_new = residuals(new)
        loss_new = float(r_new @ r_new)
        if loss_new < loss:
            done = loss - loss_new < 1e-9 * loss
            x, r, loss, damping = new, r_new, loss_new, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return x, loss


@dataclass(frozen=True, slots=True)
class FittedLine:
    """
    The line seconds = `latency` + bytes / `bandwidth`, fitted to `samples` measurements; `median` is its median
    relative error on them.
    """

    latency: float
    bandwidth: float
    samples: int
    median: float


def fit_line(points: Sequence[tuple[float, float]]) -> FittedLine:
    """
    Fit the line seconds = latency + bytes / bandwidth to (bytes, seconds) points, at least one, all above 0, by least
    squares of log(measured / predicted seconds).
    """
    sizes, measured = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))

    def residuals(free: Floats) -> Floats:
        return np.log(np.exp(free[0]) + sizes * np.exp(free[1])) - np.log(measured)

    start = np.log(np.array([measured.min(), measured.max() / sizes.max()]))
    (latency, each), _ = _least_squares(residuals, start)
    errors = np.abs((np.exp(latency) + sizes * np.exp(each)) / measured - 1)
    return FittedLine(float(np.exp(latency)), float(np.exp(-each)), len(points), float(np.median(errors)))
