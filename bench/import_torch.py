"""
Measure the seconds to import a 24-layer BERT from PyTorch: torch.export, and our own conversion.

    python bench/import_torch.py [--layers 24] [--json FILE]

The model is transformers' BertForPreTraining at the sizes of BERT-Large with random weights; building it is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertForPreTraining

from unity_ir.frontends.torch.export import export
from unity_ir.frontends.torch.imported import convert

LIMIT = 15.0
"""Aim for the seconds of importing 24 layers, torch.export included."""


def machine() -> str:
    """Return the processor, and how many of its cores this process may use."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        intermediate_size=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module = BertForPreTraining(config)
    tokens = torch.randint(0, config.vocab_size, (8, 512))
    inputs = {
        "input_ids": tokens,
        "token_type_ids": torch.zeros_like(tokens),
        "labels": tokens,
        "next_sentence_label": torch.zeros(8, dtype=torch.int64),
    }
    rows: list[dict[str, float]] = []
    for _ in range(options.runs):
        start = time.perf_counter()
        exported = export(module, inputs, None)
        middle = time.perf_counter()
        imported = convert(exported, "bert")
        end = time.perf_counter()
        rows.append({"export": middle - start, "conversion": end - middle, "total": end - start})
    nodes = sum(n.is_compute for n in imported.graph.nodes())
    parameters = sum(w.numel() for w in imported.weights.values())
    where = f"{machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    table = Table(title=f"BERT of {options.layers} layers, {parameters:,} parameters, {nodes} operators", caption=where)
    for heading in ("run", "torch.export (s)", "conversion (s)", "total (s)"):
        table.add_column(heading)
    for i, row in enumerate(rows):
        table.add_row(str(i), *(f"{v:.2f}" for v in row.values()))
    Console(width=120).print(table)
    if options.json:
        report = {"machine": where, "layers": options.layers, "parameters": parameters, "operators": nodes}
        options.json.write_text(json.dumps({**report, "runs": rows}, indent=2) + "\n")
    slowest = max(row["total"] for row in rows)
    print(f"slowest {slowest:.2f} s, limit {LIMIT:g} s")
    return 0 if slowest <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
