"""
Record in function attributes what a search says of its plan: how it was derived, by what that is not proved, and a
lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, StringAttr, f64
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute

DERIVATION = "pcg.derivation"
"""The function attribute that holds the rule applications from the source graph to the plan."""

UNPROVED = "pcg.unproved"
"""The function attribute that names rules which were applied without a proof."""

TIES = "pcg.ties"
"""
The function attribute that names rules of the derivation by which gradients may differ at ties of a maximum.
"""

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
    What a search records about the plan it found: the rewrites that lead to its graph, which of them are not proved,
    and a lower bound on the seconds of a step. Fields that the search did not find are None or empty.
    """

    derivation: tuple[str, ...] | None = None
    """Rule applications from the source graph to the plan's, in order, a text each: `fuse-activation at relu#4`."""
    unproved: tuple[str, ...] = ()
    """Names of substitutions that the search, or a pass before it, applied although they are not proved."""
    ties: tuple[str, ...] = ()
    """Names of rules of the derivation that are proved except for gradients at ties of a maximum."""
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
        None or empty.
        """
        found: dict[str, Attribute] = {}
        if self.derivation is not None:
            found[DERIVATION] = _texts(self.derivation)
        if self.unproved:
            found[UNPROVED] = _texts(self.unproved)
        if self.ties:
            found[TIES] = _texts(self.ties)
        if self.bound is not None:
            found[BOUND] = FloatAttr(self.bound, f64)
        if self.pipelines is not None:
            waited, family = self.pipelines
            found |= {FAMILY: StringAttr(family), WAITED: FloatAttr(waited, f64)}
        return found


def certificate_of(func: FuncOp) -> Certificate:
    """
    Read the certificate that a search has recorded in a function's attributes. An attribute that is missing, or of
    another kind, gives its field's default; no error is raised.
    """
    bound, waited, family = (func.attributes.get(name) for name in (BOUND, WAITED, FAMILY))
    pipelines = None
    if isinstance(waited, FloatAttr) and isinstance(family, StringAttr):
        pipelines = waited.value.data, family.data
    return Certificate(
        derivation=_said(func, DERIVATION),
        unproved=_said(func, UNPROVED) or (),
        ties=_said(func, TIES) or (),
        bound=bound.value.data if isinstance(bound, FloatAttr) else None,
        pipelines=pipelines,
    )


def add_unproved(func: FuncOp, names: Iterable[str]) -> None:
    """
    Add the names of rules that were applied without a proof to a function's attribute `pcg.unproved`, in place, each
    once.
    """
    if every := dict.fromkeys((*certificate_of(func).unproved, *names)):
        func.attributes[UNPROVED] = _texts(every)


def _texts(given: Iterable[str]) -> ArrayAttr[StringAttr]:
    return ArrayAttr(map(StringAttr, given))


def _said(func: FuncOp, name: str) -> tuple[str, ...] | None:
    """Return the texts in a function's attribute; None if it has no such attribute, or one of another kind."""
    attribute = func.attributes.get(name)
    if not isinstance(attribute, ArrayAttr):
        return None
    return tuple(text.data for text in cast("ArrayAttr[Attribute]", attribute) if isinstance(text, StringAttr))
