"""
Seconds to find all matches of all rules of the library in models of the zoo.

    python bench/rules.py [MODEL ..] [--json FILE]

Each model is searched in a process of its own, so that every cache is cold; the rules have been read and the graph
built. A match counts when its replacement has been built and has the types of what it replaces; hybrid rules divide
by 2. Exits with code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

from models import processor
from rich.console import Console
from rich.table import Table

AIM = 0.3
"""Seconds, for a model."""

MODELS = ("inception_v3", "bert_large")

DEGREES = {"d": 2, "e": 2}
"""What hybrid rules divide by."""


def match(name: str) -> dict[str, object]:
    """Seconds to index a model and find all matches in it, in this process."""
    from unity_ir.models import build
    from unity_ir.rules.library import families, family
    from unity_ir.rules.match import Index, matches

    rules = [(rule, DEGREES if f == "parallel" else {}) for f in families() for rule in family(f)]
    graph = build(name)
    found: dict[str, int] = {}
    start = time.perf_counter()
    index = Index(graph)
    for rule, given in rules:
        if number := sum(1 for _ in matches(rule, index, given)):
            found[rule.name] = number
    seconds = time.perf_counter() - start
    return {"nodes": len(index.nodes), "rules": len(rules), "matches": found, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description="Times to match the rules of the library.")
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    table = Table(title=f"{processor()}, Python {platform.python_version()}")
    for heading in ("model", "nodes", "rules", "matches", "seconds", "aim"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in options.models:
        command = [sys.executable, __file__, "match", name]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append({"model": name, **row})
        matches = sum(row["matches"].values())
        table.add_row(name, str(row["nodes"]), str(row["rules"]), str(matches), f"{row['seconds']:.3f}", str(AIM))
    Console().print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"processor": processor(), "python": platform.python_version(), "aim": AIM, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(float(str(row["seconds"])) > AIM for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["match"]:
        print(json.dumps(match(sys.argv[2])))
    else:
        sys.exit(main())
