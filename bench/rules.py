"""
Seconds to find all matches of all rules of the library in models of the zoo, and to prove the library and every
parallelization rule of every operator again. Generation and axioms have scripts of their own (`generate.py`,
`axioms.py`).

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
from collections import Counter
from pathlib import Path
from statistics import median

from models import processor
from rich.console import Console
from rich.table import Table

AIM = 0.3
"""Seconds, for a model."""

PROOFS_AIM, MEDIAN_AIM = 60, 0.05
"""Seconds, for all proofs of one kind, and for the median of them."""

MODELS = ("inception_v3", "bert_large")

DEGREES = {"d": 2, "e": 2}
"""What hybrid rules divide by."""


def match(name: str) -> dict[str, object]:
    """Seconds to index a model and find all matches in it, in this process."""
    from unity_ir.models import build
    from unity_ir.rules.library import families, family
    from unity_ir.rules.match import OpIndex, matches

    rules = [(rule, DEGREES if f == "parallel" else {}) for f in families() for rule in family(f)]
    graph = build(name)
    found: dict[str, int] = {}
    start = time.perf_counter()
    index = OpIndex(graph)
    for rule, given in rules:
        if number := sum(1 for _ in matches(rule, index, given)):
            found[rule.name] = number
    seconds = time.perf_counter() - start
    return {"nodes": len(index.nodes), "rules": len(rules), "matches": found, "seconds": seconds}


def prove() -> list[dict[str, object]]:
    """Verdicts and seconds of all proofs, in this process."""
    from unity_ir.ops import operators
    from unity_ir.rules.library import all_substitutions
    from unity_ir.rules.proof.obligations import obligations
    from unity_ir.rules.proof.prove import prove

    rows: list[dict[str, object]] = []
    library = [prove(rule) for rule in all_substitutions()]
    divided = [o.proof for operator in operators().values() for o in obligations(operator)]
    for what, proofs in (("rules of the library", library), ("parallelization of operators", divided)):
        verdicts = Counter(p.verdict for p in proofs)
        seconds = [p.seconds for p in proofs]
        rows.append({"what": what, **verdicts, "seconds": sum(seconds), "median": median(seconds)})
    return rows


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
    proofs = json.loads(
        subprocess.run([sys.executable, __file__, "prove"], capture_output=True, text=True, check=True).stdout
    )
    table = Table()
    for heading in ("proofs of", "proved", "refuted", "undecided", "seconds", "median", "aim", "median aim"):
        table.add_column(heading, justify="left" if heading == "proofs of" else "right")
    for row in proofs:
        counts = [str(row.get(verdict, 0)) for verdict in ("proved", "refuted", "undecided")]
        times = [f"{row['seconds']:.1f}", f"{row['median']:.3f}", str(PROOFS_AIM), str(MEDIAN_AIM)]
        table.add_row(row["what"], *counts, *times)
    Console().print(table)
    missed = any(r["seconds"] > PROOFS_AIM or r["median"] > MEDIAN_AIM or "undecided" in r for r in proofs)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "processor": processor(),
            "python": platform.python_version(),
            "aim": AIM,
            "rows": rows,
            "proofs": proofs,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(missed or any(float(str(row["seconds"])) > AIM for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["match"]:
        print(json.dumps(match(sys.argv[2])))
    elif sys.argv[1:2] == ["prove"]:
        print(json.dumps(prove()))
    else:
        sys.exit(main())
