"""Imports only go down the floors, and the core imports neither xDSL nor torch nor triton."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "unity_ir"

FLOORS = [
    {"errors", "messages", "budget", "version"},
    {"interrupts"},
    {"tdl"},
    {"forms", "ops"},
    {"pcg"},
    {"machine", "rules", "kernels"},
    {"plan"},
    {"cost"},
    {"simulate"},
    {"search", "models", "frontends"},
    {"sweep", "report"},
    {"dialects"},
    {"lowering", "interop"},
    {"passes"},
    {"universe"},
    {"api"},
    {"tools"},
]
"""From the ground up."""

CORE = {name for floor in FLOORS[: FLOORS.index({"dialects"})] for name in floor}

ALLOWED = {"frontends": ("torch",)}
"""What a part below the dialects reads from outside all the same."""


def imports(path: Path, names: bool = False) -> set[str]:
    """Every module a file imports, at the top or inside functions; with `names`, each name with its module instead."""
    found: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module:
            found.update([f"{node.module}.{alias.name}" for alias in node.names] if names else [node.module])
    return found


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def floor(part: str) -> int:
    return next(i for i, parts in enumerate(FLOORS) if part in parts)


@pytest.mark.slow
def test_imports_go_down():
    wrong: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for module in imports(path):
            root, _, rest = module.partition(".")
            part = rest.split(".")[0]
            up = root == "unity_ir" and part and part != own and floor(part) >= floor(own)
            outside = own in CORE and root in ("xdsl", "torch", "triton") and root not in ALLOWED.get(own, ())
            if up or outside:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert wrong == []


ROOMS = {
    "search": [
        {"layouts"},
        {"worker"},
        {"exact"},
        {"joint", "baselines", "tofu", "flexflow", "unity"},
        {"memory"},
        {"bounds", "recompute", "result"},
        {"choose", "strategy", "pipeline"},
        {"exchange", "offload"},
        {"strategies", "in_time", "throughput"},
        {"run", "explain"},
        {"with_stages"},
    ],
    "lowering": [
        {"runtime"},
        {"emit"},
        {"measure"},
    ],
    "kernels": [
        {"text"},
        {"triton", "pytorch"},
        {"launchers"},
    ],
}
"""The floors inside of packages that have rooms; a file at a package's top is a room of its own."""

INSIDE = {("search", "flexflow", "baselines")}
"""Arrows between rooms of one floor: a random walk starts from the plans people write by hand."""


@pytest.mark.parametrize("package", ROOMS)
def test_imports_go_down_inside_a_package(package: str):
    floors = ROOMS[package]
    height = {room: i for i, rooms in enumerate(floors) for room in rooms}
    for path in sorted((PACKAGE / package).rglob("*.py")):
        own = path.relative_to(PACKAGE / package).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for module in imports(path):
            parts = module.split(".")
            if parts[:2] != ["unity_ir", package] or len(parts) < 3 or parts[2] == own:
                continue
            other = parts[2]
            down = height[other] < height[own] or (package, own, other) in INSIDE
            assert down, f"{path.relative_to(PACKAGE)} imports {module}"


def test_no_files_import_each_other():
    """A circle of files is one idea that cannot be read from any end."""
    files = {
        ".".join(("unity_ir", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    waiting = {
        name: {
            found
            for module in imports(path, names=True)
            for found in [module if module in files else module.rpartition(".")[0]]
            if found in files and found != name
        }
        for name, path in files.items()
    }
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert not waiting, f"in or above a circle: {', '.join(sorted(waiting))}"
