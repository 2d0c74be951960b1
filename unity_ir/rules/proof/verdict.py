"""The prover's verdicts on substitutions (rewrite rules). They are explained in `proof.prove`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["proved", "almost everywhere", "forward only", "refuted", "undecided"]


@dataclass(frozen=True, slots=True)
class Proof:
    """
    The result of trying to prove a substitution: the verdict (see `proof.prove`), the reason or counterexample
    (`detail`, empty if it is proved), the seconds taken, and the questions asked of Z3.
    """

    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    questions: int = 0
    """The number of questions asked of Z3."""

    @property
    def proved(self) -> bool:
        """Whether both sides are proved to have equal values and gradients everywhere."""
        return self.verdict == "proved"

    @property
    def trainable(self) -> bool:
        """
        Whether values are proved equal, and gradients too, except perhaps at ties of a maximum. Only such rules may be
        applied before differentiation.
        """
        return self.verdict in ("proved", "almost everywhere")

    @property
    def forward(self) -> bool:
        """Whether both sides are proved to have equal values; their gradients may differ."""
        return self.verdict in ("proved", "almost everywhere", "forward only")
