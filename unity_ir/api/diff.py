"""Say how two plans differ: what an iteration takes, and which operators and weights are divided otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from io import StringIO

from rich.console import Console
from rich.table import Table

from unity_ir.api.stats import Compared
from unity_ir.cost.plan import cost
from unity_ir.cost.stats import WIDTH, assignment_text, bytes_text, seconds_text
from unity_ir.messages import printable

NOTHING = "-"
"""Printed in place of an operator that only the other plan has."""


def diff(before: Compared, after: Compared) -> str:
    """
    Describe, as text, how the plan `after` differs from `before`: a table of what an iteration takes, then a line for
    each kind of operator or weight that is divided differently, with the number of these.

    The plans' operators are matched in order, by kind and name, since their graphs may have been rewritten differently;
    where only one plan has an operator, the other has `-`. Numbers in names of weights become `*`, so that all layers
    are one line.
    """
    out = StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, color_system=None, emoji=False, markup=False)
    head = _table("", *map(heading, (before, after)), "change")
    for figure in figures(before, after):
        head.add_row(*figure)
    console.print(head)
    rows = layout_rows(before, after)
    if not rows:
        console.print("all operators and weights are divided alike")
        return out.getvalue().rstrip() + "\n"
    table = _table("divided by", "before", "after", "how many")
    for (label, one, other), count in rows.items():
        table.add_row(label, one, other, str(count))
    console.print()
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if heading in ("change", "how many") else "left", no_wrap=i == 0)
    return table


def heading(plan: Compared) -> str:
    """Return the title of a plan in a comparison, its function and its machine: `@gpt2 on dgx-h100`."""
    return f"@{printable(plan.graph.name)} on {plan.machine.name}"


def figures(before: Compared, after: Compared) -> list[tuple[str, str, str, str]]:
    """
    Compare what an iteration takes by each of two plans; return rows of text (what, by `before`, by `after`, change):
    seconds, bytes on a device, numbers of kernels and collectives. The change is relative, such as `+3.1%`; it is ""
    where both texts are the same, `new` where `before` has 0.
    """
    one, other = before.stats, after.stats
    found: list[tuple[str, str, str, str]] = []
    pairs: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("simulated", one.seconds, other.seconds, seconds_text),
        ("all waited for", one.waiting, other.waiting, seconds_text),
        ("compute", one.compute, other.compute, seconds_text),
        ("communication", one.communication, other.communication, seconds_text),
        ("peak", one.peak, other.peak, _size),
        *((what, size, other.memory.get(what, 0), _size) for what, size in one.memory.items()),
        ("kernels", one.launches, other.launches, str),
        ("collectives", one.collectives, other.collectives, str),
    ]
    for name, a, b, text in pairs:
        change = "" if text(a) == text(b) else f"{b / a - 1:+.1%}" if a else "new"
        found.append((name, text(a), text(b), change))
    return found


def _size(count: float) -> str:
    return bytes_text(round(count))


def layout_rows(before: Compared, after: Compared) -> dict[tuple[str, str, str], int]:
    """
    Count the inputs, weights and operators that two plans divide differently; return the numbers by (label, how
    `before` divides it, how `after` does), all texts. A label is an operator's name (`matmul`), or `input` or `weight`
    and its name, with `*` for the numbers in a weight's (`weight h.*.w`). `NOTHING` stands for a plan that does not
    have it.
    """
    one, other = list(_layouts(before)), list(_layouts(after))
    found: dict[tuple[str, str, str], int] = {}
    matcher = SequenceMatcher(None, [key for key, _, _ in one], [key for key, _, _ in other], autojunk=False)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag == "equal":
            pairs = [(label, x, y) for (_, label, x), (_, _, y) in zip(one[a:a_end], other[b:b_end], strict=True)]
        else:
            pairs = [(label, x, NOTHING) for _, label, x in one[a:a_end]]
            pairs += [(label, NOTHING, y) for _, label, y in other[b:b_end]]
        for row in pairs:
            if row[1] != row[2]:
                found[row] = found.get(row, 0) + 1
    return found


def _layouts(plan: Compared) -> Iterator[tuple[str, str, str]]:
    """
    Yield (key, label, how it is divided) of each input, weight and operator of a plan, in order: `weight h.0.w` has the
    label `weight h.*.w`, and `matmul` is both key and label of all products.
    """
    placement = cost(plan.graph, plan.machine).placement
    for value, layout in placement.layouts.items():
        node = value.node
        if node.is_parallel or value.index:
            continue
        key = f"{node.op} {printable(node.name)}" if node.op in ("input", "weight") else node.op
        label = re.sub(r"\d+", "*", key) if node.op == "weight" else key
        yield key, label, assignment_text(placement.assignments.get(node, layout), placement.mesh)
