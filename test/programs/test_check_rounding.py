"""
`--check` tells rounding from errors, where a step makes much of rounding: in float32 batch norms over few values, in
bf16 the choice of experts.
"""

from __future__ import annotations

import re

import pytest
from extent import ALL, sample
from models import deep
from ranks import Ranks, check
from zoo_plans import SIZES, program

from unity_ir.models import build
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer


@pytest.fixture(scope="module", params=["deep", "inception_v3"] if ALL else ["deep"])
def text(request: pytest.FixtureRequest) -> str:
    graph = deep() if request.param == "deep" else build(request.param, **SIZES[request.param])
    return program(graph, "data-parallel", 2, Optimizer("sgd", 0.01))


def scaled(text: str, number: int, by: float) -> str:
    """The program with one gradient too large."""
    start = text.rindex("    return ", 0, text.index("def update("))
    found = list(re.finditer(r"'([^']+)': \w+", text[start : text.index("\n", start)]))[number]
    at = start + found.end()
    return f"{text[:at]} * {by}{text[at:]}"


@pytest.mark.slow
def test_rounding_is_not_called_an_error(ranks: Ranks, text: str):
    assert ranks.run(text, 2, check, 3 if ALL else 2) == [[]] * 2


@pytest.mark.slow
def test_float64_is_what_tells(ranks: Ranks, text: str):
    """Without it the same step is called wrong, as its gradients are off by more than PyTorch's."""
    # On some processors no entry is off by 1e-4: here whatever is rounded is.
    compared = '(line := compare(f"step {t}: gradient of {n}", got[n], want[n]))'
    assert compared in text
    text = text.replace(compared, '(line := f"gradient of {n}")').replace("ROUNDING = 4", "ROUNDING = 0")
    assert ranks.run(text, 2, check, 1) == [[]] * 2
    strict = text.replace("IN_DOUBLE = True", "IN_DOUBLE = False")
    assert any("gradient of" in line for line in ranks.run(strict, 2, check, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", sample([40, -1], 2))
def test_errors_are_told_all_the_same(ranks: Ranks, text: str, number: int):
    assert ranks.run(scaled(text, number, 1.01), 2, check, 1)[0]


@pytest.mark.slow
def test_in_half_precision_tokens_go_to_other_experts_for_rounding(ranks: Ranks):
    """The check passes where tokens are rounded to other experts, and still fails for wrong gradients."""
    sizes = {"sequence": 8, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 24, "experts": 4}
    graph = mixed_precision(build("moe", batch=2, vocabulary=32, **sizes), "bf16")
    mixed = program(graph, "data-parallel", 2, Optimizer("adamw"))
    assert ranks.run(mixed, 2, check, 2) == [[]] * 2
    strict = mixed.replace("IN_DOUBLE = True", "IN_DOUBLE = False")
    assert any("gradient of" in line for line in ranks.run(strict, 2, check, 2)[0])
    for wrong in (scaled(mixed, 3, 1.5), scaled(mixed, -1, 0.0)):
        assert ranks.run(wrong, 2, check, 2)[0]
