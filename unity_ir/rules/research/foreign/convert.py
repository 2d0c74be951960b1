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
    One way to write a foreign rule (of TASO or FlexFlow) as a substitution. `convert` does it; it raises `Unsupported`
    if our operators cannot express the rule, `UnityError` where no sizes fit. `loses` says, as text, what the
    substitution leaves out of the rule; "" if nothing.
    """

    convert: Callable[[ForeignRule], Substitution]
    loses: str = ""


STACKED = Encoding(partial(whole, fixed=True), "values alone, at its degrees")
"""The one that knows the replica dim as FlexFlow does: as any other."""


def encodings(foreign: ForeignRule) -> Iterator[Encoding]:
    """
    Yield the ways to write a foreign rule as a substitution, in the order in which `import_rules` tries them until one
    is proved.

    A rule without FlexFlow's replica dim, such as TASO's, has one: over whole tensors. Any other has two or three:

    1. its tensors are divided as in the rule;
    2. over whole tensors, with a symbol for each degree: what is left out is how the tensors are divided;
    3. if it has parallel operators: as 2, but each degree stays the number that it is in the rule.
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
    """
    Return whether some operator of a FlexFlow rule works along its replica dim, such as a concatenation along it. This
    is dim 0 of the rule's tensors, whose entries are the copies of a value, or its addends. Call it only for rules
    whose tensors have that dim.

    When `import_rules` has proved such a rule, it tries to refute it with the replica dim as an ordinary dim
    (`STACKED`): as our partial sums and copies have no order, the proof does not tell whether both sides have the same
    entries in the same order.
    """
    return any(
        op.parameters.get("PM_AXIS") == REPLICA or op.parameters.get("PM_PARALLEL_DIM") == REPLICA
        for op in (*foreign.source, *foreign.target)
    )
