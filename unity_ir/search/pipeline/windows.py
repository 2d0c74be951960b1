"""Find which numbers of devices matter for the stages behind a layer, under a cap on the largest stage."""

from __future__ import annotations

import numpy as np

from unity_ir.search.pipeline.problem import StageProblem
from unity_ir.search.pipeline.table import Floats


class DeviceWindows:
    """
    For each layer, bounds on the number of devices that the stages from it on have in any choice of stages in which
    none takes longer than a cap: enough devices for such stages, and few enough to leave enough for the layers before.
    They let `sweep` skip most numbers of devices when the cap is close to the lowest possible. Found without layouts,
    and with one micro-batch held.
    """

    def __init__(self, problem: StageProblem) -> None:
        seconds = problem.fitting(1, np.inf).min(axis=(0, 4, 5))
        square = np.concatenate([seconds, np.full_like(seconds[:1], np.inf)])
        self.behind = _bottleneck(square, problem)
        # The layers before are those behind, seen from the other end.
        self.before = _bottleneck(square[::-1, ::-1].transpose(1, 0, 2), problem)[::-1]

    def at(self, cap: float) -> list[slice]:
        """
        Return a slice of numbers of devices for each layer: `sweep` needs to try only these for the stages from that
        layer on, if no stage may take more than `cap` seconds of a micro-batch.
        """
        least, before = ((array > cap).sum(axis=1) for array in (self.behind, self.before))
        most = self.behind.shape[1] - before
        return [slice(int(low), int(high)) for low, high in zip(least, most, strict=True)]


def _bottleneck(seconds: Floats, problem: StageProblem) -> Floats:
    """Return the least largest stage of the layers from i on, on at most d devices, given [first, last, part]."""
    value = np.full((problem.table.layers + 1, problem.devices + 1), np.inf)
    value[-1] = 0
    for i in reversed(range(problem.table.layers)):
        for part, size in enumerate(problem.table.parts):
            if size <= problem.devices:
                stage = np.maximum(seconds[i, i + 1 :, part, None], value[i + 1 :, : problem.devices + 1 - size])
                np.minimum(value[i, size:], stage.min(axis=0), out=value[i, size:])
    return value
