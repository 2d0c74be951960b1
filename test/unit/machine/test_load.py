"""Machine files: what is a machine, and one sentence for everything that is not."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from sources import without_a_source

from unity_ir.errors import UnityError
from unity_ir.machine import load, machine_from
from unity_ir.machine.device import HostLink
from unity_ir.machine.load import presets
from unity_ir.machine.model import slowest
from unity_ir.machine.toml import MAX_DEVICES, described

GOOD = """
parameter = 2
[device]
name = "chip"
flops = { f32 = 1e12, f64 = 5e11 }
memory_bandwidth = 1e11
memory = 1_000_000
launch = 0
efficiency = 0.5
[[levels]]
name = "nodes"
size = "parameter"
bandwidth = 1e9
latency = 1e-6
[[levels]]
name = "chips"
size = 6
bandwidth = 1e10
latency = 0.0
"""


def written(directory: Path, text: str) -> str:
    path = directory / "machine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", presets())
def test_preset_is_a_machine(name: str):
    machine = load(name)
    assert machine.devices == machine.mesh.devices >= 1
    assert machine.name == name
    assert machine.device.kernel_time(1e9, 1e6, "f32") > machine.device.launch


def test_parameter_sets_a_level():
    assert load("summit:4").mesh.sizes == (2, 2, 2, 3)
    assert load("summit:4").axis_levels == (0, 0, 1, 2)
    assert load("box:1").mesh.sizes == ()
    assert load(f"box:{MAX_DEVICES}").devices == MAX_DEVICES


ONE_GPU = {
    "a100-40gb:1x1": "A100-SXM4-40GB",
    "dgx-b200:1x1": "B200-SXM-180GB",
    "dgx-a100:1x1": "A100-SXM4-80GB",
    "dgx-v100:1x1": "V100-SXM2-32GB",
    "gb300-nvl72:1x1": "GB300-279GB",
    "h100-pcie:1": "H100-PCIe-80GB",
    "mi300x:1x1": "MI300X-192GB",
    "dgx-h100:1x1": "H100-SXM5-80GB",
    "dgx-h200:1x1": "H200-SXM-141GB",
    "gb200-nvl72:1x1": "GB200-186GB",
    "grand-teton:1x1": "H100-HBM2e-96GB",
    "k80:1x1x1": "K80-12GB",
    "p100:1x1": "P100-SXM2-16GB",
    "pcie:1": "A100-PCIe-80GB",
    "summit:1x1x1": "V100-SXM2-16GB",
}


def test_one_gpu_of_every_kind_is_a_machine():
    for name, device in ONE_GPU.items():
        machine = load(name)
        assert (machine.name, machine.devices, machine.device.name) == (name, 1, device)
    assert {load(name).device.name for name in presets()} == {*ONE_GPU.values(), "CPU"}


def test_sizes_of_all_levels_make_a_part_of_a_cluster():
    assert load("dgx-h100:2x4").mesh.sizes == (2, 2, 2)
    assert load("dgx-h100:2x8").mesh == load("dgx-h100:2").mesh
    assert load("summit:1x1x3").mesh.sizes == (3,)


@pytest.mark.parametrize("name", presets())
def test_every_figure_of_a_preset_says_where_it_is_from(name: str):
    text = files("unity_ir.machine").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    assert without_a_source(text) == []


def test_a_figure_without_a_source_is_found():
    text = (
        "[device]\nname = 'X'\n# A datasheet.\nflops = {}\nmemory_bandwidth = 1.0\nmemory = 2\nlaunch = 3 # assumed\n"
    )
    assert without_a_source(text) == ["memory = 2"]
    assert without_a_source(text.replace("# A datasheet.\n", "")) == [
        "flops = {}",
        "memory_bandwidth = 1.0",
        "memory = 2",
    ]


@pytest.mark.parametrize("name", sorted({*presets()} - {"cpu"}))
def test_a_gpu_reserves_memory_for_what_is_no_plan(name: str):
    """A context and NCCL take some hundred MB at least; what is left is within 4% of the datasheet's round figure."""
    device = load(name).device
    assert 400e6 < device.reserve < 0.08 * device.memory
    said = int(device.name.rpartition("-")[2].removesuffix("GB")) * 1e9
    assert device.usable == pytest.approx(said, rel=0.045)


def test_reserve_is_read(tmp_path: Path):
    text = GOOD.replace("memory = 1_000_000", "memory = 1_000_000\nreserve = 300_000")
    device = load(written(tmp_path, text)).device
    assert (device.memory, device.reserve, device.usable) == (1_000_000, 300_000, 700_000)
    device = load(written(tmp_path, GOOD)).device
    assert (device.reserve, device.usable) == (0, 1_000_000)


