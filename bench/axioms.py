"""
Seconds to prove TASO's axioms, the parallel statements and rules of other compilers, and how many rules follow from
axioms by matching.

    python bench/axioms.py [--collection FILE] [--json FILE]

True statements are to be proved, false ones refuted. Composites are rules as a library has them: by the prover, which
knows the operators' lines alone, and as TASO does it, by Z3 from the axioms. A collection of TASO's or FlexFlow's rules
is read where one is given. Exits with code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiler_rules import COLLECTIONS, VERDICTS, rules
from models import processor
from rich.console import Console
from rich.table import Table
from taso_axioms.composites import composites
from taso_axioms.parallel import statements
from taso_axioms.taso import Axiom, axioms
from taso_axioms.z3_mode import prove_by_axioms

from unity_ir.rules.proof.prove import prove
from unity_ir.rules.research.foreign import import_rules

AIM = 0.05
"""Aim for the median seconds of a proof."""

TIMEOUT = 3000
"""Time limit in milliseconds for a proof by Z3 from the axioms."""


def times(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, maximum and sum."""
    return {"median": statistics.median(seconds), "most": max(seconds), "total": sum(seconds)}


def stated(of: Sequence[Axiom]) -> dict[str, Any]:
    """
    Prove axioms whose verdict is known; return how many have each verdict, the times, and those with a wrong verdict.
    """
    proofs = [prove(a.rule) for a in of]
    wrong = [a.number for a, p in zip(of, proofs, strict=True) if p.verdict != a.verdict]
    return {
        "rules": len(of),
        **Counter(p.verdict for p in proofs),
        "wrong": wrong,
        **times([p.seconds for p in proofs]),
    }


def of_compilers() -> list[dict[str, Any]]:
    """Prove the rules of XLA and Inductor; return a row for each collection."""
    found: list[dict[str, Any]] = []
    for collection in COLLECTIONS:
        proofs = [(r.name, prove(r)) for r in rules(collection)]
        wrong = [name for name, p in proofs if p.verdict != VERDICTS.get(name, "proved")]
        verdicts, seconds = Counter(p.verdict for _, p in proofs), times([p.seconds for _, p in proofs])
        name = f"{collection}.pcg"
        found.append({"name": name, "rules": len(proofs), **verdicts, "wrong": wrong, **seconds})
    return found


def followed() -> list[dict[str, Any]]:
    """Prove the composite rules by the prover, and by Z3 from the axioms; return a row for each way."""
    rules = composites()
    found: list[dict[str, Any]] = []
    prove_by_axioms(rules[0], TIMEOUT)  # The axioms are made once.
    for name, proofs in (
        ("proved", [prove(r) for r in rules]),
        ("by axioms", [prove_by_axioms(r, TIMEOUT) for r in rules]),
    ):
        open_ = [r.name for r, p in zip(rules, proofs, strict=True) if not p.proved]
        verdicts = Counter(p.verdict for p in proofs)
        seconds = times([p.seconds for p in proofs])
        found.append({"name": f"composites, {name}", "rules": len(rules), **verdicts, "wrong": open_, **seconds})
    return found


def collected(path: Path) -> dict[str, Any]:
    """Prove the rules of a collection; return how many have each verdict, and the times."""
    report = import_rules(path)
    tried = [r.seconds for r in report.rules if r.rule is not None] or [0.0]
    return {"name": path.name, "rules": len(report.rules), **report.counts, **times(tried)}


def table(rows: Sequence[dict[str, Any]], machine: str) -> Table:
    """Return the results as a table."""
    out = Table(title=machine)
    out.add_column("", no_wrap=True)
    for heading in ("rules", "proved", "refuted", "open", "other", "ms", "most", "total s"):
        out.add_column(heading, justify="left" if heading == "other" else "right", no_wrap=heading == "other")
    for row in rows:
        known = [int(row.get(verdict, 0)) for verdict in ("proved", "refuted", "undecided")]
        other = "\n".join(
            f"{row[k]} {k}" for k in ("almost everywhere", "ill-typed", "unbound", "unsupported") if k in row
        )
        out.add_row(
            *(row["name"], str(row["rules"]), *map(str, known), other),
            *(f"{1000 * row['median']:.0f}", f"{1000 * row['most']:.0f}", f"{row['total']:.1f}"),
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--collection", type=Path, help="a rule collection of TASO's (.pb) or FlexFlow's (JSON)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = [
        {"name": "TASO's axioms", **stated(axioms())},
        {"name": "parallel statements", **stated(statements())},
    ]
    rows += followed()
    rows += of_compilers()
    if options.collection is not None:
        rows.append(collected(options.collection))
    machine = f"{processor()}, Python {platform.python_version()}"
    Console().print(table(rows, machine))
    missed = [f"{r['name']}: {w}" for r in (*rows[:3], *rows[4:7]) for w in r["wrong"]]
    missed += [f"{r['name']}: median over {AIM} s" for r in rows[:2] if float(r["median"]) > AIM]
    if rows[3]["wrong"]:
        print(f"not from the axioms: {', '.join(rows[3]['wrong'])}")
    for line in missed:
        print(f"missed: {line}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
