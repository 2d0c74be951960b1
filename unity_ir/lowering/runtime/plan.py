"""Define stand-ins for the names that a program's plan defines, so that the fixed part can be linted and tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Spec:
    """
    Shape, element type and layout of a whole tensor of an emitted program.

    `roles` has what each mesh axis does: the number of the dim that it shards, or "copy", "sum", "repeat", "at i" (only
    ranks at coordinate i hold it). Integers are from 0 to `below` - 1 (None: any). `time` is the dim that micro-batches
    divide, `cast` the element type of a weight's kept cast; None if there is none. A `frozen` weight is not trained.
    One `at_host` rests in the memory of the host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    roles: tuple[int | str, ...]
    below: int | None = None
    time: int | None = None
    cast: torch.dtype | None = None
    frozen: bool = False
    at_host: bool = False


NAME = ""
MESH: tuple[int, ...] = ()
WORLD = 1
MICRO_BATCHES = 1
LINKS: tuple[str, ...] = ()
GROUPS: tuple[tuple[int, ...], ...] = ()
INPUTS: dict[str, Spec] = {}
WEIGHTS: dict[str, Spec] = {}
LOSS = Spec((), torch.float32, ())
IMPORTED = False
TABLES: tuple[str, ...] = ()
RUNNING: dict[str, float] = {}
COUNTERS: dict[str, int] = {}
NAMES: dict[str, str] = {}
COARSEST = torch.float32
OPTIMIZER: tuple[str, dict[str, float]] = ("sgd", {"lr": 0.1})
STATE: tuple[str, ...] = ()
STATE_WINDOW = 0
PARAMETER_GROUPS: tuple[tuple[str, dict[str, float]], ...] = ()
CLIP = 0.0
PIPELINE: tuple[int, ...] = ()
SCHEDULE: tuple[str, ...] = ()
RANK_OF: tuple[int, ...] = ()
PARTS: dict[str, Any] = {}
RECEIVES: dict[str, tuple[tuple[str, tuple[int, ...], torch.dtype, tuple[tuple[int, int], ...]], ...]] = {}
ON_HOST: str | None = None
COUNTED = (1, "samples")
FLOPS, PEAK = 0, None


def forward_backward(ctx: Any, weights: Any, batch: Any) -> Any:
    """
    Stand in for a program's step on this rank's pieces `weights` and `batch` by name. It returns (part of the loss,
    {name: gradient of the trained weight}); the dict has the next values of running statistics, too.
    """
    raise NotImplementedError


def weights_at_host(weights: Any) -> Any:
    """Stand in for `host.weights_at_host`, which ends what `pieces.init_weights` does."""
    raise NotImplementedError


def moments_at_host(weights: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """Stand in for `host.moments_at_host`, which begins with pieces of weights as `pieces.init_moments` has them."""
    raise NotImplementedError


flight: Any = None
"""Stand-in for the function that makes what is under way between steps; None where steps do not overlap."""

forward: Any = None
"""
Stand-in for a program's forward alone, a function of `forward_backward`'s arguments that returns this rank's part of
the loss, with COUNT also of the number of labels that it is the mean over; None in a program without one.
"""

COUNT: Spec | None = None


def update(weights: Any, grads: Any, moments: Any, t: Any, rate: Any = 1.0, scale: Any = 1.0, live: Any = 1.0) -> None:
    """
    Stand in for a program's optimizer, which updates trained `weights` and `moments` in place, by the gradients `grads`
    (each by name) times `scale`. `t` is the step's number, from 1; the learning rate is multiplied by `rate`. If `live`
    is 0, nothing is changed.

    In a program whose ON_HOST is None, `t`, `rate`, `scale` and `live` may be tensors on the device. In others they are
    numbers, and there is no `live`.
    """
    raise NotImplementedError


def reference(weights: Any, batch: Any, kept: Any = None) -> Any:
    """
    Stand in for a program's serial forward in plain PyTorch, which returns the loss of `weights` and `batch`, whole
    tensors by name. That of a program with running statistics takes the dict `kept`, too, and puts their next values
    into it.
    """
    raise NotImplementedError