HOST = "efficiency = 0.5\n[device.host]\nfrom_host = 4e9\nto_host = 8e9\nboth = 6e9\nlatency = 1e-3\n"


def test_link_to_the_host_is_read_and_described(tmp_path: Path):
    machine = load(written(tmp_path, GOOD.replace("efficiency = 0.5\n", HOST)))
    host = machine.device.host
    assert host is not None
    alone = [host.seconds(kind, 4e9) for kind in ("from_host", "to_host")]
    assert alone == pytest.approx([1.001, 0.501])
    # Either way has half of what both reach, at most.
    assert host.seconds("to_host", 3e9, both=True) == pytest.approx(1.001)
    assert machine_from(machine.name, described(machine)) == machine
    assert load(written(tmp_path, GOOD)).device.host is None


def test_mixed_kinds_have_the_slowest_link_to_the_host():
    fast, slow = HostLink(8e9, 8e9, latency=1e-6), HostLink(9e9, 4e9, 7e9, memory=5)
    device = load("box:1").device
    kinds = [replace(device, name=name, host=host) for name, host in (("a", fast), ("b", slow))]
    assert slowest(kinds).host == HostLink(8e9, 4e9, 7e9, 1e-6, 5)
    assert slowest([*kinds, replace(device, name="c")]).host is None


