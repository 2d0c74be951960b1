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
    """
    Return the names of the knobs (settings that the grid varies) in the grid's order, given the answers of its points;
    [] without answers.
    """
    return [name for name, _ in answers[0].point.settings] if answers else []


def row(answer: Answer) -> dict[str, Any]:
    """
    Return an answer as a row of the CSV file, by column name: model, machine and knobs, then what was found, with None
    where nothing was.
    """
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
    """
    Return the answers as JSON text; `about` (how the points were searched) is put before them, with a sentence on what
    the lower bounds hold for.
    """
    tables = [{**answer.table(), "gap": answer.gap, "mfu": answer.mfu} for answer in answers]
    return json.dumps({"about": {**about, "bound": FAMILY}, "points": tables}, indent=1) + "\n"


def table_of(answers: Sequence[Answer]) -> Table:
    """Return the answers as a table for the terminal, with a row for each."""
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
