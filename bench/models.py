"""
Measure the seconds to build every model of the zoo at full size, and to read its text.

    python bench/models.py [MODEL ..] [--json FILE]

Each runs in a process of its own, so that every cache is cold. Imports are not counted; for a graph, parsing the
operators' TDL lines is. Building a compact graph verifies it. Text is parsed into operations, which are verified and
converted to a compact graph. Exits with code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

AIMS = {"inception_v3": {"graph": 0.2, "text": 2.0}}
"""Seconds."""


def build(name: str, text: Path) -> dict[str, float]:
    """Return the seconds to build a model in this process; its text is written to a file."""
    from xdsl.dialects.builtin import ModuleOp

    from unity_ir.dialects.convert import from_graph

    module = import_module(f"unity_ir.models.{name}")
    start = time.perf_counter()
    graph = module.build()
    seconds = time.perf_counter() - start
    text.write_text(str(ModuleOp([from_graph(graph)])))
    return {"nodes": len(graph.nodes()), "graph": seconds}


def read(name: str, text: Path) -> dict[str, float]:
    """Return the seconds to read a model's text in this process."""
    from xdsl.context import Context
    from xdsl.parser import Parser
    from xdsl.universe import Universe

    from unity_ir.dialects.convert import pcg_functions, to_graph

    context = Context()
    for dialect, factory in Universe.get_multiverse().all_dialects.items():
        context.register_dialect(dialect, factory)
    for dialect in ("builtin", "func", "pcg", "machine"):
        context.load_registered_dialect(dialect)
    start = time.perf_counter()
    module = Parser(context, text.read_text(), name).parse_module()
    module.verify()
    (function,) = pcg_functions(module)
    to_graph(function)
    return {"text": time.perf_counter() - start}


def alone(what: str, name: str, text: Path) -> dict[str, float]:
    """What `build` or `read` gives in a new process."""
    done = subprocess.run([sys.executable, __file__, what, name, str(text)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} x {next(named, platform.machine())}"


def main() -> int:
    from unity_ir.models import names

    parser = argparse.ArgumentParser(description="Times to build and to read the models of the zoo.")
    parser.add_argument("models", nargs="*", default=names())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    table = Table(title=f"{processor()}, Python {platform.python_version()}")
    for heading in ("model", "nodes", "graph, s", "text, s", "aims, s"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "model.pcg"
        for name in options.models:
            found = {**alone("build", name, text), **alone("read", name, text)}
            aims = AIMS.get(name, {})
            missed |= any(found[what] > seconds for what, seconds in aims.items())
            rows.append({"model": name, **found, "aims": aims})
            seconds = (f"{found[what]:.3f}" for what in ("graph", "text"))
            table.add_row(name, str(found["nodes"]), *seconds, ", ".join(map(str, aims.values())))
    Console().print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"processor": processor(), "python": platform.python_version(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    if sys.argv[1:2] in (["build"], ["read"]):
        print(json.dumps({"build": build, "read": read}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))))
    else:
        sys.exit(main())
