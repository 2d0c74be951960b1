"""The encodings of a foreign rule (of TASO or FlexFlow) as substitutions, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from unity_ir.rules.pattern import Substitution
from unity_ir.rules.research.foreign.collection import ForeignRule
from unity_ir.rules.research.foreign.layouts import DIMS, REPLICA, divided
from unity_ir.rules.research.foreign.terms import PARALLEL
from unity_ir.rules.research.foreign.values import whole


@dataclass(frozen=True, slots=True)
class Encoding:
    """
    A way to say a foreign rule here. `convert` raises `Unsupported` if these operators cannot express it, `UnityError`
    where no sizes fit; `loses` is what the substitution does not say, as text, "" if nothing.
    """

    convert: Callable[[ForeignRule], Substitution]
    loses: str = ""


STACKED = Encoding(partial(whole, fixed=True), "values alone, at its degrees")
"""The one that knows the replica dim as FlexFlow does: as any other."""


def encodings(foreign: ForeignRule) -> Iterator[Encoding]:
    """
    Yield the encodings of a rule, the one that says most first: with how its tensors are divided, if they have
    FlexFlow's replica dim; with values alone, for all degrees; with values alone, for the degrees that it has.
    """
    ops = (*foreign.source, *foreign.target)
    if not any(op.type in ("OP_LINEAR", *PARALLEL) or op.parameters.get("PM_NUMDIM") == DIMS for op in ops):
        yield Encoding(whole)
        return
    yield Encoding(divided)
    yield Encoding(whole, "values alone")
    if any(op.type in PARALLEL for op in ops):
        yield STACKED


def stacks(foreign: ForeignRule) -> bool:
    """Return whether an operator of a rule, which has one, works on the replica dim."""
    return any(
        op.parameters.get("PM_AXIS") == REPLICA or op.parameters.get("PM_PARALLEL_DIM") == REPLICA
        for op in (*foreign.source, *foreign.target)
    )
