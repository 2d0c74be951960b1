"""
`unity-sweep`: finds the best plan of a training step at every point of a grid of machines and models, with its gap.

    unity-sweep llama3_8b --machine dgx-h100 --over gpus=8..512*2 --over batch=512 --mixed-precision bf16 \\
        --optimizer adamw --store out/sweep --csv sweep.csv --plot sweep.svg
    unity-sweep llama3_8b,batch=64 --machine dgx-h100 --machine dgx-b200 --over gpus=64 --over bandwidth.nodes=25G,50G

Points that are in the store are not searched again, so a stopped sweep goes on where it was.
"""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from unity_ir.errors import UnityError
from unity_ir.messages import tell
from unity_ir.sweep.grid import Grid
from unity_ir.sweep.knobs import MACHINE, Knob, read_knob
from unity_ir.sweep.picture import HEIGHTS, check_picture, draw
from unity_ir.sweep.point import FAMILY, Answer
from unity_ir.sweep.report import csv_text, json_text, table_of
from unity_ir.sweep.run import How, check_how, sweep
from unity_ir.sweep.store import Store
from unity_ir.tools.command_line import Parser, check_folder, exit_code
from unity_ir.version import __version__


class _Each(Action):
    """Collects the values of an option that may be given several times."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None):
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])


def _parser() -> Parser:
    parser = Parser(
        prog="unity-sweep", description="Finds the best plan at every point of a grid of machines and models."
    )
    parser.add_argument("--version", action="version", version=f"unity-sweep {__version__}")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a model of the zoo, such as llama3_8b,layers=4")
    parser.add_argument(
        "--machine", action=_Each, default=[], metavar="M", help="a preset or .toml file; once or several times"
    )
    parser.add_argument(
        "--over",
        action=_Each,
        default=[],
        metavar="KNOB=VALUES",
        help=f"vary a knob: {', '.join(MACHINE)}, or a key of the model (batch, sequence); 8,16 or 8..512*2 or 25G",
    )
    parser.add_argument(
        "--mixed-precision", metavar="TYPE", help="compute in bf16 or f16 beside f32 masters, as for unity-opt"
    )
    parser.add_argument("--optimizer", default="sgd", metavar="NAME", help="plan for its state (default sgd)")
    parser.add_argument("--stages", action="store_true", help="try pipelines, too")
    parser.add_argument(
        "--joint",
        choices=("none", "corners", "all"),
        default="none",
        help="run the joint search as well: at the slowest and fastest point of each mesh, or at all (default none)",
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="processes")
    parser.add_argument("--store", type=Path, metavar="DIR", help="folder of points found, to go on from")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the points as CSV")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the points as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them: .svg, .png or .pdf (needs matplotlib)")
    parser.add_argument("--x", metavar="KNOB", help="the knob along x (default: the last that varies)")
    parser.add_argument("--y", choices=tuple(HEIGHTS), default="seconds", help="what is plotted (default seconds)")
    return parser


def run(options: Namespace) -> int:
    """
    Run `unity-sweep` with its parsed options: search all points of the grid, write the files that the options name, and
    print a table; return the exit code. Raises `UnityError` for an impossible grid, before anything is searched.
    """
    if not options.machine:
        raise UnityError("unity-sweep: no machine; add --machine dgx-h100")
    if options.jobs < 1:
        raise UnityError(f"unity-sweep: --jobs is {options.jobs}; it must be 1 or more")
    how = How(options.mixed_precision, options.optimizer, options.stages, options.joint)
    check_how(how)
    knobs: list[Knob] = [read_knob(text) for text in options.over]
    grid = Grid(tuple(options.models), tuple(options.machine), tuple(knobs), how.mixed)
    points = grid.points()
    written = {"--csv": options.csv, "--json": options.json, "--plot": options.plot}
    files = [f for f in written.values() if f is not None]
    for flag, file in written.items():
        if file is not None:
            check_folder("unity-sweep", flag, file)
    if len({os.path.realpath(f) for f in files}) < len(files):
        raise UnityError("unity-sweep: two outputs are one file; name two files")
    if options.plot is not None:
        check_picture(options.plot, [k.name for k in knobs if len(k.values) > 1], options.x, options.y)
    store = Store(options.store, asdict(how))
    store.prepare()
    done = 0

    def progress(found: Sequence[Answer]) -> None:
        nonlocal done
        done += len(found)
        tell(f"unity-sweep: {done} points found, the last {found[-1].point.title}")

    answers = sweep(points, how, store, options.jobs, progress)
    if options.csv is not None:
        options.csv.write_text(csv_text(answers), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json_text(answers, asdict(how)), encoding="utf-8")
    if options.plot is not None:
        draw(answers, options.plot, options.x, options.y)
    Console(width=None if sys.stdout.isatty() else 200).print(table_of(answers))
    print(f"gaps are to a bound of {FAMILY}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run `unity-sweep` on the arguments `argv` (None: those of the process); return the exit code. Errors in the input
    print one line on stderr: exit code 1.
    """
    return exit_code(_parser(), run, argv, "interrupted; with --store the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
