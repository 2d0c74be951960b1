"""
Show what `gpu_run.py` has measured, and keep it with its provenance.

    python bench/gpu_show.py out/gpu/gpu.jsonl [--commit HASH] [--note TEXT] [--json bench/results/gpu.json]

With `--json` the rows are added to those of the file, as one visit; of each profile the longest kernels are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MOST_KERNELS = 30


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of steps, the checks that failed, and how many passed."""
    about: dict[str, Any] = next((r for r in rows if r["part"] == "about"), {})
    console = Console(width=160)
    title = f"a training step in mixed precision on {about.get('device', 'no GPU')}, PyTorch {about.get('torch')}"
    table = Table(title=title, title_justify="left")
    for heading in ("model", "way", "ms", "host ms", "kernels ms", "launches", "compiled / this", "gradients off"):
        table.add_column(heading, justify="left" if heading in ("model", "way") else "right")
    steps = [r for r in rows if r["part"] == "step"]
    compiled = {r["model"]: r["ms"] for r in steps if r["way"] == "compiled" and "ms" in r}
    for row in steps:
        of = [r for r in rows if (r.get("model"), r.get("way")) == (row["model"], row["way"])]
        kernels: list[Any] = next((r["kernels"] for r in of if r["part"] == "kernels"), [])
        off = next((f"{r['gradients off']:.4f}" for r in of if r["part"] == "gradients" and "gradients off" in r), "")
        if "failed" in row:
            table.add_row(row["model"], row["way"], "failed")
            continue
        ratio = f"{compiled[row['model']] / row['ms']:.2f}" if row["model"] in compiled else ""
        busy = f"{sum(k[2] for k in kernels) / 1e3:.2f}" if kernels else ""
        launches = f"{sum(k[1] for k in kernels):.0f}" if kernels else ""
        cells = [f"{row['ms']:.2f}", f"{row['host ms']:.2f}", busy, launches, ratio, off]
        table.add_row(row["model"], row["way"], *cells)
    console.print(table)
    checks = [r for r in rows if r["part"] == "check"]
    passed = [r for r in checks if r["check"].startswith("check passed")]
    console.print(f"{len(passed)} of {len(checks)} small programs equal PyTorch, by --check")
    for row in checks:
        if row not in passed:
            console.print(f"{row['program']}: {(row['check'].splitlines() or ['nothing said'])[-1][:140]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[1])
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", help="of the programs")
    parser.add_argument("--note")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = read(options.file)
    show(rows)
    if options.json is not None:
        visits = json.loads(options.json.read_text()) if options.json.exists() else []
        for row in rows:
            if row["part"] == "kernels":
                row["in all"] = [sum(k[i] for k in row["kernels"]) for i in (1, 2)]
                row["kernels"] = [[n[:100], c, round(t, 1)] for n, c, t in row["kernels"][:MOST_KERNELS]]
            if "failed" in row:
                row["failed"] = row["failed"][-300:]
            if row["part"] == "check":
                row["check"] = row["check"][-200:]
        kept = [row for row in rows if row["part"] != "warm"]
        visits.append({"commit": options.commit, "note": options.note, "rows": kept})
        options.json.write_text("[\n" + ",\n".join(json.dumps(v) for v in visits) + "\n]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
