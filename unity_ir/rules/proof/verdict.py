"""What the prover says of a substitution. The verdicts are explained in `proof.prove`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["proved", "almost everywhere", "forward only", "refuted", "undecided"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a substitution. `detail` is a counterexample or the reason."""

    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    questions: int = 0
    """Asked of Z3."""

    @property
    def proved(self) -> bool:
        """Whether values and gradients are equal everywhere."""
        return self.verdict == "proved"

    @property
    def trainable(self) -> bool:
        """Whether the rule may be applied to a graph before it is differentiated."""
        return self.verdict in ("proved", "almost everywhere")

    @property
    def forward(self) -> bool:
        """Whether values are equal."""
        return self.verdict in ("proved", "almost everywhere", "forward only")
