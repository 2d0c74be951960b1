"""Grids: values and points, and what cannot be is refused in one line before anything is searched."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.sweep.grid import Grid, machine_with
from unity_ir.sweep.knobs import Knob, read_knob
from unity_ir.tools import unity_sweep

SMALL = "mlp,hidden=256,layers=2,classes=256,batch=64"


@pytest.fixture(autouse=True)
def _raise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNITY_IR_TRACEBACK", "1")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gpus=16,8", (8, 16)),
        ("gpus=8..64*2", (8, 16, 32, 64)),
        ("hbm=1T..2T+500G", (1e12, 1.5e12, 2e12)),
        ("bandwidth.nodes=12.5G", (12.5e9,)),
        ("batch=2..9*2,3", (2, 3, 4, 8)),
    ],
)
def test_values(text: str, values: tuple[float, ...]):
    assert read_knob(text) == Knob(text.partition("=")[0], values)


def test_knobs_change_figures_of_a_machine():
    settings = (("hbm", 1e12), ("memory", 5e10), ("bandwidth.gpus", 1e11), ("gpus_per_node", 4.0), ("gpus", 16.0))
    machine, before = machine_with("dgx-h100", settings), load("dgx-h100:2")
    assert (machine.device.memory_bandwidth, machine.device.memory) == (1e12, 5e10)
    assert machine.device.reserve == before.device.reserve
    assert machine.device.flops == before.device.flops
    assert [(level.name, level.size, level.bandwidth) for level in machine.levels] == [
        ("nodes", 4, 50e9),
        ("gpus", 4, 1e11),
    ]
    assert machine_with("dgx-h100", (("gpus", 4.0),)).mesh.sizes == (2, 2)
    assert machine_with("summit", (("gpus", 12.0),)).mesh == load("summit:2").mesh
    # The knob of a level that joins nothing is no error: one node of a cluster has no network.
    assert machine_with("dgx-h100", (("bandwidth.nodes", 1e9), ("gpus", 8.0))).levels == load("dgx-h100").levels


def test_points_are_the_product():
    grid = Grid(("lenet", "alexnet"), ("box:2",), (Knob("batch", (8, 16)), Knob("hbm", (1e12,))))
    assert [(p.text, dict(p.settings)["hbm"]) for p in grid.points()] == [
        (f"{model},batch={batch}", 1e12) for model in ("lenet", "alexnet") for batch in (8, 16)
    ]


BAD = {
    ("gpus",): "'gpus' is not NAME=VALUES",
    ("gpus=",): "gpus is ''; it must be a number above 0",
    ("gpus=x",): "gpus is 'x'; it must be a number above 0",
    ("gpus=0",): "gpus is '0'; it must be a number above 0",
    ("hbm=nan",): "hbm is 'nan'",
    ("hbm=inf",): "hbm is 'inf'",
    ("gpus=3.5",): "gpus is 3.5; it must be a whole number",
    ("batch=8.5",): "batch is 8.5; it must be a whole number",
    ("gpus=8,8",): "gpus has a value twice",
    ("gpus=8..4*2",): "gpus: the range '8..4*2' is empty",
    ("gpus=8..16",): "the range '8..16' has no step",
    ("gpus=8..16*1",): "goes on for ever",
    ("hbm=1..1T+1",): "has more than 10000 values",
    ("gpus=8", "gpus=16"): "gpus is given twice",
    ("nosuch=1",): "mlp has no key 'nosuch'; it has batch, hidden, layers, classes; knobs of machines are gpus,",
    ("bandwidth.racks=1G",): "dgx-h100 has no knob bandwidth.racks: its levels are nodes, gpus; leave it out",
    ("gpus=12",): "gpus=12 is no whole number of 8 gpus of dgx-h100",
    ("hbm=1e30",): "memory_bandwidth is 1e+30; it must be from 1 to 1e+24",
    ("memory=1G",): "reserve is 5500000000; it must be less than the memory",
    ("gpus=2048",): "64 samples do not divide over 2048 devices",
    ("layers=2..200+1", "hidden=2..200+1"): "points are too many",
}


@pytest.mark.parametrize("knobs", BAD, ids=" ".join)
def test_bad_grids_are_refused_in_one_line(knobs: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    over = [word for knob in knobs for word in ("--over", knob)]
    assert (
        unity_sweep.main([SMALL.replace(",layers=2", "").replace(",hidden=256", ""), "--machine=dgx-h100", *over]) == 1
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert BAD[knobs] in err
    assert err.count("\n") == 1


LISTED = """
[[devices]]
name = "chip"
count = 2
flops = { f32 = 1e12 }
memory_bandwidth = 1e11
memory = 1_000_000_000
launch = 0
efficiency = 0.5
[[links]]
between = [0, 1]
bandwidth = 1e9
latency = 0.0
"""


BROKEN = """
levels = [1]
[device]
name = "chip"
flops = { f32 = 1e12 }
memory_bandwidth = 1e11
memory = 1_000_000_000
launch = 0
efficiency = 0.5
"""


@pytest.mark.parametrize(
    ("machine", "knob", "message"),
    [
        ("box:2", "gpus_per_node=2", "box:2 has no knob gpus_per_node: it has one level; use gpus"),
        ("p2.8xlarge", "gpus=16", "gpus=16, but p2.8xlarge has 8; take fewer"),
        ("cpu:2", "hbm=1G", "cpu:2 has no knob hbm: its times are measured"),
        ("listed.toml", "bandwidth.gpus=1G", "has no knob bandwidth.gpus: its links are listed one by one"),
        ("nosuch", "gpus=2", "no machine 'nosuch'"),
        ("broken.toml", "gpus=2", "levels must be a list of tables"),
    ],
)
def test_knobs_that_a_machine_lacks_are_refused(machine: str, knob: str, message: str, tmp_path: Path):
    if machine.endswith(".toml"):
        machine = str(tmp_path / machine)
        Path(machine).write_text(LISTED if "listed" in machine else BROKEN)
    with pytest.raises(UnityError) as error:
        Grid((SMALL,), (machine,), (read_knob(knob),)).points()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "unity-sweep: no machine; add --machine dgx-h100"),
        (["--machine=box:2", "--jobs=0"], "--jobs is 0; it must be 1 or more"),
        (["--machine=box:2", "--optimizer=nosuch"], "nosuch"),
        (["--machine=box:2", "--mixed-precision=x"], "x"),
        (["--machine=box:2", "--csv=a", "--json=a"], "two outputs are one file"),
        (["--machine=box:2", "--csv=none/a.csv"], "--csv is none/a.csv, and there is no folder"),
        (["--machine=box:2", "--over=batch=8,16", "--plot=a.gif"], "its name must end in .svg, .png, .pdf"),
        (["--machine=box:2", "--over=batch=8,16", "--plot=a.svg", "--x=hbm"], "--x=hbm, which does not vary"),
        (["--machine=box:2", "--over=batch=8", "--plot=a.svg"], "0 knobs vary"),
        (["--machine=box:2", "--store=/dev/null/x"], "cannot make the folder"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert unity_sweep.main([SMALL.removesuffix(",batch=64"), *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_tool_writes_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(tmp_path / name) for name in ("a.csv", "a.json")]
    argv = [SMALL, "--machine=dgx-h100:2", "--over=bandwidth.nodes=1G,50G", "--jobs=1"]
    assert unity_sweep.main([*argv, "--csv", files[0], "--json", files[1], "--store", str(tmp_path / "store")]) == 0
    rows = list(csv.DictReader(io.StringIO(Path(files[0]).read_text())))
    found = json.loads(Path(files[1]).read_text())
    assert [float(row["bandwidth.nodes"]) for row in rows] == [1e9, 5e10]
    assert [float(row["seconds"]) for row in rows] == [p["seconds"] for p in found["points"]]
    assert found["about"]["bound"].startswith("any plan of the graph")
    assert found["about"]["optimizer"] == "sgd"
    for row in rows:
        assert float(row["gap"]) == pytest.approx(float(row["seconds"]) / float(row["bound"]) - 1)
    out = capsys.readouterr().out
    assert "none found" not in out
    assert rows[0]["recipe"].split(",")[0] in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_the_plot(name: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    argv = [SMALL, "--machine=dgx-h100:2", "--over=bandwidth.nodes=1G,50G", "--over=hbm=1T,3T", "--jobs=1"]
    assert unity_sweep.main([*argv, "--plot", str(path), "--x=bandwidth.nodes", "--y=rate"]) == 0
    first = path.read_bytes()
    assert first.startswith(b"<?xml" if name.endswith("svg") else b"\x89PNG")
    assert len(first) > 1000
    if name.endswith("svg"):
        assert b"samples per second" in first
        assert b"hbm 3T" in first
        assert unity_sweep.main([*argv, "--plot", str(path), "--x=bandwidth.nodes", "--y=rate"]) == 0
        assert path.read_bytes() == first


def test_a_plot_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    argv = [SMALL, "--machine=box:2", "--over=hbm=1T,2T", "--plot=a.svg"]
    assert unity_sweep.main(argv) == 1
    assert "a plot needs matplotlib; pip install 'unity-ir[plot]', or leave out --plot" in capsys.readouterr().err
