"""
One table that is looked up by rows and multiplied by columns, dropout between, a loss whose classes are divided: equal
to PyTorch by every plan, with Adam, whose step of a weight that two operators read must see both gradients at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from by_hand import differences
from operator_twins import torch_dropout
from ranks import Ranks, trained
from torch import Tensor
from torch.nn import functional as F
from zoo_plans import program

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer

PLANS = [
    *(("data-parallel", 8), ("joint", 4), ("random-0", 8), ("random-1", 4)),
    *(("recompute-2", 8), ("pinned-3", 8), ("random-4", 2)),
]


def tied() -> Graph:
    b = Builder("tied")
    tokens, labels = (b.input(name, 8, 4, dtype="i64") for name in ("tokens", "labels"))
    table = b.weight("table", 16, 8)
    x = b.op("embedding", tokens, table)
    x = b.op("dropout", b.layer_norm(b.linear(x, "fc", 8), "norm"), p=0.25, seed=5)
    logits = b.op("matmul", x, b.op("transpose", table, perm=(1, 0)))
    return b.graph(b.vocabulary_parallel_cross_entropy(logits, labels, 8))


def by_hand(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    x = w["table"][batch["tokens"]] @ w["fc.weight"] + w["fc.bias"]
    x = torch_dropout(F.layer_norm(x, (8,), w["norm.weight"], w["norm.bias"]), 0.25, 5)
    return F.cross_entropy((x @ w["table"].T).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("plan", "world"), PLANS)
def test_equals_pytorch(ranks: Ranks, plan: str, world: int):
    adam = Optimizer("adam", 1e-2)
    found = ranks.run(program(tied(), plan, world, adam, double=True), world, trained, 3, False)[0]
    assert differences(found, by_hand, adam, "f64") == []
