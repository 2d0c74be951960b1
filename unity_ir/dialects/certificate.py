"""Record in function attributes what a search says of its plan: how it was derived, and a lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, StringAttr, f64
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute

DERIVATION = "pcg.derivation"
"""The function attribute that holds the rule applications from the source graph to the plan."""

BOUND = "pcg.bound"
"""The function attribute that holds the lower bound, in seconds, of all placements of the plan's graph."""

FAMILY = "pcg.family"
"""The function attribute that says, for a pipeline, which pipelines its lower bound holds for."""

WAITED = "pcg.waited"
"""
The function attribute that holds the seconds of a pipeline's step if every move is waited for, as its bound assumes.
"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """
    What a search records about the plan it found: the rewrites that lead to its graph, and a lower bound of its
    seconds. Fields that the search did not find are None.
    """

    derivation: tuple[str, ...] | None = None
    """Rule applications from the source graph to the plan's, in order, a text each: `fuse-activation at relu#4`."""
    bound: float | None = None
    """
    Lower bound, in seconds of a step, of all placements of the plan's graph; for a pipeline, of those that `pipelines`
    names.
    """
    pipelines: tuple[float, str] | None = None
    """
    For a pipeline: (the seconds of its step if every move is waited for, the pipelines that `bound` holds for, as
    text).
    """

    @property
    def attributes(self) -> dict[str, Attribute]:
        """
        The certificate as function attributes by name (`pcg.derivation`, `pcg.bound`, ..), without those whose field is
        None.
        """
        found: dict[str, Attribute] = {}
        if self.derivation is not None:
            found[DERIVATION] = ArrayAttr(map(StringAttr, self.derivation))
        if self.bound is not None:
            found[BOUND] = FloatAttr(self.bound, f64)
        if self.pipelines is not None:
            waited, family = self.pipelines
            found |= {FAMILY: StringAttr(family), WAITED: FloatAttr(waited, f64)}
        return found


def certificate_of(func: FuncOp) -> Certificate:
    """
    Read the certificate that a search has recorded in a function's attributes. An attribute that is missing, or of
    another kind, gives None in its field; no error is raised.
    """
    derivation, bound = func.attributes.get(DERIVATION), func.attributes.get(BOUND)
    waited, family = func.attributes.get(WAITED), func.attributes.get(FAMILY)
    steps = None
    if isinstance(derivation, ArrayAttr):
        parts = cast("ArrayAttr[Attribute]", derivation)
        steps = tuple(step.data for step in parts if isinstance(step, StringAttr))
    pipelines = None
    if isinstance(waited, FloatAttr) and isinstance(family, StringAttr):
        pipelines = waited.value.data, family.data
    return Certificate(steps, bound.value.data if isinstance(bound, FloatAttr) else None, pipelines)
