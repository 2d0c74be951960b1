"""
`unity-rules`: makes, proves and shows substitutions.

    unity-rules generate --operators matmul,add,relu,concat,split --size 3 -o rules.pcg
    unity-rules import graph_subst.json -o rules.pcg

Each subcommand is a function of its options, registered in `SUBCOMMANDS`.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from unity_ir.errors import UnityError
from unity_ir.rules.research.generate.report import rows, summary
from unity_ir.rules.research.generate.run import GenerationReport, generate
from unity_ir.rules.research.generate.space import PARALLEL, Space
from unity_ir.rules.text import rule_text
from unity_ir.tools.command_line import Parser, exit_code
from unity_ir.tools.import_rules import import_collection, import_options
from unity_ir.tools.library_rules import SUBCOMMANDS as LIBRARY
from unity_ir.version import __version__

OPERATORS = "matmul,add,mul,relu,concat,split,transpose"
"""The operators of `generate` by default."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in text.split(",") if name))


def _generate_options(parser: ArgumentParser) -> None:
    parser.add_argument("--operators", default=OPERATORS, help=f"compute operators by name (default: {OPERATORS})")
    parser.add_argument(
        "--parallel", default=",".join(PARALLEL), help="parallel operators, or nothing for serial rules (default: all)"
    )
    parser.add_argument("--size", type=int, default=3, help="operators on a side, at most (default: %(default)s)")
    parser.add_argument("--variables", type=int, default=3, help="of each type (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the values tried (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes that prove (default: all cores)"
    )
    parser.add_argument("--state", type=Path, help="keep the state in a file, and go on from it")
    parser.add_argument("-o", "--output", type=Path, help="write the rules to a file, as text")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def _generate(options: Namespace) -> int:
    space = Space(
        _names(options.operators),
        _names(options.parallel),
        size=options.size,
        variables=options.variables,
        seed=options.seed,
    )
    if options.jobs < 1:
        raise UnityError("unity-rules: --jobs is 1 or more")
    begin = perf_counter()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        report = generate(space, options.state, options.jobs, progress)
    if options.output is not None:
        head = (
            f"// Generated over {', '.join((*space.operators, *space.parallel))}: {space.size} operators on a side.\n\n"
        )
        options.output.write_text(head + "\n\n".join(map(rule_text, report.rules)) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(summary(report)))
    else:
        _print(report, perf_counter() - begin)
    return 0


def _print(report: GenerationReport, seconds: float) -> None:
    """Print the counts of a run next to the published ones."""
    table = Table(title=f"{', '.join(report.space.operators)}: size {report.space.size}, {seconds:.1f} s")
    table.add_column("stage")
    for heading in ("here", "TASO", "Unity"):
        table.add_column(heading, justify="right")
    for row in rows(report):
        table.add_row(*row)
    Console().print(table)


SUBCOMMANDS: Mapping[str, tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int]]] = {
    "generate": ("find all rules up to a size, and prove them", _generate_options, _generate),
    **LIBRARY,
    "import": ("read a collection of TASO's or FlexFlow's rules, and prove them", import_options, import_collection),
}
"""
Per subcommand, its help, the function that adds its options, and the function that runs it and returns the exit code.
"""


def _parser() -> Parser:
    parser = Parser(prog="unity-rules", description="Makes, proves and shows substitutions.")
    parser.add_argument("--version", action="version", version=f"unity-rules {__version__}")
    commands: Any = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, (text, options, _) in SUBCOMMANDS.items():
        options(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run `unity-rules` on the arguments `argv` (None: those of the process); return the exit code. Errors in the input
    print one line on stderr: exit code 1.
    """
    again = "stopped; with the same --state it goes on from there"
    return exit_code(_parser(), lambda options: SUBCOMMANDS[options.command][2](options), argv, again)


if __name__ == "__main__":
    sys.exit(main())
