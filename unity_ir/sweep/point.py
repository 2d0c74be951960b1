"""Say what was found at a point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.sweep.grid import Point
from unity_ir.sweep.programs import Figures

FAMILY = "any plan of the graph in a synchronous step, stages and micro-batches among them; moves count nothing"
"""What the bound of a point bounds."""


@dataclass(frozen=True)
class Answer:
    """
    What a sweep found at a point of its grid: the fastest step that fits. `seconds`, `memory` and `recipe` (its degrees
    of parallelism) are None if none was found.
    """

    point: Point
    mesh: str
    """What a machine must share for its programs to run on another: all but figures; with the model, but its batch."""
    figures: Figures
    usable: int
    """Bytes that a plan may take of a device."""
    devices: int
    samples: int
    flops: float
    """Of a step of the model, over the devices' peak: seconds at an MFU of 1."""
    bound: float
    """Seconds that no plan is below: see `FAMILY`."""
    seconds: float | None = None
    memory: int | None = None
    """The most bytes that a device holds."""
    recipe: str | None = None
    """As `--degrees` takes it; `joint` of the joint search's plan."""
    taken: str = ""
    """The other point whose program this is, if that is faster here than what was found."""
    processor: float = 0.0
    """Seconds of a processor that the point took: those of a mesh are counted with its first points."""

    @property
    def gap(self) -> float | None:
        """
        By how much the step is slower than the lower bound, as a fraction (0.05: 5 % slower); None without a step or a
        bound.
        """
        return None if self.seconds is None or not self.bound else self.seconds / self.bound - 1

    @property
    def mfu(self) -> float | None:
        """
        Model FLOPs utilization: the model's FLOPs per second as a fraction of the devices' peak; None without a step.
        """
        return None if self.seconds is None else self.flops / self.seconds

    @property
    def rate(self) -> float | None:
        """Samples per second of all devices together; None without a step."""
        return None if self.seconds is None else self.samples / self.seconds

    def can_run_at(self, other: Answer) -> bool:
        """
        Return whether this answer's step can also be run at the point of `other`, and takes no longer there. That is so
        if the models differ at most in the batch, which must be no smaller here (the program then runs with blank
        samples there), and the machines have the same mesh, with no bandwidth larger here than there, nor the usable
        memory.
        """
        slower = all(a <= b for a, b in zip(self.figures, other.figures, strict=True))
        return self.mesh == other.mesh and slower and self.usable <= other.usable and self.samples >= other.samples

    def table(self) -> dict[str, Any]:
        """
        Return the answer as a dict for JSON, which `answer_from` reads. The properties `gap`, `mfu` and `rate` are not
        in it.
        """
        table = asdict(self)
        return {**table, "point": {**asdict(self.point), "settings": dict(self.point.settings)}}


def answer_from(table: Mapping[str, Any]) -> Answer:
    """Return the answer that `Answer.table` wrote. Raises `UnityError` for a table that lacks fields or has others."""
    try:
        point = table["point"]
        of = Point(point["model"], point["machine"], tuple(point["settings"].items()))
        fields: dict[str, Any] = {**table, "point": of, "figures": tuple(table["figures"])}
        return Answer(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnityError(f"sweep: this is no answer of a point: {error}") from error
