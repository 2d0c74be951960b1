"""Which encoding a foreign rule (of TASO or FlexFlow) gets."""

from __future__ import annotations

from unity_ir.rules.pattern import Substitution
from unity_ir.rules.research.foreign.collection import ForeignRule
from unity_ir.rules.research.foreign.layouts import DIMS, divided
from unity_ir.rules.research.foreign.terms import PARALLEL
from unity_ir.rules.research.foreign.values import whole


def substitution(foreign: ForeignRule) -> Substitution:
    """
    Convert another system's rule to a substitution over our operators: with how tensors are divided where they have
    FlexFlow's replica dim, else over whole tensors.

    Raises `Unsupported` for a rule that these operators cannot express, `UnityError` where no sizes fit.
    """
    ops = (*foreign.source, *foreign.target)
    flexflow = any(op.type in ("OP_LINEAR", *PARALLEL) or op.parameters.get("PM_NUMDIM") == DIMS for op in ops)
    return divided(foreign) if flexflow else whole(foreign)
