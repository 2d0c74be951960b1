"""
Compare joint with context and expert parallelism by hand, of every degree.

    python bench/by_hand_parts.py [--rows NUMBER ..] [--json FILE]

bf16 mixed precision, AdamW, recompute and pieces of the loss where a plan does not fit without. By hand: for long
samples, context parallelism of each degree, gathered and around a ring, the others of the batch divided, weights as
ZeRO-3; for mixtures, experts divided by each degree, with ZeRO-2 and ZeRO-3, and of experts without a capacity also
with rows exchanged. Seconds are those of a step as emitted; joint's are those of `bench/large.py`, as they are in its
results. Two processes try plans; with `--rows`, other rows of the file stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.run import run
from unity_ir.simulate.report import as_emitted

RESULTS = Path(__file__).parent / "results"

ROWS = (
    ("llama3_8b,batch=8,sequence=32768", "dgx-h100:1"),
    ("llama3_8b,batch=1,sequence=131072", "dgx-h100:1"),
    ("llama3_8b,batch=8,sequence=131072", "dgx-h100:8"),
    ("llama3_8b,batch=2,sequence=262144", "dgx-h100:2"),
    ("llama3_8b,batch=8,sequence=262144", "dgx-h100:8"),
    ("mixtral_8x7b,batch=64", "dgx-h100:8"),
    ("qwen3_moe,batch=16", "dgx-h100:2"),
    ("deepseek_v3,batch=256,capacity=100", "dgx-h100:32"),
    ("deepseek_v3,batch=256", "dgx-h100:32"),
    ("deepseek_v3,batch=1024,capacity=100", "dgx-h100:128"),
    ("deepseek_v3,batch=1024", "dgx-h100:128"),
)
"""Model and machine."""


OPTIONS = ("", ",stages=auto")
"""How the rows of joint are named in the results of `bench/large.py`."""


@dataclass(frozen=True)
class Tried:
    """A plan by hand: its degrees, its seconds as emitted, or why there is none."""

    degrees: str
    step: float | None
    why: str
    processor: float


def degrees(model: str, devices: int) -> list[dict[str, Any]]:
    """Return the degrees to try for a model."""
    powers = [2**k for k in range(devices.bit_length())]
    if "sequence=" in model:
        rings = [{"cp": cp, "zero": 3, "stripes": True, "ring": ring} for cp in powers[1:] for ring in (False, True)]
        return [{"zero": 3}, *rings]
    experts = [ep for ep in powers if ep <= 64]
    exchanges = (False,) if "capacity" in model else (False, True)
    return [
        {"ep": ep, "zero": zero, **({"exchange": True} if exchange else {})}
        for ep in experts
        for zero in (2, 3)
        for exchange in exchanges
        if not exchange or ep > 1
    ]


def tried(model: str, place: str, options: dict[str, Any]) -> Tried:
    """Make a plan by hand and simulate it."""
    start = time.process_time()
    graph, machine, optimizer = mixed_precision(from_text(model), "bf16"), load(place), Optimizer("adamw")
    step, why = None, ""
    try:
        plan = run(graph, machine, "degrees", optimizer, options, recompute="auto", loss_pieces="auto").graph
        step = as_emitted(plan, machine, optimizer)[0]
    except UnityError as error:
        why = str(error)
    text = ",".join(f"{key}={value}" for key, value in options.items())
    return Tried(text, step, why, time.process_time() - start)


def joint_step(model: str, place: str) -> float | None:
    """Return the seconds of joint's plan in the results of `bench/large.py`; None if it is not there."""
    for name in ("large.json", "large_long.json"):
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            if (row["model"], row["machine"], row["search"]) in ((model, place, f"joint{more}") for more in OPTIONS):
                return row["step"]
    return None


def main() -> None:
    """Print, for each row asked for, joint's seconds and those of the fastest plan by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", choices=range(len(ROWS)), default=range(len(ROWS)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table("model", "machine", "joint, s", "by hand, s", "degrees", "tried", "fit")
    out: list[dict[str, Any]] = []
    kept = json.loads(args.json.read_text())["rows"] if args.json is not None and args.json.exists() else []
    with ProcessPoolExecutor(2) as pool:
        for number in args.rows:
            model, place = ROWS[number]
            futures = [pool.submit(tried, model, place, each) for each in degrees(model, load(place).devices)]
            found = [future.result() for future in futures]
            fit = sorted((each for each in found if each.step is not None), key=lambda each: each.step or 0.0)
            joint = joint_step(model, place)
            best = (f"{fit[0].step:.3f}", fit[0].degrees) if fit else ("none fits", "")
            table.add_row(model, place, f"{joint:.3f}" if joint else "", *best, str(len(found)), str(len(fit)))
            out.append({"model": model, "machine": place, "joint": joint, "by_hand": [asdict(each) for each in found]})
            Console(width=170).print(table)
            if args.json is not None:
                on = {"processor": processor(), "python": platform.python_version()}
                rows = {(row["model"], row["machine"]): row for row in [*kept, *out]}
                args.json.write_text(json.dumps({"machine": on, "rows": [*rows.values()]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
