"""
Emitted programs on a real GPU: `--check` over NCCL for 1, 2 and 4 ranks, and the time of a step.

    make gpu                      or: python bench/gpu.py [--json FILE]

Several ranks share one GPU where there are fewer GPUs than ranks; their times then say nothing about a cluster, and the
table says so. Without a GPU the script says that and exits with code 2.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

PROGRAMS = [
    ("mnist_mlp", 1, []),
    ("mnist_mlp", 2, ["--search", "--machine=2gpu"]),
    ("mnist_mlp", 4, ["--search=data-parallel", "--machine=box:4"]),
    ("digits_2x2", 4, []),
]
"""Example, ranks, and how its plan is made."""


def emit(example: str, ranks: int, search: list[str], folder: Path, matmul: str) -> Path:
    program = folder / f"{example}_{ranks}_{matmul}.py"
    command = [str(BIN / "unity-opt"), str(ROOT / "examples" / f"{example}.pcg"), *search]
    subprocess.run([*command, "-t", f'triton{{matmul="{matmul}"}}', "-o", str(program)], check=True)
    return program


def torchrun(program: Path, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), str(program), "--backend", "nccl"]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=300)


def step_seconds(program: Path, ranks: int, steps: int) -> float | None:
    """Seconds of a step: what `steps` more of them add to a run."""
    seconds: list[float] = []
    for count in (steps, 2 * steps):
        start = time.perf_counter()
        if torchrun(program, ranks, "--steps", str(count)).returncode:
            return None
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu.py: no GPU is visible to PyTorch here; nothing was run", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    rows: list[dict[str, object]] = []
    for example, ranks, search in PROGRAMS:
        for matmul in ("triton", "torch"):
            program = emit(example, ranks, search, options.out, matmul)
            checked = torchrun(program, ranks, "--check")
            found = re.search(r"check passed.*", checked.stdout)
            verdict = found[0] if found else (checked.stdout + checked.stderr).strip()[-300:]
            seconds = step_seconds(program, ranks, options.steps) if found else None
            shared = ranks > torch.cuda.device_count()
            rows.append(
                {
                    "example": example,
                    "ranks": ranks,
                    "matmul": matmul,
                    "ranks share a GPU": shared,
                    "check": verdict,
                    "step_seconds": seconds,
                }
            )
    table = Table(title=f"{device}, {versions}, {platform.node()}")
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(f"{v:.6f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)
    if options.json:
        report = {"device": device, "versions": versions, "python": platform.python_version(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(str(row["check"]).startswith("check passed") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
