"""Profiles: what is written is read; what is no profile is refused in one line and left as it was."""

from __future__ import annotations

import sqlite3
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import unity_ir
from unity_ir.cost.plan import cost
from unity_ir.cost.time import seconds
from unity_ir.cost.work import kernel_of
from unity_ir.errors import UnityError
from unity_ir.machine import Device, load
from unity_ir.machine.curve import RooflineCurve, curves
from unity_ir.machine.device import fit_path, profiled
from unity_ir.machine.fit import Measurement, fit, fit_line
from unity_ir.machine.profile import CollectiveRow, KernelRow, open_profile, read_profile
from unity_ir.machine.toml import described, machine_from
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.data_parallel import data_parallel

SHIPPED = Path(unity_ir.__file__).parent / "machine" / "profiles" / "CPU.sqlite"

ABOUT = {"device": "V100-SXM2-16GB", "host": "here", "torch": "2", "date": "today"}
NODE = apply(
    "matmul", [leaf("input", tensor_type(s, "f32"), name=n).result for n, s in (("x", (8, 16)), ("w", (16, 4)))]
)


def row(ranks: int = 1, seconds: float = 0.5) -> KernelRow:
    k = kernel_of(NODE)
    return KernelRow(k.operator, k.sizes, ranks, k.kind, k.dtype, k.flops, k.bytes, seconds, 0.1, 5, "now")


def move(kind: str, size: int, seconds: float) -> CollectiveRow:
    return CollectiveRow(kind, 2, size, 2, seconds, 0.1, 5, "now")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "p.sqlite"
    with open_profile(path, create=ABOUT) as file:
        file.add_kernel(row())
        file.add_kernel(row(2, 0.25))
        for size, seconds in ((1000, 1.0), (100, 0.1), (10_000, 0.9)):
            file.add_collective(move("all_reduce", size, seconds))
    return path


def test_what_is_written_is_read(path: Path):
    with open_profile(path) as file:
        assert file.kernels() == [row(), row(2, 0.25)]
        assert len(file.collectives(2)) == 3
        assert file.collectives(4) == []
        assert file.about == ABOUT


def test_kernels_of_other_ranks_stand_in_only_if_alone(path: Path):
    key = kernel_of(NODE)
    for ranks, expected in ((1, 0.5), (2, 0.25), (4, 0.5)):
        assert read_profile(path, ABOUT["device"], ranks).kernels[key.operator][key.sizes] == expected


def test_measured_goes_before_estimated(path: Path):
    device = load("2gpu").device
    kernel = kernel_of(NODE)
    assert seconds(kernel, device) < 1e-3
    assert seconds(kernel, profiled(device, 2, str(path))) == 0.25
    other = replace(kernel, sizes=(*kernel.sizes[:-1], 32))
    assert seconds(other, profiled(device, 2, str(path))) == seconds(other, device)


def test_collectives_lie_between_measured_sizes(path: Path):
    profile = read_profile(path, ABOUT["device"], 2)
    # More bytes take no less: 1,000 cannot have taken longer than 10,000.
    assert profile.collective("all_reduce", 2, 1000) == pytest.approx(0.9)
    assert profile.collective("all_reduce", 2, 100) == pytest.approx(0.1)
    assert profile.collective("all_reduce", 2, 1) == pytest.approx(0.1)
    assert profile.collective("all_reduce", 2, 20_000) == pytest.approx(1.8)
    assert profile.collective("all_reduce", 2, 316.2278) == pytest.approx(0.3, rel=1e-3)
    assert profile.collective("all_reduce", 4, 100) is None
    assert profile.collective("all_gather", 2, 100) is None


def test_machine_with_a_profile_costs_by_it(path: Path):
    with open_profile(path, create=ABOUT) as file:
        # Or the planner would go another way.
        for kind in ("all_gather", "reduce_scatter", "all_to_all"):
            file.add_collective(move(kind, 1, 0.2))
    name = f"2gpu,profile={path}"
    machine = load(name)
    assert machine.name == name
    w = leaf("weight", tensor_type((4, 3), "f32"), name="w").result
    x, y = (leaf("input", tensor_type(s, "f32"), name=n) for n, s in (("x", (8, 4)), ("y", (8, 3))))
    graph = Graph("f", (x, y), (apply("mse", [apply("matmul", [x.result, w]).result, y.result]).result,))
    assert cost(data_parallel(graph, machine), machine).communication_time == pytest.approx(0.1)


def test_curves_beside_a_profile_are_read(path: Path):
    curve = RooflineCurve(1e-3, 0.5, 1.0, 0.0, 0.5, 1.0, 0.0)
    fit_path(path, 2).write_text(
        "[curves.contraction]\n" + "".join(f"{k} = {getattr(curve, k)}\n" for k in curve.__slots__)
    )
    device = profiled(load("2gpu").device, 2, str(path))
    assert device.curves == {"contraction": curve}
    assert device.kernel_time(15.7e12 / 2, 0, "f32", "contraction") == pytest.approx(1.001)
    assert device.kernel_time(15.7e12 * 0.7, 0, "f32", "copy") == pytest.approx(1.0, rel=1e-4)
    fit_path(path, 2).write_text("curves = 3\n")
    with pytest.raises(UnityError, match="curves must be a table"):
        profiled(device, 2, str(path))