def test_file_is_read(tmp_path: Path):
    machine = load(written(tmp_path, GOOD))
    assert machine.mesh.sizes == (2, 2, 3)
    assert machine.device.kernel_time(1e12, 0, "f32") == 2.0
    assert machine.device.kernel_time(0, 1e11, "f64") == 2.0
    with pytest.raises(UnityError, match=r"^machine: chip has no peak for bf16; it has f32, f64"):
        machine.device.kernel_time(1, 1, "bf16")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2gpu:4", "2gpu:4: this machine has no parameter; write it without :4"),
        ("box:0", "size is 0; it must be a whole number from 1 on"),
        ("box:-1", "what follows the colon must be a number from 1 to"),
        ("box:1e3", "what follows the colon must be a number from 1 to"),
        ("box:²", "what follows the colon must be a number from 1 to"),
        ("box:" + "9" * 5000, "what follows the colon must be a number from 1 to"),
        (f"box:{MAX_DEVICES + 1}", "devices are too many"),
        ("summit:1000000", "6000000 devices are too many"),
        ("dgx-h100:1x9", "9 gpus, but this machine has 8; take fewer"),
        ("dgx-h100:1x", "must be a number, or the sizes of nodes x gpus"),
        ("dgx-h100:1x1x1", "must be a number, or the sizes of nodes x gpus"),
        ("dgx-h100:1x-1", "must be a number, or the sizes of nodes x gpus"),
        ("dgx-h100:1x0", "size is 0; it must be a whole number from 1 on"),
        ("nosuch", "no machine 'nosuch'; presets are 2gpu,"),
        ("", "no machine ''; presets are"),
        ("nosuch.toml", "cannot read 'nosuch.toml': No such file"),
        ("null\0.toml", r"cannot read 'null\\x00.toml'"),
    ],
)
def test_unknown_machine_is_refused(name: str, message: str):
    with pytest.raises(UnityError, match=rf"^machine: .*{message}") as error:
        load(name)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("parameter = 2", "parameter = 0", "size is 0; it must be a whole number from 1 on"),
        ("parameter = 2", "parameter = 2.5", "size is 2.5; it must be a whole number from 1 on"),
        ("parameter = 2", 'parameter = "a"', "size is 'a'; it must be a whole number from 1 on"),
        ("size = 6", "size = 1.5", "size is 1.5; it must be a whole number from 1 on"),
        ("size = 6", "size = true", "size is True; it must be a whole number from 1 on"),
        ("size = 6", "size = 10_000_000_000_000_000_000_000", "devices are too many"),
        ("bandwidth = 1e9", "bandwidth = 0", "bandwidth is 0; it must be a number above 0"),
        ("bandwidth = 1e9", "bandwidth = -1", "bandwidth is -1; it must be a number above 0"),
        ("bandwidth = 1e9", "bandwidth = nan", "bandwidth is nan; it must be a number above 0"),
        ("bandwidth = 1e9", "bandwidth = inf", "bandwidth is inf; it must be a number above 0"),
        ("bandwidth = 1e9", 'bandwidth = "1e9"', "bandwidth is '1e9'; it must be a number above 0"),
        ("latency = 1e-6", "latency = -1e-6", "latency is -1e-06; it must be a number from 0"),
        ("latency = 1e-6", "latency = nan", "latency is nan; it must be a number from 0"),
        ("latency = 1e-6", "", "latency is missing"),
        ("efficiency = 0.5", HOST.replace("4e9", "0"), "device chip: from_host is 0; it must be a number above 0"),
        ("efficiency = 0.5", HOST.replace("to_host = 8e9", ""), "device chip: to_host is missing"),
        (
            "efficiency = 0.5",
            HOST + "speed = 3",
            "a host has no field 'speed'; it has from_host, to_host",
        ),
        ("launch = 0", "launch = -1", "launch is -1; it must be a number from 0"),
        ("launch = 0", 'launch = "0"', "launch is '0'; it must be a number from 0"),
        ("launch = 0", "", "launch is missing"),
        ("memory = 1_000_000", "memory = inf", "memory is inf; it must be a number above 0"),
        ("memory = 1_000_000", "memory = 0", "memory is 0; it must be a number above 0"),
        (
            "memory = 1_000_000",
            "memory = 1_000\nreserve = 1_000",
            "reserve is 1000; it must be less than the memory, 1000",
        ),
        ("memory = 1_000_000", "memory = 1_000\nreserve = -1", "reserve is -1; it must be a number from 0"),
        ("efficiency = 0.5", "efficiency = 2", "efficiency is 2; it must be at most 1"),
        ("f32 = 1e12", "f32 = 0", "f32 is 0; it must be a number above 0"),
        ("f32 = 1e12", 'f32 = "fast"', "f32 is 'fast'; it must be a number above 0"),
        ("flops = { f32 = 1e12, f64 = 5e11 }", "flops = 3", "flops is 3; it must be a table"),
        ("flops = { f32 = 1e12, f64 = 5e11 }", "flops = [1, 2]", r"flops is \[1, 2\]; it must be a table"),
        ("f32 = 1e12", f"f32 = {'9' * 400}", r"f32 is 9{50}\.\.\.; it must be from 1 to 1e\+24"),
        ("f32 = 1e12", "f32 = 1e-308", r"f32 is 1e-308; it must be from 1 to 1e\+24"),
        ("bandwidth = 1e9", "bandwidth = 1e308", r"bandwidth is 1e\+308; it must be from 1 to 1e\+24"),
        ("latency = 1e-6", "latency = 1e10", "latency is 10000000000.0; it must be in seconds, and at most 3600"),
        ("efficiency = 0.5", "efficiency = 1e-320", "efficiency is 1e-320; it must be at least 1e-06"),
        ("efficiency = 0.5", "efficiency = 0.5\ncount = 9", "count of a device, but the levels say how many"),
        ('name = "chip"', "name = 5", "the name of a device is 5; it must be text that can be printed"),
        ('name = "chip"', 'name = ""', "the name of a device is ''; it must be text that can be printed"),
        ('name = "chips"', 'name = "a\\u0001"', r"the name of a level is 'a\\x01'; it must be text"),
        ("size = 6", "size = 6\nhub = 5", "level chips: hub is 5; it must be a table"),
        ("size = 6", "size = 6\nkinds = 5", "level chips: kinds is 5; it must be a list of names of devices"),
        ("size = 6", "size = 6\nprotocol_latency = 5", "level chips: protocol_latency is 5; it must be a table"),
        ("[device]", "[[protocols]]\nLL = 1\n[device]", "protocols is .*; it must be a table"),
        ("[device]", "[protocols]\nLL = 1\n[device]", "LL is 1; it must be a table"),
        ("[device]", "[devices]", "devices must be a list of tables"),
        ("[[levels]]", "[[level]]", "levels is missing"),
        ("name = ", "name ", "is not TOML"),
    ],
)
def test_figures_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, message: str):
    assert old in GOOD
    with pytest.raises(UnityError, match=rf"^machine: .*{message}") as error:
        load(written(tmp_path, GOOD.replace(old, new)))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["levels = 3\n[device]", "device = 3\nlevels = []", "", "levels = [1]", "devices = []\nlevels = []"]
)
def test_other_shapes_are_refused(tmp_path: Path, text: str):
    with pytest.raises(UnityError, match=r"^machine: .*(is missing|must be a table|must be a list of tables)"):
        load(written(tmp_path, text))


def test_what_is_not_text_is_refused(tmp_path: Path):
    path = tmp_path / "machine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnityError, match=r"^machine: cannot read .*: not text"):
        load(str(path))


def test_a_name_is_no_path(tmp_path: Path):
    for name in ("../profiles/CPU", "a" * 200):
        assert load(written(tmp_path, GOOD.replace('"chip"', f'"{name}"'))).device.profile is None
    assert load(written(tmp_path, GOOD.replace('"chip"', '"CPU"'))).device.profile is not None
