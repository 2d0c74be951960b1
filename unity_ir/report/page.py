"""
Put the data of a report into one HTML file: no network, no framework, and no text of a user's file that could become
markup or script. Texts are only in the JSON, whose `<`, `>` and `&` are escaped, and the scripts put them into text
nodes alone. As a second wall, the page's content security policy allows no script but its own, by hash, and no
connection.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files

from unity_ir.messages import printable
from unity_ir.report.baselines import Alternative
from unity_ir.report.links import LinkLoad
from unity_ir.report.packed import Json

SCRIPTS = ("view.js", "graph.js", "timeline.js", "page.js")
"""The scripts, in the order in which they are run, as one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """
    One of the large numbers at the head of a report: its label (`step`), its value as text (`17.0 ms`), and a note that
    explains it.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """How another plan differs from a report's, as rows of texts for two tables, and the titles of the two plans."""

    names: tuple[str, str]
    figures: Sequence[tuple[str, str, str, str]]
    """What an iteration takes: the figure, by each plan, and the change."""
    layouts: Sequence[tuple[str, str, str, int]]
    """What is divided otherwise: operators of one kind, how each plan divides them, and how many there are."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that a report shows."""

    name: str
    machine: str
    figures: Sequence[Figure]
    facts: Sequence[tuple[str, str]]
    """The lines that `--stats` has above its table: a word and a text each."""
    usable: int
    """Bytes of a device that a plan may use."""
    graph: dict[str, Json]
    timeline: dict[str, Json]
    links: Sequence[LinkLoad]
    alternatives: Sequence[Alternative] | None = None
    """The plan itself, then baselines; None if none was asked for."""
    difference: Difference | None = None


def html(report: Report) -> str:
    """Return a report as the text of one HTML file, which opens without a network."""
    page = files("unity_ir.report")

    def read(name: str) -> str:
        return page.joinpath(name).read_text(encoding="utf-8")

    script = '"use strict";\n(() => {\n' + "\n".join(map(read, SCRIPTS)) + "})();\n"
    parts = {
        "title": escape(printable(f"@{report.name} on {report.machine}")),
        "hash": b64encode(sha256(script.encode()).digest()).decode(),
        "style": read("page.css"),
        "data": as_json(asdict(report)),
        "script": script,
    }
    # Split first: what is put in may have text that looks like a place for another part.
    first, *rest = read("page.html").split("{{")
    return first + "".join(parts[name] + after for name, _, after in (part.partition("}}") for part in rest))


def as_json(data: Json) -> str:
    """Return data as JSON text that can stand inside of an HTML `script` element, whatever texts the data hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
