"""Define a pipeline schedule: for each rank, the list of its actions, and which rank has which stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import COMPUTE, StageAction

Actions = tuple[StageAction, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """
    A pipeline schedule: `ranks[r]` are the actions of rank r, in order; stage s is on rank `rank_of[s]`; micro-batches
    are numbered from 0.

    A synchronous schedule is one training step. An asynchronous one (`gradient_delay` > 0) covers `steps` training
    steps, between which it does not drain, each of `micro_batches / steps` micro-batches. Its repeating step alone
    (`orders.steady_step`) has numbers from `micro_batches` on for micro-batches of the step after it.
    """

    name: str
    micro_batches: int
    ranks: tuple[Actions, ...]
    rank_of: tuple[int, ...]
    steps: int = 1
    gradient_delay: int = 0
    """Training steps by which a gradient is applied late; 0 is the serial step."""

    @property
    def stages(self) -> int:
        """The number of stages, over all ranks."""
        return len(self.rank_of)

    @cached_property
    def splits_backward(self) -> bool:
        """
        Whether some backward is done in halves: the gradient of the stage's input (I), and those of its weights (W).
        """
        return any(action.kind == "I" for rank in self.ranks for action in rank)

    def ahead(self, action: StageAction) -> bool:
        """
        Return whether an action is of a micro-batch of the next training step. That happens only in one step of an
        asynchronous schedule (`orders.steady_step`), in which numbers of micro-batches from `micro_batches` on are
        those of the next step.
        """
        return (action.micro_batch or 0) >= self.micro_batches

    @property
    def computes(self) -> str:
        """
        The formula, as text, by which a training step updates the weights w: `w(t+1) = update(w(t), g(w(t)))`, where
        g(w) is the gradient of the whole batch at w. For an asynchronous schedule g is of older weights: `g(w(t - 1))`.
        """
        late = f" - {self.gradient_delay}" if self.gradient_delay else ""
        return f"w(t+1) = update(w(t), g(w(t{late})))"

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, ascending."""
        return [stage for stage, r in enumerate(self.rank_of) if r == rank]

    def crosses(self, boundary: int) -> bool:
        """
        Return whether stages `boundary` and `boundary + 1` are on different ranks, so that values are sent between
        them.
        """
        return self.rank_of[boundary] != self.rank_of[boundary + 1]

    def computation(self) -> PipelineSchedule:
        """
        Return the schedule with only its computations, forwards and backwards: no sends, receives, gathers of weights
        or reductions. Memoised.
        """
        return self._computation

    @cached_property
    def _computation(self) -> PipelineSchedule:
        if all(action.kind in COMPUTE for actions in self.ranks for action in actions):
            return self
        return replace(self, ranks=tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in self.ranks))


def looped_ranks(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """
    Return the rank of each stage if stages are dealt to ranks round-robin, `chunks` to each: given 3 ranks and 2
    chunks, returns (0, 1, 2, 0, 1, 2).
    """
    return tuple(stage % ranks for stage in range(ranks * chunks))


def vee_ranks(ranks: int) -> tuple[int, ...]:
    """
    Return the rank of each stage if every rank has 2, in the order of ranks and back: given 3 ranks, returns (0, 1, 2,
    2, 1, 0).
    """
    return (*range(ranks), *reversed(range(ranks)))


def schedule_by_rank(
    name: str, micro_batches: int, rank_of: Sequence[int], order: Callable[[int], Sequence[StageAction]]
) -> PipelineSchedule:
    """
    Return the pipeline schedule called `name` in which rank r does the actions `order(r)` and stage s is on rank
    `rank_of[s]`. Raises `UnityError` if there are no stages or no micro-batches.
    """
    if not rank_of or micro_batches < 1:
        raise UnityError(
            f"pipeline schedule {name}: {len(rank_of)} stages, {micro_batches} micro-batches; use at least 1 of each"
        )
    ranks = range(max(rank_of) + 1)
    return PipelineSchedule(name, micro_batches, tuple(tuple(order(r)) for r in ranks), tuple(rank_of))
