"""Proofs on several processors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Self

from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import Proof, prove


class Provers:
    """
    Proves substitutions in parallel, in `jobs` processes, or in this one if `jobs` is 1. Called with rules, it returns
    their proofs, in order; `seed` is that of the samples at which they are tested. A context manager, which ends the
    processes.
    """

    def __init__(self, jobs: int, seed: int = 0):
        self.seed = seed
        # Processes that are started anew share no threads and no caches with this one.
        self._pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, rules: Sequence[Substitution]) -> list[Proof]:
        """Return the proof of each rule, in order."""
        seeds = [self.seed] * len(rules)
        return list((map if self._pool is None else self._pool.map)(prove, rules, seeds))
