"""Tables of the weights that one launch updates are used again for the same tensors only."""

from __future__ import annotations

import torch

from unity_ir.lowering import runtime
from unity_ir.lowering.runtime.plan import Spec


def test_another_weight_at_the_same_address_has_a_table_of_its_own():
    specs = {name: Spec((64,), torch.float32, ()) for name in "ab"}
    plan = {"WEIGHTS": specs, "OPTIMIZER": ("sgd", {"lr": 0.1}), "trained": dict, "hyperparameters": lambda _: {}}
    of = runtime.load(("tables",), **plan)
    memory = [torch.zeros(64) for _ in range(2)]

    def row(name: str, size: int) -> list[int]:
        weight, grad = (x[:size] for x in memory)
        (table,) = of.weight_tables({name: weight}, {name: grad}, {}, 16)
        assert [len(x) for x in table.examples] == [size, size]
        assert len(table.blocks) == size // 16
        return table.rows.tolist()[0][:-1]

    addresses = [x.data_ptr() for x in memory]
    for name, size in (("a", 64), ("b", 64), ("a", 32), ("a", 64)):
        assert row(name, size) == [*addresses, size]
