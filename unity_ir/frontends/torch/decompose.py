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
    table: Any = {op: rule for op, rule in known.items() if _name(op) not in MAPPINGS}
    try:
        module = make_fx(call, decomposition_table=table, tracing_mode="fake")(*map(_blank, metas))
    except Exception:  # what decompositions raise for arguments they do not take
        return None
    if any(n.target is target for n in module.graph.nodes):
        return None
    return module, [leaves[i] for i in at]


def _blank(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)


def _name(operator: Any) -> str:
    """Return an operator's name without overload, and without the `_` of in-place operators."""
    return operator.overloadpacket.__name__.rstrip("_") if hasattr(operator, "overloadpacket") else ""
