"""
Writes a certificate of every rule that the prover proves, has the small checker check it, and counts those that have
none, with the reason: of the library, TASO's axioms and statements on parallel operators, XLA's simplifier, PyTorch's
Inductor, TASO's collection and FlexFlow's.

    python bench/certificates.py [COLLECTION ..] [--taso FILE] [--flexflow FILE] [--json FILE]

Seconds are of the processor. A rule without a certificate is listed with what the search for steps was left with. Exits
with code 1 where there is one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from time import process_time
from typing import Any

from compiler_rules import COLLECTIONS, rules
from models import processor
from rich.console import Console
from rich.table import Table
from taso_axioms.parallel import statements
from taso_axioms.taso import axioms

from unity_ir.rules.certificate.replay import check_certificate
from unity_ir.rules.certificate.terms import Refused
from unity_ir.rules.certificate.write import Unwritten, write_certificate
from unity_ir.rules.library import all_substitutions
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.research.foreign import PROVED, import_rules
from unity_ir.rules.trust import proof_of

Proved = Iterator[tuple[str, Substitution, bool]]
"""The name of each rule that is proved, the rule, and whether its gradients are."""

REASON = 300
"""Characters of a reason that are kept."""


def proved(of: Iterable[Substitution]) -> Proved:
    for rule in of:
        proof = proof_of(rule)
        if proof.forward:
            yield rule.name, rule, proof.proved


def foreign(path: Path) -> Proved:
    """Those of a collection of TASO's or FlexFlow's, which may be compressed."""
    if path.suffix != ".gz":
        yield from _imported(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.stem
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        yield from _imported(plain)


def _imported(path: Path) -> Proved:
    for found in import_rules(path).rules:
        if found.verdict in PROVED and found.rule is not None:
            yield found.name, found.rule, found.verdict == "proved"


def certified(of: Proved) -> dict[str, Any]:
    """Write and check a certificate of each rule; return the counts, sizes and seconds, and the reasons of the rest."""
    row: dict[str, Any] = dict.fromkeys(("rules", "certificates", "values only", "steps", "bytes"), 0)
    row |= {"write": 0.0, "check": 0.0, "slowest write": 0.0, "slowest check": 0.0, "without": {}}
    laws = Counter[str]()
    for name, rule, differentiable in of:
        row["rules"] += 1
        begin = process_time()
        try:
            text = json.dumps(write_certificate(rule, differentiable))
        except Unwritten as reason:
            row["without"][name] = str(reason)[:REASON]
            continue
        finally:
            took = process_time() - begin
            row["write"] += took
            row["slowest write"] = max(row["slowest write"], took)
        begin = process_time()
        try:
            check_certificate(rule, json.loads(text))
        except Refused as reason:
            row["without"][name] = f"refused: {reason}"[:REASON]
            continue
        took = process_time() - begin
        row["check"] += took
        row["slowest check"] = max(row["slowest check"], took)
        row["certificates"] += 1
        row["values only"] += not differentiable
        laws.update(steps(json.loads(text)))
        row["bytes"] += len(text)
    row["laws"] = dict(laws.most_common())
    row["steps"] = laws.total()
    return row


def steps(of: Any) -> Iterator[str]:
    """Yield the law of every step of a certificate, or the axiom that it uses."""
    if isinstance(of, dict):
        if "law" in of:
            yield of.get("axiom", of["law"])
        of = list(of.values())
    for inner in of if isinstance(of, list) else ():
        yield from steps(inner)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("collections", nargs="*", help="only these")
    parser.add_argument("--taso", type=Path, help="TASO's collection, graph_subst.pb")
    parser.add_argument("--flexflow", type=Path, help="FlexFlow's collection, graph_subst_3_v2.json, or .json.gz")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file, beside others there")
    options = parser.parse_args()
    found: dict[str, Callable[[], Proved]] = {
        "library": lambda: proved(list(all_substitutions())),
        "axioms": lambda: proved([a.rule for a in axioms()]),
        "parallel": lambda: proved([a.rule for a in statements()]),
        **{name: lambda name=name: proved(rules(name)) for name in COLLECTIONS},
    }
    for name, path in (("taso", options.taso), ("flexflow", options.flexflow)):
        if path is not None:
            found[name] = lambda path=path: foreign(path)
    chosen = options.collections or list(found)
    rows: dict[str, dict[str, Any]] = {name: certified(found[name]()) for name in chosen}
    machine = f"{processor()}, Python {platform.python_version()}"
    Console().print(table(rows, machine))
    for name, row in rows.items():
        for rule, reason in row["without"].items():
            print(f"{name}: {rule}: {reason}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(options.json.read_text("utf-8"))["collections"] if options.json.exists() else {}
        report = {"machine": machine, "collections": {**before, **rows}}
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return int(any(row["without"] for row in rows.values()))


def table(rows: Mapping[str, Mapping[str, Any]], machine: str) -> Table:
    """Return the results as a table."""
    out = Table(title=machine)
    out.add_column("", no_wrap=True)
    for heading in ("proved", "certificates", "values only", "steps", "kB", "written s", "checked s", "slowest ms"):
        out.add_column(heading, justify="right")
    for name, row in rows.items():
        counts = (str(row[k]) for k in ("rules", "certificates", "values only", "steps"))
        seconds = (f"{row['write']:.1f}", f"{row['check']:.1f}", f"{1000 * row['slowest check']:.0f}")
        out.add_row(name, *counts, str(row["bytes"] // 1000), *seconds)
    return out


if __name__ == "__main__":
    sys.exit(main())
