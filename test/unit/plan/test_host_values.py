"""Values at the host: which go, and that copies are in order and take no more of the device than a window."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from unity_ir.dialects.convert_program import from_op, to_op
from unity_ir.interop.expressible import LINALG, step_program
from unity_ir.machine import load
from unity_ir.machine.device import COPIES
from unity_ir.models import build
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.node import parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan import host_values
from unity_ir.plan.host_values import saved_values, values_to_host, window_bytes, without_values_at_host
from unity_ir.plan.instructions import Register, ReshardMove, ValueMove, makes, reading, reads
from unity_ir.plan.listing import listing
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import Wait
from unity_ir.search import run
from unity_ir.simulate.full import Timeline, simulate
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.replay import replay
from unity_ir.simulate.tasks import UPDATE

WHERE = "dgx-a100:1x2"


@pytest.fixture(autouse=True)
def _small_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_values, "VALUE_BYTES", 1024)
    monkeypatch.setattr(host_values, "VALUE_WINDOW", 2**14)


def program(micro_batches: int = 1, loss_pieces: str = "1", offload: str = "activations") -> Program:
    graph = build("gpt2", batch=8, sequence=8, layers=4, hidden=32, heads=4, vocabulary=48)
    given = {"micro_batches": micro_batches, "loss_pieces": loss_pieces, "offload": offload}
    found = run(graph, load(WHERE), "fsdp", Optimizer(), **given).graph
    return lower(training_step(found, Optimizer(), load(WHERE).mesh), load(WHERE))


CASES = [(1, "1"), (2, "1"), (1, "2"), (2, "2")]


@pytest.mark.parametrize(("micro_batches", "pieces"), CASES)
def test_large_values_go_but_for_those_that_are_read_first(micro_batches: int, pieces: str):
    found = program(micro_batches, pieces)
    bare, staying = without_values_at_host(found)
    assert bare.values_at_host == {}
    assert values_to_host(bare) == {*found.values_at_host.values()}
    values = saved_values(bare)
    sizes = [bare.bytes[value.register] for value in values]
    assert min(sizes) >= 1024
    assert staying == {v.register for v in values[: len(staying)]}
    assert 0 < sum(sizes[: len(staying)]) <= window_bytes(sizes) < sum(sizes[: len(staying) + 1])
    # No weight, nothing gathered of one, and not what the loss reads.
    names = {r: i for i in bare.body for r in makes(i)}
    made = {names[r] for r in found.values_at_host.values()}
    assert not made & {*bare.leaves("weight"), *bare.leaves("input")}
    assert bare.loss is not None
    assert not {*reads(names[bare.loss])} & {value.register for value in values}
    returned = replace(bare, outputs=(*bare.outputs, values[-1].register))
    assert [value.register for value in saved_values(returned)] == [value.register for value in values[:-1]]
    gathered = {i.result for i in bare.body if getattr(i, "kind", "") == "all_gather"}
    assert not gathered & {*found.values_at_host.values()}


def test_values_go_where_the_loss_is_summed_over_devices_too():
    # The last that makes the loss is then a move, and the operator before it reads what is not to go.
    graph = build("gpt2", batch=8, sequence=8, layers=4, hidden=32, heads=4, vocabulary=48)
    machine = load(WHERE)
    found = run(graph, machine, "fsdp", Optimizer(), offload="activations").graph
    whole = replace(found, outputs=(parallel("reduce", found.outputs[0], by=2).result,))
    programs = [lower(training_step(of, Optimizer(), machine.mesh), machine) for of in (found, whole)]
    alone, summed = (without_values_at_host(of)[0] for of in programs)
    kinds = [i.kind for i in summed.body if summed.loss in makes(i) and isinstance(i, ReshardMove)]
    assert kinds == ["all_reduce"]
    sizes = [[of.bytes[value.register] for value in saved_values(of)] for of in (alone, summed)]
    assert sizes[0] == sizes[1] != []
    plans = [plan_step(of, PlanOptions()) for of in programs]
    assert plans[0].bytes_of_copies("to_host") == plans[1].bytes_of_copies("to_host") > 0


@pytest.mark.parametrize(("micro_batches", "pieces"), CASES)
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_copies_are_in_order_and_take_a_window(micro_batches: int, pieces: str, kernels: str):
    plan = plan_step(program(micro_batches, pieces), PlanOptions(kernels=kernels))
    size, window = plan.program.bytes, window_bytes([plan.program.bytes[r] for r in plan.program.values_at_host])
    at_host, leaving, coming = set[Register](), dict[Register, int](), dict[Register, int]()
    most = [0, 0]
    count = 0
    for line in plan.schedule.lines:
        read, _ = plan.schedule.reads_and_makes(line.action)
        match line.action:
            case ValueMove(operand, result, "to_host"):
                leaving[result] = size[operand]
            case ValueMove(operand, result):
                assert operand in at_host
                assert operand in line.dies
                coming[result] = size[operand]
                count += 1
            case Wait(registers):
                at_host |= leaving.keys() & {*registers}
                leaving = {r: n for r, n in leaving.items() if r not in registers}
            case _:
                assert not at_host & {*read}
                coming = {r: n for r, n in coming.items() if r not in read}
        most = [max(most[0], sum(leaving.values())), max(most[1], sum(coming.values()))]
    assert count == len(plan.program.values_at_host) > 8
    assert not leaving
    assert not coming
    # Two at once at least, that one is on its way while the next one is made, or the one before read.
    assert all(window / 2 < n <= window for n in most)


def test_the_text_says_which_go():
    """The plan of a program read from its text is the same, and a value taken out of the text stays."""
    found = program()
    read = from_op(to_op(found))
    plans = [plan_step(each) for each in (found, read)]
    said = [re.sub(r"%\d+", "%", listing(plan)) for plan in plans]
    assert said[0] == said[1]
    away = next(i for i in found.body if isinstance(i, ValueMove))
    back = next(i for i in found.body if isinstance(i, ValueMove) and i.operand == away.result)
    names = {back.result: away.operand}
    body = [reading(i, names) for i in found.body if i not in (away, back)]
    fewer = plan_step(replace(found, body=tuple(body)))
    assert {*fewer.program.values_at_host.values()} == {*plans[0].program.values_at_host.values()} - {away.operand}


@pytest.mark.parametrize(("micro_batches", "pieces"), CASES)
def test_devices_do_not_hold_what_has_gone(micro_batches: int, pieces: str):
    machine = load(WHERE)
    plans = [plan_step(program(micro_batches, pieces, kind)) for kind in ("activations", "none")]
    lines = [simulate(replay(plan, machine)) for plan in plans]
    held = [_held_at_the_loss(line) for line in lines]
    going = sum(plans[0].program.bytes[r] for r in plans[0].program.values_at_host)
    assert going - 2**14 <= held[1] - held[0] <= going
    assert plans[0].bytes_of_copies("to_host") == plans[0].bytes_of_copies("from_host") == micro_batches * going
    assert plans[1].bytes_of_copies("to_host") == 0


def _held_at_the_loss(timeline: Timeline) -> int:
    curve, labels = held_over_time(timeline), timeline.tasks.labels
    loss = next(t for t, label in enumerate(labels) if "cross_entropy" in label.what)
    return int(curve.bytes[curve.ticks.searchsorted(timeline.ends[loss], side="left") - 1])


@pytest.mark.parametrize("staying", [0, 2**15])
def test_devices_hold_as_much_however_slow_the_link_is(staying: int):
    """A value holds its memory from the line that begins its copy back, though the link may have other copies first."""
    machine = load("dgx-a100:1x1")
    graph = build("gpt2", batch=8, sequence=8, layers=4, hidden=32, heads=4, vocabulary=48)
    made = run(graph, machine, "degrees", Optimizer(), {"zero": 0}, offload="activations").graph
    step = training_step(replace(made, staying=staying), Optimizer(), machine.mesh)
    plan = plan_step(lower(step, machine))
    host = machine.host_link
    assert len(plan.program.values_at_host) > 8
    for times in (1e-3, 1e3):
        link = replace(host, from_host=times * host.from_host, to_host=times * host.to_host)
        other = replace(machine, device=replace(machine.device, host=link))
        held = [simulate(replay(plan, on)).held_between_tasks() for on in (machine, other)]
        assert held[0] == held[1]


def test_copies_back_wait_for_those_away_and_share_the_links_of_state():
    machine = load(WHERE)
    optimizer = Optimizer("adamw")
    graph = build("gpt2", batch=8, sequence=8, layers=4, hidden=32, heads=4, vocabulary=48)
    made = run(graph, machine, "fsdp", optimizer, offload="all", micro_batches=2).graph
    plan = plan_step(lower(training_step(made, optimizer, machine.mesh), machine), PlanOptions(window=2**14))
    timeline = simulate(replay(plan, machine))
    tasks, streams = timeline.tasks, timeline.tasks.streams
    on = {kind: [t for t in range(len(tasks)) if streams.copies(0, kind) in tasks.held[t]] for kind in COPIES}
    both = sum(label.what in COPIES for label in tasks.labels)
    assert sum(map(len, on.values())) == both
    for found in on.values():
        assert all(timeline.ends[a] <= timeline.starts[b] for a, b in pairwise(found))
    values = [t for t in on["to_host"] if tasks.labels[t].kind != UPDATE]
    back = [t for t in on["from_host"] if tasks.labels[t].kind != UPDATE]
    each = len(plan.program.values_at_host)
    assert len(values) == len(back) == 2 * each
    # In each micro-batch, all are away before the first comes back, and back before the next goes.
    ends, starts = timeline.ends, timeline.starts
    assert max(ends[t] for t in values[:each]) <= starts[back[0]]
    assert max(ends[t] for t in back[:each]) <= starts[values[each]]
    # Values are held until their copies were waited for.
    away = [found for found in map(tasks.uses.__getitem__, range(len(tasks.uses))) if {*found} & {*values}]
    assert len(away) == len(values)
    assert {tasks.labels[found[-1]].what for found in away} == {"wait"}
    kernels = [t for t in range(len(tasks)) if streams.compute(0) in tasks.held[t] and tasks.ticks[t]]
    beside = sum(any(starts[k] < ends[t] and starts[t] < ends[k] for k in kernels) for t in (*values, *back))
    assert beside > each


def test_other_systems_leave_values_on_the_device():
    graph = build("gpt2", batch=8, sequence=8, layers=4, hidden=32, heads=4, vocabulary=48)
    found = run(graph, load(WHERE), "fsdp", Optimizer(), offload="activations").graph
    plain = run(graph, load(WHERE), "fsdp", Optimizer()).graph
    programs = [step_program(each, load(WHERE), LINALG) for each in (found, plain)]
    assert programs[0].body == programs[1].body
