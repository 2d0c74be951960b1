"""Explain an operator's choice in a plan: its cost, and the best plan with every alternative forced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from io import StringIO

import numpy as np
from rich.console import Console
from rich.table import Table

from unity_ir.cost.plan import PlanCost
from unity_ir.cost.stats import WIDTH, assignment_text, bytes_text, reshard_words, seconds_text
from unity_ir.errors import UnityError
from unity_ir.pcg.collectives import FREE
from unity_ir.pcg.graph import Graph, erase_with
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.recompute import not_kept
from unity_ir.pcg.sharding import Assignment, Mesh, pins_of
from unity_ir.search.exact.plan_graph import roles_of_axes
from unity_ir.search.exact.solver import ExactPlan, FactorGraphBuilder, Solver
from unity_ir.search.joint.best_first import JointPlan
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import Price
from unity_ir.search.memory.seconds_and_bytes import CostModel


@dataclass(frozen=True, slots=True)
class Alternative:
    """
    The best plan in which one operator is sharded in a given way, for `--explain`; its figures are per step and device.
    """

    divided: str
    """That way, as text without the axes: `k by 2, m by 4`."""
    kernels: float
    """Seconds of the operator, forward and backward."""
    around: float
    """Seconds of the reshards to and from it, in that plan."""
    seconds: float
    """Seconds of the best plan with this alternative, every move waited for."""
    bytes: float
    """Bytes that a device holds at the end of that plan's forward."""
    priced: float
    """Seconds plus the price of its bytes if memory is short; alternatives are ranked by it."""


def operators(graph: Graph) -> dict[str, Node]:
    """
    Return the compute operators of a graph by the names that its text has for them: `matmul0`, `relu0`, `matmul1`.
    """
    counts: Counter[str] = Counter()
    found: dict[str, Node] = {}
    for node in graph.nodes():
        if node.is_compute:
            found[f"{node.op}{counts[node.op]}"] = node
            counts[node.op] += 1
    return found


def named(graph: Graph, name: str) -> tuple[str, Node]:
    """
    Return the printed name and the node of an operator.

    `name` is its printed name (`matmul1`), its kind if there is only one of it (`matmul`), or its number among all,
    counted from 1. Raises `UnityError`, with similar names, if there is none.
    """
    known = operators(graph)
    wanted = name.removeprefix("%").removeprefix("#")
    if wanted in known:
        return wanted, known[wanted]
    if wanted.isdecimal() and len(wanted) < 10:
        if 1 <= int(wanted) <= len(known):
            return list(known.items())[int(wanted) - 1]
        raise UnityError(f"--explain: no operator {wanted}; @{graph.name} has {len(known)}")
    alike = [(n, node) for n, node in known.items() if node.op == wanted]
    if len(alike) == 1:
        return alike[0]
    if alike:
        last = alike[-1][0]
        raise UnityError(f"--explain: {len(alike)} operators are {wanted}; name one: {alike[0][0]} to {last}")
    near = get_close_matches(wanted, [*dict.fromkeys(n.op for n in known.values()), *known], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}" if near else f"it has {', '.join(list(known)[:8])}"
    raise UnityError(f"--explain: @{graph.name} has no operator {name!a}; {hint}")


def alternatives(found: JointPlan, node: Node) -> list[Alternative]:
    """
    Return the best plan for each way to shard the operator `node` of the rewritten graph in `found`, fastest first.
    Where memory is short, the price of the bytes that a plan holds is added to its seconds for this order
    (`Alternative.priced`). Ways that differ only in which of several mesh axes have a role count as one.
    """
    graph, solver = found.rewritten, _solver(found)
    builder = FactorGraphBuilder(solver, graph, whole=node)
    table = solver.table(node, builder.with_gradient)
    model = CostModel(solver, graph)
    groups, mesh = solver.spaces.groups, solver.spaces.machine.mesh
    classes: dict[str, list[int]] = {}
    for row in range(len(table)):
        how = _class(roles_of_axes(groups, table.roles, table.counts[row]), mesh)
        classes.setdefault(how, []).append(row)
    out: list[Alternative] = []
    for how, rows in classes.items():
        problem = builder.problem()
        problem.keep({builder.numbers[node]: np.isin(np.arange(len(table)), rows)})
        best = _alternative(how, node, builder.plan(problem), model, found.price)
        if found.plan.rows[node] in rows:
            # It may share moves in a way that the plans of the sum, in which each operator pays, do not.
            best = min(best, _alternative(how, node, found.plan, model, found.price), key=lambda a: a.priced)
        out.append(best)
    return sorted(out, key=lambda a: (a.priced, a.divided))


