"""Write the answers of a sweep: CSV, JSON and a table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from unity_ir.sweep.point import FAMILY, Answer


def knobs_of(answers: Sequence[Answer]) -> list[str]:
    """Return the names of the knobs that the points of a grid set, in the grid's order; [] without answers."""
    return [name for name, _ in answers[0].point.settings] if answers else []


def row(answer: Answer) -> dict[str, Any]:
    """Return an answer as CSV has it: model, machine and knobs, then what was found; None where nothing was."""
    return {
        "model": answer.point.model,
        "machine": answer.point.machine,
        **dict(answer.point.settings),
        "devices": answer.devices,
        "samples": answer.samples,
        "seconds": answer.seconds,
        "samples_per_second": answer.rate,
        "mfu": answer.mfu,
        "bound": answer.bound,
        "gap": answer.gap,
        "memory": answer.memory,
        "recipe": answer.recipe,
        "taken": answer.taken,
    }


def csv_text(answers: Sequence[Answer]) -> str:
    """
    Return the answers as CSV text: a line of column names, then a line per answer; cells are empty where no plan fits.
    """
    out = io.StringIO()
    rows = [row(answer) for answer in answers]
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def json_text(answers: Sequence[Answer], about: Mapping[str, Any]) -> str:
    """Return the answers as JSON, with what the bounds are of and how points were searched (`about`)."""
    tables = [{**answer.table(), "gap": answer.gap, "mfu": answer.mfu} for answer in answers]
    return json.dumps({"about": {**about, "bound": FAMILY}, "points": tables}, indent=1) + "\n"


def table_of(answers: Sequence[Answer]) -> Table:
    """Return the answers as a table to print."""
    table = Table("model", "machine", *knobs_of(answers), "step, s", "MFU", "gap", "GB", "recipe")
    for answer in answers:
        values = [f"{value:g}" for _, value in answer.point.settings]
        cells = [answer.point.model, answer.point.machine, *values]
        if answer.seconds is None or answer.memory is None:
            table.add_row(*cells, "", "", "", "", "none found that fits")
            continue
        assert answer.mfu is not None
        gap = "" if answer.gap is None else f"{answer.gap:.1%}"
        of = f"{answer.recipe}{f' (of {answer.taken})' if answer.taken else ''}"
        table.add_row(*cells, f"{answer.seconds:.4g}", f"{answer.mfu:.1%}", gap, f"{answer.memory / 1e9:.1f}", of)
    return table
