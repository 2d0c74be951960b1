"""Make a report on a plan, a page of HTML: `Plan.report`, `unity-opt --report`."""

from __future__ import annotations

from collections.abc import Iterator

from unity_ir.api.diff import figures, heading, layout_rows
from unity_ir.api.stats import Compared, Stats
from unity_ir.cost.plan import cost
from unity_ir.cost.stats import bytes_text, seconds_text
from unity_ir.plan.plan import Plan
from unity_ir.report.baselines import with_baselines
from unity_ir.report.graph import graph_data
from unity_ir.report.links import link_loads
from unity_ir.report.page import Difference, Figure, Report, html
from unity_ir.report.timeline import timeline_data
from unity_ir.simulate.report import PLAYED, shown_step

INDENT, WORD = 2, 15
"""Columns before the word at the beginning of a line of `--stats`, and of that word."""


def report_html(plan: Compared, against: Compared | None = None, baselines: bool = False) -> str:
    """
    Return a report on a plan as the text of an HTML file: its graph, a simulated iteration, memory and links. With
    `against`, it also says how that plan differs; with `baselines`, it also prices plans that people make by hand.

    Raises `UnityError` if baselines are asked for and the graph has its backward.
    """
    graph, machine = plan.graph, plan.machine
    priced = cost(graph, machine)
    step, timeline = shown_step(graph, machine)
    return html(
        Report(
            name=graph.name,
            machine=f"{machine.name} ({machine.devices} x {machine.device.name})",
            figures=list(_figures(plan.stats, graph.pipeline is not None)),
            facts=_facts(plan.stats),
            usable=plan.stats.usable,
            graph=graph_data(graph, priced),
            timeline=timeline_data(timeline, _note(step)),
            links=link_loads(priced, timeline if step.pipeline is None else None),
            alternatives=with_baselines(graph, priced, plan.stats.seconds) if baselines else None,
            difference=None if against is None else _difference(plan, against),
        )
    )


def _note(step: Plan) -> str:
    """Return what the pictures of a step leave out."""
    if step.pipeline is not None:
        return (
            "moves inside of a stage are part of its tasks; each task is drawn with the most that it holds at once, so "
            "that memory may be above the exact peak at the head"
        )
    count = step.program.micro_batches
    if count <= PLAYED:
        return ""
    return f"the first {PLAYED} of {count} micro-batches; those left out are like the one in between"


def _figures(stats: Stats, in_stages: bool) -> Iterator[Figure]:
    """Yield the figures at the head of the page."""
    yield Figure("step", seconds_text(stats.seconds), f"{seconds_text(stats.waiting)} if every move is waited for")
    share = f"{stats.peak / stats.usable:.0%} of {bytes_text(stats.usable)}"
    yield Figure("peak memory", bytes_text(stats.peak), share if stats.fits else f"{share}: does not fit")
    for unit, rate in (("tokens", stats.tokens_per_second), ("samples", stats.samples_per_second)):
        if rate is not None:
            yield Figure(f"{unit} per second", f"{rate:,.0f}", f"on {stats.devices} devices")
    if stats.mfu is not None:
        yield Figure("MFU", f"{stats.mfu:.1%}", "of the devices' dense peak")
    parts = f"compute {seconds_text(stats.compute)} + communication {seconds_text(stats.communication)}"
    parts += ", stages added up" if in_stages else ""
    yield Figure("one after the other", seconds_text(stats.time), parts)
    if stats.bound is not None:
        gap = "of other plans than this" if stats.gap is None else f"gap {stats.gap:.2%}"
        of = "of the step with moves waited for" if in_stages else "of one after the other"
        yield Figure("proved bound", seconds_text(stats.bound), f"{of}; {gap}")


def _facts(stats: Stats) -> list[tuple[str, str]]:
    """Return the lines of `--stats` above its table, below the first, as (word, text)."""
    lines = stats.head.splitlines()[1:]
    return [(line[INDENT : INDENT + WORD].strip(), line[INDENT + WORD :].strip()) for line in lines]


def _difference(plan: Compared, against: Compared) -> Difference:
    rows = [(*row, count) for row, count in layout_rows(plan, against).items()]
    return Difference((heading(plan), heading(against)), figures(plan, against), rows)
