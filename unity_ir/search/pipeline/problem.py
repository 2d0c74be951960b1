"""State what stages of a pipeline are chosen for, and the choice that is made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.search.pipeline.table import Floats, StageOption, StageTable
from unity_ir.simulate.pipeline import StageSeconds


@dataclass(frozen=True)
class StageProblem:
    """
    The problem of choosing the stages of a pipeline: what each range of layers takes as a stage, and the devices,
    memory and micro-batches that there are. Raises `UnityError` for numbers below 1, for more stages than layers or
    devices, and for `sends` of another shape.
    """

    table: StageTable
    """Seconds and bytes of all ranges of layers that may be a stage."""
    devices: int
    """Devices of the machine; stages may leave some unused."""
    micro_batches: int
    """Micro-batches of a step."""
    memory: float = float("inf")
    """Bytes of a device."""
    sends: Floats | None = None
    """
    Seconds [layer, layout] of sending a value, or its gradient, in that layout between the stage before the layer and
    the one from it on; by default 0.
    """
    most_stages: int | None = None
    """By default as many as there are layers and devices."""
    fewest_stages: int = 1

    def __post_init__(self) -> None:
        layers, most = self.table.layers, self.most_stages
        if min(self.devices, self.micro_batches, self.fewest_stages) < 1 or (most is not None and most < 1):
            raise UnityError("pipeline: devices, micro-batches and stages must be at least 1")
        for what, there in (("layers", layers), ("devices", self.devices)):
            if most is not None and most > there:
                raise UnityError(f"pipeline: {most} stages for {there} {what}; use at most {there}")
        if self.fewest_stages > self.stages:
            raise UnityError(f"pipeline: {self.fewest_stages} stages at least, {self.stages} at most; use fewer")
        shape = (layers + 1, self.table.layouts)
        if self.sends is not None and (self.sends.shape != shape or not (self.sends >= 0).all()):
            raise UnityError(f"pipeline: sends must be {shape[0]} by {shape[1]} numbers of at least 0")

    @property
    def stages(self) -> int:
        """The greatest number of stages that is tried."""
        return self.most_stages or min(self.table.layers, self.devices)

    @cached_property
    def send_seconds(self) -> Floats:
        """
        The seconds of one send between the stage that begins at a layer and the one before it, forward (the value) or
        backward (its gradient): [layer, layout of the value]. These are `sends` or, if that is None, zeros.
        """
        if self.sends is None:
            return np.zeros((self.table.layers + 1, self.table.layouts))
        return self.sends

    def fitting(self, live: int, cap: float, first: int | slice = slice(None)) -> Floats:
        """
        Return the seconds of one micro-batch, forward and backward, for every way to run a range of layers as a stage:
        [option, first layer, layer behind the last, size of the part, layout in, layout out], the axes of
        `StageTable.seconds`. Options differ in recompute, for example. Seconds are inf where there is no option, where
        they are more than `cap`, and where a device has too little memory to hold `live` micro-batches.

        If `first` is the number of a layer, only ranges that begin there are returned, without the axis of the first
        layer.
        """
        table = self.table
        seconds, held, each = (array[:, first] for array in (table.seconds, table.held, table.live))
        return np.where((held + live * each <= self.memory) & (seconds <= cap), seconds, np.inf)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` .. `last` - 1 on a part of `devices` devices, run as `option` says."""

    first: int
    last: int
    devices: int
    option: StageOption


@dataclass(frozen=True)
class StageChoice:
    """The stages that take the least time of a step by 1F1B's formula: what `choose_stages` returns."""

    stages: tuple[Stage, ...]
    formula: float
    """That time of a step, in seconds."""
    send: tuple[float, ...]
    """Seconds of a send between each stage and the next."""
    passes: int = 1
    """How many caps on the largest stage were tried."""

    @property
    def seconds(self) -> StageSeconds:
        """
        The seconds of the stages in the form that `simulate_pipeline` takes; with halves of backwards if all options
        have these.
        """
        options = [stage.option for stage in self.stages]
        halves = [o.input_gradient for o in options if o.input_gradient is not None]
        is_split = len(halves) == len(options)
        return StageSeconds(
            tuple(o.forward for o in options),
            tuple(o.backward for o in options),
            tuple(halves) if is_split else (),
            tuple(o.backward - half for o, half in zip(options, halves, strict=True)) if is_split else (),
            self.send,
            tuple(o.once for o in options),
        )
