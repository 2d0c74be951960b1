"""Rows of published steps can be predicted, and their figures are what their names say."""

from __future__ import annotations

import csv
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from published import host_seconds, plan_of, predicted_seconds
from published_figures import Predicted, figures, percentile, spearman, weighed
from published_kernels import Product, convolution_seconds, library, product_seconds
from published_rows import ROWS, Row, machine_of, published
from sources import without_a_source

from unity_ir.machine import load

OF = published()
SMALL = Row(
    "test",
    2020,
    "gpt2 of 3 layers",
    "gpt2,batch=16,sequence=256,layers=3,hidden=512,heads=8,vocabulary=1024",
    "dgx-a100:2",
    "tp=2",
    "bf16",
    {"ms": 10.0},
    "",
    attention="flash2",
)


def test_every_row_names_its_source_kernels_and_machine():
    assert len(OF.rows) - sum(row.source == "vTrain" for row in OF.rows) >= 150
    assert len({(row.source, row.name) for row in OF.rows}) == len(OF.rows)
    machines = {name: machine_of(name) for name in {row.machine for row in OF.rows}}
    for row in OF.rows:
        assert row.kernels
        assert OF.sources[row.source]
        assert 2017 <= row.year <= 2026
        assert row.ms > 0
        assert row.size("batch") % machines[row.machine].devices == 0 or "tp=" in row.degrees
    assert all(each.reason for each in OF.missing)


@pytest.mark.parametrize(
    ("measured", "ms"),
    [
        ({"seconds": 2.0}, 2000.0),
        ({"samples_per_second": 32.0}, 500.0),
        ({"tokens_per_second": 4096.0}, 1000.0),
        ({"tokens_per_second_and_gpu": 256.0}, 1000.0),
    ],
)
def test_what_a_source_says_is_milliseconds_of_a_step(measured: dict[str, float], ms: float):
    """The step is of 16 samples of 256 tokens on 16 GPUs."""
    assert replace(SMALL, measured=measured).ms == pytest.approx(ms)


def test_rows_that_say_too_much_or_too_little_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="attention is 'paged'"):
        replace(SMALL, attention="paged")
    with pytest.raises(ValueError, match="give one of ms, seconds"):
        replace(SMALL, measured={"ms": 1.0, "seconds": 1.0})
    (tmp_path / "some.toml").write_text('name = "s"\nsource = "s"\n[[rows]]\nname = "n"\nbatch = 3\n')
    with pytest.raises(ValueError, match="s: n: batch is no field of a row"):
        published(tmp_path)
    lines = 'name = "s"\nsource = "s"\n[[tables]]\ncolumns = "a b"\nname = "{a}"\nlines = "1"\n'
    (tmp_path / "some.toml").write_text(lines)
    with pytest.raises(ValueError, match="1 values for 2 columns"):
        published(tmp_path)


def test_rows_of_a_table_take_columns_by_the_value_of_another():
    (row,) = (r for r in OF.rows if r.name == "MPT 70b, sequence 2048, 64 H100")
    assert row.model == "gpt2,batch=2048,sequence=2048,layers=80,hidden=8192,heads=64,vocabulary=50368"
    assert row.degrees == "zero=3,micro_batches=4,recompute=block"
    assert row.machine == "dgx-h100:8"
    assert row.ms == pytest.approx(2048 * 2048 / 66523 * 1e3)


def test_levels_can_be_divided_into_groups():
    machine = machine_of("dgx-a100:12x4x8")
    assert machine.devices == load("dgx-a100:48").devices
    assert machine.collective_time("all_reduce", machine.sizes_of(range(len(machine.mesh.sizes))), 2**30) > 0


@pytest.mark.slow
def test_kernels_of_their_own_take_longer():
    fused, apart, alone = (predicted_seconds(replace(SMALL, fused=fused)) for fused in ("all", "pointwise", "none"))
    assert fused < apart < alone
    # Of classes that are divided, the loss is of operators that do not cast.
    losses = [predicted_seconds(replace(SMALL, degrees="", loss=loss)) for loss in ("fused", "alone")]
    assert losses[0] < losses[1]
    products = replace(SMALL, attention="products")
    assert predicted_seconds(products) < predicted_seconds(replace(products, dropout=0.1))


