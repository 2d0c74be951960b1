"""`unity-rules list`, `show`, `prove` and `check`: print and prove the rules of the library or of a file."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from unity_ir.errors import UnityError
from unity_ir.ops import operators
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules import library
from unity_ir.rules.pattern import ProofRecord, Substitution
from unity_ir.rules.proof.obligations import obligations
from unity_ir.rules.proof.prove import Proof, prove
from unity_ir.rules.text import rule_text, side_text
from unity_ir.rules.trust import LIBRARY, digest, verdicts_text
from unity_ir.tools.certificates import SUBCOMMANDS as CERTIFICATES
from unity_ir.tools.certificates import certify

Subcommand = tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int]]
"""
A subcommand: its help, the function that adds its options, and the function that runs it and returns the exit code.
"""


def _rules(path: str | None) -> tuple[Substitution, ...]:
    return library.all_substitutions() if path is None else library.read_rules(path)


def _file_option(parser: ArgumentParser) -> None:
    parser.add_argument("--file", help="rules of a file instead of the library's")


def _list_options(parser: ArgumentParser) -> None:
    _file_option(parser)
    parser.add_argument("--operator", help="only those with this operator on either side")
    parser.add_argument("--name", default="", help="only those whose name holds this text")
    parser.add_argument("--exact", action="store_true", help="only those whose sides round alike")


def _list(options: Namespace) -> int:
    """Print every rule in a line: before -> after."""
    if options.operator is not None and options.operator not in _known_operators():
        raise UnityError(f"unity-rules: no operator {options.operator!a}; docs/operator_table.md has them all")
    table = Table(box=None, pad_edge=False)
    for heading in ("rule", "before", "after"):
        table.add_column(heading, overflow="fold")
    shown = 0
    for rule in _rules(options.file):
        used = {o.op for o in rule.operations((*rule.source, *rule.target))}
        wanted = options.name in rule.name and (rule.exact or not options.exact)
        if wanted and options.operator in (None, *used):
            table.add_row(*map(escape, (rule.name, side_text(rule.source), side_text(rule.target))))
            shown += 1
    if shown:
        Console().print(table)
    print(f"{shown} rules")
    return 0


def _known_operators() -> set[str]:
    return {*operators(), *PARALLEL_OPERATORS}


def _show_options(parser: ArgumentParser) -> None:
    parser.add_argument("rule", help="a rule, or a case of one")
    _file_option(parser)


def _show(options: Namespace) -> int:
    """Print a rule as text, a summary in a line, and whether it is proved."""
    known = library.group_cases(_rules(options.file))
    for case in library.find(options.rule, known).cases:
        print(rule_text(case))
        print(f"// {side_text(case.source)}  ->  {side_text(case.target)}")
        print(f"// {_words(prove(case))}\n")
    return 0


CLAIM = "for all sizes, degrees, attributes and element types at which both sides are well typed, gradients included"
"""The statement that a proof proves."""


def _words(proof: Proof) -> str:
    detail = f": {proof.detail}" if proof.detail else f" {CLAIM}"
    return f"{proof.verdict}{detail} ({1000 * proof.seconds:.0f} ms)"


def _prove_options(parser: ArgumentParser) -> None:
    parser.add_argument("file", help="a file of rules")
    parser.add_argument(
        "-o", "--output", type=Path, help="write those that are proved, each with the record of its proof"
    )


def _prove(options: Namespace) -> int:
    """
    Prove the rules of a file. The exit code is 1 if any of them may not be applied before a graph is differentiated.
    """
    proofs = [(rule, prove(rule)) for rule in library.read_rules(options.file)]
    for rule, proof in proofs:
        print(f"{rule.name}: {_words(proof)}")
    if options.output is not None:
        texts = [
            rule_text(replace(rule, proof=ProofRecord(proof.verdict, round(proof.seconds, 3), (), digest(rule))))
            for rule, proof in proofs
            if proof.trainable
        ]
        options.output.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return 0 if all(proof.trainable for _, proof in proofs) else 1


def _check_options(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print counts and times as JSON")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help=f"write the verdicts on the library's rules: its {LIBRARY}"
    )
    parser.add_argument("--certificates", action="store_true", help="have each proof checked by the small checker, too")


def _check(options: Namespace) -> int:
    """Prove the library again, and the obligation behind every parallelization rule of every operator."""
    console = Console(stderr=True)
    begin = perf_counter()
    found: dict[str, list[tuple[str, Proof]]] = {"rules of the library": [], "parallelization of operators": []}
    quiet = not console.is_terminal
    proofs = [
        (r, prove(r))
        for r in track(library.all_substitutions(), "library", console=console, transient=True, disable=quiet)
    ]
    found["rules of the library"] = [(rule.name, proof) for rule, proof in proofs]
    if options.write is not None:
        options.write.write_text(verdicts_text(proofs), encoding="utf-8")
    for operator in track(operators().values(), "operators", console=console, transient=True, disable=quiet):
        found["parallelization of operators"] += [(f"{o.operator}: {o.about}", o.proof) for o in obligations(operator)]
    failed = [(name, proof) for those in found.values() for name, proof in those if not proof.trainable]
    counts = {what: dict(Counter(p.verdict for _, p in those)) for what, those in found.items()}
    if options.certificates:
        certified, without = certify(proofs)
        counts["certificates"] = {what: n for what, n in certified.items() if n}
        failed += without
    seconds = perf_counter() - begin
    if options.json:
        names = [{"name": name, "verdict": p.verdict, "detail": p.detail} for name, p in failed]
        print(json.dumps({"counts": counts, "seconds": seconds, "not proved": names}))
    else:
        for what, verdicts in counts.items():
            print(f"{what}: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}")
        for name, proof in failed:
            print(f"{name}: {_words(proof)}")
        print(f"{seconds:.1f} s")
    return 1 if failed else 0


SUBCOMMANDS: dict[str, Subcommand] = {
    "list": ("list rules, each in a line", _list_options, _list),
    "show": ("print a rule, and whether it is proved", _show_options, _show),
    "prove": ("prove the rules of a file", _prove_options, _prove),
    "check": ("prove the library and all parallelization rules again", _check_options, _check),
    **CERTIFICATES,
}
"""The subcommands of `unity-rules` on rules of the library or of a file, by name."""
