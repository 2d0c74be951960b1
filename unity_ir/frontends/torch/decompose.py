"""Take an ATen operator without a mapping apart into operators that have one, by PyTorch's own decompositions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._decomp
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from unity_ir.frontends.torch.aliases import written
from unity_ir.frontends.torch.site import MAPPINGS


def decompose(node: fx.Node) -> tuple[fx.GraphModule, Sequence[fx.Node]] | None:
    """
    Take an ATen operator apart by PyTorch's decompositions, down to operators that have a mapping to the compiler's.

    Returns the graph of these operators, and those arguments of `node` that are nodes, in the order of the graph's
    placeholders. Where the operator writes in place, the graph writes to a copy. None if PyTorch does not take the
    operator apart, or such an argument is not one tensor.
    """
    target: Any = node.target
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    metas = [leaves[i].meta.get("val") for i in at]
    if not all(isinstance(m, torch.Tensor) for m in metas):
        return None
    changed = {leaves.index(n) for n in written(node)}

    def call(*given: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(at, given, strict=True):
            filled[i] = tensor.clone() if i in changed else tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    decompositions: Any = torch._decomp
    known = decompositions.decomposition_table
    table: Any = {op: rule for op, rule in known.items() if _name(op) not in MAPPINGS} | OWN
    try:
        module = make_fx(call, decomposition_table=table, tracing_mode="fake")(*map(_blank, metas))
    except Exception:  # what decompositions raise for arguments they do not take
        return None
    if any(n.target is target for n in module.graph.nodes):
        return None
    return module, [leaves[i] for i in at]


def _multilabel_margin_loss(scores: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, ...]:
    """
    Take `multilabel_margin_loss_forward` apart, for [sample, class] or [class]: PyTorch's own rule (2.13) counts the
    classes after the first -1, too, as if they were class 0.
    """
    classes = scores.shape[-1]
    rows, wanted = scores.reshape(-1, classes), target.reshape(-1, classes)
    number = torch.arange(classes, device=target.device)
    end = torch.amin(torch.where(wanted == -1, number, classes), dim=-1, keepdim=True)
    is_given = number < end
    own = torch.gather(rows, -1, torch.where(is_given, wanted, 0))
    is_target = torch.any(number == torch.where(is_given, wanted, -1).unsqueeze(-1), dim=1)
    # [sample, given class, other class]
    margins = (1 - own.unsqueeze(-1) + rows.unsqueeze(1)).clamp_min(0)
    counts = is_given.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counts, margins, 0).sum(dim=(1, 2)) / classes
    loss = (losses if scores.dim() == 2 else losses[0]) if reduction == 0 else losses.mean()
    loss = losses.sum() if reduction == 2 else loss
    return loss, is_target.to(scores.dtype).reshape(target.shape)


OWN: Any = {torch.ops.aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss}
"""Rules in the place of PyTorch's that are wrong."""


def _blank(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)


def _name(operator: Any) -> str:
    """Return an operator's name without overload, and without the `_` of in-place operators."""
    return operator.overloadpacket.__name__.rstrip("_") if hasattr(operator, "overloadpacket") else ""
