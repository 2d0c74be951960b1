"""The reference that `--check` compares with computes in the precision of the weights that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from extent import sample
from zoo import SMALL, small

from unity_ir.forms.addresses import Names
from unity_ir.lowering.emit.reference_text import reference_text
from unity_ir.models import build

MIXTURES = ["qwen3_moe,capacity=100,balance=100", "moe,dispatch=sparse,capacity=100", "moe,dispatch=sparse"]
"""Those with a capacity have constants: the weight of a loss, and which slots are taken."""


@pytest.mark.parametrize("text", [*MIXTURES, *sample([*SMALL], 4)])
def test_computes_in_the_precision_of_its_weights(text: str):
    name, keys = small(text)
    graph = build(name, **keys)
    scope: dict[str, Any] = {"torch": torch}
    exec(reference_text(graph, Names({"weights", "batch", "kept", "torch"}).new, set()), scope)
    generator = torch.Generator().manual_seed(0)

    def run(dtype: torch.dtype) -> torch.Tensor:
        generator.manual_seed(0)
        weights = {n.name: torch.randn(n.types[0].shape, generator=generator).to(dtype) for n in graph.weights()}
        batch = {
            n.name: torch.randint(0, 2, n.types[0].shape, generator=generator)
            if n.types[0].is_integer
            else torch.randn(n.types[0].shape, generator=generator).to(dtype)
            for n in graph.inputs
        }
        return scope["reference"](weights, batch)

    single, double = run(torch.float32), run(torch.float64)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert float(single) == pytest.approx(float(double), rel=0.5, abs=1e-3)
