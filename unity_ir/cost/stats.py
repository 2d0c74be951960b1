"""Print `--stats`: time (seconds), communication and memory (bytes) of a plan, and the plan operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO

from rich.console import Console
from rich.table import Table

from unity_ir.cost.plan import PlanCost, Reshard
from unity_ir.pcg.collectives import FREE
from unity_ir.pcg.node import Node
from unity_ir.pcg.reshard import Move, sum_over
from unity_ir.pcg.sharding import REPEAT, Assignment, Layout, Mesh, pins_of, role_name

WIDTH = 140


@dataclass(frozen=True, slots=True)
class Simulated:
    """
    A plan's iteration as emitted: its simulated times in seconds, peak memory in bytes, and counts of what it does.
    """

    overlapped: float
    """Seconds of an iteration whose communication overlaps with computation."""
    waiting: float
    """Seconds when every move is waited for at once."""
    peak: int
    """Most bytes that a device holds at once, with overlap."""
    launches: int
    """Kernels launched on a device in its forward and backward (`plan.plan.Plan.launches`)."""
    collectives: int
    """Collective calls of a device."""
    copies: int
    """Kernels that copy pieces for collectives on a device (`plan.copies`)."""
    bytes: int
    """Bytes that a device's kernels read and write, the optimizer's updates included."""
    bound: float
    """Lower bound in seconds on `overlapped` of every placement of the graph (`cost.least.emitted_bound`)."""
    everywhere: float
    """The same, of placements with all operators and weights on all devices."""
    pipeline: tuple[str, ...] = field(default=(), kw_only=True)
    """Of a plan in stages: a line with its schedule and bubble, and one with seconds and bytes for each stage."""
    copied: tuple[int, int] = field(default=(0, 0), kw_only=True)
    """Bytes that a device copies to its host, and from it: optimizer state, and values."""
    throughput: tuple[str, ...] = field(default=(), kw_only=True)
    """Lines with tokens or samples per second, MFU, and the error of predictions (`cost.throughput`)."""


def head(
    name: str,
    plan: PlanCost,
    derivation: list[str] | None = None,
    bound: float | None = None,
    simulated: Simulated | None = None,
    pipelines: tuple[float, str] | None = None,
    unproved: Sequence[str] = (),
    ties: Sequence[str] = (),
) -> str:
    """
    Return the lines of `--stats` above its table, for a plan called `name` whose cost is `plan`.

    `derivation` (rule applications) and `bound` (lower bound in seconds) are a search's results; `simulated` adds the
    lines on simulated time, peak memory and launches. Each that is None leaves its lines out.

    For a plan in stages, `pipelines` is (the plan's seconds if every move is waited for, words that say for which
    pipelines `bound` holds); then `bound` is compared with these seconds, not with those of `plan`.

    `unproved` names rules that were applied without a proof, `ties` those proved except for gradients at ties of a
    maximum.
    """
    machine = plan.machine
    out = StringIO()
    console = _console(out)
    console.print(
        f"@{name} on {machine.name} ({machine.devices} x {machine.device.name}), one iteration", soft_wrap=True
    )
    on_parts = any(map(pins_of, plan.placement.assignments.values()))
    parts = (
        "stages added up"
        if simulated is not None and simulated.pipeline
        else "branches on parts of the machine added up"
    )
    console.print(
        f"  time           {seconds_text(plan.time)} = compute {seconds_text(plan.compute_time)}"
        f" + communication {seconds_text(plan.communication_time)}"
        f"{f', {parts}' if on_parts else ''}",
        soft_wrap=True,
    )
    if simulated is not None:
        console.print(
            f"  simulated      {seconds_text(simulated.overlapped)} if communication is overlapped, as emitted,"
            f" {seconds_text(simulated.waiting)} if it is waited for"
        )
        for i, line in enumerate(simulated.pipeline):
            console.print(f"  {'' if i else 'pipeline':<14} {line}", soft_wrap=True)
    console.print(f"  communication  {plan.elements:,} elements, {plan.bytes:,} bytes, over all devices")
    held = ", ".join(f"{what} {bytes_text(size)}" for what, size in plan.memory.items())
    console.print(f"  memory         {bytes_text(plan.memory_bytes)} per device: {held}")
    if plan.at_host:
        console.print(f"  host           {bytes_text(plan.at_host)} of its memory per device", soft_wrap=True)
    if simulated is not None and any(simulated.copied):
        to_host, from_host = map(bytes_text, simulated.copied)
        console.print(f"  copies         {to_host} to the host and {from_host} from it per device", soft_wrap=True)
    if simulated is not None:
        console.print(f"  peak           {bytes_text(simulated.peak)} per device at once, overlapped")
        counts = f"{_count(simulated.launches, 'kernel')}, {_count(simulated.collectives, 'collective')}"
        copied = _count(simulated.copies, "copy", "copies")
        console.print(
            f"  launches       {counts} and {copied} for collectives before the update; "
            f"kernels and update read and write {bytes_text(simulated.bytes)} per device",
            soft_wrap=True,
        )
        for line in simulated.throughput:
            console.print(f"  {line}", soft_wrap=True)
    over = max(plan.memory_bytes, 0 if simulated is None else simulated.peak) - machine.device.usable
    if over > 0:
        console.print(
            f"  does not fit   {bytes_text(over)} more per device than {machine.device.limit_text}", soft_wrap=True
        )
    if machine.devices > 1 and all(set(roles) == {REPEAT} for roles in plan.placement.assignments.values()):
        console.print(f"  devices        all {machine.devices} do the same work: 1 device is as fast")
    above = gap(plan, bound, pipelines)
    if bound and pipelines is not None:
        waited, family = pipelines
        said = f"of {seconds_text(waited)} if every move is waited for, for any pipeline of {family}"
        console.print(f"  bound          {seconds_text(bound)} {said}: gap {above:.2%}", soft_wrap=True)
    elif bound:
        if on_parts:
            said = "with everything on all devices; here branches are on parts, at once"
        elif any(r.again for r in plan.reshards):
            said = "that gathers weights once; here some are gathered again"
        else:
            said = f"of this graph: gap {above:.2%}"
        console.print(f"  bound          {seconds_text(bound)} of the time, for any placement {said}", soft_wrap=True)
    if simulated is not None:
        for least, where in _emitted_bounds(plan, simulated):
            said = f"of the simulated time, for any placement{where}: gap {simulated.overlapped / least - 1:.2%}"
            console.print(f"  {'' if bound else 'bound':<14} {seconds_text(least)} {said}", soft_wrap=True)
            bound = bound or least
    if derivation is not None:
        console.print(f"  derivation     {', '.join(derivation) or 'no rewrite'}")
    if unproved:
        console.print(f"  unproved       {', '.join(unproved)}: values or gradients may differ from the model's")
    if ties:
        console.print(f"  gradients      may differ at ties, by {', '.join(ties)}")
    return out.getvalue()


def table(plan: PlanCost) -> str:
    """Return the table of `--stats`: every operator, leaf and reshard of a plan, with its layout and seconds."""
    out = StringIO()
    _console(out).print(_table(plan))
    return out.getvalue().rstrip() + "\n"


def gap(plan: PlanCost, bound: float | None, pipelines: tuple[float, str] | None = None) -> float | None:
    """
    Return how far a plan's seconds, with every move waited for, are above the lower bound of its search, as a fraction
    (0.05: 5 % above). For a plan in stages, the seconds compared are the first entry of `pipelines`.

    Returns None without a bound, and if the bound does not hold for this plan: it is of plans with everything on all
    devices, and `plan` pins something to a part of the machine; or of plans that gather weights once, and `plan`
    gathers some again.
    """
    if not bound:
        return None
    if pipelines is not None:
        return pipelines[0] / bound - 1
    if any(map(pins_of, plan.placement.assignments.values())) or any(r.again for r in plan.reshards):
        return None
    return plan.time / bound - 1


def _emitted_bounds(plan: PlanCost, simulated: Simulated) -> list[tuple[float, str]]:
    """Return the lower bounds on the simulated time that hold for a plan, in seconds, and of which placements."""
    one = plan.machine.devices == 1
    found = [(simulated.bound, "" if one else " on all or part of the machine")]
    if not one and not any(map(pins_of, plan.placement.layouts.values())):
        found.insert(0, (simulated.everywhere, " with everything on all devices"))
    return [(least, where) for least, where in found if least]


def _console(out: StringIO) -> Console:
    return Console(file=out, width=WIDTH, highlight=False, color_system=None, emoji=False, markup=False)


def _count(number: int, one: str, many: str | None = None) -> str:
    """Given 1 and `kernel` returns `1 kernel`; given 2, `2 kernels`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def _table(plan: PlanCost) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("operator", "result", "divided by", "forward", "backward", "elements"):
        table.add_column(heading, justify="right" if heading in ("forward", "backward", "elements") else "left")
    times = {o.node: o for o in plan.operators}
    before: dict[Node, list[Reshard]] = {}
    for reshard in plan.reshards:
        before.setdefault(reshard.users[0], []).append(reshard)
    mesh = plan.placement.mesh
    for value, layout in plan.placement.layouts.items():
        node = value.node
        for reshard in before.get(node, ()) if value.index == 0 else ():
            _add_reshard(table, plan, reshard)
        if node.is_parallel:
            continue
        name = f"{node.op} {_printable(node.name)}" if node.op in ("input", "weight") else node.op
        how = plan.placement.assignments.get(node, layout)
        if node in times and value.index == 0:
            cost_of = times[node]
            times_run = node.micro_batches
            forward, backward = seconds_text(cost_of.forward * times_run), seconds_text(cost_of.backward * times_run)
        else:
            forward = backward = ""
        table.add_row(name, _type(value.type), assignment_text(how, mesh), forward, backward, "")
    for reshard in plan.weight_reshards:
        _add_reshard(table, plan, reshard)
    if plan.update:
        table.add_row("update", "", "", seconds_text(plan.update), "", "")
    return table


