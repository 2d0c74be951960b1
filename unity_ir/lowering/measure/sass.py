"""
Count the instructions of a kernel's innermost loop over matrix products, in the machine code (SASS) of an NVIDIA GPU.

Triton brings NVIDIA's disassembler, so no GPU is needed. The loop is the shortest way through the code from the first
matrix instruction back to itself: what a step of K takes, without what only the last step of a tile does.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MATRIX = ("HGMMA", "QGMMA", "HMMA")
"""Instructions of matrix units: of a group of four warps (`wgmma`), of 16 or 8 bits, and of a warp (`mma.sync`)."""
SELECTS = ("SEL", "FSEL")
COMPARES = ("ISETP", "FSETP")


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions of one step of the innermost loop with matrix instructions, of each thread."""

    instructions: int
    matrix: str
    """The matrix instruction: one of `MATRIX`."""
    selects: int
    """Choices between two values of a thread, such as those between what is loaded and 0 where a mask is."""
    compares: int
    """Comparisons of a thread's own values."""


_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_BRANCH = re.compile(r"\bBRA\b[^`]*`\((\.L_x_\d+)\)")


def loop_of(cubin: bytes) -> Loop | None:
    """Return the innermost loop with matrix instructions of a cubin's kernel; None if there is none."""
    knobs: Any = importlib.import_module("triton.knobs")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return loop_of_text(text)


def loop_of_text(text: str) -> Loop | None:
    """Return the innermost loop with matrix instructions of what `nvdisasm -c` prints; None if there is none."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.search(line):
            code.append(instruction[1])
    found = [loop for at in range(len(code)) if name_of(code[at]) in MATRIX for loop in [_around(code, labels, at)]]
    loops = [loop for loop in found if loop]
    if not loops:
        return None
    shortest = min(loops, key=len)
    names = [name_of(code[at]) for at in shortest]
    return Loop(
        len(names),
        next(name for name in MATRIX if name in names),
        sum(name in SELECTS for name in names),
        sum(name in COMPARES for name in names),
    )


def name_of(instruction: str) -> str:
    """Return the name of an instruction without its predicate and suffixes: of `@!P0 ISETP.GT.AND P1, ..`, `ISETP`."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].partition(".")[0]


def _around(code: Sequence[str], labels: Mapping[str, int], at: int) -> list[int]:
    """Return the shortest way from an instruction back to itself, by numbers of instructions; [] if there is none."""
    before: dict[int, int] = {}
    reached = [at]
    for here in reached:
        for there in _next(code, labels, here):
            if there == at:
                way = [here]
                while way[-1] != at:
                    way.append(before[way[-1]])
                return way
            if there not in before:
                before[there] = here
                reached.append(there)
    return []


def _next(code: Sequence[str], labels: Mapping[str, int], at: int) -> list[int]:
    """Return which instructions may follow one."""
    instruction = code[at]
    if name_of(instruction) in ("EXIT", "RET"):
        # With a predicate others go on.
        return [at + 1] if instruction.startswith("@") else []
    branch = _BRANCH.search(instruction)
    on = [at + 1] if at + 1 < len(code) and (branch is None or instruction.startswith("@")) else []
    return [*([labels[branch[1]]] if branch else []), *on]
