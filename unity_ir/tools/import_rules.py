"""`unity-rules import`: reads a rule collection of TASO or FlexFlow, and reports which of its rules are proved."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unity_ir.errors import UnityError
from unity_ir.messages import printable, tell
from unity_ir.rules.check import check
from unity_ir.rules.pattern import ProofRecord, Substitution
from unity_ir.rules.research.foreign import PROVED, ImportedRule, import_rules
from unity_ir.rules.text import rule_text
from unity_ir.rules.trust import digest


def import_options(parser: ArgumentParser) -> None:
    """
    Add the options of `unity-rules import` to an argparse parser; `import_collection` reads what they are parsed to.
    """
    parser.add_argument("collection", type=Path, help="a rule collection: TASO's protobuf (.pb) or FlexFlow's JSON")
    parser.add_argument("--all", action="store_true", help="list every rule, not only those that are not proved")
    parser.add_argument("--seed", type=int, default=0, help="of the values tried (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="write the proved rules to a file, as text")
    parser.add_argument("--json", action="store_true", help="print verdicts as JSON")


def import_collection(options: Namespace) -> int:
    """
    Run `unity-rules import` with its parsed options: read a rule collection of TASO or FlexFlow, prove its rules, print
    the verdicts, and write the proved ones to the file of `-o`; return the exit code, 0.

    Raises `UnityError` where the file is no rule collection.
    """
    report = import_rules(options.collection, options.seed)
    if options.output is not None:
        proved = [_recorded(r, r.rule) for r in report.rules if _applies(r) and r.rule is not None]
        text = "\n\n".join(map(rule_text, proved))
        options.output.write_text(f"// The rules of {options.collection.name} that are proved.\n\n{text}\n", "utf-8")
        tell(f"{options.output}: {len(proved)} rules that are proved of all they say, and rewrite something")
    if options.json:
        rules = [{"name": r.name, "verdict": r.verdict, "detail": r.detail, "seconds": r.seconds} for r in report.rules]
        print(json.dumps({"counts": report.counts, "rules": rules}))
        return 0
    table = Table(title=", ".join(f"{n} {verdict}" for verdict, n in report.counts.items()))
    for heading in ("rule", "verdict", "why"):
        table.add_column(heading, no_wrap=heading != "why")
    for rule in report.rules:
        if options.all or rule.verdict not in PROVED:
            table.add_row(*(escape(printable(text)) for text in (rule.name, rule.verdict, rule.detail)))
    Console().print(table)
    return 0


def _applies(imported: ImportedRule) -> bool:
    """
    Return whether a rule is proved with all that it says, its sides are not the same, and its target is well typed
    wherever its source is: some of FlexFlow's divide a dim by a degree that only their own sizes are multiples of.
    """
    rule = imported.rule
    if imported.verdict not in PROVED or imported.loses or rule is None or not rule.rewrites:
        return False
    try:
        check(rule)
    except UnityError:
        return False
    return True


def _recorded(imported: ImportedRule, rule: Substitution) -> Substitution:
    return replace(rule, proof=ProofRecord(imported.verdict, round(imported.seconds, 3), (), digest(rule)))
