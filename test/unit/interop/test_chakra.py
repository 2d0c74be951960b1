"""Chakra traces have the kernels and collectives that the simulator replays, in files that Chakra's schema reads."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from chakra_traces import COLLECTIVE, COMPUTE, RECEIVE, SEND, ReadNode, play, read, received
from graphs import boxes
from models import cnn
from pinned import pinned
from zoo_plans import divided

import unity_ir as ui
from unity_ir.api.files import write_folder
from unity_ir.errors import UnityError
from unity_ir.interop.chakra.calls import NetworkCall, group_of, messages
from unity_ir.interop.chakra.nodes import NodeList
from unity_ir.interop.chakra.schema import varint
from unity_ir.interop.chakra.step import ChakraStep, chakra_step
from unity_ir.machine import Machine, load
from unity_ir.models import build, from_text
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Mesh
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.instructions import Compute, HaloExchange, ReshardMove, TimeStep, UpdateWeight
from unity_ir.plan.plan import plan_graph
from unity_ir.search import run
from unity_ir.search.pipeline.staged import Stages
from unity_ir.simulate.replay import replay
from unity_ir.simulate.report import simulated
from unity_ir.simulate.stages import simulate_stages

GPT2 = "gpt2,layers=2,batch=32,sequence=16,hidden=32,heads=8,vocabulary=64"
MLP = "mlp,batch=64,hidden=256,layers=8,classes=64"
MOE = "moe,dispatch=sparse,layers=1,batch=8,sequence=16,hidden=32,heads=4,kv_heads=2,intermediate=16,vocabulary=64"
ADAMW = Optimizer("adamw")

PLANS: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "perceptron": (MLP, "2gpu", "data-parallel", {}),
    "data-parallel": (GPT2, "dgx-h100:1", "data-parallel", {}),
    "fsdp": (GPT2, "dgx-h100:1", "fsdp", {}),
    "tofu": (GPT2, "dgx-h100:1", "tofu", {}),
    "bf16": (GPT2, "dgx-h100:1", "fsdp", {"dtype": "bf16"}),
    "clip": (MLP, "2gpu", "data-parallel", {"clip": 1.0}),
    "micro-batches": (GPT2, "dgx-h100:1", "fsdp", {"micro_batches": 2}),
    "loss-pieces": (GPT2, "dgx-h100:1", "data-parallel", {"micro_batches": 2, "loss_pieces": "2"}),
    "ring": (GPT2, "dgx-h100:1", "degrees", {"options": {"cp": 8, "ring": True}}),
    "rows": (MOE, "dgx-h100:1", "degrees", {"options": {"ep": 8, "exchange": True}}),
}
ON_DEVICE = ("tofu", "ring")
"""Plans that move pieces on a device itself."""

WIDE = "mlp,batch=262144,hidden=2048,layers=16,classes=2048"
DEEP = "gpt2,layers=2,batch=32,sequence=64,hidden=512,heads=8,vocabulary=1024"
LONG = "mlp,batch=262144,hidden=64,layers=8,classes=64"
STAGED: dict[str, tuple[str, str, str, dict[str, object]]] = {
    **{
        order: (MLP, "box:8", "data-parallel", {"micro_batches": 8, "stages": Stages(4, order)})
        for order in ("gpipe", "1f1b", "zb-h1", "zb-v")
    },
    # Sums of gradients start in the last micro-batch, and go on beside later parts.
    "sums": (WIDE, "box:8", "data-parallel", {"micro_batches": 8, "stages": Stages(8, "interleaved")}),
    # Sends queue.
    "sends": (LONG, "box:8", "data-parallel", {"micro_batches": 8, "stages": Stages(4, "gpipe")}),
    # A weight of two stages, sums of small gradients in common calls, backwards that begin with forwards done again.
    "tied": (DEEP, "box:8", "data-parallel", {"micro_batches": 4, "stages": Stages(2, "1f1b"), "recompute": "block"}),
    "tensors": (DEEP, "box:8", "megatron", {"micro_batches": 4, "stages": Stages(2, "1f1b")}),
    "clipped": (MLP, "box:8", "data-parallel", {"micro_batches": 8, "stages": Stages(4, "1f1b"), "clip": 1.0}),
    # A stage's neighbours on both sides are on one rank.
    "looped": (MLP, "box:8", "data-parallel", {"micro_batches": 8, "stages": Stages(4, "interleaved")}),
    # Kernels of a stage that do not read what it receives.
    "towers": ("xdl,batch=1024", "box:8", "data-parallel", {"micro_batches": 4, "stages": Stages(2, "1f1b")}),
}
EVERY = [*PLANS, *STAGED]


@cache
def planned(name: str) -> tuple[Graph, Machine, Optimizer]:
    model, on, strategy, options = {**PLANS, **STAGED}[name]
    settings = dict(options)
    graph = from_text(model)
    if "dtype" in settings:
        graph = mixed_precision(graph, str(settings.pop("dtype")))
    optimizer = Optimizer("adamw", clip=settings.pop("clip", 0.0))
    machine = load(on)
    return run(graph, machine, strategy, optimizer, **settings).graph, machine, optimizer


@cache
def files(name: str) -> dict[str, bytes]:
    return dict(chakra_step(*planned(name)).files())


@cache
def traces(name: str) -> list[list[ReadNode]]:
    """The nodes of every rank, as they are in the files."""
    return nodes_of(files(name))


def nodes_of(found: dict[str, bytes]) -> list[list[ReadNode]]:
    return [read(found[f"step.{rank}.et"])[1] for rank in range(len(found) - 1)]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_running_a_trace_takes_as_long_as_the_simulated_step(name: str):
    ranks = traces(name)
    ends = play(ranks)
    assert len(ends) == sum(map(len, ranks))
    seconds = max(ends.values()) / 10**12
    # The simulator lets all ranks begin at once what comes after the micro-batches, whoever waits for whom.
    within = 0.03 if name in ("tied", "tensors", "towers") else 1e-7
    assert seconds == pytest.approx(simulated(*planned(name)).overlapped, rel=within)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STAGED if name != "tensors"])
def test_micro_batches_end_when_the_simulator_says(name: str):
    graph, machine, optimizer = planned(name)
    step = simulate_stages(plan_graph(graph, machine, optimizer), machine)
    ranks, ends = traces(name), play(traces(name))
    devices = len(ranks) // len(step.times.ends)
    for rank, wanted in enumerate(step.times.ends):
        # A backward's half with nothing to do ends with the receive before it.
        found = [end / 10**12 for (r, _), end in ends.items() if r == rank * devices]
        for end in wanted:
            assert min(abs(end - each) for each in found) < 1e-7 * end, (rank, end)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "tied"])
def test_sums_of_gradients_over_the_same_links_are_one_after_the_other(name: str):
    ends = play(traces(name))
    for rank, nodes in enumerate(traces(name)):
        sums = [n for n in nodes if n.type == COLLECTIVE]
        times = sorted((ends[rank, n.id] - n.number("duration_ps"), ends[rank, n.id]) for n in sums)
        assert len(sums) > 2
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_ranks_that_do_one_collective_at_a_time_do_not_wait_for_ever(name: str):
    ranks = traces(name)
    assert len(play(ranks, one_at_a_time=True)) == sum(map(len, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_collectives_are_as_many_as_the_statistics_say(name: str):
    graph, machine, optimizer = planned(name)
    norm = 1 if optimizer.clip else 0
    # A piece handed on around a ring is one collective, but a send and a receive of a rank.
    body = plan_graph(graph, machine, optimizer).program.body
    twice = sum(isinstance(i, ReshardMove) and i.kind == "ring_shift" for i in body)
    counts = [sum(n.type != COMPUTE for n in nodes) for nodes in traces(name)]
    assert max(counts) == simulated(graph, machine, optimizer).collectives + norm + twice > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_kernels_are_those_that_the_simulator_replays(name: str):
    graph, machine, optimizer = planned(name)
    plan = plan_graph(graph, machine, optimizer)
    tasks = replay(plan, machine)
    replayed = [
        int(t)
        for t, held in zip(tasks.ticks, map(tasks.held.__getitem__, range(len(tasks))), strict=True)
        if t and held == [0]
    ]
    program, of_plan = plan.program, 0
    for i in program.body:
        if isinstance(i, Compute):
            of_plan += program.times(i)
        elif isinstance(i, TimeStep):
            loops = program.micro_batches if i.is_of_pieces else 1
            of_plan += loops * sum(size > 0 for size in plan.time_step_bytes(i))
        elif isinstance(i, UpdateWeight):
            of_plan += 1
    moved = simulated(graph, machine, optimizer).copies
    for nodes in traces(name):
        kernels = [n for n in nodes if n.type == COMPUTE]
        assert [n.number("duration_ps") for n in kernels] == replayed
        assert abs(sum(n.micros for n in kernels) - sum(replayed) / 10**6) <= 0.5
        if name not in ON_DEVICE:
            assert len(kernels) == of_plan + moved


def test_kernels_have_flops_and_bytes():
    (first, *_), *_ = traces("perceptron")
    # [32, 256] @ [256, 256], and a relu.
    assert first.name == "matmul + relu"
    assert first.number("num_ops") == 2 * 32 * 256 * 256 + 32 * 256
    assert first.number("tensor_size") == 4 * (32 * 256 + 256 * 256 + 32 * 256)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANS if name not in ON_DEVICE])
def test_kernels_read_and_write_what_the_statistics_say(name: str):
    wanted = simulated(*planned(name))
    for nodes in traces(name):
        kernels = [n for n in nodes if n.type == COMPUTE]
        copies = sum(n.number("tensor_size") for n in kernels if n.name.startswith("copy"))
        assert sum(n.number("tensor_size") for n in kernels) - copies == wanted.bytes
        assert (copies > 0) == (wanted.copies > 0)
        assert all(n.number("num_ops") >= 1 for n in kernels)


@pytest.mark.parametrize("options", [{"search": "data-parallel"}, {"search": "fsdp"}, {"search": "tofu"}])
@pytest.mark.slow
def test_bytes_are_those_of_the_statistics(options: dict[str, str], tmp_path: Path):
    sizes = {"layers": 2, "batch": 32, "sequence": 16, "hidden": 32, "heads": 8, "vocabulary": 64}
    plan = ui.plan("gpt2", machine="dgx-h100:1", **options, **sizes)
    plan.chakra(tmp_path / "traces")
    groups = json.loads((tmp_path / "traces/comm_groups.json").read_text())
    total = 0.0
    for rank in range(8):
        for n in read((tmp_path / f"traces/step.{rank}.et").read_bytes())[1]:
            if n.type == COLLECTIVE:
                ranks = groups[n.attributes["pg_name"]]
                assert rank in ranks
                total += received(n.number("comm_type"), n.number("comm_size"), len(ranks)) / len(ranks)
    assert total == pytest.approx(plan.stats.moved, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_nodes_depend_on_nodes_before_them(name: str):
    for nodes in traces(name):
        seen: set[int] = set()
        for n in nodes:
            assert n.id not in seen
            assert seen.issuperset(n.deps)
            assert not set(n.ctrl_deps) & set(n.data_deps)
            assert n.data_deps or not n.name.startswith("adamw")
            seen.add(n.id)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_ranks_of_a_group_make_the_same_calls(name: str):
    groups = json.loads(files(name)["comm_groups.json"])
    assert list(groups) == [str(1 + n) for n in range(len(groups))]
    for group, ranks in groups.items():
        assert ranks == sorted(set(ranks))
        calls = [
            [
                (n.attributes["comm_type"], n.attributes["comm_size"], n.name)
                for n in nodes
                if n.attributes.get("pg_name") == group
            ]
            for nodes in traces(name)
        ]
        assert all(calls[rank] == calls[ranks[0]] != [] for rank in ranks)
        assert not any(calls[rank] for rank in range(len(calls)) if rank not in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_every_send_has_its_receive(name: str):
    sent, got = Counter[tuple[int | str, ...]](), Counter[tuple[int | str, ...]]()
    for rank, nodes in enumerate(traces(name)):
        for n in nodes:
            if n.type in (SEND, RECEIVE):
                message = tuple(n.attributes[f"comm_{of}"] for of in ("src", "dst", "tag", "size"))
                assert message[n.type == RECEIVE] == rank
                assert 0 <= n.number("comm_tag") < 10**6
                (sent if n.type == SEND else got)[message] += 1
    assert sent == got
    assert len(sent) == sum(sent.values())
    # There and back, for 8 micro-batches: 3 boundaries between two devices each; of the 3 in a V, 2 between four.
    wanted = {"gpipe": 3 * 2, "1f1b": 3 * 2, "zb-h1": 3 * 2, "zb-v": 2 * 4}
    assert len(sent) == 2 * 8 * wanted[name] if name in wanted else sent


@pytest.mark.slow
def test_what_a_kernel_reads_of_a_collective_or_of_another_rank_it_depends_on():
    for rank, nodes in enumerate(traces("1f1b")):
        by_id = {n.id: n for n in nodes}
        ends = {RECEIVE: 0, COLLECTIVE: 0}
        for n in nodes:
            for d in n.data_deps:
                if n.type == COMPUTE and by_id[d].type in ends:
                    ends[by_id[d].type] += 1
            if n.type in (SEND, COLLECTIVE):
                assert n.data_deps
        assert ends[COLLECTIVE] >= sum(n.type == COLLECTIVE for n in nodes) - 1
        assert ends[RECEIVE] >= sum(n.type == RECEIVE for n in nodes) > 0, rank


@pytest.mark.slow
def test_loops_over_micro_batches_are_unrolled():
    alone, twice = (Counter(n.name for n in traces(name)[0] if n.type == COMPUTE) for name in ("fsdp", "micro-batches"))
    name = "softmax_product" if "softmax_product" in alone else next(n for n in alone if "attention" in n)
    assert twice[name] == 2 * alone[name] > 0


@pytest.mark.slow
def test_values_on_a_part_of_the_machine_are_sent_message_by_message():
    """Random plans have sends, scatters and gathers, whose messages all arrive; nobody waits for ever."""
    kinds = Counter[int]()
    for model, sizes, seed in [
        ("mlp", {"batch": 8, "hidden": 16, "layers": 3, "classes": 8}, 0),
        ("lenet", {"batch": 8}, 2),
    ]:
        graph, machine = pinned(build(model, **sizes), seed)
        ranks = nodes_of(dict(chakra_step(graph, machine, ADAMW).files()))
        ends = play(ranks)
        assert len(ends) == len(play(ranks, one_at_a_time=True)) == sum(map(len, ranks))
        kinds += Counter(n.type for nodes in ranks for n in nodes)
        # A message does not hold up the links of its receiver, as the simulator takes it.
        assert max(ends.values()) / 10**12 == pytest.approx(simulated(graph, machine, ADAMW).overlapped, rel=0.02)
    assert kinds[SEND] == kinds[RECEIVE] > 20


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("y",), ("y", "z"), ("z", "z")])
def test_halos_are_exchanged_message_by_message(axes: tuple[str, ...]):
    on = boxes(*(2 for _ in axes))
    plan = plan_graph(divided(cnn(), axes, on.mesh), on, ADAMW)
    ranks = nodes_of(dict(ChakraStep(plan, on).files()))
    ends = play(ranks)
    assert len(ends) == len(play(ranks, one_at_a_time=True)) == sum(map(len, ranks))
    sent, got = (Counter(n.number("comm_size") for r in ranks for n in r if n.type == kind) for kind in (SEND, RECEIVE))
    assert sent == got
    halos = [i for i in plan.program.body if isinstance(i, HaloExchange)]
    assert {i.kind for i in halos} == {"halo", "halo_reduce"}
    traffic = sum(4 * move_of(plan.program, i).traffic(on.mesh) for i in halos)
    # With halos wider than a piece there are fewer elements beyond the ends than is priced.
    assert sent.total() > 0
    assert sum(sent.elements()) < traffic if axes == ("z", "z") else sum(sent.elements()) == traffic


def test_sums_that_go_on_hold_up_sums_and_not_the_collectives_of_later_parts():
    graph, machine, optimizer = planned("perceptron")
    plan = plan_graph(graph, machine, optimizer)
    made = NodeList(machine, 0)
    call = NetworkCall("all_reduce", (0,), 4)
    (first,) = made.communicate("sum", call, [0], (), 1, goes_on=True)
    made.play(plan, replace(replay(plan, machine), played=()), 1)
    made.communicate("of a later part", call, [0], (), 1)
    made.communicate("over other links", call, [1], (), 1, goes_on=True)
    made.communicate("sum", call, [0], (), 1, goes_on=True)
    assert [node.ctrl_deps for node in made.nodes] == [(), (), (), (first, 1)]


def test_messages_of_calls():
    assert messages(NetworkCall("send", (0,), 8, root=1, to=0), [3, 5]) == [(5, 3, 8)]
    assert messages(NetworkCall("scatter", (0,), 12, root=1), [0, 2, 4]) == [(2, 0, 4), (2, 4, 4)]
    assert messages(NetworkCall("gather", (0,), 12, to=2), [0, 2, 4]) == [(0, 4, 12), (2, 4, 12)]
    # Pieces of 4 slices of 10 bytes: one slice from the piece before, two from that after.
    halo = NetworkCall("halo", (0,), 10, low=1, high=2, size=4)
    assert sorted(messages(halo, [0, 1, 2])) == [(0, 1, 10), (1, 0, 20), (1, 2, 10), (2, 1, 20)]
    back = NetworkCall("halo_reduce", (0,), 10, low=1, high=2, size=4)
    assert sorted(messages(back, [0, 1, 2])) == [(0, 1, 20), (1, 0, 10), (1, 2, 20), (2, 1, 10)]
    # A halo of more than a piece comes from the second neighbour, too.
    wide = NetworkCall("halo", (0,), 1, low=6, high=0, size=4)
    assert sorted(messages(wide, [0, 1, 2])) == [(0, 1, 4), (0, 2, 2), (1, 2, 4)]


def test_groups_are_along_axes():
    mesh = Mesh((2, 3, 2))
    for axes in ((0,), (1,), (0, 2), (0, 1, 2)):
        for group in mesh.groups(axes):
            assert all(group_of(device, axes, mesh) == group for device in group)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "1f1b"])
def test_the_schema_of_chakra_reads_the_files(name: str):
    schema = pytest.importorskip(
        "chakra.schema.protobuf.et_def_pb2", reason="Chakra's schema is not installed: the extra chakra-test"
    )
    from chakra.src.third_party.utils.protolib import decodeMessage

    for file, content in files(name).items():
        if not file.endswith(".et"):
            continue
        _, nodes = read(content)
        stream = BytesIO(content)
        head = schema.GlobalMetadata()
        assert decodeMessage(stream, head)
        assert head.version == "1.0.0"
        assert {a.name for a in head.attr} == {"model", "machine"}
        for own in nodes:
            node = schema.Node()
            before = stream.tell()
            assert decodeMessage(stream, node)
            # Byte for byte what the library writes.
            data = node.SerializeToString()
            assert content[before : stream.tell()] == varint(len(data)) + data
            assert (node.id, node.name, node.type, node.duration_micros) == (own.id, own.name, own.type, own.micros)
            assert (tuple(node.ctrl_deps), tuple(node.data_deps)) == (own.ctrl_deps, own.data_deps)
            assert {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr} == dict(own.attributes)
            assert {a.name: a.WhichOneof("value") for a in node.attr} == dict(own.kinds)
        assert not stream.read()
        assert schema.NodeType.Name(COLLECTIVE) == "COMM_COLL_NODE"


def test_numbers_are_varints():
    # Examples of protobuf's documentation ("Encoding"), and the ends of a byte.
    assert varint(150) == b"\x96\x01"
    assert [varint(n) for n in (0, 1, 127, 128, 300)] == [b"\x00", b"\x01", b"\x7f", b"\x80\x01", b"\xac\x02"]


@pytest.mark.slow
def test_attributes_have_the_types_that_feeders_read():
    """Chakra's feeder takes an attribute's value from one field (`src/feeder/et_feeder_node.cpp`)."""
    wanted = {
        **{"is_cpu_op": "bool_val", "num_ops": "int64_val", "tensor_size": "uint64_val", "comm_type": "int64_val"},
        **{"comm_size": "int64_val", "comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val"},
        **{"pg_name": "string_val", "duration_ps": "uint64_val"},
    }
    found: dict[str, str] = {}
    for nodes in traces("1f1b"):
        for n in nodes:
            found.update(n.kinds)
            assert n.attributes["is_cpu_op"] == 0
            assert n.number("duration_ps") > 0
    assert found == wanted


@pytest.mark.slow
def test_schedules_that_go_on_from_step_to_step_are_refused():
    graph = run(from_text(MLP), load("box:8"), "data-parallel", ADAMW, micro_batches=8, stages=Stages(4, "2bw")).graph
    with pytest.raises(UnityError, match=r"chakra: 2bw of @mlp goes on from step to step.* use 1f1b"):
        chakra_step(graph, load("box:8"), ADAMW)


def test_a_folder_is_replaced_if_it_has_only_traces(tmp_path: Path):
    folder = tmp_path / "traces"
    own = {"a", "b"}.__contains__
    write_folder(folder, [("a", b"1"), ("b", b"2")], own)
    write_folder(folder, [("a", b"3")], own)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"a": b"3"}
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UnityError, match=r"traces: the folder has notes.txt, which would be lost; name a new folder"):
        write_folder(folder, [("a", b"4")], own)
    assert (folder / "a").read_bytes() == b"3"

    def broken():
        yield "a", b"5"
        raise UnityError("stop")

    (folder / "notes.txt").unlink()
    with pytest.raises(UnityError, match="stop"):
        write_folder(folder, broken(), own)
    with pytest.raises(UnityError, match="a: Not a directory"):
        write_folder(folder / "a", [("a", b"6")], own)
    with pytest.raises(UnityError, match="none/new: No such file or directory"):
        write_folder(tmp_path / "none/new", [("a", b"6")], own)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"a": b"3"}
    assert [p.name for p in tmp_path.iterdir()] == ["traces"]


def test_ranks_that_do_the_same_have_the_same_nodes():
    step: ChakraStep = chakra_step(*planned("perceptron"))
    assert step.nodes(0) == step.nodes(1)
    assert [n.id for n in step.nodes(0)] == [n.id for n in traces("perceptron")[0]]