def _add_reshard(table: Table, plan: PlanCost, reshard: Reshard) -> None:
    moving = [move for move in reshard.moves if move[0].kind not in FREE]
    if not moving:
        return

    def time(moves: Sequence[tuple[Move, str]]) -> str:
        seconds = plan.machine.moves_time(moves)
        return seconds_text(seconds) if seconds else ""

    elements = sum_over(moving, lambda move, _: move.traffic(plan.machine.mesh))
    table.add_row(
        f"  {_kinds(reshard.forward)} / {_kinds((*reshard.again, *reshard.backward))}",
        "",
        f"{_roles(reshard.source)} to {_roles(reshard.target)}",
        time(reshard.forward_moves),
        time(reshard.backward_moves),
        f"{elements:,}",
    )


def reshard_words(reshard: Reshard) -> str:
    """
    Return the text for a reshard, source and target layout with the moves of forward and backward: given a gather and
    its dual, `dim 0 to repeat by all_gather / reduce_scatter`.
    """
    kinds = f"{_kinds(reshard.forward)} / {_kinds((*reshard.again, *reshard.backward))}"
    return f"{_roles(reshard.source)} to {_roles(reshard.target)} by {kinds}"


def _kinds(moves: tuple[Move, ...]) -> str:
    return ", ".join(m.kind for m in moves if m.kind not in FREE) or "-"


