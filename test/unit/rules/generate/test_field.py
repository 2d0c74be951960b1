"""Values modulo a prime are those of TDL's reference, where that is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unity_ir.ops import operator
from unity_ir.rules.research.generate.field import P, ResidueLine, inverse, oracle, residue
from unity_ir.tdl.evaluate import evaluate

CASES: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("matmul", [(2, 3), (3, 4)], {}),
    ("batch_matmul", [(2, 3, 4), (2, 4, 5)], {}),
    ("add", [(3, 4), (4,)], {}),
    ("mul", [(3, 1), (3, 4)], {}),
    ("sub", [(3, 4), (3, 4)], {}),
    ("concat", [(2, 3), (2, 4)], {"dim": 1}),
    ("split", [(5, 3)], {"dim": 0, "sizes": (2, 3)}),
    ("transpose", [(2, 3, 4)], {"perm": (2, 0, 1)}),
    ("split_heads", [(2, 3, 8)], {"heads": 2}),
    ("merge_heads", [(2, 2, 3, 4)], {}),
    ("slice", [(7, 3)], {"dim": 0, "start": 1, "size": 3, "step": 2}),
    ("pad", [(3, 2)], {"dim": 0, "before": 1, "after": 2, "interior": 1}),
    ("conv2d", [(2, 3, 5, 4), (2, 3, 3, 2)], {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 2)}),
    ("max_pool2d", [(1, 2, 5, 5)], {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 1), "dilation": (1, 1)}),
    ("reduce_sum", [(3, 4)], {"dim": 1}),
    ("reduce_max", [(3, 4)], {"dim": 0}),
    ("maximum", [(3, 4), (3, 4)], {}),
]


@pytest.mark.parametrize(("name", "shapes", "attributes"), CASES, ids=[c[0] for c in CASES])
def test_equals_the_reference_on_small_integers(name: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any]):
    op = operator(name)
    bound = op.bind(tuple(shapes), op.attributes(attributes)).bound
    random = np.random.default_rng(3)
    operands = [random.integers(0, 50, (2, *s)) for s in shapes]
    found = ResidueLine(bound)(operands)
    for i in range(2):
        wanted = evaluate(bound, [o[i].astype(np.float64) for o in operands])
        for f, w in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(f[i], w.astype(np.int64) % P)


def test_arithmetic_does_not_overflow():
    op = operator("matmul")
    bound = op.bind(((1, 40), (40, 1)), op.attributes({})).bound
    (found,) = ResidueLine(bound)([np.full((1, 1, 40), P - 1), np.full((1, 40, 1), P - 1)])
    assert found.item() == 40


def test_division_inverts_multiplication():
    x = np.array([1, 2, 3, P - 1, 123456789])
    np.testing.assert_array_equal(inverse(x) * x % P, 1)
    assert inverse(np.array([0])).item() == 0
    assert residue(0.5) * 2 % P == 1


def test_functions_are_oracles():
    """Alike for the same argument, and obeying no law: relu of a sum is no sum."""
    x, y = np.array([5, 7]), np.array([11, 13])
    np.testing.assert_array_equal(oracle("relu", [x]), oracle("relu", [x]))
    assert (oracle("relu", [x]) != oracle("gelu", [x])).all()
    assert (oracle("relu", [(x + y) % P]) != (oracle("relu", [x]) + oracle("relu", [y])) % P).all()
