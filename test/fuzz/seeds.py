"""What is mutated: texts of the tree, of `corpus/`, and of random graphs, serial, parallel and lowered."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")

LARGEST = 6000
"""Characters of a seed, at most: small texts are read fast, and have the same faults."""


def _files(*suffixes: str) -> Iterator[Path]:
    folders = (CORPUS, *(ROOT / name for name in ("test/filecheck", "test/unit", "examples", "unity_ir")))
    for folder in folders:
        yield from sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file())


def _parts(text: str) -> Iterator[str]:
    """The modules of a file, without the lines that say what a test expects."""
    for part in text.split("// -----"):
        lines = (line for line in part.split("\n") if not re.match(r"\s*//", line))
        if found := "\n".join(lines).strip():
            yield found + "\n"


@cache
def modules() -> tuple[str, ...]:
    """Modules of the tree."""
    texts = (part for path in _files(".pcg", ".mlir") for part in _parts(path.read_text("utf-8", "replace")))
    return tuple(dict.fromkeys(t for t in texts if len(t) < LARGEST))


@cache
def rule_texts() -> tuple[str, ...]:
    """Rules, each by itself."""
    whole = "\n".join(path.read_text("utf-8") for path in _files(".pcg") if "rules" in path.parts)
    found = re.split(r"^(?=subst\.rule)", re.sub(r"^//.*\n", "", whole, flags=re.MULTILINE), flags=re.MULTILINE)
    return tuple(t.strip() + "\n" for t in found if t.startswith("subst.rule") and len(t) < LARGEST)


@cache
def machine_texts() -> tuple[str, ...]:
    return tuple(path.read_text("utf-8") for path in _files(".toml"))


@cache
def collections() -> tuple[str, ...]:
    """Foreign rules as JSON, a few at a time."""
    rules = json.loads((ROOT / "test/unit/rules/foreign/collection.json").read_text("utf-8"))["rule"]
    own = [path.read_text("utf-8") for path in _files(".json") if CORPUS in path.parents and "rule" in path.name]
    return (*own, *(json.dumps({"rule": [rule]}) for rule in rules))


def taso_bytes(random: Random) -> bytes:
    """A rule in TASO's protobuf, with numbers that may mean nothing there."""
    from taso_rules import Op, collection, concat, convolution, matmul, rule, split

    def some(*usual: int) -> int:
        return random.choice((*usual * 4, -1, 0, 3, 99, 2**31 - 1, -(2**31), 2**63))

    source = [
        *random.choice(([matmul(-1, -4, some(0, 2))], [convolution(-7, -10, PAD=some(0, 1), KERNEL_H=some(3, 5))])),
        random.choice((Op("RELU", (0,)), split(some(0, 1), 0), Op("EW_ADD", (0, some(-1, 0))))),
    ]
    target = [concat(some(0, 1), some(2, 4), -1, some(-2, -7)), Op(random.choice(("RELU", "MUL", "LINEAR")), (0,))]
    return collection(rule(source, random.choice((source, target)), (1, some(0, 1), 1, some(0))))


TABLES = (
    json.dumps(
        {
            "about": {"machine's device": "V100-SXM2-16GB", "device": "none"},
            "seconds": {"relu_4x4 f32": {"triton": 1e-6, "torch": 2e-6}, "matmul": {"torch": 1.5}},
            "kernels": {"relu_4x4 f32": {"operator": "relu", "sizes": [4, 4, 4, 4]}},
        },
        indent=1,
    ),
)
"""Tables of `unity-tune`."""


def profile_bytes(random: Random, folder: Path) -> bytes:
    """A profile with some values other than they should be."""
    from unity_ir.machine.profile import CollectiveRow, KernelRow, open_profile

    path = folder / "seed.sqlite"
    path.unlink(missing_ok=True)
    with open_profile(path, create={"device": "CPU", "host": "here"}) as file:
        file.add_kernel(KernelRow("relu", (4, 4), 1, "pointwise", "f32", 16, 128, 1e-6, 0.1, 3, "2026"))
        file.add_kernel(KernelRow("matmul", (4, 4, 4, 4), 2, "matmul", "f32", 128, 192, 2e-6, 0.1, 3, "2026"))
        file.add_collective(CollectiveRow("all_reduce", 2, 64, 2, 1e-5, 0.1, 3, "2026"))
    connection = sqlite3.connect(path)
    tables = {
        "kernels": ("operator", "sizes", "ranks", "kind", "dtype", "flops", "bytes", "seconds", "spread", "measured"),
        "collectives": ("kind", "members", "bytes", "ranks", "seconds", "measured"),
        "about": ("key", "value"),
    }
    values = (0, -1, 1.5, 2**62, 1e300, "x", "", "1 2", "９", "9" * 5000, b"\xff\xfe", "\u202e\x00", None, float("inf"))
    for _ in range(random.choice((0, 1, 1, 2))):
        table = random.choice(list(tables))
        column, value = random.choice(tables[table]), random.choice(values)
        as_text = random.random() < 0.3
        into = f"cast({'?'} as text)" if as_text else "?"
        try:
            with connection:
                connection.execute(f"update {table} set {column} = {into}", (value,))
        except sqlite3.Error:
            pass
    if random.random() < 0.1:
        connection.execute(
            random.choice(("drop table kernels", "pragma user_version = 7", "pragma application_id = 1"))
        )
        connection.commit()
    connection.close()
    return path.read_bytes()


@cache
def graph_texts(seed: int, count: int) -> tuple[str, ...]:
    """Modules of random graphs: serial, placed on a machine, differentiated, and lowered; now and then generic."""
    from io import StringIO

    from graphs import random_cnn, random_graph
    from small import small
    from xdsl.context import Context
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.printer import Printer
    from xdsl.utils.exceptions import DiagnosticException

    from unity_ir.dialects.convert import from_graph
    from unity_ir.errors import UnityError
    from unity_ir.machine import load
    from unity_ir.passes.differentiate import Differentiate
    from unity_ir.passes.fuse_collectives import FuseCollectives
    from unity_ir.passes.lower_to_spmd import LowerToSpmd
    from unity_ir.search.baselines.random_plan import sample

    random, texts = Random(seed), list[str]()
    while len(texts) < count:
        grown = random.choice(
            (
                lambda: random_graph(random, random.randrange(1, 7), dtype="f32"),
                lambda: small(random.randrange(1000), random.randrange(1, 4)),
                lambda: random_cnn(random, random.randrange(1, 4)),
            )
        )()
        machine = random.choice(("box:2", "box:4", "2gpu", "summit:2"))
        module = ModuleOp([])
        try:
            if random.random() < 0.6:
                grown = sample(grown, load(machine), random.randrange(1000))
            module = ModuleOp([from_graph(grown)])
            for step in (Differentiate(), FuseCollectives(), LowerToSpmd())[: random.choice((0, 0, 1, 2, 3, 3))]:
                step.apply(Context(), module)
        except (UnityError, DiagnosticException):
            pass
        out = StringIO()
        Printer(stream=out, print_generic_format=random.random() < 0.3).print_op(module)
        texts.append(out.getvalue() + "\n")
    return tuple(texts)