def _roles(layout: Layout) -> str:
    """Given (0, 0, COPY) returns `dim 0, copy`."""
    return ", ".join(dict.fromkeys(role_name(r) for r in layout)) or "one device"


def assignment_text(how: Assignment, mesh: Mesh) -> str:
    """
    Return the text for an assignment (the role of each axis of `mesh` in an operator) in `--stats`: given index
    variable m, m, COPY on axes of 2, 3, 4 devices, `m by 6, copy by 4`.
    """
    degrees: dict[str, int] = {}
    for what, size in zip(how, mesh.sizes, strict=True):
        name = role_name(what)
        degrees[name] = degrees.get(name, 1) * size
    return ", ".join(f"{name} by {degree}" for name, degree in degrees.items())


def _type(type: object) -> str:
    return str(type).removeprefix("!pcg.tensor<").removesuffix(">")


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def seconds_text(seconds: float) -> str:
    """
    Return seconds as text with at least three digits (from 1 s on, four): given 0.00012, `120.0 us`; 1.8524, `1.852 s`.
    """
    if seconds >= 1:
        return f"{_digits(seconds, 4)} s"
    if seconds >= 1e-3:
        return f"{_digits(seconds / 1e-3, 3)} ms"
    return f"{_digits(seconds / 1e-6, 3)} us"


def bytes_text(size: int) -> str:
    """Return bytes as text with at least three digits: given 1,500,000, `1.50 MB`."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{_digits(size / scale, 3)} {unit}"
    return f"{size} B"


def _digits(number: float, count: int) -> str:
    """Format a number with at least `digits` digits, one of them after the point; below 1, all after it."""
    before = len(str(int(number))) if number >= 1 else 1
    return f"{number:.{max(1, count - before)}f}"
