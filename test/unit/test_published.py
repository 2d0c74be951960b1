"""Rows of published steps can be predicted, and their figures are what their names say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published import Predicted, Row, degrees_of, machine_of, predicted, published, spearman, summary

from unity_ir.search.baselines.recipe import Degrees

pytestmark = pytest.mark.slow

ROWS, MISSING = published()
SMALL = Row(
    "test",
    "gpt2 of 3 layers",
    "gpt2,batch=16,sequence=256,layers=3,hidden=512,heads=8,vocabulary=1024",
    "dgx-a100:2",
    "tp=2",
    "bf16",
    10.0,
    "",
)


def test_every_row_names_its_source_kernels_machine_and_degrees():
    assert len(ROWS) == 35
    assert len({(row.source, row.name) for row in ROWS}) == 35
    for row in ROWS:
        assert row.kernels
        Degrees(**degrees_of(row)).on(machine_of(row.machine))
    assert all(reason for _, _, reason in MISSING)


def test_recomputed_kernels_are_added():
    found = {kind: predicted(replace(SMALL, recompute=kind)) for kind in ("none", "selective", "full")}
    assert found["none"].added_ms == 0
    assert 0 < found["selective"].added_ms < found["full"].added_ms
    for each in found.values():
        assert each.ms - each.added_ms == pytest.approx(found["none"].ms)
    # A forward is a third of a step's products, so that adding the blocks' comes to no more than half of the step.
    assert found["full"].added_ms < found["none"].ms / 2


def test_kernels_of_their_own_take_longer():
    fused, apart, alone = (predicted(replace(SMALL, fused=fused)).ms for fused in ("all", "pointwise", "none"))
    products = predicted(replace(SMALL, attention="products")).ms
    # Of classes that are divided, the loss is of operators that do not cast.
    losses = [predicted(replace(SMALL, degrees="", loss=loss)).ms for loss in ("fused", "alone")]
    assert fused < apart < alone
    assert fused < products
    assert losses[0] < losses[1]


def test_a_row_of_unknown_kernels_is_refused():
    with pytest.raises(ValueError, match="attention is 'paged'; it is one of flash, products"):
        predicted(replace(SMALL, attention="paged"))


def test_figures():
    found = [Predicted(replace(SMALL, ms=ms), by * ms, 0, 0) for ms, by in ((1.0, 0.5), (2.0, 1.0), (3.0, 1.2))]
    assert summary(found) == {"rows": 3, "median_ratio": 1.0, "median_error": pytest.approx(0.2), "spearman": 1.0}
    assert spearman([replace(found[0], ms=9.0), *found[1:]]) == pytest.approx(-0.5)


@pytest.mark.slow
def test_llama_2_13b_without_checkpoints_is_predicted_within_a_tenth():
    (row,) = (r for r in ROWS if r.name == "Llama 2 13B, no checkpoints, 64 A100")
    assert abs(predicted(row).ratio - 1) < 0.1
