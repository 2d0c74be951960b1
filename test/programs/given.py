"""Programs on weights and batches that a test gives, and with operators done wrong; these functions run on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from mutants import Mutant, told
from ranks import trained

Changes = Mapping[str, str]
"""By an operator's name, how it is done wrong: a key of `WRONG`."""


def trained_on(program: Any, steps: int, weights: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `ranks.trained` does, from weights of which some are given, on the same batch in all steps."""
    _give(program, weights, batch)
    return trained(program, steps, False)


def become(
    program: Any, changes: list[Changes], weights: Mapping[str, Any], batch: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """Return the first step's loss and gradients for each of `changes`, with operators of the program done wrong so."""
    _give(program, weights, batch)
    found: list[tuple[Any, Any]] = []
    for change in changes:
        right = {name: value for name, value in vars(program).items() if callable(value)}
        for operator, wrong in change.items():
            named = [name for name in right if name == operator or name.startswith(f"{operator}_")]
            assert named, f"the program has no {operator}"
            for name in named:
                setattr(program, name, WRONG[wrong](right[name]))
        run = trained(program, 1, False)
        vars(program).update(right)
        found.append((run["losses"][0], run["gradients"][0]) if run else (None, None))
    return found


def told_on(
    program: Any, batch: Mapping[str, Any], wrong: list[Mutant], loss: float, gradients: dict[str, Any]
) -> list[str]:
    """Return what `mutants.told` does, on a given batch."""
    _give(program, {}, batch)
    return told(program, wrong, loss, gradients)


def _give(program: Any, weights: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
    import torch

    initial = program.initial

    def given(name: str, spec: Any, seed: int) -> Any:
        made = initial(name, spec, seed)
        return torch.tensor(weights[name], dtype=made.dtype) if name in weights else made

    tensors = {name: torch.tensor(array) for name, array in batch.items()}
    program.initial = given
    program.Data = lambda source, seed: SimpleNamespace(batch=lambda t: dict(tensors))


def _of_the_document_before(right: Callable[..., Any]) -> Callable[..., Any]:
    """Queries see the document before theirs, too."""

    def documents(tokens: Any) -> Any:
        first, end, position = right(tokens)
        return first.gather(1, (first - 1).clamp(min=0)), end, position

    return documents


def _of_one_document(right: Callable[..., Any]) -> Callable[..., Any]:
    """Positions do not begin anew."""

    def documents(tokens: Any) -> Any:
        first, end, position = right(tokens)
        return first, end, position + first

    return documents


def _of_a_token_after(right: Callable[..., Any]) -> Callable[..., Any]:
    """Queries see the key after theirs, too."""

    def documents(tokens: Any) -> Any:
        first, end, position = right(tokens)
        return first, (end + 1).clamp(max=tokens.shape[1]), position

    return documents


def _sent_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    """The first token's first choice is added to its slot twice."""

    def to_slots(x: Any, at: Any, shares: Any) -> Any:
        shares = shares.clone()
        shares[0, 0, 0] *= 2
        return right(x, at, shares)

    return to_slots


def _into_one_slot(right: Callable[..., Any]) -> Callable[..., Any]:
    """The second token of each expert is in the slot of the first."""
    return lambda experts: (right(experts) - 1).clamp(min=0)


def _one_too_many(right: Callable[..., Any]) -> Callable[..., Any]:
    """A choice beyond the capacity counts, in the last slot."""
    return lambda shares, numbers: right(shares, (numbers - 1).clamp(min=0))


def _twice(right: Callable[..., Any]) -> Callable[..., Any]:
    """The first of the rows that a rank sends goes in the place of the second, too."""

    def sent(ctx: Any, x: Any, *more: Any) -> Any:
        x = x.clone()
        x[:, 1] = x[:, 0]
        return right(ctx, x, *more)

    return sent


def _to_others(right: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks send their rows in another order than their experts' numbers."""

    def sent(ctx: Any, x: Any, *more: Any) -> Any:
        return right(ctx, x.roll(1, 1) if x.is_floating_point() else x, *more)

    return sent


def _unsorted(right: Callable[..., Any]) -> Callable[..., Any]:
    """Rows stay in the order in which they are, where as many are taken as there are."""

    def taken(x: Any, at: Any, *more: Any) -> Any:
        found = right(x, at, *more)
        return x.reshape(found.shape) if x.numel() == found.numel() else found

    return taken


WRONG: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "right": lambda right: right,
    "document before": _of_the_document_before,
    "one document": _of_one_document,
    "token after": _of_a_token_after,
    "sent twice": _sent_twice,
    "one slot": _into_one_slot,
    "one too many": _one_too_many,
    "row twice": _twice,
    "to others": _to_others,
    "in order of arrival": _unsorted,
}