def spoil(path: Path, how: str) -> None:
    match how:
        case "version":
            with sqlite3.connect(path) as c:
                c.execute("pragma user_version = 99")
            c.close()
        case "truncated":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "header":
            path.write_bytes(path.read_bytes()[:50])
        case "text":
            path.write_text("operator,seconds\n")
        case "empty":
            path.write_bytes(b"")
        case "database":
            path.unlink()
            with sqlite3.connect(path) as c:
                c.execute("create table t (a)")
            c.close()
        case _:
            path.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("version", "has version 99 of the tables, but this is for version 1; measure again"),
        ("truncated", "damaged"),
        ("header", "is no profile, or damaged"),
        ("text", "is no profile, or damaged"),
        ("empty", "is empty; make it with unity-profile"),
        ("database", "is no profile, or damaged"),
        ("missing", "is no file; make it with unity-profile"),
    ],
)
def test_what_is_no_profile_is_refused(path: Path, how: str, message: str):
    spoil(path, how)
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(UnityError, match=message) as refused:
        load(f"2gpu,profile={path}")
    assert "\n" not in str(refused.value)
    if before is not None:
        # Adding to it is refused as well, and leaves it as it was.
        with pytest.raises(UnityError, match=message), open_profile(path, create=ABOUT):
            pass
        assert path.read_bytes() == before


def test_other_devices_and_versions_are_refused(path: Path):
    with pytest.raises(UnityError, match="is of V100-SXM2-16GB, but the machine has H100"):
        load(f"dgx-h100,profile={path}")
    with (
        pytest.raises(UnityError, match="was measured with torch 2, and here it is 3; write to another file"),
        open_profile(path, create={**ABOUT, "torch": "3"}),
    ):
        pass
    with open_profile(path, create={**ABOUT, "date": "tomorrow"}) as file:
        assert len(file.kernels()) == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (3, "curves must be a table"),
        ({"matmul": {}}, "no curve can be for 'matmul'; kinds of kernels are attention, contraction"),
        ({"copy": {"launch": -1.0}}, "launch of the curve of copy is -1.0; it must be a number above 0"),
        ({"copy": {"launch": True}}, "launch of the curve of copy is True"),
    ],
)
def test_what_is_no_curve_is_refused(table: object, message: str):
    with pytest.raises(UnityError, match=message):
        curves("m", table)


def test_fit_finds_the_curve_it_was_made_with():
    random = np.random.default_rng(0)
    made = RooflineCurve(5e-6, 0.8, 1e6, 0.5, 0.9, 1e5, -0.3)
    flops, bytes = 10 ** random.uniform(3, 10, 200), 10 ** random.uniform(3, 8, 200)
    times = made.seconds(flops, bytes, 1e12, 1e10) * np.exp(random.normal(0, 0.03, 200))
    found = fit([Measurement(f, b, 1e12, s) for f, b, s in zip(flops, bytes, times, strict=True)], 1e10)
    assert found.samples == 200
    assert found.median < 0.04
    assert found.percentile_90 < 0.12
    assert float(found.curve.seconds(1e10, 1e3, 1e12, 1e10)) == pytest.approx(
        float(made.seconds(1e10, 1e3, 1e12, 1e10)), rel=0.1
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "update kernels set seconds = -1.0",
        "update kernels set seconds = 'long'",
        "update kernels set seconds = 9e999",
        "update or ignore kernels set sizes = 'a b'",
        "update collectives set seconds = 0.0",
        "update or ignore collectives set bytes = 0",
        "delete from about where key = 'device'",
        "alter table kernels rename column seconds to hours",
        "drop table collectives",
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, wrong: str):
    path = tmp_path / "p.sqlite"
    path.write_bytes(SHIPPED.read_bytes())
    assert read_profile(path, "CPU", 2).kernels
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(wrong)
    connection.close()
    with pytest.raises(UnityError, match=r"^profile: .*p\.sqlite is (no profile, or )?damaged"):
        read_profile(path, "CPU", 2)


def test_a_profile_cut_short_anywhere_is_refused(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    whole = SHIPPED.read_bytes()
    for size in (*range(4096, len(whole), 8192), len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UnityError, match=r"^profile: .*p\.sqlite is (no profile, or )?damaged"):
            read_profile(path, "CPU", 2)


def test_a_column_more_does_no_harm(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    path.write_bytes(SHIPPED.read_bytes())
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("alter table kernels add column note text")
    connection.close()
    assert read_profile(path, "CPU", 2).kernels == read_profile(SHIPPED, "CPU", 2).kernels


def test_line_finds_latency_and_bandwidth():
    line = fit_line([(size, 1e-4 + size / 1e9) for size in (1e3, 1e4, 1e5, 1e6, 1e7)])
    assert (line.latency, line.bandwidth, line.median) == (
        pytest.approx(1e-4),
        pytest.approx(1e9),
        pytest.approx(0, abs=1e-6),
    )


def test_kernels_without_work_take_their_launch():
    device = Device(
        "d", {"f32": 1e12}, 1e11, 1, 1e-6, curves={"copy": RooflineCurve(2e-6, 1.0, 1.0, 0.5, 1.0, 1.0, 0.5)}
    )
    assert device.kernel_time(0, 0, "f32", "copy") == 2e-6
    assert device.kernel_time(0, 0, "f32") == 1e-6


def test_curves_of_a_machine_file_are_read_and_described():
    table = dict.fromkeys(RooflineCurve.__slots__, 0.5)
    text = "".join(f"{k} = {v}\n" for k, v in table.items())
    tables = tomllib.loads(DESCRIBED + "[device.curves.copy]\n" + text)
    machine = machine_from("m", tables)
    assert machine.device.curves == {"copy": RooflineCurve(**table)}
    assert machine_from("m", described(machine)) == machine


DESCRIBED = """
levels = [{ name = "l", size = 2, bandwidth = 1e9, latency = 0.0 }]
[device]
name = "d"
flops = { f32 = 1e12 }
memory_bandwidth = 1e11
memory = 1_000_000
launch = 0
efficiency = 0.5
"""
