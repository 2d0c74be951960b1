"""
Rules of other compilers as substitutions: of XLA's algebraic simplifier those that TensorRight verifies
(`tensorright.pcg`), and others by the names of XLA's tests (`simplifier.pcg`); of PyTorch's Inductor those of its graph
passes (`inductor.pcg`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution

XLA = ("tensorright", "simplifier")
"""Collections of rules of XLA's algebraic simplifier."""

COLLECTIONS = (*XLA, "inductor")

NOT_SAID = 25
"""Rules of TensorRight's list that no operator says: see the head of `tensorright.pcg`."""

AT_TIES = "almost everywhere"

VERDICTS: Mapping[str, str] = {
    # Which of several equal values has the gradient differs.
    "clamp.01": AT_TIES,
    "clamp.02": AT_TIES,
    "ReduceWindowIsReduceAndReshape.max": AT_TIES,
    "MaxOfMax": AT_TIES,
    "CompareSelectToMax": AT_TIES,
    # Gradients are equal, which is not shown: b^(c - 1) / b^c, and sqrt(a) sqrt(a) of a where that is a number.
    "DivOfPower": AT_TIES,
    "DivOfBroadcastingPower": AT_TIES,
    "LnSqrt": AT_TIES,
    "LnRsqrt": AT_TIES,
    "SliceOfReshapeToReshapeOfSlice": AT_TIES,
    "batch_layernorm": AT_TIES,
    # False, if not always: of a below 0, and of what a narrower type does not hold.
    "LnPow": "refuted",
    "PowerOfPower": "undecided",
    "DoNotEliminateConvertPairDownCast": "undecided",
}
"""The verdict on each rule that is not `proved`, by its name."""


@cache
def rules(collection: str) -> tuple[Substitution, ...]:
    """Read the rules of a collection, one of `COLLECTIONS`."""
    path = Path(__file__).with_name(f"{collection}.pcg")
    return parse_rules(path.read_text(encoding="utf-8"), path.name)
