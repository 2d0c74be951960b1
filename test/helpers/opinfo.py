"""PyTorch's samples of its operators (OpInfo), and whether ours makes the same of them, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from operator_cases import DTYPES
from torch import Tensor

from unity_ir.ops import operator
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Value, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.syntax import AttrValue

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

SINGLE = ("float", "nn.functional.hardsigmoid")
"""Where PyTorch's own backward is of single precision: the conversion to it, and the 1/6 of hardsigmoid."""

MOST = 12
"""Samples taken of one operator, at most."""


@dataclass(frozen=True)
class Use:
    """A sample in ours: tensors, made of the sample's by PyTorch, and what is built of them."""

    operands: tuple[Tensor, ...]
    build: Callable[..., tuple[Value, ...]]


Convert = Callable[["SampleInput"], Use | None]


def use(name: str, *operands: Tensor, **attributes: AttrValue) -> Use:
    """One operator."""
    return Use(operands, lambda *values: operator(name)(*values, **attributes))


def one(name: str, *operands: Value, **attributes: AttrValue) -> Value:
    (result,) = operator(name)(*operands, **attributes)
    assert isinstance(result, Value)
    return result


@cache
def infos(variant: str | None = None) -> Mapping[str, OpInfo]:
    """PyTorch's descriptions by name; the first of each where no variant is asked for."""
    # Takes seconds, which only who runs these tests should wait for.
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

    # Samples look on the stack, with all sources, for a test of unittest that there is not here.
    common_utils.extract_test_fn = lambda: None

    found: dict[str, OpInfo] = {}
    for info in op_db:
        if variant in (None, info.variant_test_name):
            found.setdefault(info.name, info)
    return found


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors(part)] if isinstance(value, list | tuple) else []


def kind(tensor: Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)


def check(info: OpInfo, sample: SampleInput, convert: Convert) -> bool:
    """Whether a sample is one of ours; if so, what ours makes of it and its gradients are PyTorch's."""
    given = tensors([sample.input, *sample.args, *sample.kwargs.values()])
    if any(0 in t.shape for t in given):
        return False
    leaves = [t for t in given if t.requires_grad]
    # Before PyTorch's own runs, which may change what it is given.
    made = convert(sample)
    if made is None:
        return False
    operands = [t.detach().clone() for t in made.operands]
    found = info(sample.input, *sample.args, **sample.kwargs)
    expected = [found] if isinstance(found, Tensor) else list(found)

    arrays = {f"x{i}": t.numpy() for i, t in enumerate(operands)}
    values = [
        leaf("weight" if t.is_floating_point() else "input", tensor_type(tuple(t.shape), kind(t)), name=f"x{i}").result
        for i, t in enumerate(operands)
    ]
    results = made.build(*values)
    assert [(r.shape, DTYPES[r.dtype]) for r in results] == [(tuple(t.shape), t.dtype) for t in expected]

    random = torch.Generator().manual_seed(0)
    loss: Value | None = None
    cotangents: dict[int, Tensor] = {}
    for i, (result, tensor) in enumerate(zip(results, expected, strict=True)):
        if tensor.requires_grad:
            cotangents[i] = torch.randn(tensor.shape, dtype=tensor.dtype, generator=random)
            arrays[f"g{i}"] = cotangents[i].numpy()
            g = leaf("input", result.type.serial, name=f"g{i}").result
            term = one("reduce_sum", one("mul", result, g), dim=0, count=len(result.shape))
            loss = term if loss is None else one("add", loss, term)
    graph = Graph("sample", (), results if loss is None else (loss, *results))
    if loss is not None:
        graph = differentiate(graph, Optimizer())
    inputs = tuple(n for n in graph.nodes() if n.op == "input")
    values_of = interpret(Graph("sample", inputs, graph.roots), arrays, arrays)
    for result, tensor in zip(results, expected, strict=True):
        np.testing.assert_allclose(values_of[result], tensor.detach().numpy(), rtol=1e-9, atol=1e-9)
    if loss is None:
        return True
    wanted = torch.autograd.grad(
        [expected[i] for i in cotangents], leaves, list(cotangents.values()), allow_unused=True
    )
    ours = {u.weight.node.name: torch.from_numpy(np.array(values_of[u.grad])) for u in graph.updates}
    # What ours was given may have been made of the sample's tensors.
    reached = [(t, ours[f"x{i}"]) for i, t in enumerate(made.operands) if f"x{i}" in ours and t.requires_grad]
    got = torch.autograd.grad([t for t, _ in reached], leaves, [g for _, g in reached], allow_unused=True)
    tolerance = 1e-6 if info.name in SINGLE else 1e-9
    for ours_is, want in zip(got, wanted, strict=True):
        if want is None or ours_is is None:
            assert all(g is None or not g.any() for g in (want, ours_is))
        else:
            torch.testing.assert_close(ours_is, want, rtol=tolerance, atol=tolerance)
    return True