def _class(how: Assignment, mesh: Mesh) -> str:
    """
    Return an assignment as text without saying which axes: given k, m, m on axes of size 2, returns `k by 2, m by 4`.
    """
    parts = assignment_text(how, mesh).split(", ") if how else ["one device"]
    return ", ".join(sorted(parts))


def _solver(found: JointPlan) -> Solver:
    """Return the solver with the plan's price of bytes."""
    return found.solver if found.price == 0 else found.solver.with_price(Price(1.0, found.price))


def _alternative(how: str, node: Node, plan: ExactPlan, model: CostModel, price: float) -> Alternative:
    choice = model.choice(plan)
    seconds, bytes = model.costs(choice)
    kernels, around = model.around(node, choice)
    return Alternative(how, kernels, around, seconds, bytes, seconds + price * bytes)


def explain(found: JointPlan, plan: PlanCost, name: str) -> str:
    """
    Return the text of `--explain name`: the operator's sharding in the plan, its cost, and the cost of each
    alternative, at most `limits().alternatives_shown` of them.

    `found` is the result of the search, `plan` the cost of its parallel graph, and `name` is read as by `named`. Raises
    `UnityError` for an unknown operator.
    """
    name, node = named(found.rewritten, name)
    placed = _placed(found.graph)[node]
    (cost_of,) = (o for o in plan.operators if o.node == placed)
    how = _class(plan.placement.assignments[placed], plan.machine.mesh)
    out = StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, color_system=None, emoji=False, markup=False)
    console.print(f"{name} of @{found.graph.name}: {how}", soft_wrap=True)
    forward, backward = seconds_text(cost_of.forward), seconds_text(cost_of.backward)
    again = ", computed again for the backward rather than kept" if placed in not_kept(found.graph) else ""
    console.print(f"  kernels        {forward} forward, {backward} backward{again}")
    for line in _reshards(plan, placed):
        console.print(f"  reshard        {line}", soft_wrap=True)
    if pins_of(plan.placement.assignments[placed]):
        console.print("  on a part of the machine, beside other branches; below, plans have everything on all of it")
    ways = alternatives(found, node)
    if found.price:
        console.print(f"  memory is short: a GB more would save {seconds_text(found.price * 1e9)}, and counts as that")
    console.print(_table(ways, how))
    if len(ways) > limits().alternatives_shown:
        console.print(f"  and {len(ways) - limits().alternatives_shown} more, up to {seconds_text(ways[-1].seconds)}")
    return out.getvalue().rstrip() + "\n"


def _placed(graph: Graph) -> dict[Node, Node]:
    """Map the operators of the erasure to those of the parallel graph."""
    return {serial: node for node, serial in erase_with(graph)[1].items() if node.is_compute}


def _reshards(plan: PlanCost, node: Node) -> list[str]:
    lines: list[str] = []
    results: set[Value] = set(node.results)
    for reshard in plan.reshards:
        moving = [(m, dtype) for m, dtype in reshard.moves if m.kind not in FREE]
        if moving and (node in reshard.users or reshard.value in results):
            side = "to it" if node in reshard.users else "from it"
            time = sum(plan.machine.move_time(m, dtype) for m, dtype in moving)
            lines.append(f"{side}: {reshard_words(reshard)}, {seconds_text(time)}")
    return lines


def _table(ways: Sequence[Alternative], chosen: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("  divided by", "kernels", "reshards", "best plan", "held", "more"):
        table.add_column(heading, justify="left" if heading == "  divided by" else "right")
    least = ways[0].priced
    for way in ways[: limits().alternatives_shown]:
        more = way.priced - least
        table.add_row(
            f"{'*' if way.divided == chosen else ' '} {way.divided}",
            seconds_text(way.kernels),
            seconds_text(way.around),
            seconds_text(way.seconds),
            bytes_text(round(way.bytes)),
            f"+{seconds_text(more)} ({more / least:.1%})" if more > 1e-12 * least + 1e-11 else "the least",
        )
    return table
