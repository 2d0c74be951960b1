"""Imports only go down the floors, and the core imports neither xDSL nor torch nor triton."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "unity_ir"

FLOORS = [
    {"errors", "messages", "budget"},
    {"interrupts"},
    {"tdl"},
    {"ops"},
    {"pcg"},
    {"machine", "rules"},
    {"cost"},
    {"simulate"},
    {"search", "models", "frontends"},
    {"dialects"},
    {"lowering"},
    {"passes"},
    {"universe"},
    {"tools"},
]
"""From the ground up."""

CORE = {name for floor in FLOORS[: FLOORS.index({"dialects"})] for name in floor}

ALLOWED = {"frontends": ("torch",)}
"""What a part below the dialects reads from outside all the same."""


def imports(path: Path) -> set[str]:
    """Every module a file imports, at the top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def floor(part: str) -> int:
    return next(i for i, parts in enumerate(FLOORS) if part in parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return
    for module in imports(path):
        root, _, rest = module.partition(".")
        if root == "unity_ir" and rest:
            part = rest.split(".")[0]
            assert part == own or floor(part) < floor(own), f"{path.name} imports {module}"
        if own in CORE and root not in ALLOWED.get(own, ()):
            assert root not in ("xdsl", "torch", "triton"), f"{path.name} imports {module}"
