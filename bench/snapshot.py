"""
Hash the plans and programs of the zoo by every strategy, to check that a refactoring changes none.

    python bench/snapshot.py --json before.json          in the tree before
    python bench/snapshot.py --against before.json       in the tree after; exits with code 1 where any differ

Models are shrunken and the machine has 8 devices; `--full` adds the joint search and data parallelism at full size. The
search's processor seconds of both trees are compared, too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unity_ir.tools.unity_opt import main as unity_opt

STRATEGIES = (
    "joint",
    "sequential",
    "unity:budget=3",
    "mcmc:budget=300",
    "data-parallel",
    "fsdp",
    "expert",
    "tofu",
    "tofu-all-row",
    "tofu-spartan",
    "tofu-equal-chop",
    "tofu-no-reduction",
    "random",
)
"""Strategies, each with its options after a colon."""
MACHINE = "dgx-h100"


def called(*arguments: str) -> str:
    """Run `unity-opt` in this process; return its exit code and what it prints on stderr, as one text."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = unity_opt(list(arguments))
        except SystemExit as stop:
            code = stop.code
    return f"{code} {said.getvalue()}"


def digest(path: Path, said: str) -> str:
    """Hash a file (of a program its code, without docstrings and comments), or what was said where there is none."""
    text = path.read_text() if path.exists() else said
    if path.suffix == ".py" and path.exists():
        text = code(text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code(text: str) -> str:
    """Return a program without docstrings, strings below constants, and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant("")
    return ast.dump(tree)


def snapshot(model: str, strategy: str, machine: str) -> tuple[str, str, float]:
    """
    Return hashes of the plan and of its program (of the messages where there is none), and the search's processor
    seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, program = Path(folder, "plan.pcg"), Path(folder, "train.py")
        start = time.process_time()
        search = "--search=" + strategy.replace(":", ",")
        said = called(f"--model={model}", search, f"--machine={machine}", "-o", str(plan))
        seconds = time.process_time() - start
        if not plan.exists():
            return digest(plan, said), "", seconds
        return digest(plan, said), digest(program, called(str(plan), "-t", "triton", "-o", str(program))), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the hashes to a file")
    parser.add_argument("--against", type=Path, help="compare with the hashes in a file")
    parser.add_argument("--full", action="store_true", help="models at full size as well")
    parser.add_argument("--models", default="", help="only these, with commas between them")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="only these, with commas between them")
    args = parser.parse_args()

    sys.path[:0] = [str(Path(__file__).parents[1] / "test" / folder) for folder in ("helpers", "programs")]
    from zoo_plans import SIZES

    found: dict[str, tuple[str, str, float]] = {}
    for name, keys in SIZES.items():
        if args.models and name not in args.models.split(","):
            continue
        small = ",".join([name, *(f"{key}={value}" for key, value in keys.items())])
        for strategy in args.strategies.split(","):
            found[f"{name} {strategy}"] = snapshot(small, strategy, MACHINE)
            if args.full and strategy in ("joint", "data-parallel"):
                found[f"{name} {strategy} full"] = snapshot(name, strategy, MACHINE)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if not args.against:
        Console().print(f"{len(found)} plans, {sum(s for _, _, s in found.values()):.1f} s of processor time")
        return 0
    before: dict[str, tuple[str, str, float]] = json.loads(args.against.read_text())
    table = Table("plan", "same plan", "same program", "seconds before", "after")
    both = [key for key in found if key in before]
    differ = [key for key in both if tuple(before[key][:2]) != found[key][:2]]
    for key in differ:
        old, new = before[key], found[key]
        table.add_row(key, str(old[0] == new[0]), str(old[1] == new[1]), f"{old[2]:.2f}", f"{new[2]:.2f}")
    times = [sum(side[key][2] for key in both) for side in (before, found)]
    table.add_row("all", f"{len(both) - len(differ)} of {len(both)} alike", "", *(f"{t:.1f}" for t in times))
    Console().print(table)
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