@pytest.mark.slow
def test_moves_beside_kernels_shorten_a_step_as_the_row_says():
    waited, beside, in_pieces = (predicted_seconds(replace(SMALL, overlap=o)) for o in ("none", "all", "products"))
    assert waited > beside > in_pieces


@pytest.mark.slow
def test_attention_takes_what_its_kernel_was_measured_to():
    long = replace(SMALL, model=SMALL.model.replace("sequence=256", "sequence=16384"), machine="dgx-h100:2")
    first, second, third = (predicted_seconds(replace(long, attention=a)) for a in ("flash1", "flash2", "cudnn"))
    assert first > second > third


@pytest.mark.slow
def test_a_row_in_stages_is_a_pipeline():
    staged = replace(SMALL, degrees="tp=2,micro_batches=4,stages=2,recompute=block,zero=1")
    plan = plan_of(staged, machine_of(staged.machine))
    assert plan.program.pipeline is not None
    assert plan.program.pipeline.ranks == 2
    assert plan.program.micro_batches == 4
    assert predicted_seconds(staged) > 0


def test_figures():
    rows = [replace(SMALL, measured={"ms": ms}) for ms in (1.0, 2.0, 3.0)]
    found = [Predicted(row, by * row.ms) for row, by in zip(rows, (0.5, 1.0, 1.2), strict=True)]
    said = figures(found)
    assert (said.rows, said.median_ratio, said.spearman) == (3, 1.0, 1.0)
    assert said.median_error == pytest.approx(0.2)
    assert said.most_error == pytest.approx(0.44)
    assert spearman([replace(found[0], row=replace(SMALL, measured={"ms": 9.0})), *found[1:]]) == pytest.approx(-0.5)
    assert percentile([0.0, 1.0], 0.9) == pytest.approx(0.9)
    # A source of one row counts as one of three.
    other = Predicted(replace(SMALL, source="other"), 20.0)
    assert weighed([*found, other])[0] == pytest.approx((0.2 + 1.0) / 2)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["MPT 7b, sequence 2048, 8 H100", "Llama 3.1 8B, selective checkpoints, 8 H100", "GPT 1.7B, 32 A100"]
)
def test_steps_of_three_sources_are_predicted_within_a_tenth(name: str):
    (row,) = (r for r in OF.rows if r.name == name)
    assert abs(predicted_seconds(row) * 1e3 / row.ms - 1) < 0.1


def test_matrix_products_of_an_h100_are_within_what_was_measured_of_them():
    """On shapes that XLA's autotuner measured one by one, in short runs: by tiles, and by the preset's roofline."""
    device, short = load("dgx-h100").device, 0.85
    with (ROWS / "kernels" / "matmul_h100.csv").open() as file:
        rows = [[float(x) for x in line] for line in [*csv.reader(file)][1:]]
    by_tiles: list[float] = []
    by_roofline: list[float] = []
    for b, m, n, k, tflops in rows:
        flops, moved = 2 * b * m * n * k, 2 * b * (m * k + k * n + m * n)
        measured = flops / tflops / 1e12
        of = Product(int(b), int(m), int(n), int(k))
        by_tiles.append(product_seconds(of, "bf16", device, library("H100"), short) / measured - 1)
        by_roofline.append(device.kernel_time(flops, moved, "bf16", "contraction") / measured - 1)
    assert abs(float(np.median(by_roofline))) < 0.2
    assert abs(float(np.median(by_tiles))) < 0.05
    assert float(np.median(np.abs(by_tiles))) < 0.07
    assert max(map(abs, by_tiles)) < 0.35


@pytest.mark.parametrize(
    ("kind", "preset", "flops", "most"), [("P100", "p100", 9.52e12, 0.1), ("V100", "box", 14.13e12, 0.18)]
)
def test_convolutions_are_within_what_was_measured_of_them(kind: str, preset: str, flops: float, most: float):
    """Convolutions of 3 x 3 in f32 that NeuSight measured one by one, on PCIe boards."""
    device = replace(load(preset).device, flops={"f32": flops})
    with (ROWS / "kernels" / "convolution.csv").open() as file:
        rows = [*csv.DictReader(line for line in file if not line.startswith("#"))]
    errors: list[float] = []
    for row in rows:
        n, c, o, size = (int(row[key]) for key in ("batch", "inputs", "outputs", "size"))
        extents = {"n": n, "c": c, "o": o, "y": size, "z": size, "i": 3, "j": 3}
        seconds = convolution_seconds("conv2d", extents, True, "f32", device, library(kind))
        errors.append(seconds * 1e3 / float(row[kind]) - 1)
    assert abs(float(np.median(errors))) < 0.1
    assert float(np.median(np.abs(errors))) < most


