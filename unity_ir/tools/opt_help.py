"""
Print `unity-opt --help`: this project's options, passes and targets, a line each; `--help-all` adds xDSL's.

A pass's line is the first of its module's docstring, read from the source, so that no pass is imported.
"""

from __future__ import annotations

import ast
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unity_ir.passes import PASSES, TARGETS

USAGE = """\
usage: unity-opt [options] [model.pcg]

Read a module, search for a plan, apply passes, print the result.

    unity-opt model.pcg --search --machine=summit:4 --stats         # a plan, and what it costs
    unity-opt model.pcg --search --machine=2gpu -t triton -o train.py
    unity-opt model.pcg -p pcg-differentiate,lower-pcg-to-spmd
"""

COMMON = {
    "-p PASSES": "passes to apply after the search, with arguments: -p 'pcg-differentiate{optimizer=adam},pcg-erase'",
    "-t TARGET": "what to print, with arguments: -t 'triton{matmul=torch}'; by default the module as text",
    "-o FILE": "write to a file instead of standard output",
    "-f pcg": "what the input is, where its name does not end in .pcg or .mlir",
    "--print-op-generic": "print MLIR's generic form",
    "--print-between-passes": "print the module between passes",
    "--split-input-file": "the input is several modules with lines `// -----` between them",
    "--version": "print the versions of unity-ir and xDSL",
    "--help": "print this",
    "--help-all": "print every option in full, and xDSL's passes and targets, too",
}
"""Options of xDSL's driver that most users need, with help."""


class HelpAll(Action):
    """Argparse action that prints the full help, with every option, and exits."""

    def __init__(self, full: Callable[[], str], **kwargs: Any):
        super().__init__(nargs=0, **kwargs)
        self.full = full

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        print(self.full(), end="")
        parser.exit()


def add_help(parser: ArgumentParser, own: Sequence[Action]) -> None:
    """
    Make `--help` of a parser short, and add `--help-all` with the full text. The short one lists this project's options
    (`own`), passes and targets.
    """
    full = parser.format_help
    parser.add_argument("--help-all", action=HelpAll, full=full, help="show this")
    parser.format_help = lambda: _short_help(own)


def _short_help(own: Sequence[Action]) -> str:
    """
    Return the text of `unity-opt --help`: the options `own` (each with its help text up to a semicolon), the passes and
    targets, and the most needed options of xDSL's driver.
    """
    options = {f"{a.option_strings[0]} {a.metavar or ''}".rstrip(): (a.help or "").partition(";")[0] for a in own}
    parts = (
        USAGE,
        _section("options", options),
        _section("passes, for -p", {name: summary(path) for name, path in PASSES.items()}),
        _section("targets, for -t", {name: summary(path) for name, path in TARGETS.items()}),
        _section("options of xDSL's driver", COMMON),
    )
    return "\n".join(parts)


def summary(path: str) -> str:
    """
    Return the first line of the docstring of a pass's or target's module, without its name and the full stop; the
    module is not imported.

    `path` is `module:class`. Given `unity_ir.passes.erase:Erase`, returns `the serial graph that a parallel one stands
    for`.
    """
    spec = find_spec(path.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].partition(": ")[2].rstrip(".")


def _section(title: str, lines: Mapping[str, str]) -> str:
    left = max(map(len, lines))
    return "\n".join([f"{title}:", *(f"  {name:{left}}  {text}" for name, text in lines.items())]) + "\n"
