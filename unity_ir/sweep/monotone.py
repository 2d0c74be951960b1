"""
Keep times monotone where physics has them so: no point takes longer than one of the same model whose machine is nowhere
faster and has no more memory, or whose batch is larger.

The former's program runs on this machine as it is, and takes at most as long (`programs.py`: what is simulated may take
a little longer, as the seconds of further micro-batches are those of the last one that is played). The step of a larger
batch runs with blank samples in the place of those that there are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unity_ir.sweep.point import Answer


def monotone(answers: Sequence[Answer]) -> list[Answer]:
    """
    Replace each answer of a sweep by a better one from another point, where possible; return them in order.

    If a faster step was found at another point, and can be run at this one (`Answer.can_run_at`), the answer gets the
    seconds, memory and recipe (degrees of parallelism) of the fastest such step, and `taken` names its point.
    """
    of_mesh: dict[str, list[Answer]] = {}
    for answer in answers:
        of_mesh.setdefault(answer.mesh, []).append(answer)
    return [_least(answer, of_mesh[answer.mesh]) for answer in answers]


def _least(answer: Answer, others: Sequence[Answer]) -> Answer:
    best = answer
    for other in others:
        if other.seconds is None or not other.can_run_at(answer):
            continue
        if best.seconds is None or other.seconds < best.seconds:
            best = other
    if best is answer:
        return answer
    return replace(answer, seconds=best.seconds, memory=best.memory, recipe=best.recipe, taken=best.point.title)