def test_a_product_takes_whole_tiles_and_whole_waves():
    device, known = load("dgx-a100").device, library("A100")

    def seconds(m: int, n: int) -> float:
        return product_seconds(Product(1, m, n, 4096), "bf16", device, known, 0.8)

    # 9 x 12 tiles of 128 x 256 are one wave of 108; one column more begins another.
    assert seconds(1152, 3072) == seconds(1150, 3050)
    assert seconds(1152, 3073) > 1.3 * seconds(1152, 3072)
    sizes = [*range(64, 4096, 96)]
    assert all(seconds(m, 2048) <= seconds(more, 2048) for m, more in pairwise(sizes))
    # A board with a lower limit of power is slower in that proportion.
    slower = load("grand-teton").device
    at = [
        product_seconds(Product(1, 8192, 8192, 8192), "bf16", d, library("H100"), 0.7)
        for d in (slower, load("dgx-h100").device)
    ]
    assert at[0] / at[1] == pytest.approx(0.7 / 0.56, rel=0.02)


def test_every_figure_of_a_library_says_where_it_is_from():
    text = (ROWS / "kernels" / "library.toml").read_text(encoding="utf-8")
    figures = ("fill", "layer", "processors", "cache", "product", "convolution")
    assert without_a_source(text, figures, figures) == []
    assert without_a_source(text.replace("# NVIDIA A100 datasheet", ""), figures, figures) == ["processors = 108"]
    for row in OF.rows:
        assert library(row.device).processors > 0


def test_a_host_that_waits_for_each_kernel_adds_its_time():
    """3 ms per layer; with a second forward 4 ms, of 2 layers of a stage, for 6 micro-batches and a bubble of 3."""
    waited = replace(SMALL, launches="waited", model="gpt2,batch=16,layers=8", degrees="micro_batches=6,stages=4")
    assert host_seconds(waited) == pytest.approx(0.003 * 2 * 9)
    assert host_seconds(replace(waited, degrees=f"recompute=block,{waited.degrees}")) == pytest.approx(0.004 * 2 * 9)
    assert host_seconds(replace(waited, launches="ahead")) == 0


@pytest.mark.slow
def test_norms_in_steps_take_longer():
    llama = "llama3_8b,batch=16,sequence=512,layers=2,hidden=512,heads=8,kv_heads=8,intermediate=1024,vocabulary=1024"
    row = replace(SMALL, model=llama, degrees="", fused="none")
    fused, steps = (predicted_seconds(replace(row, norms=norms)) for norms in ("fused", "steps"))
    # 5 norms, with their gradients, and 8 rotations of 0.5 MB for each GPU: kernels that are launched, above all.
    assert 5 * 14 * 4e-6 < steps - fused < 1e-3


@pytest.mark.slow
def test_weights_copied_out_of_what_was_gathered_take_longer():
    # Over several nodes the plan may gather more of them together.
    row = replace(SMALL, machine="dgx-a100:1", degrees="zero=3", fused="none")
    views, copied = (predicted_seconds(replace(row, weights=weights)) for weights in ("views", "copied"))
    # Matrices of three layers, gathered twice, read and written; the plan copies the rest, which is gathered together.
    moved = 2 * 2 * 2 * (3 * 12 * 512**2)
    device = machine_of(row.machine).device
    assert copied - views == pytest.approx(moved / (device.memory_bandwidth * device.efficiency), rel=0.05)


def test_attention_has_an_efficiency_for_each_kernel_and_gpu_it_ran_on():
    reached = tomllib.loads((ROWS / "kernels" / "attention.toml").read_text())
    for row in OF.rows:
        if row.attention != "products":
            assert 0 < reached[row.attention][row.device] < 1
